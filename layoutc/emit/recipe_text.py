"""The text of a recipe's files, from its plan. Templates only arrange it."""

from __future__ import annotations

import keyword
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from layoutc.emit.code import Lines, commented, indented
from layoutc.emit.hooks_text import gather_lines, hook_docs
from layoutc.emit.products_text import products_lines
from layoutc.emit.reference_text import ReferenceText, join_record, record_facts, reference_text
from layoutc.emit.size_text import Sizes, block_text, in_bytes, start_of
from layoutc.layout.layout import Buffer, Layout, Plane, Quantization, Source, codes_per_group, is_swizzled
from layoutc.layout.swizzles import canonical
from layoutc.plan.plan import Plan
from layoutc.spec.schema import LANGUAGE

RUNTIME_INTERFACE = 16
EXPORTED_FUNCTIONS = ("dequantize_reference", "quantize", "quantize_buffers", "quantize_reference")


@dataclass(frozen=True)
class PlaneText:
    """A stored plane: lines for its sizes and dtype, the line that makes it an attribute, and how it is cut."""

    name: str
    facts: Lines
    attribute: Lines
    cut: str


@dataclass(frozen=True)
class RecipeText:
    """What the templates of a recipe print besides its plan and layout."""

    summary: str
    header: str
    tensor_class: str
    cast_class: str
    class_names: str
    exports: list[str]
    interface: int
    multiples_text: str
    shard_lines: list[str]
    row_text: str
    column_text: str
    attributes: list[str]
    cut_body: list[str]
    buffers: list[str]
    lay_out: list[str]
    gather_lines: list[str]
    is_state: bool
    has_kernels: bool
    bindings: list[str]
    facts: list[str]
    hook_docs: tuple[str, str]
    reference: ReferenceText


def recipe_text(plan: Plan, sha256: str, has_kernels: bool) -> RecipeText:
    """The text of one recipe's files. `sha256`: the spec file's."""
    layout, sizes, reference = plan.layout, Sizes(plan.layout), reference_text(plan)
    planes = [_plane(plane, plan, sizes) for plane in layout.planes]
    is_state = layout.use != "weight"  # never cast on gather
    classes = [class_name(layout.name), cast_name(layout.name)][: 1 if is_state else 2]
    exported = sorted([*classes, *("Tensor", "CastTensor")[: len(classes)]])
    buffers = [text for name in layout.orientations for text in _buffers(name, layout, sizes)]
    bindings = [name for name in ("CONTAINERS", "FILES") if getattr(layout, name.lower())]
    facts = _facts(plan, sha256, planes)
    facts += ["level=level_of,"] if reference.level else []
    facts += [f"{name.lower()}={name}," for name in bindings] + (["made=made,"] if buffers else [])
    return RecipeText(
        summary=layout.summary.rstrip("."),
        header=header(layout.name, plan.layout_id),
        tensor_class=class_name(layout.name),
        cast_class=cast_name(layout.name),
        class_names=", ".join(sorted(classes)),
        exports=_filled(["LAYOUT", *exported, *EXPORTED_FUNCTIONS]),
        interface=RUNTIME_INTERFACE,
        multiples_text=_multiples(layout),
        shard_lines=_shard_lines(plan),
        row_text="any" if plan.block_rows == 1 else f"multiples of {plan.block_rows}",
        column_text="any" if plan.column_multiple == 1 else f"multiples of {plan.column_multiple}",
        attributes=[
            line for plane in planes if plane.name != "amax" for line in plane.attribute
        ],  # Tensor.amax is a method
        cut_body=_cuts(plan, {plane.name: plane.cut for plane in planes}),
        buffers=buffers,
        lay_out=[line for name in layout.orientations for line in _laying_out(name, layout, sizes)],
        gather_lines=gather_lines(plan),
        is_state=is_state,
        has_kernels=has_kernels,
        bindings=bindings,
        facts=facts,
        hook_docs=hook_docs(plan),
        reference=reference,
    )


# Defaults of facts; other facts are empty by default.
_USUAL = {"language": 1, "shard_rows": 1, "multiple_m": 1, "multiple_k": 1, "extremes": True, "as_stored": None}


def _facts(plan: Plan, sha256: str, planes: list[PlaneText]) -> list[str]:
    """Arguments of the recipe's Layout, one per line, except defaults."""
    layout, forward, backward = plan.layout, *(_names(gather.planes) for gather in (plan.forward, plan.backward))
    first = {
        "name": layout.name,
        "summary": layout.summary.rstrip("."),
        "spec_sha256": sha256,
        "layout_id": plan.layout_id,
        "language": LANGUAGE,
        "shard_rows": plan.shard_rows,
        "shard_reason": plan.shard_reason,
        "column_multiple": plan.column_multiple,
        "multiple_m": layout.multiple_m,
        "multiple_k": layout.multiple_k,
        "blocks": {name: block_text(layout.source(name)) for name in layout.orientations},
        "bytes_per_element": float(plan.forward.bytes_per_element),
    }
    others = {
        "sources": {name: _planes_of(name, layout) for name in layout.orientations},
        "forward": forward,
        "backward": () if backward == forward else backward,
        "slots_differ": plan.slots_differ,
        "shares_amax": plan.shares_amax,
        "amax_columns": plan.amax_columns,
        "amax_of_matrices": layout.amax_of_matrices,
        "own_amax": plan.own_amax,
        "history": layout.history,
        "pick": layout.pick,
        "as_stored": {buffer.name: buffer.plane.name for buffer in layout.buffers if _is_stored(buffer)}
        | ({"amax": "amax"} if _has_amax(layout) else {}),
        "swizzled": tuple(buffer.name for buffer in layout.buffers if is_swizzled(layout, buffer)),
        "extremes": plan.extremes,
        "zeros": plan.zeros,
        "stochastic": layout.stochastic,
    }
    lines = ["stored={", *(line for plane in planes for line in plane.facts), "},"]
    lines = [*_stated(first), *lines, *_stated(others)]
    lines += [f'not_weights="{plan.not_weights}",'.replace(": ", ': "\n"')] if plan.not_weights else []
    return [*lines, *products_lines(plan), *([f'reduce="{layout.reduce}",'] if layout.reduce else [])]


def _stated(facts: Mapping[str, object]) -> list[str]:
    wanted = {name: value != _USUAL[name] if name in _USUAL else bool(value) for name, value in facts.items()}
    shown = {name: f'"{value}"' if isinstance(value, str) else repr(value) for name, value in facts.items()}
    return [f"{name}={shown[name]}," for name in facts if wanted[name]]


def _names(planes: Sequence[Plane]) -> tuple[str, ...]:
    return tuple(plane.name for plane in planes)


def class_name(name: str) -> str:
    """nvfp4 -> NVFP4Tensor, fp8_block -> FP8BlockTensor: words with a digit are acronyms."""
    words = [word.upper() if re.search(r"\d", word) else word.capitalize() for word in name.split("_") if word]
    joined = "".join(words) + "Tensor"
    free = joined.isidentifier() and not keyword.iskeyword(joined) and joined != "CastTensor"
    return joined if free else f"Recipe{joined}"


def cast_name(name: str) -> str:
    """nvfp4 -> NVFP4CastTensor."""
    return class_name(name).removesuffix("Tensor") + "CastTensor"


def _filled(names: list[str]) -> list[str]:
    """Quoted names, wrapped into full lines."""
    return textwrap.wrap(", ".join(f'"{name}"' for name in names) + ",", 116, break_long_words=False)


def header(name: str, layout_id: str) -> str:
    """The first line of each file; two for a long name. Their count is fixed: Triton's cache key has line numbers."""
    text = f"# Generated by layoutc from {name}.yaml. Layout id {layout_id}. Don't edit: run `layoutc build`."
    return text if len(text) <= 120 else text.replace(" Layout id", "\n# Layout id")


def _shard_lines(plan: Plan) -> list[str]:
    """Lines that say where shards may be cut, and what that costs."""
    if plan.shard_rows == 1:
        return [f"A cut between shards costs nothing at any row: {plan.shard_reason}."]
    lines = [
        f"Shards may be cut at any row. A cut at a multiple of {plan.shard_rows} rows is free: {plan.shard_reason}."
    ]
    if plan.block_rows > 1:
        cost = "both sides store and send its scales, and neither has buffers"
        return [*lines, f"Where a cut splits a block, {cost}."]
    return [*lines, "At other cuts, neither shard has buffers."]


# --------------------------------------------------------------------------------------------------- planes and buffers
def _plane(plane: Plane, plan: Plan, sizes: Sizes) -> PlaneText:
    history = plan.layout.history
    if plane.name == "amax":
        shape = f"({history or 1},)"
        doc = f"the last {history} amaxes, latest first" if history else _whole(plan)
    else:
        shape = sizes.plane(plane)
        source = next(s for s in plan.layout.sources if plane in s.planes)
        doc = _plane_doc(plane, source)
    columns = None if plane.per_k is None else Fraction(plane.per_k * 8, min(plane.bits, 8))
    entries = f", entries={history}" if plane.name == "amax" and history else ""
    facts = f"Plane({plane.per_m}, {str(columns).replace('/', ' / ')}, torch.{plane.dtype}{entries})"
    return PlaneText(
        name=plane.name,
        facts=commented(f'"{plane.name}": {facts},', f"{shape}: {doc}", 112),
        attribute=commented(f'{plane.name} = plane("{plane.name}")', f"{shape} {plane.dtype}: {doc}", 116),
        cut=f'planes["{plane.name}"]{_cut(plane, sizes)}',
    )


def _plane_doc(plane: Plane, source: Source) -> str:
    quantization = source.quantization
    if plane.kind == "scale":
        return "the scale" if plane.is_scalar else f"{quantization.scale.name} scale of each {block_text(source)} block"
    if plane.kind == "level":
        return "level of each row's matrix, in place of its amax"
    if plane.kind in ("super", "offset", "super_zero"):
        return _super_doc(plane, quantization)
    if plane.kind == "zero":
        assert quantization.zero is not None
        return f"{quantization.zero.name} zero point of each {block_text(source)} block"
    group = codes_per_group(plane.bits)
    if group == 1:
        return f"{quantization.element.name} codes"
    order = "low" if quantization.low_first else "high"
    nbytes = group * plane.bits // 8
    per = "per byte" if nbytes == 1 else f"per {nbytes} bytes"
    return f"{quantization.element.name} codes, {group} {per}, {order} bits first"


def _super_doc(plane: Plane, quantization: Quantization) -> str:
    """Describes a super-block's plane: the scale of its scales or zero points, or the mean of its scales."""
    size = f"{plane.per_m or 'all'}x{plane.per_k or 'all'}"
    if plane.kind == "offset":
        return f"mean of the scales of each {size} super-block"
    level = quantization.levels["scale" if plane.kind == "super" else "zero"]
    what = "scales" if plane.kind == "super" else "zero points"
    return f"{level.quantization.scale.name} scale of the {what} of each {size} super-block"


def _cut(plane: Plane, sizes: Sizes) -> str:
    if plane.is_scalar:
        return ""
    rows = ":" if plane.per_m is None else f"{start_of('r0', plane.per_m)}:{sizes.count('m', plane.per_m, 'r1')}"
    if plane.per_k is None:
        return f"[{rows}]"
    if plane.bits < 8:
        return f"[{rows}, {in_bytes('c0', plane.bits)} : {in_bytes('c1', plane.bits)}]"
    return f"[{rows}, {start_of('c0', plane.per_k)}:{sizes.count('k', plane.per_k, 'c1')}]"


def _cuts(plan: Plan, by_name: dict[str, str]) -> list[str]:
    """Lines that build a dict with the cut of each plane.

    One literal; or one branch per source if there are several, because a tensor may have one without the others.
    """
    if len(plan.layout.sources) == 1:
        return ["return {", *(f'    "{name}": {value},' for name, value in by_name.items()), "}"]
    shared = "".join(f'"{name}": {by_name.pop(name)}' for name in ("amax",) if name in by_name)
    lines = [f"views = {{{shared}}}"]
    for source in plan.layout.sources:
        lines.append(f'if "{source.data.name}" in planes:')
        lines += [f'    views["{name}"] = {by_name[name]}' for name in (plane.name for plane in source.planes)]
    return [*lines, "return views"]


def _buffers(orientation: str, layout: Layout, sizes: Sizes) -> list[str]:
    """Lines for the buffers of an orientation that differ from their plane in shape or dtype; records are last."""
    made = [
        (buffer.name, sizes.buffer(buffer), buffer.dtype, buffer_doc(buffer))
        for buffer in layout.buffers
        if buffer.orientation == orientation
        and not (_is_stored(buffer) and sizes.buffer(buffer) == sizes.plane(buffer.plane))
    ]
    made += [record_facts(one) for one in layout.records if one.orientation == orientation]
    each = (commented(f'"{name}": Facts({shape}, torch.{dtype}),', doc, 112) for name, shape, dtype, doc in made)
    return [line for lines in each for line in lines]


def _is_stored(buffer: Buffer) -> bool:
    """True for a buffer that equals its plane; a buffer without dims is one value."""
    return buffer.is_plane or not buffer.dims


def buffer_doc(buffer: Buffer) -> str:
    """A description of how a buffer is made."""
    plane = buffer.plane.name
    if buffer.is_plane:
        return "as stored" if buffer.name == plane else f"the plane {plane}"
    made = ", ".join(buffer.made_by)
    return made if buffer.name == plane else f"{plane} {made}"


def _lay_out(buffer: Buffer, sizes: Sizes) -> str:
    """The torch expression that makes a buffer from planes: the layout's chain as code."""
    plane, text = buffer.plane, f'planes["{buffer.plane.name}"]'
    packed = buffer.bits < 8
    options = f"{buffer.bits}, low_first={buffer.low_first}"
    if plane.bits < 8:
        text = f"num.unpack({text}, {options})"
    if len(buffer.dims) == 1:
        text = f"{text}.flatten()"
    if buffer.permutes:
        text = f"{text}.t()"
    for d, (dim, times) in enumerate(zip(buffer.dims, buffer.repeats, strict=True)):
        if times > 1:
            text = f"num.repeat({text}, {d}, {times}, {sizes.count(dim.axis, dim.per)})"
    if buffer.pads:
        text = f"num.pad_to({text}, {', '.join(sizes.padded(dim) for dim in buffer.dims)})"
    if buffer.swizzle:
        parts, order, joined, picks = canonical(buffer.swizzle)
        text = f"num.swizzle({text}, {parts}, {order}, {joined}{f', {picks}' if picks else ''})"
    if packed:
        text = f"num.pack({text}, {options})"
    elif not buffer.pads or buffer.swizzle:
        text = f"{text}.contiguous()"
    return f"num.in_words({text}, torch.{buffer.dtype})" if buffer.words else text


def _has_amax(layout: Layout) -> bool:
    """True if the whole weight's amax is a separate plane and buffer."""
    return bool(layout.tensor_amax or layout.history)


def _whole(plan: Plan) -> str:
    levels = any(source.quantization.definition.tensor for source in plan.layout.sources)
    return f"level of the whole {plan.noun}, in place of its amax" if levels else f"amax of the whole {plan.noun}"


def _planes_of(orientation: str, layout: Layout) -> tuple[str, ...]:
    """The planes from which an orientation's buffers are made."""
    return tuple(plane.name for plane in layout.source(orientation).planes) + ("amax",) * _has_amax(layout)


def _laying_out(name: str, layout: Layout, sizes: Sizes) -> list[str]:
    """Code that makes an orientation's buffers, except those that equal a plane."""
    lines: list[str] = []
    for buffer in layout.buffers:
        if buffer.orientation == name and not _is_stored(buffer):
            lines.append(f"# {buffer_doc(buffer)}")
            lines.append(f'buffers["{buffer.name}"] = {_lay_out(buffer, sizes)}')
    for record in layout.records:
        if record.orientation == name:
            lines += [f"# {', '.join(record.made_by)}", f'buffers["{record.name}"] = {join_record(record)}']
    return [f'if "{name}" in orientations:', *indented(lines)] if lines else []


def _multiples(layout: Layout) -> str:
    if layout.multiple_m == layout.multiple_k == 1:
        return "Both may have any size."
    sizes = {"m": layout.multiple_m, "k": layout.multiple_k}
    return ", and ".join(f"{name} must be a multiple of {size}" for name, size in sizes.items() if size > 1) + "."

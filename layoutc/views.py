"""What templates print: every text and decision of a plan, worked out here so that templates only place it."""

from __future__ import annotations

import keyword
import re
from typing import Any

from layoutc import rule_text
from layoutc.formats import Format, f32, thresholds
from layoutc.layout import Buffer, Dim, Layout, Plane, Quantization, Source, codes_per_group
from layoutc.plan import Gather, Plan

RUNTIME_INTERFACE = 1
EXPORTED_FUNCTIONS = ("dequantize_reference", "quantize", "quantize_reference")
View = dict[str, Any]


def recipe_view(plan: Plan, sha256: str) -> View:
    """Everything that the templates of one recipe use."""
    layout = plan.layout
    sizes = Sizes(layout)
    gathers = [_gather_view(gather) for gather in (plan.forward, plan.backward, plan.both)]
    planes = [_plane_view(plane, plan, sizes) for plane in layout.planes]
    return {
        "name": layout.name,
        "summary": layout.summary.rstrip("."),
        "header": header(layout.name, plan.layout_id),
        "tensor_class": class_name(layout.name),
        "interface": RUNTIME_INTERFACE,
        "spec_sha256": sha256,
        "layout_id": plan.layout_id,
        "multiple_m": layout.multiple_m,
        "multiple_k": layout.multiple_k,
        "multiples_text": _multiples(layout),
        "refused_text": _multiples(layout, refused=True),
        "shard_rows": plan.shard_rows,
        "shard_text": "any row" if plan.shard_rows == 1 else f"multiples of {plan.shard_rows} rows",
        "shard_reason": plan.shard_reason,
        "column_multiple": plan.column_multiple,
        "row_text": "any" if plan.shard_rows == 1 else f"multiples of {plan.shard_rows}",
        "column_text": "any" if plan.column_multiple == 1 else f"multiples of {plan.column_multiple}",
        "blocks": {o: _block(layout.source(o)) for o in layout.orientations},
        "bytes_per_element": float(plan.forward.bytes_per_element),
        "planes": planes,
        "exports": ["LAYOUT", *sorted(("Tensor", class_name(layout.name))), *EXPORTED_FUNCTIONS],
        "attributes": [plane for plane in planes if plane["name"] != "amax"],  # Tensor.amax is a method
        "cut_body": _each_plane(plan, planes, "planes", "cut", "views"),
        "join_body": _each_plane(plan, planes, "pieces[0]", "join", "joined"),
        "plane_names": ", ".join(plane.name for plane in layout.planes),
        "buffers": [_buffer_view(buffer, sizes) for buffer in layout.buffers] + _amax_buffer(layout),
        "buffer_names": ", ".join([b.name for b in layout.buffers] + [b["name"] for b in _amax_buffer(layout)]),
        "orientations": [_orientation_view(name, layout, sizes) for name in layout.orientations],
        "orientation_names": tuple(layout.orientations),
        "backward_orientation": layout.orientations[-1],
        "gathers": gathers,
        "gather_lines": _gather_lines(plan),
        "derivations": [f"{d.orientation}: {d.reason}." for d in plan.derivations],
        "dispatch_rules": [f"{rule.operators}: {rule.condition}." for rule in plan.dispatch],
        "shares_amax": plan.shares_amax,
        "history": layout.history,
        "pick": layout.pick,
        "has_amax": bool(_amax_buffer(layout)),
        "swizzle": _swizzle_view(layout),
        **_hooks(plan, sizes),
        **_numerics(plan),
    }


class Sizes:
    """Sizes as Python expressions in m and k, exact divisions where the accepted shapes guarantee them."""

    def __init__(self, layout: Layout) -> None:
        self._multiples = {"m": layout.multiple_m, "k": layout.multiple_k}

    def count(self, axis: str, per: int | None, size: str | None = None) -> str:
        """How many groups of `per` an axis has; `size` replaces the axis's name."""
        size = size or axis
        if per is None:
            return "1"
        if per == 1:
            return size
        return f"{size} // {per}" if self._multiples[axis] % per == 0 else f"cdiv({size}, {per})"

    def padded(self, dim: Dim) -> str:
        """The size of a buffer's dim."""
        count = self.count(dim.axis, dim.per)
        sure = self._multiples[dim.axis] // dim.per if self._multiples[dim.axis] % dim.per == 0 else 1
        return count if sure % dim.multiple == 0 else f"up({count}, {dim.multiple})"

    def width(self, axis: str, per: int | None, bits: int) -> str:
        """The last dim of a plane: bytes of packed codes, or values."""
        if bits >= 8:
            return self.count(axis, per)
        return in_bytes(axis, bits)


def in_bytes(size: str, bits: int) -> str:
    """Bytes of `size` codes of fewer than 8 bits."""
    codes = codes_per_group(bits)
    nbytes = codes * bits // 8
    return f"{size} // {codes}" if nbytes == 1 else f"{size} // {codes} * {nbytes}"


def class_name(name: str) -> str:
    """nvfp4 -> NVFP4Tensor, fp8_block -> FP8BlockTensor: words with a digit are acronyms."""
    words = [word.upper() if re.search(r"\d", word) else word.capitalize() for word in name.split("_") if word]
    joined = "".join(words) + "Tensor"
    return joined if joined.isidentifier() and not keyword.iskeyword(joined) else f"Recipe{joined}"


def header(name: str, layout_id: str) -> str:
    """Two lines, always: a kernel's start line is part of Triton's cache key."""
    return (
        f"# Generated by layoutc from {name}.yaml. Do not edit: change the spec and run `layoutc build`.\n"
        f"# Layout id {layout_id}: changes when stored bytes or arithmetic change, and only then."
    )


# --------------------------------------------------------------------------------------------------- planes and buffers
def _plane_view(plane: Plane, plan: Plan, sizes: Sizes) -> View:
    rows, columns = sizes.count("m", plane.per_m), sizes.width("k", plane.per_k, plane.bits)
    history = plan.layout.history
    if plane.name == "amax":
        shape, doc = (
            f"({history or 1},)",
            f"the last {history} amaxes, latest first" if history else "amax of the whole weight",
        )
    else:
        shape = "(1,)" if plane.is_scalar else f"({rows}, {columns})"
        source = next(s for s in plan.layout.sources if plane in (s.data, s.scale))
        doc = _plane_doc(plane, source)
    codes = 1 if plane.per_k is None else plane.per_k * 8 / min(plane.bits, 8)
    return {
        "name": plane.name,
        "shape_text": shape,
        "dtype": plane.dtype,
        "doc": doc,
        "per_m": plane.per_m,
        "per_k": None if plane.per_k is None else (int(codes) if codes == int(codes) else codes),
        "sentence": doc[0].upper() + doc[1:] if doc.startswith(("the", "amax", "last")) else doc,
        "cut": f'planes["{plane.name}"]{_cut(plane, sizes)}',
        "join": f'pieces[0]["{plane.name}"]'
        if plane.per_m is None
        else f'torch.cat([piece["{plane.name}"] for piece in pieces])',
    }


def _plane_doc(plane: Plane, source: Source) -> str:
    quantization = source.quantization
    if plane.kind == "scale":
        return f"{quantization.scale.name} scale of each {_block(source)} block" if not plane.is_scalar else "the scale"
    group = codes_per_group(plane.bits)
    if group == 1:
        return f"{quantization.element.name} codes"
    order = "low" if quantization.low_first else "high"
    return f"{quantization.element.name} codes, {group} in {group * plane.bits // 8} bytes, {order} bits first".replace(
        "1 bytes", "a byte"
    )


def _cut(plane: Plane, sizes: Sizes) -> str:
    if plane.is_scalar:
        return ""
    rows = ":" if plane.per_m is None else f"{sizes_start('r0', plane.per_m)}:{sizes.count('m', plane.per_m, 'r1')}"
    if plane.per_k is None:
        return f"[{rows}]"
    if plane.bits < 8:
        return f"[{rows}, {in_bytes('c0', plane.bits)} : {in_bytes('c1', plane.bits)}]"
    return f"[{rows}, {sizes_start('c0', plane.per_k)}:{sizes.count('k', plane.per_k, 'c1')}]"


def sizes_start(name: str, per: int) -> str:
    """The start of a cut, which is known to fall on a boundary."""
    return name if per == 1 else f"{name} // {per}"


def _each_plane(plan: Plan, planes: list[View], held: str, key: str, result: str) -> list[str]:
    """Lines that build a dict with an expression for each plane: one literal, or a branch for each source that a tensor
    may hold without the others."""
    by_name = {plane["name"]: plane[key] for plane in planes}
    if len(plan.layout.sources) == 1:
        return ["return {", *(f'    "{name}": {value},' for name, value in by_name.items()), "}"]
    shared = "".join(f'"{name}": {by_name.pop(name)}' for name in ("amax",) if name in by_name)
    lines = [f"{result} = {{{shared}}}"]
    for source in plan.layout.sources:
        lines.append(f'if "{source.data.name}" in {held}:')
        lines += [f'    {result}["{name}"] = {by_name[name]}' for name in (source.data.name, source.scale.name)]
    return [*lines, f"return {result}"]


def _buffer_view(buffer: Buffer, sizes: Sizes) -> View:
    dims = [sizes.padded(dim) for dim in buffer.dims]
    if dims and buffer.plane.bits < 8:
        dims[-1] = in_bytes(dims[-1], buffer.plane.bits)
    shape = f"({', '.join(dims)}{',' if len(dims) == 1 else ''})" if dims else "(1,)"
    return {
        "name": buffer.name,
        "shape_text": shape,
        "dtype": buffer.dtype,
        "doc": _buffer_doc(buffer),
        "expression": _lay_out(buffer, sizes),
        "comment": None if buffer.is_plane else _buffer_doc(buffer),
    }


def _buffer_doc(buffer: Buffer) -> str:
    plane = buffer.plane.name
    if buffer.is_plane:
        return "as stored" if buffer.name == plane else f"the plane {plane}"
    done = ["transposed"] if buffer.permutes else []
    for dim, times in zip(buffer.dims, buffer.repeats, strict=True):
        done += [f"{times} times along {dim.axis}"] if times > 1 else []
    if buffer.kind == "data" and codes_per_group(buffer.plane.bits) > 1:
        done.append(f"packed along {buffer.axes[-1]}")
    done += ["zero padded"] if buffer.pads else []
    return f"{plane} {', '.join(done)}"


def _lay_out(buffer: Buffer, sizes: Sizes) -> str:
    """The torch expression from planes to the buffer: the layout's chain, printed."""
    plane, text = buffer.plane, f'planes["{buffer.plane.name}"]'
    if buffer.is_plane:
        return text if len(buffer.dims) != 1 else f"{text}.flatten()"
    packed = buffer.kind == "data" and codes_per_group(plane.bits) > 1
    options = f"{plane.bits}, low_first={buffer.low_first}"
    if packed:
        text = f"unpack({text}, {options})"
    if len(buffer.dims) == 1:
        text = f"{text}.flatten()"
    if buffer.permutes:
        text = f"{text}.t()"
    for d, (dim, times) in enumerate(zip(buffer.dims, buffer.repeats, strict=True)):
        if times > 1:
            text = f"repeat({text}, {d}, {times}, {sizes.count(dim.axis, dim.per)})"
    if buffer.pads:
        text = f"pad_to({text}, {', '.join(sizes.padded(dim) for dim in buffer.dims)})"
    if packed:
        return f"pack({text}, {options})"
    return text if buffer.pads else f"{text}.contiguous()"


def _amax_buffer(layout: Layout) -> list[View]:
    if not (layout.tensor_amax or layout.history):
        return []
    doc = "latest first" if layout.history else "of the whole weight"
    return [{"name": "amax", "shape_text": f"({layout.history or 1},)", "dtype": "float32", "doc": doc}]


def _orientation_view(name: str, layout: Layout, sizes: Sizes) -> View:
    source = layout.source(name)
    names = (source.data.name, source.scale.name) + (("amax",) if _amax_buffer(layout) else ())
    buffers = [_buffer_view(buffer, sizes) for buffer in layout.buffers if buffer.orientation == name]
    return {"name": name, "planes": names, "buffers": buffers}


def _block(source: Source) -> str:
    block = source.quantization.block
    return f"{block.m or 'all'}x{block.k or 'all'}"


def _multiples(layout: Layout, *, refused: bool = False) -> str:
    if layout.multiple_m == layout.multiple_k == 1:
        return "of fewer than 2 dims" if refused else ", in any numbers"
    numbers = f"{layout.multiple_m} and {layout.multiple_k}"
    return f"whose m and k are not multiples of {numbers}" if refused else f", multiples of {numbers}"


# ---------------------------------------------------------------------------------------------------------------- hooks
def _gather_view(gather: Gather) -> View:
    return {"name": gather.name, "planes": tuple(plane.name for plane in gather.planes), "serves": gather.serves}


def _gather_lines(plan: Plan) -> list[str]:
    """What each pass moves, in words; one line where all passes move the same."""
    cost = f"{float(plan.forward.bytes_per_element):.6g} B/element"
    forward, backward = (_names(gather) for gather in (plan.forward, plan.backward))
    if not plan.passes_differ:
        return [f"Each pass gathers {forward}: {cost}."]
    both = f"{float(plan.both.bytes_per_element):.6g} B/element"
    return [
        f"Forward gathers {forward}: {cost}. Backward gathers {backward}: {float(plan.backward.bytes_per_element):.6g} "
        f"B/element. A weight that stays gathered after forward gets all of them at once: {both}."
    ]


def _names(gather: Gather) -> str:
    return " and ".join(plane.name for plane in gather.planes)


def _hooks(plan: Plan, sizes: Sizes) -> View:
    """The bodies of the two hooks: straight lines where all passes gather the same, else a branch for each pass."""
    shared = [f'"{plane.name}": metadata.shared["{plane.name}"],' for plane in plan.shared]
    pre_doc = "Both passes send the same planes."
    if plan.shared:
        names = ", ".join(plane.name for plane in plan.shared)
        pre_doc += f" {names}, equal on all shards, {'goes' if len(plan.shared) == 1 else 'go'} along as metadata."
    if not plan.passes_differ:
        pre = [f"{plane.kind} = {_wire(plane, sizes)}" for plane in plan.forward.planes]
        post = ["gathered = {", *(f"    {_receive(p, i, sizes)}" for i, p in enumerate(plan.forward.planes))]
        kinds = [plane.kind for plane in plan.forward.planes]
        sent = f"({', '.join(kinds)}{',' if len(kinds) == 1 else ''})"
        return {
            "pre_body": pre,
            "post_body": [*post, *(f"    {s}" for s in shared), "}"],
            "sent": sent,
            "pre_doc": pre_doc,
        }
    pre = ["sent: list[Tensor] = []"]
    post = ["gathered: dict[str, Tensor] = {" + " ".join(shared) + "}", "slot = 0"]
    for gather, other in ((plan.forward, "backward"), (plan.backward, "forward")):
        pre += [f'if gathering.which != "{other}":', "    sent += ["]
        pre += [f"        {_wire(plane, sizes)}," for plane in gather.planes] + ["    ]"]
        post += [f'if metadata.which != "{other}":']
        post += [f"    gathered[{_receive(p, i, sizes, 'slot')}" for i, p in enumerate(gather.planes)]
        post += [f"    slot += {len(gather.planes)}"]
    post = [line.replace('": ', '"] = ', 1).rstrip(",") if line.startswith("    gathered[") else line for line in post]
    if plan.slots_differ:
        raise NotImplementedError(f"{plan.layout.name}: passes whose planes differ in bytes")
    forward, backward = _names(plan.forward), _names(plan.backward)
    pre_doc = (
        f"Forward sends {forward}; backward {backward}, of the same bytes, since FSDP2 wants the same sizes in each "
        "pass; a weight that stays gathered sends all of them once."
    )
    return {"pre_body": pre, "post_body": post[:-1], "sent": "tuple(sent)", "pre_doc": pre_doc}


def _wire(plane: Plane, sizes: Sizes) -> str:
    return f'fsdp.wire(stored["{plane.name}"], {sizes.count("m", plane.per_m, "rows")})'


def _receive(plane: Plane, index: int, sizes: Sizes, base: str = "") -> str:
    position = f"{base} + {index}" if base and index else base or str(index)
    text = f"received[{position}][:{sizes.count('m', plane.per_m)}]"
    typed = f"{text}.view(torch.{plane.dtype})" if plane.dtype != "uint8" else text
    return f'"{plane.name}": {typed},'


# ------------------------------------------------------------------------------------------------------------- numerics
def _numerics(plan: Plan) -> View:
    """Codecs, the scale rule and the bodies of the references."""
    layout = plan.layout
    first = layout.sources[0].quantization
    used = frozenset().union(*(rule_text.uses(source.quantization) for source in layout.sources))
    needs_input_max = "input_max" in used
    arguments = "amax: Tensor" + (", tensor_amax: Tensor" if "tensor_amax" in used else "")
    arguments += ", input_max: float" if needs_input_max else ""
    prologue = ["m, k = x.shape"] if any(not s.scale.is_scalar for s in layout.sources) else []
    prologue += ["input_max = torch.finfo(x.dtype).max"] if needs_input_max else []
    prologue += ["x = x.float()"]
    shared = None
    if plan.shares_amax:
        shared = {"expression": "tensor_amax(x)", "doc": "the amax of the whole weight, shape (1,)"}
        prologue += ["if amax is None:", "    amax = tensor_amax(x)"]
    amax_doc = (
        "amax: (1,) fp32, the largest magnitude of the whole weight; taken from x when not given."
        if plan.shares_amax
        else "amax must be None: no scale depends on anything outside its block."
    )
    quantize_doc = (
        "amax: (1,) fp32, where it is known; else that of x, the largest over `group` where one is given."
        if plan.shares_amax
        else "`amax` must be None, and `group` changes nothing: no scale depends on other shards."
    )
    if layout.history:
        amax_doc = "amax: (1,) fp32, the one that decides the scale; that of x when not given."
        quantize_doc += " The scale follows the history of `out`; the new amax is put in front of it."
    return {
        "element": _codec(first.element, "ELEMENT", "nearest"),
        "scale": {**_codec(first.scale, "SCALE", first.rounding), "coded": not first.scale.is_f32},
        "rule": {
            "arguments": arguments,
            "summary": first.definition.summary[0].upper() + first.definition.summary[1:],
            "steps": rule_text.steps(first),
            "decode_text": first.definition.decode,
        },
        "constants": _constants(first, used),
        "sources": [_source_view(source, layout, used) for source in layout.sources],
        "quantize": {"prologue": prologue},
        "dequantize": {"body": _dequantize(layout)},
        "amax_doc": amax_doc,
        "quantize_doc": quantize_doc,
        "shared_amax": shared,
    }


def _codec(fmt: Format, prefix: str, rounding: str) -> View:
    """How codes of a format are made and read: through torch's dtype, or through tables of thresholds and values."""
    largest = f"{fmt.max:.17g}"
    view: View = {
        "name": fmt.name,
        "max": largest,
        "rounding": f"rounded {rounding}" + (", ties to even" if rounding == "nearest" else ""),
    }
    if fmt.is_f32:
        return view
    # A format without NaN saturates: the largest magnitude, positive, is as far from a silent number as it has.
    view["nan_text"] = f"0x{_nan_code(fmt):02x}"
    if fmt.torch and rounding == "nearest":
        view["encode"] = f"cast_to_codes(x, torch.{fmt.torch}, {prefix}_MAX, {prefix}_NAN)"
        view["decode"] = f"cast_from_codes(codes, torch.{fmt.torch})"
        return view
    sign_bit = fmt.exponent + fmt.mantissa if fmt.sign else None
    view["encode"] = f"to_codes(x, {prefix}_STEPS, {sign_bit}, {prefix}_NAN)"
    view["decode"] = f"from_codes(codes, {prefix}_VALUES)"
    return view


def _nan_code(fmt: Format) -> int:
    return fmt.nan[0] if fmt.nan else len(fmt.magnitudes) - 1


def _constants(quantization: Quantization, used: frozenset[str]) -> list[View]:
    element, scale, parameters = quantization.element, quantization.scale, dict(quantization.parameters)
    found: list[View] = []

    def add(name: str, value: str, doc: str = "") -> None:
        found.append({"name": name, "value": value, "doc": doc})

    for fmt, prefix, rounding in ((element, "ELEMENT", "nearest"), (scale, "SCALE", quantization.rounding)):
        if fmt.is_f32:
            continue
        native = fmt.torch is not None and rounding == "nearest"
        if native or f"{prefix}_MAX" in used:
            add(f"{prefix}_MAX", repr(fmt.max))
        add(
            f"{prefix}_NAN",
            f"0x{_nan_code(fmt):02X}",
            "" if fmt.nan else "the format has no NaN: the largest magnitude",
        )
        if not native:
            add(f"{prefix}_STEPS", _table(thresholds(fmt, rounding), fmt), "|x| at or above: the next code")
            add(f"{prefix}_VALUES", _table([fmt.value(code) for code in range(2**fmt.bits)], fmt), "by code")
    if "INVERSE_ELEMENT_MAX" in used:
        add("INVERSE_ELEMENT_MAX", repr(f32(1 / element.max)), f"fp32(1 / {element.max:g})")
    if "INVERSE_RANGE" in used:
        add("INVERSE_RANGE", repr(f32(1 / (element.max * scale.max))), f"fp32(1 / ({element.max:g} * {scale.max:g}))")
    if "INVERSE_MARGIN" in used:
        add("INVERSE_MARGIN", repr(2.0 ** -float(parameters["margin"])), "2 to minus the margin")
    if "EPSILON" in used:
        add("EPSILON", repr(f32(float(parameters["epsilon"]))))
    return found


def _table(values: Any, fmt: Format) -> str:
    """A table of fp32 values. Powers of two are written as a formula, longer tables as the tuple of their values."""
    items = list(values)
    if len(items) > 32 and fmt.mantissa == 0 and not fmt.sign:
        if len(items) == 2**fmt.bits:
            return f'(*(2.0**e for e in range({-fmt.bias}, {len(fmt.magnitudes) - fmt.bias})), float("nan"))'
        step = "(1 + 2**-23) * " if items[1] != fmt.magnitudes[1] else ""
        if step and items[0] != step_value(fmt.magnitudes[0]):
            first = repr(items[0])
            rest = f"range({1 - fmt.bias}, {len(items) - fmt.bias})"
            return f"({first}, *({step}2.0**e for e in {rest}))"
    return "(" + ", ".join('float("nan")' if v != v else repr(v) for v in items) + ",)"


def step_value(value: float) -> float:
    """A normal fp32 power of two's successor."""
    return value * (1 + 2.0**-23)


def _source_view(source: Source, layout: Layout, used: frozenset[str]) -> View:
    block, data, scale = source.quantization.block, source.data.name, source.scale.name
    extra = (", amax" if "tensor_amax" in used else "") + (", input_max" if "input_max" in used else "")
    codes = "encode(x * multiplier)"
    if source.scale.is_scalar:
        lines = [f"scale, multiplier = scales(amax{extra})"]
    else:
        lines = [
            f"blocks = to_blocks(x, {block.m}, {block.k})",
            f"scale, multiplier = scales(block_amax(blocks){extra})",
        ]
        codes = "encode(from_blocks(blocks * multiplier[:, None, :, None], m, k))"
    if codes_per_group(source.data.bits) > 1:
        codes = f"pack({codes}, {source.data.bits}, low_first={source.quantization.low_first})"
    served = [orientation for orientation, name in layout.source_of if name == source.name]
    condition = " or ".join(f'"{orientation}" in orientations' for orientation in served)
    return {"condition": condition, "quantize": [*lines, f'planes["{data}"] = {codes}', f'planes["{scale}"] = scale']}


def _dequantize(layout: Layout) -> list[str]:
    lines: list[str] = []
    for source in layout.sources:
        served = [orientation for orientation, name in layout.source_of if name == source.name]
        block, quantization = source.quantization.block, source.quantization
        codes = f'planes["{source.data.name}"]'
        if codes_per_group(source.data.bits) > 1:
            codes = f"unpack({codes}, {source.data.bits}, low_first={quantization.low_first})"
        factor = rule_text.decode(quantization, f'planes["{source.scale.name}"]')
        body = [f"factor = {factor}", f"return decode({codes}) * per_element(factor, {block.m}, {block.k}, m, k)"]
        if len(layout.sources) == 1:
            return body
        test = f'orientation == "{served[0]}"' if len(served) == 1 else f"orientation in {tuple(served)}"
        lines += [f"if {test}:", *(f"    {line}" for line in body)]
    return [*lines, 'raise ValueError(f"no orientation {orientation}")']


def _swizzle_view(layout: Layout) -> View | None:
    swizzle = layout.swizzle
    if swizzle is None:
        return None
    sizes = dict(swizzle.sizes)
    names = [name for group in swizzle.groups for name in group]
    tiles = [swizzle.tile(0), swizzle.tile(1)]
    open_sizes = {swizzle.groups[0][0]: f"rows // {tiles[0]}", swizzle.groups[1][0]: f"columns // {tiles[1]}"}
    size = {name: str(sizes[name]) if name in sizes else open_sizes[name] for name in names}
    order = tuple(names.index(name) for name in swizzle.order)
    inverse = tuple(swizzle.order.index(name) for name in names)
    pattern = " ".join(f"({' '.join(group)})" for group in swizzle.groups) + f" -> {' '.join(swizzle.order)}"
    turned = [b.orientation for b in layout.buffers if b.kind == "scale" and b.axes[:1] != (_free(b.orientation),)]
    scale = 'buffers[f"{orientation}_scale"]'
    body = [f"return swizzle({scale})"]
    if turned:  # the buffer has the contraction axis first
        tests = " or ".join(f'orientation == "{name}"' for name in turned)
        body = [f"scale = {scale}", f"return swizzle(scale.t() if {tests} else scale)"]
    return {
        "pattern": pattern,
        "split": ", ".join(size[name] for name in names),
        "order": order,
        "ordered": ", ".join(size[name] for name in swizzle.order),
        "inverse": inverse,
        "body": body,
        "free_text": "m for rowwise, k for columnwise",
    }


def _free(orientation: str) -> str:
    """The axis that a product with this operand keeps."""
    return "m" if orientation == "rowwise" else "k"

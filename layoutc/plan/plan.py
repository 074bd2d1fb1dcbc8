"""The plan of a layout: which cuts need no halo, what each pass gathers, how orientations are derived, dispatch rules.

Pure functions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from math import lcm
from typing import Literal

from layoutc.layout.layout import Buffer, Layout, Level, Plane, Quantization, Record, Source, codes_per_group
from layoutc.layout.swizzles import canonical
from layoutc.plan.kernels import inputs_of
from layoutc.plan.products import Products, products_of
from layoutc.spec.formats import Format

PassName = Literal["forward", "backward", "both"]


@dataclass(frozen=True)
class Gather:
    """What one pass gathers: planes in the order they are sent, and the orientations that they serve.

    A plane whose values cover all rows is identical on all shards, so it is not gathered.
    """

    name: PassName
    planes: tuple[Plane, ...]
    serves: tuple[str, ...]

    @property
    def bytes_per_element(self) -> Fraction:
        """Bytes on the wire per element of a large weight."""
        return sum((_density(plane) for plane in self.planes), Fraction(0))


@dataclass(frozen=True)
class Derivation:
    """The source that an orientation's buffers are made from, without loss, and why."""

    orientation: str
    source: str
    reason: str


@dataclass(frozen=True)
class DispatchRule:
    """Operators that are exact on stored bytes, and the condition for it. of_all: the rule holds for all recipes."""

    operators: str
    condition: str
    of_all: bool = False


@dataclass(frozen=True)
class Plan:
    """Everything that emit/ prints for a recipe, except for its kernels."""

    layout: Layout
    layout_id: str
    shard_rows: int
    shard_reason: str
    column_multiple: int
    forward: Gather
    backward: Gather
    both: Gather
    derivations: tuple[Derivation, ...]
    dispatch: tuple[DispatchRule, ...]
    products: Products | None  # None: weights are dequantized and multiplied in the activations' precision

    @property
    def sharded(self) -> tuple[Plane, ...]:
        """The planes that are cut along with the weight's rows."""
        return tuple(plane for plane in self.layout.planes if plane.per_m is not None)

    @property
    def shared(self) -> tuple[Plane, ...]:
        """The planes that are the same on all shards."""
        return tuple(plane for plane in self.layout.planes if plane.per_m is None)

    @property
    def shares_amax(self) -> bool:
        """True if a scale depends on other shards' rows, so that shards must agree on an amax."""
        return bool(self.shared) or self.layout.amax_of_matrices

    @property
    def amax_columns(self) -> int | None:
        """Columns per value of the shared amax; None if one value covers the whole weight."""
        per_k = {source.scale.per_k for source in self.layout.sources if source.scale.per_m is None}
        return next(iter(per_k), None)

    @property
    def own_amax(self) -> tuple[str, ...]:
        """Orientations whose scales depend only on their blocks, in a recipe where others depend on a shared amax."""
        if not self.shares_amax:
            return ()
        own = {source.name for source in self.layout.sources if all(plane.per_m is not None for plane in source.planes)}
        own -= {source.name for source in self.layout.sources if inputs_of(source.quantization).tensor_amax}
        return tuple(name for name in self.layout.orientations if self.layout.source(name).name in own)

    @property
    def not_weights(self) -> str:
        """Completes "the recipe is ...": what it is for, and why not for weights; "" if weights can have it."""
        if self.layout.use != "weight":
            what = "the state of optimizers" if self.layout.use == "state" else "gradients that ranks send"
            return f"for {what}, not for weights"
        why = ""
        if self.layout.stochastic:
            why = "it rounds elements by random bits, so that a weight would be another one each time it is quantized"
        elif self.layout.transforms:
            why = "it transforms values, which only another operand with the same transform undoes"
        return f"for activations and gradients, not for weights: {why}" if why else ""

    @property
    def noun(self) -> str:
        """What messages call the input: "weight", or "matrix" if weights can't have the recipe."""
        return "matrix" if self.not_weights else "weight"

    @property
    def block_rows(self) -> int:
        """Cuts at multiples of this many rows split no value of any plane."""
        return block_rows(self.layout)

    @property
    def extremes(self) -> bool:
        """True if the minimum and maximum of each of a block's columns determine its scales.

        Rules that compare the errors of several candidates need every value. So do blocks of different heights, whose
        rows share some scales and not others.
        """
        shared = {plane.per_m or 1 for plane in self.layout.planes} - {1}
        quantizations = [source.quantization for source in self.layout.sources]
        tries = any(one.definition.candidates for one in quantizations)
        # If blocks are lower than their super-block, its rows have different scales.
        mixes = any((level.quantization.block.m or 0) > 1 for one in quantizations for level in one.levels.values())
        return not tries and not mixes and len(shared) <= 1

    @property
    def zeros(self) -> dict[str, tuple[int, ...]]:
        """Plane name -> the repeated bytes of a matrix of zeros whose scales are 0. Leaves out planes of zero bytes."""
        found: dict[str, tuple[int, ...]] = {}
        for source in self.layout.sources:
            element, zero = source.quantization.element, source.quantization.zero
            code = element.least_code
            if zero is not None and source.zero is not None:
                if not source.quantization.definition.zero_is_value:
                    code += round(zero.value(zero.least_code) * 2**element.fraction)
                found[source.zero.name] = (zero.least_code,)
            if source.quantization.scales is not None:
                found[source.scale.name] = (source.quantization.scale.least_code,)
            if source.level is not None:  # levels are never 0, since rules may divide by them
                found[source.level.name] = (1,)
            found[source.data.name] = _repeated(code, element.bits, source.quantization.low_first)
        return {name: pattern for name, pattern in found.items() if any(pattern)}

    @property
    def passes_differ(self) -> bool:
        """True if forward and backward gather different planes."""
        return self.forward.planes != self.backward.planes

    @property
    def slots_differ(self) -> bool:
        """True if, for some shape, the passes' planes differ in bytes, so that the smaller ones must be padded."""
        pairs = zip(self.forward.planes, self.backward.planes, strict=False)
        return len(self.forward.planes) != len(self.backward.planes) or any(
            (_density(a), _of_whole_rows(a)) != (_density(b), _of_whole_rows(b))
            or not (self._whole(a) and self._whole(b))
            for a, b in pairs
            if a != b
        )

    def _whole(self, plane: Plane) -> bool:
        """True if every accepted shape consists of whole values of the plane."""
        layout = self.layout
        return layout.multiple_m % (plane.per_m or 1) == 0 and layout.multiple_k % (plane.per_k or 1) == 0


def derive(layout: Layout, others: Mapping[str, Layout] | None = None) -> Plan:
    """Plans a layout. Raises nothing: every layout has a plan.

    others: the layouts of the recipes that it names for activations and gradients; without them, no products.
    """
    shard_rows = lcm(*(multiple for multiple, _ in _row_multiples(layout)))
    columns = lcm(*(plane.column_multiple for source in layout.sources for plane in source.planes))
    forward = _gather(layout, "forward", ("rowwise",))
    serves = ("columnwise",) if "columnwise" in layout.orientations else ("rowwise",)
    backward = _gather(layout, "backward", serves)
    return Plan(
        layout=layout,
        layout_id=layout_id(layout),
        shard_rows=shard_rows,
        shard_reason=_shard_reason(layout, shard_rows),
        column_multiple=columns,
        forward=forward,
        backward=backward,
        both=_gather(layout, "both", layout.orientations),
        derivations=tuple(_derivation(layout, orientation) for orientation in layout.orientations),
        dispatch=_dispatch(block_rows(layout), columns),
        products=None if others is None else products_of(layout, others),
    )


def _repeated(code: int, bits: int, low_first: bool) -> tuple[int, ...]:
    """The packed bytes of the shortest run of one code that fills whole bytes."""
    count = codes_per_group(bits)
    word = sum(code << (place * bits) for place in range(count))  # the same from either end
    return tuple(word.to_bytes(count * bits // 8, "little" if low_first else "big"))


def block_rows(layout: Layout) -> int:
    """The least common multiple of the rows per value over all planes; 1 if no two rows share a value."""
    return lcm(*(plane.per_m or 1 for plane in layout.planes))


def _gather(layout: Layout, name: PassName, wanted: tuple[str, ...]) -> Gather:
    """The fewest planes that serve the orientations in `wanted`."""
    planes: list[Plane] = []
    for orientation in wanted:
        source = layout.source(orientation)
        planes += [p for p in source.planes if p.per_m is not None and p not in planes]
    gathered = {source.name for source in layout.sources if source.data in planes}
    serves = tuple(orientation for orientation, source_name in layout.source_of if source_name in gathered)
    return Gather(name, tuple(planes), serves)


def _density(plane: Plane) -> Fraction:
    """Bytes per element of a large weight."""
    if plane.per_m is None or plane.per_k is None:
        return Fraction(0)
    return Fraction(plane.bits, 8 * plane.per_m * plane.per_k)


def _of_whole_rows(plane: Plane) -> Fraction:
    """Bytes per row of a plane whose values cover whole rows; 0 for other planes."""
    return Fraction(plane.bits, 8 * plane.per_m) if plane.per_m is not None and plane.per_k is None else Fraction(0)


def _row_multiples(layout: Layout) -> list[tuple[int, str]]:
    """(multiple, reason) of each constraint on cuts between rows: rows share a scale or a byte."""
    multiples = [
        (s.scale.row_multiple, f"one {s.name} scale covers {s.scale.row_multiple} rows") for s in layout.sources
    ]
    for plane in (s.super for s in layout.sources if s.super is not None):
        multiples.append((plane.row_multiple, f"one {plane.name} covers {plane.row_multiple} rows"))
    for buffer in layout.buffers:
        codes = codes_per_group(buffer.plane.bits)
        if buffer.kind == "data" and buffer.axes[-1] == "m" and codes > 1:
            multiples.append((codes, f"{codes} rows share bytes of {buffer.name}, which is packed along m"))
        multiples += _rows_of_tiles(buffer)
    return multiples


def _rows_of_tiles(buffer: Buffer) -> list[tuple[int, str]]:
    """The same for rows that share a swizzle's tile, a word or a byte, unless padding makes tiles whole."""
    if buffer.m_dim is None or not (buffer.swizzle or buffer.words or buffer.repacks):
        return []
    dim, multiple = buffer.dims[buffer.m_dim], buffer.multiples[buffer.m_dim]
    if dim.multiple % multiple == 0:
        return []
    rows = dim.per * multiple
    what = "tiles" if buffer.swizzle else f"words of {buffer.words} bits" if buffer.words else "bytes"
    return [(rows, f"{rows} rows share {what} of {buffer.name}")]


def _shard_reason(layout: Layout, shard_rows: int) -> str:
    if shard_rows == 1:
        return "no scale covers more than one row of a shard, and rows are whole bytes"
    multiples = [item for item in _row_multiples(layout) if item[0] > 1]
    largest = max(multiples, key=lambda item: item[0])
    if largest[0] == shard_rows:
        return largest[1]
    return "; ".join(dict.fromkeys(reason for _, reason in multiples))


def _derivation(layout: Layout, orientation: str) -> Derivation:
    source = layout.source(orientation)
    if source.name == orientation:
        reason = "quantized directly"
        other = next((s for s in layout.sources if s.name != orientation), None)
        if other is not None:
            reason = f"has its own codes: {_difference(source, other)}"
        return Derivation(orientation, source.name, reason)
    own = [buffer for buffer in layout.buffers if buffer.orientation == orientation]
    chain = [f"{buffer.kind} {', '.join(buffer.made_by) or 'as stored'}" for buffer in own]
    return Derivation(orientation, source.name, f"same codes and scales as {source.name}; {'; '.join(chain)}")


def _difference(a: Source, b: Source) -> str:
    if a.quantization.block != b.quantization.block:
        sizes = [f"{s.quantization.block.m or 'all'}x{s.quantization.block.k or 'all'} {s.name}" for s in (a, b)]
        return f"blocks are {sizes[0]}, {sizes[1]}"
    return f"{a.name} and {b.name} quantize differently"


def _dispatch(block: int, columns: int) -> tuple[DispatchRule, ...]:
    row_cut, joins = "cuts at any row", "pieces cut at any row"
    if block > 1:
        row_cut += f"; a piece that cuts a block of {block} rows takes no plain values"
        joins = f"pieces cut at multiples of {block} rows"
    column_cut = "any column" if columns == 1 else f"multiples of {columns} columns"
    return (
        DispatchRule("detach, alias, clone, to(device), pin_memory, record_stream, equal", "always", True),
        DispatchRule("view", "leading dims split, merged or flattened; the last dim kept, or all flattened", True),
        DispatchRule("t, transpose", "of a matrix", True),
        DispatchRule("split, chunk, slice, narrow, select on leading dims", row_cut),
        DispatchRule("split, chunk, slice, narrow on the last dim", column_cut),
        DispatchRule("cat on dim 0", joins),
        DispatchRule("cat on the last dim", f"pieces that end at {column_cut}"),
        DispatchRule("all-gather, broadcast, scatter, all-to-all of DTensors", "bytes, of shards cut at any row", True),
        DispatchRule("copy_", "from the same recipe, byte for byte; from a plain tensor, by quantizing", True),
    )


def layout_id(layout: Layout) -> str:
    """A short hash of everything that decides stored bytes or arithmetic, and of nothing else.

    Leaves out names of recipes and formats, summaries, accepted shapes and the GEMM's swizzle (never stored).
    """
    facts = {
        "sources": [
            {
                "quantization": _quantization_facts(source.quantization),
                "rule": _program(source.quantization),
                "planes": [[plane.kind, plane.per_m, plane.per_k, plane.bits] for plane in source.planes],
            }
            for source in layout.sources
        ],
        "buffers": [
            # Nothing for a buffer without swizzle and words, so that layouts without them keep their ids.
            [b.kind, b.orientation, b.plane.name, [asdict(d) for d in b.dims], b.low_first]
            + ([canonical(b.swizzle) if b.swizzle else None, b.words] if b.swizzle or b.words else [])
            for b in layout.buffers
        ],
        "tensor": [layout.tensor_amax, layout.history, layout.pick],
        **({"records": [_record_facts(record) for record in layout.records]} if layout.records else {}),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def _record_facts(record: Record) -> list[object]:
    slices = [[[p.plane.name, p.start, p.stop, p.low, p.bits] for p in bundle] for bundle in record.bundles]
    return [record.name, record.axis, record.size, slices]


def _program(quantization: Quantization) -> list[list[str]]:
    return [list(step) for step in quantization.definition.program(quantization.conditions)]


def _quantization_facts(quantization: Quantization) -> dict[str, object]:
    """Everything but the rule's program that decides codes and scales.

    Leaves out defaults, so that layouts keep their ids when the spec language gets new fields.
    """
    transform = quantization.transform
    defaults = {key: parameter.default for key, parameter in quantization.definition.parameters.items()}
    return {
        "element": _bits(quantization.element),
        "scale": _bits(quantization.scale),
        **({"zero": _bits(quantization.zero)} if quantization.zero else {}),
        **({"zero-is": zero_is} if (zero_is := quantization.definition.zero_is) != "element" else {}),
        "rounding": quantization.rounding,
        "parameters": [[key, value] for key, value in quantization.parameters if value != defaults[key]],
        "block": [quantization.block.m, quantization.block.k],
        "low_first": quantization.low_first,
        **({"round": "stochastic"} if quantization.stochastic else {}),
        **({"root": True} if quantization.root else {}),
        **({"transform": list(asdict(transform).values())} if transform else {}),
        **{f"{kind}s": _level_facts(level) for kind, level in quantization.levels.items()},
    }


def _level_facts(level: Level) -> dict[str, object]:
    """What decides how a level stores scales or zero points under super-block scales."""
    return {
        "of": _quantization_facts(level.quantization),
        "rule": _program(level.quantization),
        "covers": [level.covers.m, level.covers.k],
        **({"offset": "mean"} if level.centered else {}),
    }


def _bits(fmt: Format) -> dict[str, object]:
    """The fields that decide a format's values: all but its name and torch dtype."""
    return {f.name: getattr(fmt, f.name) for f in fields(fmt) if f.compare and getattr(fmt, f.name) != f.default}

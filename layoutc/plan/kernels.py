"""Plans a recipe's kernels: what they read and write, how they convert and store codes, what is fused, or why not.

Pure functions of a layout. emit/ prints these decisions and makes none itself.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from math import lcm
from typing import Literal

from layoutc.layout.layout import Block, Layout, Quantization, Source
from layoutc.plan import conversions
from layoutc.plan.moves import (
    CodeMove,
    Move,
    MoveTile,
    Padding,
    ScaleMove,
    SwizzleMove,
    move_tile,
    moves_of,
    padding_of,
    widest,
    word_of,
)
from layoutc.plan.tiles import Tile, buffer_tile, dequantize_tile, quantize_tile, spans_columns
from layoutc.plan.units import Units, lanes, steps, units_of
from layoutc.spec.rules import names

AmaxFrom = Literal["block", "columns", "rows", "tensor"]
ITEMSIZES = (2, 4)  # bytes of a value of x
_LARGEST_BLOCK = 16384  # the most elements of a block that one program can hold
_LARGEST_TILE = 65536  # the most elements of a tile that holds blocks of two sources
_MOST_PLANES = 6  # per launch; the same limit holds for buffers
_MOST_ROWS = 8  # per program that loops over whole rows
_WIDEST_MOVE = 256  # the most rows or columns of a lay-out tile


@dataclass(frozen=True)
class RuleInputs:
    """What a scale rule reads."""

    block_range: bool  # the block's minimum and maximum, instead of its amax
    tensor_amax: bool  # the amax of the whole weight
    input_max: bool  # the largest value of x's dtype


@dataclass(frozen=True)
class Nibbles:
    """4-bit codes, converted eight at a time through the card's conversion to an 8-bit format.

    in_blocks: a program has the amax and multiplier of each of its blocks, so it can clamp magnitudes in pairs.
    is_bounded: amax * multiplier rounds to at most the format's maximum, so nothing needs clamping. card_converts:
    cards of compute capability 10 convert to the 4-bit format directly.
    """

    in_blocks: bool
    is_bounded: bool
    card_converts: bool


@dataclass(frozen=True)
class SourceKernel:
    """How kernels write and read the planes of one source."""

    source: Source
    suffix: str  # of its functions' names
    serves: tuple[str, ...]  # the orientations that its planes serve
    amax_from: AmaxFrom
    units: Units | None  # that its blocks are cut into; None: block sizes are powers of two
    inputs: RuleInputs
    nibbles: Nibbles | None  # None: codes are stored one at a time, or in groups that fill bytes
    moves: tuple[Move, ...]  # the buffers that quantizing writes in the same launch

    @property
    def flag(self) -> str:
        """The kernels' parameter that says whether the source is used."""
        return self.source.name.upper()

    @property
    def transposed_into(self) -> str | None:
        """The buffer that quantizing writes transposed codes into, if any."""
        return next((move.buffer.name for move in self.moves if isinstance(move, CodeMove)), None)


@dataclass(frozen=True)
class QuantizeKernel:
    """The kernel that quantizes values into planes and, if `fused`, into buffers."""

    tiles: tuple[tuple[int, tuple[bool, ...], Tile], ...]  # (bytes per value of x, which sources are written, tile)
    buffer_tiles: tuple[tuple[int, tuple[bool, ...], Tile], ...]
    fused: bool  # one launch can quantize into the buffers that a GEMM reads
    batched: bool  # one launch can quantize many matrices


@dataclass(frozen=True)
class LayOutKernel:
    """The kernel that makes buffers from planes. Skips buffers that are unchanged planes."""

    moves: tuple[Move, ...]
    tile: MoveTile
    word: int  # rows and columns of codes moved at a time
    padding: tuple[Padding, Padding]

    @property
    def planes(self) -> tuple[str, ...]:
        """Names of the planes that the kernel reads, in order."""
        return tuple(dict.fromkeys(move.buffer.plane.name for move in self.moves))


@dataclass(frozen=True)
class NoKernels:
    """Stands for one missing kernel, or for all of a recipe's. The reference does their work on every device."""

    reason: str


@dataclass(frozen=True)
class Kernels:
    """All kernels of a recipe."""

    layout: Layout
    sources: tuple[SourceKernel, ...]
    quantize: QuantizeKernel | NoKernels
    dequantize_tiles: tuple[tuple[str, Tile], ...]  # by orientation
    lay_out: LayOutKernel | NoKernels | None  # None: every buffer is a plane


def plan_kernels(layout: Layout) -> Kernels | NoKernels:
    """Plans the kernels of a layout's recipe, or says why it has none."""
    if reason := gap(layout):
        return NoKernels(reason)
    moves = moves_of(layout)
    reason = no_quantizing(layout)
    quantize = NoKernels(reason) if reason else _quantize_kernel(layout, moves)
    fused_moves = moves if isinstance(quantize, QuantizeKernel) and quantize.fused else ()
    sources = tuple(_source_kernel(source, layout, fused_moves) for source in layout.sources)
    lay_out: LayOutKernel | NoKernels | None = None
    if reason := no_laying_out(layout):
        lay_out = NoKernels(reason)
    elif moves:
        lay_out = LayOutKernel(moves, move_tile(moves), word_of(moves), padding_of(moves))
    dequantize = tuple((name, dequantize_tile(layout.source(name))) for name in layout.orientations)
    return Kernels(layout, sources, quantize, dequantize, lay_out)


def _quantize_kernel(layout: Layout, moves: tuple[Move, ...]) -> QuantizeKernel:
    fused = _fuses(layout, moves)
    choices = [one for one in itertools.product((True, False), repeat=len(layout.sources)) if any(one)]
    if any((one.whole.m or 1) > _MOST_ROWS for one in layout.sources) and any(map(spans_columns, layout.sources)):
        # A program that loops over whole rows should have few rows, so that the grid has enough programs.
        choices = [one for one in choices if sum(one) == 1]
    chosen = [(size, one, tuple(itertools.compress(layout.sources, one))) for size in ITEMSIZES for one in choices]
    in_words = {one: all(_nibbles(source.quantization, layout) for source in written) for _, one, written in chosen}
    return QuantizeKernel(
        tiles=tuple((size, one, quantize_tile(written, size, in_words[one])) for size, one, written in chosen),
        buffer_tiles=tuple(
            (size, one, buffer_tile(written, size, in_words[one], moves)) for size, one, written in chosen if fused
        ),
        fused=fused,
        batched=not layout.stochastic,  # each matrix has a seed of its own
    )


def missing(layout: Layout) -> tuple[tuple[str, str], ...]:
    """Which of quantize, dequantize and lay out a recipe has no kernel for, and why. The reference does their work."""
    if reason := gap(layout):
        return tuple((what, reason) for what in ("quantize", "dequantize", "lay out"))
    lacking = (("quantize", no_quantizing(layout)), ("lay out", no_laying_out(layout)))
    return tuple((what, reason) for what, reason in lacking if reason)


def no_laying_out(layout: Layout) -> str | None:
    """Why no kernel lays out, so that the reference does; None if a kernel does, or nothing needs laying out."""
    if layout.records:
        return f"values of {layout.records[0].name} lie in records, whose bits are joined by torch"
    made = {move.buffer.name for move in moves_of(layout)}
    if len(made) > _MOST_PLANES:
        return f"a launch makes up to {_MOST_PLANES} buffers, and the recipe has {len(made)} that are no planes"
    return None


def no_quantizing(layout: Layout) -> str | None:
    """Why kernels dequantize and lay out, but do not quantize; None if they do."""
    if layout.amax_of_matrices:
        return "each row has the amax of its matrix, and a program is given one for all"
    for source in layout.sources:
        whole, block = source.whole, source.quantization.block
        if not source.quantization.levels:
            continue
        size = f"{whole.m or 'all'} x {whole.k or 'all'}"
        if not (whole.m and whole.k and block.m and block.k):
            return f"a program can't hold super-blocks of {size}, whose scales depend on one another"
        if units_of(whole) or units_of(block):
            return f"sizes of {source.name}'s super-blocks, {size}, are not powers of two"
    held = [source.whole for source in layout.sources if source.quantization.levels]
    rows, columns = (max([1, *((getattr(one, axis) or 1) for one in held)]) for axis in ("m", "k"))
    blocks = [source.quantization.block for source in layout.sources]
    rows, columns = lcm(rows, *(one.m or 1 for one in blocks)), lcm(columns, *(one.k or 1 for one in blocks))
    if held and rows * columns > _LARGEST_BLOCK:
        return f"a program holds up to {_LARGEST_BLOCK} elements, and super-blocks take {rows} x {columns}"
    return None


def suffixes_of(layout: Layout) -> dict[str, str]:
    """The suffix of each source's functions: empty if all sources can share them, else the source's name."""
    same = {
        replace(source.quantization, block=Block(None, None), low_first=True, transform=None)
        for source in layout.sources
    }
    return {source.name: "" if len(same) == 1 else f"_{source.name}" for source in layout.sources}


def arithmetics_of(layout: Layout) -> dict[str, Quantization]:
    """Function suffix -> quantization. Levels come before the quantizations that use them."""
    found: dict[str, Quantization] = {}
    for source in layout.sources:
        suffix = suffixes_of(layout)[source.name]
        for kind, level in source.quantization.own_levels.items():
            found[level_suffix(kind, suffix)] = level.quantization
        found[suffix] = source.quantization
    return found


def level_suffix(kind: str, suffix: str) -> str:
    """The suffix of the functions that quantize scales or zero points."""
    return f"_of_{kind}s{suffix}"


def inputs_of(quantization: Quantization) -> RuleInputs:
    """What the active steps of a quantization's rule read, including its decoding."""
    conditions = quantization.conditions
    read = frozenset().union(*(names(expression) for _, expression in quantization.definition.program(conditions)))
    input_max = "input_max" in read or ("overflow" in read and conditions.get("overflow") == "input-max")
    return RuleInputs("lowest" in read, "tensor_amax" in read, input_max)


def gap(layout: Layout) -> str | None:
    """Why a recipe has no kernels; None if it has some."""
    rows, columns = map(lanes, steps(layout.sources))
    if rows * columns > _LARGEST_TILE:
        return f"a program holds blocks of all sources, which would take {rows} x {columns}"
    if (span := widest(moves_of(layout))) > _WIDEST_MOVE:
        return f"a program lays out at most {_WIDEST_MOVE} rows or columns, and a scale covers {span}"
    if reason := next(filter(None, map(_source_gap, layout.sources)), None):
        return reason
    planes = sum(len(source.planes) for source in layout.sources)
    if planes > _MOST_PLANES:
        return f"a launch takes up to {_MOST_PLANES} planes, and the recipe has {planes}"
    in_units = any(units_of(source.quantization.block) for source in layout.sources)
    if in_units and rows * columns > _LARGEST_BLOCK:
        return (
            f"a program holds up to {_LARGEST_BLOCK} elements, and blocks of all sources take {rows} x {columns} lanes"
        )
    return None


def _source_gap(source: Source) -> str | None:
    """Why kernels can't serve a source; None if they can."""
    q = source.quantization
    if q.block.m and q.block.k and lanes(q.block.m) * lanes(q.block.k) > _LARGEST_BLOCK:
        size = f"{q.block.m} x {q.block.k}"
        size += f" in {lanes(q.block.m)} x {lanes(q.block.k)} lanes" if units_of(q.block) else ""
        return f"a program holds up to {_LARGEST_BLOCK} elements, and {source.name} has {size}"
    if q.definition.candidates and conversions.is_long(q.element):
        most = conversions.LARGEST_HELD
        return f"elements of several scales are compared with up to {most} values, and {q.element.name} has more"
    supers = [level.quantization.scale for level in q.levels.values()]
    for fmt in (q.element, q.scale, *([q.zero] if q.zero else []), *supers):
        if not fmt.is_f32 and conversions.decoding(fmt) is None:
            return f"no function of the kernels decodes {fmt.name}"
    return None


def _fuses(layout: Layout, moves: tuple[Move, ...]) -> bool:
    """Whether quantizing can write a GEMM's buffers in the same launch."""
    if layout.records or not moves:  # records are joined by torch
        return False
    for move in moves:
        plane = move.buffer.plane
        if isinstance(move, SwizzleMove) or (isinstance(move, CodeMove) and not move.in_words):
            return False
        if isinstance(move, ScaleMove) and not (plane.per_m and plane.per_k):
            return False
    for source in layout.sources:
        quantization, block = source.quantization, source.quantization.block
        if units_of(block) or (block.m is None) != (block.k is None):  # tiles have idle lanes, or hold no whole block
            return False
        if source.zero is not None or source.super is not None:
            return False
        if conversions.is_long(quantization.element) or quantization.definition.candidates:
            return False  # searching leaves no registers for transposing
    transposed = [move.buffer.plane.name for move in moves if isinstance(move, CodeMove)]
    return len(set(transposed)) == len(transposed)


def _source_kernel(source: Source, layout: Layout, moves: tuple[Move, ...]) -> SourceKernel:
    return SourceKernel(
        source=source,
        suffix=suffixes_of(layout)[source.name],
        serves=tuple(orientation for orientation, name in layout.source_of if name == source.name),
        amax_from=_amax_from(source.quantization.block),
        units=units_of(source.quantization.block),
        inputs=inputs_of(source.quantization),
        nibbles=_nibbles(source.quantization, layout),
        moves=tuple(move for move in moves if move.buffer.plane in source.planes),
    )


def _amax_from(block: Block) -> AmaxFrom:
    """What the amax is reduced over: a block inside the tile, or whole columns, whole rows, or the whole matrix."""
    if block.m is None:
        return "tensor" if block.k is None else "columns"
    return "rows" if block.k is None else "block"


def _nibbles(quantization: Quantization, layout: Layout) -> Nibbles | None:
    """How 4-bit codes are converted eight at a time; None for other formats, or if rows are not whole words."""
    fmt, block = quantization.element, quantization.block
    if fmt.bits != 4 or fmt.integer or not conversions.is_small(fmt) or fmt.nan or layout.multiple_k % 8:
        return None
    converts = conversions.encoding(fmt, "nearest").hardware is not None
    in_blocks = bool(block.m and block.k) and not quantization.divides
    return Nibbles(in_blocks, _is_bounded(quantization), converts)


def _is_bounded(quantization: Quantization) -> bool:
    """True if amax times the multiplier rounds to at most element_max, so that no element needs clamping.

    This holds if the scale is amax / element_max, rounded up to a power of two.
    """
    steps = quantization.definition.active_steps(quantization.conditions)
    divides = [step.expression for step in steps] == ["to_scale(amax * inverse_element_max)", "1 / from_scale(scale)"]
    return divides and quantization.scale.is_exponent and quantization.rounding == "up"

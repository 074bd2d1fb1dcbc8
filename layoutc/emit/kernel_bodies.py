"""The text of the tile functions, which quantize, dequantize and lay out one program's tile."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from layoutc.emit import rule_text
from layoutc.emit.code import Lines, call, indented
from layoutc.emit.kernel_reading import (
    Codebooks,
    blocks_of,
    codebooks_line,
    comment,
    dequantize_body,
    lay_out_body,
    named,
    scale_move,
    transformed,
)
from layoutc.layout.layout import Source, stream_of
from layoutc.plan.codebooks import codebooks_of, steps_of
from layoutc.plan.kernels import Kernels, LayOutKernel, QuantizeKernel, SourceKernel
from layoutc.plan.moves import ScaleMove


@dataclass(frozen=True)
class TileFunction:
    """A function of generated code that processes one tile."""

    name: str
    parameters: str
    doc: str
    body: Lines


def tile_functions(kernels: Kernels) -> tuple[TileFunction, ...]:
    """The tile functions of a recipe, as layoutc.runtime.triton.kernels calls them."""
    functions: list[TileFunction] = []
    if isinstance(kernels.quantize, QuantizeKernel):
        also = " and buffers" if kernels.quantize.fused else ""
        nbytes = ", ".join(f"{float(bytes_of(source)):.6g} ({source.name})" for source in kernels.layout.sources)
        functions.append(
            TileFunction(
                "quantize_tile",
                "tile, source, shared, planes, buffers, at, opts",
                f"Quantizes a tile of x into planes{also}. Bytes per element: {nbytes}.",
                _quantize_body(kernels, kernels.quantize),
            )
        )
    functions.append(
        TileFunction(
            "dequantize_tile",
            "planes, amax, at, opts",
            "Dequantizes a tile of the planes of one source to fp32.",
            dequantize_body(kernels),
        )
    )
    if isinstance(kernels.lay_out, LayOutKernel):
        functions.append(
            TileFunction(
                "lay_out_tile",
                "planes, buffers, at, opts",
                "Lays out a tile of planes into all buffers that differ from their planes.",
                lay_out_body(kernels, kernels.lay_out),
            )
        )
    return tuple(functions)


# ------------------------------------------------------------------------------------------------------------- quantize
def _quantize_body(kernels: Kernels, quantize: QuantizeKernel) -> Lines:
    layout = kernels.layout
    lines = named("planes", (plane.name for source in kernels.sources for plane in source.source.planes))
    if quantize.fused and isinstance(kernels.lay_out, LayOutKernel):
        lines += named("buffers", (f"to_{move.buffer.name}" for move in kernels.lay_out.moves))
        lines += ["SWIZZLE: tl.constexpr = swizzled_index if SWIZZLED else None"] if layout.swizzle else []
    codebooks = codebooks_of(layout)
    if any(book.steps is not None for book in codebooks.values()):
        lines.append(f"{codebooks_line(codebooks)}; None: the program holds steps")
    lines += _shared_lines(kernels)
    for source in kernels.sources:
        made = _quantize_source(source, kernels)
        lines += [f"if {source.flag}:", *indented(made)] if len(kernels.sources) > 1 else made
    return tuple(lines)


def _shared_lines(kernels: Kernels) -> list[str]:
    """Lines that name the inputs that all scales share."""
    lines = (
        ["tensor_amax = lt.shared_amax(shared[0])  # (1,) float32, or x's dtype; or its value"]
        if kernels.layout.tensor_amax
        else []
    )
    amaxes_from = {source.amax_from for source in kernels.sources}
    if "columns" in amaxes_from:
        lines.append("amax = shared[0]  # float32")
    elif "tensor" in amaxes_from:
        lines.append("amax = shared[0]  # (1,) float32, or x's dtype; or its value")
    if any(source.inputs.input_max for source in kernels.sources):
        lines.append("input_max = shared[1]  # the largest value of x's dtype")
    if kernels.layout.stochastic:
        lines.append("seed = tl.load(shared[2])  # (1,) int64")
    rows = {source.source.name: source for source in kernels.sources if source.amax_from == "rows"}
    for index, name in ((3, "rowwise"), (4, "columnwise")):
        if name in rows and rows[name].inputs.block_range:
            lines.append(f"{name}_range = shared[{index}]  # lowest, highest of whole rows: (m blocks of the tile, 1)")
        elif name in rows:
            lines.append(f"{name}_amax = shared[{index}]  # of whole rows: (m blocks of the tile, 1) float32")
    return lines


def _block(source: SourceKernel) -> tuple[str, str]:
    """Rows and columns of a block, or of a unit, in a tile; the tile's size along an axis that blocks span."""
    block = source.source.quantization.block
    m, k = source.units.sizes if source.units else (block.m, block.k)
    return str(m or "tile.shape[0]"), str(k or "tile.shape[1]")


def _tile(source: SourceKernel) -> str:
    """The name of the tile of values that a source quantizes."""
    q = source.source.quantization
    return "turned" if q.transform else "roots" if q.root else "tile"


def _to_units(entries: str, source: SourceKernel) -> str:
    """An expression that copies blocks' entries to their units; unchanged if blocks are not cut into units."""
    if source.units is None:
        return entries
    return call("lt.to_units", entries, "blocks", UNITS=str(source.units.counts))


def _quantize_source(source: SourceKernel, kernels: Kernels) -> Lines:
    """Lines from a tile of x to the planes and buffers of one source."""
    # A tile with idle lanes extends past the matrix, and contains blocks outside it.
    even = "False" if any(one.units for one in kernels.sources) else "EVEN"
    sized = any(one.units for one in kernels.sources if one.suffix == source.suffix)
    lines = [*_find_scales(source, even, sized), *_put_elements(source, codebooks_of(kernels.layout))]
    planes = source.source
    kinds: tuple[Literal["scale", "zero"], ...] = ("scale", "zero")
    for kind in kinds:
        level = planes.quantization.levels.get(kind)
        for place, plane in enumerate(planes.stored_for(kind)):
            value = kind if level is None else f"{kind}[{place}]"
            covers = {"BLOCK": f"({level.covers.m}, {level.covers.k})"} if level and place else blocks_of(source)
            lines.append(call("lt.store_blocks", plane.name, value, "at", "EVEN", **covers))
    for move in (one for one in source.moves if isinstance(one, ScaleMove)):
        lines += [comment(move), scale_move("lt.store_scales_expanded", "scale", move, ())]
    return tuple(lines)


def _find_scales(source: SourceKernel, even: str, sized: bool) -> Lines:
    """Lines that compute `scale`, `multiplier` or `divisor`, and the `scaled` tile.

    even: an expression that is true if a tile's blocks are inside the matrix. sized: block_error has a BLOCK argument.
    """
    q, suffix, (bm, bk) = source.source.quantization, source.suffix, _block(source)
    results, inputs = rule_text.results(q), source.inputs
    extra = [one.name for one in rule_text.shared_arguments(q)]
    extra = [rule_text.grown(name, q).strip("()") if name == "tensor_amax" else name for name in extra]
    if source.amax_from == "tensor":
        rule = call(f"scales{suffix}", "lt.shared_amax(amax)", *extra, "CVT_LEVEL")
        scaled = rule_text.scaled("lt.to_float(tile)", q, in_blocks=False, dialect=rule_text.TRITON)
        return (f"{results} = {rule}", f"scaled = {scaled}")
    units = source.units
    cut = f"  # units: {' x '.join(map(str, units.counts))} of them make up a block" if units else ""
    tile = _tile(source)
    values = "lt.to_float(tile)" if tile == "tile" else tile
    lines = [f"blocks = {call('lt.to_blocks', values, bm, bk)}{cut}", *_measure(source, bm, bk, even)]
    if q.root:
        lines.insert(0, f"{tile} = lt.root(lt.to_float(tile))")
    if q.transform:
        lines.insert(0, f"{tile} = {transformed('lt.hadamard', 'lt.to_float(tile)', q.transform)}")
    measured = ["lowest", "highest"] if inputs.block_range else ["block_amax"]
    if q.scales is not None and q.scales.centered:
        inside = call("lt.blocks_inside", "at", "tile.shape[0]", "tile.shape[1]", **blocks_of(source))
        lines.append(f"inside = {inside}")
        extra.append("inside")
    if q.definition.candidates:
        lines += _try_candidates(source, measured, extra, sized)
    else:
        lines.append(f"{results} = {call(f'scales{suffix}', *measured, *extra, 'CVT_LEVEL')}")
    if units is not None and source.nibbles is not None and source.nibbles.in_blocks:
        lines.append(f"block_amax = {_to_units('block_amax', source)}")
    if units is not None:
        lines.append(f"{rule_text.factor(q)} = {_to_units(rule_text.factor(q), source)}")
    shift = ""
    if q.zero is not None and units is not None:
        lines.append(f"shift = {_to_units(f'decode_{q.zeros_as}{suffix}(zero, CVT_LEVEL)', source)}")
        shift = "shift[:, None, :, None]"
    elif q.zero is not None:
        shift = f"decode_{q.zeros_as}{suffix}(zero, CVT_LEVEL)[:, None, :, None]"
    scaled = rule_text.shifted("blocks", q, shift, dialect=rule_text.TRITON)
    return (*lines, f"scaled = lt.from_blocks({scaled})")


def _measure(source: SourceKernel, bm: str, bk: str, even: str) -> list[str]:
    """Lines that compute, or read, what blocks' scales depend on: `block_amax`, or `lowest` and `highest`."""
    name, counts = source.source.name, {"UNITS": str(source.units.counts)} if source.units else {}
    at, block = ("at", "tile.shape[0]", "tile.shape[1]", even), blocks_of(source)
    if source.amax_from == "rows" and source.inputs.block_range:
        return [f"lowest, highest = {name}_range"]
    if source.inputs.block_range:
        lowest, highest = "lt.block_lowest(blocks)", "lt.block_highest(blocks)"
        if counts:
            lowest = call("lt.smallest_of_units", lowest, **counts)
            highest = call("lt.largest_of_units", highest, **counts)
        return [f"lowest = {lowest}", f"highest = {highest}"]
    if source.amax_from == "block":
        amax = call("lt.block_amax", _tile(source), bm, bk, "CVT_LEVEL")
        return [f"block_amax = {call('lt.largest_of_units', amax, **counts) if counts else amax}"]
    if source.amax_from == "rows":
        return [f"block_amax = {name}_amax"]
    return [f"block_amax = {call('lt.load_blocks', 'amax', *at, **block)}"]


def _try_candidates(source: SourceKernel, measured: list[str], extra: list[str], sized: bool) -> Lines:
    """Lines that choose the first scale with the least sum of errors."""
    q, suffix = source.source.quantization, source.suffix
    contracts_k = repr(source.source.name == "rowwise")
    first, *others = rule_text.candidates(q, suffix)

    def tried(value: str) -> str:
        return call(f"scales{suffix}", *measured, *extra, value, "CVT_LEVEL")

    def error(scale: str, multiplier: str) -> str:
        arguments = [_to_units(scale, source), _to_units(multiplier, source), *extra, contracts_k, "CVT_LEVEL"]
        block = blocks_of(source) if sized else {}
        return call(f"block_error{suffix}", "blocks", *arguments, **block)

    lines = [f"scale, multiplier = {tried(first)}", f"least = {error('scale', 'multiplier')}"]
    for index, value in enumerate(others):
        lines += [f"other, factor = {tried(value)}", f"error = {error('other', 'factor')}"]
        chosen = "tl.where(error < least, other, scale), tl.where(error < least, factor, multiplier)"
        lines.append(f"scale, multiplier = {chosen}")
        lines += ["least = tl.where(error < least, error, least)"] if index + 1 < len(others) else []
    return tuple(lines)


def _put_elements(source: SourceKernel, codebooks: Codebooks) -> Lines:
    """Lines that store the codes of the `scaled` tile."""
    data, q = source.source.data, source.source.quantization
    into = (data.name, f"to_{source.transposed_into}" if source.transposed_into else "None", "at", "EVEN", "CVT_LEVEL")
    encode = f"encode{source.suffix}"
    if q.stochastic:
        packing = {"BITS": data.bits, "LOW_FIRST": q.low_first} if data.bits < 8 else {}
        bits = call("lt.random_bits", "seed", "at", "tile.shape[0]", "tile.shape[1]", STREAM=stream_of(source.source))
        codes = f"{encode}(scaled, bits, CVT_LEVEL)"
        return (f"bits = {bits}", call("lt.store_codes", codes, *into, **packing))
    if source.nibbles is None:
        packing = {"BITS": data.bits, "LOW_FIRST": q.low_first} if data.bits < 8 else {}
        steps = "" if steps_of(q.element, codebooks) is None else "codebooks, "
        return (call("lt.store_codes", f"{encode}(scaled, {steps}CVT_LEVEL)", *into, **packing),)
    form = {"MANTISSA": q.element.mantissa, "BIAS": q.element.bias, "MAX": q.element.max, "LOW_FIRST": q.low_first}
    form["CARD_CONVERTS"] = source.nibbles.card_converts
    if not source.nibbles.in_blocks:
        return (call("lt.store_nibbles", "scaled", *into, ENCODE=encode, **form),)
    arguments = ("scaled", "source", _tile(source), "block_amax", "multiplier", *into)
    bounded = source.nibbles.is_bounded
    block = {"BLOCK": str(source.units.sizes)} if source.units else blocks_of(source)
    return (call("lt.store_fp4", *arguments, ENCODE=encode, **block, **form, BOUNDED=bounded),)


def bytes_of(source: Source) -> Fraction:
    """The bytes of a source's planes per element, for a large weight of whole blocks."""
    return sum((Fraction(p.bits, 8 * p.per_m * p.per_k) for p in source.planes if p.per_m and p.per_k), Fraction(0))

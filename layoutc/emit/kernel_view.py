"""What the templates print of kernels: codecs and scale rules in Triton, tiles, and which recipes have no kernels."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from math import gcd
from typing import Any

from layoutc.emit import rule_text
from layoutc.emit.move_view import is_fused, moves_view, source_moves, turns, widest
from layoutc.emit.numerics_view import constants_view, suffixes_of
from layoutc.layout.layout import ORIENTATIONS, Layout, Quantization, Source, codes_per_group
from layoutc.plan.plan import Plan
from layoutc.spec.formats import Format

View = dict[str, Any]

# Casts that the card does by itself, by torch dtype: Triton's dtype, and the code that the card gives a NaN.
_CASTS = {"float8_e4m3fn": ("tl.float8e4nv", 0x7F), "float8_e5m2": ("tl.float8e5", 0x7F)}
# Conversions of compute capability 10, by what the format is and how it is rounded.
_E2M1 = Format("", exponent=2, mantissa=1, bias=1)
_CONVERSIONS = {
    (_E2M1, "nearest"): "convert_to_e2m1",
    (Format("", exponent=2, mantissa=3, bias=1), "nearest"): "convert_to_e2m3",
    (Format("", exponent=3, mantissa=2, bias=3), "nearest"): "convert_to_e3m2",
    (Format("", sign=0, exponent=8, bias=127, subnormals=False, nan=(0xFF,)), "up"): "convert_up_to_e8m0",
}
_LARGEST_BLOCK = 16384  # elements that one program can hold
_LARGEST_TILE = 65536  # the same where blocks of two sources must fit into one tile, which they share
_WIDEST_MOVE = 256  # rows or columns of a tile that is laid out


def gap(plan: Plan) -> str | None:
    """Why a recipe has no kernels; None where it has. The reference serves it on every device."""
    blocks = [source.quantization.block for source in plan.layout.sources]
    rows, columns = max(block.m or 1 for block in blocks), max(block.k or 1 for block in blocks)
    if rows * columns > _LARGEST_TILE:
        return f"a program holds blocks of all sources, which would take {rows} x {columns}"
    if (span := widest(plan.layout)) > _WIDEST_MOVE:
        return f"a program lays out {_WIDEST_MOVE} rows or columns, and a scale stands for {span}"
    for source in plan.layout.sources:
        q = source.quantization
        sizes = [size for size in (q.block.m, q.block.k) if size is not None]
        if any(size & (size - 1) for size in sizes):
            return f"a program holds blocks of powers of two, and {source.name} has {q.block.m} x {q.block.k}"
        if len(sizes) == 2 and sizes[0] * sizes[1] > _LARGEST_BLOCK:
            return f"a program holds up to {_LARGEST_BLOCK} elements, and {source.name} has {q.block.m} x {q.block.k}"
        contracted = q.block.k if source.name == ORIENTATIONS[0] else q.block.m
        if q.definition.candidates and (contracted or 0) > 32:
            return f"errors are added up along 32 elements at most, and blocks of {source.name} have {contracted}"
        if q.definition.makes_zero and q.block.k is None:
            return "the range of a block of whole rows would need a pass of its own"
        for fmt in (q.element, q.scale):
            if not fmt.is_f32 and _decode(fmt, "X") is None:
                return f"codes of {fmt.name} have no short decoding"
    return None


def is_grouped(plan: Plan) -> bool:
    """True where one launch can quantize many weights.

    A block of whole rows wants a pass over them first. What that finds lies elsewhere on every call, so that a table of
    addresses would have to be made and copied each time.
    """
    return all(source.quantization.block.k or not source.quantization.block.m for source in plan.layout.sources)


def kernels_view(plan: Plan) -> View:
    """Everything that the kernels' template uses."""
    layout = plan.layout
    names = suffixes_of(layout)
    kinds = {names[source.name]: source.quantization for source in layout.sources}
    arithmetics = [_arithmetic(quantization, suffix) for suffix, quantization in kinds.items()]
    sources = [_source(source, layout, names[source.name]) for source in layout.sources]
    text = repr([arithmetics, sources])
    constants = [c for suffix, q in kinds.items() for c in constants_view(q, suffix)]
    return {
        "constants": [c for c in constants if re.search(rf"\b{c['name']}\b", text)],
        "arithmetics": arithmetics,
        "sources": sources,
        "plane_union": [plane for source in sources for plane in source["planes"]],
        "uses_input_max": any("input_max" in rule_text.uses(q) for q in kinds.values()),
        "uses_amax": plan.shares_amax,
        "tensor_amax": layout.tensor_amax,
        "grouped": is_grouped(plan),
        "group_planes": _group_planes(layout),
        "amaxes_call": f"batches.group_amaxes(xs, {plan.amax_columns})",
        "amaxes_doc": _amaxes_text(plan),
        "amax_call": f"launch.matrix_amax(x, {plan.amax_columns})" if plan.shares_amax else None,
        "tiles": _tiles(layout, tile),
        "dequantize_tiles": [(f'"{o}"', reading_tile(layout.source(o))) for o in layout.orientations],
        "quantize_bytes": _bytes_text(layout),
        "fused": is_fused(layout),
        "buffer_tiles": _tiles(layout, buffer_tile, layout) if is_fused(layout) else [],
        **moves_view(layout),
    }


def _bytes_text(layout: Layout) -> str:
    parts = [f"{float(bytes_of(source)):.6g} for {source.name}" for source in layout.sources]
    return f"Bytes an element: those of x in; out {' and '.join(parts)}."


def _amaxes_text(plan: Plan) -> str:
    if not plan.shares_amax:
        return "amaxes must be None: no scale depends on anything outside its block."
    return "amaxes: the amax of each, fp32, as quantize takes it; taken from xs when not given."


def _group_planes(layout: Layout) -> list[View]:
    """Of the planes that a kernel writes: Triton's dtype, whether a table has them at multiples of 16 bytes, and the
    parameters for buffers that stand behind it, of which a group writes none."""
    found: list[View] = []
    for source in layout.sources:
        for plane in source.planes:
            aligned = "False" if plane.is_scalar else "ALIGNED"
            found.append({"dtype": f"tl.{plane.dtype}", "aligned": aligned, "no_buffers": []})
        found[-1]["no_buffers"] = source_moves(source, layout)["to"]
    return found


def bytes_of(source: Source) -> Fraction:
    """Bytes of a source's planes for each element, where blocks are whole and the weight is large."""
    found = Fraction(0)
    for plane in source.planes:
        if plane.per_m is not None and plane.per_k is not None:
            found += Fraction(plane.bits, 8) / (plane.per_m * plane.per_k)
    return found


# ---------------------------------------------------------------------------------------------------------------- tiles
Tile = tuple[int, int, int, int, int | None]


def tile(sources: Iterable[Source], itemsize: int) -> Tile:
    """(rows, columns, pieces of 16 bytes in a thread, warps, most registers of a thread) of a program that quantizes.

    Its tile holds whole blocks of all sources; x has `itemsize` bytes a value. What was fastest on an H200 at
    8192 x 8192 (tests/bench/RESULTS.md). Blocks along rows want long rows; blocks of several rows want all of them in
    one warp, since a reduction across warps goes through shared memory, and as many elements in a thread as its
    registers hold. A cap on registers lets more programs run beside each other, where that is worth more.
    """
    sources = list(sources)
    block_m = max(source.quantization.block.m or 1 for source in sources)
    block_k = max(source.quantization.block.k or 1 for source in sources)
    bits = min(source.data.bits for source in sources)
    wide = itemsize == 4
    if block_m == 1:
        rows, columns, run, warps = 4, 1024, 1, 4
        if bits <= 4 and not any(source.quantization.element.integer for source in sources):
            rows, columns, run, warps = (4, 512, 2, 1) if wide else (1, 2048, 2, 1)
        if block_k > columns:
            return 1, block_k, 1, max(4, block_k // 2048), None
        return rows, columns, run, warps, None
    if block_m >= 64 or block_k >= 64:
        columns = max(block_k, 64)
        square = all(source.quantization.block.m == source.quantization.block.k for source in sources)
        cap = None if square or wide or len(sources) > 1 else 168
        return block_m, columns, 1, max(2, block_m * columns // 4096), cap
    if any(source.quantization.definition.candidates for source in sources):  # the elements of every candidate
        return block_m, max(block_k, 1024 // block_m), 1, 2 if wide else 1, None
    if len(sources) > 1:
        if bits == 8 and wide:
            return block_m, max(block_k, 4096 // block_m), 1, 1, None
        if bits == 8:
            return block_m, max(block_k, 8192 // block_m), 2, 2, 224
        if bits == 4 and not wide:
            return block_m, 128, 1, max(1, block_m // 16), None
        return block_m, max(block_k, 2048 // block_m), 1, 2 if bits == 6 else 1, None
    if wide:
        return block_m, max(block_k, (4096 if block_k == 1 else 2048) // block_m), 1, 2, None
    if bits == 4 and block_k == 1:
        return block_m, max(block_k, 4096 // block_m), 1, 1, None
    if bits == 4:
        return block_m, max(block_k, 8192 // block_m), 2, 4, None
    return block_m, max(block_k, (4096 if bits == 6 else 8192) // block_m), 1, 2, None


def reading_tile(source: Source) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program that dequantizes; found in the same way."""
    block_m, block_k = source.quantization.block.m or 1, source.quantization.block.k or 1
    if block_m == 1:
        rows, columns, warps = (4, 1024, 2) if source.data.bits <= 4 else (4, 512, 2)
        return (rows, columns, warps) if block_k <= columns else (1, block_k, max(4, block_k // 2048))
    if block_m >= 64 or block_k >= 64:
        columns = max(block_k, 64)
        return block_m, columns, max(2, block_m * columns // 4096)
    return block_m, max(block_k, 4096 // block_m), 2


def buffer_tile(sources: Iterable[Source], itemsize: int, layout: Layout) -> Tile:
    """As tile, of a program that writes buffers. Where codes are transposed it has rows enough for whole sectors of the
    transposed codes; more of them, and more warps, made for more traffic through shared memory than that was worth."""
    sources = list(sources)
    rows, columns, pieces, warps, _ = tile(sources, itemsize)
    width = max([widest(layout), *(source.quantization.block.k or 1 for source in sources)])
    if not turns(layout):
        tall = max(rows, widest(layout))
        return tall, max(rows * columns // tall, width), pieces, warps, None
    if min(source.data.bits for source in sources) == 4:
        least, most, warps = (64, 64, itemsize // 2) if len(sources) == 1 else (32, 128, 2)
        return max(least, widest(layout)), max(most, width), 1, warps, None
    if len(sources) > 1 or sources[0].quantization.block.m is None:
        return max(128, rows, widest(layout)), max(128, width), 1, 8, None
    return max(128, rows, widest(layout)), max(128, width), 1, 4, 168 if itemsize == 2 else None


def _tiles(
    layout: Layout, choose: Callable[..., Tile], *more: Any
) -> list[tuple[int, list[tuple[tuple[bool, ...], Tile]]]]:
    """The tile of every choice of sources, for inputs of two and of four bytes."""
    choices = [choice for choice in itertools.product((True, False), repeat=len(layout.sources)) if any(choice)]
    chosen = [(choice, list(itertools.compress(layout.sources, choice))) for choice in choices]
    return [(size, [(choice, choose(sources, size, *more)) for choice, sources in chosen]) for size in (2, 4)]


# --------------------------------------------------------------------------------------------------------------- codecs
def _arithmetic(quantization: Quantization, suffix: str) -> View:
    used, prefix = rule_text.uses(quantization), rule_text.prefix_of(suffix)
    ranged = "lowest" in used
    arguments = (["lowest", "highest"] if ranged else ["amax"]) + (["tensor_amax"] if "tensor_amax" in used else [])
    arguments += ["input_max"] if "input_max" in used else []
    arguments += [quantization.definition.candidate] if quantization.definition.candidates else []
    codecs = [("", quantization.element, "ELEMENT", "nearest")]
    codecs += [] if quantization.scale.is_f32 else [("_scale", quantization.scale, "SCALE", quantization.rounding)]
    codecs += [("_zero", quantization.zero, "ZERO", "nearest")] if quantization.zero else []
    return {
        "suffix": suffix,
        "over_scale": _over_scale(quantization),
        "codecs": [
            {
                "what": what,
                "format": fmt.name,
                "rounding": rounding,
                "encode": _encode(fmt, f"{prefix}{kind}", rounding),
                "decode": _decode(fmt, f"{prefix}{kind}"),
            }
            for what, fmt, kind, rounding in codecs
        ],
        "arguments": ", ".join(arguments),
        "from": " and ".join(arguments[:2] if ranged else arguments[:1]),
        "steps": rule_text.steps(quantization, suffix, rule_text.TRITON),
        "results": "scale, zero, multiplier" if quantization.zero else "scale, multiplier",
        "candidate": quantization.definition.candidate,
        "error": rule_text.error_steps(quantization, suffix, rule_text.TRITON),
        "error_arguments": ", tensor_amax" if quantization.definition.needs_tensor_amax else "",
    }


def _encode(fmt: Format, prefix: str, rounding: str) -> View:
    """{hardware: (condition, expression) or None, software: expression}."""
    nan = f"{prefix}_NAN"
    if fmt.integer:
        text = f"to_integer_codes(x, {fmt.integer}, {fmt.lowest}, {fmt.fraction}, {nan})"
        return {"hardware": None, "software": text}
    last = len(fmt.magnitudes) - 1
    sign_bit = fmt.exponent + fmt.mantissa if fmt.sign else -1
    hardware = None
    if fmt.torch in _CASTS and rounding == "nearest":
        dtype, canonical = _CASTS[fmt.torch]
        hardware = ("HARDWARE", f"cast_to_codes(x, {dtype}, {nan}, 0x{canonical:02X})")
    elif (fmt, rounding) in _CONVERSIONS:
        hardware = ("HARDWARE >= 100", f"{_CONVERSIONS[fmt, rounding]}(x)")
    if _is_small(fmt) and rounding == "nearest":
        rest = f"{fmt.max!r}, {last}, {nan}, HARDWARE"
        return {"hardware": hardware, "software": f"to_small_codes(x, {fmt.mantissa}, {fmt.bias}, {sign_bit}, {rest})"}
    if fmt.is_exponent:
        return {"hardware": hardware, "software": f'to_exponents(x, {fmt.bias}, {last}, {nan}, "{rounding}")'}
    rest = f'{fmt.subnormals}, {sign_bit}, {last}, {nan}, "{rounding}"'
    return {"hardware": hardware, "software": f"to_codes(x, {fmt.mantissa}, {fmt.bias}, {rest})"}


def _over_scale(quantization: Quantization) -> str | None:
    """1 / a decoded scale, where that needs no division and the rule asks for it."""
    fmt = quantization.scale
    asked = any(
        "1 / from_scale" in expression
        for _, expression in quantization.definition.program(dict(quantization.parameters))
    )
    return f"over_exponents(codes, {fmt.bias}, {len(fmt.magnitudes)})" if asked and fmt.is_exponent else None


def _is_small(fmt: Format) -> bool:
    """Well inside fp32's range, so that adding 1.5 * 2^(23 - mantissa bits) binades keeps inside it."""
    lowest = 1 - fmt.bias
    return bool(fmt.sign and fmt.subnormals and fmt.mantissa and fmt.max < 2.0**60 and lowest > -60)


def _decode(fmt: Format, prefix: str) -> View | None:
    if fmt.integer:
        return {"hardware": None, "software": f"from_integer_codes(codes, {fmt.integer}, {fmt.fraction})"}
    size = fmt.exponent + fmt.mantissa
    if not fmt.subnormals:
        if not fmt.is_exponent:
            return None
        return {"hardware": None, "software": f"from_exponents(codes, {fmt.bias}, {len(fmt.magnitudes)})"}
    inf_from, nan_from = len(fmt.magnitudes), len(fmt.magnitudes) + len(fmt.inf)
    if abs(127 - fmt.bias) > 126 or list(fmt.inf) != list(range(inf_from, nan_from)):
        return None
    hardware = ("HARDWARE", f"cast_from_codes(codes, {_CASTS[fmt.torch][0]})") if fmt.torch in _CASTS else None
    text = f"from_codes(codes, {fmt.mantissa}, {fmt.bias}, {size}, {inf_from}, {nan_from})"
    return {"hardware": hardware, "software": text}


def _places(axis: str, first: str, size: int | None) -> View:
    """Where a tile's blocks begin along an axis, how many the weight has, and how many a tile has; None: one block."""
    tile = f"TILE_{axis.upper()}"
    if size == 1:
        return {f"at_{axis}": first, f"count_{axis}": axis, f"span_{axis}": tile}
    block = size or tile
    return {
        f"at_{axis}": f"{first} // {block}",
        f"count_{axis}": f"tl.cdiv({axis}, {block})",
        f"span_{axis}": f"{tile} // {block}" if size else "1",
    }


def _nibbles(quantization: Quantization, layout: Layout) -> View | None:
    """Eight codes of 4 bits at a time through the card's conversion to a format of 8 bits, where that fits.

    `form`: of the format; `found`: of the block too, where a program finds its amax; `converted`: eight codes at a time
    through the conversion to the format itself, where newer cards have one; `decode`: back.
    """
    fmt, block = quantization.element, quantization.block
    if fmt.bits != 4 or fmt.integer or not _is_small(fmt) or fmt.nan or layout.multiple_k % 8:
        return None
    form = f"{fmt.mantissa}, {fmt.bias}, {fmt.max!r}, {quantization.low_first}"
    found = f"{block.m}, {block.k}, {form}, {_is_bounded(quantization)}" if block.m and block.k else None
    converted = f"to_e2m1_words(scaled, {quantization.low_first})" if fmt == _E2M1 else None
    decode = f"{fmt.mantissa}, {fmt.bias}, {quantization.low_first}"
    return {"form": form, "found": found, "converted": converted, "decode": decode}


def _is_bounded(quantization: Quantization) -> bool:
    """True where a scale is never below amax / element_max by more than rounding of that, so that no element is cut."""
    steps = quantization.definition.active_steps(dict(quantization.parameters))
    divides = [step.expression for step in steps] == ["to_scale(amax * inverse_element_max)", "1 / from_scale(scale)"]
    return divides and quantization.scale.is_exponent and quantization.rounding == "up"


# -------------------------------------------------------------------------------------------------------------- sources
def _source(source: Source, layout: Layout, suffix: str) -> View:
    q, data, scale, zero = source.quantization, source.data, source.scale, source.zero
    used = rule_text.uses(q)
    bits, group = data.bits, codes_per_group(data.bits)
    nbytes = bits // gcd(bits, 8) if group > 1 else 1
    served = [orientation for orientation, name in layout.source_of if name == source.name]
    known = {"scale": "scale", "tensor_amax": "tensor_amax"}
    given = "block" if q.block.m and q.block.k else "shared" if q.block.k or not q.block.m else "rows"
    if q.block.m is None and q.block.k is None:
        given = "scalar"
    extra = (["tensor_amax"] if "tensor_amax" in used else []) + (["input_max"] if "input_max" in used else [])
    return {
        "name": source.name,
        "flag": source.name.upper(),
        "suffix": suffix,
        "served": tuple(served),
        "condition": " or ".join(f'"{orientation}" in orientations' for orientation in served),
        "coded": not q.scale.is_f32,
        "data": data.name,
        "scale": scale.name,
        "zero": zero.name if zero else None,
        "planes": [plane.name for plane in source.planes],
        "bits": bits,
        "group": group,
        "nbytes": nbytes,
        "span": 1 << (nbytes - 1).bit_length(),
        "wide": group * bits >= 32,
        "low_first": q.low_first,
        "block_m": q.block.m,
        "block_k": q.block.k,
        **_places("m", "row", q.block.m),
        **_places("k", "column", q.block.k),
        "nibbles": _nibbles(q, layout),
        **source_moves(source, layout),
        "given": given,  # where the amax is from: the block, the weight, its column blocks, or a pass over rows
        "ranged": "lowest" in used,
        "candidates": rule_text.candidates(q, suffix),
        "contracts_k": source.name == ORIENTATIONS[0],
        "extra": "".join(f", {name}" for name in extra),
        "results": "scale, zero, multiplier" if zero else "scale, multiplier",
        "factor": rule_text.expression(q.definition.decode, q, known, suffix, rule_text.TRITON),
    }

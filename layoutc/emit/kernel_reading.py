"""The text of the tile functions that read planes: to dequantize, and to lay out into buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from layoutc.emit import rule_text
from layoutc.emit.code import Lines, call, indented
from layoutc.layout.layout import Transform
from layoutc.plan.codebooks import Codebook, codebooks_of, places, steps_of
from layoutc.plan.kernels import Kernels, LayOutKernel, SourceKernel
from layoutc.plan.moves import CodeMove, Move, ScaleMove, SwizzleMove
from layoutc.spec.formats import Format

Codebooks = Mapping[Format, Codebook]
_TILE = ("TILE_M", "TILE_K")
AXES = ("m", "k")


def codebooks_line(codebooks: Codebooks) -> str:
    """The line that names the codebooks, which kernels pass after the planes."""
    return f"codebooks = planes[6]  # ({places(codebooks.items())},) float32"


def named(of: str, names: Iterable[str]) -> list[str]:
    """Lines that name the first entries of a tuple. layout.py states their shapes."""
    names = tuple(names)
    line = f"{', '.join(names)} = {', '.join(f'{of}[{index}]' for index in range(len(names)))}"
    return [line] if len(line) <= 116 else [f"{name} = {of}[{index}]" for index, name in enumerate(names)]


def blocks_of(source: SourceKernel) -> dict[str, str]:
    """The argument BLOCK: rows and columns of a block; 0 along an axis that blocks span."""
    block = source.source.quantization.block
    return {"BLOCK": f"({block.m or 0}, {block.k or 0})"}


def transformed(function: str, values: str, transform: Transform) -> str:
    """The call of a transform or of its inverse."""
    constants: dict[str, str | int | float] = {"AXIS": AXES.index(transform.axis), "SIZE": transform.size}
    return call(function, values, **constants, SIGNS=f"0x{transform.signs:X}", SCALE=transform.scale)


# ----------------------------------------------------------------------------------------------------------- dequantize
def dequantize_body(kernels: Kernels) -> Lines:
    planes = (plane for source in kernels.sources for plane in source.source.planes)
    lines = named("planes", (plane.name for plane in planes))
    if kernels.layout.tensor_amax:
        levels = kernels.layout.sources[0].quantization.definition.tensor
        lines.append(f"{'tensor_level' if levels else 'tensor_amax'} = tl.load(amax)  # (1,) float32")
    elif kernels.layout.amax_of_matrices:
        level = kernels.layout.sources[0].level
        assert level is not None
        loaded = call("lt.load_blocks", level.name, "at", *_TILE, "EVEN", BLOCK="(1, 0)")
        lines.append(f"tensor_level = {loaded}")
    codebooks = codebooks_of(kernels.layout)
    if codebooks:
        lines.append(codebooks_line(codebooks))
    for source in kernels.sources:
        read = _dequantize_source(source, codebooks)
        lines += [f"if {source.flag}:", *indented(read)] if len(kernels.sources) > 1 else read
    if lines[-1].startswith("values = "):
        return (*lines[:-1], lines[-1].replace("values =", "return", 1))
    return (*lines, "return values")


def _dequantize_source(source: SourceKernel, codebooks: Codebooks) -> Lines:
    """Lines from the planes of one source to `values`."""
    q, suffix, block = source.source.quantization, source.suffix, source.source.quantization.block
    variables = {"scale": "scale", "tensor_amax": rule_text.grown("tensor_amax", q)}
    factor = rule_text.expression(q.definition.decode, q, variables, suffix, rule_text.TRITON)
    lines = [_read_elements(source, codebooks)]
    if source.amax_from == "tensor":
        scale = _as_codes(f"tl.load({source.source.scale.name})", q.scale, codebooks)
        operand = factor if factor.isidentifier() else f"({factor})"
        return (*lines, f"scale = {scale}", f"values = element * {operand}")
    at, sizes = ("at", *_TILE, "EVEN"), blocks_of(source)
    unit_m, unit_k = source.units.sizes if source.units else (block.m, block.k)
    sizes |= {"UNIT": str(source.units.sizes)} if source.units else {}
    lines += _loaded("scale", source, at, sizes, codebooks)
    unit = (str(unit_m or "TILE_M"), str(unit_k or "TILE_K"))
    if source.source.zero is not None and q.zero is not None:
        lines += [f"factor = {factor}", f"blocks = {call('lt.to_blocks', 'element', *unit)}"]
        values = "blocks * factor[:, None, :, None]"
        lines += _loaded("zero", source, at, sizes, codebooks)
        shift = f"decode_{q.zeros_as}{suffix}(zero, CVT_LEVEL)[:, None, :, None]"
        match q.definition.zero_is:
            case "value":
                values += f" + {shift}"
            case "minimum":
                values += f" - {shift}"
            case "element":
                lines.append(f"blocks -= {shift}")
        lines.append(f"values = lt.from_blocks({values})")
    else:
        lines.append(f"values = {call('lt.scale_blocks', 'element', factor, *unit)}")
    if q.root:
        lines.append("values = values * values")
    if q.transform:
        lines.append(f"values = {transformed('lt.unhadamard', 'values', q.transform)}")
    return tuple(lines)


def _loaded(
    kind: Literal["scale", "zero"], source: SourceKernel, at: Lines, sizes: dict[str, str], codebooks: Codebooks
) -> Lines:
    """Lines that load a tile's scales or zero points, and what super-blocks share, with an entry per block."""
    q, level = source.source.quantization, source.source.quantization.levels.get(kind)
    own, *shared = source.source.stored_for(kind)
    stored = q.zero if kind == "zero" and q.zero is not None else q.scale
    if level is None:
        return (f"{kind} = {_as_codes(call('lt.load_blocks', own.name, *at, **sizes), stored, codebooks)}",)
    lines = [f"codes = {_as_codes(call('lt.load_blocks', own.name, *at, **sizes), stored, codebooks)}"]
    block = q.block
    unit = source.units.sizes if source.units else (block.m or 0, block.k or 0)
    covers = {"BLOCK": f"({level.covers.m or 0}, {level.covers.k or 0})", "UNIT": str(unit)}
    names = ["codes"]
    for plane in shared:
        fmt = level.quantization.scale if plane.kind != "offset" else None
        loaded = call("lt.load_blocks", plane.name, *at, **covers)
        lines.append(f"{plane.kind} = {_as_codes(loaded, fmt, codebooks) if fmt else loaded}")
        names.append(plane.kind)
    return (*lines, f"{kind} = ({', '.join(names)})")


def _as_codes(loaded: str, fmt: Format, codebooks: Codebooks) -> str:
    """A plane's entries in the form that kernel functions accept: fp32 values or int32 codes."""
    if fmt.is_f32:
        return loaded
    if (book := codebooks.get(fmt)) is not None:
        return call("lt.looked_up", "codebooks", f"{loaded}.to(tl.int32)", FIRST=book.first, COUNT=1 << fmt.bits)
    return f"lt.bits_of_half({loaded})" if fmt.is_wide else f"{loaded}.to(tl.int32)"


def _read_elements(source: SourceKernel, codebooks: Codebooks) -> str:
    """The line that loads and decodes the elements of a tile."""
    data, q, decode = source.source.data, source.source.quantization, f"decode{source.suffix}"
    if source.nibbles is None:
        packing = {"BITS": data.bits, "LOW_FIRST": q.low_first} if data.bits < 8 else {"EVEN": "EVEN"}
        codes = call("lt.load_codes", data.name, "at", *_TILE, **packing)
        codes = codes if steps_of(q.element, codebooks) is None else _as_codes(codes, q.element, codebooks)
        return f"element = {decode}({codes}, CVT_LEVEL)"
    form = {"MANTISSA": q.element.mantissa, "BIAS": q.element.bias, "LOW_FIRST": q.low_first}
    arguments = (data.name, "at", *_TILE, "EVEN", "CVT_LEVEL")
    return f"element = {call('lt.load_nibbles', *arguments, DECODE=decode, **form)}"


# -------------------------------------------------------------------------------------------------------------- lay out
def lay_out_body(kernels: Kernels, lay_out: LayOutKernel) -> Lines:
    lines = named("planes", lay_out.planes) + named("buffers", (f"to_{move.buffer.name}" for move in lay_out.moves))
    lines += ["SWIZZLE: tl.constexpr = swizzled_index if SWIZZLED else None"] if kernels.layout.swizzle else []
    for move in lay_out.moves:
        lines += [comment(move), _move(move)]
    return tuple(lines)


def comment(move: Move) -> str:
    """A comment with the spec's field for a move, and a description of the buffer."""
    buffer = move.buffer
    field = "super" if buffer.kind in ("super", "offset", "super_zero") else buffer.kind
    return f"# orientations.{buffer.orientation}.{field}: {', '.join(buffer.made_by)}"


def _move(move: Move) -> str:
    """The call that moves a tile of a plane into a buffer."""
    plane = move.buffer.plane
    if isinstance(move, SwizzleMove):
        sizes = {"PER": f"({move.per_m}, {move.per_k})", "PAD": f"({move.pad_m}, {move.pad_k})"}
        packing = {"BITS": move.buffer.bits, "LOW_FIRST": move.buffer.low_first} if move.buffer.bits < 8 else {}
        packing |= {"WHOLE": True} if move.buffer.repacks else {}
        into = f"to_{move.buffer.name}"
        return call(
            "lt.move_swizzled",
            plane.name,
            into,
            "at",
            *_TILE,
            ORIGIN=f"origin_of_{move.buffer.name}",
            **sizes,
            **packing,
        )
    if isinstance(move, ScaleMove):
        return scale_move("lt.move_scales", plane.name, move, _TILE)
    form: dict[str, str | int | bool] = {"BITS": plane.bits, "LOW_FIRST": move.buffer.low_first, **_dims(move)}
    words: dict[str, str | int | bool] = {"WORDS": "WORDS"} if move.in_words else {}
    arguments = (plane.name, f"to_{move.buffer.name}", "at", *_TILE, "CVT_LEVEL")
    return call("lt.repack_codes", *arguments, **form, **words)


def scale_move(function: str, entries: str, move: ScaleMove, tile: tuple[str, ...]) -> str:
    sizes = {"BLOCK": f"({move.block_m}, {move.block_k})", "PER": f"({move.per_m}, {move.per_k})"}
    swizzled = {**({} if move.rowwise else {"FREE": '"k"'}), "SWIZZLE": "SWIZZLE"} if move.swizzled else {}
    return call(function, entries, f"to_{move.buffer.name}", "at", *tile, **sizes, **_dims(move), **swizzled)


def _dims(move: CodeMove | ScaleMove) -> dict[str, str]:
    """A buffer's padding and order of dims as arguments, except defaults."""
    pads = {"PAD": f"({move.pad_m}, {move.pad_k})"} if move.buffer.pads else {}
    return pads | ({"DIMS": '"km"'} if move.transposed else {})

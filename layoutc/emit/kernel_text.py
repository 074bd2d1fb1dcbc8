"""The text of a recipe's kernels.py, from the plan of its kernels."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import compress

from layoutc.emit import kernel_codecs
from layoutc.emit.arithmetic_text import ConstantText, constants_of
from layoutc.emit.code import Lines, balanced, wrapped
from layoutc.emit.kernel_bodies import TileFunction, tile_functions
from layoutc.emit.kernel_codecs import Alias, Function
from layoutc.emit.rule_text import prefix_of
from layoutc.layout.layout import is_swizzled
from layoutc.plan.codebooks import codebooks_of
from layoutc.plan.kernels import Kernels, NoKernels, QuantizeKernel, arithmetics_of
from layoutc.plan.tiles import Tile
from layoutc.spec.formats import Format, codebook_thresholds

_LEVEL = ", CVT_LEVEL: tl.constexpr"
WIDTH = 116  # of a line in a function's body, which the template indents by 4


@dataclass(frozen=True)
class KernelsText:
    """Everything that the template of kernels.py prints."""

    header: str
    name: str
    summary: str
    gemm_scale: bool
    from_reference: bool
    constants: Lines
    aliases: Lines
    functions: tuple[Function, ...]
    tiles: tuple[TileFunction, ...]
    facts: Lines


def kernels_text(kernels: Kernels, header: str) -> KernelsText:
    """The text of a recipe's kernels. `header`: the first lines of each file."""
    aliases, functions = kernel_codecs.functions(kernels)
    functions, tiles = _leveled(aliases, functions, tile_functions(kernels))
    functions = tuple(replace(one, body=wrapped(one.body, WIDTH)) for one in functions)
    tiles = tuple(replace(one, body=wrapped(tuple(map(_of_options, one.body)), WIDTH)) for one in tiles)
    bodies = (*(one.body for one in functions), *(one.body for one in tiles))
    words = "\n".join(line for body in bodies for line in body)
    return KernelsText(
        header=header,
        name=kernels.layout.name,
        summary=kernels.layout.summary.rstrip("."),
        gemm_scale=_orders_by_torch(kernels),
        from_reference=any("reference." in line for line in (*_constants(kernels, words), *_facts(kernels))),
        constants=_constants(kernels, words),
        aliases=tuple(one.line for one in aliases),
        functions=functions,
        tiles=tiles,
        facts=_facts(kernels),
    )


def _leveled(
    aliases: tuple[Alias, ...], functions: tuple[Function, ...], tiles: tuple[TileFunction, ...]
) -> tuple[tuple[Function, ...], tuple[TileFunction, ...]]:
    """Drops the conversion level from functions that do not read it, and from their callers."""
    passed = {name for tile in tiles for name in re.findall(r"CODE=(\w+)", " ".join(tile.body))}  # with a level
    known, unread = set[str](), {name for one in aliases for name in one.unleveled} | _unreading(functions)
    while unread := unread - passed - known:
        known |= unread
        functions = tuple(replace(one, body=_without_level(one.body, known)) for one in functions)
        tiles = tuple(replace(one, body=_without_level(one.body, known)) for one in tiles)
        unread = _unreading(functions)
    own = (replace(one, signature=one.signature.replace(_LEVEL, "")) if one.name in known else one for one in functions)
    return tuple(own), tiles


def _unreading(functions: tuple[Function, ...]) -> set[str]:
    """Names of functions that have a conversion level argument but do not read it."""
    return {one.name for one in functions if _LEVEL in one.signature and "CVT_LEVEL" not in str(one.body)}


def _without_level(lines: Lines, names: Collection[str]) -> Lines:
    """Removes the last argument, the conversion level, from calls of the named functions."""
    return tuple(line if "CVT_LEVEL" not in line else _uncalled(line, names) for line in lines)


def _uncalled(line: str, names: Collection[str]) -> str:
    for opened in reversed([*re.finditer(rf"(?<![.\w])(?:{'|'.join(sorted(names))})\(", line)]):  # inner calls first
        inside = line[opened.end() :]
        end = next(one.start() for one in re.finditer(r"\)", inside) if balanced(inside[: one.start()]))
        line = line[: opened.end()] + inside[:end].removesuffix(", CVT_LEVEL") + inside[end:]
    return line


def _of_options(line: str) -> str:
    """A line that reads its constants from `opts`, the last argument of a tile function."""
    return re.sub(r"(?<![.\w])(ROWWISE|COLUMNWISE|SWIZZLED|WORDS|EVEN|CVT_LEVEL|TILE_[MK])\b(?!=)", r"opts.\1", line)


def _constants(kernels: Kernels, words: str) -> Lines:
    """Lines that define the constants whose names occur in the code `words`."""
    kinds = arithmetics_of(kernels.layout)
    constants = [one for suffix, quantization in kinds.items() for one in constants_of(quantization, suffix)]
    used = set(re.findall(r"\w+", words))
    return tuple(_constant(one) for one in constants if one.name in used)


def _constant(constant: ConstantText) -> str:
    """The line that defines a constant; long tables come from the reference."""
    if "\n" in constant.value or constant.value.startswith(("num.", "tuple(")):
        return f"{constant.name} = tl.constexpr(reference.{constant.name})"
    return f"{constant.name} = tl.constexpr({constant.value})" + (f"  # {constant.doc}" if constant.doc else "")


def _orders_by_torch(kernels: Kernels) -> bool:
    """True if torch puts some buffer into the GEMM's order: it is a plane, or torch lays out everything."""
    layout, by_torch = kernels.layout, isinstance(kernels.lay_out, NoKernels)
    return any(is_swizzled(layout, buffer) and (by_torch or buffer.is_plane) for buffer in layout.buffers)


def _facts(kernels: Kernels) -> Lines:
    """Argument lines for Kernels: launch sizes and other facts."""
    quantize, lay_out = kernels.quantize, kernels.lay_out
    served = {source.source.name: source.serves for source in kernels.sources}
    lines = [f"serves={served},"]
    if isinstance(quantize, QuantizeKernel):
        lines += _quantize_facts(kernels, quantize)
    tiles = {name: _tile(tile) for name, tile in kernels.dequantize_tiles}
    reading = "{" + ", ".join(f'"{name}": {tile}' for name, tile in tiles.items()) + "}"
    if len(tiles) > 1 and len({*tiles.values()}) == 1:
        reading = f"dict.fromkeys(LAYOUT.orientations, {tiles.popitem()[1]})"
    lines.append(f"dequantize_sizes={reading},")
    if books := codebooks_of(kernels.layout).items():
        names = [f"reference.{prefix_of(one.suffix)}{one.kind.upper()}_VALUES" for _, one in books]
        names += [_steps(fmt, f"reference.{prefix_of(one.suffix)}ELEMENT_STEPS") for fmt, one in books if one.steps]
        lines.append(f"codebooks={' + '.join(names)},")
    if isinstance(lay_out, NoKernels):
        lines.append(f"by_reference=reference.lay_out,  # {lay_out.reason}")
    elif lay_out is not None:
        tile = lay_out.tile
        sizes = f"rows={tile.rows}, columns={tile.columns}, warps={tile.warps}"
        lines.append(f"lay_out_size=Tile({sizes}),  # {tile.reason}")
        lines.append(f"moved={lay_out.planes},")
        lines += [f"word={lay_out.word},"] if lay_out.word > 1 else []
        lines += [f"padding={lay_out.padding},"] if any(lay_out.padding) else []
    if isinstance(quantize, QuantizeKernel):
        lines += _inputs_of_quantizing(kernels, quantize)
    return (*lines, *(["gemm_scale=gemm_scale,"] if _orders_by_torch(kernels) else []))


def _steps(fmt: Format, name: str) -> str:
    """A codebook's steps, padded with NaN."""
    rest = (1 << fmt.bits) - len(codebook_thresholds(fmt))
    return f'{name} + (float("nan"),)' + (f" * {rest}" if rest > 1 else "")


def _inputs_of_quantizing(kernels: Kernels, quantize: QuantizeKernel) -> Lines:
    """Argument lines for what a quantizing launch reads besides x, and for how many matrices."""
    rows = {s.source.name: s.source.quantization.block.m for s in kernels.sources if s.amax_from == "rows"}
    lines = [f"row_blocks={rows},"] if rows else []
    lines += [] if quantize.batched else ["batched=False,"]
    ranges = tuple(s.source.name for s in kernels.sources if s.source.name in rows and s.inputs.block_range)
    lines += [f"row_ranges={ranges},"] if ranges else []
    lines += ["takes_input_max=True,"] if any(source.inputs.input_max for source in kernels.sources) else []
    return tuple(lines)


def _quantize_facts(kernels: Kernels, quantize: QuantizeKernel) -> Lines:
    """Argument lines with the tiles of quantizing launches."""
    names = [source.source.name for source in kernels.sources]
    lines = ["# by the bytes of a value of x, and the sources that are written"]
    if len({_tile(tile) for _, _, tile in quantize.tiles}) == 1 and len(names) == 1:
        *_, tile = quantize.tiles[0]
        keys = ", ".join(f'({size}, "{names[0]}")' for size, *_ in quantize.tiles)
        lines[0] += f"; {tile.reason}" if tile.reason else ""
        lines.append(f"quantize_sizes=dict.fromkeys(({keys}), {_tile(tile)}),")
    else:
        lines += ["quantize_sizes={", *_tiles(names, quantize.tiles), "},"]
    if not quantize.fused:
        return tuple(lines)
    same = {(size, flags, _tile(tile)) for size, flags, tile in quantize.tiles}
    others = tuple(one for one in quantize.buffer_tiles if (*one[:2], _tile(one[2])) not in same)
    return (*lines, "buffer_sizes={", *_tiles(names, others), "},") if others else (*lines, "buffer_sizes={},")


def _tiles(names: list[str], tiles: tuple[tuple[int, tuple[bool, ...], Tile], ...]) -> Lines:
    lines: list[str] = []
    reason = ""
    for size, flags, tile in tiles:
        key = ", ".join([str(size), *(f'"{name}"' for name in compress(names, flags))])
        line, said = f"    ({key}): {_tile(tile)},", f"# {tile.reason}" if tile.reason != reason else ""
        lines += [f"    {said}", line] if len(line) + len(said) > 110 else [f"{line}  {said}" if said else line]
        reason = tile.reason
    return tuple(lines)


def _tile(tile: Tile) -> str:
    """A tile as code, without arguments that are defaults."""
    said = {"rows": tile.rows, "columns": tile.columns, "warps": tile.warps}
    said |= {"pieces": tile.pieces} if tile.pieces > 1 else {}
    said |= {"registers": tile.registers} if tile.registers else {}
    cover = f", cover={tile.covers}" if tile.covers else ""
    return f"Tile({', '.join(f'{name}={value}' for name, value in said.items())}{cover})"

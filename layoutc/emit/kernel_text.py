"""The text of a recipe's kernels.py, from the plan of its kernels."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from layoutc.emit import kernel_codecs
from layoutc.emit.code import Lines, wrapped
from layoutc.emit.kernel_bodies import TileFunction, tile_functions
from layoutc.emit.kernel_codecs import Function
from layoutc.emit.reference_text import constants_of
from layoutc.layout.layout import is_swizzled
from layoutc.plan.kernels import Kernels
from layoutc.plan.tiles import Tile

WIDTH = 116  # of a line in a function's body, which the template indents by 4


@dataclass(frozen=True)
class KernelsText:
    """Everything that the template of kernels.py prints."""

    header: str
    name: str
    summary: str
    gemm_scale: bool
    constants: Lines
    functions: tuple[Function, ...]
    tiles: tuple[TileFunction, ...]
    facts: Lines


def kernels_text(kernels: Kernels, header: str) -> KernelsText:
    """The text of a recipe's kernels. `header`: the first lines of each of its files."""
    functions, tiles = kernel_codecs.functions(kernels), _tile_functions(kernels)
    bodies = (*(one.body for one in functions), *(one.body for one in tiles))
    words = "\n".join(line for body in bodies for line in body)
    return KernelsText(
        header=header,
        name=kernels.layout.name,
        summary=kernels.layout.summary.rstrip("."),
        gemm_scale=_has_swizzled_plane(kernels),
        constants=_constants(kernels, words),
        functions=functions,
        tiles=tiles,
        facts=_facts(kernels),
    )


def _tile_functions(kernels: Kernels) -> tuple[TileFunction, ...]:
    return tuple(replace(one, body=wrapped(one.body, WIDTH)) for one in tile_functions(kernels))


def _constants(kernels: Kernels, words: str) -> Lines:
    """Lines that define the constants whose names occur in the code `words`."""
    kinds = {source.suffix: source.source.quantization for source in kernels.sources}
    constants = [one for suffix, quantization in kinds.items() for one in constants_of(quantization, suffix)]
    used = set(re.findall(r"\w+", words))
    return tuple(
        f"{one.name} = tl.constexpr({one.value})" + (f"  # {one.doc}" if one.doc else "")
        for one in constants
        if one.name in used
    )


def _has_swizzled_plane(kernels: Kernels) -> bool:
    """True if a buffer is a plane as it is, except that a GEMM reads it in another order."""
    layout = kernels.layout
    return any(is_swizzled(layout, buffer) and buffer.is_plane for buffer in layout.buffers)


def _facts(kernels: Kernels) -> Lines:
    """Lines of arguments for Kernels: sizes of launches, and other facts."""
    quantize, lay_out = kernels.quantize, kernels.lay_out
    served = {source.source.name: source.serves for source in kernels.sources}
    lines = [f"serves={served},"]
    lines += ["# (bytes per value of x, is a source written, ...): (rows, columns, pieces, warps, cap on registers)"]
    lines += ["quantize_sizes={", *_tiles(quantize.tiles), "},"]
    covers = [(size, flags, tile) for size, flags, tile in quantize.tiles if tile.covers]
    if covers:
        lines += ["# The rows and columns of a tile that hold whole blocks; the others are idle."]
        lines += [
            "covers={",
            *(f"    ({', '.join(map(str, (size, *flags)))}): {tile.covers}," for size, flags, tile in covers),
            "},",
        ]
    if quantize.fused:
        lines += ["buffer_sizes={", *_tiles(quantize.buffer_tiles), "},"]
    reading = {name: (tile.rows, tile.columns, tile.warps) for name, tile in kernels.dequantize_tiles}
    lines.append(f"dequantize_sizes={reading},")
    if lay_out is not None:
        tile = lay_out.tile
        lines.append(f"lay_out_size=({tile.rows}, {tile.columns}, {tile.warps}),  # {tile.reason}")
        lines.append(f"moved={lay_out.planes},")
        lines += [f"word={lay_out.word},"] if lay_out.word > 1 else []
        lines += [f"padding={lay_out.padding},"] if any(lay_out.padding) else []
    rows = {s.source.name: s.source.quantization.block.m for s in kernels.sources if s.amax_from == "rows"}
    lines += [f"row_blocks={rows},"] if rows else []
    lines += [] if quantize.batched else ["batched=False,"]
    ranges = tuple(s.source.name for s in kernels.sources if s.source.name in rows and s.inputs.block_range)
    lines += [f"row_ranges={ranges},"] if ranges else []
    lines += ["takes_input_max=True,"] if any(source.inputs.input_max for source in kernels.sources) else []
    return (*lines, *(["gemm_scale=gemm_scale,"] if _has_swizzled_plane(kernels) else []))


def _tiles(tiles: tuple[tuple[int, tuple[bool, ...], Tile], ...]) -> Lines:
    lines: list[str] = []
    reason = ""
    for size, flags, tile in tiles:
        key = ", ".join(map(str, (size, *flags)))
        value = ", ".join(map(str, (tile.rows, tile.columns, tile.pieces, tile.warps, tile.registers)))
        lines.append(f"    ({key}): ({value}),{f'  # {tile.reason}' if tile.reason != reason else ''}")
        reason = tile.reason
    return tuple(lines)

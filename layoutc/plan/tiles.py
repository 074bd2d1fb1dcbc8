"""Tile sizes of programs, and the reasons for them. Measured on an H200."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from layoutc.layout.layout import Source
from layoutc.plan.conversions import is_held, is_long
from layoutc.plan.moves import CodeMove, Move, widest
from layoutc.plan.units import covered, sizes_of, steps, unit, units_of


@dataclass(frozen=True)
class Tile:
    """A program's rows and columns, adjacent 16-byte pieces of a row per thread, warps, and a cap on registers.

    covers: the rows and columns that hold whole blocks; None: all of them.
    """

    rows: int
    columns: int
    pieces: int
    warps: int
    registers: int | None
    reason: str
    covers: tuple[int, int] | None = None


def quantize_tile(sources: Sequence[Source], itemsize: int, in_words: bool) -> Tile:
    """The tile of a quantizing program, which holds whole blocks of all sources. itemsize: bytes per value of x.

    in_words: 4-bit codes are made eight at a time, one word each. Only then may a thread have two pieces of a row.
    Otherwise pairs of codes are stored as bytes, which a thread holds piece by piece, and Triton 3.6 and 3.7 permute
    these bytes wrongly when a layout conversion shuffles them between a warp's threads.
    """
    return _with_room(_quantize_tile(sources, itemsize, in_words), sources)


def spans_columns(source: Source) -> bool:
    """Whether blocks are whole rows, so that a program loops over all columns of its rows twice."""
    block = source.quantization.block
    return block.m is not None and block.k is None


def _with_room(tile: Tile, sources: Sequence[Source]) -> Tile:
    """The tile with twice the warps if random bits, transformed values, or divisions for two sources need more
    registers; with at most 32 elements per thread if they are searched for in a long codebook, since all of a thread's
    elements wait for shared memory at once. Not timed."""
    if any(is_long(source.quantization.element) for source in sources):
        return replace(tile, warps=max(tile.warps, tile.rows * tile.columns // 1024), registers=None)
    divides = len(sources) > 1 and any(source.quantization.divides for source in sources)
    if not divides and not any(one.quantization.stochastic or one.quantization.transform for one in sources):
        return tile
    return replace(tile, warps=2 * tile.warps, registers=None)


def _quantize_tile(sources: Sequence[Source], itemsize: int, in_words: bool) -> Tile:
    """Like quantize_tile, for sources that round to nearest.

    Measured at 8192 x 8192. All rows of a block should be in one warp, since a reduction across warps goes through
    shared memory, and a thread should have as many elements as its registers hold. In some cases, a cap on registers
    gains more, since more programs run at once.
    """
    block_m = max(source.whole.m or 1 for source in sources)
    block_k = max(source.whole.k or 1 for source in sources)
    bits = min(source.data.bits for source in sources)
    wide = itemsize == 4
    if any(units_of(source.quantization.block) for source in sources):
        return _tile_of_units(sources, itemsize)
    if any(source.quantization.definition.candidates for source in sources) and max(block_m, block_k) > 32:
        columns = max(block_k, 1024 // block_m)
        reason = "registers hold the elements of every candidate: 16 of each in a thread"
        return Tile(block_m, columns, 1, max(2, block_m * columns // 512), None, reason)
    if block_m == 1 and any(spans_columns(source) for source in sources) and not in_words:
        if len(sources) > 1:
            columns = max(1024, block_k)
            return Tile(4, columns, 1, columns // 128, None, "whole rows, of which four read each scale of a column")
        return Tile(1, 8192, 1, 8, None, "a whole row, if it has no more columns: registers hold it")
    if block_m == 1:
        reason = "blocks lie along rows: long rows"
        rows, columns, run, warps = 4, 1024, 1, 4
        if in_words:
            reason = "blocks along rows, codes of 4 bits: two pieces fill a word"
            rows, columns, run, warps = (4, 512, 2, 1) if wide else (1, 2048, 2, 1)
        if block_k > columns:
            return Tile(1, block_k, 1, max(4, block_k // 2048), None, "one block")
        return Tile(rows, columns, run, warps, None, reason)
    if block_m >= 64 or block_k >= 64:
        columns = max(block_k, 64)
        square = all(source.whole.m == source.whole.k for source in sources)
        cap = None if square or wide or len(sources) > 1 else 168
        return Tile(block_m, columns, 1, max(2, block_m * columns // 4096), cap, "one row of large blocks")
    if any(source.quantization.definition.candidates for source in sources):
        reason = "one row of blocks: registers hold the elements of every candidate"
        return Tile(block_m, max(block_k, 1024 // block_m), 1, 2 if wide else 1, None, reason)
    rows_reason = "one row of blocks, all rows of a block in a warp"
    if len(sources) > 1:
        if bits == 8 and wide:
            return Tile(block_m, max(block_k, 4096 // block_m), 1, 1, None, rows_reason)
        if bits == 8:
            return Tile(block_m, max(block_k, 8192 // block_m), 2, 2, 224, rows_reason)
        if bits == 4 and not wide:
            return Tile(block_m, 128, 1, max(1, block_m // 16), None, rows_reason)
        return Tile(block_m, max(block_k, 2048 // block_m), 1, 2 if bits == 6 else 1, None, rows_reason)
    if wide:
        return Tile(block_m, max(block_k, (4096 if block_k == 1 else 2048) // block_m), 1, 2, None, rows_reason)
    if bits == 4 and block_k == 1:
        return Tile(block_m, max(block_k, 4096 // block_m), 1, 1, None, rows_reason)
    if bits == 4:
        return Tile(block_m, max(block_k, 8192 // block_m), 2 if in_words else 1, 4, None, rows_reason)
    return Tile(block_m, max(block_k, (4096 if bits == 6 else 8192) // block_m), 1, 2, None, rows_reason)


def _tile_of_units(sources: Sequence[Source], itemsize: int) -> Tile:
    """The tile with the fewest idle lanes, for blocks whose sizes are not powers of two. Not timed on any card."""
    tries = any(source.quantization.definition.candidates for source in sources)
    step = steps(sources)
    rows, columns = size = sizes_of(step, 1024 if tries else 16384 // itemsize)
    covers = covered(size, step)
    reason = f"sizes of blocks are not powers of two: {covers[0]} x {covers[1]} hold whole blocks"
    warps = max(1, rows * columns // (512 if tries else 1024))
    return Tile(rows, columns, 1, warps, None, reason, covers)


def dequantize_tile(source: Source) -> Tile:
    """The tile of a dequantizing program, which holds whole units of blocks. Measured like quantize_tile."""
    block_m, block_k = unit(source.quantization.block.m or 1), unit(source.quantization.block.k or 1)
    if block_m == 1:
        rows, columns, warps = (4, 1024, 2) if source.data.bits <= 4 else (4, 512, 2)
        if block_k > columns:
            return Tile(1, block_k, 1, max(4, block_k // 2048), None, "one block")
        if is_held(source.quantization.element):
            return Tile(1, columns, 1, 1, None, "a codebook in shared memory: one warp, which waits for no other")
        return Tile(rows, columns, 1, warps, None, "blocks lie along rows: long rows")
    if block_m >= 64 or block_k >= 64:
        columns = max(block_k, 64)
        return Tile(block_m, columns, 1, max(2, block_m * columns // 4096), None, "one row of large blocks")
    return Tile(block_m, max(block_k, 4096 // block_m), 1, 2, None, "one row of blocks")


def buffer_tile(sources: Sequence[Source], itemsize: int, in_words: bool, moves: tuple[Move, ...]) -> Tile:
    """Like quantize_tile, for a program that writes buffers.

    If codes are transposed, the tile has enough rows to write whole sectors of transposed codes. More rows and warps
    cost more in shared-memory traffic than they gained.
    """
    return _with_room(_buffer_tile(sources, itemsize, in_words, moves), sources)


def _buffer_tile(sources: Sequence[Source], itemsize: int, in_words: bool, moves: tuple[Move, ...]) -> Tile:
    """Like buffer_tile, for sources that round to nearest."""
    least = _quantize_tile(sources, itemsize, in_words)
    span = widest(moves)
    width = max([span, *(source.quantization.block.k or 1 for source in sources)])
    if not any(isinstance(move, CodeMove) for move in moves):
        tall = max(least.rows, span)
        columns = max(least.rows * least.columns // tall, width)
        return Tile(tall, columns, least.pieces, least.warps, None, "as for planes, with whole entries of buffers")
    reason = "codes are transposed: whole sectors of a column"
    if min(source.data.bits for source in sources) == 4:
        rows, columns, warps = (64, 64, itemsize // 2) if len(sources) == 1 else (32, 128, 2)
        tallest = max(source.quantization.block.m or 1 for source in sources)
        return Tile(max(rows, span, tallest), max(columns, width), 1, warps, None, reason)
    rows, columns = max(128, least.rows, span), max(128, width)
    if len(sources) == 1 and sources[0].quantization.block.m is None and itemsize == 2:
        return Tile(rows, max(64, width), 1, 4, None, reason)
    if len(sources) > 1 or sources[0].quantization.block.m is None:
        return Tile(rows, columns, 1, 8, None, reason)
    return Tile(rows, columns, 1, 4, 168 if itemsize == 2 else None, reason)

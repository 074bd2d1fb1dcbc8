"""How planes get into buffers that are no planes: which entries move where, and how large a tile moves them."""

from __future__ import annotations

from dataclasses import dataclass

from layoutc.layout.layout import Buffer, Layout, is_swizzled
from layoutc.spec.notation import Axis

Padding = tuple[tuple[int, int], ...]  # (per, multiple): an axis has ceil(size / per) entries, rounded up to a multiple


@dataclass(frozen=True)
class CodeMove:
    """Codes into a buffer: transposed, or padded, or both. in_words: in whole words of 32 bits, where shapes allow."""

    buffer: Buffer
    transposed: bool
    pad_m: int
    pad_k: int
    in_words: bool


@dataclass(frozen=True)
class ScaleMove:
    """Scales or zero points into a buffer that has an entry for each per_m x per_k; 0: the axis has one entry.

    The plane has one for each block_m x block_k. pad_m, pad_k: what counts of entries are rounded up to.
    """

    buffer: Buffer
    block_m: int
    block_k: int
    per_m: int
    per_k: int
    pad_m: int
    pad_k: int
    transposed: bool
    swizzled: bool
    rowwise: bool


Move = CodeMove | ScaleMove


@dataclass(frozen=True)
class MoveTile:
    """Rows, columns and warps of a program that lays out."""

    rows: int
    columns: int
    warps: int
    reason: str


def moves_of(layout: Layout) -> tuple[Move, ...]:
    """One for each buffer that is no plane, in order."""
    return tuple(_move(buffer, layout) for buffer in layout.buffers if buffer.dims and not buffer.is_plane)


def _move(buffer: Buffer, layout: Layout) -> Move:
    pads = {dim.axis: dim.multiple for dim in buffer.dims}
    pad_m, pad_k = pads.get("m", 1), pads.get("k", 1)
    if buffer.kind == "data":
        return CodeMove(buffer, buffer.permutes, pad_m, pad_k, _in_words(buffer))
    pers = {dim.axis: dim.per for dim in buffer.dims}
    plane = buffer.plane
    return ScaleMove(
        buffer,
        block_m=plane.per_m or 0,
        block_k=plane.per_k or 0,
        per_m=pers.get("m", 0),
        per_k=pers.get("k", 0),
        pad_m=pad_m,
        pad_k=pad_k,
        transposed=buffer.permutes,
        swizzled=is_swizzled(layout, buffer),
        rowwise=buffer.orientation == "rowwise",
    )


def _in_words(buffer: Buffer) -> bool:
    bits = buffer.plane.bits
    return buffer.permutes and not buffer.pads and (bits == 8 or (bits == 4 and buffer.low_first))


def word_of(moves: tuple[Move, ...]) -> int:
    """Rows and columns whose codes are moved at a time, where codes are of one width that fits words; else 1."""
    bits = {move.buffer.plane.bits for move in moves if isinstance(move, CodeMove)}
    return 32 // min(bits, default=32) if bits <= {4, 8} else 1


def widest(moves: tuple[Move, ...]) -> int:
    """The most rows or columns that one entry of a buffer stands for."""
    return max([1, *(dim.per for move in moves for dim in move.buffer.dims)])


def padding_of(moves: tuple[Move, ...]) -> tuple[Padding, Padding]:
    """Of m and of k: what sizes are rounded up to in any buffer, so that tiles that cover all of it reach all zeros."""
    m, k = (_padding(moves, axis) for axis in ("m", "k"))
    return m, k


def _padding(moves: tuple[Move, ...], axis: Axis) -> Padding:
    dims = {dim for move in moves for dim in move.buffer.dims if dim.axis == axis and dim.multiple > 1}
    return tuple(sorted((dim.per, dim.multiple) for dim in dims))


def move_tile(moves: tuple[Move, ...]) -> MoveTile:
    """What was fastest on an H200 at 8192 x 8192."""
    wide = widest(moves)
    bits = [move.buffer.plane.bits for move in moves if isinstance(move, CodeMove)]
    if not bits:
        return MoveTile(max(128, wide), 512, 4, "scales alone move, which are few and narrow: long rows")
    rows, columns = {4: (128, 256), 8: (256, 128)}.get(min(bits), (128, 128))
    return MoveTile(
        max(rows, wide), max(columns, wide), 8, "square in bytes: both sides of a transpose have whole sectors"
    )

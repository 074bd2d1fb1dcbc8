"""How buffers are made from planes: which entries move where, and in which tiles."""

from __future__ import annotations

from dataclasses import dataclass

from layoutc.layout.layout import Buffer, Layout, is_swizzled
from layoutc.plan.units import lanes
from layoutc.spec.notation import Axis

Padding = tuple[tuple[int, int], ...]  # (per, multiple): an axis has ceil(size / per) entries, rounded up to a multiple


@dataclass(frozen=True)
class CodeMove:
    """Moves codes into a buffer: transposed, padded, or both. in_words: in words of 32 bits, if shapes allow."""

    buffer: Buffer
    transposed: bool
    pad_m: int
    pad_k: int
    in_words: bool


@dataclass(frozen=True)
class ScaleMove:
    """Moves scales or zero points into a buffer.

    The plane has one entry per block_m x block_k elements, the buffer one per per_m x per_k; 0: one entry for the whole
    axis. pad_m, pad_k: the multiples that the buffer's dims are padded to. swizzled: in the GEMM's order.
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


@dataclass(frozen=True)
class SwizzleMove:
    """Fills a buffer that is swizzled, in words or repacked. Looks up each value where the pattern says.

    per_m, per_k: rows and columns per entry of the padded buffer; 0: one entry for the whole axis. pad_m, pad_k: the
    multiples that its dims are padded to.
    """

    buffer: Buffer
    per_m: int
    per_k: int
    pad_m: int
    pad_k: int


Move = CodeMove | ScaleMove | SwizzleMove


@dataclass(frozen=True)
class MoveTile:
    """Rows, columns and warps of a program that lays out, and the reason for them."""

    rows: int
    columns: int
    warps: int
    reason: str


def moves_of(layout: Layout) -> tuple[Move, ...]:
    """A move for each buffer that is not an unchanged plane, in order."""
    return tuple(_move(buffer, layout) for buffer in layout.buffers if buffer.dims and not buffer.is_plane)


def _move(buffer: Buffer, layout: Layout) -> Move:
    pads = {dim.axis: dim.multiple for dim in buffer.dims}
    pad_m, pad_k = pads.get("m", 1), pads.get("k", 1)
    pers = {dim.axis: dim.per for dim in buffer.dims}
    if buffer.swizzle or buffer.words or buffer.repacks:
        return SwizzleMove(buffer, pers.get("m", 0), pers.get("k", 0), pad_m, pad_k)
    if buffer.kind == "data":
        return CodeMove(buffer, buffer.permutes, pad_m, pad_k, _in_words(buffer))
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
    """True if codes are transposed without padding, and have 8 bits, or 4 bits with low bits first."""
    bits = buffer.plane.bits
    return buffer.permutes and not buffer.pads and (bits == 8 or (bits == 4 and buffer.low_first))


def word_of(moves: tuple[Move, ...]) -> int:
    """Rows and columns of codes moved at a time: the codes of a 32-bit word; 1 if codes do not have 4 or 8 bits."""
    bits = {move.buffer.plane.bits for move in moves if isinstance(move, CodeMove)}
    return 32 // min(bits, default=32) if bits <= {4, 8} else 1


def widest(moves: tuple[Move, ...]) -> int:
    """The most rows or columns that one entry of a buffer covers, among buffers that tiles move."""
    return max([1, *(dim.per for move in moves if not isinstance(move, SwizzleMove) for dim in move.buffer.dims)])


def padding_of(moves: tuple[Move, ...]) -> tuple[Padding, Padding]:
    """The (per, multiple) pairs of all buffers' dims, for m and for k. Tiles must cover the padding to zero it."""
    m, k = (_padding(moves, axis) for axis in ("m", "k"))
    return m, k


def _padding(moves: tuple[Move, ...], axis: Axis) -> Padding:
    dims = {dim for move in moves for dim in move.buffer.dims if dim.axis == axis and dim.multiple > 1}
    return tuple(sorted((dim.per, dim.multiple) for dim in dims))


def move_tile(moves: tuple[Move, ...]) -> MoveTile:
    """The tile that was fastest on an H200 at 8192 x 8192."""
    wide = lanes(widest(moves))
    bits = [move.buffer.plane.bits for move in moves if isinstance(move, CodeMove)]
    if not bits and any(isinstance(move, SwizzleMove) for move in moves):
        reason = "values are looked up one by one, some of them by each thread"
        return MoveTile(max(16, wide), max(128, wide), 4, reason)
    if not bits:
        return MoveTile(max(128, wide), 512, 4, "only scales move, which are few and narrow: long rows")
    rows, columns = {4: (128, 256), 8: (256, 128)}.get(min(bits), (128, 128))
    return MoveTile(
        max(rows, wide), max(columns, wide), 8, "square in bytes: both sides of a transpose have whole sectors"
    )

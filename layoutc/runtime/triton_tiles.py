"""Tiles in generated kernels, as Triton functions: blocks, reading and writing, and the kernels of amaxes.

A program has a tile of TILE_M rows and TILE_K columns of a matrix (m, k). EVEN says that no tile sticks out of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton_codes import bits_of, float_of, isnan, maximum


# --------------------------------------------------------------------------------------------------------------- blocks
@triton.jit
def to_blocks(tile, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """(TILE_M, TILE_K) -> (m blocks, BLOCK_M, k blocks, BLOCK_K)."""
    return tl.reshape(tile, (tile.shape[0] // BLOCK_M, BLOCK_M, tile.shape[1] // BLOCK_K, BLOCK_K))


@triton.jit
def from_blocks(blocks):
    """Inverse of to_blocks."""
    return tl.reshape(blocks, (blocks.shape[0] * blocks.shape[1], blocks.shape[2] * blocks.shape[3]))


@triton.jit
def block_amax(blocks, HARDWARE: tl.constexpr):
    """Largest magnitude of each block, (m blocks, k blocks); NaN propagates."""
    if HARDWARE:
        return tl.reduce(tl.reduce(tl.abs(blocks), 3, maximum), 1, maximum)
    # The interpreter runs a reduction of one's own element by element. Bits of magnitudes order as they do.
    return float_of(tl.max(tl.max(bits_of(blocks) & 0x7FFFFFFF, 3), 1))


@triton.jit
def block_has_nan(blocks):
    """True for blocks that hold a NaN."""
    return tl.max(tl.max(isnan(blocks).to(tl.int32), 3), 1) > 0


@triton.jit
def block_lowest(blocks):
    """Smallest value of each block; NaN propagates."""
    return tl.where(block_has_nan(blocks), float("nan"), tl.min(tl.min(blocks, 3), 1))


@triton.jit
def block_highest(blocks):
    """Largest value of each block; NaN propagates."""
    return tl.where(block_has_nan(blocks), float("nan"), tl.max(tl.max(blocks, 3), 1))


@triton.jit
def _halves(x):
    """(a, b, c, n) -> the first and the second half of the last dim."""
    both = tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2], 2, x.shape[3] // 2))
    return tl.split(tl.permute(both, (0, 1, 2, 4, 3)))


@triton.jit
def _add_1(total, x):
    """total and x's only entry of the last dim."""
    return total + tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2]))


@triton.jit
def _add_2(total, x):
    """total, and the 2 entries of x's last dim, one after the other."""
    first, second = _halves(x)
    return _add_1(_add_1(total, first), second)


@triton.jit
def _add_4(total, x):
    """total, and the 4 entries of x's last dim, one after the other."""
    first, second = _halves(x)
    return _add_2(_add_2(total, first), second)


@triton.jit
def _add_8(total, x):
    """total, and the 8 entries of x's last dim, one after the other."""
    first, second = _halves(x)
    return _add_4(_add_4(total, first), second)


@triton.jit
def _add_16(total, x):
    """total, and the 16 entries of x's last dim, one after the other."""
    first, second = _halves(x)
    return _add_8(_add_8(total, first), second)


@triton.jit
def _add_32(total, x):
    """total, and the 32 entries of x's last dim, one after the other."""
    first, second = _halves(x)
    return _add_16(_add_16(total, first), second)


@triton.jit
def _sum_in_order(x):
    """(a, b, c, n) -> (a, b, c): from the first entry of the last dim to the last; n up to 32."""
    total = tl.zeros((x.shape[0], x.shape[1], x.shape[2]), tl.float32)
    if x.shape[3] == 1:
        return _add_1(total, x)
    elif x.shape[3] == 2:
        return _add_2(total, x)
    elif x.shape[3] == 4:
        return _add_4(total, x)
    elif x.shape[3] == 8:
        return _add_8(total, x)
    elif x.shape[3] == 16:
        return _add_16(total, x)
    else:
        tl.static_assert(x.shape[3] == 32)
        return _add_32(total, x)


@triton.jit
def _sum_by_halves(x):
    """(a, b, n) -> (a, b): the first half of the last dim plus the second, until one is left; n up to 256."""
    x = tl.reshape(x, (x.shape[0], x.shape[1], 1, x.shape[2]))
    for _ in tl.static_range(8):
        if x.shape[3] > 1:
            first, second = _halves(x)
            x = first + second
    return tl.reshape(x, (x.shape[0], x.shape[1]))


@triton.jit
def block_sum(blocks, CONTRACTS_K: tl.constexpr):
    """Sum of each block, (m blocks, k blocks), in the order of numerics.block_sum; magnitudes, so that 0 + x is x."""
    if CONTRACTS_K:
        rows = _sum_in_order(blocks)  # (m blocks, rows, k blocks)
        return _sum_by_halves(tl.permute(rows, (0, 2, 1)))
    columns = _sum_in_order(tl.permute(blocks, (2, 3, 0, 1)))  # (k blocks, columns, m blocks)
    return tl.trans(_sum_by_halves(tl.permute(columns, (0, 2, 1))))


# --------------------------------------------------------------------------------------------------------------- memory
@triton.jit
def tile_of(m, k, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    """(first row, first column) of this program's tile, int64; tiles follow one another along the columns."""
    return tile_at(tl.program_id(0), k, TILE_M, TILE_K)


@triton.jit
def tile_at(program, k, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    """(first row, first column) of a tile by its number, int64."""
    columns = tl.cdiv(k, TILE_K)
    return (program // columns).to(tl.int64) * TILE_M, (program % columns).to(tl.int64) * TILE_K


@triton.jit
def load(
    pointer,
    row,
    column,
    rows,
    columns,
    stride_row,
    stride_column,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """A tile (TILE_M, TILE_K) of a (rows, columns) matrix; zeros outside it. EVEN: no tile sticks out."""
    i = tl.arange(0, TILE_M)[:, None]
    j = tl.arange(0, TILE_K)[None, :]
    places = pointer + row * stride_row + column * stride_column + (i * stride_row + j * stride_column)
    if EVEN:
        return tl.load(places)
    return tl.load(places, mask=(row + i < rows) & (column + j < columns), other=0)


@triton.jit
def store(pointer, tile, row, column, rows, columns, EVEN: tl.constexpr):
    """Writes a tile of a contiguous (rows, columns) matrix, as its dtype; nothing outside it."""
    i = tl.arange(0, tile.shape[0])[:, None]
    j = tl.arange(0, tile.shape[1])[None, :]
    places = pointer + row * columns + column + (i * columns + j)
    if EVEN:
        tl.store(places, tile.to(pointer.dtype.element_ty))
    else:
        tl.store(places, tile.to(pointer.dtype.element_ty), mask=(row + i < rows) & (column + j < columns))


@triton.jit
def store_words(
    pointer, words, row, word, rows, row_words, NBYTES: tl.constexpr, SPAN: tl.constexpr, LOW_FIRST: tl.constexpr
):
    """Writes packed words of NBYTES bytes each into rows of row_words words; SPAN: NBYTES, up to a power of two."""
    i = tl.arange(0, words.shape[0])[:, None]
    j = tl.arange(0, words.shape[1])[None, :]
    inside = (row + i < rows) & (word + j < row_words)
    places = pointer + (row * row_words + word) * NBYTES + (i * row_words + j) * NBYTES
    if NBYTES == 1:
        tl.store(places, words.to(tl.uint8), mask=inside)
    else:
        b = tl.arange(0, SPAN)[None, None, :]
        shifts = 8 * b if LOW_FIRST else 8 * (NBYTES - 1 - tl.minimum(b, NBYTES - 1))
        bytes_ = ((words[:, :, None] >> shifts) & 0xFF).to(tl.uint8)
        tl.store(places[:, :, None] + b, bytes_, mask=inside[:, :, None] & (b < NBYTES))


@triton.jit
def load_words(
    pointer,
    row,
    word,
    rows,
    row_words,
    TILE_M: tl.constexpr,
    TILE_W: tl.constexpr,
    NBYTES: tl.constexpr,
    SPAN: tl.constexpr,
    LOW_FIRST: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Inverse of store_words: int32 words, int64 where WIDE."""
    i = tl.arange(0, TILE_M)[:, None]
    j = tl.arange(0, TILE_W)[None, :]
    inside = (row + i < rows) & (word + j < row_words)
    places = pointer + (row * row_words + word) * NBYTES + (i * row_words + j) * NBYTES
    if NBYTES == 1:
        return tl.load(places, mask=inside, other=0).to(tl.int32)
    else:
        b = tl.arange(0, SPAN)[None, None, :]
        bytes_ = tl.load(places[:, :, None] + b, mask=inside[:, :, None] & (b < NBYTES), other=0)
        shifts = 8 * b if LOW_FIRST else 8 * (NBYTES - 1 - tl.minimum(b, NBYTES - 1))
        lanes = bytes_.to(tl.int64 if WIDE else tl.int32)
        return tl.sum(lanes << shifts, axis=2)


@triton.jit
def to_float(tile):
    """fp32, bf16 or fp16 -> fp32, exact. Of bf16 by its bits: one instruction each, and the interpreter's cast is not
    exact."""
    if tl.bfloat16 == tile.dtype:
        return float_of(tile.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return tile.to(tl.float32)


@triton.jit
def to_dtype(values, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """fp32 values -> DTYPE, to nearest even."""
    if not HARDWARE and tl.bfloat16 == DTYPE:
        bits = bits_of(values)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
        return tl.where(isnan(values), 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return values.to(DTYPE)


# --------------------------------------------------------------------------------------------------------------- amaxes
@triton.jit
def raise_amax(
    x,
    amax,
    row,
    column,
    m,
    k,
    stride_m,
    stride_k,
    columns,
    BLOCK_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Reads the tile of x that begins at (row, column) once: an atomic maximum for each of its column blocks."""
    tile = load(x, row, column, m, k, stride_m, stride_k, TILE_M, TILE_K, EVEN)
    tile = to_float(tile)
    found = bits_of(block_amax(to_blocks(tile, TILE_M, BLOCK_K), HARDWARE))
    j = tl.arange(0, TILE_K // BLOCK_K)[None, :] + (0 if WHOLE else column // BLOCK_K)
    tl.atomic_max(amax + j, found, mask=j < columns, sem="relaxed")


@triton.jit
def amax_kernel(
    x,
    amax,
    m,
    k,
    stride_m,
    stride_k,
    columns,
    BLOCK_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Raises amax (1, columns), fp32 bits as int32, to the largest magnitude of each BLOCK_K columns over all rows.

    WHOLE: there is one amax, for all columns. One program reads one tile once and makes one atomic maximum for each of
    its column blocks: bits of magnitudes order as they do, NaN above infinity. Moves m * k elements in, nothing out.
    """
    row, column = tile_of(m, k, TILE_M, TILE_K)
    raise_amax(x, amax, row, column, m, k, stride_m, stride_k, columns, BLOCK_K, TILE_M, TILE_K, WHOLE, EVEN, HARDWARE)


@triton.jit
def row_amax_kernel(
    x, amax, m, k, stride_m, stride_k, BLOCK_M: tl.constexpr, TILE_K: tl.constexpr, HARDWARE: tl.constexpr
):
    """amax (m / BLOCK_M, 1), fp32: the largest magnitude of each BLOCK_M rows over all columns; a program each."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M
    found = tl.zeros((BLOCK_M, TILE_K), tl.int32)
    for column in range(0, k, TILE_K):
        tile = load(x, row, column, m, k, stride_m, stride_k, BLOCK_M, TILE_K, False)
        found = tl.maximum(found, bits_of(to_float(tile)) & 0x7FFFFFFF)
    tl.store(amax + tl.program_id(0), float_of(tl.max(tl.max(found, 1), 0)))

"""Tiles in generated kernels, as Triton functions: reading and writing, and the kernels of amaxes.

A program has a tile of TILE_M rows and TILE_K columns of a matrix (m, k). EVEN says that no tile sticks out of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton.blocks import block_amax, to_float
from layoutc.runtime.triton.codes import bits_of, float_of, isnan, pack, unpack


# --------------------------------------------------------------------------------------------------------------- memory
@triton.jit
def round_up(a, multiple: tl.constexpr):
    """`a` rounded up to a multiple."""
    return tl.cdiv(a, multiple) * multiple


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
def load_runs(
    pointer,
    row,
    column,
    rows,
    columns,
    stride_row,
    stride_column,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    PIECES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """As load; PIECES (1, 2 or 4) pieces of 16 bytes that follow one another in a row are in one thread.

    Each piece is a load of its own. Fewer threads share a block of a row then, and work out its scale.
    """
    if PIECES == 1:
        return load(pointer, row, column, rows, columns, stride_row, stride_column, TILE_M, TILE_K, EVEN)
    else:
        WIDTH: tl.constexpr = 128 // pointer.dtype.element_ty.primitive_bitwidth
        RUNS: tl.constexpr = TILE_K // (PIECES * WIDTH)
        # Triton moves data about, or finds amaxes twice, where one row has two dims here, or several have three.
        if TILE_M == 1:
            i = tl.zeros((1, 1, 1), tl.int32)
            j = tl.arange(0, RUNS)[None, :, None] * (PIECES * WIDTH) + tl.arange(0, WIDTH)[None, None, :]
        else:
            run = tl.arange(0, TILE_M * RUNS)[:, None]
            i = run // RUNS
            j = (run % RUNS) * (PIECES * WIDTH) + tl.arange(0, WIDTH)[None, :]
        places = pointer + row * stride_row + column * stride_column + (i * stride_row + j * stride_column)
        step = WIDTH * stride_column
        there = row + i < rows
        a = _load_piece(places, there & (column + j < columns), EVEN)
        b = _load_piece(places + step, there & (column + j + WIDTH < columns), EVEN)
        if PIECES == 2:
            pieces = _swap_last_dims(tl.join(a, b))
        else:
            tl.static_assert(PIECES == 4)
            c = _load_piece(places + 2 * step, there & (column + j + 2 * WIDTH < columns), EVEN)
            d = _load_piece(places + 3 * step, there & (column + j + 3 * WIDTH < columns), EVEN)
            pieces = _swap_last_dims(tl.join(_swap_last_dims(tl.join(a, c)), _swap_last_dims(tl.join(b, d))))
        return tl.reshape(pieces, (TILE_M, TILE_K))


@triton.jit
def _swap_last_dims(x):
    """The last two dims in the other order."""
    if len(x.shape) == 3:
        return tl.permute(x, (0, 2, 1))
    elif len(x.shape) == 4:
        return tl.permute(x, (0, 1, 3, 2))
    else:
        return tl.permute(x, (0, 1, 2, 4, 3))


@triton.jit
def _load_piece(places, inside, EVEN: tl.constexpr):
    """Values at places, zeros outside."""
    if EVEN:
        return tl.load(places)
    return tl.load(places, mask=inside, other=0)


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
def store_packed(pointer, codes, row, column, rows, columns, BITS: tl.constexpr, LOW_FIRST: tl.constexpr):
    """Writes a tile of codes of BITS bits into contiguous rows, in groups that fill whole bytes."""
    GROUP: tl.constexpr = 8 if BITS % 2 else (4 if BITS % 4 else (2 if BITS % 8 else 1))
    NBYTES: tl.constexpr = BITS * GROUP // 8
    SPAN: tl.constexpr = 1 if NBYTES == 1 else (4 if NBYTES == 3 else 8)
    words = pack(codes, BITS, GROUP, LOW_FIRST) if GROUP > 1 else codes
    store_words(pointer, words, row, column // GROUP, rows, columns // GROUP, NBYTES, SPAN, LOW_FIRST)


@triton.jit
def load_codes(
    pointer,
    at,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    BITS: tl.constexpr = 8,
    LOW_FIRST: tl.constexpr = True,
    EVEN: tl.constexpr = False,
):
    """Inverse of store_packed: (TILE_M, TILE_K) int32. EVEN is for codes of 8 bits. at: row, column, rows, columns."""
    row, column, rows, columns = at
    if BITS == 8:
        return load(pointer, row, column, rows, columns, columns, 1, TILE_M, TILE_K, EVEN).to(tl.int32)
    else:
        GROUP: tl.constexpr = 8 if BITS % 2 else (4 if BITS % 4 else 2)
        NBYTES: tl.constexpr = BITS * GROUP // 8
        SPAN: tl.constexpr = 1 if NBYTES == 1 else (4 if NBYTES == 3 else 8)
        W: tl.constexpr = TILE_K // GROUP
        WIDE: tl.constexpr = BITS * GROUP >= 32
        words = load_words(
            pointer, row, column // GROUP, rows, columns // GROUP, TILE_M, W, NBYTES, SPAN, LOW_FIRST, WIDE
        )
        return unpack(words, BITS, GROUP, LOW_FIRST)


@triton.jit
def load_blocks(
    plane,
    at,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of a plane with an entry for each BLOCK of rows and columns, those of a tile: (m blocks, k blocks).

    at: row, column, m, k: where the tile begins, and the sizes of the matrix. A block of 0 is the whole axis.
    """
    row, column, m, k = at
    BLOCK_M: tl.constexpr = BLOCK[0]
    BLOCK_K: tl.constexpr = BLOCK[1]
    at_m = 0 if BLOCK_M == 0 else (row if BLOCK_M == 1 else row // BLOCK_M)
    at_k = 0 if BLOCK_K == 0 else (column if BLOCK_K == 1 else column // BLOCK_K)
    count_m = 1 if BLOCK_M == 0 else (m if BLOCK_M == 1 else tl.cdiv(m, BLOCK_M))
    count_k = 1 if BLOCK_K == 0 else (k if BLOCK_K == 1 else tl.cdiv(k, BLOCK_K))
    SPAN_M: tl.constexpr = TILE_M // BLOCK_M if BLOCK_M else 1
    SPAN_K: tl.constexpr = TILE_K // BLOCK_K if BLOCK_K else 1
    WHOLE: tl.constexpr = EVEN and BLOCK_M > 0 and BLOCK_K > 0
    return load(plane, at_m, at_k, count_m, count_k, count_k, 1, SPAN_M, SPAN_K, WHOLE)


@triton.jit
def store_blocks(plane, entries, at, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Inverse of load_blocks. An axis without blocks has one entry, of tiles that span it or that agree on it."""
    row, column, m, k = at
    BLOCK_M: tl.constexpr = BLOCK[0]
    BLOCK_K: tl.constexpr = BLOCK[1]
    if plane is not None:
        at_m = row if BLOCK_M <= 1 else row // BLOCK_M
        at_k = column if BLOCK_K <= 1 else column // BLOCK_K
        count_m = 1 if BLOCK_M == 0 else (m if BLOCK_M == 1 else tl.cdiv(m, BLOCK_M))
        count_k = 1 if BLOCK_K == 0 else (k if BLOCK_K == 1 else tl.cdiv(k, BLOCK_K))
        WHOLE: tl.constexpr = EVEN and BLOCK_M > 0 and BLOCK_K > 0
        if BLOCK_M or BLOCK_K:
            store(plane, entries, at_m, at_k, count_m, count_k, WHOLE)
        else:
            tl.store(plane, entries.to(plane.dtype.element_ty), mask=(row == 0) & (column == 0))


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
    largest = bits_of(block_amax(tile, TILE_M, BLOCK_K, HARDWARE))
    j = tl.arange(0, TILE_K // BLOCK_K)[None, :] + (0 if WHOLE else column // BLOCK_K)
    tl.atomic_max(amax + j, largest, mask=j < columns, sem="relaxed")


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
    largest = tl.zeros((BLOCK_M, TILE_K), tl.int32)
    for column in range(0, k, TILE_K):
        tile = load(x, row, column, m, k, stride_m, stride_k, BLOCK_M, TILE_K, False)
        largest = tl.maximum(largest, bits_of(to_float(tile)) & 0x7FFFFFFF)
    tl.store(amax + tl.program_id(0), float_of(tl.max(tl.max(largest, 1), 0)))

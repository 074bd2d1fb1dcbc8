"""Triton functions that load and store tiles in generated kernels.

A program processes a tile of TILE_M rows and TILE_K columns, or TILE[0] and TILE[1], of a matrix (m, k). at: (row,
column, m, k): where the tile begins, and the size of the matrix. strides: from one row, or column, of the matrix to
the next. Callers build tuples inside calls, where constants stay constexpr. EVEN: every tile is inside the matrix.
COVER: the rows and columns of a tile that hold whole blocks. The others are idle: they are neither loaded nor stored.
(0, 0): no row or column is idle.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from layoutc.runtime.triton.codes import as_stored, bits_of, isnan, power_above

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
ALL = tl.constexpr((0, 0))  # default of COVER
NO_UNITS = tl.constexpr((0, 0))  # default of UNIT
USUAL = tl.constexpr("")  # default of EVICT


class QuantizeOptions(NamedTuple):
    """Constants of a recipe's quantize_tile: sources to write, whether scales are swizzled, whether every tile is
    inside the matrix, and the conversion level. Build it inside the call, where fields stay constexpr.
    """

    ROWWISE: Any
    COLUMNWISE: Any
    SWIZZLED: Any
    EVEN: Any
    CVT_LEVEL: Any


class DequantizeOptions(NamedTuple):
    """Constants of a recipe's dequantize_tile: the source to read, the tile's size, and as in QuantizeOptions."""

    ROWWISE: Any
    COLUMNWISE: Any
    TILE_M: Any
    TILE_K: Any
    EVEN: Any
    CVT_LEVEL: Any


class LayOutOptions(NamedTuple):
    """Constants of a recipe's lay_out_tile, as in the other options. WORDS: codes can be moved in 32-bit words."""

    SWIZZLED: Any
    WORDS: Any
    TILE_M: Any
    TILE_K: Any
    CVT_LEVEL: Any


@triton.jit
def round_up(a, multiple: tl.constexpr):
    """`a` rounded up to a multiple."""
    return tl.cdiv(a, multiple) * multiple


@triton.jit
def tile_of(m, k, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    """(first row, first column) of this program's tile, int64. Tiles are numbered row by row."""
    return tile_at(tl.program_id(0), k, TILE_M, TILE_K)


@triton.jit
def tile_at(program, k, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    """(first row, first column) of the tile with the given number, int64. TILE_K 0: tiles are whole rows."""
    columns = tl.cdiv(k, TILE_K) if TILE_K else 1
    return (program // columns).to(tl.int64) * TILE_M, (program % columns).to(tl.int64) * TILE_K


@triton.jit
def load(
    pointer, at, strides, TILE: tl.constexpr, EVEN: tl.constexpr, COVER: tl.constexpr = ALL, EVICT: tl.constexpr = USUAL
):
    """Loads a tile of a matrix, with zeros outside the matrix. EVICT: Triton's eviction_policy."""
    row, column, rows, columns = at
    i = tl.arange(0, TILE[0])[:, None]
    j = tl.arange(0, TILE[1])[None, :]
    pointers = pointer + row * strides[0] + column * strides[1] + (i * strides[0] + j * strides[1])
    if COVER[0]:
        return tl.load(pointers, mask=_covered(i, j, at, EVEN, COVER), other=0)
    if EVEN:
        return tl.load(pointers, eviction_policy=EVICT)
    return tl.load(pointers, mask=(row + i < rows) & (column + j < columns), other=0, eviction_policy=EVICT)


@triton.jit
def _covered(i, j, at, EVEN: tl.constexpr, COVER: tl.constexpr):
    """True for entries (i, j) of a tile that are inside the matrix and not idle."""
    row, column, rows, columns = at
    covered = (i < COVER[0]) & (j < COVER[1])
    if EVEN:
        return covered
    return covered & (row + i < rows) & (column + j < columns)


@triton.jit
def load_runs(
    pointer, at, strides, TILE: tl.constexpr, PIECES: tl.constexpr, EVEN: tl.constexpr, COVER: tl.constexpr = ALL,
    BEFORE: tl.constexpr = False,
):  # fmt: skip
    """Like load, with PIECES (1, 2 or 4) adjacent 16-byte pieces of a row per thread.

    Each piece is a separate load. So fewer threads share a block along a row and compute its scale. BEFORE: a tile may
    begin before the first column; with several pieces only.
    """
    if PIECES == 1:
        return load(pointer, at, strides, TILE, EVEN, COVER)
    else:
        tl.static_assert(COVER[0] == 0)
        TILE_M: tl.constexpr = TILE[0]
        TILE_K: tl.constexpr = TILE[1]
        row, column, rows, columns = at
        WIDTH: tl.constexpr = 128 // pointer.dtype.element_ty.primitive_bitwidth
        RUNS: tl.constexpr = TILE_K // (PIECES * WIDTH)
        # These shapes matter: with two dims for one row, or three for more, Triton moves data or repeats amaxes.
        if TILE_M == 1:
            i = tl.zeros((1, 1, 1), tl.int32)
            j = tl.arange(0, RUNS)[None, :, None] * (PIECES * WIDTH) + tl.arange(0, WIDTH)[None, None, :]
        else:
            run = tl.arange(0, TILE_M * RUNS)[:, None]
            i = run // RUNS
            j = (run % RUNS) * (PIECES * WIDTH) + tl.arange(0, WIDTH)[None, :]
        pointers = pointer + row * strides[0] + column * strides[1] + (i * strides[0] + j * strides[1])
        step = WIDTH * strides[1]
        inside = row + i < rows
        a = _load_piece(pointers, inside, column + j, columns, EVEN, BEFORE)
        b = _load_piece(pointers + step, inside, column + j + WIDTH, columns, EVEN, BEFORE)
        if PIECES == 2:
            pieces = _swap_last_dims(tl.join(a, b))
        else:
            tl.static_assert(PIECES == 4)
            c = _load_piece(pointers + 2 * step, inside, column + j + 2 * WIDTH, columns, EVEN, BEFORE)
            d = _load_piece(pointers + 3 * step, inside, column + j + 3 * WIDTH, columns, EVEN, BEFORE)
            pieces = _swap_last_dims(tl.join(_swap_last_dims(tl.join(a, c)), _swap_last_dims(tl.join(b, d))))
        return tl.reshape(pieces, (TILE_M, TILE_K))


@triton.jit
def _swap_last_dims(x):
    """Swaps the last two dims of x, which has 3 to 5."""
    if len(x.shape) == 3:
        return tl.permute(x, (0, 2, 1))
    elif len(x.shape) == 4:
        return tl.permute(x, (0, 1, 3, 2))
    else:
        return tl.permute(x, (0, 1, 2, 4, 3))


@triton.jit
def _load_piece(pointers, inside, column, columns, EVEN: tl.constexpr, BEFORE: tl.constexpr):
    """Loads from pointers, with zeros outside the matrix. inside: whether a row is in it."""
    if EVEN:
        return tl.load(pointers)
    inside &= column < columns
    if BEFORE:
        inside &= column >= 0
    return tl.load(pointers, mask=inside, other=0)


@triton.jit
def store(pointer, tile, at, EVEN: tl.constexpr, COVER: tl.constexpr = ALL, EVICT: tl.constexpr = USUAL):
    """Writes a tile into a contiguous matrix in the matrix's dtype, and nothing outside it. EVICT: as in `load`."""
    row, column, rows, columns = at
    i = tl.arange(0, tile.shape[0])[:, None]
    j = tl.arange(0, tile.shape[1])[None, :]
    pointers = pointer + row * columns + column + (i * columns + j)
    if COVER[0]:
        tl.store(pointers, tile.to(pointer.dtype.element_ty), mask=_covered(i, j, at, EVEN, COVER))
    elif EVEN:
        tl.store(pointers, tile.to(pointer.dtype.element_ty), eviction_policy=EVICT)
    else:
        inside = (row + i < rows) & (column + j < columns)
        tl.store(pointers, tile.to(pointer.dtype.element_ty), mask=inside, eviction_policy=EVICT)


@triton.jit
def store_pieces(pointers, groups, EVICT: tl.constexpr):
    """Writes groups of adjacent values, (n, rows, each), at pointers, (n, rows, 1), 16 bytes at a time."""
    EACH: tl.constexpr = groups.shape[2]
    if EACH * groups.dtype.primitive_bitwidth <= 128:
        tl.store(pointers + tl.arange(0, EACH)[None, None, :], groups, eviction_policy=EVICT)
    else:
        halves = tl.reshape(groups, (groups.shape[0], groups.shape[1], 2, EACH // 2))
        first, second = tl.split(tl.permute(halves, (0, 1, 3, 2)))
        store_pieces(pointers, first, EVICT)
        store_pieces(pointers + EACH // 2, second, EVICT)


@triton.jit
def store_words(pointer, words, at, NBYTES: tl.constexpr, LOW_FIRST: tl.constexpr, COVER: tl.constexpr = ALL):
    """Writes packed words of NBYTES bytes into rows of words. at: as in `store`, in words."""
    row, word, rows, row_words = at
    i = tl.arange(0, words.shape[0])[:, None]
    j = tl.arange(0, words.shape[1])[None, :]
    inside = (row + i < rows) & (word + j < row_words)
    if COVER[0]:
        inside = inside & (i < COVER[0]) & (j < COVER[1])
    pointers = pointer + (row * row_words + word) * NBYTES + (i * row_words + j) * NBYTES
    if NBYTES == 1:
        tl.store(pointers, words.to(tl.uint8), mask=inside)
    else:
        b = tl.arange(0, power_above(NBYTES))[None, None, :]
        shifts = 8 * b if LOW_FIRST else 8 * (NBYTES - 1 - tl.minimum(b, NBYTES - 1))
        bytes_ = ((words[:, :, None] >> shifts) & 0xFF).to(tl.uint8)
        tl.store(pointers[:, :, None] + b, bytes_, mask=inside[:, :, None] & (b < NBYTES))


@triton.jit
def load_words(pointer, at, TILE: tl.constexpr, NBYTES: tl.constexpr, LOW_FIRST: tl.constexpr, WIDE: tl.constexpr):
    """Inverse of store_words: loads a tile of words, int64 if WIDE, else int32; zeros outside the matrix."""
    row, word, rows, row_words = at
    i = tl.arange(0, TILE[0])[:, None]
    j = tl.arange(0, TILE[1])[None, :]
    inside = (row + i < rows) & (word + j < row_words)
    pointers = pointer + (row * row_words + word) * NBYTES + (i * row_words + j) * NBYTES
    if NBYTES == 1:
        return tl.load(pointers, mask=inside, other=0).to(tl.int32)
    else:
        b = tl.arange(0, power_above(NBYTES))[None, None, :]
        bytes_ = tl.load(pointers[:, :, None] + b, mask=inside[:, :, None] & (b < NBYTES), other=0)
        shifts = 8 * b if LOW_FIRST else 8 * (NBYTES - 1 - tl.minimum(b, NBYTES - 1))
        lanes = bytes_.to(tl.int64 if WIDE else tl.int32)
        return tl.sum(lanes << shifts, axis=2)


@triton.jit
def store_packed(pointer, codes, at, BITS: tl.constexpr, LOW_FIRST: tl.constexpr, COVER: tl.constexpr = ALL):
    """Writes a tile of BITS-bit codes into contiguous rows, packed in groups that fill whole bytes."""
    GROUP: tl.constexpr = 8 if BITS % 2 else (4 if BITS % 4 else (2 if BITS % 8 else 1))
    NBYTES: tl.constexpr = BITS * GROUP // 8
    words = pack(codes, BITS, GROUP, LOW_FIRST) if GROUP > 1 else codes
    row, column, rows, columns = at
    KEPT_M: tl.constexpr = COVER[0]
    KEPT_K: tl.constexpr = COVER[1] // GROUP
    of_words = (row, column // GROUP, rows, columns // GROUP)
    store_words(pointer, words, of_words, NBYTES, LOW_FIRST, (KEPT_M, KEPT_K))


@triton.jit
def load_codes(
    pointer, at,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, BITS: tl.constexpr = 8, LOW_FIRST: tl.constexpr = True,
    EVEN: tl.constexpr = False,
):  # fmt: skip
    """Inverse of store_packed: loads a tile of codes, (TILE_M, TILE_K) int32.

    EVEN affects only 8-bit codes.
    """
    row, column, rows, columns = at
    if BITS == 8:
        return load(pointer, at, (columns, 1), (TILE_M, TILE_K), EVEN).to(tl.int32)
    else:
        GROUP: tl.constexpr = 8 if BITS % 2 else (4 if BITS % 4 else 2)
        of_words = (row, column // GROUP, rows, columns // GROUP)
        W: tl.constexpr = TILE_K // GROUP
        words = load_words(pointer, of_words, (TILE_M, W), BITS * GROUP // 8, LOW_FIRST, BITS * GROUP >= 32)
        return unpack(words, BITS, GROUP, LOW_FIRST)


@triton.jit
def load_blocks(
    plane, at,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr = NO_UNITS,
):  # fmt: skip
    """Loads the entries of a tile's blocks, (m blocks, k blocks), from a plane with one entry per block.

    at: begins with (row, column, m, k): where the tile begins, and the size of the matrix. BLOCK: rows and columns of
    a block; 0 for the whole axis. If a tile is not whole blocks, their counts are rounded up to powers of two.

    UNIT: rows and columns of a unit. With it, the result has an entry for each unit of the tile, (m units, k units),
    and blocks may begin or end outside the tile.
    """
    row, column, m, k = at[:4]
    BLOCK_M: tl.constexpr = BLOCK[0]
    BLOCK_K: tl.constexpr = BLOCK[1]
    at_m = 0 if BLOCK_M == 0 else (row if BLOCK_M == 1 else row // BLOCK_M)
    at_k = 0 if BLOCK_K == 0 else (column if BLOCK_K == 1 else column // BLOCK_K)
    count_m = 1 if BLOCK_M == 0 else (m if BLOCK_M == 1 else tl.cdiv(m, BLOCK_M))
    count_k = 1 if BLOCK_K == 0 else (k if BLOCK_K == 1 else tl.cdiv(k, BLOCK_K))
    if UNIT[0] + UNIT[1] > 0:
        i = _block_of_units(row, TILE_M, BLOCK_M, UNIT[0])[:, None]
        j = _block_of_units(column, TILE_K, BLOCK_K, UNIT[1])[None, :]
        return tl.load(plane + i * count_k + j, mask=(i < count_m) & (j < count_k), other=0)
    else:
        SPAN_M: tl.constexpr = power_above(TILE_M // BLOCK_M) if BLOCK_M else 1
        SPAN_K: tl.constexpr = power_above(TILE_K // BLOCK_K) if BLOCK_K else 1
        return load(plane, (at_m, at_k, count_m, count_k), (count_k, 1), (SPAN_M, SPAN_K), EVEN)


@triton.jit
def _block_of_units(first, TILE: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """The number of each unit's block, along one axis of a tile. BLOCK 0 is the whole axis."""
    if BLOCK == 0:
        return tl.zeros((1,), tl.int64)
    else:
        return (first + tl.arange(0, TILE // UNIT) * UNIT) // BLOCK


@triton.jit
def store_blocks(plane, entries, at, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Inverse of load_blocks; does nothing if the plane is None.

    at: (row, column, m, k, COVER_M, COVER_K). An axis with BLOCK 0 has one entry, so tiles must span the axis, or all
    have the same entry.
    """
    row, column, m, k = at[:4]
    COVER_M: tl.constexpr = at[4]
    COVER_K: tl.constexpr = at[5]
    BLOCK_M: tl.constexpr = BLOCK[0]
    BLOCK_K: tl.constexpr = BLOCK[1]
    if plane is not None:
        at_m = row if BLOCK_M <= 1 else row // BLOCK_M
        at_k = column if BLOCK_K <= 1 else column // BLOCK_K
        count_m = 1 if BLOCK_M == 0 else (m if BLOCK_M == 1 else tl.cdiv(m, BLOCK_M))
        count_k = 1 if BLOCK_K == 0 else (k if BLOCK_K == 1 else tl.cdiv(k, BLOCK_K))
        WHOLE: tl.constexpr = EVEN and BLOCK_M > 0 and BLOCK_K > 0
        if BLOCK_M or BLOCK_K:
            KEPT_M: tl.constexpr = COVER_M // BLOCK_M if BLOCK_M else (1 if COVER_M else 0)
            KEPT_K: tl.constexpr = COVER_K // BLOCK_K if BLOCK_K else (1 if COVER_K else 0)
            entries = as_stored(entries, plane.dtype.element_ty)
            if WHOLE and BLOCK_M == 1 and KEPT_K == 0 and tl.float32 == plane.dtype.element_ty and not INTERPRETED:
                i = tl.arange(0, entries.shape[0])[:, None] * count_k + tl.arange(0, entries.shape[1])[None, :]
                _scatter(plane + at_m * count_k + at_k, i, entries)
            else:
                store(plane, entries, (at_m, at_k, count_m, count_k), WHOLE, (KEPT_M, KEPT_K))
        else:
            tl.store(plane, as_stored(entries, plane.dtype.element_ty), mask=(row == 0) & (column == 0))


@triton.jit
def _scatter(pointer, places, values):
    """pointer[place] = value, fp32, for each place of a tile. Every thread that has a value stores it.

    For tl.store, Triton would first move values to other threads, through shared memory with two barriers.
    """
    tl.inline_asm_elementwise(
        "{ .reg .u64 at; mad.wide.s32 at, $2, 4, $1; st.global.f32 [at], $3; mov.u32 $0, 0; }",
        "=r,l,r,f",
        [tl.broadcast_to(pointer.to(tl.int64), places.shape), places, values],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def to_dtype(values, DTYPE: tl.constexpr, CVT_LEVEL: tl.constexpr):
    """fp32 values -> DTYPE, rounded to nearest even."""
    if not CVT_LEVEL and tl.bfloat16 == DTYPE:
        bits = bits_of(values)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
        return tl.where(isnan(values), 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return values.to(DTYPE)


# -------------------------------------------------------------------------------------------------------- packed codes
@triton.jit
def pack(codes, BITS: tl.constexpr, GROUP: tl.constexpr, LOW_FIRST: tl.constexpr):
    """Codes (rows, columns) -> words (rows, columns / GROUP). The GROUP codes of a word fill whole bytes."""
    lanes = tl.reshape(codes, (codes.shape[0], codes.shape[1] // GROUP, GROUP))
    if GROUP * BITS >= 32:
        lanes = lanes.to(tl.int64)
    offsets = tl.arange(0, GROUP) * BITS
    shifts = offsets if LOW_FIRST else (GROUP - 1) * BITS - offsets
    return tl.sum(lanes << shifts[None, None, :], axis=2)


@triton.jit
def unpack(words, BITS: tl.constexpr, GROUP: tl.constexpr, LOW_FIRST: tl.constexpr):
    """Inverse of pack."""
    offsets = tl.arange(0, GROUP) * BITS
    shifts = offsets if LOW_FIRST else (GROUP - 1) * BITS - offsets
    lanes = (words[:, :, None] >> shifts[None, None, :]) & ((1 << BITS) - 1)
    return tl.reshape(lanes, (words.shape[0], words.shape[1] * GROUP)).to(tl.int32)

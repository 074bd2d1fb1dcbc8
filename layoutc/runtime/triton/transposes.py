"""Triton functions that lay out planes in generated kernels: transposed codes, repeated scales, zero padding."""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton.blocks import from_blocks
from layoutc.runtime.triton.codes import as_stored
from layoutc.runtime.triton.tiles import load_codes, pack, round_up, store, store_packed
from layoutc.runtime.triton.units import power_below

# Defaults of DIMS, FREE and PAD below. Triton 3.6 does not accept a str as a default.
ROWS_FIRST = tl.constexpr("mk")
ROWS_FREE = tl.constexpr("m")
NO_PADDING = tl.constexpr((1, 1))


@triton.jit
def permute_bytes(a, b, CODE: tl.constexpr):
    """Four of the eight bytes of a (0 to 3) and b (4 to 7), selected by the prmt instruction CODE."""
    return tl.inline_asm_elementwise(CODE, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _swap(a, b, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """Swaps the bits of a at MASK << SHIFT with those of b at MASK."""
    return (a & MASK) | ((b << SHIFT) & ~MASK), ((a >> SHIFT) & MASK) | (b & ~MASK)


@triton.jit
def _swap_halves(a, b, CVT_LEVEL: tl.constexpr):
    """Swaps the upper 16 bits of a with the lower 16 bits of b."""
    if CVT_LEVEL:
        return permute_bytes(a, b, "prmt.b32 $0, $1, $2, 0x5410;"), permute_bytes(a, b, "prmt.b32 $0, $1, $2, 0x7632;")
    else:
        return _swap(a, b, 16, 0x0000FFFF)


@triton.jit
def _swap_bytes(a, b, CVT_LEVEL: tl.constexpr):
    """Swaps bytes 1 and 3 of a with bytes 0 and 2 of b."""
    if CVT_LEVEL:
        return permute_bytes(a, b, "prmt.b32 $0, $1, $2, 0x6240;"), permute_bytes(a, b, "prmt.b32 $0, $1, $2, 0x7351;")
    else:
        return _swap(a, b, 8, 0x00FF00FF)


@triton.jit
def _transpose_four(words, CVT_LEVEL: tl.constexpr):
    """Transposes 4 x 4 bytes: four words that are rows become columns."""
    a, b, c, d = words
    a, c = _swap_halves(a, c, CVT_LEVEL)
    b, d = _swap_halves(b, d, CVT_LEVEL)
    a, b = _swap_bytes(a, b, CVT_LEVEL)
    c, d = _swap_bytes(c, d, CVT_LEVEL)
    return a, b, c, d


@triton.jit
def _transpose_eight(words, CVT_LEVEL: tl.constexpr):
    """Transposes 8 x 8 nibbles, like _transpose_four with bytes. Low bits come first."""
    a, b, c, d, e, f, g, h = words
    a, e = _swap_halves(a, e, CVT_LEVEL)
    b, f = _swap_halves(b, f, CVT_LEVEL)
    c, g = _swap_halves(c, g, CVT_LEVEL)
    d, h = _swap_halves(d, h, CVT_LEVEL)
    a, c = _swap_bytes(a, c, CVT_LEVEL)
    b, d = _swap_bytes(b, d, CVT_LEVEL)
    e, g = _swap_bytes(e, g, CVT_LEVEL)
    f, h = _swap_bytes(f, h, CVT_LEVEL)
    a, b = _swap(a, b, 4, 0x0F0F0F0F)
    c, d = _swap(c, d, 4, 0x0F0F0F0F)
    e, f = _swap(e, f, 4, 0x0F0F0F0F)
    g, h = _swap(g, h, 4, 0x0F0F0F0F)
    return a, b, c, d, e, f, g, h


@triton.jit
def _put_columns(words, out, at, N: tl.constexpr, EVEN: tl.constexpr, CVT_LEVEL: tl.constexpr):
    """Transposes N words of codes into a contiguous (k, m). Word n, (G, W), has rows n, N + n, and so on.

    Each column of a word is a separate store, so that Triton propagates the layout along rows back to the loads.
    """
    row, column, m, k = at[:4]
    columns = _transpose_four(words, CVT_LEVEL) if N == 4 else _transpose_eight(words, CVT_LEVEL)
    for nth in tl.static_range(N):
        word = columns[nth]
        g = row // N + tl.arange(0, word.shape[0])[:, None]
        j = column + tl.arange(0, word.shape[1])[None, :] * N + nth
        pointers = out.to(tl.pointer_type(tl.int32)) + j * (m // N) + g
        if EVEN:
            tl.store(pointers, word)
        else:
            tl.store(pointers, word, mask=(g < m // N) & (j < k))


@triton.jit
def _put_transposed(words, out, at, BITS: tl.constexpr, EVEN: tl.constexpr, CVT_LEVEL: tl.constexpr):
    """Transposes words (rows, w) of 4- or 8-bit codes into a contiguous (k, m)."""
    rows: tl.constexpr = words.shape[0]
    w: tl.constexpr = words.shape[1]
    if BITS == 8:
        lanes = tl.reshape(tl.permute(tl.reshape(words, (rows // 4, 4, w)), (0, 2, 1)), (rows // 4, w, 2, 2))
        ac, bd = tl.split(lanes)
        a, c = tl.split(ac)
        b, d = tl.split(bd)
        _put_columns((a, b, c, d), out, at, 4, EVEN, CVT_LEVEL)
    else:
        tl.static_assert(BITS == 4)
        lanes = tl.reshape(tl.permute(tl.reshape(words, (rows // 8, 8, w)), (0, 2, 1)), (rows // 8, w, 2, 2, 2))
        aceg, bdfh = tl.split(lanes)
        ae, cg = tl.split(aceg)
        bf, dh = tl.split(bdfh)
        a, e = tl.split(ae)
        b, f = tl.split(bf)
        c, g = tl.split(cg)
        d, h = tl.split(dh)
        _put_columns((a, b, c, d, e, f, g, h), out, at, 8, EVEN, CVT_LEVEL)


@triton.jit
def put_words(words, plane, transposed_out, at, BITS: tl.constexpr, EVEN: tl.constexpr, CVT_LEVEL: tl.constexpr):
    """Writes a tile of codes, in words, into a plane (m, k), and transposed into a buffer (k, m); either may be None.

    at: (row, column, m, k, COVER_M, COVER_K): where the tile begins, the size of the matrix, and the rows and columns
    of the tile to write. BITS: 4 or 8.
    """
    N: tl.constexpr = 32 // BITS
    row, column, m, k = at[:4]
    COVER_M: tl.constexpr = at[4]
    COVER_K: tl.constexpr = at[5] // N
    if plane is not None:
        store(plane.to(tl.pointer_type(tl.int32)), words, (row, column // N, m, k // N), EVEN, (COVER_M, COVER_K))
    if transposed_out is not None:
        _put_transposed(words, transposed_out, at, BITS, EVEN, CVT_LEVEL)


@triton.jit
def to_words(codes):
    """(rows, columns) 8-bit codes -> (rows, columns / 4) int32, the first code lowest.

    Codes are narrowed to bytes before threads exchange them. That is faster, and works around a bug: with whole words,
    CUDA 12.8's ptxas mixes up registers on sm_90 if codes of NaN have been selected.
    """
    lanes = tl.reshape(codes.to(tl.uint8), (codes.shape[0], codes.shape[1] // 4, 2, 2)).to(tl.int32)
    c02, c13 = tl.split(lanes)
    c0, c2 = tl.split(c02)
    c1, c3 = tl.split(c13)
    return c0 | (c1 << 8) | (c2 << 16) | (c3 << 24)


@triton.jit
def store_codes(
    codes, plane, transposed_out, at,
    EVEN: tl.constexpr, CVT_LEVEL: tl.constexpr, BITS: tl.constexpr = 8, LOW_FIRST: tl.constexpr = True,
):  # fmt: skip
    """Like put_words, for codes of any width. A buffer needs 8-bit codes, or 4-bit codes with low bits first."""
    if transposed_out is not None:
        packed = pack(codes, 4, 2, LOW_FIRST) if BITS == 4 else codes
        put_words(to_words(packed), plane, transposed_out, at, BITS, EVEN, CVT_LEVEL)
    elif plane is not None:
        if BITS == 8:
            store(plane, codes, at[:4], EVEN, at[4:])
        else:
            store_packed(plane, codes, at[:4], BITS, LOW_FIRST, at[4:])


@triton.jit
def _row_words(pointer, at, GROUPS: tl.constexpr, WORDS: tl.constexpr, N: tl.constexpr, FIRST: tl.constexpr):
    """Loads words of every Nth row from row + FIRST on: (GROUPS, WORDS) int32, with zeros outside the matrix. Columns
    of `at` count words."""
    row, word, rows, row_words = at
    i = tl.arange(0, GROUPS)[:, None] * N + FIRST
    j = tl.arange(0, WORDS)[None, :]
    pointers = pointer + (row + i) * row_words + word + j
    return tl.load(pointers, mask=(row + i < rows) & (word + j < row_words), other=0)


@triton.jit
def transpose_words(data, out, at, TILE: tl.constexpr, BITS: tl.constexpr, CVT_LEVEL: tl.constexpr):
    """Transposes a tile of (m, k) into a contiguous (k, m). Codes have 8 bits, or 4 with low bits first. m and k must
    be multiples of the codes per word, N.

    N x N codes are transposed in N words, with 1/N of the shared memory accesses of single codes.
    """
    N: tl.constexpr = 32 // BITS
    source = data.to(tl.pointer_type(tl.int32))
    row, column, m, k = at
    words = ()
    for first in tl.static_range(N):
        loaded = _row_words(source, (row, column // N, m, k // N), TILE[0] // N, TILE[1] // N, N, first)
        words = words + (loaded,)  # noqa: RUF005  what Triton has
    _put_columns(words, out, at, N, False, CVT_LEVEL)


@triton.jit
def repack_codes(
    data, out, at,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, CVT_LEVEL: tl.constexpr, BITS: tl.constexpr, LOW_FIRST: tl.constexpr,
    DIMS: tl.constexpr = ROWS_FIRST, PAD: tl.constexpr = NO_PADDING, WORDS: tl.constexpr = False,
):  # fmt: skip
    """Moves a tile of codes from a plane (m, k) into a buffer; does nothing if the buffer is None.

    DIMS: "mk" or "km". PAD: what the buffer's sizes are rounded up to; the padding is filled with zeros. WORDS: codes
    can be transposed in 32-bit words, without padding.
    """
    row, column, m, k = at
    if out is not None:
        if WORDS:
            transpose_words(data, out, at, (TILE_M, TILE_K), BITS, CVT_LEVEL)
        else:
            codes = load_codes(data, at, TILE_M, TILE_K, BITS, LOW_FIRST)
            rows = round_up(m, PAD[0])
            columns = round_up(k, PAD[1])
            if DIMS == "km":
                store_packed(out, tl.trans(codes), (column, row, columns, rows), BITS, LOW_FIRST)
            else:
                store_packed(out, codes, (row, column, rows, columns), BITS, LOW_FIRST)


@triton.jit
def _entries(first, TILE: tl.constexpr, STEP: tl.constexpr):
    """The numbers of entries that begin in a tile along an axis, padded with 2^31, if STEP is not a power of two."""
    LANES: tl.constexpr = TILE // power_below(STEP) if STEP < TILE else 1
    entry = tl.cdiv(first, STEP) + tl.arange(0, LANES)
    return tl.where(entry * STEP < first + TILE, entry, 1 << 31)


@triton.jit
def move_scales(
    plane, out, at,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, BLOCK: tl.constexpr, PER: tl.constexpr, PAD: tl.constexpr = NO_PADDING,
    DIMS: tl.constexpr = ROWS_FIRST, FREE: tl.constexpr = ROWS_FREE, SWIZZLE: tl.constexpr = None,
):  # fmt: skip
    """Moves a tile's scales from a plane into a buffer, like _put_scales; does nothing if the buffer is None.

    The plane has one scale per BLOCK of rows and columns. BLOCK and PER are 0 for an axis that is one block; the first
    tiles write its only entry.
    """
    row, column, m, k = at
    if out is not None:
        STEP_M: tl.constexpr = PER[0] if PER[0] else TILE_M
        STEP_K: tl.constexpr = PER[1] if PER[1] else TILE_K
        if STEP_M & (STEP_M - 1) == 0:
            i = row // STEP_M + tl.arange(0, TILE_M // STEP_M)[:, None]
        else:
            i = _entries(row, TILE_M, STEP_M)[:, None]
        if STEP_K & (STEP_K - 1) == 0:
            j = column // STEP_K + tl.arange(0, TILE_K // STEP_K)[None, :]
        else:
            j = _entries(column, TILE_K, STEP_K)[None, :]
        inside = (i * STEP_M < m) & (j * STEP_K < k)
        at_m = i * STEP_M // BLOCK[0] if BLOCK[0] else i * 0
        at_k = j * STEP_K // BLOCK[1] if BLOCK[1] else j * 0
        columns = tl.cdiv(k, BLOCK[1]) if BLOCK[1] else 1
        values = tl.load(plane + at_m * columns + at_k, mask=inside, other=0)
        _put_scales(tl.where(inside, values, 0), out, (i, j, m, k), PER, PAD, (DIMS, FREE), SWIZZLE)


@triton.jit
def store_scales_expanded(
    scales, out, at,
    BLOCK: tl.constexpr, PER: tl.constexpr, PAD: tl.constexpr = NO_PADDING, DIMS: tl.constexpr = ROWS_FIRST,
    FREE: tl.constexpr = ROWS_FREE, SWIZZLE: tl.constexpr = None,
):  # fmt: skip
    """Writes a tile's block scales, (m blocks, k blocks), into a buffer, like _put_scales, unless it is None."""
    row, column, m, k = at[:4]
    if out is not None:
        shape: tl.constexpr = (scales.shape[0], BLOCK[0] // PER[0], scales.shape[1], BLOCK[1] // PER[1])
        values = from_blocks(tl.broadcast_to(scales[:, None, :, None], shape))
        i = row // PER[0] + tl.arange(0, values.shape[0])[:, None]
        j = column // PER[1] + tl.arange(0, values.shape[1])[None, :]
        values = tl.where((i * PER[0] < m) & (j * PER[1] < k), values, 0)
        _put_scales(values, out, (i, j, m, k), PER, PAD, (DIMS, FREE), SWIZZLE)


@triton.jit
def _put_scales(values, out, at, PER: tl.constexpr, PAD: tl.constexpr, ORDER: tl.constexpr, SWIZZLE: tl.constexpr):
    """Writes entries of a buffer with one entry per PER[0] rows and PER[1] columns.

    at: (i, j, m, k): the numbers of the entries, and the size of the matrix. PAD: what the counts of entries are
    rounded up to. ORDER: (DIMS, FREE). DIMS: "mk" or "km". SWIZZLE: the recipe's swizzled_index, for a buffer in the
    GEMM's order; None: DIMS is the order. FREE: the axis, "m" or "k", that the product keeps, if there is a SWIZZLE.
    """
    i, j, m, k = at
    out_m = tl.cdiv(tl.cdiv(m, PER[0]), PAD[0]) * PAD[0] if PER[0] else 1
    out_k = tl.cdiv(tl.cdiv(k, PER[1]), PAD[1]) * PAD[1] if PER[1] else 1
    if SWIZZLE is not None:
        entry = SWIZZLE(i, j, out_m, out_k) if ORDER[1] == "m" else SWIZZLE(j, i, out_k, out_m)
    else:
        entry = j * out_m + i if ORDER[0] == "km" else i * out_k + j
    tl.store(out + entry, as_stored(values, out.dtype.element_ty), mask=(i < out_m) & (j < out_k))

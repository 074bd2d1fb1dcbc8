"""Laying planes out in generated kernels, as Triton functions: codes transposed, scales repeated, zeros around them."""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton.blocks import from_blocks
from layoutc.runtime.triton.codes import pack
from layoutc.runtime.triton.tiles import load_codes, round_up, store, store_packed

# Defaults: of a buffer's dims, of its free axis, of what its sizes are rounded up to. Triton 3.6 takes no text as one.
ROWS_FIRST = tl.constexpr("mk")
ROWS_FREE = tl.constexpr("m")
NO_PADDING = tl.constexpr((1, 1))


@triton.jit
def permute_bytes(a, b, CODE: tl.constexpr):
    """Four of the eight bytes of a (0 to 3) and b (4 to 7), as a prmt instruction says."""
    return tl.inline_asm_elementwise(CODE, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _swap(a, b, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """The bits of a at MASK << SHIFT and those of b at MASK change places."""
    return (a & MASK) | ((b << SHIFT) & ~MASK), ((a >> SHIFT) & MASK) | (b & ~MASK)


@triton.jit
def _swap_halves(a, b, HARDWARE: tl.constexpr):
    """The upper 16 bits of a and the lower ones of b change places."""
    if HARDWARE:
        return permute_bytes(a, b, "prmt.b32 $0, $1, $2, 0x5410;"), permute_bytes(a, b, "prmt.b32 $0, $1, $2, 0x7632;")
    else:
        return _swap(a, b, 16, 0x0000FFFF)


@triton.jit
def _swap_bytes(a, b, HARDWARE: tl.constexpr):
    """Bytes 1 and 3 of a and bytes 0 and 2 of b change places."""
    if HARDWARE:
        return permute_bytes(a, b, "prmt.b32 $0, $1, $2, 0x6240;"), permute_bytes(a, b, "prmt.b32 $0, $1, $2, 0x7351;")
    else:
        return _swap(a, b, 8, 0x00FF00FF)


@triton.jit
def _transpose_four(a, b, c, d, HARDWARE: tl.constexpr):
    """Of four rows, words of four bytes each -> of the four columns of those bytes, words of the four rows."""
    a, c = _swap_halves(a, c, HARDWARE)
    b, d = _swap_halves(b, d, HARDWARE)
    a, b = _swap_bytes(a, b, HARDWARE)
    c, d = _swap_bytes(c, d, HARDWARE)
    return a, b, c, d


@triton.jit
def _transpose_eight(a, b, c, d, e, f, g, h, HARDWARE: tl.constexpr):
    """As _transpose_four, of eight rows and words of eight nibbles, low bits first."""
    a, e = _swap_halves(a, e, HARDWARE)
    b, f = _swap_halves(b, f, HARDWARE)
    c, g = _swap_halves(c, g, HARDWARE)
    d, h = _swap_halves(d, h, HARDWARE)
    a, c = _swap_bytes(a, c, HARDWARE)
    b, d = _swap_bytes(b, d, HARDWARE)
    e, g = _swap_bytes(e, g, HARDWARE)
    f, h = _swap_bytes(f, h, HARDWARE)
    a, b = _swap(a, b, 4, 0x0F0F0F0F)
    c, d = _swap(c, d, 4, 0x0F0F0F0F)
    e, f = _swap(e, f, 4, 0x0F0F0F0F)
    g, h = _swap(g, h, 4, 0x0F0F0F0F)
    return a, b, c, d, e, f, g, h


@triton.jit
def _put_column(words, out, row, column, m, k, NTH: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr):
    """Words (G, W) of every Nth column from column + NTH on, N rows in each, into a contiguous (k, m).

    A store for each column of a word, so that a layout along the rows reaches back to where words were read.
    """
    g = row // N + tl.arange(0, words.shape[0])[:, None]
    at = column + tl.arange(0, words.shape[1])[None, :] * N + NTH
    places = out.to(tl.pointer_type(tl.int32)) + at * (m // N) + g
    if EVEN:
        tl.store(places, words)
    else:
        tl.store(places, words, mask=(g < m // N) & (at < k))


@triton.jit
def _put_four(a, b, c, d, out, row, column, m, k, EVEN: tl.constexpr, HARDWARE: tl.constexpr):
    """Words of rows 0 to 3, 4 to 7 and so on, (G, W) each, as columns of a contiguous (k, m)."""
    a, b, c, d = _transpose_four(a, b, c, d, HARDWARE)
    _put_column(a, out, row, column, m, k, 0, 4, EVEN)
    _put_column(b, out, row, column, m, k, 1, 4, EVEN)
    _put_column(c, out, row, column, m, k, 2, 4, EVEN)
    _put_column(d, out, row, column, m, k, 3, 4, EVEN)


@triton.jit
def _put_eight(a, b, c, d, e, f, g, h, out, row, column, m, k, EVEN: tl.constexpr, HARDWARE: tl.constexpr):
    """As _put_four, of eight rows and nibbles."""
    a, b, c, d, e, f, g, h = _transpose_eight(a, b, c, d, e, f, g, h, HARDWARE)
    _put_column(a, out, row, column, m, k, 0, 8, EVEN)
    _put_column(b, out, row, column, m, k, 1, 8, EVEN)
    _put_column(c, out, row, column, m, k, 2, 8, EVEN)
    _put_column(d, out, row, column, m, k, 3, 8, EVEN)
    _put_column(e, out, row, column, m, k, 4, 8, EVEN)
    _put_column(f, out, row, column, m, k, 5, 8, EVEN)
    _put_column(g, out, row, column, m, k, 6, 8, EVEN)
    _put_column(h, out, row, column, m, k, 7, 8, EVEN)


@triton.jit
def _put_transposed(words, out, row, column, m, k, BITS: tl.constexpr, EVEN: tl.constexpr, HARDWARE: tl.constexpr):
    """Words (rows, w) of codes of 4 or 8 bits, transposed, into a contiguous (k, m)."""
    rows: tl.constexpr = words.shape[0]
    w: tl.constexpr = words.shape[1]
    if BITS == 8:
        lanes = tl.reshape(tl.permute(tl.reshape(words, (rows // 4, 4, w)), (0, 2, 1)), (rows // 4, w, 2, 2))
        ac, bd = tl.split(lanes)
        a, c = tl.split(ac)
        b, d = tl.split(bd)
        _put_four(a, b, c, d, out, row, column, m, k, EVEN, HARDWARE)
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
        _put_eight(a, b, c, d, e, f, g, h, out, row, column, m, k, EVEN, HARDWARE)


@triton.jit
def put_words(words, plane, transposed_out, at, BITS: tl.constexpr, EVEN: tl.constexpr, HARDWARE: tl.constexpr):
    """A tile of codes, in words: into a plane (m, k), and transposed into a buffer (k, m), where these are not None.

    at: row, column, m, k: where the tile begins, and the sizes of the matrix.
    """
    N: tl.constexpr = 32 // BITS
    row, column, m, k = at
    if plane is not None:
        store(plane.to(tl.pointer_type(tl.int32)), words, row, column // N, m, k // N, EVEN)
    if transposed_out is not None:
        _put_transposed(words, transposed_out, row, column, m, k, BITS, EVEN, HARDWARE)


@triton.jit
def to_words(codes):
    """(rows, columns) codes of 8 bits -> (rows, columns / 4) int32, the first lowest.

    They are made bytes before threads exchange them, not only for speed: of whole words, the assembler of CUDA 12.8
    confuses some registers on sm_90, where codes have been selected for NaN.
    """
    lanes = tl.reshape(codes.to(tl.uint8), (codes.shape[0], codes.shape[1] // 4, 2, 2)).to(tl.int32)
    c02, c13 = tl.split(lanes)
    c0, c2 = tl.split(c02)
    c1, c3 = tl.split(c13)
    return c0 | (c1 << 8) | (c2 << 16) | (c3 << 24)


@triton.jit
def put_codes(
    codes,
    plane,
    transposed_out,
    at,
    EVEN: tl.constexpr,
    HARDWARE: tl.constexpr,
    BITS: tl.constexpr = 8,
    LOW_FIRST: tl.constexpr = True,
):
    """As put_words, of a tile of codes. With a buffer, those of 4 bits lie low bits first."""
    row, column, m, k = at
    if transposed_out is not None:
        packed = pack(codes, 4, 2, LOW_FIRST) if BITS == 4 else codes
        put_words(to_words(packed), plane, transposed_out, at, BITS, EVEN, HARDWARE)
    elif plane is not None:
        if BITS == 8:
            store(plane, codes, row, column, m, k, EVEN)
        else:
            store_packed(plane, codes, row, column, m, k, BITS, LOW_FIRST)


@triton.jit
def _row_words(
    pointer, row, word, rows, row_words, GROUPS: tl.constexpr, WORDS: tl.constexpr, N: tl.constexpr, FIRST: tl.constexpr
):
    """Words of every Nth row from row + FIRST on: (GROUPS, WORDS) int32, zeros outside."""
    i = tl.arange(0, GROUPS)[:, None] * N + FIRST
    j = tl.arange(0, WORDS)[None, :]
    places = pointer + (row + i) * row_words + word + j
    return tl.load(places, mask=(row + i < rows) & (word + j < row_words), other=0)


@triton.jit
def transpose_bytes(data, out, row, column, m, k, TILE_M: tl.constexpr, TILE_K: tl.constexpr, HARDWARE: tl.constexpr):
    """Bytes of a tile of (m, k) into a contiguous (k, m), four by four in words; m and k are multiples of 4.

    Words go through shared memory, a quarter of the accesses that bytes would need.
    """
    source = data.to(tl.pointer_type(tl.int32))
    G: tl.constexpr = TILE_M // 4
    W: tl.constexpr = TILE_K // 4
    a = _row_words(source, row, column // 4, m, k // 4, G, W, 4, 0)
    b = _row_words(source, row, column // 4, m, k // 4, G, W, 4, 1)
    c = _row_words(source, row, column // 4, m, k // 4, G, W, 4, 2)
    d = _row_words(source, row, column // 4, m, k // 4, G, W, 4, 3)
    _put_four(a, b, c, d, out, row, column, m, k, False, HARDWARE)


@triton.jit
def transpose_nibbles(data, out, row, column, m, k, TILE_M: tl.constexpr, TILE_K: tl.constexpr, HARDWARE: tl.constexpr):
    """As transpose_bytes for two codes in a byte, low bits first, eight by eight; m and k are multiples of 8."""
    source = data.to(tl.pointer_type(tl.int32))
    G: tl.constexpr = TILE_M // 8
    W: tl.constexpr = TILE_K // 8
    a = _row_words(source, row, column // 8, m, k // 8, G, W, 8, 0)
    b = _row_words(source, row, column // 8, m, k // 8, G, W, 8, 1)
    c = _row_words(source, row, column // 8, m, k // 8, G, W, 8, 2)
    d = _row_words(source, row, column // 8, m, k // 8, G, W, 8, 3)
    e = _row_words(source, row, column // 8, m, k // 8, G, W, 8, 4)
    f = _row_words(source, row, column // 8, m, k // 8, G, W, 8, 5)
    g = _row_words(source, row, column // 8, m, k // 8, G, W, 8, 6)
    h = _row_words(source, row, column // 8, m, k // 8, G, W, 8, 7)
    _put_eight(a, b, c, d, e, f, g, h, out, row, column, m, k, False, HARDWARE)


@triton.jit
def move_codes(
    data,
    out,
    at,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    HARDWARE: tl.constexpr,
    BITS: tl.constexpr,
    LOW_FIRST: tl.constexpr,
    DIMS: tl.constexpr = ROWS_FIRST,
    PAD: tl.constexpr = NO_PADDING,
    WORDS: tl.constexpr = False,
):
    """Codes of a tile of (m, k), of any width, into a buffer of the DIMS, sizes rounded up to PAD.

    Zeros are around them; nothing is done where the buffer is None. WORDS: they can be transposed in whole words of 32
    bits.
    """
    row, column, m, k = at
    if out is not None:
        if WORDS:
            if BITS == 8:
                transpose_bytes(data, out, row, column, m, k, TILE_M, TILE_K, HARDWARE)
            else:
                transpose_nibbles(data, out, row, column, m, k, TILE_M, TILE_K, HARDWARE)
        else:
            codes = load_codes(data, at, TILE_M, TILE_K, BITS, LOW_FIRST)
            rows = round_up(m, PAD[0])
            columns = round_up(k, PAD[1])
            if DIMS == "km":
                store_packed(out, tl.trans(codes), column, row, columns, rows, BITS, LOW_FIRST)
            else:
                store_packed(out, codes, row, column, rows, columns, BITS, LOW_FIRST)


@triton.jit
def move_scales(
    plane,
    out,
    at,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PER: tl.constexpr,
    PAD: tl.constexpr = NO_PADDING,
    DIMS: tl.constexpr = ROWS_FIRST,
    FREE: tl.constexpr = ROWS_FREE,
    PLACE: tl.constexpr = None,
):
    """Scales of a tile from a plane, one for each BLOCK of rows and columns, into a buffer, as _put_scales.

    Nothing is done where the buffer is None. An axis that blocks do not cut has PER and BLOCK 0: its one entry is
    written by the first tiles.
    """
    row, column, m, k = at
    if out is not None:
        STEP_M: tl.constexpr = PER[0] if PER[0] else TILE_M
        STEP_K: tl.constexpr = PER[1] if PER[1] else TILE_K
        i = row // STEP_M + tl.arange(0, TILE_M // STEP_M)[:, None]
        j = column // STEP_K + tl.arange(0, TILE_K // STEP_K)[None, :]
        there = (i * STEP_M < m) & (j * STEP_K < k)
        at_m = i * STEP_M // BLOCK[0] if BLOCK[0] else i * 0
        at_k = j * STEP_K // BLOCK[1] if BLOCK[1] else j * 0
        columns = tl.cdiv(k, BLOCK[1]) if BLOCK[1] else 1
        values = tl.load(plane + at_m * columns + at_k, mask=there, other=0)
        _put_scales(tl.where(there, values, 0), out, i, j, m, k, PER, PAD, DIMS, FREE, PLACE)


@triton.jit
def spread_scales(
    scales,
    out,
    at,
    BLOCK: tl.constexpr,
    PER: tl.constexpr,
    PAD: tl.constexpr = NO_PADDING,
    DIMS: tl.constexpr = ROWS_FIRST,
    FREE: tl.constexpr = ROWS_FREE,
    PLACE: tl.constexpr = None,
):
    """Scales of a tile's blocks, (m blocks, k blocks), into a buffer, as _put_scales; nothing where that is None."""
    row, column, m, k = at
    if out is not None:
        shape: tl.constexpr = (scales.shape[0], BLOCK[0] // PER[0], scales.shape[1], BLOCK[1] // PER[1])
        values = from_blocks(tl.broadcast_to(scales[:, None, :, None], shape))
        i = row // PER[0] + tl.arange(0, values.shape[0])[:, None]
        j = column // PER[1] + tl.arange(0, values.shape[1])[None, :]
        values = tl.where((i * PER[0] < m) & (j * PER[1] < k), values, 0)
        _put_scales(values, out, i, j, m, k, PER, PAD, DIMS, FREE, PLACE)


@triton.jit
def _put_scales(
    values,
    out,
    i,
    j,
    m,
    k,
    PER: tl.constexpr,
    PAD: tl.constexpr,
    DIMS: tl.constexpr,
    FREE: tl.constexpr,
    PLACE: tl.constexpr,
):
    """Entries (i, j) of a buffer that has one for each PER[0] rows and PER[1] columns, counts rounded up to PAD.

    PLACE: where a GEMM reads the scale of (free, contracted), of so many of each, whose FREE axis is m or k; None: the
    buffer has the DIMS, in order.
    """
    out_m = tl.cdiv(tl.cdiv(m, PER[0]), PAD[0]) * PAD[0] if PER[0] else 1
    out_k = tl.cdiv(tl.cdiv(k, PER[1]), PAD[1]) * PAD[1] if PER[1] else 1
    if PLACE is not None:
        at = PLACE(i, j, out_m, out_k) if FREE == "m" else PLACE(j, i, out_k, out_m)
    else:
        at = j * out_m + i if DIMS == "km" else i * out_k + j
    tl.store(out + at, values.to(out.dtype.element_ty), mask=(i < out_m) & (j < out_k))

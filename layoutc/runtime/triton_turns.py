"""Laying planes out in generated kernels, as Triton functions: codes transposed, scales repeated, zeros around them."""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton_codes import pack, unpack
from layoutc.runtime.triton_tiles import load_words, store_words


@triton.jit
def swap(a, b, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """The bits of a at MASK << SHIFT and those of b at MASK change places."""
    moved = ((a >> SHIFT) ^ b) & MASK
    return a ^ (moved << SHIFT), b ^ moved


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
def _store_turned(pointer, turned, row, column, rows, columns, N: tl.constexpr):
    """Writes (row groups, column groups, N columns) of words as rows of `columns` words, `rows` of them."""
    words = tl.permute(turned, (1, 2, 0))
    tile = tl.reshape(words, (turned.shape[1] * N, turned.shape[0]))
    i = tl.arange(0, tile.shape[0])[:, None]
    j = tl.arange(0, tile.shape[1])[None, :]
    tl.store(pointer + (row + i) * columns + column + j, tile, mask=(row + i < rows) & (column + j < columns))


@triton.jit
def turn_bytes(data, out, row, column, m, k, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
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
    a, c = swap(a, c, 16, 0x0000FFFF)
    b, d = swap(b, d, 16, 0x0000FFFF)
    a, b = swap(a, b, 8, 0x00FF00FF)
    c, d = swap(c, d, 8, 0x00FF00FF)
    turned = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (G, W, 4))
    _store_turned(out.to(tl.pointer_type(tl.int32)), turned, column, row // 4, k, m // 4, 4)


@triton.jit
def turn_nibbles(data, out, row, column, m, k, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    """As turn_bytes for two codes in a byte, low bits first, eight by eight; m and k are multiples of 8."""
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
    a, e = swap(a, e, 16, 0x0000FFFF)
    b, f = swap(b, f, 16, 0x0000FFFF)
    c, g = swap(c, g, 16, 0x0000FFFF)
    d, h = swap(d, h, 16, 0x0000FFFF)
    a, c = swap(a, c, 8, 0x00FF00FF)
    b, d = swap(b, d, 8, 0x00FF00FF)
    e, g = swap(e, g, 8, 0x00FF00FF)
    f, h = swap(f, h, 8, 0x00FF00FF)
    a, b = swap(a, b, 4, 0x0F0F0F0F)
    c, d = swap(c, d, 4, 0x0F0F0F0F)
    e, f = swap(e, f, 4, 0x0F0F0F0F)
    g, h = swap(g, h, 4, 0x0F0F0F0F)
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    turned = tl.reshape(tl.join(even, odd), (G, W, 8))
    _store_turned(out.to(tl.pointer_type(tl.int32)), turned, column, row // 8, k, m // 8, 8)


@triton.jit
def move_codes(
    data,
    out,
    row,
    column,
    m,
    k,
    out_rows,
    out_columns,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    NBYTES: tl.constexpr,
    SPAN: tl.constexpr,
    LOW_FIRST: tl.constexpr,
    WIDE: tl.constexpr,
    TURNED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Codes of any width, one at a time: a tile of (m, k) into (out_rows, out_columns), zeros where that is larger."""
    words = load_words(
        data, row, column // GROUP, m, k // GROUP, TILE_M, TILE_K // GROUP, NBYTES, SPAN, LOW_FIRST, WIDE
    )
    codes = unpack(words, BITS, GROUP, LOW_FIRST) if GROUP > 1 else words
    first = row
    second = column
    if TURNED:
        codes = tl.trans(codes)
        first = column
        second = row
    if GROUP > 1:
        codes = pack(codes, BITS, GROUP, LOW_FIRST)
    store_words(out, codes, first, second // GROUP, out_rows, out_columns // GROUP, NBYTES, SPAN, LOW_FIRST)


@triton.jit
def move_scales(
    plane,
    out,
    row,
    column,
    m,
    k,
    out_m,
    out_k,
    stride_m,
    stride_k,
    plane_columns,
    PER_M: tl.constexpr,
    PER_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Scales of a tile into a buffer that has one for each PER_M x PER_K, and zeros in its padding.

    The buffer has out_m entries along m and out_k along k, at these strides. An axis that blocks do not cut has PER and
    BLOCK of the whole tile: its one entry is written by the first tiles.
    """
    i = row // PER_M + tl.arange(0, TILE_M // PER_M)[:, None]
    j = column // PER_K + tl.arange(0, TILE_K // PER_K)[None, :]
    there = (i * PER_M < m) & (j * PER_K < k)
    values = tl.load(plane + (i * PER_M // BLOCK_M) * plane_columns + j * PER_K // BLOCK_K, mask=there, other=0)
    tl.store(out + i * stride_m + j * stride_k, values, mask=(i < out_m) & (j < out_k))

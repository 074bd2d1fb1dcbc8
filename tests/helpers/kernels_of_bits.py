"""Triton kernels that write the random bits of a tile, and codes that are rounded by them, for tests of both."""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime import triton as lt


@triton.jit
def bits_kernel(
    seed,
    out,
    row,
    column,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    COVER: tl.constexpr,
    STREAM: tl.constexpr,
):
    """The bits of a tile at (row, column), as kernels find them."""
    bits = _bits_at(tl.load(seed), (row, column, 0, 0, COVER, COVER), TILE_M, TILE_K, STREAM)
    i = tl.arange(0, TILE_M)[:, None]
    tl.store(out + i * TILE_K + tl.arange(0, TILE_K)[None, :], bits.to(tl.int64))


@triton.jit
def _bits_at(seed, at, TILE_M: tl.constexpr, TILE_K: tl.constexpr, STREAM: tl.constexpr):
    return lt.random_bits(seed, at, TILE_M, TILE_K, STREAM)


@triton.jit
def randint_kernel(seed, out):
    """Sixteen counters of tl.randint4x, a row for each word."""
    at = tl.arange(0, 16)
    a, b, c, d = tl.randint4x(tl.load(seed), at)
    tl.store(out + at, a.to(tl.uint32).to(tl.int64))
    tl.store(out + 16 + at, b.to(tl.uint32).to(tl.int64))
    tl.store(out + 32 + at, c.to(tl.uint32).to(tl.int64))
    tl.store(out + 48 + at, d.to(tl.uint32).to(tl.int64))


@triton.jit
def codes_kernel(x, bits, out, N: tl.constexpr, ARGUMENTS: tl.constexpr, IS_INTEGER: tl.constexpr):
    """Codes of N values, with the arguments of the tile function."""
    at = tl.arange(0, N)
    words = tl.load(bits + at).to(tl.uint32)
    values = tl.load(x + at)
    if IS_INTEGER:
        codes = lt.to_integer_codes_by_chance(
            values, words, ARGUMENTS[0], ARGUMENTS[1], ARGUMENTS[2], ARGUMENTS[3], ARGUMENTS[4]
        )
    else:
        codes = lt.to_codes_by_chance(
            values, words, ARGUMENTS[0], ARGUMENTS[1], ARGUMENTS[2], ARGUMENTS[3], ARGUMENTS[4]
        )
    tl.store(out + at, codes)

"""Triton functions for stochastic rounding in generated kernels: the counterpart of random_bits.py, on tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton.codes import TWOS_COMPLEMENT, bits_of, isnan, signed


@triton.jit
def random_bits(seed, at, TILE_M: tl.constexpr, TILE_K: tl.constexpr, STREAM: tl.constexpr):
    """32 random bits per element of a tile, (TILE_M, TILE_K) uint32.

    seed: int64. at: (row, column, m, k, COVER_M, COVER_K). Four elements of a row share a counter. If tiles may begin
    between them, each element computes the counter separately and uses its own word of it.
    """
    row = (at[0] + tl.arange(0, TILE_M)).to(tl.uint32)[:, None]
    COVER_K: tl.constexpr = at[5]
    if TILE_K % 4 == 0 and COVER_K % 4 == 0:
        group = (at[1] // 4 + tl.arange(0, TILE_K // 4)).to(tl.uint32)[None, :]
        a, b, c, d = _words(seed, row, group, STREAM)
        return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (TILE_M, TILE_K))
    else:
        column = at[1] + tl.arange(0, TILE_K)
        a, b, c, d = _words(seed, row, (column // 4).to(tl.uint32)[None, :], STREAM)
        word = (column % 4).to(tl.int32)[None, :]
        return tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))


@triton.jit
def _words(seed, row, group, STREAM: tl.constexpr):
    """The four words of Philox 4x32-10 for the counters (group, row, STREAM, 0)."""
    row, group = tl.broadcast(row, group)
    zero = group & 0
    return tl.philox(seed, group, row, zero + STREAM, zero)


@triton.jit
def _away(share, bits):
    """1 if bits + share overflows 32 bits, else 0."""
    return (bits + share < share).to(tl.int32)


@triton.jit
def to_codes_by_chance(
    x, bits, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SIGN_BIT: tl.constexpr, LAST: tl.constexpr, NAN: tl.constexpr
):
    """fp32 -> codes of any floating-point format with subnormals, rounded stochastically, saturating.

    LAST: the largest finite code.
    """
    LEAST: tl.constexpr = 128 - BIAS
    size = tl.abs(x)
    if LEAST >= 34 + MANTISSA:  # fp32's subnormals are less than 2^-32 steps
        exponent = bits_of(size) >> 23
        normal = bits_of(size)
    else:
        is_small = bits_of(size) < 0x00800000
        normal = bits_of(tl.where(is_small, size * 4294967296.0, size))
        exponent = (normal >> 23) - tl.where(is_small, 32, 0)
    fraction = ((normal & 0x7FFFFF) | 0x800000).to(tl.uint64)
    binade = tl.maximum(exponent, LEAST)
    drop = tl.minimum(23 - MANTISSA + binade - exponent, 63)
    # |x| in steps of its binade, with 32 fraction bits; adding the random bits carries into the steps.
    steps = (((fraction << 32) >> drop.to(tl.uint64)) + bits.to(tl.uint64)) >> 32
    codes = tl.minimum(((binade - LEAST) << MANTISSA) + steps.to(tl.int32), LAST)
    codes = tl.where(size == 0, 0, codes)
    return tl.where(isnan(x), NAN, signed(codes, x, SIGN_BIT, NAN))


@triton.jit
def to_integer_codes_by_chance(
    x, bits,
    BITS: tl.constexpr, LOWEST: tl.constexpr, FRACTION: tl.constexpr, NAN: tl.constexpr,
    OFFSET: tl.constexpr = TWOS_COMPLEMENT,
):  # fmt: skip
    """fp32 -> two's complement in steps of 2^-FRACTION (+ OFFSET), rounded stochastically, saturating."""
    HIGHEST: tl.constexpr = (1 << (BITS - 1)) - 1 if OFFSET == TWOS_COMPLEMENT else (1 << BITS) - 1 - OFFSET
    ADDED: tl.constexpr = 0 if OFFSET == TWOS_COMPLEMENT else OFFSET
    steps = tl.minimum(tl.maximum(x * (1 << FRACTION), LOWEST), HIGHEST)
    size = tl.where(isnan(x), 0.0, tl.abs(steps))
    low = size.to(tl.int32)
    share = ((size - low.to(tl.float32)) * 4294967296.0).to(tl.uint32)
    whole = low + _away(share, bits)
    codes = (tl.where(bits_of(steps) < 0, -whole, whole) + ADDED) & ((1 << BITS) - 1)
    return tl.where(isnan(x), NAN, codes)

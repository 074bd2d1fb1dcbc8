"""Triton functions for Hadamard transforms of a tile's rows or columns, as in numerics.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hadamard(x, AXIS: tl.constexpr, SIZE: tl.constexpr, SIGNS: tl.constexpr, SCALE: tl.constexpr):
    """Transforms an fp32 tile (TILE_M, TILE_K) in groups of SIZE along an axis, 0 or 1.

    SIGNS: bit i flips the sign of entry i of a group. SCALE: fp32(1 / sqrt(SIZE)).
    """
    return _added(_signed(x, AXIS, SIZE, SIGNS), AXIS, SIZE) * SCALE


@triton.jit
def unhadamard(x, AXIS: tl.constexpr, SIZE: tl.constexpr, SIGNS: tl.constexpr, SCALE: tl.constexpr):
    """The inverse of hadamard."""
    return _signed(_added(x, AXIS, SIZE) * SCALE, AXIS, SIZE, SIGNS)


@triton.jit
def _signed(x, AXIS: tl.constexpr, SIZE: tl.constexpr, SIGNS: tl.constexpr):
    """Multiplies entries whose bit is set by -1. Triton's `-x` is 0 - x, which never gives negative zero."""
    at = tl.arange(0, x.shape[AXIS]) % SIZE
    signs = 1.0 - 2.0 * ((tl.full((x.shape[AXIS],), SIGNS, tl.int64) >> at.to(tl.int64)) & 1).to(tl.float32)
    if AXIS == 0:
        return x * signs[:, None]
    else:
        return x * signs[None, :]


@triton.jit
def _added(x, AXIS: tl.constexpr, SIZE: tl.constexpr):
    """Sums and differences of entries 1 apart, then 2 apart, up to SIZE / 2."""
    for bit in tl.static_range(5):
        if 1 << bit < SIZE:
            x = _apart(x, AXIS, 1 << bit)
    tl.static_assert(SIZE <= 32)
    return x


@triton.jit
def _apart(x, AXIS: tl.constexpr, STEP: tl.constexpr):
    """Replaces entries i and i + STEP of each 2 * STEP by their sum and their difference."""
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    if AXIS == 0:
        pairs = tl.permute(tl.reshape(x, (rows // (2 * STEP), 2, STEP, columns)), (0, 2, 3, 1))
        a, b = tl.split(pairs)
        return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 3, 1, 2)), (rows, columns))
    else:
        pairs = tl.permute(tl.reshape(x, (rows, columns // (2 * STEP), 2, STEP)), (0, 1, 3, 2))
        a, b = tl.split(pairs)
        return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (rows, columns))

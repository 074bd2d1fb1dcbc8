"""Reductions over more than a tile: kernels for amaxes of a matrix or of blocks of columns, and for sums over ranks;
a function for amaxes or ranges of blocks of whole rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton.blocks import block_amax, block_highest, block_lowest, to_blocks, to_float
from layoutc.runtime.triton.codes import bits_of, float_of, maximum, minimum, power_above
from layoutc.runtime.triton.tiles import load, load_runs, tile_of
from layoutc.runtime.triton.units import largest_of_units, smallest_of_units


@triton.jit
def raise_amax(
    x, amaxes, at, strides, BLOCK_K: tl.constexpr, TILE: tl.constexpr, EVEN: tl.constexpr, CVT_LEVEL: tl.constexpr
):
    """Reads a tile of x and raises the amax of each of its column blocks by an atomic maximum.

    amaxes: (amax, columns, WHOLE), as in amax_kernel.
    """
    TILE_M: tl.constexpr = TILE[0]
    BLOCKS: tl.constexpr = TILE[1] // BLOCK_K
    COVER: tl.constexpr = BLOCKS * BLOCK_K
    UNIT: tl.constexpr = BLOCK_K & -BLOCK_K
    WHOLE: tl.constexpr = amaxes[2]
    column = at[1]
    if TILE[1] == COVER:
        largest = bits_of(block_amax(load(x, at, strides, TILE, EVEN), TILE_M, BLOCK_K, CVT_LEVEL))
        j = tl.arange(0, BLOCKS)[None, :] + (0 if WHOLE else column // BLOCK_K)
        tl.atomic_max(amaxes[0] + j, largest, mask=j < amaxes[1], sem="relaxed")
    else:
        tile = load(x, at, strides, TILE, EVEN, (TILE_M, COVER))
        largest = bits_of(largest_of_units(block_amax(tile, TILE_M, UNIT, CVT_LEVEL), (1, BLOCK_K // UNIT)))
        own = tl.arange(0, power_above(BLOCKS))[None, :]
        j = column // BLOCK_K + own
        tl.atomic_max(amaxes[0] + j, largest, mask=(j < amaxes[1]) & (own < BLOCKS), sem="relaxed")


@triton.jit
def amax_kernel(
    x, amax, m, k, stride_m, stride_k, columns,
    BLOCK_K: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
    CVT_LEVEL: tl.constexpr,
):  # fmt: skip
    """Raises amax, (1, columns) fp32 bits as int32, to the largest magnitude of each BLOCK_K columns over all rows.

    WHOLE: all columns share one amax. Each program reads one tile, with one atomic maximum per column block. The bits
    of magnitudes sort like the magnitudes, with NaN above infinity.
    """
    row, column = tile_of(m, k, TILE_M, TILE_K // BLOCK_K * BLOCK_K)
    at = (row, column, m, k)
    raise_amax(x, (amax, columns, WHOLE), at, (stride_m, stride_k), BLOCK_K, (TILE_M, TILE_K), EVEN, CVT_LEVEL)


@triton.jit
def measured_rows(
    source, at, BLOCK: tl.constexpr, RANGES: tl.constexpr, TILE: tl.constexpr, PIECES: tl.constexpr,
    EVEN: tl.constexpr, COVER: tl.constexpr,
):  # fmt: skip
    """The amax of each BLOCK rows over all columns, for TILE[0] rows from at[0] on; with RANGES, their lowest and
    highest value, with 0 included. NaN propagates.

    Returns (m blocks, 1) fp32, m blocks rounded up to a power of two. source: (x, stride_m, stride_k). See load_runs.
    """
    x, stride_m, stride_k = source
    row, _, m, k = at
    STEP_K: tl.constexpr = COVER[1] if COVER[1] else TILE[1]
    UNIT: tl.constexpr = BLOCK & -BLOCK
    UNITS: tl.constexpr = (BLOCK // UNIT, 1)
    if RANGES:
        lowest = tl.zeros(TILE, tl.float32)
        highest = tl.zeros(TILE, tl.float32)
        for column in range(0, k, STEP_K):
            tile = load_runs(x, (row, column, m, k), (stride_m, stride_k), TILE, PIECES, EVEN, COVER)
            values = to_float(tile)
            lowest = minimum(lowest, values)
            highest = maximum(highest, values)
        lowest = block_lowest(to_blocks(lowest, UNIT, TILE[1]))
        highest = block_highest(to_blocks(highest, UNIT, TILE[1]))
        return smallest_of_units(lowest, UNITS), largest_of_units(highest, UNITS)
    else:
        largest = tl.zeros(TILE, tl.int32)
        for column in range(0, k, STEP_K):
            tile = load_runs(x, (row, column, m, k), (stride_m, stride_k), TILE, PIECES, EVEN, COVER)
            largest = tl.maximum(largest, bits_of(to_float(tile)) & 0x7FFFFFFF)
        units = tl.max(tl.max(to_blocks(largest, UNIT, TILE[1]), 3), 1)
        return largest_of_units(float_of(units), UNITS)


@triton.jit
def rank_sum_kernel(parts, out, numel, ranks, number, DIVIDE: tl.constexpr, TILE: tl.constexpr):
    """out[i] = parts[0, i] + parts[1, i] + ..., divided or multiplied by number. parts: (ranks, numel); out: fp32."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < numel
    total = tl.load(parts + at, mask=inside, other=0.0).to(tl.float32)
    for _ in range(1, ranks):
        parts += numel
        total += tl.load(parts + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.div_rn(total, tl.full((TILE,), 0.0, tl.float32) + number) if DIVIDE else total * number
    tl.store(out + at, total, mask=inside)

"""Triton kernels that reduce more than a tile: amaxes and ranges of a matrix, of blocks of columns or of rows; and sums
over ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton.blocks import block_amax, to_float
from layoutc.runtime.triton.codes import bits_of, float_of, isnan, maximum, minimum, power_above
from layoutc.runtime.triton.tiles import load, tile_of
from layoutc.runtime.triton.units import largest_of_units


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
    """Reads the tile of x at (row, column), and raises the amax of each of its column blocks by an atomic maximum."""
    COVER: tl.constexpr = TILE_K // BLOCK_K * BLOCK_K
    UNIT: tl.constexpr = BLOCK_K & -BLOCK_K
    if COVER == TILE_K:
        tile = load(x, row, column, m, k, stride_m, stride_k, TILE_M, TILE_K, EVEN)
        largest = bits_of(block_amax(tile, TILE_M, BLOCK_K, HARDWARE))
        j = tl.arange(0, TILE_K // BLOCK_K)[None, :] + (0 if WHOLE else column // BLOCK_K)
        tl.atomic_max(amax + j, largest, mask=j < columns, sem="relaxed")
    else:
        tile = load(x, row, column, m, k, stride_m, stride_k, TILE_M, TILE_K, EVEN, (TILE_M, COVER))
        largest = bits_of(largest_of_units(block_amax(tile, TILE_M, UNIT, HARDWARE), (1, BLOCK_K // UNIT)))
        own = tl.arange(0, power_above(TILE_K // BLOCK_K))[None, :]
        j = column // BLOCK_K + own
        tl.atomic_max(amax + j, largest, mask=(j < columns) & (own < TILE_K // BLOCK_K), sem="relaxed")


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
    """Raises amax, (1, columns) fp32 bits as int32, to the largest magnitude of each BLOCK_K columns over all rows.

    WHOLE: there is one amax, for all columns. Each program reads one tile, and does one atomic maximum for each of the
    tile's column blocks. The bits of magnitudes are in the same order as the magnitudes, with NaN above infinity.
    """
    row, column = tile_of(m, k, TILE_M, TILE_K // BLOCK_K * BLOCK_K)
    raise_amax(x, amax, row, column, m, k, stride_m, stride_k, columns, BLOCK_K, TILE_M, TILE_K, WHOLE, EVEN, HARDWARE)


@triton.jit
def row_amax_kernel(
    x, amax, m, k, stride_m, stride_k, BLOCK_M: tl.constexpr, TILE_K: tl.constexpr, HARDWARE: tl.constexpr
):
    """Writes amax, (m blocks, 1) fp32: the largest magnitude of each BLOCK_M rows over all columns.

    Each program reads one block of rows.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_M
    ROWS: tl.constexpr = power_above(BLOCK_M)
    largest = tl.zeros((ROWS, TILE_K), tl.int32)
    for column in range(0, k, TILE_K):
        tile = _load_rows(x, row, column, m, k, stride_m, stride_k, BLOCK_M, ROWS, TILE_K)
        largest = tl.maximum(largest, bits_of(to_float(tile)) & 0x7FFFFFFF)
    tl.store(amax + tl.program_id(0), float_of(tl.max(tl.max(largest, 1), 0)))


@triton.jit
def row_range_kernel(
    x, ranges, m, k, stride_m, stride_k, BLOCK_M: tl.constexpr, TILE_K: tl.constexpr, HARDWARE: tl.constexpr
):
    """Writes ranges, (2, m blocks, 1) fp32: the lowest and the highest value of each BLOCK_M rows over all columns.

    0 counts as one of the values. NaN propagates. Each program reads one block of rows.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_M
    ROWS: tl.constexpr = power_above(BLOCK_M)
    lowest = tl.zeros((ROWS, TILE_K), tl.float32)
    highest = tl.zeros((ROWS, TILE_K), tl.float32)
    for column in range(0, k, TILE_K):
        values = to_float(_load_rows(x, row, column, m, k, stride_m, stride_k, BLOCK_M, ROWS, TILE_K))
        lowest = minimum(lowest, values)
        highest = maximum(highest, values)
    has_nan = tl.max(tl.max(isnan(lowest).to(tl.int32), 1), 0) > 0
    number = tl.program_id(0)
    tl.store(ranges + number, tl.where(has_nan, float("nan"), tl.min(tl.min(lowest, 1), 0)))
    tl.store(ranges + tl.num_programs(0) + number, tl.where(has_nan, float("nan"), tl.max(tl.max(highest, 1), 0)))


@triton.jit
def _load_rows(
    x, row, column, m, k, stride_m, stride_k, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, TILE_K: tl.constexpr
):
    """A tile (ROWS, TILE_K) of BLOCK_M rows of x, with zeros in its other rows and outside the matrix."""
    if BLOCK_M == ROWS:
        return load(x, row, column, m, k, stride_m, stride_k, ROWS, TILE_K, False)
    else:
        return load(x, row, column, m, k, stride_m, stride_k, ROWS, TILE_K, False, (BLOCK_M, TILE_K))


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

"""Triton functions on the blocks of a tile, for generated kernels: amax, range and sum of each block.

bf16 values are compared as pairs, two to a register, as they were loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton.codes import bits_of, divide, float_of, isnan, maximum


@triton.jit
def to_blocks(tile, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """(TILE_M, TILE_K) -> (m blocks, BLOCK_M, k blocks, BLOCK_K)."""
    return tl.reshape(tile, (tile.shape[0] // BLOCK_M, BLOCK_M, tile.shape[1] // BLOCK_K, BLOCK_K))


@triton.jit
def scale_blocks(values, factors, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Multiplies each value of a tile by its block's factor."""
    return from_blocks(to_blocks(values, BLOCK_M, BLOCK_K) * factors[:, None, :, None])


@triton.jit
def from_blocks(blocks):
    """Inverse of to_blocks."""
    return tl.reshape(blocks, (blocks.shape[0] * blocks.shape[1], blocks.shape[2] * blocks.shape[3]))


@triton.jit
def to_float(tile):
    """fp32, bf16 or fp16 -> fp32, exact.

    bf16 is shifted into place: that takes one instruction, and the interpreter's cast is not exact.
    """
    if tl.bfloat16 == tile.dtype:
        return float_of(tile.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return tile.to(tl.float32)


@triton.jit
def shared_amax(amax):
    """The amax that all scales share, fp32. amax: the value, or a pointer to one fp32, bf16 or fp16 value."""
    if amax.dtype.is_ptr():
        return to_float(tl.load(amax))
    else:  # without `else`, Triton would compile this for pointers too
        return amax


@triton.jit
def largest_of(amaxes, count, SIZE: tl.constexpr):
    """The largest of `count` amaxes in memory, fp32; NaN propagates. SIZE: a power of two, at least count.

    The bits of magnitudes sort like the magnitudes, with NaN above infinity.
    """
    at = tl.arange(0, SIZE)
    values = to_float(tl.load(amaxes + at, mask=at < count, other=0.0))
    return float_of(tl.max(bits_of(values) & 0x7FFFFFFF, axis=0))


@triton.jit
def to_pairs(tile):
    """(rows, columns) bf16 -> (rows, columns / 2) int32, as in memory: the low half is the even column."""
    even, odd = tl.split(tl.reshape(tile.to(tl.int16, bitcast=True), (tile.shape[0], tile.shape[1] // 2, 2)))
    return (even.to(tl.int32) & 0xFFFF) | (odd.to(tl.int32) << 16)


@triton.jit
def largest_of_pairs(a, b):
    """The larger magnitude in each half of two words; NaN propagates. The sign is the XOR of both signs."""
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def least_of_pairs(a, b):
    """The smaller magnitude in each half of two words. The sign is the XOR of both signs."""
    return tl.inline_asm_elementwise(
        "min.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def block_amax(tile, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, CVT_LEVEL: tl.constexpr):
    """The largest magnitude of each block of a tile in x's dtype, (m blocks, k blocks) fp32; NaN propagates."""
    if not CVT_LEVEL:
        # The interpreter runs custom reductions one element at a time. tl.max of the bits is fast, and sorts the same.
        sizes = bits_of(to_blocks(to_float(tile), BLOCK_M, BLOCK_K)) & 0x7FFFFFFF
        return float_of(tl.max(tl.max(sizes, 3), 1))
    if tl.bfloat16 == tile.dtype:
        WIDTH: tl.constexpr = BLOCK_K // 2 if BLOCK_K > 1 else 1
        pairs = to_blocks(to_pairs(tile), BLOCK_M, WIDTH)
        largest = tl.reduce(tl.reduce(pairs, 3, largest_of_pairs), 1, largest_of_pairs)
        even = tl.abs(float_of(largest << 16))  # abs clears the leftover signs
        odd = tl.abs(float_of(largest & -0x10000))
        if BLOCK_K > 1:
            return maximum(even, odd)
        else:
            return tl.reshape(tl.join(even, odd), (largest.shape[0], largest.shape[1] * 2))
    blocks = to_blocks(to_float(tile), BLOCK_M, BLOCK_K)
    return tl.reduce(tl.reduce(tl.abs(blocks), 3, maximum), 1, maximum)


@triton.jit
def block_has_nan(blocks):
    """True for blocks that contain a NaN."""
    return tl.max(tl.max(isnan(blocks).to(tl.int32), 3), 1) > 0


@triton.jit
def block_lowest(blocks):
    """Smallest value of each block; NaN propagates."""
    return tl.where(block_has_nan(blocks), float("nan"), tl.min(tl.min(blocks, 3), 1))


@triton.jit
def block_highest(blocks):
    """Largest value of each block; NaN propagates."""
    return tl.where(block_has_nan(blocks), float("nan"), tl.max(tl.max(blocks, 3), 1))


@triton.jit
def _halves(x):
    """(a, b, c, n) -> the first and the second half of the last dim."""
    both = tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2], 2, x.shape[3] // 2))
    return tl.split(tl.permute(both, (0, 1, 2, 4, 3)))


@triton.jit
def _added(total, x):
    """Adds the entries of x's last dim, a power of two, to total one by one."""
    if x.shape[3] == 1:
        return total + tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2]))
    else:
        first, second = _halves(x)
        return _added(_added(total, first), second)


@triton.jit
def _sum_in_order(x):
    """(a, b, c, n) -> (a, b, c): the sum over the last dim, from the first entry to the last."""
    total = tl.zeros((x.shape[0], x.shape[1], x.shape[2]), tl.float32)
    if x.shape[3] <= 32:
        return _added(total, x)
    else:
        RUNS: tl.constexpr = x.shape[3] // 32
        runs = tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2], RUNS, 32))
        number = tl.arange(0, RUNS)[None, None, None, :, None]
        for run in range(RUNS):
            # The sum over runs is exact in any order because all runs but one are zeros.
            total = _added(total, tl.sum(tl.where(number == run, runs, 0.0), 3))
        return total


@triton.jit
def _sum_by_halves(x):
    """(a, b, n) -> (a, b): adds the halves of the last dim until one entry is left. n: up to 2^14."""
    x = tl.reshape(x, (x.shape[0], x.shape[1], 1, x.shape[2]))
    for _ in tl.static_range(14):
        if x.shape[3] > 1:
            first, second = _halves(x)
            x = first + second
    return tl.reshape(x, (x.shape[0], x.shape[1]))


@triton.jit
def block_sum(blocks, CONTRACTS_K: tl.constexpr):
    """The sum of each block, (m blocks, k blocks), in the order of numerics.block_sum.

    blocks: magnitudes, so that 0 + x has the bits of x. CONTRACTS_K: sum along k first; else along m.
    """
    if CONTRACTS_K:
        rows = _sum_in_order(blocks)  # (m blocks, rows, k blocks)
        return _sum_by_halves(tl.permute(rows, (0, 2, 1)))
    columns = _sum_in_order(tl.permute(blocks, (2, 3, 0, 1)))  # (k blocks, columns, m blocks)
    return tl.trans(_sum_by_halves(tl.permute(columns, (0, 2, 1))))


@triton.jit
def spread(values, entries):
    """Repeats super-blocks' values for each entry of a tile. The dims of `values` divide those of `entries`."""
    ROWS: tl.constexpr = entries.shape[0] // values.shape[0]
    COLUMNS: tl.constexpr = entries.shape[1] // values.shape[1]
    each = tl.broadcast_to(values[:, None, :, None], (values.shape[0], ROWS, values.shape[1], COLUMNS))
    return tl.reshape(each, (entries.shape[0], entries.shape[1]))


@triton.jit
def blocks_inside(at, TILE_M: tl.constexpr, TILE_K: tl.constexpr, BLOCK: tl.constexpr):
    """True for the blocks of a tile that are inside the matrix, (m blocks, k blocks)."""
    row, column, m, k = at[:4]
    rows = row + tl.arange(0, TILE_M // BLOCK[0]) * BLOCK[0] < m
    columns = column + tl.arange(0, TILE_K // BLOCK[1]) * BLOCK[1] < k
    return rows[:, None] & columns[None, :]


@triton.jit
def block_mean(values, inside, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Each block's mean of the non-negative values that are inside, like numerics.block_mean: (m blocks, k blocks)."""
    total = block_sum(to_blocks(tl.where(inside, values, 0.0), BLOCK_M, BLOCK_K), True)
    counts = tl.sum(tl.sum(to_blocks(inside.to(tl.float32), BLOCK_M, BLOCK_K), 3), 1)
    return divide(total, maximum(counts, 1.0))

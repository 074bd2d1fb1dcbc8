"""Triton functions for blocks whose sizes are not powers of two, in generated kernels: blocks are cut into units.

The sizes of a Triton tensor are powers of two. So tiles are cut into units, whose sizes are the largest powers of two
that divide a block's: blocks of 24 x 48 have 3 x 3 units of 8 x 16. A block's amax is the largest of its units', and
what is computed for a block is copied to its units. A tile holds as many whole blocks as fit; other lanes are never
stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton.blocks import from_blocks, to_blocks
from layoutc.runtime.triton.codes import bits_of, float_of, isnan, power_above


@triton.constexpr_function
def power_below(size):
    """The largest power of two that is at most `size`."""
    return 1 << (size.bit_length() - 1)


# ---------------------------------------------------------------------------------------------------------------- units
@triton.jit
def _keys(x):
    """fp32 -> int32 that sort the same, with NaN above all other values."""
    bits = bits_of(x)
    return tl.where(isnan(x), 0x7FC00000, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _values(keys):
    """Inverse of _keys."""
    return float_of(keys ^ ((keys >> 31) & 0x7FFFFFFF))


@triton.jit
def _picked(x, at):
    """Columns `at`, (n,), of x, (rows, columns) -> (rows, n). n >= columns.

    Columns are repeated until there are n because Triton 3.7 fails to compile some gathers from fewer.
    """
    TIMES: tl.constexpr = at.shape[0] // x.shape[1]
    if TIMES > 1:
        shape: tl.constexpr = (x.shape[0], x.shape[1], TIMES)
        x = tl.reshape(tl.broadcast_to(x[:, :, None], shape), (x.shape[0], at.shape[0]))
    return tl.gather(x, tl.broadcast_to(at[None, :] * TIMES, x.shape), 1)


@triton.jit
def _joined(keys, UNITS: tl.constexpr):
    """The largest of each UNITS entries of a row: (rows, entries) int32 -> (rows, blocks).

    The number of blocks is rounded up to a power of two; entries past the last block have no meaning. The number of
    units per block is rounded up too, by repeating one of the block's units, which does not change the maximum.
    """
    if UNITS == 1:
        return keys
    else:
        COUNT: tl.constexpr = power_above(keys.shape[1] // UNITS)
        LANES: tl.constexpr = power_above(UNITS)
        lane = tl.arange(0, COUNT * LANES)
        at = tl.minimum(lane // LANES * UNITS + tl.minimum(lane % LANES, UNITS - 1), keys.shape[1] - 1)
        return tl.max(tl.reshape(_picked(keys, at), (keys.shape[0], COUNT, LANES)), 2)


@triton.jit
def largest_of_units(x, UNITS: tl.constexpr):
    """The largest of each UNITS[0] x UNITS[1] entries; a tile has one entry per unit. NaN propagates.

    x: (m units, k units) fp32. Returns (m blocks, k blocks), each rounded up to a power of two.
    """
    return _values(tl.trans(_joined(tl.trans(_joined(_keys(x), UNITS[1])), UNITS[0])))


@triton.jit
def smallest_of_units(x, UNITS: tl.constexpr):
    """Like largest_of_units, for the smallest."""
    return -largest_of_units(-x, UNITS)


@triton.jit
def _copied(x, COUNT: tl.constexpr, UNITS: tl.constexpr):
    """(rows, blocks) -> (rows, COUNT): each unit gets its block's entry."""
    if UNITS == 1:
        return x
    else:
        return _picked(x, tl.minimum(tl.arange(0, COUNT) // UNITS, x.shape[1] - 1))


@triton.jit
def to_units(entries, units, UNITS: tl.constexpr):
    """(m blocks, k blocks) -> (m units, k units): each unit gets its block's entry. units: a tile from to_blocks."""
    rows = tl.trans(_copied(tl.trans(entries), units.shape[0], UNITS[0]))
    return _copied(rows, units.shape[2], UNITS[1])


# --------------------------------------------------------------------------------------------------------------- blocks
@triton.jit
def _filled(x, SIZE: tl.constexpr):
    """Pads each SIZE columns of a (rows, columns) fp32 tile with zeros to a power of two."""
    if SIZE & (SIZE - 1) == 0:
        return x
    else:
        COUNT: tl.constexpr = power_above(x.shape[1] // SIZE)
        LANES: tl.constexpr = power_above(SIZE)
        lane = tl.arange(0, COUNT * LANES)
        at = lane // LANES * SIZE + lane % LANES
        inside = (lane % LANES < SIZE) & (at < x.shape[1])
        return tl.where(inside[None, :], _picked(x, tl.minimum(at, x.shape[1] - 1)), 0.0)


@triton.jit
def whole_blocks(units, BLOCK: tl.constexpr):
    """A tile in units, as from to_blocks -> its blocks, (m blocks, rows, k blocks, columns) fp32.

    All sizes are rounded up to powers of two; blocks of BLOCK rows and columns are padded with zeros.
    """
    columns = _filled(from_blocks(units), BLOCK[1])
    both = tl.trans(_filled(tl.trans(columns), BLOCK[0]))
    return to_blocks(both, power_above(BLOCK[0]), power_above(BLOCK[1]))

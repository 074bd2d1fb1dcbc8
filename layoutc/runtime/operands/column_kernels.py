"""Kernels of columns_of_groups: amaxes of each group's columns, and their codes, stored transposed.

A program processes a tile of one group, TILE rows by COLUMNS columns, read transposed. It finds its group from `ends`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton.blocks import to_float
from layoutc.runtime.triton.codes import bits_of, float_of
from layoutc.runtime.triton.tiles import QuantizeOptions


@triton.jit
def place_of(ends, apart, columns, experts, GROUPS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr):
    """(group, its rows, their end, first column, first code) of a program's tile. Past all groups: `experts`."""
    tiles = tl.cdiv(columns, COLUMNS)
    first = (tl.program_id(0) // tiles) * TILE
    of_groups = tl.arange(0, GROUPS)
    before = (tl.load(apart + of_groups, mask=of_groups < experts, other=0x7FFFFFFF) <= first).to(tl.int32)
    group = tl.sum(before, 0)
    begins = tl.load(ends + group - 1, mask=group > 0, other=0)
    begins_apart = tl.load(apart + group - 1, mask=group > 0, other=0)
    last = tl.load(ends + group, mask=group < experts, other=0)
    rows = begins + (first - begins_apart) + tl.arange(0, TILE)
    return group, rows, last, (tl.program_id(0) % tiles) * COLUMNS, first


@triton.jit
def load_columns(x, order, rows, last, column, columns, EACH: tl.constexpr, COLUMNS: tl.constexpr):
    """(COLUMNS, rows): a tile of x, transposed, with zeros past the last row."""
    inside = rows < last
    if order is not None:
        rows = tl.load(order + rows, mask=inside, other=0) // EACH
    at = column + tl.arange(0, COLUMNS)
    pointers = x + rows.to(tl.int64)[None, :] * columns + at[:, None]
    return tl.load(pointers, mask=(at < columns)[:, None] & inside[None, :], other=0.0)


@triton.jit
def amax_of_columns_kernel(
    x, order, ends, apart, amax, columns, size, experts,
    GROUPS: tl.constexpr, EACH: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, CVT_LEVEL: tl.constexpr,
):  # fmt: skip
    """amax (experts, columns), initially 0: the bits of the largest magnitude in each group's columns. Bits of
    magnitudes sort as the magnitudes do, with NaN above infinity."""
    group, rows, last, column, _ = place_of(ends, apart, columns, experts, GROUPS, TILE, COLUMNS)
    if group < experts:
        values = to_float(load_columns(x, order, rows, last, column, columns, EACH, COLUMNS))
        at = column + tl.arange(0, COLUMNS)
        largest = tl.max(bits_of(values) & 0x7FFFFFFF, 1)
        tl.atomic_max(amax + group.to(tl.int64) * columns + at, largest, mask=at < columns, sem="relaxed")


@triton.jit
def quantize_columns_kernel(
    x, order, ends, apart, amax, data, scale, none, input_max, columns, size, experts,
    GROUPS: tl.constexpr, EACH: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, CVT_LEVEL: tl.constexpr,
    QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Writes data (columns, size) and scale (experts, columns) with the recipe's tile function for rows. It gets the
    tile's first code as the start of a row, because it writes scales only where a row starts."""
    group, rows, last, column, first = place_of(ends, apart, columns, experts, GROUPS, TILE, COLUMNS)
    if group < experts:
        tile = load_columns(x, order, rows, last, column, columns, EACH, COLUMNS)
        at = column + tl.arange(0, COLUMNS)
        of_group = group.to(tl.int64) * columns
        largest = float_of(tl.load(amax + of_group + at, mask=at < columns, other=0))
        QUANTIZE(
            tile, none, (none, input_max, none, largest[:, None], none),
            (data + first, scale + of_group, none, none, none, none, none), (none, none, none, none, none, none),
            (column, 0, columns, size, 0, 0), QuantizeOptions(True, False, False, False, CVT_LEVEL),
        )  # fmt: skip

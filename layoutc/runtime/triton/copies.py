"""Copies between tensors and what ranks send each other, in which the bytes of each rank stand in a row.

Tables are those of batch.py, of one tensor each entry: ranks, elements of a rank, where these begin in its row, the
tensor's address.
"""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton.batch import matrix_at, member_of
from layoutc.runtime.triton.tiles import to_dtype


@triton.jit
def copy_in_kernel(
    table,
    row,  # of this rank: bytes
    SOURCE: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """row[start + i] = tensor[i], as DTYPE, which is SOURCE unless that is fp32. Each program copies a tile.

    ALIGNED: all numbers and addresses of the table are multiples of 16.
    """
    fields, _, first, _, numel = member_of(table, 1, TILE, ROWS, ALIGNED)
    i = first + tl.arange(0, TILE)
    values = tl.load(matrix_at(fields, SOURCE, ROWS, ALIGNED) + i, mask=i < numel)
    if SOURCE != DTYPE:
        values = to_dtype(values, DTYPE, HARDWARE)
    tl.store(row.to(tl.pointer_type(DTYPE)) + _start(fields, ROWS, ALIGNED) + i, values, mask=i < numel)


@triton.jit
def copy_out_kernel(
    table,
    rows,  # of all ranks: bytes
    row,  # elements of one
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """tensor[rank * numel + i] = rows[rank, start + i]. ALIGNED: as of copy_in_kernel."""
    fields, rank, first, _, numel = member_of(table, 1, TILE, ROWS, ALIGNED)
    i = first + tl.arange(0, TILE)
    at = rows.to(tl.pointer_type(DTYPE)) + rank * row + _start(fields, ROWS, ALIGNED) + i
    values = tl.load(at, mask=i < numel)
    tl.store(matrix_at(fields, DTYPE, ROWS, ALIGNED) + rank * numel + i, values, mask=i < numel)


@triton.jit
def _start(fields, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    start = tl.load(fields + 2 * ROWS)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return start

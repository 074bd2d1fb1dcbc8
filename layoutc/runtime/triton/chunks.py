"""Copies of gradients, each rank's chunks in a row."""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton.batch import matrix_at, member_of


@triton.jit
def rank_chunks_kernel(
    table,  # of gradients: ranks, elements of a chunk, where chunks begin in a rank's row, address, elements in all
    out,  # (ranks, row)
    row,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """out[rank, start + i] = gradient[rank * chunk + i], flat; zeros beyond its end. Each program copies a tile.

    ALIGNED: all numbers and addresses of the table are multiples of 16.
    """
    fields, rank, first, _, chunk = member_of(table, 1, TILE, ROWS, ALIGNED)
    start, numel = tl.load(fields + 2 * ROWS), tl.load(fields + 4 * ROWS)
    if ALIGNED:
        start, numel = tl.multiple_of(start, 16), tl.multiple_of(numel, 16)
    i = first + tl.arange(0, TILE)
    at = rank * chunk + i
    values = tl.load(matrix_at(fields, DTYPE, ROWS, ALIGNED) + at, mask=(i < chunk) & (at < numel), other=0.0)
    tl.store(out + rank * row + start + i, values, mask=i < chunk)

"""Tables of matrices, so that one launch can process many. kernels/batches.py builds the tables.

A table is int64. It begins with ROWS 32-bit numbers: the first program of each matrix; entries past the last matrix
are larger than any program. Fields follow, each with one entry per matrix (ROWS in all): rows, columns, an extra
number, and addresses in the order of the kernel's arguments (x, then planes). The extra number is the index of the
matrix's first amax; if the kernel copies, the matrix's offset in what a rank sends. Matrices are contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from layoutc.runtime.triton.blocks import to_float
from layoutc.runtime.triton.reductions import raise_amax
from layoutc.runtime.triton.tiles import tile_at, to_dtype

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.int64: tl.int64}
_KINDS = {torch.uint8: 1, torch.float32: 2, torch.float16: 3, torch.bfloat16: 4}


def kinds_of(dtypes: Iterable[torch.dtype]) -> int:
    """The dtypes of planes as `plane_in` reads them."""
    return sum(_KINDS[dtype] << 3 * at for at, dtype in enumerate(dtypes))


@triton.jit
def member_of(table, TILE_M: tl.constexpr, TILE_K: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """(fields, first row, first column, m, k): this program's matrix in the table, and its tile in the matrix.

    ALIGNED: k and all addresses are multiples of 16, so that a thread can move 16 bytes at a time. The hint is next to
    the load because Triton drops it from values that a function returns.
    """
    program = tl.program_id(0)
    starts = table.to(tl.pointer_type(tl.int32))
    index = tl.sum((tl.load(starts + tl.arange(0, ROWS)) <= program).to(tl.int32), 0) - 1
    fields = table + ROWS // 2 + index
    m = tl.load(fields).to(tl.int32)
    k = tl.multiple_of(tl.load(fields + ROWS).to(tl.int32), 16 if ALIGNED else 1)
    row, column = tile_at(program - tl.load(starts + index), k, TILE_M, TILE_K)
    return fields, row, column, m, k


@triton.jit
def amax_at(amax, fields, ROWS: tl.constexpr):
    """A pointer to the amax of a matrix, or to the first of its amaxes."""
    return amax + tl.load(fields + 2 * ROWS)


@triton.jit
def matrix_at(fields, DTYPE: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to the first element of x."""
    return address(fields + 3 * ROWS, DTYPE, ALIGNED)


@triton.jit
def plane_in(
    fields, FIRST: tl.constexpr, NUMBER: tl.constexpr, KINDS: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr
):
    """A pointer to plane NUMBER of those whose addresses begin in field FIRST. KINDS: from `kinds_of`."""
    KIND: tl.constexpr = (KINDS >> (3 * NUMBER)) & 7
    if KIND == 1:
        return address(fields + (FIRST + NUMBER) * ROWS, tl.uint8, ALIGNED)
    elif KIND == 2:
        return address(fields + (FIRST + NUMBER) * ROWS, tl.float32, ALIGNED)
    elif KIND == 3:
        return address(fields + (FIRST + NUMBER) * ROWS, tl.float16, ALIGNED)
    else:
        return address(fields + (FIRST + NUMBER) * ROWS, tl.bfloat16, ALIGNED)


@triton.jit
def plane_like(plane, fields, NUMBER: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to this matrix's plane or buffer number NUMBER. `plane`: another matrix's, for the dtype."""
    return address(fields + (3 + NUMBER) * ROWS, plane.dtype.element_ty, ALIGNED)


@triton.jit
def address(field, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer in a field of a table."""
    pointer = tl.load(field).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def amax_batch_kernel(
    table, amax,
    DTYPE: tl.constexpr, BLOCK_K: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr, CVT_LEVEL: tl.constexpr,
):  # fmt: skip
    """Like amax_kernel, for all matrices of a table. `amax` holds the amaxes of all of them."""
    fields, row, column, m, k = member_of(table, TILE_M, TILE_K // BLOCK_K * BLOCK_K, ROWS, ALIGNED)
    x = matrix_at(fields, DTYPE, ROWS, ALIGNED)
    columns = 1 if WHOLE else tl.cdiv(k, BLOCK_K)
    own, at = amax_at(amax, fields, ROWS), (row, column, m, k)
    raise_amax(x, (own, columns, WHOLE), at, (k, 1), BLOCK_K, (TILE_M, TILE_K), EVEN, CVT_LEVEL)


@triton.jit
def rank_chunks_kernel(
    table,  # of gradients: ranks, elements per chunk, offset of the chunk in a rank's row, gradient number, elements
    out,  # (ranks, row), in the gradients' dtype or fp32
    row,
    grad0, grad1, grad2, grad3, grad4, grad5, grad6, grad7,
    grad8, grad9, grad10, grad11, grad12, grad13, grad14, grad15,
    TILE: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """out[rank, start + i] = gradient[rank * chunk + i], flat; zeros past the gradient's end. A program copies a tile.

    ALIGNED: all addresses and numbers of the table are multiples of 16.
    """
    fields, rank, first, _, chunk = member_of(table, 1, TILE, ROWS, ALIGNED)
    start, which, numel = tl.load(fields + 2 * ROWS), tl.load(fields + 3 * ROWS), tl.load(fields + 4 * ROWS)
    grads = (grad0, grad1, grad2, grad3, grad4, grad5, grad6, grad7)
    others = (grad8, grad9, grad10, grad11, grad12, grad13, grad14, grad15)
    at = grad0.to(tl.int64)
    for index in tl.static_range(8):
        at = tl.where(which == index, grads[index].to(tl.int64), at)
        at = tl.where(which == index + 8, others[index].to(tl.int64), at)
    grad = at.to(grad0.dtype)
    if ALIGNED:
        start, numel, grad = tl.multiple_of(start, 16), tl.multiple_of(numel, 16), tl.multiple_of(grad, 16)
    i = first + tl.arange(0, TILE)
    entry = rank * chunk + i
    values = tl.load(grad + entry, mask=(i < chunk) & (entry < numel), other=0.0)
    if out.dtype.element_ty == tl.float32:
        values = to_float(values)
    tl.store(out + rank * row + start + i, values, mask=i < chunk)


@triton.jit
def copy_in_kernel(
    table,
    sent,  # this rank's row, in bytes
    SOURCE: tl.constexpr, DTYPE: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, ALIGNED: tl.constexpr, CVT_LEVEL: tl.constexpr,
):  # fmt: skip
    """sent[start + i] = tensor[i], as DTYPE, which differs from SOURCE only if that is fp32. A program copies a tile.

    ALIGNED: all addresses and numbers of the table are multiples of 16.
    """
    fields, _, first, _, numel = member_of(table, 1, TILE, ROWS, ALIGNED)
    i = first + tl.arange(0, TILE)
    values = tl.load(matrix_at(fields, SOURCE, ROWS, ALIGNED) + i, mask=i < numel)
    if SOURCE != DTYPE:
        values = to_dtype(values, DTYPE, CVT_LEVEL)
    tl.store(sent.to(tl.pointer_type(DTYPE)) + _start(fields, ROWS, ALIGNED) + i, values, mask=i < numel)


@triton.jit
def copy_out_kernel(
    table,  # the fifth field says which `moving` argument is the target, from 1; 0: the table has the address
    received,  # all ranks' rows, in bytes
    row,  # elements per row
    moving1, moving2, moving3, moving4, moving5, moving6, moving7, moving8,  # None: unused
    DTYPE: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """tensor[rank * numel + i] = received[rank, start + i]. ALIGNED: as in copy_in_kernel."""
    fields, rank, first, _, numel = member_of(table, 1, TILE, ROWS, ALIGNED)
    i = first + tl.arange(0, TILE)
    at = received.to(tl.pointer_type(DTYPE)) + rank * row + _start(fields, ROWS, ALIGNED) + i
    values = tl.load(at, mask=i < numel)
    moving = (moving1, moving2, moving3, moving4, moving5, moving6, moving7, moving8)
    address = tl.load(fields + 3 * ROWS)
    if moving1 is not None:
        which = tl.load(fields + 4 * ROWS)
        for index in tl.static_range(8):
            if moving[index] is not None:
                address = tl.where(which == index + 1, moving[index].to(tl.int64), address)
    target = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        target = tl.multiple_of(target, 16)
    tl.store(target + rank * numel + i, values, mask=i < numel)


@triton.jit
def _start(fields, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    start = tl.load(fields + 2 * ROWS)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return start

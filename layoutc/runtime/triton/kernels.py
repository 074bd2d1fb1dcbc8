"""The kernels that call a recipe's tile functions: they find each program's matrix and tile.

A recipe has up to six planes (p0 to p5, in the layout's order) and makes up to six buffers (b0 to b5). Planes and
buffers that the recipe lacks, or that the caller did not request, are None and cost nothing. at: (row, column, m, k):
where a tile begins, and the size of its matrix; quantizing appends COVER_M and COVER_K. Tile functions are generated
(kernels.py of each recipe).
"""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton.batch import amax_at, matrix_at, member_of, plane_in, plane_like
from layoutc.runtime.triton.blocks import largest_of, to_float
from layoutc.runtime.triton.reductions import measured_rows
from layoutc.runtime.triton.tiles import (
    DequantizeOptions,
    LayOutOptions,
    QuantizeOptions,
    load_runs,
    round_up,
    store,
    tile_of,
    to_dtype,
)


@triton.jit
def quantize_kernel(
    table,  # of a batch: sizes and addresses of all matrices; None: one matrix, x
    x, m, k, stride_m, stride_k,  # an (m, k) matrix in fp32, bf16 or fp16
    cover_k,  # the columns that tiles cover: k and the padding of all buffers that are written
    amax, input_max,  # fp32: the shared amax, the largest value of x's dtype
    seed,  # (1,) int64, for stochastic rounding
    p0, p1, p2, p3, p4, p5, b0, b1, b2, b3, b4, b5,
    QUANTIZE: tl.constexpr,  # the recipe's quantize_tile
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, SWIZZLED: tl.constexpr,  # sources to write; scales swizzled
    KINDS: tl.constexpr, SCALARS: tl.constexpr,  # of a batch: see plane_in; a bit for each plane of one value
    DTYPE: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,  # of a batch: x's dtype; see batch.py
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, PIECES: tl.constexpr, EVEN: tl.constexpr, CVT_LEVEL: tl.constexpr,
    COVER_M: tl.constexpr, COVER_K: tl.constexpr,  # rows and columns of a tile that hold whole blocks; 0: all of them
    AMAXES: tl.constexpr,  # of one matrix, if amax has an entry per row: a power of two, at least m; 0: a single amax
    ROWWISE_ROWS: tl.constexpr, COLUMNWISE_ROWS: tl.constexpr,  # rows per block, if blocks span all columns; else 0
    RANGES: tl.constexpr,  # a bit per source: scales depend on the lowest and highest value instead of an amax
):  # fmt: skip
    """Quantizes: each program reads one tile of x and writes its part of every plane and buffer.

    If blocks span all columns, a program processes whole rows of several tiles. It reads them twice: first to find
    scales, then to quantize, from the card's cache if they fit.
    """
    STEP_M: tl.constexpr = COVER_M if COVER_M else TILE_M
    STEP_K: tl.constexpr = COVER_K if COVER_K else TILE_K
    WHOLE_ROWS: tl.constexpr = ROWWISE_ROWS + COLUMNWISE_ROWS > 0
    planes = (p0, p1, p2, p3, p4, p5, None)  # None: codebooks to search are constants
    if ROWS:
        fields, row, column, m, k = member_of(table, STEP_M, 0 if WHOLE_ROWS else STEP_K, ROWS, ALIGNED)
        x = matrix_at(fields, DTYPE, ROWS, ALIGNED)
        stride_m = k
        stride_k = 1
        if amax is not None:
            amax = amax_at(amax, fields, ROWS)
        planes = [
            plane_in(fields, 4, i, KINDS, ROWS, ALIGNED and (SCALARS >> i) & 1 == 0) if KINDS >> 3 * i else planes[i]
            for i in (0, 1, 2, 3, 4, 5, 6)
        ]
    else:
        row, column = tile_of(m, cover_k, STEP_M, 0 if WHOLE_ROWS else STEP_K)
    if AMAXES:
        amax = largest_of(amax, m, AMAXES)
    source = (x, stride_m, stride_k)
    buffers = (b0, b1, b2, b3, b4, b5)
    # COVER_M and COVER_K stay constexpr because tuples with them are built inside calls.
    if WHOLE_ROWS:
        rowwise = 0  # nothing reads it
        columnwise = 0
        if ROWWISE_ROWS:
            rowwise = measured_rows(
                source, (row, column, m, k), ROWWISE_ROWS, RANGES & 1, (TILE_M, TILE_K), PIECES, EVEN,
                (COVER_M, COVER_K),
            )  # fmt: skip
        if COLUMNWISE_ROWS:
            columnwise = measured_rows(
                source, (row, column, m, k), COLUMNWISE_ROWS, RANGES & 2, (TILE_M, TILE_K), PIECES, EVEN,
                (COVER_M, COVER_K),
            )  # fmt: skip
        for first in range(0, k, STEP_K):
            at = column + first
            tile = load_runs(
                x, (row, at, m, k), (stride_m, stride_k), (TILE_M, TILE_K), PIECES, EVEN, (COVER_M, COVER_K)
            )
            QUANTIZE(
                tile, source, (amax, input_max, seed, rowwise, columnwise), planes, buffers,
                (row, at, m, k, COVER_M, COVER_K), QuantizeOptions(ROWWISE, COLUMNWISE, SWIZZLED, EVEN, CVT_LEVEL),
            )  # fmt: skip
    else:
        tile = load_runs(
            x, (row, column, m, k), (stride_m, stride_k), (TILE_M, TILE_K), PIECES, EVEN, (COVER_M, COVER_K)
        )
        QUANTIZE(
            tile, source, (amax, input_max, seed, None, None), planes, buffers,
            (row, column, m, k, COVER_M, COVER_K), QuantizeOptions(ROWWISE, COLUMNWISE, SWIZZLED, EVEN, CVT_LEVEL),
        )  # fmt: skip


@triton.jit
def dequantize_kernel(
    table,  # of a batch; other arguments are then one weight's. None: a single weight
    out, m, k,  # (m, k) values to write
    amax,  # (1,) fp32, of the whole weight, if decoding reads it; of a batch: the first weight's
    p0, p1, p2, p3, p4, p5,
    codebooks,  # fp32 values of all codebooks that are looked up in memory
    part_rows, part_bytes,  # of planes in parts: rows per part, and bytes from one part of a plane to the next
    DEQUANTIZE: tl.constexpr,  # the recipe's dequantize_tile
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,  # the source to read
    PARTED: tl.constexpr,  # a bit per plane, set if it is in parts; 0: all are whole
    ROWS: tl.constexpr, ALIGNED: tl.constexpr,  # of a batch: see batch.py
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr, CVT_LEVEL: tl.constexpr,
):  # fmt: skip
    """Dequantizes: each program reads one tile of codes and its scales, and writes their values.

    If planes are in parts, tiles cover one part after another: each part holds one rank's rows.
    """
    planes = (p0, p1, p2, p3, p4, p5)
    if ROWS:
        fields, row, column, m, k = member_of(table, TILE_M, TILE_K, ROWS, ALIGNED)
        if amax is not None:
            amax = amax_at(amax, fields, ROWS)
        out = plane_like(out, fields, 0, ROWS, ALIGNED)
        planes = [
            plane_like(planes[i], fields, 1 + i, ROWS, ALIGNED) if planes[i] is not None else planes[i]
            for i in (0, 1, 2, 3, 4, 5)
        ]
        if PARTED:
            part_rows = tl.load(fields + 10 * ROWS).to(tl.int32)
            part_bytes = tl.load(fields + 11 * ROWS)
            if ALIGNED:
                part_bytes = tl.multiple_of(part_bytes, 16)
    else:
        row, column = tile_of(m, k, TILE_M, TILE_K)
    if PARTED:
        covered = round_up(part_rows, TILE_M)
        part = row // covered
        row -= part * covered
        out += part * part_rows * k
        m = tl.minimum(m - part * part_rows, part_rows)  # the last parts may have fewer rows, or none
        planes = [_in_part(planes[i], part, part_bytes) if PARTED >> i & 1 else planes[i] for i in (0, 1, 2, 3, 4, 5)]
    at = (row, column, m, k)
    p0, p1, p2, p3, p4, p5 = planes
    values = DEQUANTIZE(
        (p0, p1, p2, p3, p4, p5, codebooks), amax, at,
        DequantizeOptions(ROWWISE, COLUMNWISE, TILE_M, TILE_K, EVEN, CVT_LEVEL),
    )  # fmt: skip
    store(out, to_dtype(values, out.dtype.element_ty, CVT_LEVEL), at, EVEN)


@triton.jit
def _in_part(plane, part, part_bytes):
    """A pointer to a plane's first entry in a part."""
    return plane + part * (part_bytes // (plane.dtype.element_ty.primitive_bitwidth // 8))


@triton.jit
def lay_out_kernel(
    m, k, cover_k,  # cover_k: the columns that tiles cover: k and the padding of all buffers
    p0, p1, p2, p3, p4, p5, b0, b1, b2, b3, b4, b5,  # planes to read, buffers to write
    LAY_OUT: tl.constexpr,  # the recipe's lay_out_tile
    SWIZZLED: tl.constexpr, WORDS: tl.constexpr,  # scales are in the GEMM's order; codes can be moved in 32-bit words
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, CVT_LEVEL: tl.constexpr,
):  # fmt: skip
    """Lays out: each program moves one tile of codes and its blocks' scales into every buffer."""
    row, column = tile_of(m, cover_k, TILE_M, TILE_K)
    LAY_OUT(
        (p0, p1, p2, p3, p4, p5), (b0, b1, b2, b3, b4, b5), (row, column, m, k),
        LayOutOptions(SWIZZLED, WORDS, TILE_M, TILE_K, CVT_LEVEL),
    )  # fmt: skip


@triton.jit
def quantize_rows_kernel(
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15,  # gradients, contiguous; None: no more
    end0, end1, end2, end3, end4, end5, end6, end7,  # where each gradient's chunk ends in a row of n
    end8, end9, end10, end11, end12, end13, end14, end15,
    size0, size1, size2, size3, size4, size5, size6, size7,  # elements of each gradient
    size8, size9, size10, size11, size12, size13, size14, size15,
    rest,  # (ranks, n) fp32: added to values, then set to the quantization error of the sum; None: values alone
    p0, p1, p2,  # (ranks, entries) to write: planes of (ranks, k), where rows of n are padded with zeros to k
    seed,  # (1,) int64, for stochastic rounding; None: round to nearest
    input_max,  # the largest value of the gradients' dtype, if scales depend on it
    none,  # None: Triton does not accept a literal None in tuples
    ranks, n, k, gap0, gap1, gap2,  # gap: entries between a plane's rows
    QUANTIZE: tl.constexpr, DEQUANTIZE: tl.constexpr,  # the recipe's tile functions
    TILE: tl.constexpr, PIECES: tl.constexpr, EVEN: tl.constexpr, CVT_LEVEL: tl.constexpr,
):  # fmt: skip
    """Quantizes what is sent to each rank: a program reads TILE values of a row and writes their codes and scales.

    The row is each gradient's chunk, one after the other (kernels/rank_chunks.py); zeros follow the gradient's end.
    Most programs read one gradient, without masks.
    """
    grads = (x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15)
    ends = (end0, end1, end2, end3, end4, end5, end6, end7, end8, end9, end10, end11, end12, end13, end14, end15)
    sizes = (
        size0, size1, size2, size3, size4, size5, size6, size7,
        size8, size9, size10, size11, size12, size13, size14, size15,
    )  # fmt: skip
    row, column = tile_of(ranks, k, 1, TILE)
    planes = (p0, p1, p2, gap0, gap1, gap2, none)
    x, start, end, size = x0, end0 * 0, end0, size0
    for index in tl.static_range(1, 16):
        if grads[index] is not None:
            begun = column >= ends[index - 1]
            x = tl.where(begun, grads[index], x)
            start = tl.where(begun, ends[index - 1], start)
            end = tl.where(begun, ends[index], end)
            size = tl.where(begun, sizes[index], size)
    first = row * (end - start) + column - start
    at = (row, column, ranks, n, k)
    if (column + TILE <= end) & (first + TILE <= size):
        tile = load_runs(x, (0, first, 1, size), (size, 1), (1, TILE), PIECES, True)
        _quantize_row(tile, rest, planes, (seed, input_max), at, QUANTIZE, DEQUANTIZE, EVEN, CVT_LEVEL)
    else:
        tile = _load_chunks(grads, ends, sizes, row, column, TILE, PIECES)
        _quantize_row(tile, rest, planes, (seed, input_max), at, QUANTIZE, DEQUANTIZE, EVEN, CVT_LEVEL)


@triton.jit
def _quantize_row(
    tile, rest, planes, inputs, at,
    QUANTIZE: tl.constexpr, DEQUANTIZE: tl.constexpr, EVEN: tl.constexpr, CVT_LEVEL: tl.constexpr,
):  # fmt: skip
    """Writes the codes and scales of a tile of a row."""
    p0, p1, p2, gap0, gap1, gap2, none = planes
    seed, input_max = inputs
    row, column, ranks, n, k = at
    TILE: tl.constexpr = tile.shape[1]
    if rest is not None:
        tile = to_float(tile) + load_runs(rest, (row, column, ranks, n), (n, 1), (1, TILE), 1, EVEN)
    p0 += row * gap0  # tile functions assume that there are no gaps
    if p1 is not None:
        p1 += row * gap1
    if p2 is not None:
        p2 += row * gap2
    QUANTIZE(
        tile, none, (none, input_max, seed, none, none), (p0, p1, p2, none, none, none, none),
        (none, none, none, none, none, none), (row, column, ranks, k, 0, 0),
        QuantizeOptions(True, False, False, EVEN, CVT_LEVEL),
    )  # fmt: skip
    if rest is not None:
        tl.debug_barrier()  # the reads below need other threads' writes
        planes = (p0, p1, p2, none, none, none, none)
        missed = tile - DEQUANTIZE(
            planes, none, (row, column, ranks, k), DequantizeOptions(True, False, 1, TILE, EVEN, CVT_LEVEL)
        )
        store(rest, tl.where(tl.abs(missed) < float("inf"), missed, 0.0), (row, column, ranks, n), EVEN)


@triton.jit
def _load_chunks(grads, ends, sizes, row, column, TILE: tl.constexpr, PIECES: tl.constexpr):
    """Loads (1, TILE) values of a row that chunks of gradients make up (kernels/rank_chunks.py), from a column on.

    ends: where each gradient's chunk ends in the row. sizes: elements of each gradient; zeros follow them.
    """
    BITS: tl.constexpr = tl.int32 if tl.float32 == grads[0].dtype.element_ty else tl.int16
    bits = tl.zeros((1, TILE), BITS)
    start = column * 0
    for index in tl.static_range(16):
        if grads[index] is not None:
            end = ends[index]
            if (start < column + TILE) & (column < end):
                chunk = end - start
                at = (0, column - start, 1, tl.minimum(chunk, sizes[index] - row * chunk))
                part = load_runs(grads[index] + row * chunk, at, (chunk, 1), (1, TILE), PIECES, False, BEFORE=True)
                bits |= part.to(BITS, bitcast=True)  # all other parts have zeros there
            start = column * 0 + end
    return bits.to(grads[0].dtype.element_ty, bitcast=True)


@triton.jit
def sum_rows_kernel(
    p0, p1, p2,  # planes of each rank's n values, as quantize_rows_kernel writes them
    out,  # (n,) to write
    seed,  # (1,) int64 to increment; None: no seed
    none, ranks, n, k, stride0, stride1, stride2,  # entries from one rank's part of a plane to the next
    number,  # the sum is divided or multiplied by it
    DEQUANTIZE: tl.constexpr, DIVIDE: tl.constexpr,
    TILE: tl.constexpr, EVEN: tl.constexpr, CVT_LEVEL: tl.constexpr,
):  # fmt: skip
    """out[i] = what rank 0 sent + what rank 1 sent + ..., in fp32, divided or multiplied by number."""
    row, column = tile_of(1, k, 1, TILE)
    planes = (p0, p1, p2, none, none, none, none)
    total = DEQUANTIZE(planes, none, (row, column, 1, k), DequantizeOptions(True, False, 1, TILE, EVEN, CVT_LEVEL))
    for _ in range(1, ranks):
        p0 += stride0
        if p1 is not None:
            p1 += stride1
        if p2 is not None:
            p2 += stride2
        planes = (p0, p1, p2, none, none, none, none)
        total += DEQUANTIZE(planes, none, (row, column, 1, k), DequantizeOptions(True, False, 1, TILE, EVEN, CVT_LEVEL))
    total = tl.div_rn(total, tl.full((1, TILE), 0.0, tl.float32) + number) if DIVIDE else total * number
    store(out, to_dtype(total, out.dtype.element_ty, CVT_LEVEL), (row, column, 1, n), EVEN)
    if seed is not None:
        tl.store(seed, tl.load(seed) + 1, mask=tl.program_id(0) == 0)

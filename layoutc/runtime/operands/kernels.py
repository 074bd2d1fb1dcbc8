"""Kernels for token rows in expert order: sums over experts, their gradients, and gated products.

Kernels that make rows also quantize them, given planes of a recipe whose blocks are rows: a program does one row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton.blocks import to_float
from layoutc.runtime.triton.codes import bits_of, float_of, maximum
from layoutc.runtime.triton.tiles import QuantizeOptions, to_dtype


@triton.jit
def amax_of_row(values):
    """The largest magnitude of a row, (1, 1) fp32; NaN propagates."""
    bits = tl.reshape(bits_of(to_float(values)) & 0x7FFFFFFF, (1, values.shape[0]))
    return float_of(tl.reshape(tl.max(bits, 1), (1, 1)))


@triton.jit
def quantize_row(values, amax, planes, at, QUANTIZE: tl.constexpr, CVT_LEVEL: tl.constexpr):
    """Writes the codes and the scale of one row. values: in the dtype of rows.

    planes: (codes, scales, None, the largest value of the rows' dtype or None); at: (row, rows, columns).
    """
    data, scale, none, input_max = planes
    row, rows, columns = at
    QUANTIZE(
        tl.reshape(values, (1, values.shape[0])), none, (none, input_max, none, amax, none),
        (data, scale, none, none, none, none, none), (none, none, none, none, none, none),
        (row, 0, rows, columns, 0, 0), QuantizeOptions(True, False, False, False, CVT_LEVEL),
    )  # fmt: skip


@triton.jit
def sum_of_experts_kernel(
    y, rows, weights, ends, out, columns, experts,
    CHOSEN: tl.constexpr, WEIGHTED: tl.constexpr, TILE: tl.constexpr, CVT_LEVEL: tl.constexpr,
):  # fmt: skip
    """out[t] = the sum over i of y[rows[t, i]], in fp32 and in that order; rows past the last end are skipped. With
    weights, each term is multiplied by weights[t, i], and rounded if weights have out's dtype."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    last = tl.load(ends + experts - 1)
    tiles = tl.cdiv(columns, TILE)
    token = (tl.program_id(0) // tiles).to(tl.int64)
    at = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    inside = at < columns
    total = tl.zeros((TILE,), tl.float32)
    for i in tl.static_range(CHOSEN):
        row = tl.load(rows + token * CHOSEN + i).to(tl.int64)
        value = to_float(tl.load(y + row * columns + at, mask=inside & (row < last), other=0.0))
        if WEIGHTED:
            weight = tl.load(weights + token * CHOSEN + i)
            value = value * to_float(weight)
            if weight.dtype == DTYPE:
                value = to_float(to_dtype(value, DTYPE, CVT_LEVEL))
        total += value
    tl.store(out + token * columns + at, to_dtype(total, DTYPE, CVT_LEVEL), mask=inside)


@triton.jit
def of_experts_kernel(
    grad, y, rows, weights, ends, of_y, of_weights, data, scale, none, input_max, m, columns, experts,
    CHOSEN: tl.constexpr, QUANTIZE: tl.constexpr, TILE: tl.constexpr, CVT_LEVEL: tl.constexpr,
):  # fmt: skip
    """Gradients of experts' rows and weights from the gradient of each token: of_y[rows[t, i]] = grad[t] *
    weights[t, i], and of_weights[t, i] = sum(grad[t] * y[rows[t, i]]), in fp32; 0 past the last end.
    of_y is also quantized if there are planes. TILE: at least `columns`."""
    last = tl.load(ends + experts - 1)
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    inside = at < columns
    given = to_float(tl.load(grad + token * columns + at, mask=inside, other=0.0))
    for i in tl.static_range(CHOSEN):
        place = token * CHOSEN + i
        row = tl.load(rows + place).to(tl.int64)
        read = inside & (row < last)
        value = tl.where(row < last, given * to_float(tl.load(weights + place)), 0.0)
        value = to_dtype(value, of_y.dtype.element_ty, CVT_LEVEL)
        tl.store(of_y + row * columns + at, value, mask=inside)
        if data is not None:
            planes = (data, scale, none, input_max)
            quantize_row(value, amax_of_row(value), planes, (row, m * CHOSEN, columns), QUANTIZE, CVT_LEVEL)
        total = tl.sum(given * to_float(tl.load(y + row * columns + at, mask=read, other=0.0)), 0)
        total = tl.where(row < last, total, 0.0)
        tl.store(of_weights + place, to_dtype(total, of_weights.dtype.element_ty, CVT_LEVEL))


@triton.jit
def gated_kernel(
    both, out, data, scale, none, input_max, m, columns,
    DTYPE: tl.constexpr, QUANTIZE: tl.constexpr, TILE: tl.constexpr, CVT_LEVEL: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up, in fp32 and rounded once to DTYPE, into `out`, or quantized. both: (rows, 2 * columns), gates
    first; each program processes a tile of a row."""
    tiles = tl.cdiv(columns, TILE)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    at = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    inside = at < columns
    gate = to_float(tl.load(both + row * 2 * columns + at, mask=inside, other=0.0))
    up = to_float(tl.load(both + (row * 2 + 1) * columns + at, mask=inside, other=0.0))
    made = to_dtype(gate * tl.sigmoid(gate) * up, DTYPE, CVT_LEVEL)
    if out is not None:
        tl.store(out + row * columns + at, made, mask=inside)
    if data is not None:
        planes = (data, scale, none, input_max)
        quantize_row(made, amax_of_row(made), planes, (row, m, columns), QUANTIZE, CVT_LEVEL)


@triton.jit
def gated_backward_kernel(
    grad, both, of_both, out, data, scale, none, input_max, m, columns,
    QUANTIZE: tl.constexpr, TILE: tl.constexpr, CVT_LEVEL: tl.constexpr,
):  # fmt: skip
    """The gradients of gate and up, each rounded once and, with planes, quantized; also gated_kernel's `out`."""
    DTYPE: tl.constexpr = of_both.dtype.element_ty
    tiles = tl.cdiv(columns, TILE)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    at = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    inside = at < columns
    given = to_float(tl.load(grad + row * columns + at, mask=inside, other=0.0))
    gate = to_float(tl.load(both + row * 2 * columns + at, mask=inside, other=0.0))
    up = to_float(tl.load(both + (row * 2 + 1) * columns + at, mask=inside, other=0.0))
    share = tl.sigmoid(gate)
    of_gate = to_dtype(given * up * share * (1.0 + gate * (1.0 - share)), DTYPE, CVT_LEVEL)
    of_up = to_dtype(given * gate * share, DTYPE, CVT_LEVEL)
    tl.store(of_both + row * 2 * columns + at, of_gate, mask=inside)
    tl.store(of_both + (row * 2 + 1) * columns + at, of_up, mask=inside)
    if out is not None:
        tl.store(out + row * columns + at, to_dtype(gate * share * up, DTYPE, CVT_LEVEL), mask=inside)
    if data is not None:
        amax = maximum(amax_of_row(of_gate), amax_of_row(of_up))
        data += row * columns  # tile functions index rows of `columns` codes; rows here have two halves
        place = (row, m, columns)
        quantize_row(of_gate, amax, (data, scale, none, input_max), place, QUANTIZE, CVT_LEVEL)
        quantize_row(of_up, amax, (data + columns, scale, none, input_max), place, QUANTIZE, CVT_LEVEL)

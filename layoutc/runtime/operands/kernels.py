"""Kernels of rows of tokens in the order of experts: sums, what gradients of sums give them, gated products."""

from __future__ import annotations

import triton
import triton.language as tl

from layoutc.runtime.triton.blocks import to_float
from layoutc.runtime.triton.tiles import to_dtype


@triton.jit
def sum_of_experts_kernel(
    y, rows, weights, ends, out, columns, experts,
    CHOSEN: tl.constexpr, WEIGHTED: tl.constexpr, TILE: tl.constexpr, CVT_LEVEL: tl.constexpr,
):  # fmt: skip
    """out[t] = the sum over i of y[rows[t, i]] (times weights[t, i], rounded if both have one dtype), in fp32 and in
    that order; rows behind the last end are left out."""
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
    grad, y, rows, weights, ends, of_y, of_weights, columns, experts,
    CHOSEN: tl.constexpr, TILE: tl.constexpr, CVT_LEVEL: tl.constexpr,
):  # fmt: skip
    """What the gradient of a token gives those of its experts' rows and of their weights: of_y[rows[t, i]] = grad[t]
    times weights[t, i], and of_weights[t, i] = the sum of grad[t] times y[rows[t, i]], in fp32; 0 behind the last end.
    TILE: at least `columns`."""
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
        tl.store(of_y + row * columns + at, to_dtype(value, of_y.dtype.element_ty, CVT_LEVEL), mask=inside)
        total = tl.sum(given * to_float(tl.load(y + row * columns + at, mask=read, other=0.0)), 0)
        total = tl.where(row < last, total, 0.0)
        tl.store(of_weights + place, to_dtype(total, of_weights.dtype.element_ty, CVT_LEVEL))


@triton.jit
def gated_kernel(both, out, columns, TILE: tl.constexpr, CVT_LEVEL: tl.constexpr):
    """out = silu(gate) * up, in fp32 and rounded once. both: (rows, 2 * columns), gates first; a program has a tile of
    a row."""
    tiles = tl.cdiv(columns, TILE)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    at = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    inside = at < columns
    gate = to_float(tl.load(both + row * 2 * columns + at, mask=inside, other=0.0))
    up = to_float(tl.load(both + (row * 2 + 1) * columns + at, mask=inside, other=0.0))
    made = gate * tl.sigmoid(gate) * up
    tl.store(out + row * columns + at, to_dtype(made, out.dtype.element_ty, CVT_LEVEL), mask=inside)


@triton.jit
def gated_backward_kernel(grad, both, of_both, columns, TILE: tl.constexpr, CVT_LEVEL: tl.constexpr):
    """The gradients of gates and of what they are multiplied with, each rounded once."""
    tiles = tl.cdiv(columns, TILE)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    at = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    inside = at < columns
    given = to_float(tl.load(grad + row * columns + at, mask=inside, other=0.0))
    gate = to_float(tl.load(both + row * 2 * columns + at, mask=inside, other=0.0))
    up = to_float(tl.load(both + (row * 2 + 1) * columns + at, mask=inside, other=0.0))
    share = tl.sigmoid(gate)
    of_gate = given * up * share * (1.0 + gate * (1.0 - share))
    DTYPE: tl.constexpr = of_both.dtype.element_ty
    tl.store(of_both + row * 2 * columns + at, to_dtype(of_gate, DTYPE, CVT_LEVEL), mask=inside)
    tl.store(of_both + (row * 2 + 1) * columns + at, to_dtype(given * gate * share, DTYPE, CVT_LEVEL), mask=inside)

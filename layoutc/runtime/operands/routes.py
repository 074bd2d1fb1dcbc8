"""Rows of tokens in the order of experts: where they go, and how they get there and back, each in one pass.

As models write it, each row of each token is read and written by one pass after the other: gathered, multiplied by
its weight, put back, added up; and the gradients of indices are added by atomics or sorted. Here a pass goes over rows
once. Nothing waits for the numbers of tokens: they stay on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from layoutc.runtime.operands.of_experts import of_experts, sum_of_experts


class Routes(NamedTuple):
    """Rows in the order of experts. order: (rows,), of each row its place among (tokens, chosen); rows: (tokens,
    chosen), of each place its row; ends: (experts,) int32, where the rows of each expert end."""

    order: Tensor
    rows: Tensor
    ends: Tensor


def routes_of(chosen: Tensor, experts: int) -> Routes:
    """chosen: (tokens, chosen of each), the experts of each token, from 0 to experts - 1."""
    by_expert, order = torch.sort(chosen.reshape(-1), stable=True)  # sorts on CPUs are not by themselves
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order), device=order.device)
    every = torch.arange(experts, device=order.device, dtype=by_expert.dtype)
    ends = torch.searchsorted(by_expert, every, right=True, out_int32=True)
    return Routes(order, rows.view_as(chosen), ends)


class ToExperts(torch.autograd.Function):
    """Tokens -> a row for each of their experts. The gradient is the sum of rows, in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends)
        return x[order // rows.shape[1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends = ctx.saved_tensors
        return sum_of_experts(grad, rows, None, ends), None, None, None


class FromExperts(torch.autograd.Function):
    """The weighted sum of each token's rows. Gradients of rows and weights."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, order: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(y, rows, weights, ends)
        made: Tensor = sum_of_experts(y, rows, weights, ends)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *of_experts(grad, *ctx.saved_tensors), None, None, None

"""Routes token rows into expert order and back, each in one pass over the rows.

Models usually write this as separate passes that gather each row, multiply it by its weight, scatter it and add it up;
gradients of indices use atomics or sort. Numbers of tokens stay on the device, so nothing synchronizes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from layoutc.runtime.operands.of_experts import of_experts, sum_of_experts


class Routes(NamedTuple):
    """Rows in expert order. order: (rows,), each row's flat index in (tokens, chosen); rows: (tokens, chosen), its
    inverse, the row of each; ends: (experts,) int32, where the rows of each expert end."""

    order: Tensor
    rows: Tensor
    ends: Tensor


def routes_of(chosen: Tensor, experts: int) -> Routes:
    """chosen: (tokens, experts per token), the experts of each token, from 0 to experts - 1."""
    by_expert, order = torch.sort(chosen.reshape(-1), stable=True)  # CPU sorts are not stable by default
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order), device=order.device)
    every = torch.arange(experts, device=order.device, dtype=by_expert.dtype)
    ends = torch.searchsorted(by_expert, every, right=True, out_int32=True)
    return Routes(order, rows.view_as(chosen), ends)


class ToExperts(torch.autograd.Function):
    """Copies each token to a row for each of its experts. The gradient is the fp32 sum of the token's rows."""

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
    """The weighted sum of each token's rows. Differentiable once, in rows and weights."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, order: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(y, rows, weights, ends)
        made: Tensor = sum_of_experts(y, rows, weights, ends)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *of_experts(grad, *ctx.saved_tensors), None, None, None

"""Sums the outputs of each token's experts, and distributes the gradient of the sum to their rows.

Each token has rows for several experts. Sums run over the rows of each token, so no row is written twice: torch's
gradient of an index adds rows with atomics, or sorts them first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from layoutc.ints.sizes import cdiv
from layoutc.runtime import library
from layoutc.runtime.kernels import launch
from layoutc.runtime.kernels.launch_plan import launched

TILE, WARPS = 1024, 4


def _sum_of_experts(y: Tensor, rows: Tensor, weights: Tensor | None, ends: Tensor) -> Tensor:
    y = y.contiguous()
    (tokens, chosen), columns = rows.shape, y.shape[1]
    if not launch.usable(y):
        total = y.new_zeros((tokens, columns), dtype=torch.float32)
        for i in range(chosen):
            values = torch.where((rows[:, i] < ends[-1])[:, None], y[rows[:, i]], 0)
            total += values if weights is None else values * weights[:, i, None]
        return total.to(y.dtype)
    from layoutc.runtime.operands.kernels import sum_of_experts_kernel

    out = y.new_empty((tokens, columns))
    constants = chosen, weights is not None, TILE, launch.hardware(y.device)
    args = y, rows, rows if weights is None else weights.contiguous(), ends, out, columns, len(ends), *constants
    launched(sum_of_experts_kernel, tokens * cdiv(columns, TILE), args, WARPS)
    return out


def of_experts_with_planes(
    grad: Tensor,
    y: Tensor,
    rows: Tensor,
    weights: Tensor,
    ends: Tensor,
    kernels: Any = None,
    planes: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """`of_experts`, which also writes the gradient of y into planes, its codes and scales. kernels: those of a recipe
    whose blocks are rows; None: there are no planes."""
    grad, y, weights = grad.contiguous(), y.contiguous(), weights.contiguous()
    (tokens, chosen), columns = weights.shape, y.shape[1]
    of_y, of_weights = torch.empty_like(y), torch.empty_like(weights)
    if not launch.usable(y):
        within = (rows < ends[-1])[..., None]
        shared, theirs = torch.where(within, grad[:, None], 0), torch.where(within, y[rows], 0)
        of_y[rows] = (shared * weights[..., None]).to(y.dtype)
        return of_y, (shared.float() * theirs.float()).sum(-1).to(weights.dtype)
    from layoutc.runtime.operands.kernels import of_experts_kernel

    tile = 1 << (columns - 1).bit_length()
    data, scale, input_max, quantize = quantizing(kernels, planes, y.dtype)
    read, written = (grad, y, rows, weights, ends), (of_y, of_weights, data, scale, None)
    constants = chosen, quantize, tile, launch.hardware(y.device)
    args = *read, *written, input_max, tokens, columns, len(ends), *constants
    launched(of_experts_kernel, tokens, args, warps_of(tile))
    return of_y, of_weights


def quantizing(kernels: Any, planes: Sequence[Tensor], dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments with which row kernels quantize: codes, scales, the largest value of the rows' dtype if scales
    depend on it, the recipe's tile function. All None without planes."""
    if not planes:
        return None, None, None, None
    return *planes, torch.finfo(dtype).max if kernels.takes_input_max else None, kernels.quantize_tile


def warps_of(tile: int) -> int:
    """The warps of a program that processes a whole row."""
    return max(WARPS, min(tile // 512, 16))


sum_of_experts = library.define(
    "sum_of_experts(Tensor y, Tensor rows, Tensor? weights, Tensor ends) -> Tensor",
    _sum_of_experts,
    lambda y, rows, weights, ends: y.new_empty((rows.shape[0], y.shape[1])),
)
"""(y (rows, columns), rows (tokens, chosen), weights (tokens, chosen) or None, ends) -> (tokens, columns): for each
token, the fp32 sum of its rows of y in the order of `rows`. Each row is first multiplied by its weight, with torch's
type promotion. Rows from ends[-1] on belong to no expert and are skipped, whatever they hold."""
of_experts = library.define(
    "of_experts(Tensor grad, Tensor y, Tensor rows, Tensor weights, Tensor ends) -> (Tensor, Tensor)",
    of_experts_with_planes,
    lambda grad, y, rows, weights, ends: (torch.empty_like(y), torch.empty_like(weights)),
)
"""(grad (tokens, columns), y, rows, weights, ends) -> the gradients of y and of weights; 0 from row ends[-1] on."""

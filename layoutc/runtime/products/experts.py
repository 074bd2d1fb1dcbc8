"""Products of grouped tokens with expert weights, as autograd and torch.compile see them: F.grouped_mm and torch.bmm.

They consist of one autograd function and two operators that take the weight itself, like F.linear in `autograd`. All
experts of a layer also run as one call: route tokens to experts, compute, and combine the results per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from layoutc.runtime import product_mode as mode
from layoutc.runtime.operands.expert_rows import FromExperts, Routes, ToExperts, gated, routes_of
from layoutc.runtime.product_mode import Mode
from layoutc.runtime.products import autograd, grouped
from layoutc.runtime.products.choice import Keeps, keeps
from layoutc.runtime.products.routed import routed
from layoutc.runtime.quantize.weights import FLOATS
from layoutc.runtime.torch_private import grouped_mm, traced

_grouped = autograd.operator(
    "grouped(Tensor x, Tensor weight, Tensor? offs, str mode, str keeps) -> Tensor[]", grouped.forward
)
_grouped_backward = autograd.operator(
    "grouped_backward(Tensor grad, Tensor weight, Tensor[] saved, Tensor? offs, str mode, bool needs_input, str "
    "keeps) -> Tensor[]",
    grouped.backward,
)
HANDLERS = autograd.HANDLERS  # complete from here on: all low-precision products
Multiply = Callable[..., Tensor]


class LowPrecisionExperts(torch.autograd.Function):
    """Multiplies each group of tokens by its own matrix, as `mode` says. Differentiable once, in x and weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, offs: Tensor | None, mode: Mode, keeps: Keeps) -> Tensor:
        """x (tokens, k) in groups that end at offs, or (experts, tokens, k); weight (experts, k, n), transposed or not.

        keeps: what backward needs from x.
        """
        x = autograd.arrived(x)
        out: Tensor
        out, *saved = autograd.call(_grouped, weight, x, weight, offs, mode, keeps)
        ctx.save_for_backward(weight, offs, *(saved or ([] if keeps == "nothing" else [x])))
        ctx.mode, ctx.keeps = mode, keeps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients that are needed."""
        weight, offs, *saved = ctx.saved_tensors
        autograd.check_saved(weight, grad)
        grad = autograd.arrived(grad)
        needs_input, trains = ctx.needs_input_grad[:2]
        keeps = ctx.keeps if trains else "nothing"
        made = autograd.call(_grouped_backward, weight, grad, weight, saved, offs, ctx.mode, needs_input, keeps)
        of_input = made[0] if needs_input else None
        of_weight = made[-1].transpose(-2, -1) if trains else None
        return of_input, of_weight, None, None, None


def _groups_multiplied(
    input: Any, mat2: Any, offs: Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Tensor | None:
    """F.grouped_mm in low precision; None for unsupported arguments."""
    if not hasattr(mat2, "LAYOUT") or (how := mode.of(mat2)) == "dequantize":
        return None
    if mat2.dim() != 3 or hasattr(input, "LAYOUT") or isinstance(input, DTensor):
        return None
    if bias is not None or out_dtype not in (None, input.dtype) or input.dtype not in FLOATS:
        return None
    if input.dim() != (3 if offs is None else 2) or input.shape[-1] != mat2.shape[1]:
        return None  # torch's own error is clearer
    if offs is None and input.shape[0] != mat2.shape[0]:
        return None
    if offs is not None and (offs.dtype != torch.int32 or offs.shape != mat2.shape[:1]):
        return None
    kept = keeps(type(mat2), mat2.requires_grad and torch.is_grad_enabled(), traced(input))
    out: Tensor = LowPrecisionExperts.apply(input, mat2, offs, how, kept)  # type: ignore[no-untyped-call]
    return out


def _batch_multiplied(input: Any, mat2: Any, **options: Any) -> Tensor | None:
    """torch.bmm in low precision; None for any other product."""
    if options or not hasattr(mat2, "LAYOUT") or mode.of(mat2) == "dequantize" or input.dim() != 3:
        return None
    if input.is_floating_point() and autograd.autocasts(input):
        input = input.to(torch.get_autocast_dtype(input.device.type))
    return _groups_multiplied(input, mat2)


def routed_experts(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: int, compute: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Runs x (tokens, columns) through each token's chosen experts -> (tokens, columns), their weighted sum.

    chosen, weights: (tokens, experts per token); indices of `experts` or more belong to other ranks and add nothing.
    compute: (rows sorted by expert, end offset of each expert's rows) -> rows.
    """
    return _through(x, weights, routes_of(chosen, experts), compute)


def gated_experts(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, multiply: Multiply = grouped_mm
) -> Tensor:
    """`routed_experts` for experts that compute silu(gate) * up between two products.

    gate_up: (experts, columns, 2 * inner), gates first; down: (experts, inner, columns); both as `multiply` accepts
    them: quantized weights are transposed views, or stored by columns. multiply: (rows, weight, offs) -> rows; not used
    if `routed` can compute the experts.
    """
    routes = routes_of(chosen, len(gate_up))
    if (made := routed(x, weights, gate_up, down, routes)) is not None:
        return made

    def compute(rows: Tensor, ends: Tensor) -> Tensor:
        return multiply(gated(multiply(rows, gate_up, offs=ends)), down, offs=ends)

    return _through(x, weights, routes, compute)


def _through(x: Tensor, weights: Tensor, routes: Routes, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    y = compute(ToExperts.apply(x, *routes), routes.ends)  # type: ignore[no-untyped-call]
    made: Tensor = FromExperts.apply(y, weights, *routes)  # type: ignore[no-untyped-call]
    return made


autograd.FUNCTIONS |= {
    grouped_mm: _groups_multiplied,
    F.grouped_mm: _groups_multiplied,
    torch.bmm: _batch_multiplied,
    torch.Tensor.bmm: _batch_multiplied,
}

"""Gated experts in low precision: the kernels that make rows in expert order also quantize them.

Tokens are quantized once, and their codes are moved to experts. Gated products, and the gradients on both sides of
them, are quantized by the launches that compute them. Token rows and gated products are not saved: backward recomputes
them in launches that it needs anyway. All bytes equal those of the separate steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from layoutc.runtime import product_mode as mode
from layoutc.runtime.facts import Grouped
from layoutc.runtime.operands import columns_of_groups, expert_rows
from layoutc.runtime.operands.expert_rows import Routes, sum_of_experts
from layoutc.runtime.operands.groups import Groups
from layoutc.runtime.product_mode import Mode
from layoutc.runtime.products import autograd, grouped
from layoutc.runtime.products.choice import NAMES, ProductName, Recipe
from layoutc.runtime.quantize import weights
from layoutc.runtime.quantize.weights import FLOATS
from layoutc.runtime.weight.tensor import QuantizedTensor

_MODE: Mode = "low_precision"


class _Pair(NamedTuple):
    """The calls of both weights: (experts, k, 2 * inner) with gates first, and (experts, inner, k)."""

    up: grouped.Call
    down: grouped.Call

    @property
    def activation(self) -> Recipe:
        """The recipe of the rows that forward multiplies."""
        return self.up.plan.recipes.activation

    def gradient(self, call: grouped.Call) -> str | None:
        """The key of the gradient recipe if a kernel computes the call's grad_input; else None."""
        return call.plan.recipes.gradient.KEY if call.plan.ways.grad_input == "kernel" else None


def _pair(up: QuantizedTensor, down: QuantizedTensor, ends: Tensor, rows: int, x: Tensor) -> _Pair:
    groups = Groups(ends, rows)
    return _Pair(*(grouped.call_of(right, groups, x, _MODE) for right in (up, down)))


def _multiply(name: ProductName, call: grouped.Call, planes: list[Tensor], like: Tensor) -> Tensor:
    """Multiplies quantized rows by a kernel."""
    found = call.kernel(name)
    assert isinstance(found, Grouped)
    data, scale = planes
    tokens = grouped.Tokens(dict(zip(expert_rows.PLANES, (data, scale.flatten()), strict=True)), None)
    return grouped.by_kernel(name, found, tokens, call, like)


def _grad_input(call: grouped.Call, grad: Tensor, planes: list[Tensor]) -> Tensor:
    call.plan.note("grad_input")
    if planes:
        return _multiply("grad_input", call, planes, grad)
    return grouped.grad_input_in_high_precision(call, grad, call.groups.ends)


def _grad_weight(call: grouped.Call, grad: Tensor, x: Tensor, order: Tensor | None, each: int) -> Tensor:
    """order: row i of the product's operand is row order[i] // each of x; None: the operand is x."""
    call.plan.note("grad_weight")
    if call.plan.ways.grad_weight == "kernel":
        key = call.plan.recipes.activation.KEY
        kept = columns_of_groups.quantized(x, order, each, call.groups.ends, key)
        return grouped.grad_weight_of_columns(call, grouped.columns_of(call, grad), kept, grad.dtype).transpose(-2, -1)
    x = x if order is None else x[order // each]
    made = grouped.grad_weight_in_high_precision(grad, x, call.groups.ends, call.sizes.by_columns)
    return made.transpose(-2, -1)


def _forward(
    x: Tensor, by: Tensor, up: QuantizedTensor, down: QuantizedTensor, order: Tensor, rows: Tensor, ends: Tensor
) -> list[Tensor]:
    """Returns the output and the products of both weights."""
    pair = _pair(up, down, ends, len(order), x)
    whole = weights.quantize_buffers(pair.activation, x, orientations=("rowwise",))
    token = order // rows.shape[1]
    both = _multiply("forward", pair.up, [whole[name][token] for name in expert_rows.PLANES], x)
    y = _multiply("forward", pair.down, expert_rows.gated_rows(both, pair.activation.KEY), x)
    return [sum_of_experts(y, rows, by, ends), both, y]


def _backward(
    grad: Tensor,
    x: Tensor,
    by: Tensor,
    both: Tensor,
    y: Tensor,
    up: QuantizedTensor,
    down: QuantizedTensor,
    order: Tensor,
    rows: Tensor,
    ends: Tensor,
    needs_input: bool,
    trains: list[bool],
) -> list[Tensor]:
    """Returns the gradient of by, and those of x, up and down that are needed."""
    pair = _pair(up, down, ends, len(order), x)
    of_y, of_by, *planes = expert_rows.of_experts(grad, y, rows, by, ends, pair.gradient(pair.down))
    of_gated = _grad_input(pair.down, of_y, planes)
    key = pair.gradient(pair.up) if needs_input else None
    of_both, gated, *planes = expert_rows.gated_rows_backward(of_gated, both, key)
    made = [of_by]
    if needs_input:
        made.append(sum_of_experts(_grad_input(pair.up, of_both, planes), rows, None, ends))
    if trains[0]:
        made.append(_grad_weight(pair.up, of_both, x, order, rows.shape[1]))
    if trains[1]:
        made.append(_grad_weight(pair.down, of_y, gated, None, 1))
    return made


def _why_not(pair: _Pair) -> str:
    """Why kernels can't quantize the rows that they make; "" if they can."""
    recipes = pair.up.plan.recipes
    for call in pair:
        if call.plan.ways.forward != "kernel":
            return "no kernel for forward"
        for name in NAMES:
            found = call.kernel(name) if getattr(call.plan.ways, name) == "kernel" else None
            if isinstance(found, Grouped) and found.kind != "RowWise":
                return "a kernel for other blocks than rows"
    columns = max(pair.up.sizes.k, pair.down.sizes.k)  # for gate gradients, half of their columns
    reasons = (expert_rows.why_not(recipe, columns) for recipe in (recipes.activation, recipes.gradient))
    return next(filter(None, reasons), "")


def _fit(
    x: Tensor, up: QuantizedTensor, down: QuantizedTensor, order: Tensor, rows: Tensor, ends: Tensor, how: str
) -> list[Tensor]:
    """Returns one tensor if this module supports the call, else none. An operator, since in a trace only the weight's
    class can tell. how: the setting for all weights, passed so that graphs depend on it."""
    if type(up) is not type(down) or {mode.of(up), mode.of(down)} != {_MODE}:
        return []
    if x.dtype not in FLOATS or x.dtype != up.dtype or autograd.autocasts(x):
        return []
    return [] if _why_not(_pair(up, down, ends, len(order), x)) else [x.new_empty(0)]


_GIVEN = "Tensor up, Tensor down, Tensor order, Tensor rows, Tensor ends"
_fits = autograd.operator(f"routed_fits(Tensor x, {_GIVEN}, str mode) -> Tensor[]", _fit)
_routed = autograd.operator(f"routed(Tensor x, Tensor by, {_GIVEN}) -> Tensor[]", _forward)
_routed_backward = autograd.operator(
    f"routed_backward(Tensor grad, Tensor x, Tensor by, Tensor both, Tensor y, {_GIVEN}, bool needs_input, bool[] "
    "trains) -> Tensor[]",
    _backward,
)


def _call(operator: Any, weight: Any, first: Tensor, *args: Any) -> Any:
    """autograd.call, or the operator itself under torch.compile, which traces it more fully in torch 2.11."""
    return operator(first, *args) if torch.compiler.is_compiling() else autograd.call(operator, weight, first, *args)


class LowPrecisionRouted(torch.autograd.Function):
    """Routes tokens to experts, multiplies, gates, multiplies, combines. Differentiable once: x, by, both weights."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, by: Tensor, up: Any, down: Any, order: Tensor, rows: Tensor, ends: Tensor
    ) -> Tensor:
        """up, down: (experts, k, 2 * inner) with gates first, and (experts, inner, k), as they are multiplied."""
        x = autograd.arrived(x)
        out: Tensor
        out, both, y = _call(_routed, up, x, by, up, down, order, rows, ends)
        ctx.save_for_backward(x, by, both, y, up, down, order, rows, ends)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients that are needed."""
        saved = ctx.saved_tensors
        for weight in saved[4:6]:
            autograd.check_saved(weight, grad)
        needs_input, _, up, down = ctx.needs_input_grad[:4]
        grad = autograd.arrived(grad)
        made = _call(_routed_backward, saved[4], grad, *saved, needs_input, [up, down])
        of_x = made[1] if needs_input else None
        of_up = made[1 + needs_input] if up else None
        return of_x, made[0], of_up, made[-1] if down else None, None, None, None


def routed(x: Tensor, by: Tensor, up: Any, down: Any, routes: Routes) -> Tensor | None:
    """`experts.gated_experts` by kernels that also quantize the rows that they make; None if they can't."""
    if not all(isinstance(one, QuantizedTensor) and one.dim() == 3 for one in (up, down)) or isinstance(x, DTensor):
        return None
    if not _call(_fits, up, x, up, down, *routes, str(mode.current().products)):
        return None
    made: Tensor = LowPrecisionRouted.apply(x, by, up, down, *routes)  # type: ignore[no-untyped-call]
    return made

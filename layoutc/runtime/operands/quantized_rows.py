"""Operators that make rows in expert order and quantize them in the same launch.

They support recipes whose blocks are rows: a row's codes and scale follow from the row, wherever it lies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from layoutc.runtime import library
from layoutc.runtime.kernels import launch
from layoutc.runtime.operands.gated import launch_gated, launch_gated_backward
from layoutc.runtime.operands.of_experts import of_experts_with_planes
from layoutc.runtime.weight import operators
from layoutc.runtime.weight.recipe_methods import RecipeMethods

PLANES = ("rowwise_data", "rowwise_scale")
_ROWWISE = ("rowwise",)
_MOST = 16384  # the most columns that a program can hold


def why_not(recipe: type[RecipeMethods], columns: int) -> str:
    """Why rows of this many columns can't be quantized by the kernels that make them; "" if they can."""
    layout = recipe.LAYOUT
    if layout.sources.get("rowwise") != PLANES or any(name not in layout.as_stored for name in PLANES):
        return f"{layout.name} has other planes than codes and scales that products read as they are"
    data, scale = (layout.stored[name] for name in PLANES)
    if (scale.rows_per_value, scale.columns_per_value) != (1, None) or data.rows_per_value != 1:
        return f"{layout.name} has blocks that are no rows"
    if layout.stochastic or layout.takes_amax(_ROWWISE) or layout.multiple_m != 1:
        return f"{layout.name} has scales or codes that depend on more than a row"
    return f"rows have {columns} columns, more than {_MOST}" if columns > _MOST else ""


def _planes(recipe: type[RecipeMethods], shape: Sequence[int], like: Tensor) -> list[Tensor]:
    facts = recipe.LAYOUT.planes(*shape)
    return [like.new_empty(facts[name].shape, dtype=facts[name].dtype) for name in PLANES]


def _quantized(recipe: type[RecipeMethods], x: Tensor) -> list[Tensor]:
    made = operators.quantize(recipe, x, None, _ROWWISE)
    return [made[name] for name in PLANES]


def _gated(both: Tensor, recipe: str) -> list[Tensor]:
    cls, both = operators.recipe_of(recipe), both.contiguous()
    kernels = cls.quantizing_kernels(both)
    if kernels is None:
        gate, up = both.chunk(2, dim=-1)
        return _quantized(cls, F.silu(gate) * up)
    planes = _planes(cls, (both.shape[0], both.shape[1] // 2), both)
    launch_gated(both, None, kernels, planes)
    return planes


def _gated_backward(grad: Tensor, both: Tensor, recipe: str | None) -> list[Tensor]:
    cls = None if recipe is None else operators.recipe_of(recipe)
    grad, both = grad.contiguous(), both.contiguous()
    of_both, made = torch.empty_like(both), torch.empty_like(grad)
    if not launch.usable(both):
        gate, up = both.chunk(2, dim=-1)
        share = F.silu(gate)
        of_gate = torch.ops.aten.silu_backward(grad * up, gate)
        of_both = torch.cat((of_gate, grad * share), -1)
        return [of_both, share * up, *([] if cls is None else _quantized(cls, of_both))]
    planes = [] if cls is None else _planes(cls, both.shape, both)
    launch_gated_backward(grad, both, of_both, made, None if cls is None else cls.quantizing_kernels(both), planes)
    return [of_both, made, *planes]


def _of_experts(grad: Tensor, y: Tensor, rows: Tensor, weights: Tensor, ends: Tensor, recipe: str) -> list[Tensor]:
    cls = operators.recipe_of(recipe)
    kernels = cls.quantizing_kernels(y)
    planes = [] if kernels is None else _planes(cls, y.shape, y)
    of_y, of_weights = of_experts_with_planes(grad, y, rows, weights, ends, kernels, planes)
    return [of_y, of_weights, *(planes or _quantized(cls, of_y))]


gated_quantized = library.define(
    "gated_quantized(Tensor both, str recipe) -> Tensor[]",
    _gated,
    lambda both, recipe: _planes(operators.recipe_of(recipe), (both.shape[0], both.shape[1] // 2), both),
)
"""(both (rows, 2 * columns), a recipe's key) -> codes and scales of silu(gate) * up."""
gated_backward_quantized = library.define(
    "gated_backward_quantized(Tensor grad, Tensor both, str? recipe) -> Tensor[]",
    _gated_backward,
    lambda grad, both, recipe: [
        *(torch.empty_like(both), torch.empty_like(grad)),
        *([] if recipe is None else _planes(operators.recipe_of(recipe), both.shape, both)),
    ],
)
"""(gradient of the product, both, key or None) -> the gradient of both, the product, and, with a key, codes and scales
of the gradient of both."""
of_experts_quantized = library.define(
    "of_experts_quantized(Tensor grad, Tensor y, Tensor rows, Tensor weights, Tensor ends, str recipe) -> Tensor[]",
    _of_experts,
    lambda grad, y, rows, weights, ends, recipe: [
        *(torch.empty_like(y), torch.empty_like(weights)),
        *_planes(operators.recipe_of(recipe), y.shape, y),
    ],
)
"""`of_experts`, plus codes and scales of the gradient of y."""

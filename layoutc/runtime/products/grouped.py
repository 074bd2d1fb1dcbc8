"""Multiplies groups of tokens by expert weights: forward and both gradients, each in low precision or dequantized.

Tokens are quantized group by group: a block of several rows holds tokens of one group only. A tensor-wide scale still
covers all tokens, as in a linear layer, because no torch kernel accepts one per group. Except for that scale, a group's
results equal those of a linear layer with its expert's weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from math import lcm
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from layoutc.runtime import library
from layoutc.runtime.facts import Grouped
from layoutc.runtime.operands import columns_of_groups
from layoutc.runtime.operands.groups import Apart, Groups, equal_groups, rows_together, shares_all_rows
from layoutc.runtime.operands.kept import of_input, version, weight_buffers
from layoutc.runtime.product_mode import Mode
from layoutc.runtime.products import choice, scaled_grouped_mm
from layoutc.runtime.products.choice import TILE, Keeps, Plan, ProductName, Recipe, Sizes, operands_of, orientation_of
from layoutc.runtime.products.linear import again
from layoutc.runtime.quantize import weights
from layoutc.runtime.torch_private import computed_in_backward, grouped_mm, traced
from layoutc.runtime.weight import operators
from layoutc.runtime.weight.tensor import QuantizedTensor

_CUTS = "the weight cuts blocks"
_unsafe_view: Any = torch.ops.aten._unsafe_view.default


class Tokens(NamedTuple):
    """Tokens quantized in groups: the buffers that a product reads, and how the groups were moved apart for it."""

    buffers: Mapping[str, Tensor]
    apart: Apart | None


# ------------------------------------------------------------------------------------------------------------- handlers
def forward(x: Tensor, right: QuantizedTensor, offs: Tensor | None, mode: Mode, keeps: Keeps) -> list[Tensor]:
    """Returns the output, and what is saved of x for backward unless that is x itself.

    x: (tokens, k), in groups that end at offs; without offs, (experts, tokens per expert, k). right: (experts, k, n),
    a transposed (experts, n, k) weight or one stored by columns. The output has n columns in place of k.
    """
    call = call_of(right, _groups(x, offs), x, mode)
    ways, sizes = call.plan.ways, call.sizes
    call.plan.note("forward")
    flat = x.reshape(-1, sizes.k)
    if ways.forward == "dequantize":
        values = right.values_of(orientation_of("forward", sizes.by_columns), x.dtype)
        out = in_high_precision(x, values, offs)
    else:
        made = _multiply("forward", call, flat, x)
        out = _unsafe_view(made, [*x.shape[:-1], sizes.n])  # no view: FSDP2 warns of modules that return one
    if keeps != "quantized" or ways.grad_weight == "dequantize":
        return [out]
    return [out, *_kept(call, flat, x)]


def backward(
    grad: Tensor,
    right: QuantizedTensor,
    saved: Sequence[Tensor],
    offs: Tensor | None,
    mode: Mode,
    needs_input: bool,
    keeps: Keeps,
) -> list[Tensor]:
    """Returns the needed gradients, of the input and of (experts, n, k), given the output's.

    saved: what forward returned for backward, or x.
    """
    call = call_of(right, _groups(grad, offs), grad, mode)
    ways, sizes, trains = call.plan.ways, call.sizes, keeps != "nothing"
    asked: tuple[tuple[ProductName, bool], ...] = (("grad_input", needs_input), ("grad_weight", trains))
    call.plan.note(*(name for name, is_asked in asked if is_asked))
    grad = grad.contiguous()  # the gradient of a sum has strides of 0
    flat = grad.view(-1, sizes.n)
    low = any(is_asked and getattr(ways, name) != "dequantize" for name, is_asked in asked)
    # Both products share a seed: a traced graph would merge two draws into one.
    seed = operators.seed_of(call.plan.recipes.gradient, flat) if low else None
    made: list[Tensor] = []
    if needs_input and ways.grad_input == "dequantize":
        made.append(grad_input_in_high_precision(call, grad, offs))
    elif needs_input:
        found = _multiply("grad_input", call, flat, grad, seed)
        made.append(_unsafe_view(found, [*grad.shape[:-1], sizes.k]))
    if trains and ways.grad_weight == "dequantize":
        made.append(grad_weight_in_high_precision(grad, saved[0], offs, sizes.by_columns))
    elif trains:
        if keeps == "input":
            with computed_in_backward():
                saved = _kept(call, again(saved[0]).reshape(-1, sizes.k), saved[0])
        if shares_all_rows(call.plan.recipes.activation.LAYOUT, "columnwise"):
            made.append(grad_weight_of_columns(call, columns_of(call, flat), saved, grad.dtype))
        else:
            made.append(_grad_weight(call, flat, saved, seed))
    return made


class Call(NamedTuple):
    """A product of a weight with grouped tokens: the weight as it is read, and as it is stored."""

    right: QuantizedTensor
    weight: QuantizedTensor
    groups: Groups
    sizes: Sizes
    plan: Plan

    def kernel(self, name: ProductName) -> Grouped | str:
        """The kernel of a product, or the reason why there is none."""
        return choice.kernel(type(self.weight), name, self.sizes.by_columns)


def call_of(right: QuantizedTensor, groups: Groups, x: Tensor, mode: Mode) -> Call:
    """Plans a call; right: see `forward`. A piece of a weight that cuts blocks is dequantized."""
    weight = cast(QuantizedTensor, right.transpose(-2, -1)) if right.transposed else right
    experts, k, n = right.shape
    sizes = Sizes(experts, n, k, groups.tokens, not right.transposed)
    known = all(type(size) is int for size in sizes[:4])
    make = choice.plan_of if known else choice.plan_of.__wrapped__
    return Call(
        right, weight, groups, sizes, make(type(weight), sizes, x.device, mode, _CUTS if weight.store.halo.rows else "")
    )


def _groups(x: Tensor, offs: Tensor | None) -> Groups:
    return equal_groups(x.shape[0], x.shape[1], x.device) if offs is None else Groups(offs, x.shape[0])


def in_high_precision(x: Tensor, values: Tensor, offs: Tensor | None) -> Tensor:
    """Multiplies (tokens, contracted) in groups, or (experts, tokens, contracted), by (experts, contracted, free)."""
    return torch.bmm(x, values) if offs is None else grouped_mm(x, values, offs=offs)


def grad_input_in_high_precision(call: Call, grad: Tensor, offs: Tensor | None) -> Tensor:
    """The input's gradient, a product with the dequantized weight."""
    values = call.right.values_of(orientation_of("grad_input", call.sizes.by_columns), grad.dtype)
    return in_high_precision(grad, values.transpose(-2, -1), offs)


def grad_weight_in_high_precision(grad: Tensor, x: Tensor, offs: Tensor | None, by_columns: bool) -> Tensor:
    """The gradient (experts, n, k), with operands in the order that torch uses for each function's gradient."""
    if offs is None:
        return torch.bmm(x.transpose(1, 2), grad).transpose(1, 2)
    return grouped_mm(x.t(), grad, offs=offs).transpose(1, 2) if by_columns else grouped_mm(grad.t(), x, offs=offs)


def columns_of(call: Call, grad: Tensor) -> list[Tensor]:
    """Quantizes gradients (tokens, n) for the weight's gradient, where each group has its own scales."""
    made: list[Tensor] = columns_of_groups.quantized(grad, None, 1, call.groups.ends, call.plan.recipes.gradient.KEY)
    return made


def grad_weight_of_columns(call: Call, grad: Sequence[Tensor], x: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The gradient (experts, n, k) from gradients and activations that columns_of_groups has quantized."""
    recipes, ends = call.plan.recipes, call.groups.ends
    sides = (recipes.gradient, grad), (recipes.activation, x)
    if call.plan.ways.grad_weight == "kernel":
        found = call.kernel("grad_weight")
        assert isinstance(found, Grouped)
        a, b = (scaled_grouped_mm.columns(recipe.LAYOUT, *planes) for recipe, planes in sides)
        apart = columns_of_groups.ends_apart(ends)
        return scaled_grouped_mm.multiply(a, b._replace(codes=b.codes.t()), apart, found, dtype)
    left, right = (columns_of_groups.values(*planes, ends, call.sizes.tokens, recipe.KEY) for recipe, planes in sides)
    made: Tensor = _by_groups(left.t(), right, ends)
    return made.to(dtype)


# ------------------------------------------------------------------------------------------------------------- products
def _multiply(name: ProductName, call: Call, flat: Tensor, x: Tensor, seed: Tensor | None = None) -> Tensor:
    """Computes forward or grad_input: (tokens, ...) activations or gradients by the weight of each group's expert."""
    (role, _), (_, orientation) = operands_of(name, call.sizes.by_columns)
    recipe: Recipe = getattr(call.plan.recipes, role)
    stated = call.kernel(name) if getattr(call.plan.ways, name) == "kernel" else None
    found = stated if isinstance(stated, Grouped) else None
    made = _quantized(recipe, "rowwise", found, flat, call.groups, x if role == "activation" else None, seed)
    if found is not None:
        return by_kernel(name, found, made, call, x)
    values, whole = _values(recipe, "rowwise", made, flat.shape), call.weight.values_of(orientation, torch.float32)
    right = whole.transpose(1, 2) if orientation == "rowwise" else whole
    product: Tensor = _by_groups(values, right, call.groups.ends)
    return product.to(x.dtype)


def by_kernel(name: ProductName, found: Grouped, quantized: Tokens, call: Call, x: Tensor) -> Tensor:
    """Computes forward or grad_input from tokens that are already quantized, in x's dtype."""
    (role, _), (_, orientation) = operands_of(name, call.sizes.by_columns)
    buffers, apart = quantized
    a = scaled_grouped_mm.tokens(getattr(call.plan.recipes, role).LAYOUT, buffers, found)
    with computed_in_backward() if name == "grad_input" else nullcontext():
        read = weight_buffers(call.weight, orientation)
    b = scaled_grouped_mm.experts(call.weight.LAYOUT, orientation, read, found, call.sizes)
    made = scaled_grouped_mm.multiply(a, b, call.groups.ends if apart is None else apart.ends, found, x.dtype)
    return made if apart is None else made[apart.rows]


def _kept(call: Call, flat: Tensor, x: Tensor) -> list[Tensor]:
    """Columnwise planes of activations x, for the weight's gradient. flat: a view of x."""
    recipe = call.plan.recipes.activation
    if shares_all_rows(recipe.LAYOUT, "columnwise"):
        made: list[Tensor] = columns_of_groups.quantized(flat, None, 1, call.groups.ends, recipe.KEY)
        return made
    kept = _quantized(recipe, "columnwise", None, flat, call.groups, x).buffers
    return [kept[name] for name in recipe.LAYOUT.sources["columnwise"]]


def _grad_weight(call: Call, flat: Tensor, saved: Sequence[Tensor], seed: Tensor | None) -> Tensor:
    """The gradient (experts, n, k) from quantized gradients and activations, by the reference."""
    (_, activation, gradient), groups = call.plan.recipes, call.groups
    buffers = dict(zip(activation.LAYOUT.sources["columnwise"], saved, strict=True))
    kept = Tokens(buffers, groups.apart(rows_together(activation.LAYOUT, "columnwise")))
    right = _values(activation, "columnwise", kept, (call.sizes.tokens, call.sizes.k))
    left = _values(
        gradient, "columnwise", _quantized(gradient, "columnwise", None, flat, groups, None, seed), flat.shape
    )
    made: Tensor = _by_groups(left.t(), right, groups.ends)
    return made.to(flat.dtype)


def _quantized(
    recipe: Recipe,
    orientation: str,
    found: Grouped | None,
    flat: Tensor,
    groups: Groups,
    shared: Tensor | None,
    seed: Tensor | None = None,
) -> Tokens:
    """(tokens, features) -> buffers for a kernel, planes for the reference.

    shared: the activation that flat views, which several weights may read: they share what is quantized from it.
    """
    layout = recipe.LAYOUT
    tile = TILE[0] if found is not None and found.kind != "RowWise" else 1
    apart = groups.apart(lcm(rows_together(layout, orientation), tile))

    def made() -> dict[str, Tensor]:
        moved = flat if apart is None else apart.spread(flat)
        if found is None:
            return dict(weights.quantize(recipe, moved, orientations=(orientation,), seed=seed).store.planes)
        swizzled = bool(layout.swizzled)
        return weights.quantize_buffers(recipe, moved, orientations=(orientation,), swizzled=swizzled, seed=seed)

    if shared is None or traced(flat):
        return Tokens(made(), apart)
    # Where tokens move depends on the offsets. The shared entry keeps the offsets alive, so their id stays unique.
    by: tuple[object, ...] = () if apart is None else (id(groups.ends), version(groups.ends))
    key = ("groups", recipe, orientation, found, *(by if groups.each is None else ("of", groups.each)))
    kept = of_input(shared)
    if key not in kept:
        kept[key] = made() | ({"offsets": groups.ends} if by else {})
    return Tokens(kept[key], apart)


def _values(recipe: Recipe, orientation: str, quantized: Tokens, shape: Sequence[int]) -> Tensor:
    """The fp32 values of quantized tokens, in their original order."""
    buffers, apart = quantized
    rows = shape[0] if apart is None else apart.size
    values = operators.dequantize(recipe, buffers, rows, shape[1], orientation, torch.float32)
    return values if apart is None else values[apart.rows]


# ---------------------------------------------------------------------------------- groups of matrices in fp32
def _run_by_groups(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    groups = [slice(*both) for both in pairwise((0, *ends.tolist()))]
    if b.dim() == 2:
        return torch.stack([a[:, rows] @ b[rows] for rows in groups])
    out = a.new_zeros((a.shape[0], b.shape[2]))
    for rows, matrix in zip(groups, b, strict=True):
        out[rows] = a[rows] @ matrix
    return out


def _fake_by_groups(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    if b.dim() == 2:
        return a.new_empty((ends.shape[0], a.shape[0], b.shape[1]))
    return a.new_empty((a.shape[0], b.shape[2]))


_by_groups = library.define("by_groups(Tensor a, Tensor b, Tensor ends) -> Tensor", _run_by_groups, _fake_by_groups)
"""(tokens, c) by (experts, c, f) -> (tokens, f); (a, tokens) by (tokens, b) -> (experts, a, b)."""

"""Linear layers with a quantized weight: forward and both gradients, each in low precision or dequantized.

Activations and output gradients are read once and written in each orientation that products need. If the weight's
gradient is in low precision, forward saves activations quantized for it, or backward quantizes them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import compress
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from layoutc.runtime import product_mode
from layoutc.runtime.facts import Layout
from layoutc.runtime.operands import amax_in_graphs, scaled_mm
from layoutc.runtime.operands.kept import keep_side, kept_side, of_input, weight_buffers
from layoutc.runtime.product_mode import Mode
from layoutc.runtime.products import choice
from layoutc.runtime.products.choice import NAMES, OPERANDS, Keeps, Plan, ProductName, Recipe, Sizes, Way, recipes_of
from layoutc.runtime.quantize import weights
from layoutc.runtime.torch_private import computed_in_backward, traced
from layoutc.runtime.weight import operators
from layoutc.runtime.weight.tensor import QuantizedTensor

Buffers = Mapping[str, Tensor]
aten = torch.ops.aten
_unsafe_view: Any = aten._unsafe_view.default


_ODD = "the weight is transposed, or cuts blocks"


def plan_of(weight: QuantizedTensor, x: Tensor, mode: Mode) -> Plan:
    """The plan of a weight with x (..., k), or with gradients (..., m). `_ODD` weights are dequantized."""
    (m, k), tokens = weight.shape, prod(x.shape[:-1])
    known = type(tokens) is int and type(m) is int and type(k) is int
    odd = _ODD if weight.store.halo.rows or weight.transposed else ""
    make = choice.plan_of if known else choice.plan_of.__wrapped__
    return make(type(weight), Sizes(0, m, k, tokens), x.device, mode, odd)


# ------------------------------------------------------------------------------------------------------------- handlers
def forward(x: Tensor, weight: QuantizedTensor, bias: Tensor | None, mode: Mode, keeps: Keeps) -> list[Tensor]:
    """Multiplies x (..., k) by a weight (m, k): returns the output (..., m), and what is saved of x unless it is x.

    keeps: what backward needs from x to compute the weight's gradient.
    """
    m, k = weight.shape
    ways, recipes, _ = plan = plan_of(weight, x, mode)
    plan.note("forward")
    kept = ways.grad_weight if keeps == "quantized" else "dequantize"
    wanted = {"rowwise": ways.forward, "columnwise": kept}
    quantized = _activations(recipes.activation, x, k, wanted)
    if ways.forward == "dequantize":
        out = F.linear(x, weight.values_of("rowwise", x.dtype), bias)
    else:
        flat = _multiply("forward", ways.forward, quantized["rowwise"], weight, prod(x.shape[:-1]), x.dtype)
        flat = flat if bias is None else flat + bias.to(x.dtype)
        out = _unsafe_view(flat, [*x.shape[:-1], m])  # no view: FSDP2 warns of modules that return one
    return [out, *(quantized["columnwise"].values() if kept != "dequantize" else ())]


def backward(
    grad: Tensor, weight: QuantizedTensor, saved: Sequence[Tensor], mode: Mode, needs_input: bool, keeps: Keeps
) -> list[Tensor]:
    """Returns the needed gradients, of the input (..., k) and of the weight (m, k), given the output's.

    saved: what forward returned for backward, or x.
    """
    m, k = weight.shape
    tokens, trains = prod(grad.shape[:-1]), keeps != "nothing"
    ways, recipes, _ = plan = plan_of(weight, grad, mode)
    plan.note(*compress(NAMES[1:], (needs_input, trains)))
    flat = grad.reshape(tokens, m)
    wanted = {
        "rowwise": ways.grad_input if needs_input else "dequantize",
        "columnwise": ways.grad_weight if trains else "dequantize",
    }
    quantized = _quantized(recipes.gradient, flat, wanted)
    made: list[Tensor] = []
    if needs_input:
        if ways.grad_input == "dequantize":
            found = flat @ weight.values_of("columnwise", grad.dtype)
        else:
            found = _multiply("grad_input", ways.grad_input, quantized["rowwise"], weight, tokens, grad.dtype)
        made.append(_unsafe_view(found, [*grad.shape[:-1], k]))
    if trains:
        if ways.grad_weight == "dequantize":
            made.append(grad_weight_by_values(flat, saved[0]))
        else:
            kept = _kept(recipes.activation, ways.grad_weight, saved, keeps, k)
            made.append(_grad_weight(recipes, ways.grad_weight, quantized["columnwise"], kept, (m, k, tokens), grad))
    return made


def grad_weight_by_values(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of a weight (m, k) in high precision, from gradients (..., m) and activations (..., k)."""
    return grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def _kept(recipe: Recipe, way: Way, saved: Sequence[Tensor], keeps: Keeps, k: int) -> Buffers:
    """Columnwise activations (tokens, k): as forward quantized them, or quantized here from the saved x."""
    if keeps == "quantized":
        return dict(zip(names_of(recipe.LAYOUT, "columnwise", way), saved, strict=True))
    return _activations(recipe, saved[0], k, {"columnwise": way}, in_backward=True)["columnwise"]


def _activations(
    recipe: Recipe, x: Tensor, k: int, ways: Mapping[str, Way], in_backward: bool = False
) -> dict[str, Buffers]:
    """Quantizes x in the orientations that are wanted; reuses what was quantized for another weight."""
    if all(way == "dequantize" for way in ways.values()):
        return {}
    shared = of_input(x)
    found: dict[str, Buffers] = {n: shared[key] for n, way in ways.items() if (key := (recipe, n, way)) in shared}
    missing = {name: way for name, way in ways.items() if name not in found}
    if not missing:
        return found
    made = _quantized(recipe, x.reshape(-1, k), missing, in_backward)
    shared.update({(recipe, name, ways[name]): buffers for name, buffers in made.items()})
    return found | made


def _quantized(recipe: Recipe, x: Tensor, ways: Mapping[str, Way], in_backward: bool = False) -> dict[str, Buffers]:
    """(tokens, features) -> for each orientation in low precision: buffers for a kernel, planes for the reference.

    in_backward: x comes from forward. A traced graph must quantize it in backward; only an amax may move to forward.
    """
    ways = {name: way for name, way in ways.items() if way != "dequantize"}
    if not ways:
        return {}
    layout, for_kernel = recipe.LAYOUT, tuple([name for name, way in ways.items() if way == "kernel"])
    if len(for_kernel) == len(ways) and not traced(x):
        buffers = operators.quantize_buffers(recipe, x, None, for_kernel, bool(layout.swizzled), True)
        return _split(layout, buffers, ways)
    made: dict[str, Buffers] = {}
    # Both orientations share a seed: a traced graph would merge two draws into one.
    seed = operators.seed_of(recipe, x)
    amax = amax_in_graphs.amax_of(recipe, x) if for_kernel else None
    with computed_in_backward() if in_backward else nullcontext():
        x = again(x) if in_backward else x
        if for_kernel:
            buffers = operators.quantize_buffers(recipe, x, amax, for_kernel, bool(layout.swizzled), True, seed)
            made |= _split(layout, buffers, dict.fromkeys(for_kernel, "kernel"))
        for_reference = tuple(name for name, way in ways.items() if way == "reference")
        if for_reference:
            planes = weights.quantize(recipe, x, orientations=for_reference, seed=seed).store.planes
            made |= _split(layout, planes, dict.fromkeys(for_reference, "reference"))
    return made


def again(x: Tensor) -> Tensor:
    """Forward's x, in backward. In a traced graph, a multiplication by 1 lets the partitioner recompute x.

    AOTAutograd saves from forward whatever only operators like ours read in backward. It may recompute what arithmetic
    reads, where that saves memory; hence the multiplication.
    """
    return x * 1.0 if traced(x) else x


def _split(layout: Layout, found: Buffers, ways: Mapping[str, Way]) -> dict[str, Buffers]:
    return {name: {one: found[one] for one in names_of(layout, name, way)} for name, way in ways.items()}


@cache
def names_of(layout: Layout, orientation: str, way: Way) -> tuple[str, ...]:
    """The names that a product reads of an orientation: buffers for a kernel, planes for the reference."""
    if way == "reference":
        return layout.sources[orientation]
    buffers = layout.buffers(layout.multiple_m, layout.multiple_k)
    return tuple(name for name in buffers if name == "amax" or name.split("_")[0] == orientation)


def matrix_product(func: Any, args: Sequence[Any]) -> Tensor | None:
    """mm or addmm of activations or gradients by a weight, in low precision; None for any other product.

    The class sees `x @ weight.t()` as this. So does the local shard of a linear layer's DTensor weight, unless the
    layer multiplies its part as one function (`parallel`). The weight's gradient does not involve the weight, so
    autograd computes it from the unquantized x.
    """
    if func not in (aten.mm.default, aten.addmm.default):
        return None
    *bias, left, right = args
    if not isinstance(right, QuantizedTensor) or (mode := product_mode.of(right)) == "dequantize":
        return None
    if isinstance(left, QuantizedTensor) or left.dtype not in weights.FLOATS:
        return None
    name: ProductName = "forward" if right.transposed else "grad_input"
    weight = cast(QuantizedTensor, right.t()) if right.transposed else right
    if left.shape[1] != right.shape[0]:
        return None  # torch's own error is clearer
    plan = plan_of(weight, left, mode)
    plan.note(name)
    way: Way = getattr(plan.ways, name)
    if way == "dequantize":
        return None
    (role, orientation), _ = OPERANDS[name]
    quantized = _quantized(getattr(plan.recipes, role), left, {orientation: way})
    out = _multiply(name, way, quantized[orientation], weight, left.shape[0], left.dtype)
    return out + bias[0].to(out.dtype) if bias else out


# ------------------------------------------------------------------------------------------------------------- products
def _multiply(
    name: ProductName, way: Way, left: Buffers, weight: QuantizedTensor, tokens: int, dtype: torch.dtype
) -> Tensor:
    """Computes forward or grad_input, flat: quantized activations or gradients (tokens, ...) by the weight."""
    recipes = recipes_of(type(weight))
    (role, rowwise), (_, orientation) = OPERANDS[name]
    recipe: Recipe = getattr(recipes, role)
    m, k = weight.shape
    free, contracted = (m, k) if orientation == "rowwise" else (k, m)
    if way == "kernel":
        a = scaled_mm.side(recipe.LAYOUT, rowwise, left, tokens, is_left=True)
        b = kept_side(weight, orientation)
        if b is None:
            with computed_in_backward() if name == "grad_input" else nullcontext():  # not saved in forward
                right = weight_buffers(weight, orientation)
            b = scaled_mm.side(weight.LAYOUT, orientation, right, free, is_left=False)
            keep_side(weight, orientation, b)
        return scaled_mm.multiply(a, b, dtype, fast=name == "forward")
    values = operators.dequantize(recipe, left, tokens, contracted, rowwise, torch.float32)
    whole = weight.values_of(orientation, torch.float32)
    return (values @ (whole.t() if orientation == "rowwise" else whole)).to(dtype)


def _grad_weight(
    recipes: Any, way: Way, grad: Buffers, x: Buffers, sizes: tuple[int, int, int], like: Tensor
) -> Tensor:
    """The gradient of an (m, k) weight from quantized gradients (tokens, m) and activations (tokens, k)."""
    m, k, tokens = sizes
    gradient, activation = recipes.gradient, recipes.activation
    if way == "kernel":
        a = scaled_mm.side(gradient.LAYOUT, "columnwise", grad, m, is_left=True)
        b = scaled_mm.side(activation.LAYOUT, "columnwise", x, k, is_left=False)
        return scaled_mm.multiply(a, b, like.dtype)
    left = operators.dequantize(gradient, grad, tokens, m, "columnwise", torch.float32)
    right = operators.dequantize(activation, x, tokens, k, "columnwise", torch.float32)
    return (left.t() @ right).to(like.dtype)

"""F.linear of quantized weights, as autograd and torch.compile see it: one function, two operators.

The operators take the weight itself, so that a traced graph asks its class, and sees what is inside of them:
quantizing, laying out, scaled_mm. Eager calls go to the class directly, since a torch operator costs several
microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from layoutc.runtime import product_mode as mode
from layoutc.runtime.product_mode import Mode
from layoutc.runtime.products import linear
from layoutc.runtime.products.choice import Keeps, keeps
from layoutc.runtime.quantize.weights import FLOATS
from layoutc.runtime.torch_private import AsyncCollectiveTensor, without_torch_function
from layoutc.runtime.weight import operators


def _no_weight(*_: Any) -> Any:
    raise TypeError("layoutc.linear takes a quantized weight")


operators.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, str mode, str keeps) -> Tensor[]", _no_weight, _no_weight
)
operators.define(
    "linear_backward(Tensor grad, Tensor weight, Tensor[] saved, str mode, bool needs_input, str keeps) -> Tensor[]",
    _no_weight,
    _no_weight,
)
_linear: Any = torch.ops.layoutc.linear.default
_linear_backward: Any = torch.ops.layoutc.linear_backward.default
HANDLERS = {
    _linear: lambda func, args, kwargs: linear.forward(*args, **kwargs),
    _linear_backward: lambda func, args, kwargs: linear.backward(*args, **kwargs),
}


class LowPrecisionLinear(torch.autograd.Function):
    """x w^T + bias, with products as `mode` says. Gradients of x, weight and bias, which have none themselves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Tensor | None, mode: Mode, keeps: Keeps) -> Tensor:
        """x (..., k), weight (m, k), bias (m,) -> (..., m) in x's dtype. keeps: what backward will need of x."""
        x = arrived(x)
        out: Tensor
        out, *saved = call(_linear, weight, x, weight, bias, mode, keeps)
        ctx.save_for_backward(weight, *(saved or ([] if keeps == "nothing" else [x])))
        ctx.mode, ctx.keeps = mode, keeps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of those that need one."""
        weight, *saved = ctx.saved_tensors
        grad = arrived(grad)
        needs_input, trains, needs_bias = ctx.needs_input_grad[:3]
        keeps = ctx.keeps if trains else "nothing"
        made: Sequence[Tensor] = call(_linear_backward, weight, grad, weight, saved, ctx.mode, needs_input, keeps)
        of_input = made[0] if needs_input else None
        of_weight = made[-1] if trains else None
        of_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if needs_bias else None
        return of_input, of_weight, of_bias, None, None


def arrived(x: Tensor) -> Tensor:
    """x itself, where it is the result of a collective that may still be under way: kernels take plain tensors."""
    waited: Tensor = x.wait() if isinstance(x, AsyncCollectiveTensor) else x
    return waited


def call(operator: Any, weight: Any, first: Tensor, *args: Any) -> Any:
    with _without_autocast(first):  # it would round what is multiplied in fp32
        if operators.traced(first):
            return operator(first, *args)
        with without_torch_function():
            return weight.HANDLERS[operator](operator, (first, *args), {})


def autocasts(x: Tensor) -> bool:
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext()


def torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """`__torch_function__` of recipes that have products: FUNCTIONS in low precision, all others as they are."""
    multiply = FUNCTIONS.get(func)
    with without_torch_function():  # inside, a weight's shape is no call of this function
        made = None if multiply is None else multiply(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if made is None else made


def _multiplied(input: Any, weight: Any, bias: Tensor | None = None) -> Tensor | None:
    """F.linear in low precision; None for what is no linear layer with a weight that is multiplied so."""
    if not hasattr(weight, "LAYOUT") or (how := mode.of(weight)) == "dequantize":
        return None
    if input.is_floating_point() and autocasts(input):
        input = input.to(torch.get_autocast_dtype(input.device.type))
    if hasattr(input, "LAYOUT") or isinstance(input, DTensor):
        return None
    if weight.dim() != 2 or input.dim() == 0 or input.shape[-1] != weight.shape[1] or input.dtype not in FLOATS:
        return None
    kept = keeps(type(weight), weight.requires_grad and torch.is_grad_enabled(), operators.traced(input))
    out: Tensor = LowPrecisionLinear.apply(input, weight, bias, how, kept)  # type: ignore[no-untyped-call]
    return out


# What has products in low precision: None where a call is not one. `experts` adds those of 3-D weights.
FUNCTIONS: dict[Any, Callable[..., Tensor | None]] = {F.linear: _multiplied}

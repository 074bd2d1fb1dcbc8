"""F.linear of quantized weights, as autograd and torch.compile see it.

In low precision, F.linear is one autograd function and two operators. The operators take the weight itself, so tracing
dispatches to its class and sees their contents: quantizing, laying out, scaled_mm. Eager calls go to the class
directly, since a torch operator costs several microseconds.

Dequantized, an eager call is one autograd function too, and traces are left to the class. If torch decomposed F.linear,
eager calls would dispatch to the class for a transpose and a product, in forward and again in backward, and make a
tensor for each transposed weight. The host overhead would be several times that of a plain weight.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from layoutc.runtime import callers, library
from layoutc.runtime import product_mode as mode
from layoutc.runtime.errors import UnsupportedOperator, ValuesAlone
from layoutc.runtime.product_mode import Mode
from layoutc.runtime.products import flops, linear, steady_linear
from layoutc.runtime.products.choice import Keeps, keeps
from layoutc.runtime.quantize.weights import FLOATS
from layoutc.runtime.torch_private import (
    AsyncCollectiveTensor,
    any_autocast,
    applied,
    is_wrapped,
    jit_records,
    traced,
    transform,
    without_torch_function,
)
from layoutc.runtime.weight import operators
from layoutc.runtime.weight.tensor import QuantizedTensor

HANDLERS: dict[Any, Callable[..., Any]] = {}  # for operators that take weights; `experts` and `routed` add theirs


def operator(schema: str, run: Callable[..., list[Tensor]]) -> Any:
    """Defines a torch.ops.layoutc operator that dispatches to the weight's class, and registers its handler."""
    defined = library.of_weights(schema)
    HANDLERS[defined] = lambda func, args, kwargs: run(*args, **kwargs)
    return defined


_linear = operator("linear(Tensor x, Tensor weight, Tensor? bias, str mode, str keeps) -> Tensor[]", linear.forward)
_linear_backward = operator(
    "linear_backward(Tensor grad, Tensor weight, Tensor[] saved, str mode, bool needs_input, str keeps) -> Tensor[]",
    linear.backward,
)


class LowPrecisionLinear(torch.autograd.Function):
    """x w^T + bias, with products as `mode` says. Differentiable once, in x, weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Tensor | None, mode: Mode, keeps: Keeps) -> Tensor:
        """x (..., k), weight (m, k), bias (m,) -> (..., m) in x's dtype. keeps: what backward needs from x."""
        x = arrived(x)
        made: list[Tensor] | None = steady_linear.forward(x, weight, bias, mode, keeps)
        out, *saved = call(_linear, weight, x, weight, bias, mode, keeps) if made is None else made
        ctx.save_for_backward(weight, *(saved or ([] if keeps == "nothing" else [x])))
        ctx.mode, ctx.keeps = mode, keeps
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients that are needed."""
        gradients = _gradients_once if torch.is_grad_enabled() else _gradients
        return gradients(ctx, grad)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Returns the needed gradients among those of x, weight and bias."""
    weight, *saved = ctx.saved_tensors
    check_saved(weight, grad)
    grad = arrived(grad)
    needs_input, trains, needs_bias = ctx.needs_input_grad[:3]
    keeps: Keeps = ctx.keeps if trains else "nothing"
    made: list[Tensor] | None = steady_linear.backward(grad, weight, saved, ctx.mode, needs_input, keeps)
    if made is None:
        made = call(_linear_backward, weight, grad, weight, saved, ctx.mode, needs_input, keeps)
    of_input = made[0] if needs_input else None
    of_weight = made[-1] if trains else None
    of_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if needs_bias else None
    return of_input, of_weight, of_bias, None, None


_gradients_once = once_differentiable(_gradients)


class DequantizedLinear(torch.autograd.Function):
    """x w^T + bias with a dequantized weight, in x's dtype. Differentiable in x, weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
        """x (..., k), weight (m, k), bias (m,) -> (..., m)."""
        needs_input, trains = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if trains else None, weight if needs_input else None)
        return F.linear(x, values_of(weight, "rowwise", x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the needed gradients. Double backward uses the class's products."""
        x, weight = ctx.saved_tensors
        check_saved(weight, grad)
        needs_input, trains, needs_bias = ctx.needs_input_grad
        flat = grad.reshape(-1, grad.shape[-1])
        of_input = of_weight = None
        with without_torch_function():
            if needs_input:
                values = weight if torch.is_grad_enabled() else values_of(weight, "columnwise", grad.dtype)
                of_input = (flat @ values).view(*grad.shape[:-1], weight.shape[1])
            if trains:
                of_weight = flat.t() @ x.reshape(-1, x.shape[-1])
        return of_input, of_weight, flat.sum(0) if needs_bias else None


def check_saved(weight: Any, grad: Tensor) -> None:
    """Raises ValuesAlone if a hook of saved tensors gave back plain values of a weight."""
    if type(weight) is Tensor and not is_wrapped(weight) and not traced(grad):
        raise ValuesAlone(f"a quantized weight of shape {tuple(weight.shape)}")


def values_of(weight: QuantizedTensor, orientation: str, dtype: torch.dtype) -> Tensor:
    """Dequantizes a whole weight (m, k): by the launch plan for planes like these if there is one, else as usual."""
    planes, matrix, orientation = weight.store.planes, weight.store.matrix, mode.read_as(weight, orientation)
    if not isinstance(planes, dict) or weight.store.halo.rows or weight.store.writes.waiting:
        return weight.values_of(orientation, dtype)
    again = operators.values_again(type(weight), planes, *matrix, orientation, dtype)
    return weight.values_of(orientation, dtype) if again is None else again


def arrived(x: Tensor) -> Tensor:
    """Waits for x if an async collective computes it: kernels accept only plain tensors."""
    waited: Tensor = x.wait() if isinstance(x, AsyncCollectiveTensor) else x
    return waited


def call(operator: Any, weight: Any, first: Tensor, *args: Any) -> Any:
    rounds = autocasts(first)  # fp32 operands
    with torch.autocast(first.device.type, enabled=False) if rounds else nullcontext():
        if traced(first):
            if not torch.compiler.is_compiling():
                flops.tell_counters()
            return operator(first, *args)
        with without_torch_function():
            return weight.HANDLERS[operator](operator, (first, *args), {})


def autocasts(x: Tensor) -> bool:
    if (x.is_cuda or x.is_cpu) and not torch.compiler.is_compiling() and not any_autocast():
        return False
    device = x.device.type
    return _can_autocast(device) and torch.is_autocast_enabled(device)


@cache
def _can_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


def torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """`__torch_function__` of recipes: replaces FUNCTIONS by one autograd function each, and passes others through."""
    if func is torch.autograd.grad and (by_edges := _by_edges(*args, **(kwargs or {}))) is not None:
        return by_edges()
    if jit_records() and issubclass(cls, QuantizedTensor):
        raise UnsupportedOperator(
            f"torch.jit.trace can't record {cls.LAYOUT.name} weights, whose codes no graph of TorchScript holds: use "
            "torch.export.export(model, inputs) or torch.compile(model)"
        )
    multiply = FUNCTIONS.get(func)
    if multiply and not (torch.is_grad_enabled() or issubclass(cls, QuantizedTensor) or torch.compiler.is_compiling()):
        multiply = None if callers.steps() else multiply  # a step computes with what a dispatch handler gives it
    with without_torch_function():  # inside, reading a weight's shape must not call this function
        made = None if multiply is None else multiply(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if made is None else made


def _by_edges(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> partial[Any] | None:
    """torch.autograd.grad by gradient edges instead of weights, so it bypasses torch_function; None if it can't.

    Inside torch_function, layers that activation checkpointing recomputes would not use forward's functions.
    """
    tensors = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    others = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    if any(hasattr(one, "LAYOUT") for one in others) or kwargs.get("materialize_grads"):
        return None
    with without_torch_function():
        if not all(one.requires_grad for one in tensors if isinstance(one, Tensor)):
            return None
        edges = [get_gradient_edge(one) if hasattr(one, "LAYOUT") else one for one in tensors]
    return partial(torch.autograd.grad, outputs, edges, *args, **kwargs)


def _multiplied(input: Any, weight: Any, bias: Tensor | None = None) -> Tensor | None:
    """F.linear as one autograd function; None for unsupported arguments."""
    if not hasattr(weight, "LAYOUT"):
        return None
    if (how := mode.of(weight)) == "dequantize":
        return _dequantized(input, weight, bias)
    if input.is_floating_point() and autocasts(input):
        dtype = torch.get_autocast_dtype(input.device.type)
        input, bias = input.to(dtype), None if bias is None else bias.to(dtype)
    if hasattr(input, "LAYOUT") or isinstance(input, DTensor):
        return None
    if weight.dim() != 2 or input.dim() == 0 or input.shape[-1] != weight.shape[1] or input.dtype not in FLOATS:
        return None
    recorded = traced(input)
    kept = keeps(type(weight), weight.requires_grad and torch.is_grad_enabled(), recorded)
    apply: Any = LowPrecisionLinear.apply if recorded or _is_transformed(input, bias) else _in_low_precision
    return apply(input, weight, bias, how, kept)  # type: ignore[no-any-return]


def _dequantized(x: Any, weight: Any, bias: Any) -> Tensor | None:
    """F.linear with a dequantized weight; None for calls left to the class: traces, transforms, other classes."""
    if type(x) is not Tensor or not isinstance(weight, QuantizedTensor) or weight.transposed or weight.dim() != 2:
        return None
    if x.dtype is not weight.dtype or x.dim() < 2 or x.shape[-1] != weight.shape[1] or x.layout is not torch.strided:
        return None
    if bias is not None and (type(bias) not in (Tensor, nn.Parameter) or bias.dtype is not x.dtype):
        return None
    if x.is_nested or traced(x) or _is_transformed(x, bias) or forward_ad._current_level >= 0:
        return None
    if autocasts(x) or torch.is_inference_mode_enabled():
        return None
    if not torch.is_grad_enabled():
        return F.linear(x, values_of(weight, "rowwise", x.dtype), bias)
    return _by_values(x, weight, bias)  # type: ignore[no-any-return]


def _is_transformed(x: Tensor, bias: Tensor | None) -> bool:
    """Whether a torch.func transform is active, or still wraps one of these tensors."""
    return transform() is not None or is_wrapped(x) or (bias is not None and is_wrapped(bias))


_in_low_precision, _by_values = applied(LowPrecisionLinear), applied(DequantizedLinear)


# Calls that become one autograd function, or return None. `experts` adds products of 3-D weights.
FUNCTIONS: dict[Any, Callable[..., Tensor | None]] = {F.linear: _multiplied}

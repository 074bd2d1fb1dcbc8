"""torch.einsum of quantized weights, as autograd and torch.compile see it: a product of their values.

torch permutes its operands, which codes can't follow. Backward dequantizes the values again: keeping them would keep a
copy of the weight in high precision.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from layoutc.runtime import library
from layoutc.runtime.products import autograd
from layoutc.runtime.torch_private import traced, transform, tree_leaves, tree_map, version_of, without_torch_function
from layoutc.runtime.weight.tensor import QuantizedTensor

_values = library.of_weights("values(Tensor weight) -> Tensor")
HANDLERS = {_values: lambda func, args, kwargs: args[0].dequantize()}


def values_of(weight: Any) -> Tensor:
    """The values of a weight or a view that a model multiplies with; autograd does not follow them."""
    found: Tensor
    if traced(weight):
        found = _values(weight)
    else:
        with without_torch_function():
            found = weight.HANDLERS[_values](_values, (weight,), {})
    return found


class Values(torch.autograd.Function):
    """The values of a weight, in its shape and dtype. The gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, weight: Any) -> Tensor:
        """weight: quantized, or cast on gather; a view of one."""
        return values_of(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """(dims of weight) -> the same."""
        return grad


class Saved(NamedTuple):
    """A view of a weight's values, for backward."""

    weight: QuantizedTensor
    version: int
    size: torch.Size
    stride: tuple[int, ...]

    def values(self) -> Tensor:
        """The values of forward. Raises RuntimeError if the weight was written since."""
        if version_of(self.weight) != self.version:
            raise RuntimeError(f"{self.weight.label()} was written between forward and backward of torch.einsum")
        return self.weight.dequantize().as_strided(self.size, self.stride)


def _contracted(*args: Any) -> Tensor | None:
    """torch.einsum with the values of weights; None without weights."""
    weights = [one for one in tree_leaves(args) if hasattr(one, "LAYOUT")]
    if not weights:
        return None
    found = {id(one): _followed(one) for one in weights}
    with _dequantized_again({id(one): one for one in weights}, found):
        product: Tensor = torch.einsum(*tree_map(lambda one: found.get(id(one), one), args))
    return product


def _followed(weight: Any) -> Tensor:
    """The values, followed by autograd and by torch.func's transforms."""
    if not torch.is_grad_enabled():
        return values_of(weight)
    followed: Tensor = Values.apply(weight) if transform() is None else weight * 1  # type: ignore[no-untyped-call]
    return followed


def _dequantized_again(weights: dict[int, Any], found: dict[int, Tensor]) -> AbstractContextManager[Any]:
    """Inside, autograd saves the weights instead of their values. In traces, the compiler decides what to save."""
    quantized = {key: one for key, one in weights.items() if isinstance(one, QuantizedTensor)}
    is_followed = torch.is_grad_enabled() and transform() is None
    if not is_followed or any(traced(one) for one in weights.values()):
        return nullcontext()
    storages = {found[key].untyped_storage().data_ptr(): one for key, one in quantized.items()}

    def pack(saved: Tensor) -> Tensor | Saved:
        weight = storages.get(saved.untyped_storage().data_ptr())
        if weight is None or saved.storage_offset():
            return saved
        return Saved(weight, version_of(weight), saved.size(), saved.stride())

    return saved_tensors_hooks(pack, lambda saved: saved.values() if isinstance(saved, Saved) else saved)


autograd.FUNCTIONS |= {torch.einsum: _contracted}

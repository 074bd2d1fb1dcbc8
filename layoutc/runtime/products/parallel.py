"""Tensor-parallel linear layers: each rank multiplies its local part as one autograd function.

DTensor decomposes F.linear, so autograd computes the weight's gradient from plain activations and gradients, without
dispatching to the weight's class. Here a layer multiplies its local part as an uncut layer would, so all three products
can be in low precision. Placements are those of torch's ColwiseParallel and RowwiseParallel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from layoutc.runtime import product_mode as mode
from layoutc.runtime.sharding import registry
from layoutc.runtime.torch_private import local_tensor


class Placed(NamedTuple):
    """Placements of a product's tensors. Gradients have the placements of their tensors, except for input_grad."""

    input: Placement
    input_grad: Placement
    output: Placement
    bias: Placement


class _Share(torch.autograd.Function):
    """A rank's share of a bias: the shares of all ranks sum to it. The gradient passes through unchanged."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, count: int) -> Tensor:
        return bias / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class LinearOfParts(nn.Linear):
    """An nn.Linear that multiplies by the local part of a quantized DTensor weight."""

    def forward(self, input: Tensor) -> Tensor:
        """x (..., k) by the weight (m, k) -> (..., m), in the global shapes of the DTensors."""
        return linear_of_parts(input, self.weight, self.bias)


_classes: dict[type[nn.Module], type[nn.Linear]] = {nn.Linear: LinearOfParts}


def _class_of_parts(cls: type[nn.Linear]) -> type[nn.Linear]:
    """Makes a subclass of the same name, as FSDP2 does, so that deepcopy and isinstance work as before."""
    if cls not in _classes:
        _classes[cls] = type(cls.__name__, (cls,), {"forward": LinearOfParts.forward, "__module__": cls.__module__})
    return _classes[cls]


def multiply_parts_(modules: Iterable[nn.Module]) -> None:
    """Makes tensor-parallel linear layers with a quantized weight multiply their parts, each as one autograd function.

    Other modules are not changed.
    """
    for module in modules:
        if not (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward):
            continue
        if hasattr(getattr(module.weight, "_local_tensor", None), "LAYOUT") and multiplied(module.weight)[1]:
            # Dynamo does not see the class of a DTensor's local part.
            torch.compiler.allow_in_graph(linear_of_parts)  # type: ignore[no-untyped-call]
            module.__class__ = _class_of_parts(type(module))


def multiplies_parts(module: nn.Module) -> bool:
    """Whether multiply_parts_ has changed the module."""
    return type(module).forward is LinearOfParts.forward


def multiplied(param: Tensor) -> tuple[tuple[int, ...], bool]:
    """The shape of what a rank multiplies by, and whether it is a part of a DTensor, with or without FSDP2."""
    if not isinstance(param, DTensor):
        return tuple(param.shape), False
    local: Any = local_tensor(param)
    sharding = registry.find(local)
    return (tuple(local.shape), True) if sharding is None else (sharding.shape, sharding.is_part)


def linear_of_parts(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear of DTensors: multiplies local parts if placements are those of torch's styles, else calls torch."""
    placed = _placed(weight, x.dim())
    if placed is None or not _lies(x, placed.input, weight):
        return F.linear(x, weight, bias)
    if bias is not None and not _lies(bias, placed.bias, weight):
        return F.linear(x, weight, bias)
    local: Any = weight
    if mode.of(cast(Any, local_tensor(weight))) == "dequantize":
        return F.linear(x, weight, bias)
    given, added = cast(Any, x), cast(Any, bias)
    mesh = local.device_mesh
    own_bias: Tensor | None = None
    if bias is not None:
        own_bias = added.to_local()
        own_bias = own_bias if placed.output.is_shard() else _Share.apply(own_bias, mesh.size())  # type: ignore[no-untyped-call]
    out = F.linear(given.to_local(grad_placements=[placed.input_grad]), local.to_local(), own_bias)
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    stride = torch.empty(shape, device="meta").stride()
    made: Tensor = DTensor.from_local(out, mesh, [placed.output], run_check=False, shape=shape, stride=stride)
    return made


def _placed(weight: Any, dims: int) -> Placed | None:
    """Placements by torch's styles for a weight cut over one mesh dim; None for other weights. dims: the input's."""
    if not isinstance(weight, DTensor) or len(weight.placements) != 1:
        return None
    if not hasattr(local_tensor(weight), "LAYOUT") or weight.dim() != 2 or dims < 2:
        return None
    last = Shard(dims - 1)
    if weight.placements[0] == Shard(0):
        return Placed(Replicate(), Partial(), last, Shard(0))
    if weight.placements[0] == Shard(1):
        return Placed(last, last, Partial(), Replicate())
    return None


def _lies(x: Any, wanted: Placement, weight: Any) -> bool:
    return isinstance(x, DTensor) and x.device_mesh == weight.device_mesh and tuple(x.placements) == (wanted,)

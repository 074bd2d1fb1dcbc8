"""A tiny model, its data, and the run on one process that every sharded run must equal to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import layoutc
from layoutc.runtime.quantize import block_edges
from layoutc.runtime.weight.tensor import QuantizedTensor

RECIPES = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
SHARED = ("fp8_delayed", "fp8_current", "nvfp4")


def recipe_module(recipe: str) -> Any:
    """The generated module."""
    return import_module(f"layoutc.recipes.{recipe}")


class Layer(nn.Linear):
    """A linear layer whose forward is a user's own.

    torch compiles the hooks of fully_shard together with a layer of torch.nn that is compiled by itself: 2.14 then has
    no whole graph of it, nor has 2.13 of a plain one.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        return F.linear(input, self.weight, self.bias)


class Model(nn.Module):
    """Two layers and a head."""

    def __init__(self, width: int, inner: int | None = None, device: str | None = None) -> None:
        super().__init__()
        inner = inner or width
        self.layers = nn.ModuleList([Layer(width, inner, device=device), Layer(inner, width, device=device)])
        self.head = nn.Linear(width, width, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """(n, width) -> (n, width)."""
        for layer in self.layers:
            x = F.gelu(layer(x))
        out: Tensor = self.head(x)
        return out


def width_for(recipe: str, world: int) -> int:
    """The smallest width, 64 or more, whose rows shard."""
    return max(64, world * recipe_module(recipe).LAYOUT.shard_rows)


def make_uneven(model: nn.Module) -> None:
    """Blocks whose scales differ along rows and along columns, so that no orientation passes for another."""
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                rows, columns = layer.weight.shape
                layer.weight *= torch.logspace(-2, 1, rows, 2.0).unsqueeze(1) * torch.logspace(1, -1, columns, 2.0)


def build(recipe: str, width: int, inner: int | None = None, seed: int = 0) -> Model:
    """The same quantized model on every rank."""
    torch.manual_seed(seed)
    model = Model(width, inner)
    make_uneven(model)
    layoutc.quantize_(model, recipe)
    return model


def shard(model: Model, *, nested: bool = True, **options: Any) -> Model:
    """fully_shard of the layers, where nested, and of the root."""
    for layer in model.layers if nested else ():
        fully_shard(layer, **options)
    root = {k: v for k, v in options.items() if k != "reshard_after_forward"} if nested else options
    fully_shard(model, **root)
    return model


def batch(step: int, width: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(8, width, generator=generator), torch.randn(8, width, generator=generator)


def adam(model: nn.Module) -> layoutc.MasterWeights:
    """AdamW on fp32 masters."""
    return layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2, weight_decay=0.1)


def train_step(model: nn.Module, optimizer: Any, step: int, width: int, share: float = 1.0) -> float:
    """One step; the loss before it. `share` scales the gradient of this rank."""
    x, y = batch(step, width)
    loss = (model(x) - y).square().mean()
    (loss * share).backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def my_share() -> float:
    """Rank 0 brings the whole gradient and the others nothing, so that its mean over ranks is exact in any order."""
    return float(dist.get_world_size()) if dist.get_rank() == 0 else 0.0


def local(param: Tensor) -> QuantizedTensor:
    """The shard of a parameter."""
    assert isinstance(param, nn.Parameter)
    assert isinstance(param, DTensor), type(param)
    shard = param._local_tensor
    assert isinstance(shard, QuantizedTensor), type(shard)
    return shard


def raw(tensor: Tensor) -> Tensor:
    """Bytes."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def assert_same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Every tensor of `a` is in `b`, byte for byte."""
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype, name
        assert tensor.shape == b[name].shape, (name, tensor.shape, b[name].shape)
        assert torch.equal(raw(tensor), raw(b[name])), f"{name} differs"


def assert_equal_on_all_ranks(values: Any) -> None:
    """Fails on every rank when one has something else."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, values)
    assert all(other == everywhere[0] for other in everywhere), everywhere


def shared_bytes(model: nn.Module) -> dict[str, tuple[float, str]]:
    """What all ranks must agree on, scales and amaxes that cover all rows: largest value and digest of the bytes."""
    found = {}
    for name, param in model.named_parameters():
        if isinstance(held := getattr(param, "_local_tensor", None), QuantizedTensor):
            for plane, tensor in held.planes().items():
                if held.LAYOUT.stored[plane].rows_per_value is None:
                    digest = hashlib.sha256(bytes(raw(tensor).tolist())).hexdigest()
                    found[f"{name}.{plane}"] = (float(tensor.max()), digest[:12])
    return found


def assert_gathers_as(model: Model, reference: Model) -> None:
    """Unsharded weights have the buffers of the whole weights, byte for byte."""
    modules = [module for module in (*model.layers, model) if isinstance(module, FSDPModule)]
    for module in modules:
        module.unshard()
    for (name, param), (_, whole) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        if isinstance(whole, QuantizedTensor):
            assert type(param) is type(whole), name
            assert isinstance(param, nn.Parameter)
            assert param.shape == whole.shape
            assert_same_tensors(param.buffers(), whole.buffers())
        else:
            assert torch.equal(raw(param), raw(whole)), name
    for module in modules:
        module.reshard()


@contextmanager
def counted(name: str, note: Callable[..., Any], module: Any = dist) -> Iterator[list[Any]]:
    """Calls of a function of a module, by default of torch.distributed, each as note(*args, **kwargs)."""
    calls: list[Any] = []
    original = getattr(module, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(note(*args, **kwargs))
        return original(*args, **kwargs)

    setattr(module, name, counting)
    try:
        yield calls
    finally:
        setattr(module, name, original)


def exchanges() -> Any:
    """counted() of the all-gathers by which ranks tell one another of blocks that cuts go through."""
    return counted("_all_gather", lambda mine, group: mine.numel() * mine.element_size(), block_edges)


def gathers() -> Any:
    """counted() of the all-gathers of FSDP2: bytes that this rank contributes to each."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return counted(name, lambda output, given, *_, **__: given.numel() * given.element_size())

"""A model with weights of every recipe asked for, on any of the first ranks, and what its shards must hold."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from models import adam, assert_same_tensors, make_uneven, recipe_module
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import layoutc
from layoutc import checkpoint
from layoutc.runtime.weight.tensor import QuantizedTensor

WIDTH = 64


class Experts(nn.Module):
    """One weight of three dims."""

    def __init__(self, experts: int, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, rows, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(n, width) -> (experts, n, rows)."""
        return torch.bmm(x.expand(self.weight.shape[0], -1, -1), self.weight.transpose(1, 2))


class Sizes(NamedTuple):
    """Rows and columns of the first weight, experts and rows of each."""

    rows: int
    width: int
    experts: int
    expert_rows: int


def awkward(recipe: str) -> Sizes:
    """Three blocks of rows, or ten rows, or as many as experts can read; three experts, of half a block where
    the recipe allows it.

    Two ranks cut blocks, four cut others, three have uneven shards of rows without blocks, and four leave one of them
    without an expert.
    """
    layout = recipe_module(recipe).LAYOUT
    block, smallest = layout.block_rows, layout.multiple_m
    width = max(WIDTH, layout.multiple_k)
    if block == 1:
        return Sizes(
            10 if layout.multiple_k == 1 else 3 * layout.multiple_k, width, 3, 5 if smallest == 1 else smallest
        )
    rows = 3 * block + -3 * block % layout.multiple_k  # which are columns of the experts
    return Sizes(rows, width, 3, max(block // 2, smallest))


class Part(nn.Module):
    """A layer, and experts behind it, in one recipe."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.width = sizes.width
        self.first = nn.Linear(sizes.width, sizes.rows)
        self.experts = Experts(sizes.experts, sizes.expert_rows, sizes.rows)

    def forward(self, x: Tensor) -> Tensor:
        """(n, width) -> (experts, n, rows of an expert)."""
        out: Tensor = self.experts(F.gelu(self.first(x)))
        return out


class Parts(nn.Module):
    """A part for each recipe. Not an nn.ModuleDict, which torch 2.11 does not shard."""

    def __setitem__(self, recipe: str, part: nn.Module) -> None:
        self.add_module(recipe, part)

    def __getitem__(self, recipe: str) -> Any:
        return getattr(self, recipe)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Recipes and parts."""
        return self.named_children()

    def values(self) -> Iterator[Any]:
        """Parts."""
        return self.children()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """(n, width) -> the loss of each part."""
        return {recipe: part(x[:, : part.width]).square().mean() for recipe, part in self.items()}


def build(sizes: dict[str, Sizes], seed: int = 0) -> Parts:
    """A part for each recipe, the same on every rank."""
    torch.manual_seed(seed)
    model = Parts()
    for recipe, each in sizes.items():
        model[recipe] = Part(each)
        make_uneven(model[recipe])
        layoutc.quantize_(model[recipe], recipe, filter_fn=lambda module, name: hasattr(module, "weight"))
    return model


def shard(model: Parts, mesh: DeviceMesh, **options: Any) -> Parts:
    """One group, so that a step is few collectives. Gradients are summed: the mean over three ranks is not exact."""
    fully_shard(model, mesh=mesh, reshard_after_forward=True, **options)
    model.set_gradient_divide_factor(1.0)  # type: ignore[operator]
    model.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    return model


def step(model: Parts, optimizer: Any, number: int) -> dict[str, float]:
    """One step of each part; its loss. Rank 0 brings the whole gradient and the others nothing."""
    width = max(part.width for part in model.values())
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(1000 + number))
    losses = model(x)
    is_sharded = isinstance(model, FSDPModule)
    (sum(losses.values()) * float(not is_sharded or dist.get_rank() == 0)).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()
    return {recipe: float(loss.detach()) for recipe, loss in losses.items()}


# ------------------------------------------------------------------------------------------------- what must be in them
def kept(model: nn.Module, optimizer: Any) -> dict[str, dict[str, Any]]:
    """Copies of everything that an unsharded model and its optimizer hold: the weight itself, masters and moments."""
    found: dict[str, dict[str, Any]] = {}
    for name, param in model.named_parameters():
        state = optimizer.state[param] if optimizer is not None else {}
        found[name] = {"weight": param.detach().clone()}
        found[name] |= {key: torch.as_tensor(value).clone() for key, value in state.items()}
    return found


def part_of(whole: Tensor, shape: Sequence[int], offset: Sequence[int]) -> dict[str, Tensor]:
    """What a shard of a whole must hold, found element by element: a plain tensor's own values, a quantized one's
    entries that its own rows and columns have part in, and all of what covers all rows."""
    window = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
    if not isinstance(whole, QuantizedTensor):
        return {"values": whole[window] if whole.dim() else whole}
    rows = torch.arange(prod(whole.shape[:-1])).view(whole.shape[:-1])[window[:-1]].flatten()
    first, last = offset[-1], offset[-1] + shape[-1]
    found = {}
    for name, plane in whole.planes().items():
        stored = whole.LAYOUT.stored[name]
        per_row, per_column = stored.rows_per_value, stored.columns_per_value
        if per_row is not None:
            plane = plane[(rows // per_row).unique()]
        if per_column is not None and plane.dim() == 2 and shape[-1] != whole.shape[-1]:
            plane = plane[:, int(first / per_column) : ceil(last / per_column)]
        found[name] = plane
    return found


def held(tensor: Any) -> tuple[dict[str, Tensor], tuple[int, ...], tuple[int, ...]]:
    """What this rank has of a tensor, sharded or whole: plain tensors, their outer shape and where it begins."""
    own, offset = tensor, (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        own = tensor._local_tensor
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if isinstance(own, QuantizedTensor):
        return {name: own.entries(name) for name in own.planes()}, tuple(own.shape), tuple(offset)
    return {"values": own}, tuple(own.shape), tuple(offset)


def assert_holds(model: nn.Module, optimizer: Any, expected: dict[str, dict[str, Any]]) -> None:
    """Every parameter, master and moment is this rank's part of what `kept` gave, byte for byte."""
    for name, param in model.named_parameters():
        state = {} if optimizer is None else optimizer.state[param]
        wanted = {k: v for k, v in expected[name].items() if k == "weight" or optimizer is not None}
        assert {"weight", *state} == set(wanted), name
        for key, whole in wanted.items():
            value = param if key == "weight" else torch.as_tensor(state[key])
            found, shape, offset = held(value.detach())
            try:
                assert_same_tensors(part_of(whole, shape, offset), found)
            except AssertionError as error:
                raise AssertionError(f"{key} of {name}, {shape} at {offset}: {error}") from None


# ----------------------------------------------------------------------------------------------------- files and models
def save(model: nn.Module, optimizer: Any, folder: str, group: Any = None, *, ours: bool = False) -> None:
    """Weights, masters and moments; by one process alone where there is no group. ours: through layoutc.checkpoint."""
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    if ours:
        checkpoint.save(state, folder, process_group=group)
    else:
        dcp.save(state, checkpoint_id=folder, process_group=group, no_dist=group is None)


def load(model: nn.Module, optimizer: Any, folder: str, group: Any = None, *, ours: bool = False) -> None:
    """The inverse of `save`, into any model of the same shapes."""
    weights, moments = get_state_dict(model, optimizer)
    loaded: dict[str, Any] = {"model": weights, "optimizer": moments}
    if ours:
        checkpoint.load(loaded, folder, process_group=group)
    else:
        dcp.load(loaded, checkpoint_id=folder, process_group=group, no_dist=group is None)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])


def trained(sizes: dict[str, Sizes], steps: int) -> tuple[Parts, Any]:
    """The unsharded model after some steps, and its optimizer."""
    model = build(sizes)
    optimizer = adam(model)
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer


def kinds_in(folder: str) -> dict[str, set[type]]:
    """The classes of all tensors in a checkpoint, by name, as they stand in its files."""
    path = Path(folder)
    storage = FileSystemReader(path).read_metadata().storage_data
    found: dict[str, set[type]] = {}
    for index, info in storage.items():  # type: ignore[union-attr]
        content = (path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        found.setdefault(index.fqn, set()).add(type(torch.load(io.BytesIO(content), weights_only=True)))
    return found

"""Frozen bases in four bits under FSDP2: adapters train as in one process, and a rank holds what the plan says."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import unshipped
from harness import Ranks, mesh_of
from models import my_share, recipe_module
from places import EXCHANGED, ROOT
from storages import live_bytes, look_at_what_comes
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import layoutc
import layoutc.recipes
from layoutc.budget.choice import Picks
from layoutc.budget.groups import groups_of
from layoutc.budget.mesh import Mesh
from layoutc.budget.shards import Dtypes, Resident, indices, resident
from layoutc.checkpoint import export_safetensors, load_safetensors, quantize_as_stored
from layoutc.cli.reading import plan_of
from layoutc.estimate.work import Use
from layoutc.models.weights import Model as PlannedModel
from layoutc.models.weights import Weight, adapted, in_layers
from layoutc.runtime.weight.tensor import QuantizedTensor

BINDINGS = {
    "int4_packed32": "compressed_tensors",
    "int4_packed128_zeros": "compressed_tensors",
    "awq": "awq",
    "gptq": "gptq",
    "nvfp4_modelopt": "modelopt",
    "nf4_bitsandbytes": "bitsandbytes",
}
FROZEN = (*BINDINGS, "nf4_frozen")  # the last one by layoutc alone
WIDTH, INNER, STEPS, RANK = 128, 136, 10, 4  # rows of 68 on two ranks, where words hold 8


class Adapted(nn.Module):
    """A frozen layer with adapters."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.base = nn.Linear(columns, rows, bias=False)
        self.down, self.up = nn.Linear(columns, RANK, bias=False), nn.Linear(RANK, rows, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, k) -> (n, m)."""
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class Block(nn.Module):
    """Two layers and what is between them. The second has rows alone that words of eight need."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Adapted(WIDTH, INNER), Adapted(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(n, WIDTH) -> (n, WIDTH)."""
        out: Tensor = x + self.second(torch.tanh(self.first(x)[..., :WIDTH]))
        return out


class Model(nn.Module):
    """Three blocks, and a norm that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Block() for _ in range(3)), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(n, WIDTH) -> (n, WIDTH)."""
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.norm(x)
        return out


def base_of(recipe: str) -> Model:
    """Random weights; frozen ones in the recipe."""
    if recipe not in layoutc.recipes.RECIPES:  # let this process find it by its name
        unshipped.add_if_known(recipe)
        recipe_module(recipe)
        layoutc.recipes.RECIPES = (*layoutc.recipes.RECIPES, recipe)
    torch.manual_seed(0)
    model = Model()
    layoutc.quantize_(model, recipe, param_filter=["*.base.weight"], keep_values=False)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith(".base.weight"):
                param.copy_(torch.randn(param.shape) / 8)
    return model


def from_files(recipe: str, folder: str) -> Model:
    """The same model as a user makes it: from files of another program, where there is a binding."""
    if recipe not in BINDINGS:
        return base_of(recipe)
    torch.manual_seed(0)
    model = Model()
    files = f"{recipe}/{BINDINGS[recipe]}"
    assert set(quantize_as_stored(model, folder, files=files).values()) == {recipe}
    return model


def sharded(recipe: str, folder: str) -> Any:
    """Sharded by blocks; loaded after that."""
    model, mesh = from_files(recipe, folder), mesh_of(dist.get_world_size())
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if recipe in BINDINGS:
        load_safetensors(model, folder, files=f"{recipe}/{BINDINGS[recipe]}")
    return model


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step % 2)
        x, y = torch.randn(2, 16, WIDTH, generator=generator)
        loss = (model(x) - y).square().mean()
        (loss * (my_share() if isinstance(model, FSDPModule) else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Of what trains."""
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def planned(recipe: str, model: nn.Module) -> int:
    """Bytes that this rank keeps between steps, by the plan of a frozen base with adapters, and a norm that trains."""
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    base = [Weight(name, shape, "linear", 1.0) for name, shape in shapes.items() if name.endswith(".base.weight")]
    made = adapted(in_layers("model", "", base), RANK)
    norms = tuple(Weight(name, shape, "norm") for name, shape in shapes.items() if name.startswith("norm."))
    made = replace(made, root=replace(made.root, weights=norms))
    assert made.elements == sum(map(prod, shapes.values()))
    return kept_of(recipe, made, Picks())


def kept_of(recipe: str, model: PlannedModel, picks: Picks) -> int:
    """Bytes that this rank keeps of a model between steps, by the plan."""
    spec = (ROOT / "specs" if recipe in BINDINGS else EXCHANGED) / f"{recipe}.yaml"
    mesh, dtypes = Mesh(dist.get_world_size()), Dtypes(4, 4, 4)
    groups = groups_of(model, Use(recipe, plan_of(spec)), picks, mesh, dtypes)
    here = Resident(left=indices(groups.pieces))
    for piece in groups.pieces:
        here += resident(piece, dist.get_rank(), dtypes)
    return here.kept


def trains_as_one_process(recipe: str, folder: str) -> float:
    """Losses and parameters to the bit, bytes to the byte. Returns the last loss."""
    alone = base_of(recipe)
    expected = steps(alone, adam(alone))
    mesh_of(dist.get_world_size())  # which has tensors of its own
    look_at_what_comes()
    before = live_bytes()
    model = sharded(recipe, folder)
    optimizer = adam(model)
    kept = planned(recipe, model)
    with layoutc.strict():
        assert steps(model, optimizer) == expected
    held = live_bytes(before + kept) - before
    assert held == kept, (held, kept)
    for (name, param), (_, one) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        assert isinstance(param, DTensor)
        whole, same = param.full_tensor(), one.detach()
        if isinstance(whole, QuantizedTensor):
            assert isinstance(same, QuantizedTensor)
            planes = same.planes()
            assert all(torch.equal(plane, planes[key]) for key, plane in whole.planes().items()), name
        else:
            assert torch.equal(whole, same), name
    assert expected[-1] < expected[1] - 0.05, expected
    return expected[-1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", FROZEN)
def test_adapters_on_four_bits_train_as_in_one_process_and_ranks_hold_what_is_planned(
    recipe: str, two: Ranks, tmp_path: Path
) -> None:
    """No masters, no gradients and no moments of the base, which keeps the bytes of its files."""
    folder = tmp_path / "files"
    if recipe in BINDINGS:
        export_safetensors(base_of(recipe), folder, files=BINDINGS[recipe])
    two.told(trains_as_one_process, recipe, str(folder))

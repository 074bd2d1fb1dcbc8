"""Checkpoints of one arrangement of ranks load in another: copies, offload, columns, experts, tensor parallelism."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import Ranks, mesh_of
from models import adam, assert_same_tensors, recipe_module
from resharding import (
    Sizes,
    assert_holds,
    awkward,
    build,
    held,
    kept,
    load,
    save,
    shard,
    step,
    trained,
)
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard, distribute_tensor

EVERY = importlib.import_module("layoutc.recipes").RECIPES
RECIPES = ("fp8_delayed", "fp8_block", "mxfp8", "nvfp4", "int4_group32", "mxfp6_e3m2")
TRAINED, MORE = 2, 3


def columns(param: Tensor) -> Shard | None:
    """Columns of matrices, rows of each expert."""
    return Shard(1) if param.dim() > 1 else None


def arrangements() -> dict[str, Callable[[], dict[str, Any]]]:
    """Options of fully_shard, on four ranks, by name."""
    copies = mesh_of(2, 2, names=("copies", "slices"))
    alone = mesh_of(1, 4, names=("copies", "slices"))
    flat = mesh_of(4)
    return {
        "flat": lambda: {"mesh": flat},
        "2x2": lambda: {"mesh": copies},
        "1x4": lambda: {"mesh": alone},
        "offload": lambda: {"mesh": flat, "offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "columns": lambda: {"mesh": copies, "shard_placement_fn": columns},
        "columns_offload": lambda: {
            "mesh": flat,
            "shard_placement_fn": columns,
            "offload_policy": CPUOffloadPolicy(pin_memory=False),
        },
    }


def is_rearranged(recipe: str, names: tuple[str, ...], folder: str) -> None:
    """Saved in each arrangement, loaded in each."""
    layout, ways = recipe_module(recipe).LAYOUT, arrangements()
    sizes = {recipe: awkward(recipe)}
    if any(name.startswith("columns") for name in names):
        sizes = {
            recipe: Sizes(
                4 * max(layout.column_multiple, 16), 4 * max(layout.column_multiple, 16), 3, 4 * layout.block_rows
            )
        }
    reference, expected_optimizer = trained(sizes, TRAINED)
    expected = kept(reference, expected_optimizer)
    losses = [step(reference, expected_optimizer, number) for number in range(TRAINED, TRAINED + MORE)]
    for name in names:
        model = shard(build(sizes), **ways[name]())
        optimizer = adam(model)
        for number in range(TRAINED):
            step(model, optimizer, number)
        assert_holds(model, optimizer, expected)
        save(model, optimizer, f"{folder}/{name}", dist.group.WORLD)
    for name in names:
        model = shard(build(sizes, 1), **ways[name]())
        optimizer = adam(model)
        for saved in names:
            load(model, optimizer, f"{folder}/{saved}", dist.group.WORLD)
            assert_holds(model, optimizer, expected)
            for number, wanted in enumerate(losses, TRAINED):
                assert step(model, optimizer, number) == wanted, (saved, name, number)


@pytest.mark.parametrize("recipe", RECIPES)
def test_copies_and_offloaded_shards_load_as_one_another(four: Ranks, recipe: str, tmp_path: Path) -> None:
    """Sharded over four ranks, over two in two copies, over four in one copy, and offloaded."""
    four.run(is_rearranged, recipe, ("flat", "2x2", "1x4", "offload"), str(tmp_path))


@pytest.mark.parametrize("recipe", RECIPES)
def test_columns_and_rows_of_experts_load_as_rows_and_back(four: Ranks, recipe: str, tmp_path: Path) -> None:
    """Shard(1): columns of matrices, and rows of each expert, which lie apart in the shards of whole experts."""
    four.run(is_rearranged, recipe, ("flat", "columns", "columns_offload"), str(tmp_path))


def is_cut_in_two_dims(recipe: str, folder: str) -> None:
    """Whole weights, distributed in every way over one mesh dim or two, saved, and loaded in every other."""
    layout = recipe_module(recipe).LAYOUT
    grid = mesh_of(2, 2, names=("dp", "tp"))
    flat, one = mesh_of(4), dist.get_rank()
    k = 4 * max(layout.column_multiple, 16)
    weights = {"matrix": (6 * layout.block_rows, k), "experts": (3, 4 * layout.block_rows, k)}
    ways: dict[str, dict[str, Any]] = {
        "matrix": {
            "rows": (flat, [Shard(0)]),
            "columns": (flat, [Shard(1)]),
            "rows of columns": (grid, [Shard(1), Shard(0)]),
            "columns of rows": (grid, [Shard(0), Shard(1)]),
        },
        "experts": {
            "experts": (flat, [Shard(0)]),
            "rows": (flat, [Shard(1)]),
            "rows of experts": (grid, [Shard(0), Shard(1)]),
            "columns of experts": (grid, [Shard(0), Shard(2)]),
            "columns of rows": (grid, [Shard(1), Shard(2)]),
        },
    }

    def made(seed: int) -> dict[str, Any]:
        generator, cls = torch.Generator().manual_seed(seed), recipe_module(recipe)
        found: dict[str, Any] = {}
        for kind, shape in weights.items():
            whole = cls.quantize(torch.randn(shape, generator=generator) * (seed + 1))
            for way, (mesh, placements) in ways[kind].items():
                found[f"{kind}, {way}"] = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            found[f"{kind}, whole"] = whole
        return found

    saved, expected = made(0), made(0)
    dcp.save(saved, checkpoint_id=folder)
    names = list(saved)
    for shift in range(5):  # every way is loaded from every way's file
        loaded: dict[str, Any] = {}
        into: dict[str, str] = {}
        for kind in weights:
            ours = [name for name in names if name.startswith(kind)]
            for i, name in enumerate(ours):
                into[name] = ours[(i + shift) % len(ours)]
        fresh = made(5 + shift)
        loaded = {name: fresh[target] for name, target in into.items()}
        dcp.load(loaded, checkpoint_id=folder)
        for name, target in into.items():
            ours, _, _ = held(loaded[name])
            wanted, _, _ = held(expected[target])
            try:
                assert_same_tensors(wanted, ours)
            except AssertionError as error:
                raise AssertionError(f"{target} from the file of {name}, rank {one}: {error}") from None


@pytest.mark.parametrize("recipe", EVERY)
def test_columns_and_cuts_in_two_dims_load_as_one_another(four: Ranks, recipe: str, tmp_path: Path) -> None:
    """As under tensor parallelism and FSDP2: bytes of every shard are those of the whole weight's."""
    four.run(is_cut_in_two_dims, recipe, str(tmp_path / "checkpoint"))

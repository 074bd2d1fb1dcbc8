"""Checkpoints of one arrangement of ranks load in another: copies, offload, columns, experts, tensor parallelism."""

from __future__ import annotations

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
from weight_recipes import ALL_PAIRS

TOGETHER = (("fp8_block",), ("fp8_delayed", "nvfp4"), ("mxfp8", "int4_group32", "mxfp6_e3m2"))  # of one size of block
TRAINED, MORE = 1, 2


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


def is_rearranged(recipes: tuple[str, ...], names: tuple[str, ...], folder: str, turn: int | None) -> None:
    """Saved in each arrangement, loaded in each; trained on after the load of another, each once.

    turn: which third of the pairs is loaded, each arrangement by some other and some other by each; None: all.
    """
    ways = arrangements()
    sizes = {recipe: awkward(recipe) for recipe in recipes}
    if any(name.startswith("columns") for name in names):
        layouts = {recipe: recipe_module(recipe).LAYOUT for recipe in recipes}
        width = 4 * max(16, *(layout.column_multiple for layout in layouts.values()))
        sizes = {recipe: Sizes(width, width, 3, 4 * layout.block_rows) for recipe, layout in layouts.items()}
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
    for number, name in enumerate(names):
        model = shard(build(sizes, 1), **ways[name]())
        optimizer = adam(model)
        others = list(enumerate(names))
        for other, saved in others[number + 1 :] + others[: number + 1]:
            if turn is not None and (number + other) % 3 != turn:
                continue
            load(model, optimizer, f"{folder}/{saved}", dist.group.WORLD)
            assert_holds(model, optimizer, expected)
            for after, wanted in enumerate(losses if saved == names[number - 1] else (), TRAINED):
                assert step(model, optimizer, after) == wanted, (saved, name, after)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipes", TOGETHER, ids="-".join)
def test_copies_and_offloaded_shards_load_as_one_another(four: Ranks, recipes: tuple[str, ...], tmp_path: Path) -> None:
    """Sharded over four ranks, over two in two copies, over four in one copy, and offloaded."""
    turn = None if ALL_PAIRS else TOGETHER.index(recipes)
    four.run(is_rearranged, recipes, ("flat", "2x2", "1x4", "offload"), str(tmp_path), turn)


@pytest.mark.thorough
@pytest.mark.parametrize("recipes", TOGETHER, ids="-".join)
def test_columns_and_rows_of_experts_load_as_rows_and_back(
    four: Ranks, recipes: tuple[str, ...], tmp_path: Path
) -> None:
    """Shard(1): columns of matrices, and rows of each expert, which lie apart in the shards of whole experts."""
    turn = None if ALL_PAIRS else TOGETHER.index(recipes)
    four.run(is_rearranged, recipes, ("flat", "columns", "columns_offload"), str(tmp_path), turn)


def is_cut_in_two_dims(recipes: tuple[str, ...], folder: str, shifts: tuple[int, ...]) -> None:
    """Whole weights, distributed in every way over one mesh dim or two, saved, and loaded in every other.

    shifts: which ways are loaded from the file of which; with 0 to 4 every one is from that of every one.
    """
    grid = mesh_of(2, 2, names=("dp", "tp"))
    flat, one = mesh_of(4), dist.get_rank()
    weights: dict[str, tuple[int, ...]] = {}
    for recipe in recipes:
        layout = recipe_module(recipe).LAYOUT
        k = 4 * max(layout.column_multiple, 16)
        weights |= {f"{recipe} matrix": (6 * layout.block_rows, k), f"{recipe} experts": (3, 4 * layout.block_rows, k)}
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
        generator = torch.Generator().manual_seed(seed)
        found: dict[str, Any] = {}
        for kind, shape in weights.items():
            recipe, form = kind.split()
            whole = recipe_module(recipe).quantize(torch.randn(shape, generator=generator) * (seed + 1))
            for way, (mesh, placements) in ways[form].items():
                found[f"{kind}, {way}"] = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            found[f"{kind}, whole"] = whole
        return found

    saved, fresh = made(0), made(5)
    expected = {name: {key: plane.clone() for key, plane in held(one)[0].items()} for name, one in saved.items()}
    dcp.save(saved, checkpoint_id=folder)
    names = list(saved)
    for shift in shifts:
        loaded: dict[str, Any] = {}
        into: dict[str, str] = {}
        for kind in weights:
            ours = [name for name in names if name.startswith(kind)]
            for i, name in enumerate(ours):
                into[name] = ours[(i + shift) % len(ours)]
        loaded = {name: fresh[target] for name, target in into.items()}
        dcp.load(loaded, checkpoint_id=folder)
        for name, target in into.items():
            ours, _, _ = held(loaded[name])
            try:
                assert_same_tensors(expected[target], ours)
            except AssertionError as error:
                raise AssertionError(f"{target} from the file of {name}, rank {one}: {error}") from None
        for tensor in fresh.values():  # what one load has written must not pass for the next one's
            for plane in held(tensor)[0].values():
                plane.view(-1).view(torch.uint8).bitwise_not_()


# A history, zero points, codes across bytes, a shared amax; scales of whole rows, blocks of a row, a choice of scales.
CUT_TWICE = (("fp8_delayed", "int4_group32", "mxfp6_e3m2", "fp8_current"), ("fp8_rowwise", "mxfp8", "nvfp4_4over6"))


@pytest.mark.thorough
@pytest.mark.parametrize("recipes", CUT_TWICE, ids="-".join)
def test_columns_and_cuts_in_two_dims_load_as_one_another(
    four: Ranks, recipes: tuple[str, ...], tmp_path: Path
) -> None:
    """As under tensor parallelism and FSDP2: bytes of every shard are those of the whole weight's.

    Each pairing of ways is loaded by a set of recipes, 0 by both; with LAYOUTC_ALL_PAIRS=1 all by both. Shards of every
    recipe's columns are compared in test_cut_weights.py.
    """
    shifts = tuple(range(5)) if ALL_PAIRS else ((0, 2, 4), (0, 1, 3))[CUT_TWICE.index(recipes)]
    four.run(is_cut_in_two_dims, tuple(recipes), str(tmp_path / "checkpoint"), shifts)

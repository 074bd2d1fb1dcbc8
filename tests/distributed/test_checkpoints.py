"""Checkpoints of quantized weights are exact, on any numbers of ranks, through torch's own functions and ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import Ranks, mesh_of
from models import adam, local, recipe_module
from resharding import WIDTH, Sizes, assert_holds, awkward, build, kept, load, save, shard, step, trained
from weight_recipes import ALL_PAIRS, CUT_APART

EVERY = CUT_APART
TRAINED, MORE = 1, 2


def short_tail(recipe: str) -> Sizes:
    """Of two ranks, the second begins with a block and ends inside one."""
    block = recipe_module(recipe).LAYOUT.block_rows
    return Sizes(2 * block - 1, WIDTH, 3, block // 2)


def resumes(recipes: tuple[str, ...], sized: Callable[[str], Sizes], folder: str, turn: int | None) -> None:
    """Saved by any of the first ranks, loaded by any; 0 ranks are a process that has no group and does not shard.

    turn: which fifth of the pairs is loaded, of which half trains on after its load; None: all.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    meshes = {ranks: mesh_of(ranks) for ranks in range(1, world + 1)}
    groups = {ranks: mesh.get_group() if rank < ranks else None for ranks, mesh in meshes.items()} | {0: None}
    sizes = {recipe: sized(recipe) for recipe in recipes}

    def made(ranks: int, seed: int) -> tuple[Any, Any]:
        model: Any = build(sizes, seed)
        model = shard(model, meshes[ranks]) if ranks else model
        return model, adam(model)

    reference, expected_optimizer = trained(sizes, TRAINED)
    expected = kept(reference, expected_optimizer)
    losses = [step(reference, expected_optimizer, number) for number in range(TRAINED, TRAINED + MORE)]
    for ranks in range(world, -1, -1):  # who has no part in what follows waits, and no longer than it must
        if rank < max(ranks, 1):
            model, optimizer = made(ranks, 0)
            for number in range(TRAINED):
                step(model, optimizer, number)
            assert_holds(model, optimizer, expected)
            save(model, optimizer, f"{folder}/{ranks}", groups[ranks], ours=ranks in (2, 3))
    dist.barrier()
    for ranks in range(world, -1, -1):
        if rank < max(ranks, 1):
            model, optimizer = made(ranks, 1)
            for saved_by in range(world + 1):
                if turn is not None and (ranks + 2 * saved_by + turn) % 5:
                    continue
                ours = ranks > 0 and (ranks + saved_by) % 4 > 1
                load(model, optimizer, f"{folder}/{saved_by}", groups[ranks], ours=ours)
                assert_holds(model, optimizer, expected)
                trains = turn is None or (saved_by + ranks + turn) % 2 == 0
                for number, wanted in enumerate(losses if trains else [], TRAINED):
                    assert step(model, optimizer, number) == wanted, (saved_by, ranks, number)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipes", [EVERY[i : i + 4] for i in range(0, len(EVERY), 4)], ids="-".join)
def test_any_ranks_load_what_any_ranks_saved(four: Ranks, recipes: tuple[str, ...], tmp_path: Path) -> None:
    """Bytes of all planes, masters and moments, and two more losses, are those of a run that was not interrupted.

    Each set of recipes loads a fifth of the pairs of numbers of ranks, every number of ranks once among those that save
    and once among those that load; the five sets load all pairs. All sets load all with LAYOUTC_ALL_PAIRS=1.
    """
    turn = None if ALL_PAIRS else EVERY.index(recipes[0]) // 4
    four.run(resumes, tuple(recipes), awkward, str(tmp_path), turn)


def test_a_last_shard_that_ends_inside_its_block_is_whole(two: Ranks, tmp_path: Path) -> None:
    """FSDP2 makes it of a larger tensor, whose last block has more rows."""
    two.run(resumes, ("e3m4_block", "fp8_block"), short_tail, str(tmp_path), 1)


def fills_ranks_without_rows(recipes: tuple[str, ...], folder: str) -> None:
    """Plain state dicts of a model of which the last rank has no expert."""
    sizes, mesh = {recipe: awkward(recipe) for recipe in recipes}, mesh_of(dist.get_world_size())
    reference = build(sizes)
    dcp.save(shard(build(sizes), mesh).state_dict(), checkpoint_id=f"{folder}/sharded")
    if dist.get_rank() == 0:
        dcp.save(reference.state_dict(), checkpoint_id=f"{folder}/whole", no_dist=True)
    dist.barrier()
    for number, saved in enumerate(("sharded", "whole")):
        model = shard(build(sizes, 1 + number), mesh)
        for part in model.values():
            rows = local(part.experts.weight).shape[0]
            assert rows == (0 if dist.get_rank() == 3 else 1)
        state = model.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{saved}")
        model.load_state_dict(state)
        assert_holds(model, None, kept(reference, None))


def test_ranks_without_rows_take_what_all_rows_share(four: Ranks, tmp_path: Path) -> None:
    """Scales of whole weights, amaxes and their histories, through DCP's own protocol."""
    recipes = tuple(recipe for recipe in EVERY if recipe_module(recipe).LAYOUT.shared)
    assert len(recipes) > 5
    four.run(fills_ranks_without_rows, recipes, str(tmp_path))

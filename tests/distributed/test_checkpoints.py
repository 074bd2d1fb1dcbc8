"""Plain torch.distributed.checkpoint is exact for quantized weights, whatever the numbers of ranks are."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import Ranks
from models import adam
from resharding import assert_holds, awkward, build, first_ranks, kept, load, save, shard, step, trained

EVERY = importlib.import_module("layoutc.recipes").RECIPES
TRAINED, MORE = 3, 10


def resumes(recipes: tuple[str, ...], folder: str) -> None:
    """Saved by one to four ranks, loaded by one to four; 0 ranks are a process that has no group and does not shard."""
    rank, meshes = dist.get_rank(), {ranks: first_ranks(ranks) for ranks in range(1, 5)}
    groups = {ranks: mesh.get_group() if rank < ranks else None for ranks, mesh in meshes.items()} | {0: None}
    sizes = {recipe: awkward(recipe) for recipe in recipes}

    def made(ranks: int, seed: int) -> tuple[Any, Any]:
        model: Any = build(sizes, seed)
        model = shard(model, meshes[ranks]) if ranks else model
        return model, adam(model)

    reference, expected_optimizer = trained(sizes, TRAINED)
    expected = kept(reference, expected_optimizer)
    losses = [step(reference, expected_optimizer, number) for number in range(TRAINED, TRAINED + MORE)]
    for ranks in (4, 3, 2, 1, 0):  # who has no part in what follows waits, and no longer than it must
        if rank < max(ranks, 1):
            model, optimizer = made(ranks, 0)
            for number in range(TRAINED):
                step(model, optimizer, number)
            assert_holds(model, optimizer, expected)
            save(model, optimizer, f"{folder}/{ranks}", groups[ranks])
    dist.barrier()
    for ranks in (4, 3, 2, 1, 0):
        if rank < max(ranks, 1):
            model, optimizer = made(ranks, 1)
            for saved_by in range(5):
                load(model, optimizer, f"{folder}/{saved_by}", groups[ranks])
                assert_holds(model, optimizer, expected)
                for number, wanted in enumerate(losses, TRAINED):
                    assert step(model, optimizer, number) == wanted, (saved_by, ranks, number)


@pytest.mark.parametrize("recipes", [EVERY[i : i + 4] for i in range(0, len(EVERY), 4)], ids="-".join)
def test_any_ranks_load_what_any_ranks_saved(four: Ranks, recipes: tuple[str, ...], tmp_path: Path) -> None:
    """Bytes of all planes, masters and moments, and ten more losses, are those of a run that was not interrupted."""
    four.run(resumes, tuple(recipes), str(tmp_path))

"""DistributedDataParallel: both uses keep their bytes when it is made, and train as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from models import RECIPES, adam, assert_equal_on_all_ranks, batch, build, my_share, raw
from test_cast_on_gather import build_cast
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import layoutc
from layoutc.runtime.errors import LayoutError

WIDTH = 64
STEPS = 4


def built(recipe: str, use: str) -> Any:
    """The model of tests/distributed/models.py, quantized or cast on gather."""
    return build(recipe, WIDTH) if use == "quantized" else build_cast(recipe, WIDTH)


def state_of(model: nn.Module) -> list[list[int]]:
    """All bytes of all parameters."""
    found = []
    for param in model.parameters():
        held: Any = param.data
        planes = held.planes().values() if hasattr(held, "planes") else [getattr(held, "plain", held)]
        found += [raw(plane).tolist() for plane in planes]
    return found


def replicates(recipe: str, use: str, differ: bool) -> None:
    """Construction keeps the first rank's bytes, on all ranks; a curve equals that of one process."""
    alone, model = built(recipe, use), built(recipe, use)
    expected = state_of(model)
    if differ and dist.get_rank() > 0:
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.randn(param.shape))
    with layoutc.strict():
        replicas = DistributedDataParallel(model)
    assert state_of(model) == expected
    losses, optimizers = [], []
    for one, share in ((alone, 1.0), (replicas, my_share())):
        optimizer: Any = (
            torch.optim.AdamW(one.parameters(), lr=1e-2, weight_decay=0.1, fused=True) if use == "cast" else adam(one)
        )
        optimizers.append(optimizer)
        losses.append([])
        for step in range(STEPS):
            x, y = batch(step, WIDTH)
            loss = (one(x) - y).square().mean()
            (loss * share).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(loss.detach()))
    assert losses[0] == losses[1]
    assert_equal_on_all_ranks(state_of(model))
    assert state_of(model) == state_of(alone)


@pytest.mark.parametrize("recipe", [*RECIPES, "int4_group32"])
@pytest.mark.parametrize("use", ["quantized", "cast"])
@pytest.mark.parametrize("differ", [False, True])
def test_replicas_keep_their_bytes_and_train_as_one_process(two: Ranks, recipe: str, use: str, differ: bool) -> None:
    """Also where the other rank was built with other weights."""
    two.run(replicates, recipe, use, differ)


def replicates_others() -> str:
    """Ranks that quantize in other ways: the message, and whether the group still works."""
    model = build("mxfp8" if dist.get_rank() == 0 else "mxfp8_2d", WIDTH)
    try:
        DistributedDataParallel(model)
    except LayoutError as error:
        dist.barrier()
        return str(error)
    return "nothing was raised"


def test_replicas_of_other_recipes_are_refused_on_every_rank(two: Ranks) -> None:
    """Planes of another size would hang, or be garbage."""
    messages = two.run(replicates_others)
    assert all("layers.0.weight of shape (64, 64) in mxfp8" in message for message in messages), messages
    assert all("is quantized in another way on another rank" in message for message in messages)


def keeps_masters(recipe: str) -> None:
    """An optimizer that was made before the replicas."""
    model = build(recipe, WIDTH)
    optimizer = adam(model)
    before = [master.clone() for master in optimizer.masters().values()]
    DistributedDataParallel(model)
    assert all(torch.equal(*pair) for pair in zip(before, optimizer.masters().values(), strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_masters_stay_where_all_ranks_hold_the_same_bytes(two: Ranks, recipe: str) -> None:
    """Bytes that are written over themselves are no reason to start from codes."""
    two.run(keeps_masters, recipe)

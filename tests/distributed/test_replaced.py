"""Parameters that take the place of others in an optimizer's groups: their masters go along."""

from __future__ import annotations

import pytest
import torch
from harness import Ranks
from models import adam, batch, build, my_share, shard, train_step
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from layoutc.runtime.errors import LayoutError

WIDTH = 96  # three blocks of rows over two ranks


def put(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """As accelerate does."""
    params = list(model.parameters())
    for group in optimizer.param_groups:
        group["params"] = [params.pop(0) for _ in group["params"]]


def made_before(recipe: str) -> list[float]:
    """An optimizer from before fully_shard, against one process; gradients are zeroed through it, and it is saved."""
    alone = build(recipe, WIDTH)
    optimizer = adam(alone)
    expected = [train_step(alone, optimizer, step, WIDTH) for step in range(4)]
    model = build(recipe, WIDTH)
    other = adam(model)
    shard(model)
    entries = get_optimizer_state_dict(model, other)["state"]  # torch initializes it, by a step
    assert all({"exp_avg", "exp_avg_sq", "step"} <= set(entry) for entry in entries.values())
    model = build(recipe, WIDTH)
    other = adam(model)
    shard(model)
    losses = [train_step(model, other, step, WIDTH, my_share()) for step in range(2)]
    state = get_optimizer_state_dict(model, other)
    assert set(state["state"]) == {name for name, _ in model.named_parameters()}
    losses += [train_step(model, other, step, WIDTH, my_share()) for step in range(2, 4)]
    assert losses == expected, (losses, expected)
    assert {id(p) for group in other.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}
    return losses


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_an_optimizer_from_before_fully_shard_trains_what_it_made(two: Ranks, recipe: str) -> None:
    """To the bit; nothing has put the new parameters into its groups."""
    found = two.run(made_before, recipe)
    assert found[0] == found[1]
    assert len(set(found[0])) == 4


def follows(recipe: str, same: bool) -> str:
    """Against one process whose masters were as fine; and what a second swap, after a step, says."""
    alone, model = build(recipe, WIDTH), build(recipe, WIDTH)
    optimizers = [adam(alone), adam(model)]
    generator = torch.Generator().manual_seed(3)
    for optimizer in optimizers if same else optimizers[1:]:
        generator.manual_seed(3)
        with torch.no_grad():
            for master in optimizer._masters.values():
                master.add_(torch.randn(master.shape, generator=generator), alpha=1e-3)
    if not same:  # the weights were written after the optimizer was made: masters are made of them
        alone, model = build(recipe, WIDTH, seed=7), build(recipe, WIDTH, seed=7)
        optimizers[0] = adam(alone)
    shard(model)
    put(optimizers[1], model)
    losses: list[list[float]] = [[], []]
    for step in range(4):
        x, y = batch(step, WIDTH)
        for curve, one, optimizer, share in zip(losses, (alone, model), optimizers, (1.0, my_share()), strict=True):
            loss = (one(x) - y).square().mean()
            (loss * share).backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(float(loss.detach()))
    assert losses[0] == losses[1], losses
    put(optimizers[1], shard(build(recipe, WIDTH)))
    try:
        optimizers[1].step()
    except LayoutError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.sample(2)
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("same", [True, False])
def test_masters_go_along_cut_as_the_new_parameters(two: Ranks, recipe: str, same: bool) -> None:
    """Where the new parameter holds what the old one did; else masters are made of what it holds."""
    for message in two.run(follows, recipe, same):
        assert "of shape (96, 96) was put into the groups of MasterWeights" in message
        assert "after a step; create a new optimizer" in message

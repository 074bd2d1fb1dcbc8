"""Parameters that take the place of others in an optimizer's groups: their masters go along."""

from __future__ import annotations

import pytest
import torch
from harness import Ranks, on
from models import adam, batch, build, my_share, shard, train_step
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

import layoutc
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


@pytest.mark.parametrize(("recipe", "same"), [("mxfp8", True), ("nvfp4", False)])
def test_masters_go_along_cut_as_the_new_parameters(two: Ranks, recipe: str, same: bool) -> None:
    """Where the new parameter holds what the old one did; else masters are made of what it holds."""
    for message in two.run(follows, recipe, same):
        assert "of shape (96, 96) was put into the groups of MasterWeights" in message
        assert "after a step; create a new optimizer" in message


def of_another_model() -> list[str]:
    """What is said where a model of the same names trains instead, and where both do."""
    alone, other = build("mxfp8", WIDTH), shard(build("mxfp8", WIDTH))
    optimizer, said = adam(alone), list[str]()
    x, y = batch(0, WIDTH)
    for models in ((other,), (other, alone)):
        for model in models:
            (model(x) - y).square().mean().backward()
        alone.layers[0].weight.grad = None  # as of a layer that a step has left out
        try:
            optimizer.step()
            said.append("")
        except LayoutError as error:
            said.append(str(error))
    return said


def test_an_optimizer_whose_parameters_never_get_a_gradient_is_refused(two: Ranks) -> None:
    for refused, trained in two.run(of_another_model):
        assert refused == (
            "MasterWeights has layers.0.weight of shape (96, 96) from before fully_shard, which replaced it: create "
            "MasterWeights after fully_shard"
        )
        assert trained == ""


class OwnSGD(torch.optim.SGD):
    """Steps masters themselves, not their shards: what another class does between elements is not known."""


@on("two")
def test_states_of_masters_that_are_stepped_whole_are_shown_as_they_are() -> None:
    """Steps and states of DTensors, to the bit those of shards."""
    models, optimizers = [shard(build("mxfp8", WIDTH)) for _ in range(2)], list[layoutc.MasterWeights]()
    for model, kind in zip(models, (torch.optim.SGD, OwnSGD), strict=True):
        optimizers.append(layoutc.MasterWeights(kind, model.parameters(), lr=0.1, momentum=0.9))
        for step in range(2):
            train_step(model, optimizers[-1], step, WIDTH)
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    assert states[0].keys() == states[1].keys()
    for number, state in states[0].items():
        assert set(state) >= {"momentum_buffer"}
        for name, value in state.items():
            other = states[1][number][name]
            assert isinstance(value, DTensor)
            assert isinstance(other, DTensor)
            assert type(other.to_local()) is torch.Tensor
            assert torch.equal(value.to_local(), other.to_local())

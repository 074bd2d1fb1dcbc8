"""Pipeline schedules: several stages a rank, whose weights are quantized or cast, train as one process does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from models import make_uneven
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

import layoutc

DIM, ROWS, MICROBATCHES, STEPS = 32, 8, 4, 3


def built(recipe: str, use: str, stages: int) -> nn.Sequential:
    """A layer for each stage, the same on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(stages)])
    make_uneven(model)
    (layoutc.quantize_ if use == "quantized" else layoutc.cast_on_gather_)(model, recipe)
    return model


def optimizer_of(use: str, params: list[Any]) -> torch.optim.Optimizer:
    if use == "quantized":
        return layoutc.MasterWeights(torch.optim.AdamW, params, lr=1e-2)
    return torch.optim.AdamW(params, lr=1e-2)


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def batch(step: int) -> tuple[Tensor, Tensor]:
    x, target = torch.randn(2, ROWS * MICROBATCHES, DIM, generator=torch.Generator().manual_seed(step)).unbind()
    return x, target


def alone(model: nn.Sequential, use: str) -> list[float]:
    """The losses of one process, microbatch by microbatch, and the model trained."""
    optimizer, losses = optimizer_of(use, list(model.parameters())), []
    for step in range(STEPS):
        x, target = batch(step)
        for part, goal in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            loss = loss_of(model(part), goal)
            loss.backward()
            losses.append(loss.item())
        for param in model.parameters():
            assert param.grad is not None
            param.grad /= MICROBATCHES  # as schedules scale what they add up
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trains(recipe: str, use: str, interleaved: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    count = 2 * world if interleaved else world
    model = built(recipe, use, count)
    reference = copy.deepcopy(model)
    expected = alone(reference, use)
    mine = {at: model[at] for at in range(rank, count, world)}
    stages = [PipelineStage(layer, at, count, torch.device("cpu")) for at, layer in mine.items()]
    schedule: Any = (
        ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss_of)
        if interleaved
        else Schedule1F1B(stages[0], MICROBATCHES, loss_fn=loss_of)
    )
    optimizer = optimizer_of(use, [param for layer in mine.values() for param in layer.parameters()])
    losses: list[float] = []
    for step in range(STEPS):
        x, target = batch(step)
        found: list[Tensor] = []
        last = rank == (count - 1) % world
        schedule.step(*([x] if rank == 0 else []), **({"target": target, "losses": found} if last else {}))
        losses += [loss.item() for loss in found]
        optimizer.step()
        optimizer.zero_grad()
    assert losses == (expected if last else [])
    for at, layer in mine.items():
        for (name, param), other in zip(layer.named_parameters(), reference[at].parameters(), strict=True):
            assert torch.equal(param, other), (at, name)


@pytest.mark.parametrize("interleaved", [False, True], ids=["one stage", "two stages"])
@pytest.mark.parametrize(("recipe", "use"), [("nvfp4", "quantized"), ("mxfp8", "quantized"), ("fp8_block", "cast")])
def test_stages_train_as_one_process(two: Ranks, recipe: str, use: str, interleaved: bool) -> None:
    two.run(trains, recipe, use, interleaved)

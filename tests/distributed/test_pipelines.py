"""Pipeline schedules, one stage a rank or several, each sharded by FSDP2 or whole, train as one process does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks, mesh_of
from models import make_uneven
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor

import layoutc

DIM, ROWS, MICROBATCHES, STEPS = 32, 8, 4, 3


def built(recipe: str, use: str, stages: int) -> nn.Sequential:
    """A layer for each stage, the same on every rank. use: quantized, cast, or plain."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(stages)])
    make_uneven(model)
    if use != "plain":
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


def alone(model: nn.Sequential, use: str, replicas: int, backwards: bool) -> list[list[float]]:
    """The losses of each replica in one process, microbatch by microbatch; trains the model.

    backwards: gradients of the last microbatch come first.
    """
    optimizer = optimizer_of(use, list(model.parameters()))
    losses: list[list[float]] = [[] for _ in range(replicas)]
    for step in range(STEPS):
        sums = []
        for replica in range(replicas):
            x, target = batch(step + STEPS * replica)
            parts = zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
            found = [loss_of(model(part), goal) for part, goal in parts]
            losses[replica] += [loss.item() for loss in found]
            for loss in reversed(found) if backwards else found:
                loss.backward()
            sums.append([param.grad for param in model.parameters()])
            optimizer.zero_grad()
        for param, *grads in zip(model.parameters(), *sums, strict=True):
            param.grad = sum(grads) / (replicas * MICROBATCHES)  # as FSDP2 and schedules scale what they add up
        optimizer.step()
        optimizer.zero_grad()
    return losses


def stages_of(schedule: str, rank: int, ranks: int) -> list[int]:
    """Which stages a rank has: as schedules expect, one after another, or there and back (V)."""
    if not issubclass(get_schedule_class(schedule), PipelineScheduleMulti):
        return [rank]
    return [rank, 2 * ranks - 1 - rank if "ZBV" in schedule else ranks + rank]


def trains(recipe: str, use: str, schedule: str, replicas: int) -> None:
    """Ranks are `replicas` shards of each of the stages."""
    mesh = mesh_of(dist.get_world_size() // replicas, replicas, names=("pp", "dp"))
    rank, replica, ranks = mesh.get_local_rank("pp"), mesh.get_local_rank("dp"), mesh.size(0)
    mine = stages_of(schedule, rank, ranks)
    count = ranks * len(mine)
    model = built(recipe, use, count)
    reference = copy.deepcopy(model)
    expected = alone(reference, use, replicas, schedule == "LoopedBFS")[replica]
    if replicas > 1:
        for at in mine:
            fully_shard(model[at], mesh=mesh["dp"], reshard_after_forward=schedule != "1F1B")
    stages = [PipelineStage(model[at], at, count, torch.device("cpu"), group=mesh.get_group("pp")) for at in mine]
    chosen: Any = get_schedule_class(schedule)
    runner = chosen(stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn=loss_of)
    optimizer = optimizer_of(use, [param for at in mine for param in model[at].parameters()])
    losses: list[float] = []
    for step in range(STEPS):
        x, target = batch(step + STEPS * replica)
        found: list[Tensor] = []
        last = count - 1 in mine
        runner.step(*([x] if rank == 0 else []), **({"target": target, "losses": found} if last else {}))
        losses += [loss.item() for loss in found]
        optimizer.step()
        optimizer.zero_grad()
    assert losses == (expected if last else [])
    for at in mine:
        for (name, param), other in zip(model[at].named_parameters(), reference[at].parameters(), strict=True):
            found_here: Any = param.full_tensor() if isinstance(param, DTensor) else param
            assert torch.equal(found_here, other), (at, name)


# They take a stage's backward in two parts.
ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble")
LEGACY = pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12),
    reason="needs a torch whose zero bubble takes autograd functions, such as 2.13: 2.11 asks them for _input_metadata",
)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "use", "schedule"),
    [
        ("mxfp8", "quantized", "1F1B"),
        ("fp8_block", "cast", "Interleaved1F1B"),
        ("nvfp4", "quantized", "LoopedBFS"),
        pytest.param("mxfp8", "quantized", "InterleavedZeroBubble", marks=LEGACY),
        pytest.param("fp8_block", "cast", "ZBVZeroBubble", marks=LEGACY),
        pytest.param("nvfp4", "quantized", "ZBVZeroBubble", marks=LEGACY),
    ],
)
def test_stages_train_as_one_process(two: Ranks, recipe: str, use: str, schedule: str) -> None:
    two.run(trains, recipe, use, schedule, 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "use", "schedule"),
    [
        ("nvfp4", "quantized", "1F1B"),
        ("mxfp8", "quantized", "Interleaved1F1B"),
        ("fp8_block", "cast", "LoopedBFS"),
    ],
)
def test_sharded_stages_train_as_one_process(four: Ranks, recipe: str, use: str, schedule: str) -> None:
    four.run(trains, recipe, use, schedule, 2)


@pytest.mark.thorough
@pytest.mark.xfail(strict=True, reason="torch's zero bubble under FSDP2; see docs/pages/works-with.md")
@pytest.mark.parametrize("schedule", ZERO_BUBBLE)
def test_sharded_stages_of_plain_weights(four: Ranks, schedule: str) -> None:
    """What torch does by itself: where plain weights don't train as one process, quantized ones are not asked to."""
    four.run(trains, "", "plain", schedule, 2)

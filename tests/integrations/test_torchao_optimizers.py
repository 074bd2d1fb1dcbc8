"""torchao's low-bit optimizers on weights that are cast on gather: as on plain parameters, and as in one process."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
from harness import Ranks
from models import batch, my_share, shard
from test_cast_on_gather import build_cast
from torch import Tensor, nn

import layoutc

pytest.importorskip("torchao", reason="needs torchao: pip install 'layoutc[integrations]'")

NAMES = ("Adam8bit", "AdamW8bit", "AdamW4bit", "AdamWFp8")
WIDTH = 128  # torchao quantizes states of 4096 elements and more, in blocks of 256


def optimizer(name: str, params: Any) -> torch.optim.Optimizer:
    """By name, with decay, which reads the values."""
    made: torch.optim.Optimizer = getattr(import_module("torchao.optim"), name)(params, lr=1e-2, weight_decay=0.1)
    return made


def compiling(backend: str | None) -> Any:
    """They compile their step, which takes most of the time; None: they run as they are written."""
    compile_ = partial(torch.compile, backend=backend) if backend else lambda function, **_: function
    return mock.patch.object(torch, "compile", compile_)


@pytest.mark.parametrize(("name", "backend"), [*((name, None) for name in NAMES), ("AdamWFp8", "aot_eager")])
def test_they_step_as_on_plain_parameters(name: str, backend: str | None) -> None:
    """Values to the bit."""
    values = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    casts = import_module("layoutc.recipes.nvfp4").CastTensor
    plain, cast = nn.Parameter(values.clone()), nn.Parameter(casts(values.clone()))
    before = layoutc.implicit_dequantizes()
    with compiling(backend):
        for param in (plain, cast):
            stepper = optimizer(name, [param])
            for step in range(3):
                param.grad = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(step))
                stepper.step()
            assert not any(isinstance(state, casts) for state in stepper.state[param].values())
    held: Any = cast.data
    assert type(held) is casts
    assert torch.equal(held.plain, plain.detach())
    assert not torch.equal(plain.detach(), values)
    assert layoutc.implicit_dequantizes() == before


def trains(recipe: str, name: str) -> list[float]:
    """The loss curve, against that of one process."""
    alone, sharded = build_cast(recipe, WIDTH), shard(build_cast(recipe, WIDTH))
    losses: list[list[float]] = []
    with compiling(None):
        for model, share in ((alone, 1.0), (sharded, my_share())):
            stepper, curve = optimizer(name, model.parameters()), list[float]()
            for step in range(3):
                x, y = batch(step, WIDTH)
                loss: Tensor = (model(x) - y).square().mean()
                (loss * share).backward()
                stepper.step()
                stepper.zero_grad()
                curve.append(float(loss.detach()))
            losses.append(curve)
    assert losses[0] == losses[1], losses
    return losses[0]


@pytest.mark.parametrize(("recipe", "name"), [("fp8_current", "AdamW8bit")])
def test_shards_train_as_one_process(two: Ranks, recipe: str, name: str) -> None:
    """Shards of whole blocks of states."""
    two.run(trains, recipe, name)

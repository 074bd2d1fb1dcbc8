"""torchao's low-bit optimizers on weights that are cast on gather, and on masters, train as in one process."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness import Ranks
from models import batch, build, my_share, shard, train_step
from test_cast_on_gather import build_cast
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

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


def trains(recipe: str, name: str, backend: str | None) -> list[float]:
    """The loss curve, against that of one process."""
    alone, sharded = build_cast(recipe, WIDTH), shard(build_cast(recipe, WIDTH))
    losses: list[list[float]] = []
    for model, share, how in ((alone, 1.0, None), (sharded, my_share(), backend)):
        with compiling(how):
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


@pytest.mark.parametrize(("name", "backend"), [("AdamW8bit", None), ("AdamW8bit", "aot_eager")])
def test_shards_train_as_one_process(two: Ranks, name: str, backend: str | None) -> None:
    """Shards of whole blocks of states; also where steps are compiled, which write to views of padded memory."""
    two.run(trains, "fp8_current", name, backend)


def masters_train(recipe: str, name: str, folder: str) -> list[float]:
    """Masters of quantized weights, stepped by a low-bit optimizer made before fully_shard, against one process; saved
    after two steps, and resumed by another model and optimizer."""
    from layoutc import checkpoint

    losses: list[list[float]] = [[], []]
    with compiling(None):
        alone = build(recipe, WIDTH)
        stepper = layoutc.MasterWeights(low_bit(name), alone.parameters(), lr=1e-2, weight_decay=0.1)
        losses[0] += [train_step(alone, stepper, step, WIDTH) for step in range(4)]
        for part in (range(2), range(2, 4)):
            model = build(recipe, WIDTH, seed=part.start)
            stepper = layoutc.MasterWeights(low_bit(name), model.parameters(), lr=1e-2, weight_decay=0.1)
            shard(model)
            if part.start:
                weights, moments = get_state_dict(model, stepper)
                state = {"model": weights, "optimizer": moments}
                checkpoint.load(state, folder)
                set_state_dict(model, stepper, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            losses[1] += [train_step(model, stepper, step, WIDTH, my_share()) for step in part]
            if not part.start:
                weights, moments = get_state_dict(model, stepper)
                checkpoint.save({"model": weights, "optimizer": moments}, folder)
    assert losses[0] == losses[1], losses
    return losses[0]


def low_bit(name: str) -> Any:
    """The class."""
    return getattr(import_module("torchao.optim"), name)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("recipe", "name"), [("nvfp4", "AdamW8bit"), ("mxfp8", "AdamW4bit"), ("fp8_current", "AdamWFp8")]
)
def test_masters_in_shards_are_stepped_and_resumed(two: Ranks, tmp_path: Path, recipe: str, name: str) -> None:
    """As in one process, to the bit."""
    found = two.run(masters_train, recipe, name, str(tmp_path / "saved"))
    assert found[0] == found[1]
    assert len(set(found[0])) == 4

"""accelerate's FSDP2 and DDP: both uses train as one process does, to the bit."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import forget, use_fsdp2
from harness import Ranks, on
from models import Model, adam, batch, build, make_uneven, my_share
from test_cast_on_gather import build_cast
from torch import nn
from torch.distributed.tensor import DTensor

import layoutc
from layoutc.runtime.errors import UnsupportedOperator

pytest.importorskip("accelerate", reason="needs accelerate: pip install 'layoutc[integrations]'")

WIDTH, STEPS = 64, 3


def built(recipe: str, use: str) -> tuple[Any, torch.optim.Optimizer]:
    """A model and its optimizer, as users make them before accelerate sees them."""
    if use == "quantized":
        model = build(recipe, WIDTH)
        return model, adam(model)
    model = build_cast(recipe, WIDTH)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def accelerator(sharded: bool, precision: str = "no") -> Any:
    """A fresh Accelerator for FSDP2, or for DDP."""
    from accelerate import Accelerator

    forget()
    engine = Accelerator(cpu=True, mixed_precision=precision)
    if sharded:
        use_fsdp2(engine, "Linear")
    return engine


def trains(recipe: str, use: str, sharded: bool) -> list[float]:
    """The loss curve, against that of one process; every parameter trains."""
    alone, optimizer = built(recipe, use)
    model, other = built(recipe, use)
    engine = accelerator(sharded)
    model, other = engine.prepare(model, other)
    held = [param for group in other.param_groups for param in group["params"]]
    assert {id(param) for param in held} == {id(param) for param in model.parameters()}
    assert all(isinstance(param, DTensor) for param in held) is sharded
    before = [param.detach().clone() for param in alone.parameters()]
    losses: list[list[float]] = [[], []]
    for step in range(STEPS):
        x, y = batch(step, WIDTH)
        loss = (alone(x) - y).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 1e-2, norm_type=float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        losses[0].append(float(loss.detach()))
        loss = (model(x) - y).square().mean()
        engine.backward(loss * my_share())
        engine.clip_grad_norm_(model.parameters(), 1e-2, norm_type=float("inf"))
        other.step()
        other.zero_grad()
        losses[1].append(float(loss.detach()))
    assert losses[0] == losses[1], losses
    for param, old in zip(alone.parameters(), before, strict=True):
        assert not torch.equal(param.detach(), old)
    return losses[0]


@pytest.mark.parametrize(
    ("sharded", "use", "recipe"),
    [(True, "quantized", "nvfp4"), (True, "cast", "mxfp8"), (False, "quantized", "mxfp8"), (False, "cast", "nvfp4")],
)
def test_accelerate_trains_as_one_process(two: Ranks, recipe: str, use: str, sharded: bool) -> None:
    """prepare(model, optimizer) finds each parameter again; the optimizer was made before."""
    for losses in two.run(trains, recipe, use, sharded):
        assert len(set(losses)) == STEPS


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@on("two")
def test_mixed_precision_changes_no_byte(recipe: str) -> None:
    """For mixed precision accelerate makes trained parameters fp32, by .data: a relabel, and no byte changes."""
    from models import raw

    model = build(recipe, WIDTH).to(torch.bfloat16)
    before: Any = {name: param.data for name, param in model.named_parameters()}
    held = {name: [raw(p) for p in one.planes().values()] for name, one in before.items() if hasattr(one, "planes")}
    engine = accelerator(True, "bf16")
    model, _ = engine.prepare(model, adam(model))
    for name, planes in held.items():
        whole: Any = model.get_parameter(name).full_tensor()
        assert whole.dtype == torch.float32
        assert all(torch.equal(raw(a), b) for a, b in zip(whole.planes().values(), planes, strict=True)), name


@pytest.mark.parametrize("use", ["quantized", "cast_on_gather"])
def test_an_optimizer_has_its_own_fused(use: Any) -> None:
    """`prepare` hands it over, and groups of weights under one amax have a name of their own."""
    from layoutc.integrations.accelerate import prepare

    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    more: dict[str, Any] = {"share_amax": [["0", "1"]], "fused": True, "lr": 1e-2}
    model, optimizer = prepare(accelerator(False), plain, torch.optim.AdamW, recipe="fp8_current", use=use, **more)
    assert all(group["fused"] for group in optimizer.param_groups)
    weights = [getattr(one.weight, "_agreed", one.weight) for one in model]
    assert weights[0].fused == weights[1].fused is not None


@on("two")
def test_an_unsharded_state_is_saved_without_safetensors(tmp_path: Path) -> None:
    """safetensors takes no codes, and says so; torch's own format does."""
    folder = str(tmp_path)
    from layoutc.integrations.accelerate import prepare

    engine = accelerator(False)
    torch.manual_seed(0)
    model, optimizer = prepare(engine, Model(WIDTH), torch.optim.AdamW, recipe="nvfp4", lr=1e-2)
    one_step(model, optimizer, 0, engine)
    with (
        pytest.raises(UnsupportedOperator, match="safetensors can't write") if engine.is_main_process else nullcontext()
    ):
        engine.save_state(f"{folder}/refused")
    engine.save_state(f"{folder}/state", safe_serialization=False)
    engine.wait_for_everyone()
    losses = [one_step(model, optimizer, step, engine) for step in (1, 2)]
    engine.load_state(f"{folder}/state")
    assert [one_step(model, optimizer, step, engine) for step in (1, 2)] == losses


def one_step(model: Any, optimizer: Any, step: int, engine: Any = None) -> float:
    """The loss before it."""
    x, y = batch(step, WIDTH)
    loss = (model(x) - y).square().mean()
    if engine is None:
        loss.backward()
    else:
        engine.backward(loss * my_share())
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.parametrize(("recipe", "use"), [("nvfp4", "quantized"), ("fp8_current", "cast_on_gather")])
@on("two")
def test_what_accelerate_saves_it_resumes(tmp_path: Path, recipe: str, use: str) -> None:
    """`prepare` trains as one process does; saved after two steps, another model goes on from there; and exports."""
    folder = str(tmp_path)
    from layoutc.checkpoint import load_safetensors
    from layoutc.integrations.accelerate import export, prepare

    alone, optimizer = built(recipe, use)
    expected = [one_step(alone, optimizer, step) for step in range(4)]
    options: dict[str, Any] = {"recipe": recipe, "use": use, "lr": 1e-2, "weight_decay": 0.1}
    losses: list[float] = []
    for part in (range(2), range(2, 4)):
        engine = accelerator(True)
        torch.manual_seed(part.start)
        plain = Model(WIDTH)
        if part.start == 0:
            torch.manual_seed(0)
            plain = Model(WIDTH)
            make_uneven(plain)
        model, other = prepare(engine, plain, torch.optim.AdamW, **options)
        use_fsdp2(engine, "Linear")  # on a CPU, prepare forgets it
        if part.start:
            engine.load_state(f"{folder}/state")
        losses += [one_step(model, other, step, engine) for step in part]
        if part.start == 0:
            engine.save_state(f"{folder}/state")
    assert losses == expected, (losses, expected)
    names = export(engine, model, f"{folder}/out")
    assert names == ["model.safetensors"]
    again = Model(WIDTH)
    if use == "quantized":
        layoutc.quantize_(again, recipe)
    load_safetensors(again, f"{folder}/out")
    x, _ = batch(9, WIDTH)
    assert torch.equal(again(x), alone(x) if use == "quantized" else again(x))

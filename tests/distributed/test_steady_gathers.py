"""Gathers that are like the one before them, which the hooks don't work out again: and those that only seem so."""

from __future__ import annotations

import re
import warnings
from typing import Any

import product_modes
import pytest
import torch
import torch.distributed as dist
from harness import on
from models import (
    adam,
    assert_gathers_as,
    batch,
    build,
    counted,
    shard,
    train_step,
    width_for,
)
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import Shard

import layoutc
from layoutc.runtime import torch_private
from layoutc.runtime.fsdp2 import wire
from layoutc.runtime.weight.tensor import QuantizedTensor


def on_dim_1(param: Any) -> Shard:
    return Shard(1) if param.dim() > 1 else Shard(0)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "stays"), [("fp8_current", False), ("mxfp8", True), ("fp8_block", False), ("nvfp4", True)]
)
@on("two")
def test_what_gathers_have_in_common_is_worked_out_once(recipe: str, stays: bool) -> None:
    """From the second step on; and steps are those of one process."""
    world = dist.get_world_size()
    width = width_for(recipe, world)
    model, reference = build(recipe, width), build(recipe, width)
    shard(model, reshard_after_forward=not stays)
    optimizer, expected = adam(model), adam(reference)
    share = float(world) if dist.get_rank() == 0 else 0.0
    for step in range(4):
        with counted("outgoing", lambda *_: 1, wire) as sent, counted("arrived", lambda *_: 1, wire) as received:
            loss = train_step(model, optimizer, step, width, share)
        assert loss == train_step(reference, expected, step, width)
        assert bool(sent) == (step == 0)
        assert bool(received) == (step == 0)
    assert_gathers_as(model, reference)


def gathered_twice(recipe: str) -> tuple[Any, int]:
    """A model whose next gathers are like those before."""
    width = width_for(recipe, dist.get_world_size())
    model = build(recipe, width)
    shard(model)
    with torch.no_grad():
        for step in range(2):
            model(batch(step, width)[0])
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
    return model, width


@pytest.mark.parametrize(("recipe", "way"), [("fp8_current", "data"), ("mxfp8", "set_"), ("fp8_block", "set_")])
@on("two")
def test_planes_that_are_others_now_are_sent(recipe: str, way: str) -> None:
    """Planes that were replaced, or moved to other memory, since the last gather."""
    model, width = gathered_twice(recipe)
    reference = build(recipe, width, seed=1)
    other = build(recipe, width, seed=1)
    shard(other)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        one, another = (param._local_tensor for param in (mine, theirs))
        if not isinstance(one, QuantizedTensor):
            one.copy_(another)
        elif way == "data":
            one.data = another
        else:
            for name, plane in one.store.planes.items():
                plane.set_(another.store.planes[name].clone())  # type: ignore[call-overload]
    assert_gathers_as(model, reference)


@pytest.mark.parametrize("cast", [False, True])
@on("two")
def test_a_choice_between_gathers_is_followed(cast: bool) -> None:
    """A mode that is set between two gathers, of the shard alone, as it is while the weight is not gathered."""
    recipe = "mxfp8"
    width = width_for(recipe, dist.get_world_size())
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width, bias=False))
    (layoutc.cast_on_gather_ if cast else layoutc.quantize_)(model, recipe)
    fully_shard(model)
    for mode in ("reference", "low_precision", None, "reference", "dequantize"):
        model.unshard()
        model.reshard()
        product_modes.set_products_(model, mode)
        model.unshard()
        gathered: Any = model[0].weight
        assert product_modes.named(gathered.own_products) == mode
        model.reshard()


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("", {}),
        ("it is offloaded to the CPU", {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
        ("it is sharded on dim 1", {"shard_placement_fn": on_dim_1}),
    ],
)
@on("two")
def test_what_no_plan_sends_is_said_once(reason: str, options: dict[str, Any]) -> None:
    """Once for each reason, with the first weight's name."""
    torch_private._left.clear()
    models = [build("mxfp8", 128), build("mxfp8", 128)]
    names = [name for name, _ in models[0].named_parameters()]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for model in models:
            shard(model, **options)  # whose layers are gathered in each forward
            for step in range(3):
                with torch.no_grad():
                    model(batch(step, 128)[0])
    found = [str(one.message) for one in said if "own steps gather this weight" in str(one.message)]
    assert [re.split(r", because |[:.] ", one)[2] for one in found] == [reason] * bool(reason)
    assert all(one.partition(":")[0] in names for one in found)

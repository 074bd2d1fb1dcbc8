"""Memory under fully_shard: gathered planes are freed after each pass, and nothing grows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from models import RECIPES, Model, adam, batch, build, make_uneven, my_share, recipe_module, width_for
from storages import assert_freed, gathered, live_bytes, look_at_what_comes
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import layoutc
from layoutc.ints.cuts import Cuts

STEPS, SETTLED = 12, 3


def built(recipe: str, form: str, width: int) -> tuple[Model, torch.optim.Optimizer]:
    """The model of a form, every layer and the root resharded after forward, and its optimizer."""
    options: dict[str, Any] = {"reshard_after_forward": True}
    if form == "columns":
        options["shard_placement_fn"] = lambda param: Shard(1) if param.dim() == 2 else None
    if form == "cast":
        torch.manual_seed(0)
        model = Model(width)
        make_uneven(model)
        layoutc.cast_on_gather_(model, recipe)
    else:
        model = build(recipe, width)
    for layer in (*model.layers, model.head, model):
        fully_shard(layer, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) if form == "cast" else adam(model)


def frees_what_it_gathers(recipe: str, form: str, width: int) -> None:
    """Storages after forward, after backward, and over steps."""
    look_at_what_comes()
    model, optimizer = built(recipe, form, width)
    seen = []
    for step in range(STEPS):
        x, y = batch(step, width)
        loss = (model(x) - y).square().mean()
        looked = assert_freed(model, f"forward of step {step}")
        (loss * my_share()).backward()
        assert assert_freed(model, f"backward of step {step}") >= looked
        assert looked >= 2 * 3, "each of three weights has one output and one plane at least"
        optimizer.step()
        optimizer.zero_grad()
        del x, y, loss
        if step in (SETTLED, STEPS - 1):
            seen.append(live_bytes(*seen))
    assert seen[0] >= seen[1], f"bytes held after {SETTLED + 1} and after {STEPS} steps: {seen}"
    joined = [name for name in gathered(model) if "joined" in name]
    cuts_blocks = not Cuts(width, -(-width // dist.get_world_size()), 2).aligned(
        recipe_module(recipe).LAYOUT.block_rows
    )
    assert bool(joined) == (form == "columns" or cuts_blocks), joined


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("form", "recipe"), [*(("quantized", recipe) for recipe in RECIPES), ("cast", "fp8_delayed"), ("cast", "mxfp8")]
)
def test_gathered_planes_are_freed(two: Ranks, recipe: str, form: str) -> None:
    """After forward, after backward, and no byte more after 12 steps than after 4."""
    two.run(frees_what_it_gathers, recipe, form, width_for(recipe, 2))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("form", "recipe"), [("quantized", "mxfp8"), ("quantized", "nvfp4"), ("cast", "mxfp8")])
def test_planes_that_cuts_double_are_freed(two: Ranks, recipe: str, form: str) -> None:
    """Blocks that cuts go through are put together in tensors that FSDP2 does not know as outputs."""
    two.run(frees_what_it_gathers, recipe, form, 3 * recipe_module(recipe).LAYOUT.block_rows)


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8"])
def test_planes_of_shards_of_columns_are_freed(two: Ranks, recipe: str) -> None:
    """Shard(1): every plane is put together."""
    two.run(frees_what_it_gathers, recipe, "columns", width_for(recipe, 2))

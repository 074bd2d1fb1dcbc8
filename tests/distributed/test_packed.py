"""Weights that are dequantized on gather: their values to the bit, by plans and by hooks; and modes that change."""

from __future__ import annotations

from importlib import import_module
from math import lcm
from typing import Any

import product_modes
import pytest
import torch
import torch.distributed as dist
from harness import Ranks, on
from models import adam, build, local, my_share, shard, train_step
from test_gather_groups import kernels_on_cpu
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from weight_recipes import CUT_APART

import layoutc
from layoutc.ints.cuts import Cuts
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.fsdp2.gather_plan import GatherPlan
from layoutc.runtime.sharding import gathered, registry

ON_GATHER = "gather"


def of_rows(recipe: str, rows: list[int], cast: bool = False) -> tuple[nn.Sequential, list[Tensor]]:
    """Layers whose weights have so many times the rows that shards may have, and the values of each."""
    layout = import_module(f"layoutc.recipes.{recipe}").LAYOUT
    torch.manual_seed(0)
    columns = layout.column_multiple * layout.multiple_k
    columns *= -(-512 // columns)
    model = nn.Sequential(*[nn.Linear(columns, count, bias=False) for count in rows])
    quantize = import_module(f"layoutc.recipes.{recipe}").quantize
    values = [quantize(layer.weight.detach()).dequantize() for layer in model]
    (layoutc.cast_on_gather_ if cast else layoutc.quantize_)(model, recipe)
    product_modes.set_products_(model, ON_GATHER)
    return model, values


def plans(model: nn.Module) -> list[GatherPlan]:
    """Those of the model's group."""
    params = {id(param) for param in model.parameters()}
    group: Any = next(group for param, group in registry.parameters() if id(param.sharded_param) in params)
    return [plan for plan in group._plans.values() if plan is not None]


def leaves_values(recipe: str, cast: bool) -> None:
    """Even shards, a short last one, ranks without rows; gathered again, in training, and in inference first."""
    layout, world = import_module(f"layoutc.recipes.{recipe}").LAYOUT, dist.get_world_size()
    block = lcm(layout.block_rows, layout.multiple_m) * (world if layout.multiple_m > 1 else 1)
    rows = [block * world, block * (8 * world - 1), block, block * world * 2]
    model, values = of_rows(recipe, rows, cast)
    fully_shard(model)
    for at in range(3):
        with torch.inference_mode(at == 0):
            model.unshard()  # type: ignore[operator]
            for layer, whole in zip(model, values, strict=True):
                weight: Any = layer.weight
                assert type(weight) is nn.Parameter
                assert type(weight.data) is Tensor
                assert torch.equal(weight.data, whole)
            model.reshard()  # type: ignore[operator]
    fits = []
    for count, layer in zip(rows, model, strict=True):
        sent = layout.sent("forward", Cuts(count, -(-count // world), world), layer.in_features).values()
        fits.append(-(-count // world) % layout.block_rows == 0 and all(facts.nbytes % 16 == 0 for facts in sent))
    assert [len(plan.of_values) for plan in plans(model)] == [len(rows)] * all(fits)


@pytest.mark.sample(2)
@pytest.mark.parametrize("recipe", CUT_APART)
def test_gathers_leave_the_values(two: Ranks, recipe: str) -> None:
    two.run(leaves_values, recipe, False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["fp8_block", "nvfp4", "nf4"])
def test_gathers_of_four_ranks(four: Ranks, recipe: str) -> None:
    four.run(leaves_values, recipe, False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["fp8_block", "nvfp4", "fp8_current"])
def test_gathers_of_cast_weights(two: Ranks, recipe: str) -> None:
    two.run(leaves_values, recipe, True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4", "mxfp8_2d"])
@on("two")
def test_a_group_is_dequantized_in_one_launch(recipe: str) -> None:
    """By kernels: what a gather launches is kept for the next ones, while all of it lies where it lay."""
    model, values = of_rows(recipe, [32 * dist.get_world_size(), 64 * dist.get_world_size()])
    fully_shard(model)
    with kernels_on_cpu():
        for _ in range(3):
            model.unshard()  # type: ignore[operator]
            assert all(torch.equal(layer.weight.data, one) for layer, one in zip(model, values, strict=True))  # type: ignore[arg-type]
            model.reshard()  # type: ignore[operator]
    (plan,) = plans(model)
    assert plan.launches
    assert all(len(launches._launches) == 1 for launches in plan.launches.values())


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["fp8_block", "nvfp4"])
@on("two")
def test_weights_with_blocks_that_are_cut(recipe: str) -> None:
    """A weight whose blocks are cut between ranks, beside others."""
    block, world = import_module(f"layoutc.recipes.{recipe}").LAYOUT.block_rows, dist.get_world_size()
    for rows in ([block * world, block * 3, block * world], [block * 3, block * world, block * 3]):
        model, values = of_rows(recipe, rows)
        fully_shard(model)
        for _ in range(2):
            model.unshard()  # type: ignore[operator]
            assert all(torch.equal(layer.weight.data, one) for layer, one in zip(model, values, strict=True))  # type: ignore[arg-type]
            model.reshard()  # type: ignore[operator]
        assert not plans(model)  # FSDP2 gathers them by their hooks


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", ["fp8_block", "nvfp4", "mxfp8", "fp8_rowwise"])
@on("two")
def test_modes_that_change_between_steps(recipe: str) -> None:
    """Modes of all weights of a group, and of some, change between steps: losses stay those of one process."""
    width = max(64, 4 * import_module(f"layoutc.recipes.{recipe}").LAYOUT.block_rows * dist.get_world_size())
    reference, model = build(recipe, width), build(recipe, width)
    shard(model, nested=False)
    optimizers = [adam(one) for one in (reference, model)]
    seen = []
    modes = (None, ON_GATHER, ON_GATHER, "dequantize", ON_GATHER, "head", ON_GATHER)
    for step, mode in enumerate(modes):
        for one in (reference, model):
            if mode == "head":
                layoutc.set_products_(one, None, filter_fn=lambda _, name: name == "head")
            else:
                product_modes.set_products_(one, mode)  # type: ignore[arg-type]
        expected = train_step(reference, optimizers[0], step, width)
        assert train_step(model, optimizers[1], step, width, my_share()) == expected, (step, mode)
        weights = [layer.weight for layer in (*model.layers, model.head)]
        found: list[Any] = [registry.find(local(weight)) for weight in weights]
        seen.append([gathered.decision_of(one.param()).values for one in found])  # type: ignore[union-attr]
    alike = [mode == ON_GATHER for mode in modes]
    assert seen == [
        [one] * 3 if mode != "head" else [True, True, False] for mode, one in zip(modes, alike, strict=True)
    ]


@on("two")
def test_what_can_not_be_done_says_what_can() -> None:
    model = build("fp8_current", 64)
    shard(model, nested=False)
    model.unshard()  # type: ignore[operator]
    with pytest.raises(LayoutError, match=r"weight is gathered now: call reshard\(\)"):
        product_modes.set_products_(model, ON_GATHER)
    model.reshard()  # type: ignore[operator]
    product_modes.set_products_(model, ON_GATHER)
    assert {(row.way, row.reason) for row in layoutc.explain_products(model)} == {
        ("dequantize", "gathers leave values")
    }
    model.unshard()  # type: ignore[operator]
    with pytest.raises(LayoutError, match=r"weight is gathered now: call reshard\(\)"):
        layoutc.set_products_(model, "low_precision")
    model.reshard()  # type: ignore[operator]
    layoutc.set_products_(model, "low_precision")


@pytest.mark.parametrize("mode", ["dequantize", ON_GATHER])
@on("two")
def test_masters_are_made_of_shards(mode: Any) -> None:
    """To an optimizer, which would train nothing: gradients come to shards."""
    model = build("fp8_current", 64)
    product_modes.set_products_(model, mode)
    shard(model, nested=False)
    model.unshard()  # type: ignore[operator]
    with pytest.raises(
        LayoutError,
        match=r"layers\.0\.weight of shape \(64, 64\) as FSDP2 gathered it, .* call reshard\(\) on the model's FSDP",
    ):
        adam(model)
    model.reshard()  # type: ignore[operator]
    adam(model)

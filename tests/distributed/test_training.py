"""Training under fully_shard: the loss curve and every byte are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks, mesh_of, on
from models import (
    RECIPES,
    adam,
    assert_equal_on_all_ranks,
    assert_gathers_as,
    build,
    counted,
    exchanges,
    gathers,
    local,
    my_share,
    recipe_module,
    shard,
    shared_bytes,
    train_step,
    width_for,
)
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from weight_recipes import CUT_APART

import layoutc
from layoutc.ints.sizes import cdiv

STEPS, FEW = 6, 3  # of one recipe whose history of amaxes goes on; of all others
TWO = 2  # with other options: the first sets up, the second is like all that follow, and its bytes are compared, too
EVERY = CUT_APART


def planned_bytes(model: Any, world: int, keeps: bool) -> int:
    """Bytes from one rank in a step: each layer for each pass, or once where it stays gathered; the root once."""
    total = 0
    for module, stays in ((model.layers[0], keeps), (model.layers[1], keeps), (model.head, True)):
        for param in module.parameters():
            if hasattr(param, "LAYOUT"):
                m, k = param.shape
                plans = [
                    param.LAYOUT.gather(m, k, world, which)
                    for which in (("both",) if stays else ("forward", "backward"))
                ]
                total += sum(plan.bytes_per_rank for plan in plans)
            else:
                total += cdiv(param.numel(), world) * param.element_size() * (1 if stays else 2)
    return total


def trains_as_one_process(
    recipe: str, keeps: bool, nested: bool, sizes: tuple[int, int] | None, meshed: str | None, steps: int = TWO
) -> None:
    """Loss curve, bytes, classes, agreement between ranks, collectives."""
    world, dequantized = dist.get_world_size(), layoutc.implicit_dequantizes()
    options: dict[str, Any] = {} if keeps is None else {"reshard_after_forward": not keeps}
    ranks = world
    if meshed == "hybrid":
        options["mesh"] = mesh_of(2, world // 2, names=("copies", "slices"))
        ranks = world // 2
    elif meshed == "one":
        options["mesh"] = mesh_of(world, 1, names=("copies", "alone"))["alone"]
        ranks = 1
    elif meshed == "trivial":
        options["mesh"] = mesh_of(world, 1, names=("copies", "alone"))
        ranks = 1
    width, inner = sizes or (width_for(recipe, ranks),) * 2
    reference = build(recipe, width, inner)
    whole_plan = planned_bytes(reference, ranks, keeps) if nested and ranks > 1 else None
    facts = recipe_module(recipe).LAYOUT
    per_rank = [cdiv(rows, ranks) for rows in (width, inner) if ranks > 1]
    cuts_blocks = any(rows % facts.block_rows for rows in per_rank)
    expected_optimizer = adam(reference)
    model = shard(build(recipe, width, inner), nested=nested, **options)
    kinds = {type(local(param)) for param in model.parameters() if param.dim() == 2}
    assert kinds == {recipe_module(recipe).Tensor}
    optimizer = adam(model)
    assert_equal_on_all_ranks(shared_bytes(model))
    share = 1.0 if meshed == "one" else my_share()
    for step in range(steps):
        expected = train_step(reference, expected_optimizer, step, width)
        with gathers() as sent, exchanges() as told, counted("all_reduce", lambda x, *_, **__: x.dtype) as reduced:
            loss = train_step(model, optimizer, step, width, share)
        assert loss == expected, f"step {step}: {loss} is not {expected}"
        assert reduced.count(torch.int32) == (1 if facts.shares_amax and ranks > 1 else 0)
        assert len(told) == (1 if cuts_blocks else 0)
        assert_equal_on_all_ranks(shared_bytes(model))
        if whole_plan is not None:
            assert sum(sent) == whole_plan, (sent, whole_plan)
        if ranks == 1:
            assert not sent
        if step in (0, 1, steps - 1):
            assert_gathers_as(model, reference)
    assert {type(local(param)) for param in model.parameters() if param.dim() == 2} == kinds
    assert layoutc.implicit_dequantizes() == dequantized


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("recipe", "keeps", "nested"),
    [
        ("fp8_delayed", False, True),
        ("fp8_delayed", True, False),
        ("fp8_current", True, True),
        ("fp8_block", False, True),
        ("mxfp8", True, True),
        ("mxfp8", False, False),
        ("nvfp4", False, True),
    ],
)
def test_training_on_two_ranks_equals_one_process(two: Ranks, recipe: str, keeps: bool, nested: bool) -> None:
    """Losses and bytes of steps of AdamW; gathers send what is planned, and a step has one all-reduce of amaxes."""
    steps = STEPS if recipe == "fp8_delayed" and nested and not keeps else FEW
    two.run(trains_as_one_process, recipe, keeps, nested, None, None, steps)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("recipe", "meshed"),
    [("fp8_delayed", None), ("nvfp4", "hybrid"), ("mxfp8", None), ("fp8_block", "hybrid"), ("fp8_delayed", "hybrid")],
)
def test_training_on_four_ranks_equals_one_process(four: Ranks, recipe: str, meshed: str | None) -> None:
    """Sharded over four, and over two in two copies under arbitrary names of mesh dims."""
    four.run(trains_as_one_process, recipe, False, True, None, meshed)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("recipe", "meshed"), [("fp8_delayed", "one"), ("nvfp4", "trivial"), ("mxfp8", "one")])
def test_a_shard_group_of_one_rank_trains_as_one_process(two: Ranks, recipe: str, meshed: str) -> None:
    """fully_shard on one rank, and replicas whose shard dim has size 1; nothing is gathered."""
    two.run(trains_as_one_process, recipe, False, True, None, meshed)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "sizes"), [("fp8_delayed", (17, 8)), ("fp8_current", (1, 3)), ("fp8_delayed", (3, 17))]
)
def test_uneven_rows_train_as_one_process(four: Ranks, recipe: str, sizes: tuple[int, int]) -> None:
    """Short shards, and ranks without rows."""
    four.run(trains_as_one_process, recipe, False, True, sizes, None)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_block", "nvfp4", "hybrid_fp8"])
@on("two")
def test_other_dims_shard_where_the_layout_allows(recipe: str) -> None:
    """Columns, and rows within each expert: steps equal one process, and gathers send bytes in the order of ranks.
    Shard(1) everywhere."""
    world, facts = dist.get_world_size(), recipe_module(recipe).LAYOUT
    width = max(64, world * facts.column_multiple)
    rows = max(32, world * facts.block_rows)

    def made() -> nn.Module:
        torch.manual_seed(0)
        model = ExpertModel(width, 3, rows)
        layoutc.quantize_(model, recipe, filter_fn=lambda module, name: hasattr(module, "weight"))
        return model

    reference, model = made(), made()
    for module in (model.experts, model):
        fully_shard(module, shard_placement_fn=lambda param: Shard(1) if param.dim() > 1 else None)  # type: ignore
    for param in model.parameters():
        assert param.placements == (Shard(1 if param.dim() > 1 else 0),)  # type: ignore[attr-defined]
    assert {type(local(p)) for p in model.parameters() if p.dim() > 1} == {recipe_module(recipe).Tensor}
    optimizers = [adam(one) for one in (reference, model)]
    dequantized = layoutc.implicit_dequantizes()
    for step in range(FEW):
        losses = []
        for one, optimizer, share in zip((reference, model), optimizers, (1.0, my_share()), strict=True):
            x = torch.randn(4, width, generator=torch.Generator().manual_seed(step))
            loss = one(x).square().mean()
            (loss * share).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        assert losses[0] == losses[1], f"step {step}: {losses}"
    assert layoutc.implicit_dequantizes() == dequantized


class ExpertModel(nn.Module):
    """A linear layer, and an expert weight of three dims."""

    def __init__(self, width: int, experts: int, rows: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.experts = Experts(torch.randn(experts, rows, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.gelu(self.layer(x))
        return self.experts(x.expand(self.experts.weight.shape[0], -1, -1))


class Experts(nn.Module):
    """One 3-D weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        """(experts, n, k) -> (experts, n, rows)."""
        return torch.bmm(x, self.weight.transpose(1, 2))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("recipe", "keeps"), [("fp8_block", False), ("mxfp8", True), ("nvfp4", False)])
def test_shards_that_cut_blocks_train_as_one_process(four: Ranks, recipe: str, keeps: bool) -> None:
    """Cuts inside of blocks, blocks of several ranks, short shards."""
    unit = recipe_module(recipe).LAYOUT.block_rows
    four.run(trains_as_one_process, recipe, keeps, True, (3 * unit, 2 * unit), None)


@pytest.mark.sample(2)
@pytest.mark.parametrize("recipe", [recipe for recipe in EVERY if recipe not in RECIPES])
def test_every_other_recipe_trains_as_one_process(two: Ranks, recipe: str) -> None:
    """With cuts inside of blocks, where it has blocks of several rows."""
    layout = recipe_module(recipe).LAYOUT
    unit, least = layout.block_rows, layout.multiple_k  # rows of one layer are columns of the next
    widths = (3 * unit, unit) if unit > 1 else (96, 64) if least <= 32 else (3 * least, 2 * least)
    two.run(trains_as_one_process, recipe, False, True, widths, None)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("recipe", "extra"),
    [
        ("mxfp8", "checkpoint"),
        ("mxfp8", "prefetch"),
        ("fp8_delayed", "tied"),
    ],
)
@on("two")
def test_features_of_fsdp2_change_nothing(recipe: str, extra: str) -> None:
    """Of weights whose passes read codes of their own, and of a history; test_fsdp2_options.py has all, of others. A
    few steps with one more feature of torch switched on; they equal one process."""
    world = dist.get_world_size()
    width = width_for(recipe, world)
    reference, model = build(recipe, width), build(recipe, width)
    if extra == "tied":
        for one in (reference, model):
            one.layers[1].weight = one.layers[0].weight  # type: ignore[assignment]
    if extra == "checkpoint":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        model.layers = nn.ModuleList([checkpoint_wrapper(layer) for layer in model.layers])
    shard(model, nested=extra != "tied")
    if extra == "prefetch":
        first, second = model.layers
        first.set_modules_to_forward_prefetch([second])  # type: ignore[operator]
        second.set_modules_to_backward_prefetch([first])  # type: ignore[operator]
    optimizer, expected_optimizer = adam(model), adam(reference)
    if extra == "tied":
        assert len(list(model.parameters())) == len(list(reference.parameters())) == 4
    for step in range(FEW if extra == "checkpoint" else TWO):
        expected = train_step(reference, expected_optimizer, step, width)
        loss = train_step(model, optimizer, step, width, my_share())
        assert loss == expected, f"step {step}: {loss} is not {expected}"
    if extra != "checkpoint":
        assert_gathers_as(model, reference)


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_delayed"])
@on("two")
def test_weights_kept_after_backward_serve_the_next_forward(recipe: str) -> None:
    """A weight that holds backward's planes alone gathers forward's when it is asked for them. Two micro-batches a
    step, weights kept after the first backward: what it gathered serves the second forward."""
    width = width_for(recipe, dist.get_world_size())
    reference, model = build(recipe, width), shard(build(recipe, width))
    for step in range(2):
        for part in range(2):
            for layer in model.layers:
                layer.set_reshard_after_backward(part == 1)
            losses = []
            for one in (reference, model):
                x = torch.randn(8, width, generator=torch.Generator().manual_seed(10 * step + part))
                loss = one(x).pow(2).mean()
                loss.backward()
                losses.append(loss.item())
            assert losses[0] == losses[1], (step, part, losses)

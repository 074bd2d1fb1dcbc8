"""Weights that are dequantized on gather, beside the same model without: losses, shards and gradients to the bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any
from unittest import mock

import product_modes
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import on
from models import counted, recipe_module
from storages import live_bytes
from test_fsdp2_options import WIDTH, Block, sharded, stepped
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

import layoutc
from layoutc.runtime.cast import gather_group
from layoutc.runtime.cast.precompute import precompute_amaxes
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.fsdp2 import hooks, on_gather
from layoutc.runtime.products.per_weight_mode import own_mode_holder
from layoutc.runtime.sharding import registry

ON_GATHER, LATER = "gather", "dequantize"
Found = list[Any]


def converted(model: Any, recipe: str, use: str, mode: Any) -> Any:
    (layoutc.cast_on_gather_ if use == "cast" else layoutc.quantize_)(model, recipe)
    product_modes.set_products_(model, mode)
    return model


def blocks(recipe: str, use: str, mode: Any) -> Any:
    torch.manual_seed(0)
    return converted(nn.Sequential(Block(), Block()), recipe, use, mode)


def optimizer_of(model: nn.Module) -> Any:
    return layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2)


def train(model: Any, optimizer: Any, *steps: int) -> Found:
    found = []
    for step in steps:
        found.append(stepped(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return found


def reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def stored(model: nn.Module) -> Found:
    """What this rank has of all parameters."""
    reshard(model)
    found: Found = []
    for param in model.parameters():
        held: Any = param._local_tensor  # type: ignore[attr-defined]
        planes = held.planes() if hasattr(held, "planes") else {"values": getattr(held, "plain", held).detach()}
        found += [plane.clone().view(torch.uint8) for plane in planes.values()]
    return found


def assert_alike(run: Callable[[Any], Found]) -> None:
    """run(mode): what is the same for both modes, to the bit."""
    expected, found = run(LATER), run(ON_GATHER)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


# ------------------------------------------------------------------------------------------------------------ choices
@pytest.mark.sample(1)
@pytest.mark.parametrize(("recipe", "use"), [("fp8_block", "quantized"), ("nvfp4", "quantized"), ("nvfp4", "cast")])
@on("two")
def test_choices_change_between_steps(recipe: str, use: str) -> None:
    """Some weights of a group leave its pack and come back, in between steps; others stay."""

    def run(mode: Any) -> Found:
        model = sharded(blocks(recipe, use, mode))
        optimizer = optimizer_of(model)
        found = train(model, optimizer, 0, 1)
        changes = [(LATER, ("down",)), (ON_GATHER, ("down",)), (LATER, ("0.up", "0.down"))]
        for step, (other, endings) in enumerate(changes):
            if mode == ON_GATHER:
                reshard(model)
                product_modes.set_products_(
                    model, other, filter_fn=lambda _, name, endings=endings: name.endswith(endings)
                )
            found += train(model, optimizer, 2 + step, 3 + step)
        return found + stored(model)

    assert_alike(run)


class Layers(nn.Module):
    """Linear layers in one group."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(k, m, bias=k < m) for k, m in pairwise(sizes)])

    def forward(self, x: Tensor) -> Tensor:
        """(n, k) -> (n, m)."""
        for layer in self.layers:
            x = F.gelu(layer(x)) + 0.01
        return x


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["recipes", "nvfp4 cast", "fp8_block quantized"])
@on("four")
def test_groups_of_mixed_weights_train_as_others(kind: str) -> None:
    """Rows that ranks cut inside of blocks, and whole blocks; ranks without rows; several recipes and modes."""

    def run(mode: Any) -> Found:
        torch.manual_seed(0)
        model = nn.Sequential(Layers([WIDTH, 288, 384, 512, 96, 1024, 128, WIDTH]))
        layers = model[0].layers

        def of(*places: int) -> Any:
            chosen = [layers[at] for at in places]
            return lambda module, _: any(module is one for one in chosen)

        if kind == "recipes":
            layoutc.quantize_(model, "fp8_block", filter_fn=of(2, 3, 5))
            layoutc.quantize_(model, "nvfp4", filter_fn=of(1))
            layoutc.cast_on_gather_(model, "nvfp4", filter_fn=of(0, 4, 6))
            product_modes.set_products_(model, "reference", filter_fn=of(3, 4))
            product_modes.set_products_(model, mode, filter_fn=of(0, 1, 2, 6))
        else:
            converted(model, *kind.split(), mode)
        fully_shard(model[0])
        fully_shard(model)
        return train(model, optimizer_of(model), 0, 1) + stored(model)

    assert_alike(run)


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_current"])
@on("two")
def test_a_group_is_quantized_once_though_some_weights_travel_early(recipe: str) -> None:
    """Weights that are cast on gather, with others in between whose codes stay."""
    torch.manual_seed(0)
    model = converted(Layers([WIDTH, 512, WIDTH, 512, WIDTH, 512]), recipe, "cast", ON_GATHER)
    product_modes.set_products_(model, LATER, filter_fn=lambda _, name: name.endswith(("1", "3")))
    fully_shard(model)
    with counted("send_alone", lambda shard, _: shard.weight_name, gather_group) as alone, torch.no_grad():
        for _ in range(2):
            model(torch.ones(8, WIDTH))
            reshard(model)
    assert alone == []


@pytest.mark.parametrize("use", ["quantized", "cast"])
@on("two")
def test_gathered_weights_are_known_as_quantized(use: str) -> None:
    """Of weights that are gathered as values: what tells of a model, or changes it, sees them or refuses."""
    model = sharded(blocks("nvfp4", use, ON_GATHER))
    told = [str(layoutc.coverage(model)), layoutc.explain_products(model), layoutc.check_ranks(model)]
    with torch.no_grad():
        model(torch.ones(8, WIDTH))
    reshard(model)
    model[0].unshard()
    assert own_mode_holder(model[0].up.weight) is None
    assert told == [str(layoutc.coverage(model)), layoutc.explain_products(model), layoutc.check_ranks(model)]
    assert len(product_modes.set_products_(model, ON_GATHER)) == 4
    for mode in ("reference", None):
        with pytest.raises(LayoutError, match=r"0\.up\.weight is gathered now: call reshard\(\)"):
            product_modes.set_products_(model, mode)
    with pytest.raises(LayoutError, match=r"0\.up\.weight of shape \(512, 256\) is gathered now: call reshard\(\)"):
        layoutc.merge_(model[0].up.weight, torch.zeros(2 * WIDTH, WIDTH))
    precompute_amaxes(model)
    model[0].reshard()
    for param in (one for one in model.parameters() if use == "cast" and one.dim() == 2):
        agreed: Any = own_mode_holder(param)._agreed
        assert agreed.ahead is not None
    handle = model[1].unshard(async_op=True)  # on its way
    with pytest.raises(LayoutError, match=r"1\.up\.weight is gathered now"):
        product_modes.set_products_(model, "reference", filter_fn=lambda _, name: name.startswith("1"))
    handle.wait()
    model[1].reshard()
    assert len(product_modes.set_products_(model, "reference")) == 4


# ------------------------------------------------------------------------------------------------------------- writes
@pytest.mark.parametrize(("recipe", "use"), [("fp8_block", "quantized"), ("nvfp4", "cast")])
@on("two")
def test_writes_that_the_next_gather_would_undo_are_refused(recipe: str, use: str) -> None:
    """In a pack, and alone; the next gather after the error is as if nothing had been written."""
    model = sharded(blocks(recipe, use, ON_GATHER))
    product_modes.set_products_(model, LATER, filter_fn=lambda _, name: name == "1.down")
    x = torch.ones(8, WIDTH)
    with torch.no_grad():
        expected = model(x)
        for name in ("0.down", "1.up"):
            block = model[int(name[0])]
            block.unshard()
            model.get_submodule(name).weight.mul_(2)  # type: ignore[operator, union-attr]
            block.reshard()
            with pytest.raises(LayoutError, match=rf"{name}\.weight .* was written while it was gathered"):
                model(x)
            reshard(model)
            assert torch.equal(model(x), expected)


def by_hand(recipe: str, use: str, seed: int = 0) -> Any:
    """Modules that no call of layoutc has made."""
    torch.manual_seed(seed)
    model, classes = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]), recipe_module(recipe)
    cast = next(one for name, one in vars(classes.tensor).items() if name.endswith("CastTensor"))
    for layer in model:
        values = layer.weight.detach()
        layer.weight = nn.Parameter(cast(values.clone()) if use == "cast" else classes.quantize(values))
    return model


@pytest.mark.sample(1)
@pytest.mark.parametrize(("recipe", "use"), [("fp8_block", "quantized"), ("nvfp4", "cast")])
@on("two")
def test_shards_in_place_of_others_are_gathered_as_those(recipe: str, use: str) -> None:
    """The shards that a state dict assigns to such modules have no choice of products."""

    def run(mode: Any) -> Found:
        model, other = by_hand(recipe, use), fully_shard(by_hand(recipe, use, 1))
        product_modes.set_products_(model, mode)
        fully_shard(model)
        found = train(model, optimizer_of(model), 0)
        for name in ("0.weight", "3.weight", "1.weight", "2.weight"):  # the first of the pack, and the last
            reshard(model)
            state = model.state_dict()
            model.load_state_dict(state | {name: other.state_dict()[name].clone()}, assign=True)
            found += train(model, optimizer_of(model), 1)
        reshard(model)
        assert len(product_modes.set_products_(model, "reference")) == 4
        return [*found, *train(model, optimizer_of(model), 2), *stored(model)]

    assert_alike(run)


@pytest.mark.parametrize("mode", [LATER, ON_GATHER])
@on("two")
def test_ranks_agree_on_who_sends_what_whatever_else_they_hold(mode: str) -> None:
    """One rank still has the shards that a state dict's aliases of the same values have replaced; the other has not."""
    model, reference = (fully_shard(by_hand("nvfp4", "cast")) for _ in range(2))
    product_modes.set_products_(model, mode)
    with torch.no_grad():
        model(torch.ones(8, WIDTH))
    reshard(model)
    kept = list(model.parameters()) if dist.get_rank() == 0 else []
    model.load_state_dict(model.state_dict(), assign=True)
    with torch.no_grad():
        for one in (model, reference):
            for param in one.parameters():
                param.mul_(0.7)
        assert torch.equal(model(torch.ones(8, WIDTH)), reference(torch.ones(8, WIDTH)))
    assert len(kept) == (0 if dist.get_rank() else len(list(model.parameters())))


# ----------------------------------------------------------------------------------------------------------- lifetimes
@pytest.mark.sample(1)
@pytest.mark.parametrize("use", ["quantized", "cast"])
@on("two")
def test_a_deleted_model_leaves_nothing(use: str) -> None:
    """Values, plans and blocks of a model that is deleted while some of it is gathered; also while its shards live."""

    def trained() -> tuple[Any, list[weakref.ref[Any]], list[weakref.ref[Any]]]:
        model = sharded(blocks("nvfp4", use, ON_GATHER))
        optimizer = optimizer_of(model)
        train(model, optimizer, 0, 1)
        groups: list[Any] = [registry.find(own_mode_holder(block.up.weight)).group() for block in model]  # type: ignore[union-attr]
        plans = [plan for group in groups for plan in group._plans.values() if plan is not None]
        assert [len(plan.of_values) for plan in plans] == [2] * len(groups)
        values = [one.values for one in hooks._gathered.values() if one.values is not None]
        assert len(values) == 4
        model[0].unshard()
        return optimizer, [weakref.ref(one) for one in (*values, *model)], [weakref.ref(one) for one in plans]

    def alive(left: list[weakref.ref[Any]]) -> list[type]:
        gc.collect()
        return [type(one()) for one in left if one() is not None]

    gc.collect()
    before = live_bytes()
    for _ in range(2):
        optimizer, left, packs = trained()
        assert alive(left) == []
        del optimizer
        assert alive(packs) == []
    assert live_bytes(before) <= before + 4096


class Lost(Exception):
    """What goes wrong in the middle of a gather."""


@on("two")
def test_a_model_whose_gather_has_failed_can_be_deleted() -> None:
    """Some of a group's weights have arrived, the next one has not: their cuts go through blocks, so none is packed."""
    torch.manual_seed(0)
    model = fully_shard(converted(Layers([WIDTH, 384, WIDTH, 384]), "fp8_block", "quantized", ON_GATHER))
    made = hooks.new_values

    def fails(sharding: Any, *args: Any) -> Tensor:
        if sharding.name == "layers.2.weight":
            raise Lost
        return made(sharding, *args)

    hooks.new_values = fails
    try:
        with pytest.raises(Lost):
            model(torch.ones(8, WIDTH))
    finally:
        hooks.new_values = made
    left = [weakref.ref(one) for one in model.modules()]
    del model
    gc.collect()
    assert [one() for one in left if one() is not None] == []


@pytest.mark.parametrize(("recipe", "world"), [("fp8_current", 2), ("fp8_current", 1), ("nvfp4", 2)])
@on("two")
def test_planes_that_values_are_read_from_stay_until_the_next_gather(recipe: str, world: int) -> None:
    """All memory that values were made of is there until the weight is gathered again: a card may still read it."""
    model = blocks(recipe, "cast", ON_GATHER)
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    mesh = DeviceMesh.from_group(group if world == 1 else dist.group.WORLD, "cpu")
    for block in model:
        fully_shard(block, mesh=mesh)
    read: list[StorageWeakRef] = []
    dequantize = on_gather.dequantize_all

    def noting(arrivals: Sequence[on_gather.Arrival]) -> Any:
        read.extend(StorageWeakRef(plane.untyped_storage()) for one in arrivals for plane in one.planes.values())
        return dequantize(arrivals)

    with mock.patch.object(on_gather, "dequantize_all", noting), torch.no_grad():
        model(torch.ones(8, WIDTH))
        gc.collect()
        assert read
        assert not any(memory.expired() for memory in read)

"""check_ranks: models that are alike pass, and what one rank has otherwise is named on all of them."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import Ranks, mesh_of, on
from models import RECIPES, Model, adam, build, counted, local, my_share, shard, train_step, width_for
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import layoutc
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.quantize.amax import reduce_max
from layoutc.runtime.sharding import cards, registry
from layoutc.runtime.torch_private import store_of_all
from layoutc.runtime.weight.tensor import QuantizedTensor

check_module = import_module("layoutc.runtime.train.check_ranks")  # the package has the function by that name


def options_for(meshed: str | None) -> tuple[dict[str, Any], int]:
    """Options of fully_shard, and over how many ranks it shards."""
    world = dist.get_world_size()
    if meshed is None:
        return {}, world
    mesh = mesh_of(2, world // 2, names=("copies", "slices"))
    return {"mesh": mesh}, world // 2


def agrees(recipe: str, meshed: str | None) -> None:
    """Before training and after a step, sharded and gathered, quantized and cast, with two collectives a time."""
    options, ranks = options_for(meshed)
    width = width_for(recipe, ranks)
    quantized = shard(build(recipe, width, width + 32 if recipe == "mxfp8" and ranks == 4 else None), **options)
    torch.manual_seed(0)
    cast = Model(width)
    layoutc.cast_on_gather_(cast, recipe)
    shard(cast, **options)
    trained: tuple[tuple[Model, Any], ...] = (
        (quantized, adam(quantized)),
        (cast, torch.optim.AdamW(cast.parameters(), lr=1e-2, fused=True)),
    )
    for model, optimizer in trained:
        for step in range(2):
            with counted("all_gather_object", lambda *_: 1) as gathered:
                assert layoutc.check_ranks(model) == 5
            assert len(gathered) == 1
            if step == 0:
                train_step(model, optimizer, step, width, my_share())
        with torch.no_grad():
            model(torch.zeros(2, width))
        assert isinstance(model.head.weight, QuantizedTensor), "the root stays gathered"
        assert layoutc.check_ranks(model) == 5


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", RECIPES)
def test_trained_models_agree(four: Ranks, recipe: str) -> None:
    """Over four ranks, or in two copies over two: mxfp8, whose blocks are then cut, over four."""
    four.run(agrees, recipe, None if recipe in ("fp8_delayed", "mxfp8") else "hybrid")


def said(model: nn.Module) -> str:
    """What check_ranks raises; afterwards the group works."""
    try:
        layoutc.check_ranks(model)
    except LayoutError as error:
        dist.barrier()
        return str(error)
    return "nothing was raised"


def perturbs(change: str, meshed: str | None) -> str:
    """One rank, the last, has something else than the others."""
    last = dist.get_rank() == dist.get_world_size() - 1
    recipe = {"amax": "nvfp4", "history": "fp8_delayed", "cast amax": "fp8_current"}.get(change, "mxfp8")
    options, ranks = options_for(meshed)
    width, inner = width_for(recipe, ranks), None
    if change == "cut block":
        width, inner = 64, 96
    if last and change == "recipe":
        recipe = "mxfp8_2d"
    if last and change == "shape":
        inner = 2 * width
    torch.manual_seed(0)
    model = Model(width, inner)
    if change == "one more":
        model.register_parameter("more", nn.Parameter(torch.ones(8)) if last else None)
    if change == "order" and last:
        model._modules["layers"] = model._modules.pop("layers")
    (layoutc.cast_on_gather_ if change == "cast amax" else layoutc.quantize_)(model, recipe)
    if last and change == "orientation":
        weight = model.layers[0].weight
        for plane in ("columnwise_data", "columnwise_scale"):
            del weight.store.planes[plane]
    if change == "dtype" and last:
        model.layers[0].bias = nn.Parameter(model.layers[0].bias.to(torch.bfloat16))
    shard(model, **options)
    if change == "cast amax":
        layoutc.precompute_amaxes(model)
        if last:
            model.layers[0].weight._local_tensor._agreed.amax += 1  # type: ignore[union-attr, operator]
    for change_of, plane in (("amax", "amax"), ("history", "amax"), ("replica", "rowwise_data")):
        if last and change == change_of:
            local(model.layers[0].weight).store.planes[plane].view(torch.uint8).flatten()[-1] ^= 1
    if last and change == "group":
        local(model.layers[0].weight).fused = (0, "layers.[0, 1].weight", 2)
    if last and change == "cut block":
        local(model.layers[0].weight).store.planes["columnwise_scale"][0, 0] ^= 1
    return said(model)


@pytest.mark.parametrize(
    ("change", "meshed", "expected"),
    [
        ("recipe", None, ["layers.0.weight: recipe: mxfp8, layout", "mxfp8_2d, layout", "on rank 1"]),
        ("shape", None, ["layers.0.weight: shape: (64, 64) on rank 0; (128, 64) on rank 1"]),
        ("orientation", None, ["layers.0.weight: orientations: rowwise+columnwise on rank 0; rowwise on rank 1"]),
        ("dtype", None, ["layers.0.bias: dtype: torch.float32 on rank 0; torch.bfloat16 on rank 1"]),
        ("one more", None, ["more: only on rank 1, of the ranks that share it: shape (8,)"]),
        ("order", None, ["the order of parameters: parameter 0: layers.0.weight on rank 0; head.weight on rank 1"]),
        ("amax", None, ["layers.0.weight: amax: ", "on rank 0", "on rank 1"]),
        ("history", None, ["layers.0.weight: amax: ", "on rank 0", "on rank 1"]),
        ("cast amax", None, ["layers.0.weight: amax: ", "on rank 0", "on rank 1"]),
        ("group", None, ["weights under one amax: itself on rank 0; layers.[0, 1].weight on rank 1"]),
        ("cut block", None, ["layers.0.weight: columnwise_scale of rows 32 to 64: ", "on rank 0", "on rank 1"]),
        ("replica", "hybrid", ["layers.0.weight: bytes of rowwise_data: ", "on rank 1; ", "on rank 3"]),
        ("recipe", "hybrid", ["layers.0.weight: recipe: mxfp8, layout", "on ranks 0, 1, 2; mxfp8_2d", "on rank 3"]),
    ],
)
def test_what_differs_is_named_on_all_ranks(
    two: Ranks, four: Ranks, change: str, meshed: str | None, expected: list[str]
) -> None:
    messages = (four if meshed else two).run(perturbs, change, meshed)
    assert len(set(messages)) == 1
    for words in expected:
        assert words in messages[0], messages[0]
    assert messages[0].count("the order of parameters") <= 1, "the others only follow from the first"


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_delayed"])
@on("four")
def test_shards_in_two_dims_agree(recipe: str) -> None:
    """Tensor parallelism under fully_shard: amaxes are shared over both dims, or over the columns' own ranks."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    layoutc.quantize_(model, recipe)
    fully_shard(model, mesh=mesh["dp"])
    assert layoutc.check_ranks(model) == 2
    if dist.get_rank() == 3:
        param = model[1].weight
        assert isinstance(param, DTensor)
        planes = local(param).store.planes
        name = next(name for name in planes if name in local(param).LAYOUT.shared)
        planes[name].view(torch.uint8).flatten()[-1] ^= 1
    message = said(model)
    assert "1.weight: " in message, message
    assert "0.weight" not in message


@on("two")
def test_models_without_shards_agree() -> None:
    """A quantized model under DDP, or before it is sharded: there is nothing to compare, and nothing fails."""
    model = torch.nn.Linear(32, 32)
    layoutc.quantize_(model, "mxfp8")
    assert layoutc.check_ranks(model) == 0


def test_one_process_agrees_with_itself() -> None:
    assert layoutc.check_ranks(build("mxfp8", 64)) == 0


@on("two")
def test_what_is_reduced_keeps_what_this_rank_found() -> None:
    mine = torch.tensor([1.0 + dist.get_rank(), 3.0 - dist.get_rank()])
    given = mine.clone()
    found = reduce_max(given, dist.group.WORLD)
    assert found.tolist() == [2.0, 3.0]
    assert torch.equal(given, mine)


def on_cards(names: list[str]) -> str:
    """What check_ranks, and the first gather, say over cards of these names: the same on all ranks."""
    rank, said = dist.get_rank(), []
    model = shard(build("mxfp8", 64))
    quantized: Any = next(one for one in map(local, model.parameters()) if isinstance(one, QuantizedTensor))
    with (
        mock.patch.object(cards, "over_nccl", return_value=True),
        mock.patch.object(check_module, "current_card", return_value=0),
        mock.patch.object(cards, "card_of", return_value=("host", names[rank], 0)),
        mock.patch.object(cards, "_checked", set()),
        mock.patch.object(cards, "store_of_all", return_value=dist.PrefixStore(" ".join(names), store_of_all())),
    ):
        sharding = registry.find(quantized)
        assert sharding is not None
        group: Any = sharding.process_group
        for check in (lambda: layoutc.check_ranks(model), lambda: cards.check_together(group, torch.device("cuda", 0))):
            try:
                check()
                said.append("")
            except LayoutError as error:
                said.append(str(error))
    assert said[0] == said[1]
    return said[0]


def test_ranks_that_share_a_card_are_named_before_nccl(two: Ranks) -> None:
    """By check_ranks and by the first gather, on both ranks, with the line to write."""
    assert two.run(on_cards, ["one", "other"]) == ["", ""]
    first = two.told(on_cards, ["one", "one"])
    assert "ranks 0, 1 have card 0 of host" in first
    assert 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))' in first


def test_a_shard_on_a_card_that_is_not_the_current_one_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "current_card", lambda: 0)
    monkeypatch.setattr(cards, "_warned", set())
    for device in ("cpu", "cuda:0"):
        cards.warn_if_elsewhere("w", torch.device(device))
    with pytest.warns(RuntimeWarning, match=r"w is on cuda:1, but the current device is cuda:0.*set_device"):
        cards.warn_if_elsewhere("w", torch.device("cuda:1"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cards.warn_if_elsewhere("w", torch.device("cuda:1"))

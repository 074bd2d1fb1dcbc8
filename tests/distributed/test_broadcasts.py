"""Rank 0 has a full quantized state dict, the other ranks plain buffers for it: all end with its bytes."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks, mesh_of, on
from models import assert_same_tensors, raw, recipe_module
from test_cut_weights import Weights, assert_same, assert_same_shard, params, shapes, values, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import layoutc
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.weight.tensor import QuantizedTensor

BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def assert_gathers(model: Any, expected: list[QuantizedTensor]) -> None:
    """What FSDP2's hooks gather are the bytes."""
    model.unshard()
    for param, one in zip(model.parameters(), expected, strict=True):
        assert_same_tensors(param.data.planes(), one.planes())
    model.reshard()


# Each with a scale, or an amax, that all rows share, and with blocks that cuts go through or elements across bytes.
HOW = {
    "hsdp": ("mxfp8", "fp8_delayed"),
    "sharded": ("fp8_current", "mxfp6_e2m3", "fp8_rowwise"),
    "meta": ("nvfp4", "fp8_block"),
    "unsharded": ("nvfp4", "fp8_block_1d"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("recipe", "how"), [(recipe, how) for how, recipes in HOW.items() for recipe in recipes])
@on("four")
def test_a_full_state_dict_on_the_first_rank_loads_byte_for_byte(recipe: str, how: str) -> None:
    """torch's own, into a model that is sharded, replicated, or not made real yet."""
    world = dist.get_world_size()
    given = shapes(recipe, world)
    mesh = mesh_of(2, 2, names=("replicate", "shard")) if how == "hsdp" else mesh_of(world)
    expected = whole(recipe, given, 0)
    state = {f"{number}.weight": one for number, one in enumerate(expected)} if dist.get_rank() == 0 else {}
    reference = Weights(recipe, given, 0)
    with torch.device("meta" if how == "meta" else "cpu"):
        model = Weights(recipe, given, 50)
    if how == "meta":
        model = model.to("meta")
    if how != "unsharded":
        for one in (model, reference):
            fully_shard(one, mesh=mesh)
    with layoutc.strict():
        set_model_state_dict(model, state, options=BROADCAST)
    for param, source, one in zip(model.parameters(), reference.parameters(), expected, strict=True):
        if how == "unsharded":
            assert_same(param.data, one)
            continue
        assert isinstance(param, DTensor)
        assert isinstance(source, DTensor)
        assert_same_shard(param._local_tensor, source._local_tensor)
        assert_same(param.full_tensor().data, one)
    if how != "unsharded":
        assert_gathers(model, expected)


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current"])
@on("two")
def test_a_plain_model_gets_values(recipe: str) -> None:
    """All ranks get the values, in the precision in which they came, also those that the first rank has by itself."""
    given = shapes(recipe, dist.get_world_size())
    model = nn.ParameterList([torch.zeros(shape) for shape in given])
    fully_shard(model, mesh=mesh_of(dist.get_world_size()))
    expected = whole(recipe, given, 0)
    state = {str(number): one for number, one in enumerate(expected)} if dist.get_rank() == 0 else {}
    set_model_state_dict(model, state, options=BROADCAST)
    for param, one in zip(params(model), expected, strict=True):
        assert torch.equal(param.full_tensor(), one.dequantize().float())


def loads_as_accelerate_does(recipe: str) -> None:
    """Its own code: the model goes to meta, is sharded, and rank 0 sends what it was."""
    accelerate = importlib.import_module("accelerate.utils.fsdp_utils")
    given, rank = shapes(recipe, dist.get_world_size()), dist.get_rank()
    model, expected = Weights(recipe, given, 0 if rank == 0 else 50), whole(recipe, given, 0)
    before = model.state_dict()
    model = model.to("meta")
    fully_shard(model, mesh=mesh_of(dist.get_world_size()))

    class Accelerator:
        is_main_process = rank == 0

    accelerate.fsdp2_load_full_state_dict(Accelerator(), model, before)
    reference = Weights(recipe, given, 0)
    fully_shard(reference, mesh=mesh_of(dist.get_world_size()))
    for param, source, one in zip(params(model), params(reference), expected, strict=True):
        assert_same_shard(param._local_tensor, source._local_tensor)
        assert_same(param.full_tensor().data, one)
    assert_gathers(model, expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["fp8_block", "nvfp4", "mxfp6_e2m3"])
def test_accelerates_loading_from_one_rank_keeps_bytes(two: Ranks, recipe: str) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate: pip install 'layoutc[integrations]'")
    two.run(loads_as_accelerate_does, recipe)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "names"),
    [("fp8_delayed", "alike"), ("mxfp8", "alike"), ("nvfp4", "none"), ("fp8_block", "other"), ("mxfp6_e2m3", "other")],
)
@on("two")
def test_a_state_dict_that_is_broadcast_by_hand_keeps_bytes(recipe: str, names: str) -> None:
    """What a recipe's quantize() returns has no name; a wrapper of a model changes all of them. Each tensor of rank 0
    is broadcast and cut, and the parts are assigned to a model on the meta device. PyTorch tests this with threads
    for ranks (test_rank0_broadcast_meta_device_init), whose group calls no operators."""
    given, rank = shapes(recipe, dist.get_world_size()), dist.get_rank()
    mesh, expected = mesh_of(dist.get_world_size()), whole(recipe, given, 0)
    with torch.device("meta"):
        model = Weights(recipe, given, 50)
    model = model.to("meta")
    fully_shard(model, mesh=mesh)
    sharded = {}
    state: dict[str, Any] = Weights(recipe, given, 0).state_dict() if rank == 0 else {}
    if names != "alike":
        state = dict(zip(state, whole(recipe, given, 0), strict=False))
    for number, (name, param) in enumerate(model.state_dict().items()):
        full = state[name].detach() if rank == 0 else torch.empty(param.shape, dtype=param.dtype)
        if rank == 0 and names == "other":
            full.weight_name = f"model.{-number}.weight"  # as below a wrapper, and some are names of others
        dist.broadcast(full, 0, group=mesh.get_group(0))
        sharded[name] = nn.Parameter(distribute_tensor(full, mesh, param.placements))
    model.load_state_dict(sharded, assign=True)
    reference = Weights(recipe, given, 0)
    fully_shard(reference, mesh=mesh)
    for param, source, one in zip(params(model), params(reference), expected, strict=True):
        assert_same_shard(param._local_tensor, source._local_tensor)
        assert_same(param.full_tensor().data, one)
    assert_gathers(model, expected)


def broadcasts(recipe: str) -> str:
    """To a plain buffer, its values; among quantized ones, which would not get its bytes, nothing."""
    one, rank = whole(recipe, [(256, 256)], 0)[0], dist.get_rank()
    buffer: Any = one if rank == 0 else torch.empty(one.shape, dtype=one.dtype)
    dist.broadcast(buffer, 0)
    if rank:
        assert torch.equal(buffer, one.dequantize())
    other = one if rank == 0 else one.clone()
    said = "sent"
    try:
        dist.broadcast(other, 0)
    except LayoutError as error:
        said = str(error)
    mesh = mesh_of(dist.get_world_size())
    fresh = whole(recipe, [(256, 256)], rank)[0]
    assert_same(distribute_tensor(fresh, mesh, [Replicate()]).to_local(), one)
    sharded = distribute_tensor(fresh, mesh, [Shard(0)])
    assert torch.equal(raw(sharded.full_tensor().dequantize()), raw(one.dequantize()))
    return said


@pytest.mark.sample(1)
@pytest.mark.parametrize(("recipe", "world"), [("mxfp8", 2), ("nvfp4", 4)])
def test_a_plain_buffer_gets_values_and_quantized_ones_say_what_to_write(
    two: Ranks, four: Ranks, recipe: str, world: int
) -> None:
    """The rank that sends says it, too."""
    said = (two if world == 2 else four).run(broadcasts, recipe)
    assert len(set(said)) == 1, said
    assert "call distribute_tensor(weight, mesh, [Replicate()]) on all ranks" in said[0]


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_block", "fp8_delayed"])
@on("two")
def test_values_that_are_assigned_are_quantized(recipe: str) -> None:
    """Plain values that a state dict assigns are quantized, whether the weight is sharded or not."""
    module = recipe_module(recipe)
    x = values((256, 256), 3)
    linear = nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)
    layoutc.quantize_(linear, recipe)
    linear.load_state_dict({"weight": x}, assign=True)
    assert_same(linear.weight.data, module.quantize(x))
    model = nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)
    layoutc.quantize_(model, recipe)
    mesh = mesh_of(dist.get_world_size())
    fully_shard(model, mesh=mesh)
    model.load_state_dict({"weight": distribute_tensor(x, mesh, [Shard(0)])}, assign=True)
    assert_same(params(model)[0].full_tensor().data, module.quantize(x))
    assert_gathers(model, [module.quantize(x)])

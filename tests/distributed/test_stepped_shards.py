"""What MasterWeights hands to the optimizer inside: shards of masters, where it works element by element."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from harness import Ranks, on
from models import raw
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import layoutc

OPTIMIZERS = {
    "Adadelta": {"lr": 0.5},
    "Adagrad": {"initial_accumulator_value": 0.25},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "Adamax": {},
    "ASGD": {"t0": 1.0},
    "NAdam": {"decoupled_weight_decay": True},
    "RAdam": {"foreach": True},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}


class Larger(torch.optim.AdamW):
    """A class that somebody derived: what its steps look at is not known."""


def model_of(recipe: str, rows: int = 96) -> nn.Sequential:
    """A quantized weight, and plain parameters in bf16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, rows, dtype=torch.bfloat16), nn.RMSNorm(rows, dtype=torch.bfloat16))
    layoutc.quantize_(model, recipe)
    return model


def give_gradients(params: list[Any], seed: int) -> None:
    """Gradients that are the same for a whole parameter and for its shards."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        cut = isinstance(param, DTensor)
        param.grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None) if cut else grad


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def same(one: Any, other: Any) -> bool:
    one, other = whole(one), whole(other)
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def steps_as_one_process(kind: str, recipe: str, rows: int = 96) -> None:
    """Masters, what users see of the state, and codes equal those of whole parameters; also of a state that was loaded,
    and of copies."""
    make = getattr(torch.optim, kind)
    alone, sharded = model_of(recipe, rows), model_of(recipe, rows)
    fully_shard(sharded)
    models = alone, sharded
    optimizers: list[Any] = [layoutc.MasterWeights(make, list(one.parameters()), **OPTIMIZERS[kind]) for one in models]

    def step(seed: int) -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            give_gradients(list(model.parameters()), seed)
            optimizer.step()

    def check() -> None:
        for (param, expected), (shard, found) in zip(*(list(o.state.items()) for o in optimizers), strict=True):
            assert type(found["master"]) is DTensor
            assert {*expected} == {*found}
            for name, value in expected.items():
                assert same(value, found[name]), (kind, name)
                if value.shape == param.shape:
                    assert found[name].placements == shard.placements
            assert same(whole(shard).dequantize(), param.dequantize()), kind

    for seed in range(3):
        step(seed)
        check()
    inner = [one for group in optimizers[1].inner.param_groups for one in group["params"]]
    assert not any(isinstance(one, DTensor) for one in inner)
    assert all(one.grad is None for one in inner)

    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    step(3)
    for number, (model, state) in enumerate(zip(models, saved, strict=True)):
        optimizers[number] = layoutc.MasterWeights(make, list(model.parameters()), **OPTIMIZERS[kind])
        optimizers[number].load_state_dict(state)
    step(4)
    check()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_shards_are_stepped_as_whole_parameters_are(two: Ranks, kind: str) -> None:
    two.run(steps_as_one_process, kind, "mxfp8")


def test_shards_may_have_unequal_sizes(four: Ranks) -> None:
    # 23, 23, 23 and 21 rows. Not fused: on a CPU that rounds the last elements of a tensor otherwise.
    four.run(steps_as_one_process, "Adam", "fp8_current", 90)


@on("two")
def test_copies_step_their_own_masters() -> None:
    """A copy steps its own masters, with its own state, and the original stays."""
    model = model_of("fp8_block")
    fully_shard(model)
    optimizer: Any = layoutc.MasterWeights(torch.optim.AdamW, list(model.parameters()), lr=0.01)
    give_gradients(list(model.parameters()), 0)
    optimizer.step()
    before = [one.full_tensor().clone() for one in optimizer.masters().values()]
    other: Any = copy.deepcopy(optimizer)
    params = [param for group in other.param_groups for param in group["params"]]
    give_gradients(params, 1)
    other.step()
    assert all(map(torch.equal, before, [one.full_tensor() for one in optimizer.masters().values()]))
    give_gradients(list(model.parameters()), 1)
    optimizer.step()
    found = zip(optimizer.masters().values(), other.masters().values(), params, strict=True)
    for expected, master, param in found:
        assert same(expected, master)
        assert other.state[param]["master"]._local_tensor.data_ptr() == master._local_tensor.data_ptr()
        stepped = other.inner.state[other._masters[param]._local_tensor]["exp_avg"]
        assert other.state[param]["exp_avg"]._local_tensor.data_ptr() == stepped.data_ptr()


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
@on("two")
def test_an_outer_optimizer_steps_masters_of_shards(recipe: str) -> None:
    """An outer optimizer's step on masters: weights have the bytes that one process writes, also where a cut splits
    blocks, and go on from there."""
    planes = []
    for world in (1, 2):
        model = model_of(recipe)
        if world == 2:
            fully_shard(model)
        params = list(model.parameters())
        optimizer = layoutc.MasterWeights(torch.optim.AdamW, params, lr=0.01)
        outer = torch.optim.SGD(list(optimizer.masters().values()), lr=0.7, momentum=0.9, nesterov=True)
        before = [master.clone() for master in optimizer.masters().values()]
        for step in range(2):
            give_gradients(params, step)
            optimizer.step()
        with torch.no_grad():
            for master, start in zip(optimizer.masters().values(), before, strict=True):
                master.grad = start - master
                master.copy_(start)
        outer.step()
        optimizer.write_back()
        give_gradients(params, 2)
        optimizer.step()
        planes.append([raw(plane) for plane in whole(params[0].detach()).planes().values()])
    assert all(map(torch.equal, *planes))


@on("two")
def test_classes_of_others_get_masters() -> None:
    """A class that torch does not have gets DTensors, as it would of a plain model."""
    model = model_of("mxfp8")
    fully_shard(model)
    optimizer: Any = layoutc.MasterWeights(Larger, list(model.parameters()), lr=0.01)
    give_gradients(list(model.parameters()), 0)
    optimizer.step()
    assert all(isinstance(one, DTensor) for group in optimizer.inner.param_groups for one in group["params"])
    assert all(isinstance(value["exp_avg"], DTensor) for value in optimizer.state.values())


@on("four")
def test_weights_of_several_meshes_are_stepped_together() -> None:
    """Weights of two meshes, of which DTensor's fused AdamW refuses to step one beside the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(0)
    plain = [nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(2)]
    layoutc.quantize_(nn.ModuleList(plain), "mxfp8")
    layers = copy.deepcopy(plain)
    expected: Any = layoutc.MasterWeights(torch.optim.AdamW, [one.weight for one in plain], lr=0.01, fused=True)
    fully_shard(layers[0], mesh=mesh["shards"])
    fully_shard(layers[1], mesh=mesh)
    params = [one.weight for one in layers]
    optimizer: Any = layoutc.MasterWeights(torch.optim.AdamW, params, lr=0.01, fused=True)
    for one, of in ((expected, [one.weight for one in plain]), (optimizer, params)):
        give_gradients(list(of), 1)
        one.step()
    for one, other in zip(expected.masters().values(), optimizer.masters().values(), strict=True):
        assert same(one, other)


@on("two")
def test_gradients_are_cut_as_masters() -> None:
    """Gradients come to masters as they are cut: replicated, or with other rows on a rank."""
    model = model_of("mxfp8")
    fully_shard(model)
    params: list[Any] = list(model.parameters())
    optimizers: list[Any] = []
    for placements in ([Shard(0)], [Replicate()]):
        mine: Any = copy.deepcopy(params)
        optimizers.append(layoutc.MasterWeights(torch.optim.SGD, mine, lr=0.5))
        give_gradients(mine, 0)
        for param in mine:
            param.grad = param.grad.redistribute(param.device_mesh, placements)
        optimizers[-1].step()
    for one, other in zip(*(optimizer.masters().values() for optimizer in optimizers), strict=True):
        assert same(one, other)


@on("two")
def test_autograd_knows_what_was_stepped() -> None:
    """A parameter in fp32 is its own master: autograd must still know that a step has written it."""
    layer = nn.Linear(8, 8, bias=False)
    fully_shard(layer)
    weight: Any = layer.weight
    optimizer = layoutc.MasterWeights(torch.optim.SGD, [weight], lr=0.5)
    give_gradients([weight], 0)
    before, version = weight.full_tensor().clone(), weight._version
    product = (weight * weight).sum()
    optimizer.step()
    assert weight._version > version
    assert not torch.equal(weight.full_tensor(), before)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def edited_states(kind: str) -> list[str]:
    """States that are set or deleted go on as those of whole parameters; what is refused of plain tensors."""
    alone, sharded = model_of("fp8_block", 256), model_of("fp8_block", 256)
    fully_shard(sharded)
    makes: dict[str, Any] = {
        "masters": lambda params: layoutc.MasterWeights(torch.optim.AdamW, params, lr=0.01),
        "by rule": lambda params: layoutc.AdamW(params, lr=0.01, state="8bit", least=0),
    }
    models, optimizers = (alone, sharded), [makes[kind](list(one.parameters())) for one in (alone, sharded)]
    for seed in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            params: list[Any] = list(model.parameters())
            if seed == 1:
                optimizer.state[params[0]]["exp_avg"] = torch.zeros_like(optimizer.masters()[params[0]])
                optimizer.state[params[1]]["master"] = torch.ones_like(optimizer.masters()[params[1]])
            elif seed == 2:
                optimizer.param_groups[0]["params"].reverse()
            elif seed == 3:
                optimizer.state.clear()
            give_gradients(params, seed)
            optimizer.step()
        for param, shard in zip(*(one.parameters() for one in models), strict=True):
            for name, value in optimizers[0].state[param].items():
                found = whole(optimizers[1].state[shard][name])
                plain = [one.dequantize() if hasattr(one, "dequantize") else one for one in (value, found)]
                assert torch.equal(*plain), (kind, seed, name)
    weight: Any = sharded[0].weight
    optimizers[1].state[weight]["exp_avg"] = torch.zeros(weight.shape)
    try:
        optimizers[1].step()
    except ValueError as error:
        return [str(error)]
    return []


@pytest.mark.parametrize("kind", ["masters", "by rule"])
def test_states_of_shards_are_edited(two: Ranks, kind: str) -> None:
    for said in two.run(edited_states, kind):
        assert "has Tensor exp_avg of shape (256, 64) in torch.float32 for 0.weight of shape (256, 64)" in said[0]


def updated(recipe: str, kind: str) -> list[str]:
    """Weights that are decayed, clipped and put back after steps; what is refused of a state of another shape."""
    alone, sharded = model_of(recipe), model_of(recipe)
    fully_shard(sharded)
    makes: dict[str, Any] = {"masters": partial(layoutc.MasterWeights, torch.optim.AdamW), "by rule": layoutc.AdamW}
    models, optimizers = (alone, sharded), [makes[kind](list(one.parameters()), lr=0.01) for one in (alone, sharded)]
    for seed in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            params: list[Any] = list(model.parameters())
            give_gradients(params, seed)
            optimizer.step()
            with torch.no_grad():
                kept = [param.detach().clone() for param in params]
                torch._foreach_add_(params, [0.125 * param.grad for param in params])
                for param, old in zip(params, kept, strict=True):
                    param.copy_(old)
                    param.mul_(0.999).clamp_(-0.1, 0.1)
    for one, other in zip(*(optimizer.masters().values() for optimizer in optimizers), strict=True):
        assert torch.equal(one, whole(other))
    states, said = optimizers[1].state_dict(), list[str]()
    for value in (
        torch.zeros(96, 64),
        distribute_tensor(torch.zeros(64, 96), init_device_mesh("cpu", (2,)), [Shard(0)]),
    ):
        states["state"][0] = {**states["state"][0], "exp_avg": value}
        try:
            optimizers[1].load_state_dict(states)
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(("recipe", "kind"), [("nvfp4", "masters"), ("mxfp8", "by rule")])
def test_shards_are_updated_in_place_as_whole_weights(two: Ranks, recipe: str, kind: str) -> None:
    for plain, transposed in two.run(updated, recipe, kind):
        assert "has Tensor exp_avg of shape (96, 64) in torch.float32" in plain
        assert "set a DTensor as torch.zeros_like" in plain
        assert "has DTensor exp_avg of shape (64, 96)" in transposed

"""Collectives that are called by hand on weights: arithmetic in place is done, what would be lost is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks, on
from models import make_uneven
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import layoutc
from layoutc.runtime.errors import LayoutError, UnsupportedOperator

RECIPES = ["fp8_block", "mxfp8", "nvfp4"]


def model_of(recipe: str, use: str, seed: int = 0) -> nn.Sequential:
    """Two layers in bf16. use: quantized or cast."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(128, 256, bias=False), nn.Tanh(), nn.Linear(256, 128, bias=False))
    make_uneven(model.bfloat16())
    (layoutc.quantize_ if use == "quantized" else layoutc.cast_on_gather_)(model, recipe)
    return model


def values_of(weight: Any) -> Tensor:
    """What it stores, as values."""
    return (weight.plain if hasattr(weight, "plain") else weight.dequantize()).detach().clone()


def gathered(tensor: Tensor) -> list[Tensor]:
    """Of all ranks."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("recipe", "use", "how"),
    [
        ("fp8_block", "quantized", "sync"),
        ("nvfp4", "quantized", "average_parameters"),
        ("mxfp8", "cast", "async"),
        ("mxfp8", "quantized", "async"),
        ("nvfp4", "cast", "sync"),
        ("fp8_block", "cast", "average_parameters"),
    ],
)
@on("two")
def test_models_are_averaged_alike_on_all_ranks(recipe: str, use: str, how: str) -> None:
    """As local SGD and its like do; a result that is thrown away would leave each rank its own model. The sum of the
    values of all ranks, quantized; the same on all of them."""
    model = model_of(recipe, use, seed=dist.get_rank())
    every = [gathered(values_of(param)) for param in model.parameters()]
    if how == "average_parameters":
        average_parameters(model.parameters(), dist.group.WORLD)
    for param, others in zip(model.parameters(), every, strict=True):
        total = others[0] + others[1]
        if how == "average_parameters":
            total = others[0] / 2 + others[1] / 2
        elif how == "async":
            work: Any = dist.all_reduce(param.data, async_op=True)
            work.wait()
        else:
            dist.all_reduce(param.data)
        expected: Any = total
        if use == "quantized":
            expected = param.detach().clone()
            expected.copy_(total)
        assert torch.equal(values_of(param), values_of(expected) if use == "quantized" else total)
        assert all(torch.equal(one, values_of(param)) for one in gathered(values_of(param)))


@pytest.mark.parametrize("recipe", RECIPES)
@on("two")
def test_an_amax_that_was_agreed_is_forgotten(recipe: str) -> None:
    """A scale of the old values would clip or starve the new ones. After values were cast and gathered, other values of
    the same shards, whose amax is another."""
    model: Any = model_of(recipe, "cast")
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    x = torch.ones(2, 128, dtype=torch.bfloat16)
    layoutc.precompute_amaxes(model)
    before = model(x)
    for param in model.parameters():
        dist.all_reduce(param.to_local().data)  # of two shards, so that both become other rows
    whole = [param.full_tensor().detach() for param in model.parameters()]
    alone = model_of(recipe, "cast")
    with torch.no_grad():
        for param, value in zip(alone.parameters(), whole, strict=True):
            param.copy_(value)
    assert torch.equal(model(x), alone(x))
    assert not torch.equal(model(x), before)


def receives(recipe: str, name: str) -> list[str]:
    """What each rank was told."""
    weight: Any = model_of(recipe, "quantized", seed=dist.get_rank())[0].weight.data
    before, rank = weight.clone(), dist.get_rank()
    plain = weight.dequantize()
    calls: dict[str, Callable[[], Any]] = {
        "recv": lambda: dist.send(plain, 1) if rank == 0 else dist.recv(weight, 0),
        "reduce": lambda: dist.reduce(weight, 0),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(weight, plain.chunk(2)[0].contiguous()),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(weight, torch.cat([plain, plain])),
        "all_to_all_single": lambda: dist.all_to_all_single(weight, plain),
        "coalesced": lambda: coalesced([plain.clone(), weight], plain.chunk(2)[0].contiguous()),
    }
    said = ""
    try:
        calls[name]()
    except UnsupportedOperator as error:
        said = str(error)
    dist.barrier()
    assert torch.equal(weight, before)
    return [said] if said else []


def coalesced(into: list[Tensor], sent: Tensor) -> None:
    """Of which the first may be received."""
    with dist._coalescing_manager():
        for one in into:
            dist.all_gather_into_tensor(one, sent)


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("recv", [1]),
        ("reduce", [0, 1]),
        ("all_gather_into_tensor", [0, 1]),
        ("reduce_scatter_tensor", [0, 1]),
        ("all_to_all_single", [0, 1]),
        ("coalesced", [0, 1]),
    ],
)
def test_what_would_be_received_and_lost_is_refused(two: Ranks, name: str, ranks: list[int]) -> None:
    """On the ranks that would lose it; those that only send go on."""
    said = two.run(receives, "mxfp8", name)
    assert [rank for rank, words in enumerate(said) if words] == ranks
    assert all("(256, 128) in mxfp8 can't receive values: receive them into" in words[0] for words in said if words)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@on("two")
def test_lists_that_are_gathered_are_copied(recipe: str) -> None:
    """torch copies what it has received into each tensor of a list, which quantizes."""
    rank = dist.get_rank()
    *sent, other = [model_of(recipe, "quantized", seed=seed)[0].weight.data for seed in range(3)]
    for gather in (dist.all_gather, lambda into, plain: dist.gather(plain, into if rank == 0 else None)):
        into = [other.clone(), other.clone()]
        gather(into, sent[rank].dequantize())
        for found, part in zip(into, sent, strict=True) if gather is dist.all_gather or rank == 0 else ():
            expected = other.clone()
            expected.copy_(part.dequantize())
            assert torch.equal(found, expected)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@on("two")
def test_what_the_refusal_says_works(recipe: str) -> None:
    """Both ways."""
    weight: Any = model_of(recipe, "quantized", seed=dist.get_rank())[0].weight.data
    first = model_of(recipe, "quantized", seed=0)[0].weight.data
    new = torch.empty_like(weight.dequantize())
    if dist.get_rank() == 0:
        dist.send(weight, 1)
        for plane in weight.planes().values():
            dist.send(plane.view(torch.uint8), 1)
        return
    dist.recv(new, 0)
    assert torch.equal(new, first.dequantize())
    weight.copy_(new)
    for plane in weight.planes().values():
        dist.recv(plane.view(torch.uint8), 0)
    assert torch.equal(weight, first)


def flattens(use: str, original: bool) -> str:
    """FSDP1, with its flat parameters or with views of them."""
    try:
        FullyShardedDataParallel(model_of("mxfp8", use), use_orig_params=original, device_id=torch.device("cpu"))
    except LayoutError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("original", [False, True], ids=["flat", "views"])
@pytest.mark.parametrize("use", ["quantized", "cast"])
def test_fsdp1_is_refused(two: Ranks, use: str, original: bool) -> None:
    """Its parameters are plain: the model would train in bf16, and nothing would say so."""
    for said in two.run(flattens, use, original):
        assert "0.weight" in said
        assert "fully_shard (FSDP2; in accelerate, fsdp_version: 2)" in said


@pytest.mark.sample(1)
@pytest.mark.parametrize(("recipe", "use"), [("fp8_block", "quantized"), ("mxfp8", "cast"), ("nvfp4", "quantized")])
@on("two")
def test_optimizer_state_in_parts_under_ddp(recipe: str, use: str) -> None:
    """ZeroRedundancyOptimizer sends what each rank has stepped; one process steps all."""
    curves = []
    for parted in (True, False):
        model: Any = model_of(recipe, use)
        trained = DistributedDataParallel(model) if parted else model
        options: dict[str, Any] = {"lr": 0.01}
        if parted:
            optimizer: Any = ZeroRedundancyOptimizer(trained.parameters(), torch.optim.AdamW, **options)
        else:
            optimizer = torch.optim.AdamW(trained.parameters(), **options)
        curves.append([])
        for step in range(3):
            x = torch.randn(8, 128, generator=torch.Generator().manual_seed(step)).bfloat16()
            loss = (trained(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curves[-1].append(loss.item())
    assert curves[0] == curves[1]
    assert len(set(curves[0])) == 3

"""Gradients that are exchanged as they are: those of FSDP2's own reduce-scatter in fp32, with half of the bytes."""

from __future__ import annotations

import gc
import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import mesh_of, on
from test_fsdp2_options import LOOPS, built, sharded, stepped, two_steps
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import layoutc
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.fsdp2 import exchange
from layoutc.runtime.kernels.rank_sums import sum_in_order
from layoutc.runtime.torch_private import local_tensor

POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True)
USES = ("plain", "quantized", "cast")


@contextmanager
def counted() -> Iterator[dict[str, list[tuple[torch.dtype, int]]]]:
    """Dtypes and elements that a rank hands to exchanges and to reduce-scatters."""
    sent: dict[str, list[tuple[torch.dtype, int]]] = {"exchanges": [], "reduce-scatters": []}

    def counting(kind: str, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        values = kwargs.get("input", args[1] if len(args) > 1 else None)
        sent[kind].append((values.dtype, values.numel()))
        return collective(*args, **kwargs)

    names = ("reduce_scatter_single", "reduce_scatter_tensor")  # FSDP2 calls either, and the first calls no second
    places = [(dist, name, "reduce-scatters") for name in names if hasattr(dist, name)]
    places += [(exchange, "reduce_scatter_single", "reduce-scatters"), (dist, "all_to_all_single", "exchanges")]
    with pytest.MonkeyPatch.context() as patch:
        for place, name, kind in places:
            patch.setattr(place, name, partial(counting, kind, getattr(place, name)))
        yield sent


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: local_tensor(param.grad) for name, param in model.named_parameters() if param.grad is not None}


def equal_to_reduce_scatter(use: str, loop: Callable[[Any], Any], **options: Any) -> dict[str, Any]:
    """Values and gradients of a loop with exchanges and without, to the bit; what was sent with them."""
    found = []
    for exchanges in (False, True):
        model = sharded(built("fp8_block", use), **{"mp_policy": POLICY, **options})
        if exchanges:
            layoutc.exchange_gradients(model)
        with counted() as sent:
            values = loop(model)
        found.append((values, gradients(model)))
    (values, expected), (others, theirs) = found
    assert all(map(torch.equal, values, others))
    assert theirs.keys() == expected.keys()
    assert expected
    for name, grad in expected.items():
        assert torch.equal(theirs[name], grad), name
    return sent


@pytest.mark.sample(1)
@pytest.mark.parametrize("use", USES)
@on("two")
def test_gradients_of_two_ranks_are_those_of_a_reduce_scatter(use: str) -> None:
    """Those that accumulate without synchronization reduce sums in fp32, and all others exchange."""
    for name, loop in LOOPS.items():
        if use != "quantized" and name not in ("two_steps", "gradients_later", "left_out"):
            continue
        sent = equal_to_reduce_scatter(use, loop)
        assert all(dtype is torch.bfloat16 for dtype, _ in sent["exchanges"]), name
        assert all(dtype is torch.float32 for dtype, _ in sent["reduce-scatters"]), name
        accumulates = name == "gradients_later"
        assert bool(sent["reduce-scatters"]) == accumulates, name
        assert bool(sent["exchanges"]) != accumulates, name


@on("two")
def test_half_of_the_bytes_travel() -> None:
    model = sharded(built("fp8_block", "plain"), mp_policy=POLICY)
    with counted() as before:
        stepped(model, 0)
    layoutc.exchange_gradients(model)
    with counted() as after:
        stepped(model, 1)
    assert not before["exchanges"]
    assert not after["reduce-scatters"]
    assert [numel for _, numel in after["exchanges"]] == [numel for _, numel in before["reduce-scatters"]]
    assert {dtype.itemsize for dtype, _ in before["reduce-scatters"]} == {4}
    assert {dtype.itemsize for dtype, _ in after["exchanges"]} == {2}


def by_columns(param: nn.Parameter) -> Shard:
    return Shard(param.dim() - 1)


@on("two")
def test_offload_columns_and_policies_without_a_wider_sum() -> None:
    """Where gradients are fp32, or summed and divided otherwise, FSDP2's own reduce-scatter is left."""
    equal_to_reduce_scatter("plain", two_steps, offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert equal_to_reduce_scatter("cast", two_steps, shard_placement_fn=by_columns)["exchanges"]
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)):
        with pytest.raises(LayoutError, match="has nothing to do"):
            layoutc.exchange_gradients(sharded(built("fp8_block", "plain"), mp_policy=policy))


def uneven(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width, bias=False))


@on("four")
def test_sums_are_in_the_order_of_ranks() -> None:
    """Each rank's gradients in bf16, computed by itself, added up in fp32 one after the other. 37 rows over 4 ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(16, 37, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)
    alone = uneven(37).to(torch.bfloat16)
    scale = 1000.0**rank  # of like magnitudes, fp32 adds up a few values of 8 bits exactly, in any order
    (alone(x).float().square().mean() * scale).backward()
    model = uneven(37)
    fully_shard(model, mp_policy=POLICY)
    layoutc.exchange_gradients(model)
    (model(x).float().square().mean() * scale).backward()
    differ = False
    for (name, param), own in zip(model.named_parameters(), alone.parameters(), strict=True):
        parts = [torch.empty_like(own.grad) for _ in range(world)]  # type: ignore[arg-type]
        dist.all_gather(parts, own.grad)
        expected = sum_in_order(torch.stack(parts)) / world
        grad: Any = param.grad
        assert torch.equal(grad.full_tensor(), expected), name
        differ |= not torch.equal(expected, sum_in_order(torch.stack(parts[::-1])) / world)
    assert differ  # so the order is seen


@on("four")
def test_hybrid_sharding_exchanges_within_its_shards() -> None:
    sent = equal_to_reduce_scatter("plain", two_steps, mesh=mesh_of(2, 2, names=("copies", "slices")))
    assert sent["exchanges"]


@on("two")
def test_gradients_are_freed() -> None:
    """No gradient outlives its sum, though the collector is off: nothing refers to itself."""
    model = sharded(built("fp8_block", "plain"), mp_policy=POLICY)
    layoutc.exchange_gradients(model)
    kept: list[weakref.ref[exchange._Kept]] = []
    made = exchange._Kept.copied
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            exchange._Kept, "copied", lambda self, *args: (kept.append(weakref.ref(self)), made(self, *args))[1]
        )
        gc.disable()
        try:
            stepped(model, 0)
            stepped(model, 1)
        finally:
            gc.enable()
    assert len(kept) == 2 * 3  # a group of each block has parameters, that of the root has none
    assert all(one() is None for one in kept)


@on("two")
def test_what_is_refused_names_what_works() -> None:
    with pytest.raises(LayoutError, match="FSDP2 shards no module of this model"):
        layoutc.exchange_gradients(nn.Linear(4, 4))
    model = sharded(built("fp8_block", "plain"), mp_policy=POLICY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: f"host {dist.get_rank()}")
        with pytest.raises(LayoutError, match="2 ranks on 2 hosts shard together"):
            layoutc.exchange_gradients(model)
        layoutc.exchange_gradients(model, across_hosts=True)
    with counted() as sent:
        stepped(model, 0)
    assert sent["exchanges"]


@on("two")
def test_parameters_of_one_module_on_several_meshes_are_refused() -> None:
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(common, "ShardPlacementResult"):
        pytest.skip("torch 2.11 shards all parameters of a module over one mesh")
    mesh = mesh_of(1, 2, names=("alone", "shards"))
    alone = common.ShardPlacementResult(Shard(0), common.FSDPMeshInfo(mesh["alone"], shard_mesh_dim=0))
    model = nn.Sequential(nn.Linear(8, 8))
    fully_shard(model, mesh=mesh["shards"], shard_placement_fn=lambda one: alone if one.dim() == 1 else Shard(0))
    with pytest.raises(LayoutError, match="parameters of the root are sharded over several meshes"):
        layoutc.exchange_gradients(model, "grad_fp8")

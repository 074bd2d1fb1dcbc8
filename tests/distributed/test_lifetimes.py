"""What outlives what: an exception in the middle of a gather, and models that are deleted."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import on
from models import adam, assert_gathers_as, batch, build, local, shard, train_step, width_for
from storages import live_bytes, look_at_what_comes
from test_memory import built
from torch.distributed.tensor import Shard

from layoutc.runtime.fsdp2 import hooks
from layoutc.runtime.sharding import registry


class Lost(Exception):
    """What goes wrong between the two hooks."""


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_block"])
@on("two")
def test_shards_of_columns_survive_an_exception_between_the_hooks(recipe: str) -> None:
    """Weights before the one that fails have begun to gather; then the model moves, trains, and moves again."""
    width = width_for(recipe, dist.get_world_size())
    model, reference = build(recipe, width), build(recipe, width)
    shard(model, nested=False, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)
    last: Any = local(model.head.weight)

    def fails(mesh: Any) -> None:
        raise Lost

    for moves in (1, 2):
        last = local(model.head.weight)
        last.fsdp_pre_all_gather = fails
        for _ in range(moves):
            with pytest.raises(Lost):
                model(batch(0, width)[0])
        del last.fsdp_pre_all_gather
        model._apply(torch.clone)  # what .to() does, to any device
        assert torch.equal(model(batch(0, width)[0]), reference(batch(0, width)[0]))
        assert_gathers_as(model, reference)
    optimizer, expected = adam(model), adam(reference)
    share = float(dist.get_world_size()) if dist.get_rank() == 0 else 0.0
    for step in range(2):
        loss = train_step(model, optimizer, step, width, share)
        assert loss == train_step(reference, expected, step, width)
    assert_gathers_as(model, reference)


def _planes(param: Any) -> list[torch.Tensor]:
    shard = param._local_tensor
    agreed = getattr(shard, "_agreed", None)
    own = [shard] if not hasattr(shard, "store") else [*getattr(shard.store, "planes", shard.store).values()]
    return own if agreed is None else own + [one for one in (agreed.amax, agreed.plane) if one is not None]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "form"), [("mxfp8", "quantized"), ("nvfp4", "columns"), ("mxfp8", "cast"), ("fp8_delayed", "cast")]
)
@on("two")
def test_deleted_models_leave_nothing(recipe: str, form: str) -> None:
    """Built, trained and deleted again and again; also while somebody holds on to what was sharded."""
    width = width_for(recipe, dist.get_world_size())

    def trained() -> list[Any]:
        model, optimizer = built(recipe, form, width)
        train_step(model, optimizer, 0, width)
        return [param.detach() for param in model.parameters()]

    def known() -> tuple[int, int]:
        gc.collect()
        return len(registry._shardings), len(hooks._gathered)

    before, held = known(), []
    look_at_what_comes()
    for _ in range(4):
        trained()
        gc.collect()
        held.append(live_bytes(*held[:1]))
        assert known() == before
    assert held[-1] <= held[0], held
    kept = trained()
    assert known() == before
    own = sum(plane.nbytes for param in kept for plane in _planes(param))
    assert live_bytes(held[0] + own) <= held[0] + own

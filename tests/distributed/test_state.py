"""Where weights come from and go to under fully_shard: meta device, plain values, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import Ranks, on
from models import (
    Model,
    adam,
    assert_equal_on_all_ranks,
    assert_gathers_as,
    assert_same_tensors,
    build,
    counted,
    local,
    my_share,
    recipe_module,
    shard,
    shared_bytes,
    train_step,
    width_for,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

import layoutc


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("recipe", "how", "blocks"),
    [
        ("fp8_delayed", "local", 0),
        ("nvfp4", "quantized_init", 0),
        ("fp8_current", "dtensor", 0),
        ("fp8_block", "local", 3),
        ("mxfp8", "dtensor", 3),
    ],
)
@on("two")
def test_a_model_from_the_meta_device_keeps_its_class(recipe: str, how: str, blocks: int) -> None:
    """Made on meta, sharded, given memory and values; then it trains as one process. Shards that cut blocks know where
    in a block they begin. Meta model, sharded, made real, filled, trained; weights of whole blocks for each rank, or
    of so many in all."""
    width = blocks * recipe_module(recipe).LAYOUT.block_rows or width_for(recipe, dist.get_world_size())
    reference = build(recipe, width)
    source = shard(build(recipe, width))
    with torch.device("meta"):
        if how == "quantized_init":
            with layoutc.quantized_init(recipe):
                model = Model(width)
        else:
            model = Model(width)
            layoutc.quantize_(model, recipe)
    shard(model)
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    kinds = {type(local(param)) for param in model.parameters() if param.dim() == 2}
    assert kinds == {recipe_module(recipe).Tensor}
    with torch.no_grad():
        for param, value in zip(model.parameters(), source.parameters(), strict=True):
            if how == "local":
                param.to_local().copy_(value.to_local())
            else:
                param.copy_(value)
    optimizer, expected_optimizer = adam(model), adam(reference)
    for step in range(3):
        expected = train_step(reference, expected_optimizer, step, width)
        assert train_step(model, optimizer, step, width, my_share()) == expected
    assert_gathers_as(model, reference)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_delayed"])
@on("two")
def test_unsharding_before_the_first_forward_changes_nothing(recipe: str) -> None:
    """The root's mode is not final before the first forward, and must not be taken for it. unshard and reshard, then
    train."""
    width = width_for(recipe, dist.get_world_size())
    reference, model = build(recipe, width), shard(build(recipe, width))
    optimizer, expected_optimizer = adam(model), adam(reference)
    assert_gathers_as(model, reference)
    for step in range(2):
        expected = train_step(reference, expected_optimizer, step, width)
        assert train_step(model, optimizer, step, width, my_share()) == expected


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_delayed"])
@on("two")
def test_resharding_after_forward_is_switched_between_steps(recipe: str) -> None:
    """Also of weights whose passes read codes of their own."""
    width = width_for(recipe, dist.get_world_size())
    reference, model = build(recipe, width), shard(build(recipe, width))
    optimizer, expected_optimizer = adam(model), adam(reference)
    for step in range(4):
        for layer in model.layers:
            layer.set_reshard_after_forward(step % 2 == 0)  # type: ignore[operator]
        expected = train_step(reference, expected_optimizer, step, width)
        assert train_step(model, optimizer, step, width, my_share()) == expected


def takes_plain_values(recipe: str, how: str, sizes: tuple[int, int] | None) -> None:
    """New values before the first forward: the same bytes as quantizing them whole, and one scale for all ranks."""
    width, inner = sizes or (width_for(recipe, dist.get_world_size()),) * 2
    model = shard(build(recipe, width, inner))
    reference = build(recipe, width, inner)
    torch.manual_seed(7 if how != "full_state" else 8)
    plain = Model(width, inner)
    with torch.no_grad():
        for weight in plain.parameters():
            weight.mul_(torch.linspace(0.5, 4.0, weight.shape[0]).reshape(-1, *[1] * (weight.dim() - 1)))
        for target, value in zip(reference.parameters(), plain.parameters(), strict=True):
            target.copy_(value)
        if how == "full_state":
            options = StateDictOptions(full_state_dict=True)
            set_model_state_dict(model, {k: v.detach() for k, v in plain.state_dict().items()}, options=options)
        else:
            for param, value in zip(model.parameters(), plain.parameters(), strict=True):
                assert isinstance(param, DTensor)
                param.copy_(distribute_tensor(value.detach(), param.device_mesh, param.placements))
    assert_equal_on_all_ranks(shared_bytes(model))
    assert_gathers_as(model, reference)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("recipe", "how"),
    [("fp8_delayed", "copy"), ("nvfp4", "full_state"), ("fp8_current", "full_state"), ("fp8_block", "copy")],
)
def test_plain_values_loaded_into_shards_share_their_amax(two: Ranks, recipe: str, how: str) -> None:
    """Before anything has been gathered; the bytes are those of quantizing the whole weight."""
    two.run(takes_plain_values, recipe, how, None)


def test_plain_values_reach_ranks_without_rows(four: Ranks) -> None:
    """An empty shard takes part in the reduction and holds the shared scale."""
    four.run(takes_plain_values, "fp8_delayed", "copy", (3, 5))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("recipe", "blocks"), [("fp8_delayed", 0), ("nvfp4", 3), ("mxfp8", 3)])
@on("two")
def test_a_checkpoint_restores_bytes_masters_and_the_next_steps(recipe: str, blocks: int, tmp_path: Path) -> None:
    """Saved and loaded on the same ranks, through get_state_dict and set_state_dict. Shards that cut blocks save their
    own rows, and the scales of all blocks that they have rows of. Train, save, load into another model, compare,
    train on."""
    folder = str(tmp_path / "checkpoint")
    width = blocks * recipe_module(recipe).LAYOUT.block_rows or width_for(recipe, dist.get_world_size())
    model = shard(build(recipe, width))
    optimizer = adam(model)
    for step in range(3):
        train_step(model, optimizer, step, width, my_share())
    weights, moments = get_state_dict(model, optimizer)
    saved: dict[str, Any] = {"model": weights, "optimizer": moments}
    dcp.save(saved, checkpoint_id=folder)
    other = shard(build(recipe, width, seed=1))
    other_optimizer = adam(other)
    weights, moments = get_state_dict(other, other_optimizer)
    loaded: dict[str, Any] = {"model": weights, "optimizer": moments}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(other, other_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert isinstance(a, DTensor)
        assert isinstance(b, DTensor)
        if a.dim() == 2:
            own = [{name: one.entries(name) for name in one.planes()} for one in (local(a), local(b))]
            assert_same_tensors(*own)
            assert type(local(b)) is recipe_module(recipe).Tensor
        else:
            assert_same_tensors({name: a._local_tensor}, {name: b._local_tensor})
        ours, theirs = optimizer.state[a], other_optimizer.state[b]
        assert list(ours) == list(theirs)
        for key, value in ours.items():
            pair = [t._local_tensor if isinstance(t, DTensor) else torch.as_tensor(t) for t in (value, theirs[key])]
            assert_same_tensors({key: pair[0]}, {key: pair[1]})
    for step in range(3, 6):
        first = train_step(model, optimizer, step, width, my_share())
        assert train_step(other, other_optimizer, step, width, my_share()) == first
    files = sum(path.stat().st_size for path in Path(folder).glob("*.distcp"))
    count = sum(param.numel() for param in model.parameters())
    shards = [local(param) for param in model.parameters() if param.dim() == 2]
    held = torch.tensor(sum(shard.entries(name).nbytes for shard in shards for name in shard.planes()))
    dist.all_reduce(held)  # ranks whose cuts go through blocks have scales of other numbers of them
    parts = (
        4 * len(list(model.parameters())) * dist.get_world_size()
    )  # the weight, its master and two moments, on each rank
    plain = count * 12 + int(held)
    assert plain < files < plain + parts * 4096, (plain, files, "views were saved with their whole storages")


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
@on("two")
def test_shards_are_zeroed_by_each_rank_for_itself(recipe: str) -> None:
    """Zeros share an amax already, so a rank that zeroes its shards waits for none. All shards, without a word to other
    ranks; what is gathered then is a whole weight of zeros."""
    width = width_for(recipe, dist.get_world_size())
    model, reference = shard(build(recipe, width)), build(recipe, width)
    with torch.no_grad(), counted("all_reduce", lambda *_, **__: 1) as reductions:
        for param in (*model.parameters(), *reference.parameters()):
            param.zero_()
    assert not reductions
    assert_gathers_as(model, reference)

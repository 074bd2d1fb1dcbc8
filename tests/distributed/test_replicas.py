"""DistributedDataParallel: both uses keep their bytes when it is made, and train as one process does."""

from __future__ import annotations

from typing import Any

import product_modes
import pytest
import torch
import torch.distributed as dist
from harness import Ranks, mesh_of, on
from models import RECIPES, adam, assert_equal_on_all_ranks, batch, build, my_share, raw
from test_cast_on_gather import build_cast
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import layoutc
from layoutc.runtime.errors import LayoutError

WIDTH = 64
STEPS = 4


def built(recipe: str, use: str) -> Any:
    """The model of tests/distributed/models.py, quantized or cast on gather."""
    return build(recipe, WIDTH) if use == "quantized" else build_cast(recipe, WIDTH)


def state_of(model: nn.Module) -> list[list[int]]:
    """All bytes of all parameters."""
    found = []
    for param in model.parameters():
        held: Any = param.to_local() if isinstance(param, DTensor) else param.data
        planes = held.planes().values() if hasattr(held, "planes") else [getattr(held, "plain", held)]
        found += [raw(plane).tolist() for plane in planes]
    return found


def trained(model: nn.Module, use: str, share: float) -> list[float]:
    """The losses of some steps."""
    optimizer: Any = (
        torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True) if use == "cast" else adam(model)
    )
    losses = []
    for step in range(STEPS):
        x, y = batch(step, WIDTH)
        loss = (model(x) - y).square().mean()
        (loss * share).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "use", "differ"),
    [
        ("nvfp4", "quantized", True),
        ("fp8_delayed", "quantized", False),
        ("mxfp8", "cast", True),
        ("fp8_current", "cast", False),
        ("int4_group32", "quantized", True),
    ],
)
@on("two")
def test_replicas_keep_their_bytes_and_train_as_one_process(recipe: str, use: str, differ: bool) -> None:
    """Also where the other rank was built with other weights. Construction keeps the first rank's bytes, on all ranks;
    a curve equals that of one process."""
    alone, model = built(recipe, use), built(recipe, use)
    expected = state_of(model)
    if differ and dist.get_rank() > 0:
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.randn(param.shape))
    with layoutc.strict():
        replicas = DistributedDataParallel(model)
    assert state_of(model) == expected
    assert trained(alone, use, 1.0) == trained(replicas, use, my_share())
    assert_equal_on_all_ranks(state_of(model))
    assert state_of(model) == state_of(alone)


def replicates_by_fsdp2(recipe: str, use: str) -> None:
    """torch's `replicate` of FSDP2's code, layer by layer: a curve, bytes and a full state equal those of one
    process."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    alone, model = built(recipe, use), built(recipe, use)
    mesh = mesh_of(dist.get_world_size(), names=("replicate",))
    for layer in (*model.layers, model.head, model):
        replicate(layer, mesh=mesh)
    with product_modes.products("reference"):
        assert trained(alone, use, 1.0) == trained(model, use, my_share())
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert state_of(model) == state_of(alone)
    assert_equal_on_all_ranks(state_of(model))
    other = built(recipe, use)
    other.load_state_dict(whole)
    assert state_of(other) == state_of(alone)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("use", ["quantized", "cast"])
def test_replicas_of_fsdp2_train_as_one_process(two: Ranks, recipe: str, use: str) -> None:
    """They gather nothing, as on a mesh of one rank."""
    pytest.importorskip("torch.distributed._composable.replicate_with_fsdp", reason="this torch has none")
    two.run(replicates_by_fsdp2, recipe, use)


def replicates_others() -> str:
    """Ranks that quantize in other ways: the message, and whether the group still works."""
    model = build("mxfp8" if dist.get_rank() == 0 else "mxfp8_2d", WIDTH)
    try:
        DistributedDataParallel(model)
    except LayoutError as error:
        dist.barrier()
        return str(error)
    return "nothing was raised"


def test_replicas_of_other_recipes_are_refused_on_every_rank(two: Ranks) -> None:
    """Planes of another size would hang, or be garbage."""
    messages = two.run(replicates_others)
    assert all("layers.0.weight of shape (64, 64) in mxfp8" in message for message in messages), messages
    assert all("another rank quantized" in message for message in messages)


@pytest.mark.parametrize("recipe", RECIPES)
@on("two")
def test_masters_stay_where_all_ranks_hold_the_same_bytes(recipe: str) -> None:
    """Bytes that are written over themselves are no reason to start from codes. An optimizer that was made before the
    replicas."""
    model = build(recipe, WIDTH)
    optimizer = adam(model)
    before = [master.clone() for master in optimizer.masters().values()]
    DistributedDataParallel(model)
    assert all(torch.equal(*pair) for pair in zip(before, optimizer.masters().values(), strict=True))

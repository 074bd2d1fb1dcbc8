"""Checkpoints of what optimizers hold in recipes: DTensors saved by some ranks and loaded by others, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import Ranks, mesh_of
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import layoutc.recipes
from layoutc import checkpoint
from layoutc.runtime.optim.f24 import F24Tensor
from layoutc.runtime.optim.states import converted

# Ranks without rows, partial blocks at the ends of rows, and leading dims.
SHAPES = ((7, 300), (2, 256), (3, 5, 130))
RECIPES = ("adam_v8", "adam_m4", "moment_fp8_sqrt", "f24")


def values_of(shape: tuple[int, ...]) -> Tensor:
    """Of a whole state."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


def made_in(form: str, values: Tensor) -> Tensor:
    return converted(values, F24Tensor if form == "f24" else getattr(layoutc.recipes, form).Tensor)


def states(form: str | None, *, zeros: bool = False) -> dict[str, Any]:
    """This rank's shards as an optimizer shows them: in a recipe or in fp32."""
    mesh, found = mesh_of(dist.get_world_size()), dict[str, Any]()
    for shape in SHAPES:
        plain = distribute_tensor(values_of(shape), mesh, [Shard(0)], src_data_rank=None)
        held = torch.zeros_like(plain._local_tensor) if zeros else plain._local_tensor
        if form is not None:
            held = made_in(form, held)
        found[str(shape)] = DTensor(held, plain._spec, requires_grad=False)
    return {"optimizer": found}


def saves(folder: str) -> None:
    for form in (None, *RECIPES):
        dcp.save(states(form), checkpoint_id=f"{folder}/{form}")
        checkpoint.save(states(form), f"{folder}/ours {form}")


def assert_are(held: dict[str, Any], wanted: dict[str, Any], what: str) -> None:
    for name, state in held["optimizer"].items():
        one, other = state._local_tensor, wanted["optimizer"][name]._local_tensor
        assert type(one) is type(other)
        assert torch.equal(one, other), (what, name, dist.get_rank())


def loads(folder: str) -> None:
    """The bytes of each recipe, and fp32 made of them and into them, by torch's checkpoints or by layoutc's."""
    for number, form in enumerate(RECIPES):
        wanted, whole, ours = states(form), {}, number % 2 == 0
        held = states(form, zeros=True)
        checkpoint.load(held, f"{folder}/ours {form}") if ours else dcp.load(held, checkpoint_id=f"{folder}/{form}")
        assert_are(held, wanted, form)
        quantized, plain = states(form, zeros=True), states(None, zeros=True)
        if ours:
            checkpoint.load(quantized, f"{folder}/ours None", convert=True)
            checkpoint.load(plain, f"{folder}/ours {form}", convert=True)
        else:
            dcp.load(quantized, checkpoint_id=f"{folder}/None")
            dcp.load(plain, checkpoint_id=f"{folder}/{form}")
        assert_are(quantized, wanted, f"{form} of fp32")
        for name, state in plain["optimizer"].items():
            values = wanted["optimizer"][name]._local_tensor.dequantize(torch.float32)
            assert torch.equal(state._local_tensor, values), (form, name)
        for shape in SHAPES:
            whole[str(shape)] = made_in(form, values_of(shape))
            assert torch.equal(wanted["optimizer"][str(shape)].full_tensor(), whole[str(shape)])


def test_states_go_from_four_ranks_to_two_and_one(four: Ranks, two: Ranks, tmp_path: Path) -> None:
    four.run(saves, str(tmp_path))
    two.run(loads, str(tmp_path))
    for form in RECIPES:
        held = {"optimizer": {str(shape): made_in(form, torch.zeros(shape)) for shape in SHAPES}}
        dcp.load(held, checkpoint_id=str(tmp_path / form), no_dist=True)
        for shape in SHAPES:
            assert torch.equal(held["optimizer"][str(shape)], made_in(form, values_of(shape)))

"""Optimizers by a rule, of shards: the bytes of one process, on any number of ranks, also of saved states."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import Ranks, mesh_of, on
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import layoutc
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.kernels import direct, launch
from layoutc.runtime.optim import rules


class Lion(torch.optim.Optimizer):
    """Known to the rules by its name; they step it."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: Any = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})


FORMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16 masters": {"masters": "bf16"},
    "8bit": {"state": "8bit"},
    "f24 masters, 8bit": {"masters": "f24", "state": "8bit"},
    "bf16 masters, fp8": {"masters": "bf16", "state": "fp8"},
    "SGD, bf16 masters, 8bit": {"kind": torch.optim.SGD, "momentum": 0.9, "masters": "bf16", "state": "8bit"},
    "Adam, 8bit": {"kind": torch.optim.Adam, "state": "8bit"},
    "Lion": {"kind": Lion, "state": "fp32"},
    "Lion, bf16 masters, 8bit": {"kind": Lion, "masters": "bf16", "state": "8bit"},
}


def optimizer_of(model: nn.Module, form: dict[str, Any]) -> Any:
    form = {"lr": 0.01, "weight_decay": 0.1, **form}
    if kind := form.pop("kind", None):
        return layoutc.MasterWeights(kind, model.parameters(), **form)
    return layoutc.AdamW(model.parameters(), **form)


def model_of(recipe: str) -> nn.Sequential:
    """A quantized weight whose blocks four ranks cut, a plain one whose rows no rank has as many of, and a norm."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(256, 96, dtype=torch.bfloat16),
        nn.RMSNorm(96, dtype=torch.bfloat16),
        nn.Linear(96, 50, bias=False, dtype=torch.bfloat16),
    )
    layoutc.quantize_(model[0], recipe)
    return model


def give_gradients(model: nn.Module, seed: int) -> None:
    """Gradients that are the same for a whole parameter and for its shards."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        if isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
        param.grad = grad


def whole(value: Any) -> Any:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.dequantize(torch.float32) if hasattr(value, "planes") else value


def values_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Whole weights and states, of DTensors by all ranks."""
    found = {}
    for name, param in model.named_parameters():
        held = {"weight": param.detach(), **optimizer.state[param]}
        found |= {f"{name} {key}": whole(value) for key, value in held.items()}
    return found


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []


def steps(model: nn.Module, optimizer: Any, first: int, last: int) -> dict[str, Tensor]:
    for step in range(first, last):
        give_gradients(model, step)
        optimizer.step()
    return values_of(model, optimizer)


def steps_as_one_process(recipe: str, form: dict[str, Any], ranks: int) -> None:
    """Also, in fp32, as torch.optim.AdamW steps masters."""
    mesh = mesh_of(ranks)
    if mesh.get_coordinate() is None:
        return
    alone, sharded = model_of(recipe), model_of(recipe)
    fully_shard(sharded, mesh=mesh)
    expected = steps(alone, optimizer_of(alone, form), 0, 3)
    assert_same(steps(sharded, optimizer_of(sharded, form), 0, 3), expected)
    if not form:
        other = model_of(recipe)
        of_torch: Any = layoutc.MasterWeights(
            torch.optim.AdamW, other.parameters(), foreach=True, lr=0.01, weight_decay=0.1
        )
        assert_same(steps(other, of_torch, 0, 3), expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "form", "ranks"),
    [
        ("mxfp8", "fp32", 2),
        ("mxfp8", "Lion, bf16 masters, 8bit", 2),
        ("mxfp8", "Adam, 8bit", 3),
        ("nvfp4", "f24 masters, 8bit", 3),
        ("fp8_block", "fp32", 4),
        ("nvfp4", "bf16 masters, fp8", 4),
        ("fp8_current", "SGD, bf16 masters, 8bit", 4),
    ],
)
def test_ranks_step_as_one_process(four: Ranks, recipe: str, form: str, ranks: int) -> None:
    four.run(steps_as_one_process, recipe, FORMS[form], ranks)


def how_codes_are_written(rows: int) -> str:
    """On three ranks, by kernels. The last one's rows begin and end with blocks; a cut splits another."""
    pytest.importorskip("triton", reason="needs triton, which kernels are written in")
    mesh, model = mesh_of(3), nn.Sequential(nn.Linear(128, rows, bias=False, dtype=torch.bfloat16))
    if mesh.get_coordinate() is None:
        return "here is no shard"
    layoutc.quantize_(model, "fp8_block")
    fully_shard(model, mesh=mesh)
    with mock.patch.object(launch, "usable", lambda x, dtype=None: type(x) is Tensor and x.numel() > 0):
        return layoutc.AdamW(model.parameters()).explain()[0].codes


def test_a_rank_of_whole_blocks_exchanges_edges_with_the_others(four: Ranks) -> None:
    """All ranks take part in the all-gather of a weight whose blocks are cut on any: none writes codes before it."""
    assert four.run(how_codes_are_written, 192) == [*["its shards cut blocks"] * 3, "here is no shard"]
    assert four.run(how_codes_are_written, 384) == [*[""] * 3, "here is no shard"]


def amaxes_of_ranks(recipe: str, form: dict[str, Any]) -> None:
    """By kernels, on three ranks: weights whose cuts split blocks, and one of which the last rank has no row."""
    pytest.importorskip("triton", reason="needs triton, which kernels are written in")
    mesh = mesh_of(3)
    if mesh.get_coordinate() is None:
        return
    found, launched, run = [], set[str](), direct.run
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, m, bias=False, dtype=torch.bfloat16) for m in (48, 32, 2)))
        for layer, one in zip(model, [recipe, recipe, "fp8_current"], strict=True):
            layoutc.quantize_(layer, one)
        optimizer = optimizer_of(fully_shard(model, mesh=mesh) if is_sharded else model, form)
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(rules, "sqrt", rules.exact_sqrt))
            if is_sharded:
                counted = lambda kernel, *rest: (launched.add(kernel.__name__), run(kernel, *rest))[1]  # noqa: E731
                usable = lambda x, dtype=None: type(x) is Tensor and x.numel() > 0  # noqa: E731
                stack.enter_context(mock.patch.object(direct, "run", counted))
                stack.enter_context(mock.patch.object(launch, "usable", usable))
            for step in range(2):
                give_gradients(model, step)
                optimizer.step()
        found.append(values_of(model, optimizer))
    assert_same(*found)
    assert launched == {"scalars_kernel", "update_kernel", "quantize_kernel"}


@pytest.mark.thorough
@pytest.mark.parametrize(("recipe", "form"), [("nvfp4", "bf16 masters"), ("fp8_delayed", "Lion")])
def test_amaxes_of_three_ranks_are_those_of_one(four: Ranks, recipe: str, form: str) -> None:
    four.run(amaxes_of_ranks, recipe, {**FORMS[form], "least": 1})


def sharded_with(form: dict[str, Any], recipe: str, copies: int) -> tuple[nn.Module, Any]:
    """copies: groups of ranks that hold the same shards (HSDP)."""
    ranks, model = dist.get_world_size(), model_of(recipe)
    mesh = mesh_of(copies, ranks // copies, names=("replicate", "shard")) if copies > 1 else mesh_of(ranks)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    return model, optimizer_of(model, form)


def losses_of(model: nn.Module, optimizer: Any, first: int, last: int) -> list[float]:
    """Of steps by backward. Ranks see the same tokens, so that a mean over ranks is each one's own."""
    found = []
    for step in range(first, last):
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def save(folder: str, form: dict[str, Any], recipe: str, copies: int = 1) -> None:
    model, optimizer = sharded_with(form, recipe, copies)
    losses_of(model, optimizer, 0, 3)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)


def resume(folder: str, form: dict[str, Any], recipe: str, copies: int = 1) -> list[float]:
    """On other ranks, the next losses, and what they leave, are those of a run that never stopped."""
    model, optimizer = sharded_with(form, recipe, copies)
    weights, states = get_state_dict(model, optimizer)
    loaded = {"model": weights, "optim": states}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    other, its_own = sharded_with(form, recipe, copies)
    expected = losses_of(other, its_own, 0, 6)[3:]
    assert losses_of(model, optimizer, 3, 6) == expected
    assert len(set(expected)) == 3
    assert_same(values_of(model, optimizer), values_of(other, its_own))
    return expected


@on("two")
def test_cuts_through_columns_that_share_random_bits_are_refused() -> None:
    """Other ranks would round such a master otherwise than one process does."""
    mesh = mesh_of(dist.get_world_size())
    for shape, dim, every in (((4096, 24), 1, 12), ((2, 64, 128), 1, 32), ((4096, 32), 1, 0), ((3, 64, 128), 0, 0)):
        weight = nn.Parameter(distribute_tensor(torch.ones(shape, dtype=torch.bfloat16), mesh, [Shard(dim)]))
        layoutc.AdamW([weight])
        layoutc.AdamW([weight], masters="f24")  # rounds to nearest
        refused = pytest.raises(LayoutError, match=f"is cut on dim {dim} every {every}. masters=bf16 rounds")
        with refused if every else nullcontext():
            layoutc.AdamW([weight], masters="bf16")


@pytest.mark.thorough  # test_state_checkpoints.py has states in the first tier
@pytest.mark.parametrize(
    ("recipe", "form"),
    [
        ("fp8_current", "bf16 masters, fp8"),
        ("nvfp4", "f24 masters, 8bit"),
        ("mxfp8", "SGD, bf16 masters, 8bit"),
        ("mxfp8", "Lion, bf16 masters, 8bit"),
    ],
)
def test_runs_go_on_under_hsdp(two: Ranks, four: Ranks, recipe: str, form: str, tmp_path: Path) -> None:
    """From two ranks to two by two, and back to two: the same losses everywhere."""
    two.run(save, str(tmp_path / "two"), FORMS[form], recipe)
    four.run(save, str(tmp_path / "hsdp"), FORMS[form], recipe, 2)
    losses = four.run(resume, str(tmp_path / "two"), FORMS[form], recipe, 2)
    losses += two.run(resume, str(tmp_path / "hsdp"), FORMS[form], recipe)
    assert losses == [losses[0]] * 6

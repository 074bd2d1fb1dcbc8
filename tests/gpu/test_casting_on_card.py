"""Weights cast on gather on a card: the bytes of the CPU, and training under fully_shard as without it.

python -m pytest -q tests/gpu/test_casting_on_card.py
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import layoutc

pytest.importorskip("triton", reason="needs triton, which kernels are written in")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RECIPES = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4", "int8_rowwise")


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    """A mesh of one card."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield init_device_mesh("cuda", (1,))
        dist.destroy_process_group()


def model_of(recipe: str, device: str = "cuda") -> nn.Sequential:
    """Two layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(device)
    layoutc.cast_on_gather_(model, recipe)
    return model


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> list[Tensor]:
    """Losses of 6 steps."""
    losses = []
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 256, generator=generator).cuda().to(dtype)
        layoutc.precompute_amaxes(model)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("how", ["foreach", "fused", "offload", "policy"])
def test_sharded_training_is_that_of_one_process(alone: Any, recipe: str, how: str) -> None:
    """A group of one card gathers nothing, and quantizes as a product by itself does; offloaded shards are pinned."""
    dtype = torch.bfloat16 if how == "policy" else torch.float32
    options: dict[str, Any] = {"mesh": alone}
    if how == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=True)
    if how == "policy":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype)
    given = {"lr": 1e-3, "fused": True} if how == "fused" else {"lr": 1e-3, "foreach": how != "offload"}
    sharded = model_of(recipe, "cpu" if how == "offload" else "cuda")
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer, **options)
    fully_shard(sharded, **options)
    losses = steps(sharded, torch.optim.AdamW(sharded.parameters(), **given), dtype)
    shards: list[Any] = [sharded[0].weight, sharded[2].weight]
    assert {type(one._local_tensor) for one in shards} == {import_module(f"layoutc.recipes.{recipe}").CastTensor}
    if how in ("foreach", "fused"):  # else AdamW runs elsewhere, or gradients are rounded elsewhere
        whole = model_of(recipe)
        expected = steps(whole, torch.optim.AdamW(whole.parameters(), **given), dtype)
        assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert torch.isfinite(torch.stack(losses)).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_bytes_are_those_of_the_cpu(recipe: str) -> None:
    """The quantized weight, of each orientation."""
    card = model_of(recipe)
    cpu = copy.deepcopy(card).cpu()
    for one, other in ((card[0].weight, cpu[0].weight), (card[2].weight, cpu[2].weight)):
        assert type(other.data) is type(one.data)
        for orientation in one.data.orientations:
            ours, theirs = (weight.data.quantize((orientation,)).store.planes for weight in (one, other))
            for name, plane in ours.items():
                assert torch.equal(plane.cpu().view(torch.uint8), theirs[name].view(torch.uint8)), name

"""Checkpoints over NCCL: what ranks with cards save, other numbers of them load, in this precision and others.

    torchrun --nproc-per-node 2 tests/gpu/checkpoints_nccl.py     # also runs over gloo, where there are no cards

For each recipe, with cuts inside blocks where it has any: saved by all ranks, loaded by all and by the first alone;
async, with the model overwritten as soon as async_save returns; from bf16 and fp32 into quantized weights, whose bytes
are those of quantizing the whole; a damaged file is refused on all ranks and changes nothing.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import layoutc
from layoutc import checkpoint
from layoutc.runtime.errors import DamagedError
from layoutc.runtime.train.convert import recipe_class
from layoutc.runtime.weight.tensor import QuantizedTensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPES = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4", "int4_group32")
Planes = dict[str, torch.Tensor]


def whole_model(recipe: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Weights of one and a half blocks for each of two ranks, unevenly scaled; alike on all ranks."""
    rows = max(3 * recipe_class(recipe).LAYOUT.block_rows, 96)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, rows), nn.Linear(rows, 256))
    with torch.no_grad():
        for layer in model:
            layer.weight *= torch.logspace(-2, 1, layer.weight.shape[0], 2.0).unsqueeze(1)
    return model.to(DEVICE, dtype)


def made(recipe: str | None, like: str, seed: int, mesh: DeviceMesh, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Quantized in a recipe, or plain, and sharded."""
    model = whole_model(like, seed, dtype)
    if recipe is not None:
        layoutc.quantize_(model, recipe)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def held(model: nn.Module) -> Planes:
    """Copies of what this rank's own rows need."""
    found: Planes = {}
    for name, param in model.named_parameters():
        local = param._local_tensor  # type: ignore[attr-defined]
        planes = {n: local.entries(n) for n in local.planes()} if isinstance(local, QuantizedTensor) else {"": local}
        found |= {f"{name}.{n}": plane.detach().clone() for n, plane in planes.items()}
    return found


def assert_same(a: Planes, b: Planes, what: str) -> None:
    """Byte for byte."""
    assert a.keys() == b.keys(), what
    for name, plane in a.items():
        ours, theirs = (t.contiguous().flatten().view(torch.uint8) for t in (plane, b[name]))
        assert torch.equal(ours, theirs), f"{what}: {name} differs on rank {dist.get_rank()}"


def state_of(model: nn.Module) -> dict[str, Any]:
    return {"model": model.state_dict()}


def check(recipe: str, folder: Path, everyone: DeviceMesh, first: DeviceMesh) -> None:
    """All that the module's text says, for one recipe."""
    model = made(recipe, recipe, 0, everyone)
    expected = held(model)
    checkpoint.save(state_of(model), folder / "saved")
    other = made(recipe, recipe, 1, everyone)
    checkpoint.load(state_of(other), folder / "saved")
    assert_same(held(other), expected, f"{recipe} on as many ranks")
    if dist.get_rank() == 0:
        alone = made(recipe, recipe, 1, first)
        checkpoint.load(state_of(alone), folder / "saved", process_group=first.get_group())
        assert_same(held(alone), held(made(recipe, recipe, 0, first)), f"{recipe} on one rank")
    dist.barrier()
    stager = DefaultStager(StagingOptions(DEVICE == "cuda", False, False, False))
    future = checkpoint.async_save(state_of(model), folder / "async", async_stager=stager)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    future.result()
    checkpoint.load(state_of(other), folder / "async")
    assert_same(held(other), expected, f"{recipe} saved asynchronously")
    for dtype in (torch.bfloat16, torch.float32):
        checkpoint.save(state_of(made(None, recipe, 2, everyone, dtype)), folder / str(dtype))
        target = made(recipe, recipe, 3, everyone, dtype)
        checkpoint.load(state_of(target), folder / str(dtype), convert=True)
        assert_same(held(target), held(made(recipe, recipe, 2, everyone, dtype)), f"{recipe} from {dtype}")
        layoutc.check_ranks(target)
    before = held(other)
    if dist.get_rank() == 0:
        path = folder / "saved" / "__0_0.distcp"
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 1
        path.write_bytes(data)
    dist.barrier()
    refused(lambda: checkpoint.load(state_of(other), folder / "saved"))
    assert_same(held(other), before, f"{recipe} after a load that was refused")


def refused(work: Callable[[], None]) -> None:
    """Fails unless `work` finds damage."""
    try:
        work()
    except DamagedError:
        return
    raise AssertionError("a damaged checkpoint was loaded")


def main(recipes: list[str]) -> None:
    """Checks the recipes named, or six."""
    warnings.filterwarnings("ignore")
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    world = dist.get_world_size()
    everyone, first = DeviceMesh(DEVICE, list(range(world))), DeviceMesh(DEVICE, [0])
    root = [tempfile.mkdtemp()]
    dist.broadcast_object_list(root)
    for recipe in recipes or RECIPES:
        check(recipe, Path(root[0]) / recipe, everyone, first)
        if dist.get_rank() == 0:
            print(f"{recipe}: saved, loaded, converted, refused, on {world} ranks ({DEVICE})", flush=True)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])

"""safetensors in and out of shards on cards, through NCCL: the bytes of the whole weight quantized on the CPU.

torchrun --nproc_per_node 2 tests/gpu/safetensors_nccl.py [RECIPE ...]     (any number of cards; without one, gloo)
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import layoutc
from layoutc.checkpoint import export_safetensors, load_safetensors

RECIPES = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
ROWS, COLUMNS = 2944, 1024  # 23 blocks of 128 rows: no even number of ranks cuts between blocks
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def raw(tensor: Tensor) -> Tensor:
    """Bytes, on the CPU."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def sharded(recipe: str, mesh: Any, offload: bool) -> nn.Module:
    """Two layers on the mesh, or offloaded from it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(COLUMNS, ROWS), nn.Linear(ROWS, COLUMNS, bias=False)).to(DEVICE, torch.bfloat16)
    layoutc.quantize_(model, recipe)
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=DEVICE == "cuda")} if offload else {}
    fully_shard(model, mesh=mesh, **options)
    return model


def round_trip(recipe: str, mesh: Any, offload: bool, folder: Path) -> None:
    """bf16 in, quantized out and in again, bf16 out."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"0.weight": (ROWS, COLUMNS), "0.bias": (ROWS,), "1.weight": (COLUMNS, ROWS)}
    values = {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}
    if dist.get_rank() == 0:
        (folder / "hf").mkdir(parents=True)
        save_file(values, folder / "hf" / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    model = sharded(recipe, mesh, offload)
    load_safetensors(model, folder / "hf")
    export_safetensors(model, folder / "quantized")
    module = import_module(f"layoutc.recipes.{recipe}")
    found = load_file(folder / "quantized" / "model.safetensors")
    for name in ("0.weight", "1.weight"):
        for plane, tensor in module.quantize(values[name]).planes().items():
            assert torch.equal(raw(found[f"{name}.{plane}"]), raw(tensor)), (recipe, offload, name, plane)
    assert torch.equal(found["0.bias"], values["0.bias"])
    other = sharded(recipe, mesh, offload)
    load_safetensors(other, folder / "quantized")
    export_safetensors(other, folder / "plain", dtype=torch.bfloat16)
    for name, value in load_file(folder / "plain" / "model.safetensors").items():
        want = module.quantize(values[name]).dequantize(torch.bfloat16) if value.dim() == 2 else values[name]
        assert torch.equal(raw(value), raw(want)), (recipe, offload, name)
    layoutc.check_ranks(other)


def main() -> None:
    """Every recipe, on cards and offloaded."""
    rank = int(os.environ["LOCAL_RANK"])
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    base = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(base)
    for recipe in sys.argv[1:] or RECIPES:
        for offload in (False, True):
            round_trip(recipe, mesh, offload, Path(base[0]) / f"{recipe}-{offload}")
            if rank == 0:
                print(f"{recipe}{' offloaded' if offload else ''}: the same bytes on {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Started by torchrun, one process a GPU: what one rank has and others get, over NCCL, byte for byte.

    torchrun --nproc-per-node 2 tests/gpu/replicas_nccl.py [RECIPE...]

DistributedDataParallel gives all ranks the first one's bytes, in both ways of use, and the values that they were
quantized from. A full state dict that rank 0 broadcasts reaches shards of cut blocks. Weights that are distributed take
along the values that their masters start from.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import layoutc

RECIPES = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
ROWS, COLUMNS = 3 * 128 + 64, 256  # cut inside a block of 128 rows by 2 ranks, and of 16 by 8


def model(seed: int, device: torch.device) -> nn.Sequential:
    """Two layers of values that a seed decides."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False), nn.Linear(ROWS, COLUMNS, bias=False)).to(device)


def bytes_of(weight: Any) -> list[Tensor]:
    """The bytes of a quantized weight, or of values."""
    held = weight.planes().values() if hasattr(weight, "planes") else [getattr(weight, "plain", weight)]
    return [one.detach().contiguous().view(-1).view(torch.uint8) for one in held]


def same(a: Any, b: Any) -> bool:
    """Equal bytes."""
    return all(torch.equal(one, other) for one, other in zip(bytes_of(a), bytes_of(b), strict=True))


def replicates(recipe: str, device: torch.device, convert: Callable[[nn.Module, str], Any]) -> None:
    """Each rank is built with other values; all end with the first one's."""
    expected, own = model(0, device), model(dist.get_rank(), device)
    values = [param.detach().clone() for param in expected.parameters()]
    for one in (expected, own):
        convert(one, recipe)
    DistributedDataParallel(own)
    assert all(same(a.data, b.data) for a, b in zip(own.parameters(), expected.parameters(), strict=True))
    masters = layoutc.MasterWeights(torch.optim.AdamW, own.parameters()).masters().values()
    held = [getattr(master, "plain", master) for master in masters]
    assert all(torch.equal(a, b) for a, b in zip(held, values, strict=True))


def loads_from_the_first(recipe: str, mesh: DeviceMesh, device: torch.device) -> None:
    """A full quantized state dict, which rank 0 alone has."""
    whole, sharded = model(0, device), model(1, device)
    for one in (whole, sharded):
        layoutc.quantize_(one, recipe)
    fully_shard(sharded, mesh=mesh)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(sharded, whole.state_dict() if dist.get_rank() == 0 else {}, options=options)
    found = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    assert all(same(found[name], weight.detach()) for name, weight in whole.state_dict().items())


def distributes(recipe: str, mesh: DeviceMesh, device: torch.device) -> None:
    """Bytes and initial values of a weight whose shards cut blocks."""
    whole = model(0, device)
    values = whole[0].weight.detach().clone()
    layoutc.quantize_(whole, recipe)
    weight: Any = whole[0].weight
    shards = nn.Parameter(distribute_tensor(weight.data, mesh, [Shard(0)]))
    assert isinstance(shards, DTensor)
    assert same(shards.full_tensor().detach(), weight.data)
    (master,) = layoutc.MasterWeights(torch.optim.AdamW, [shards]).masters().values()
    assert torch.equal(master.full_tensor(), values)


def main(recipes: list[str]) -> None:
    """Checks the recipes named, or five."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for recipe in recipes or RECIPES:
        for convert in (layoutc.quantize_, layoutc.cast_on_gather_):
            replicates(recipe, device, convert)
        loads_from_the_first(recipe, mesh, device)
        distributes(recipe, mesh, device)
        if dist.get_rank() == 0:
            print(
                f"{recipe}: replicas, full state dicts and distributed weights have the first rank's bytes", flush=True
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])

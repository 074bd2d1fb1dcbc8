"""Started by torchrun, one process a GPU, 2 or 4: DTensors of quantized weights over NCCL, byte for byte.

Redistributed between all placements, the all-to-all included; SimpleFSDP, eager and compiled, against one process; with
4 GPUs, tensor parallelism under FSDP2. All ranks see the same batch, so averaged gradients are those of one process.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import layoutc

RECIPES = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
WIDTH, STEPS = 1024, 10


def same(a: Any, b: Any) -> bool:
    """Class and every stored byte."""
    planes = b.planes()
    return type(a) is type(b) and all(torch.equal(raw(plane), raw(planes[name])) for name, plane in a.planes().items())


def raw(plane: Tensor) -> Tensor:
    return plane.contiguous().view(-1).view(torch.uint8)


class Pair(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


def pair(recipe: str, device: torch.device) -> Pair:
    torch.manual_seed(0)
    model = Pair().to(device)
    layoutc.quantize_(model, recipe)
    return model


def redistributes(recipe: str, mesh: DeviceMesh, device: torch.device) -> None:
    """Every placement to every other and whole again, scattered from rank 0."""
    whole: Any = pair(recipe, device).up.weight.data
    placements = (Shard(0), Shard(1), Replicate())
    with layoutc.strict():
        for first in placements:
            made = distribute_tensor(whole, mesh, [first])
            for then in placements:
                moved = made.redistribute(placements=[then])
                assert same(moved.full_tensor(), whole), (recipe, first, then)
                assert same(moved.redistribute(placements=[first])._local_tensor, made._local_tensor), (
                    recipe,
                    first,
                    then,
                )


class Gathered(nn.Module):
    """A parametrization, as SimpleFSDP has it."""

    def forward(self, param: DTensor) -> Tensor:
        return param.redistribute(placements=(Replicate(),)).to_local(grad_placements=(Partial("avg"),))


def losses(recipe: str, mesh: DeviceMesh | None, device: torch.device, compiled: bool = False) -> list[float]:
    """The loss curve alone, or as SimpleFSDP over a mesh."""
    model, gathered = pair(recipe, device), Gathered()
    weights = list(model.parameters())
    if mesh is not None:
        for module in (model.up, model.down):
            module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]))
        weights = [model.up.weight, model.down.weight]
        for module in (model.up, model.down):
            read = {"weight": property(lambda self: gathered(self._parameters["weight"]))}
            module.__class__ = type("SimpleLinear", (nn.Linear,), read)
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, weights, lr=1e-3)
    run: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    curve = []
    with layoutc.strict():
        for step in range(STEPS):
            x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
            loss = (run(x) - x.roll(1, 1)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
    return curve


def in_two_dims(recipe: str, device: torch.device) -> None:
    """Tensor parallelism under FSDP2: the weights of one process at the start, and losses near its own."""
    mesh = init_device_mesh("cuda", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    reference = pair(recipe, device)
    torch.manual_seed(0)
    model = Pair().to(device)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    layoutc.quantize_(model, recipe)
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    for param, whole in zip(model.parameters(), reference.parameters(), strict=True):
        assert same(param.full_tensor(), whole), recipe
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3)
    expected_optimizer = layoutc.MasterWeights(torch.optim.AdamW, reference.parameters(), lr=1e-3)
    for step in range(STEPS):
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
        found = []
        for one, its in ((model, optimizer), (reference, expected_optimizer)):
            with layoutc.strict():
                loss = (one(x) - x.roll(1, 1)).pow(2).mean()
                loss.backward()
                its.step()
                its.zero_grad()
            found.append(loss.item())
        # Partial sums of two ranks are not the sums of one GEMM: near, where the CPU tests are equal to the bit.
        assert abs(found[0] - found[1]) <= 1e-3 * found[1], (recipe, step, found)


def main() -> None:
    """Prints a line for each recipe; fails on the first difference."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for recipe in RECIPES:
        redistributes(recipe, mesh, device)
        alone = losses(recipe, None, device)
        for compiled in (False, True):
            assert losses(recipe, mesh, device, compiled) == alone, (recipe, compiled)
        if dist.get_world_size() >= 4:
            in_two_dims(recipe, device)
        if dist.get_rank() == 0:
            print(recipe, "redistributed and trained, equal", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

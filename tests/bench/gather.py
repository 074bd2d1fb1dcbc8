"""What a gather costs under FSDP2: in bf16, with planes as they are, and with each weight as one interleaved payload.

    torchrun --nproc-per-node 4 tests/bench/gather.py [--nccl-memory | --copies] [--json FILE]

A transformer block's seven weights (4096 wide, 14336 in the feed-forward layer) are sharded as one group; timed are
unshard, wait and reshard, forward's planes, on the card (median of runs, all ranks in step) and on the host alone.
--nccl-memory lets NCCL allocate what it sends from and receives into (FSDP2's
set_allocate_memory_from_process_group_for_comm). With --copies each rank copies the others' parts out of symmetric
memory in place of NCCL's all-gather (FSDP2's set_custom_all_gather), which the card's copy engines do. The
interleaved form sends, for each weight, one tensor of bytes: for each unit of rows all planes one after another, as a
group of one rank or Shard(1) would like it; the post hook takes it apart into planes, which kernels want contiguous.
"values" are of weights that are dequantized on gather: all planes of the group in one tensor, and then bf16.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _symmetric_memory as symmetric
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

import layoutc
from layoutc.runtime.sharding import registry

RECIPES = ("mxfp8", "nvfp4", "fp8_block", "fp8_current", "mxfp8_2d")
SIZES = [(4096, 4096)] * 4 + [(14336, 4096)] * 2 + [(4096, 14336)]
WARM, RUNS = 5, 30


def block(recipe: str | None, device: torch.device, on_gather: bool = False) -> nn.Module:
    """The weights, random, in bf16 or a recipe, sharded as one group; on_gather: dequantized when they arrive."""
    torch.manual_seed(0)
    with torch.device(device):
        layers = nn.Sequential(*[nn.Linear(k, m, bias=False, dtype=torch.bfloat16) for m, k in SIZES])
    if recipe is not None:
        layoutc.quantize_(layers, recipe)
    if on_gather:
        layoutc.set_products_(layers, "dequantize_on_gather")
    fully_shard(layers)
    return layers


class Copies(AllGather):
    """An all-gather by copies out of the other ranks' memory, for ranks of one host that reach each other's.

    Two buffers of each size take turns: one may still be read when the next gather begins.
    """

    def __init__(self) -> None:
        self.buffers: dict[int, deque[tuple[Tensor, Any]]] = {}

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """One of the two buffers for so many bytes."""
        nbytes = prod(size) * dtype.itemsize
        if nbytes not in self.buffers:
            made = [symmetric.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
            assert dist.group.WORLD is not None
            self.buffers[nbytes] = deque((one, symmetric.rendezvous(one, dist.group.WORLD)) for one in made)
        self.buffers[nbytes].rotate()
        return self.buffers[nbytes][0][0].view(dtype).view(*size)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Copies each rank's part to where it belongs, between two barriers on the card."""
        whole, handle = self.buffers[output_tensor.nbytes][0]
        part = input_tensor.nbytes
        handle.barrier(channel=0)
        for step in range(1, handle.world_size):
            peer = (handle.rank + step) % handle.world_size
            theirs = handle.get_buffer(peer, (part,), torch.uint8, storage_offset=peer * part)
            whole.narrow(0, peer * part, part).copy_(theirs)
        handle.barrier(channel=1)


COPIES = Copies()


def configured(module: Any) -> Any:
    """The module, with the memory and the all-gather that were asked for."""
    if "--copies" in sys.argv:
        module.set_custom_all_gather(COPIES)
    else:
        module.set_allocate_memory_from_process_group_for_comm("--nccl-memory" in sys.argv)
    return module


def interleaved(cls: Any) -> Callable[[], None]:
    """Replaces the hooks of a recipe's class by ones that send one payload a weight; gives back what undoes it."""
    pre, post = cls.fsdp_pre_all_gather, cls.fsdp_post_all_gather

    def pre_interleaved(self: Any, mesh: Any) -> Any:
        sent, gathering = pre(self, mesh)
        units = min(tensor.shape[0] for tensor in sent)
        gathering.widths = [tensor.numel() // units for tensor in sent]
        gathering.shapes = [tuple(tensor.shape) for tensor in sent]
        return (torch.cat([tensor.view(units, -1) for tensor in sent], 1),), gathering

    def post_interleaved(self: Any, outputs: Any, gathering: Any, dtype: Any, *, out: Any = None) -> Any:
        (payload,) = outputs
        parts = payload.view(-1, sum(gathering.widths)).split(gathering.widths, 1)
        shapes = [(shape[0] * gathering.route.world, *shape[1:]) for shape in gathering.shapes]
        planes = tuple(part.contiguous().view(shape) for part, shape in zip(parts, shapes, strict=True))
        return post(self, planes, gathering, dtype, out=out)

    cls.fsdp_pre_all_gather, cls.fsdp_post_all_gather = pre_interleaved, post_interleaved

    def undo() -> None:
        cls.fsdp_pre_all_gather, cls.fsdp_post_all_gather = pre, post

    return undo


def timed(module: Any) -> dict[str, float]:
    """Medians in us: of a gather on the card, the slowest rank's, and of the host's part of it."""
    card, host = [], []
    for run in range(WARM + RUNS):
        dist.barrier()
        torch.cuda.synchronize()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        began = time.perf_counter()
        module.unshard()
        spent = time.perf_counter() - began
        stop.record()
        module.reshard()
        torch.cuda.synchronize()
        if run >= WARM:
            card.append(start.elapsed_time(stop) * 1e3)
            host.append(spent * 1e6)
    found = torch.tensor([statistics.median(card), statistics.median(host)], device="cuda")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return {"card_us": round(found[0].item(), 1), "host_us": round(found[1].item(), 1)}


def correct(module: Any, reference: list[Any]) -> None:
    """What is gathered equals the whole weights, byte for byte; or their values to the bit."""
    module.unshard()
    for layer, whole in zip(module, reference, strict=True):
        if type(layer.weight.data) is Tensor:
            assert torch.equal(layer.weight.data, whole.dequantize()), "values"
            continue
        for name, plane in layer.weight.data.planes().items():
            assert torch.equal(plane.view(torch.uint8), whole.planes()[name].view(torch.uint8)), name
    module.reshard()


def main() -> None:
    """Prints a table on rank 0."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    world = dist.get_world_size()
    rows: list[dict[str, Any]] = []

    def note(recipe: str, form: str, figures: dict[str, float], nbytes: float) -> None:
        rows.append({"recipe": recipe, "form": form, "world": world, "bytes_per_element": nbytes, **figures})
        if dist.get_rank() == 0:
            line = f"{recipe:<12} {form:<12} {nbytes:7.4f} B/element {figures['card_us']:9.1f} us"
            print(f"{line} {figures['host_us']:9.1f} us host", flush=True)

    module: Any = configured(block(None, device))
    note("bf16", "plain", timed(module), 2.0)
    del module
    elements = sum(prod(size) for size in SIZES)
    for recipe in RECIPES:
        cls = importlib.import_module(f"layoutc.recipes.{recipe}").Tensor
        torch.manual_seed(0)
        with torch.device(device):
            plain = [nn.Linear(k, m, bias=False, dtype=torch.bfloat16) for m, k in SIZES]
        quantize = importlib.import_module(f"layoutc.recipes.{recipe}").quantize
        whole = [quantize(layer.weight.detach()) for layer in plain]
        del plain
        sent = sum(cls.LAYOUT.gather(*size, world, "forward").nbytes for size in SIZES) / elements
        for form in ("planes", "interleaved", "values"):
            undo = interleaved(cls) if form == "interleaved" else lambda: None
            module = configured(block(recipe, device, form == "values"))
            correct(module, whole)
            note(recipe, form, timed(module), sent)
            undo()
            del module
        registry._shardings.clear()
        torch.cuda.empty_cache()
    if dist.get_rank() == 0 and "--json" in sys.argv:
        with open(sys.argv[sys.argv.index("--json") + 1], "w") as file:
            ran = {"kind": "gather", "device": torch.cuda.get_device_name(), "torch": torch.__version__}
            json.dump({**ran, "world": world, "rows": rows}, file, indent=1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What a gather costs under FSDP2: in bf16, with planes as they are, and with each weight as one interleaved payload.

    torchrun --nproc-per-node 4 tests/bench/gather.py [--block llama-70b] [--nccl-memory | --copies] [--json FILE]

A transformer block's seven weights are sharded as one group; timed are unshard, wait and reshard, forward's planes, on
the card (median of runs, all ranks in step) and on the host alone. Each form takes turns with bf16, since hosts are now
fast and now slow; its bf16 is that of its own turns.
--nccl-memory lets NCCL allocate what it sends from and receives into (FSDP2's
set_allocate_memory_from_process_group_for_comm). With --copies each rank copies the others' parts out of symmetric
memory in place of NCCL's all-gather (FSDP2's set_custom_all_gather), which the card's copy engines do. The
interleaved form sends, for each weight, one tensor of bytes: for each unit of rows all planes one after another, as a
group of one rank or Shard(1) would like it; the post hook takes it apart into planes, which kernels want contiguous.
"values" are of weights that are dequantized on gather: all planes of the group in one tensor, and then bf16. "cast"
are planes of bf16 weights that each gather quantizes, by amaxes that were found before, and "cast values" both.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from math import prod
from pathlib import Path
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
FORMS = ("planes", "interleaved", "values", "cast", "cast values")
BLOCKS = {  # (rows, columns); of "square", k and v are as large as q
    "square": [(4096, 4096)] * 4 + [(14336, 4096)] * 2 + [(4096, 14336)],
    "llama-8b": [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)],
    "llama-70b": [(8192, 8192)] * 2 + [(1024, 8192)] * 2 + [(28672, 8192)] * 2 + [(8192, 28672)],
}
WARM, RUNS, TURNS = 5, 10, 4
Sizes = list[tuple[int, int]]


def plain(sizes: Sizes, device: torch.device) -> nn.Sequential:
    """The weights, random, in bf16."""
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(*[nn.Linear(k, m, bias=False, dtype=torch.bfloat16) for m, k in sizes])


def block(sizes: Sizes, recipe: str | None, form: str, device: torch.device) -> nn.Module:
    """The weights in bf16 or a recipe, sharded as one group."""
    layers = plain(sizes, device)
    if recipe is not None:
        convert = layoutc.cast_on_gather_ if form.startswith("cast") else layoutc.quantize_
        convert(layers, recipe)
        layoutc.set_products_(layers, "dequantize", dequantize="gather" if form.endswith("values") else "layer")
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


def configured(module: Any, options: argparse.Namespace) -> Any:
    """The module, with the memory and the all-gather that were asked for."""
    if options.copies:
        module.set_custom_all_gather(COPIES)
    else:
        module.set_allocate_memory_from_process_group_for_comm(options.nccl_memory)
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


def times(module: Any, runs: int) -> tuple[list[float], list[float]]:
    """us of gathers, on the card and of the host's part of them."""
    card, host = [], []
    for _ in range(runs):
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
        card.append(start.elapsed_time(stop) * 1e3)
        host.append(spent * 1e6)
    return card, host


def timed(modules: list[Any]) -> list[dict[str, float]]:
    """Medians in us of each, which take turns: of a gather on the card, the slowest rank's, and of the host's part."""
    found: list[tuple[list[float], list[float]]] = [([], []) for _ in modules]
    for _ in range(TURNS):
        for module, (card, host) in zip(modules, found, strict=True):
            times(module, WARM)
            for kept, new in zip((card, host), times(module, RUNS), strict=True):
                kept += new
    medians = torch.tensor([[statistics.median(one) for one in pair] for pair in found], device="cuda")
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return [{"card_us": round(card, 1), "host_us": round(host, 1)} for card, host in medians.tolist()]


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
    parser = argparse.ArgumentParser()
    parser.add_argument("--block", choices=sorted(BLOCKS), default="square")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--nccl-memory", action="store_true")
    parser.add_argument("--copies", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    world, sizes = dist.get_world_size(), BLOCKS[options.block]
    rows: list[dict[str, Any]] = []
    bf16: Any = configured(block(sizes, None, "", device), options)
    elements = sum(prod(size) for size in sizes)
    for recipe in options.recipes:
        cls = importlib.import_module(f"layoutc.recipes.{recipe}").Tensor
        quantize = importlib.import_module(f"layoutc.recipes.{recipe}").quantize
        whole = [quantize(layer.weight.detach()) for layer in plain(sizes, device)]
        sent = sum(cls.LAYOUT.gather(*size, world, "forward").nbytes for size in sizes) / elements
        for form in options.forms:
            undo = interleaved(cls) if form == "interleaved" else lambda: None
            module = configured(block(sizes, recipe, form, device), options)
            correct(module, whole)
            if form.startswith("cast"):
                layoutc.precompute_amaxes(module)  # as after each step
            plainly, figures = timed([bf16, module])
            undo()
            del module
            for name, how, nbytes, found in (("bf16", "plain", 2.0, plainly), (recipe, form, sent, figures)):
                rows.append({"recipe": name, "form": how, "world": world, "bytes_per_element": nbytes, **found})
            if dist.get_rank() == 0:
                line = f"{recipe:<12} {form:<12} {sent:7.4f} B/element {figures['card_us']:9.1f} us"
                line += f" {figures['host_us']:9.1f} us host; bf16 {plainly['card_us']:.1f}, {plainly['host_us']:.1f};"
                print(f"{line} {plainly['card_us'] / figures['card_us']:.2f} times as fast", flush=True)
        registry._shardings.clear()
        torch.cuda.empty_cache()
    if dist.get_rank() == 0 and options.json:
        ran = {"kind": "gather", "device": torch.cuda.get_device_name(), "torch": torch.__version__, "world": world}
        options.json.write_text(json.dumps({**ran, "block": options.block, "rows": rows}, indent=1), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

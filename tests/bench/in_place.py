"""What it takes to gather planes through one row of bytes, as FSDP2 and layoutc do, and each right to where it is read.

    torchrun --nproc-per-node 2 tests/bench/in_place.py [--block llama-70b] [--recipes nvfp4] [--json FILE]

"row": what a rank sends is copied to its place in what all send, gathered by one collective, and copied out of that.
"planes": one collective for each plane, all of them in one call, which NCCL runs as one kernel; nothing is copied, and
there is no row. Both have the planes of a transformer block's seven weights, and no hooks around them. Their bytes are
compared first; then they take turns.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gather import BLOCKS
from torch import Tensor

from layoutc.runtime.kernels.copies import WORD, copies_in, copies_out
from layoutc.runtime.torch_private import foreach_copy_

WARM, RUNS, TURNS = 5, 10, 6


def shards(recipe: str | None, sizes: Sequence[tuple[int, int]], device: torch.device) -> list[Tensor]:
    """What this rank sends of each plane, as words: random bytes, which differ from rank to rank."""
    world, seeded = dist.get_world_size(), torch.Generator(device).manual_seed(dist.get_rank())
    nbytes = [2 * m * k // world for m, k in sizes]
    if recipe is not None:
        layout = importlib.import_module(f"layoutc.recipes.{recipe}").Tensor.LAYOUT
        sent = [layout.gather(*size, world, "forward").planes for size in sizes]
        nbytes = [facts.nbytes for one in sent for facts in one.values()]
    return [torch.randint(256, (one,), dtype=torch.uint8, generator=seeded, device=device).view(WORD) for one in nbytes]


def by_row(inputs: Sequence[Tensor], outputs: Sequence[Tensor], device: torch.device) -> Callable[[], object]:
    """One collective, and copies before and after it; without kernels, torch's own."""
    world, numels = dist.get_world_size(), [one.numel() for one in inputs]
    *starts, total = accumulate(numels, initial=0)
    rows = torch.empty(world * total * WORD.itemsize, dtype=torch.uint8, device=device)
    row = rows.narrow(0, dist.get_rank() * total * WORD.itemsize, total * WORD.itemsize)  # where it will be
    into, out = copies_in(inputs, starts, WORD, row), copies_out(outputs, starts, world, rows)

    def gather() -> None:
        if into is None:
            foreach_copy_(list(row.view(WORD).split(numels)), list(inputs))
        else:
            into(row)
        dist.all_gather_into_tensor(rows, row)
        if out is None:
            parts = rows.view(world, -1).view(WORD).split(numels, 1)
            foreach_copy_([one.view(world, -1) for one in outputs], list(parts))
        else:
            out(rows)

    return gather


def by_planes(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], object]:
    """A collective for each plane, in one call."""
    group: Any = dist.group.WORLD
    return lambda: group.allgather_into_tensor_coalesced(list(outputs), list(inputs)).wait()


def timed(ways: Sequence[Callable[[], object]], device: torch.device) -> list[tuple[float, float]]:
    """us of each way until its bytes are there, and of the host: medians of all turns, of the slowest rank."""
    spent: list[list[tuple[float, float]]] = [[] for _ in ways]
    for _ in range(TURNS):
        for way, found in zip(ways, spent, strict=True):
            for _ in range(WARM):
                way()
            for _ in range(RUNS):
                wait(device)
                dist.barrier()
                wait(device)
                began = time.perf_counter()
                way()
                called = time.perf_counter()
                wait(device)
                found.append((time.perf_counter() - began, called - began))
    medians = [[statistics.median(column) * 1e6 for column in zip(*one, strict=True)] for one in spent]
    slowest = torch.tensor(medians, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [(ready, host) for ready, host in slowest.tolist()]


def wait(device: torch.device) -> None:
    """Until the card is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Compares and times both ways, on cards if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block", choices=BLOCKS, default="llama-8b")
    parser.add_argument("--divide", type=int, default=1, help="each size of the weights, for machines without cards")
    parser.add_argument("--recipes", nargs="*", default=["fp8_current", "mxfp8", "nvfp4"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cards = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cards else torch.device("cpu")
    if cards:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cards else "gloo")
    sizes = [(m // options.divide, k // options.divide) for m, k in BLOCKS[options.block]]
    found = []
    for recipe in (None, *options.recipes):
        inputs = shards(recipe, sizes, device)
        outputs = [[one.new_zeros(dist.get_world_size() * one.numel()) for one in inputs] for _ in range(2)]
        ways = by_row(inputs, outputs[0], device), by_planes(inputs, outputs[1])
        for way in ways:
            way()
        assert all(map(torch.equal, *outputs)), f"{recipe}: other bytes"
        row, planes = timed(ways, device)
        name, nbytes = recipe or "bf16", sum(one.nbytes for one in outputs[0])
        found.append({"recipe": name, "nbytes": nbytes, "row_us": row, "planes_us": planes, "count": len(inputs)})
        if dist.get_rank() == 0:
            line = f"{name:<12} {len(inputs):3} planes {nbytes / sum(map(prod, sizes)):7.4f} B/element"
            line += f" row {row[0]:7.1f} us, host {row[1]:6.1f}; planes {planes[0]:7.1f}, {planes[1]:6.1f};"
            print(f"{line} {row[0] / planes[0]:.2f} times as fast", flush=True)
    if dist.get_rank() == 0 and options.json:
        device_name = torch.cuda.get_device_name() if cards else "cpu"
        options.json.write_text(json.dumps({"kind": "in place", "device": device_name, "rows": found}, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

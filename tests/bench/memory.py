"""Memory under FSDP2: what rests, what a layer's passes add, and that nothing stays or grows.

    torchrun --nproc-per-node 2 tests/bench/memory.py [--steps 200] [--width 4096] [--layers 4] [--json FILE]

A stack of blocks of seven weights each, every block resharded after forward, in bf16 and in each recipe: quantized
shards, mxfp8 cast on gather, and widths whose cuts fall inside blocks. On cards peaks are the allocator's; where there
are none the model is tiny and what tensors hold is summed up instead, so there are no peaks. After each forward and
backward everything that was gathered must be freed, and the last step must leave as many bytes as the tenth (on CPUs,
the fifth).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from functools import partial
from math import lcm
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import layoutc
from layoutc.ints.cuts import Cuts
from layoutc.ints.sizes import cdiv, up
from layoutc.runtime.sharding import registry
from layoutc.runtime.train.convert import recipe_class
from layoutc.runtime.weight.tensor import QuantizedTensor

sys.path.append(str(Path(__file__).parents[1] / "distributed"))
from storages import assert_freed, live_bytes

RECIPES = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
CASES = (
    (None, "plain"),
    *((recipe, "quantized") for recipe in RECIPES),
    ("mxfp8", "cast"),
    *((recipe, "cut") for recipe in ("fp8_block", "mxfp8", "nvfp4")),
)
MIB = 2.0**20


class Block(nn.Module):
    """Seven weights, as in a transformer's layer: four of the width, three of the feed-forward layer."""

    def __init__(self, width: int, inner: int, **options: Any) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o"):
            setattr(self, name, nn.Linear(width, width, bias=False, **options))
        self.gate, self.up = (nn.Linear(width, inner, bias=False, **options) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False, **options)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, width) -> the same. Without attention proper, whose memory is no weight's."""
        h = F.rms_norm(x, x.shape[-1:])
        x = x + self.o(torch.sigmoid(self.q(h)) * self.k(h) + self.v(h))
        h = F.rms_norm(x, x.shape[-1:])
        return x + self.down(F.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]


class Peaks:
    """The most that was allocated in each stretch between two marks, over what rests between steps."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on = device, False
        self.forward: list[int] = []
        self.backward: list[int] = []

    def begin(self) -> None:
        """A stretch starts."""
        if self.on:
            torch.cuda.reset_peak_memory_stats(self.device)

    def end(self, stretches: list[int], gradient: Any = None) -> None:
        """A stretch ends, and the next starts."""
        if self.on:
            stretches.append(torch.cuda.max_memory_allocated(self.device))
            torch.cuda.reset_peak_memory_stats(self.device)


class Stack(nn.Module):
    """Blocks; marks where the passes of each begin and end."""

    def __init__(self, layers: int, width: int, inner: int, peaks: Peaks, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, inner, **options) for _ in range(layers))
        self.peaks = peaks

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, width) -> the same."""
        self.peaks.begin()
        for block in self.blocks:
            # Called once the block's backward is over and FSDP2 has freed its weights.
            x.register_hook(partial(self.peaks.end, self.peaks.backward))
            x = block(x)
            self.peaks.end(self.peaks.forward)
        return x


def sizes(recipe: str | None, form: str, width: int, world: int) -> tuple[int, int]:
    """Width and inner width; of the form `cut` the next whose shards cut blocks."""
    inner = width * 7 // 2
    if form != "cut":
        return width, inner
    layout = recipe_class(recipe or "").LAYOUT
    step = lcm(layout.multiple_m, layout.multiple_k, layout.block_rows)

    def cut(size: int) -> int:
        found = up(size, step)
        while Cuts(found, cdiv(found, world), world).aligned(layout.block_rows):
            found += step
        return found

    return cut(width), cut(inner)


def resident(model: nn.Module) -> int:
    """Bytes of this rank's parameters."""
    total = 0
    for param in model.parameters():
        local: Any = param._local_tensor  # type: ignore[union-attr]
        held = local.planes().values() if isinstance(local, QuantizedTensor) else [getattr(local, "plain", local)]
        total += sum(tensor.numel() * tensor.element_size() for tensor in held)
    return total


def measure(recipe: str | None, form: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """One case: trained, with storages checked after each pass and bytes after each step."""
    cuda, settled = device.type == "cuda", 10 if device.type == "cuda" else 5
    width, inner = sizes(recipe, form, options.width, dist.get_world_size())
    torch.manual_seed(0)
    peaks = Peaks(device)
    model = Stack(options.layers, width, inner, peaks, dtype=torch.bfloat16, device=device)
    if recipe is not None:
        (layoutc.cast_on_gather_ if form == "cast" else layoutc.quantize_)(model, recipe)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-4)
        if form == "cast"
        else layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-4)
    )
    found = {"recipe": recipe or "bf16", "form": form, "width": width, "inner": inner, "resident": resident(model)}
    held, checked = [], 0
    for step in range(options.steps):
        x = torch.randn(options.tokens, width, dtype=torch.bfloat16, device=device, requires_grad=True)
        peaks.on = cuda and step == settled
        base = torch.cuda.memory_allocated(device) if cuda else 0
        loss = model(x).float().square().mean()
        checked = assert_freed(model, f"forward of step {step}")
        loss.backward()
        assert_freed(model, f"backward of step {step}")
        if peaks.on:
            found["peak"] = max(*peaks.forward, *peaks.backward)
            found["forward"] = max(peaks.forward) - base
            found["backward"] = max(peaks.backward) - base
            found["forward_layers"] = [peak - base for peak in peaks.forward]
            found["backward_layers"] = [peak - base for peak in peaks.backward]
        optimizer.step()
        optimizer.zero_grad()
        del x, loss
        if cuda:
            if step + 1 in (settled, options.steps):
                gc.collect()
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated(device))
        elif step + 1 in (settled, options.steps):
            held.append(live_bytes())
    first, last = held[settled - 1] if cuda else held[0], held[-1]
    label = f"{found['recipe']} {form}"
    assert first == last, f"{label}: {first} bytes after step {settled}, {last} after step {options.steps}"
    spread = max(held[settled - 1 :]) - min(held[settled - 1 :]) if cuda else 0
    return {**found, "held": last, "growth": last - first, "spread": spread, "checked": checked}


def line(row: dict[str, Any]) -> str:
    """One row of the table, in MiB."""
    peaks = [f"{row[name] / MIB:10.1f}" if name in row else f"{'-':>10}" for name in ("peak", "forward", "backward")]
    told = f"{row['recipe']:<12} {row['form']:<10} {row['resident'] / MIB:10.2f} {row['held'] / MIB:10.2f}"
    return f"{told} {' '.join(peaks)} {row['growth']:>7} {row['spread']:>7} {row['checked']:>8}"


def main() -> None:
    """Prints a table on rank 0; fails on the first byte that stays."""
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    parser = argparse.ArgumentParser(description="Memory under FSDP2.")
    parser.add_argument("--steps", type=int, default=200 if cuda else 40)
    parser.add_argument("--width", type=int, default=4096 if cuda else 256)
    parser.add_argument("--layers", type=int, default=4 if cuda else 2)
    parser.add_argument("--tokens", type=int, default=256 if cuda else 16)
    parser.add_argument("--json", type=Path, help="also write all figures here")
    options = parser.parse_args()
    if options.steps < 12:
        raise SystemExit("--steps must be 12 or more: growth is looked for after the tenth")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    rows, first = [], dist.get_rank() == 0
    if first:
        print(f"{dist.get_world_size()} ranks, {options.layers} layers of width {options.width}, {options.steps} steps")
        print("MiB; forward, backward: the most that a layer's pass adds to what is held; growth, spread: bytes")
        titles = ("resident", "held", "peak", "forward", "backward")
        print(f"{'recipe':<12} {'form':<10} {' '.join(f'{title:>10}' for title in titles)}  growth  spread  checked")
    for recipe, form in CASES:
        if form == "cut" and dist.get_world_size() == 1:
            continue
        rows.append(measure(recipe, form, options, device))
        if first:
            print(line(rows[-1]), flush=True)
        registry._shardings.clear()
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    if first and options.json:
        ran = {"torch": torch.__version__, "world": dist.get_world_size(), "steps": options.steps}
        name = torch.cuda.get_device_name() if cuda else "cpu"
        options.json.write_text(json.dumps({**ran, "device": name, "rows": rows}, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

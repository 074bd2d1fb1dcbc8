"""Bytes on the wire for every recipe and pass of FSDP2, counted from the collectives themselves.

    torchrun --nproc-per-node 2 tests/bench/wire.py [--json FILE]

One weight of 4096 x 14336 (512 x 1024 where there are no cards: bytes per element are what counts) is trained for two
steps: resharded and kept, its shards quantized and cast on gather, and once more with a few rows more, so that cuts
fall inside blocks. What ranks receive in each pass must be what LAYOUT.gather plans, to the byte; so must what the
optimizer's step sends.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import lcm, prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from weight_recipes import WEIGHTS

import layoutc
from layoutc.ints.cuts import Cuts
from layoutc.ints.sizes import cdiv
from layoutc.runtime.quantize import block_edges
from layoutc.runtime.sharding import registry

PLAIN = 2.0  # bytes per element of bf16
TE = "Transformer Engine 2.20.0.dev0, transformer_engine/pytorch/tensor"
# Bytes per element that ranks receive, by what the peers' hooks return, in forward, in backward, and where a weight
# stays gathered; for sizes at which their padding adds nothing (columns a multiple of 512).
PEERS: dict[str, tuple[str, tuple[float, float, float], str]] = {
    "mxfp8": ("TE MXFP8", (1 + 1 / 32, 1 + 1 / 32, 2 + 2 / 32), f"{TE}/mxfp8_tensor.py"),
    "fp8_block": ("TE FP8 block, 2D", (1 + 4 / 128**2,) * 3, f"{TE}/float8_blockwise_tensor.py"),
    # The scale of a 16x16 block travels sixteen times, once for each row.
    "nvfp4": ("TE NVFP4, 2D", (0.5 + 1 / 16,) * 3, f"{TE}/nvfp4_tensor.py"),
    "fp8_current": ("TE Float8", (1.0,) * 3, f"{TE}/float8_tensor.py"),
    "fp8_delayed": ("TE Float8", (1.0,) * 3, f"{TE}/float8_tensor.py"),
    # Both directions travel in both passes.
    "hybrid_fp8": ("TE Hybrid", (2 + 1 / 32 + 4 / 128**2,) * 3, f"{TE}/hybrid_tensor.py"),
    "fp8_current cast": ("torchao float8", (1.0,) * 3, "torchao 0.19.0, torchao/float8/fsdp_utils.py"),
}
REFUSED = {
    "fp8_block_1d": "TE refuses 1D blocks under FSDP2 (float8_blockwise_tensor.py)",
    "mxfp8 cast": "torchao gathers MXFP8 in the parameter's dtype: 2 B/element",
    "nvfp4 cast": "torchao gathers NVFP4 in the parameter's dtype: 2 B/element",
}


class Counting(TorchDispatchMode):
    """What collectives deliver to this rank, in bytes, and how often each kind is called."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanging = False
        self.nbytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kind, tensors = func._schema.name, []
            if func is torch.ops.c10d._allgather_base_.default:
                kind, tensors = "exchange" if self.exchanging else "gather", [args[0]]
            elif func is torch.ops.c10d.allreduce_.default:
                kind, tensors = "all-reduce", list(args[0])
            elif func is torch.ops.c10d._reduce_scatter_base_.default:
                kind, tensors = "gradients", [args[0]]
            self.calls[kind] += 1
            self.nbytes[kind] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return func(*args, **(kwargs or {}))


@contextmanager
def counting() -> Iterator[Counting]:
    """Counts; tells apart what ranks say of blocks that cuts go through from what FSDP2 gathers."""
    original, mode = block_edges._all_gather, Counting()

    def exchange(*arguments: Any) -> Any:
        mode.exchanging = True
        try:
            return original(*arguments)
        finally:
            mode.exchanging = False

    block_edges._all_gather = exchange
    try:
        with mode:
            yield mode
    finally:
        block_edges._all_gather = original
    unknown = set(mode.calls) - {"gather", "exchange", "all-reduce", "gradients"}
    assert not unknown, f"collectives that nobody planned: {unknown}"


@dataclass
class Row:
    """What one weight costs in one pass, or in the optimizer's step; bytes are those that a rank receives."""

    recipe: str
    form: str  # quantized, cast
    cuts: str  # aligned, inside
    phase: str  # forward, backward, kept, step
    shape: tuple[int, int]
    gathered: int
    planned: int
    exchanged: int
    reduced: int  # bytes of amax all-reduces
    reductions: int
    per_element: float = field(init=False)

    def __post_init__(self) -> None:
        self.per_element = self.gathered / prod(self.shape)


def shapes(recipe: str, shape: tuple[int, int], world: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """The shape, and one with a few rows more whose cuts fall inside blocks, where the recipe has such."""
    layout = recipe_of(recipe).LAYOUT
    yield "aligned", shape
    step = lcm(layout.multiple_m, layout.block_rows)
    for rows in range(shape[0] + step, shape[0] + 4 * step, step):
        if not Cuts(rows, cdiv(rows, world), world).aligned(layout.block_rows):
            yield "inside", (rows, shape[1])
            return


def recipe_of(recipe: str) -> Any:
    """The generated tensor class."""
    return importlib.import_module(f"layoutc.recipes.{recipe}").Tensor


def trained(recipe: str | None, form: str, shape: tuple[int, int], keeps: bool, device: torch.device) -> Iterator[Any]:
    """Forward, backward and step of the second of two steps, each with what it sent."""
    torch.manual_seed(0)
    m, k = shape
    model = nn.Sequential(nn.Linear(k, m, bias=False, dtype=torch.bfloat16, device=device))
    if recipe is not None:
        (layoutc.cast_on_gather_ if form == "cast" else layoutc.quantize_)(model, recipe)
    # By itself and under a root without weights: what a root holds stays gathered after forward.
    fully_shard(model[0], reshard_after_forward=not keeps)
    fully_shard(model)
    wraps = recipe is not None and form == "quantized"
    optimizer: Any = (
        layoutc.MasterWeights(torch.optim.SGD, model.parameters(), lr=1e-3)
        if wraps
        else torch.optim.SGD(model.parameters(), lr=1e-3)
    )
    x = torch.randn(16, k, dtype=torch.bfloat16, device=device)
    for step in range(2):
        with counting() as forward:
            loss = model(x).float().square().mean()
        with counting() as backward:
            loss.backward()
        with counting() as stepped:
            optimizer.step()
            if form == "cast" and step:
                layoutc.precompute_amaxes(model)
        optimizer.zero_grad()
    yield from (("forward", forward), ("backward", backward), ("step", stepped))
    with counting() as ahead:  # after precompute_amaxes
        model(x)
    yield "ahead", ahead


def exchange_bytes(layout: Any, k: int, world: int) -> int:
    """What ranks tell one another of the first and the last block of each, in fp32."""
    return world * 2 * (2 if layout.extremes else layout.block_rows) * k * 4


def amax_bytes(layout: Any, k: int) -> int:
    """What the shards of one weight reduce."""
    return 4 * prod(layout.amax_shape(k)) if layout.shares_amax else 0


def measured(recipe: str, form: str, cuts: str, shape: tuple[int, int], device: torch.device) -> Iterator[Row]:
    """The rows of one recipe, checked."""
    layout, world, (m, k) = recipe_of(recipe).LAYOUT, dist.get_world_size(), shape
    quantized, inside = form == "quantized", cuts == "inside"
    for keeps in (False, True):
        for phase, found in trained(recipe, form, shape, keeps, device):
            which: Any = "both" if keeps else "backward" if phase == "backward" else "forward"
            gathers = phase != "step" and not (keeps and phase == "backward")
            planned = layout.gather(m, k, world, which).nbytes if gathers else 0
            row = Row(
                recipe,
                form,
                cuts,
                "kept" if keeps and phase == "forward" else phase,
                shape,
                found.nbytes["gather"],
                planned,
                found.nbytes["exchange"],
                found.nbytes["all-reduce"],
                found.calls["all-reduce"],
            )
            told = f"{recipe} {form} {cuts} {row.phase}"
            assert row.gathered == planned, f"{told}: gathered {row.gathered} bytes, planned {planned}"
            # Values that decide scales travel when weights are quantized: at the step, or, cast, at each gather.
            quantizes = phase == "step" if quantized else gathers
            exchanged = exchange_bytes(layout, k, world) if quantizes and inside else 0
            assert row.exchanged == exchanged, f"{told}: exchanged {row.exchanged} bytes, planned {exchanged}"
            reduces = layout.shares_amax and (phase == "step" or (not quantized and gathers and phase != "ahead"))
            assert row.reductions == int(reduces), f"{told}: {row.reductions} all-reduces"
            # Cast, ranks also tell whether values are new: always ahead of gathers, and at gathers for a history.
            news = 4 if reduces and not quantized and (phase == "step" or layout.history) else 0
            assert row.reduced == (amax_bytes(layout, k) + news if reduces else 0), f"{told}: {row.reduced} bytes"
            if row.phase in (("kept",) if keeps else ("forward", "backward", "step")):
                yield row


def report(rows: list[Row], shape: tuple[int, int], world: int) -> None:
    """Prints what each pass gathers, then what quantizing sends."""
    by = {(row.recipe, row.form, row.cuts, row.phase): row for row in rows}
    print(f"{world} ranks, {shape[0]} x {shape[1]}, bytes per element that each rank receives; bf16: {PLAIN}")
    print(f"{'recipe':<17} {'pass':<9} {'counted':>8} {'planned':>8} {'of bf16':>8} {'cast':>8} {'cut':>8}  peers")
    for recipe in WEIGHTS:
        for number, phase in enumerate(("forward", "backward", "kept")):
            row, cast = by[recipe, "quantized", "aligned", phase], by[recipe, "cast", "aligned", phase]
            cut = by.get((recipe, "quantized", "inside", phase))
            figures = f"{row.per_element:8.5f} {row.planned / prod(shape):8.5f} {row.per_element / PLAIN:8.3f}"
            figures += f" {cast.per_element:8.5f}"
            figures += f" {cut.per_element:8.5f}" if cut else f" {'-':>8}"
            peers = [
                f"{PEERS[key][0]} {PEERS[key][1][number]:.5f}" for key in (recipe, f"{recipe} cast") if key in PEERS
            ]
            peers += [REFUSED[key] for key in (recipe, f"{recipe} cast") if key in REFUSED and not number]
            print(f"{recipe:<17} {phase:<9} {figures}  {'; '.join(peers)}".rstrip())
    for name, _, source in dict.fromkeys(PEERS.values()):
        print(f"{name}: from {source}")
    print("\nwhat quantizing one weight sends, in bytes that each rank receives (cut: cuts inside blocks)")
    print(f"{'recipe':<17} {'amax, a step':>13} {'cut, a step':>13} {'B/element':>10} {'cast: amax, a gather':>21}")
    for recipe in WEIGHTS:
        step, cast = by[recipe, "quantized", "aligned", "step"], by[recipe, "cast", "aligned", "forward"]
        cut = by.get((recipe, "quantized", "inside", "step"))
        told = f"{cut.exchanged:>13} {cut.exchanged / prod(cut.shape):10.5f}" if cut else f"{'-':>13} {'-':>10}"
        print(f"{recipe:<17} {step.reduced:>13} {told} {cast.reduced:>21}")


def main() -> None:
    """Prints the tables on rank 0; fails on the first difference."""
    parser = argparse.ArgumentParser(description="Bytes on the wire, counted.")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    parser.add_argument("--recipes", nargs="*", default=WEIGHTS)
    options = parser.parse_args()
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    world, shape = dist.get_world_size(), (4096, 14336) if cuda else (512, 1024)
    if world < 2:
        raise SystemExit("one rank gathers nothing: run it under torchrun with 2 or more")
    for keeps in (False, True):
        for phase, found in trained(None, "plain", shape, keeps, device):
            if phase == "forward" or (phase == "backward" and not keeps):
                assert found.nbytes["gather"] == PLAIN * prod(shape), f"bf16 {phase}"
    rows: list[Row] = []
    for recipe in options.recipes:
        for cuts, size in shapes(recipe, shape, world):
            for form in ("quantized", "cast"):
                rows += measured(recipe, form, cuts, size, device)
        registry._shardings.clear()
    if dist.get_rank() == 0:
        if set(options.recipes) == set(WEIGHTS):
            report(rows, shape, world)
        print(f"\n{len(rows)} figures, each as planned")
        if options.json:
            ran = {"torch": torch.__version__, "world": world, "device": device.type}
            peers = [
                {"recipe": key, "peer": name, "forward": f, "backward": b, "kept": both, "source": source}
                for key, (name, (f, b, both), source) in PEERS.items()
            ]
            options.json.write_text(json.dumps({**ran, "rows": [asdict(row) for row in rows], "peers": peers}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

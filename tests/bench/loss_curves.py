"""Tuning at a small learning rate: a byte-level transformer, quantized and cast on gather, beside plain fp32.

    python tests/bench/loss_curves.py [RECIPE...] [--steps 30] [--lr 1e-5]      # under torchrun: FSDP2 over all ranks

A model is first trained in fp32 (TF32 products), at 3e-4. From those weights each way of use is tuned at a rate at
which one step moves a weight by much less than a code. `on the grid` has its masters set to the dequantized weights,
as they are after a quantized checkpoint without optimizer state. Printed: the loss on held-out batches before and
after, and how far it went as a share of how far plain weights went. Exits with 1 where `quantized` ends more than 1e-3
from `cast`.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import layoutc
from layoutc.bench.demo import Config, Transformer, batches, corpus
from layoutc.runtime.weight.tensor import QuantizedTensor

RECIPES = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
HELD_OUT = 1_000_000  # steps from here on are not trained on
WAYS = ("quantized", "cast", "on the grid")
LIMIT = 1e-3


@dataclass(frozen=True)
class Run:
    """What one run measured."""

    before: float
    after: float


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy of the next byte."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, device: torch.device) -> None:
    """`config.steps` steps. All ranks see the same batches."""
    data = batches(corpus(), config, 0, device)
    for _ in range(config.steps):
        loss_of(model, next(data)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def held_out(model: nn.Module, config: Config, device: torch.device) -> float:
    """The mean loss of 16 batches that no run trains on."""
    data = batches(corpus(), config, 0, device, start=HELD_OUT)
    return float(torch.stack([loss_of(model, next(data)) for _ in range(16)]).mean())


def tune(model: nn.Module, recipe: str | None, way: str, config: Config, device: torch.device) -> Run:
    """Tunes a copy of the model one way."""
    model = copy.deepcopy(model)
    if recipe is not None:
        (layoutc.cast_on_gather_ if way == "cast" else layoutc.quantize_)(model, recipe)
    if dist.is_initialized():
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=config.lr)
    if way == "on the grid":
        with torch.no_grad():
            for param, master in optimizer.masters().items():
                local, into = (getattr(t, "_local_tensor", t) for t in (param, master))
                if isinstance(local, QuantizedTensor):
                    into.copy_(local.dequantize(torch.float32))
    before = held_out(model, config, device)
    train(model, optimizer, config, device)
    return Run(before, held_out(model, config, device))


def main() -> int:
    """The table; 1 where ways of use differ by more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--before", type=int, default=300, help="steps at 3e-4 that come first")
    asked = parser.parse_args()
    cuda = torch.cuda.is_available()
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    sizes = {"dim": asked.dim, "layers": asked.layers, "heads": 8, "context": asked.context, "batch": 8}
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Transformer(Config((), 0, **sizes)).to(device)
    first = Config((), asked.before, lr=3e-4, **sizes)
    train(model, layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=first.lr), first, device)
    config = Config((), asked.steps, lr=asked.lr, **sizes)
    plain = tune(model, None, "", config, device)
    rows = [("plain", "", plain)]
    worst = 0.0
    for recipe in asked.recipes:
        found = {way: tune(model, recipe, way, config, device) for way in WAYS}
        rows += [(recipe, way, run) for way, run in found.items()]
        worst = max(worst, abs(found["quantized"].after - found["cast"].after))
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{'recipe':<12} {'way':<12} {'before':>9} {'after':>9} {'after - before':>15} {'share of plain':>15}")
        for recipe, way, run in rows:
            moved = run.after - run.before
            share = moved / (plain.after - plain.before)
            print(f"{recipe:<12} {way:<12} {run.before:9.5f} {run.after:9.5f} {moved:15.5f} {share:15.3f}")
        print(f"largest distance of quantized from cast: {worst:.2e}, limit {LIMIT:.0e}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())

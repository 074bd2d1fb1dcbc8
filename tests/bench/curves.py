"""Losses of trainings with products in low precision beside bf16: a byte-level transformer, from scratch, some seeds.

    python tests/bench/curves.py [RECIPE...] [--steps 1000] [--seeds 3] [--jobs 1] [--json FILE] [--png FILE]
    python tests/bench/curves.py --read FILE... [--png FILE]    what other runs have written, together

All runs of a seed start from the same weights and see the same batches. bf16 is autocast over fp32 weights; recipes are
quantized weights under MasterWeights, all three products of each linear layer in low precision (by
the card's kernel, else quantized values multiplied in fp32, which is slower and gives the same numbers up to the order
of additions). Learning rate: linear warm-up, then a cosine to a tenth. Printed: the mean loss of the last twentieth of
the steps, mean and range over the seeds, and its distance from bf16's. Exits with 1 where the distance is above the
limit: 1%, and 3% for elements of 4 bits. --jobs trains so many at once, each in a process of its own: they are small,
and a card is mostly idle with one. --png needs matplotlib.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F

import layoutc
from layoutc.bench.demo import Config, Transformer, batches, corpus
from layoutc.runtime.product_mode import reference_products

RECIPES = ("fp8_delayed", "fp8_current", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4")
BF16 = "bf16"
WARM = 0.05  # of the steps
LIMITS = {4: 0.03, 8: 0.01}  # by the bits of an element


def learning_rate(step: int, config: Config) -> float:
    """Of a step, from 0 on."""
    warm = max(1, round(WARM * config.steps))
    if step < warm:
        return config.lr * (step + 1) / warm
    done = (step - warm) / max(1, config.steps - warm)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * done))


def losses_of(recipe: str, seed: int, config: Config, device: torch.device) -> list[float]:
    """The training loss of each step."""
    torch.manual_seed(seed)
    model = Transformer(config).to(device)
    if recipe != BF16:
        layoutc.quantize_(model.blocks, recipe)
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=config.lr, weight_decay=0.1)
    data = batches(corpus(), config, seed, device)
    losses = []
    mode: AbstractContextManager[None] = nullcontext() if recipe == BF16 else reference_products()
    with mode:
        for step in range(config.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config)
            inputs, targets = next(data)
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return [float(loss) for loss in torch.stack(losses).tolist()]


def at_the_end(losses: list[float]) -> float:
    """The mean of the last twentieth."""
    return fmean(losses[-max(1, len(losses) // 20) :])


def limit_of(recipe: str) -> float:
    """How far a recipe's loss may be from bf16's. Raises SystemExit for a recipe without products."""
    layout = importlib.import_module(f"layoutc.recipes.{recipe}").LAYOUT
    if layout.products is None:
        sys.exit(f"{recipe} names no recipe for activations, so it has no products: layoutc show {recipe} --products")
    codes = next(plane for plane in layout.stored.values() if plane.rows_per_value == 1)
    return LIMITS[4] if (codes.columns_per_value or 1) > 1 else LIMITS[8]


def draw(curves: dict[str, list[list[float]]], path: Path) -> None:
    """The mean over seeds of each variant, smoothed over a fiftieth of the steps."""
    from matplotlib import pyplot  # type: ignore[import-not-found]

    figure, axes = pyplot.subplots(figsize=(9, 6))
    for name, runs in curves.items():
        mean = torch.tensor(runs).mean(0)
        width = max(1, len(mean) // 50)
        axes.plot(range(width - 1, len(mean)), mean.unfold(0, width, 1).mean(1).tolist(), label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> int:
    """Trains, prints, writes what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES))
    for name, value in (("steps", 1000), ("seeds", 3), ("dim", 512), ("layers", 4), ("heads", 8), ("context", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path, nargs="+", metavar="FILE", help="losses by --json; nothing is trained")
    parser.add_argument("--png", type=Path)
    asked = parser.parse_args()
    if asked.png is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--png needs matplotlib (pip install matplotlib); --json keeps what it would draw")
    curves = read(asked.read) if asked.read else trained(asked)
    if asked.png is not None:
        draw(curves, asked.png)
    return compare(curves)


def trained(asked: argparse.Namespace) -> dict[str, list[list[float]]]:
    """The losses of bf16 and of each recipe, by seed; each is printed, and written, as soon as it is done."""
    for recipe in asked.recipes:
        limit_of(recipe)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = {name: getattr(asked, name) for name in ("dim", "layers", "heads", "context", "batch", "lr")}
    config = Config((), asked.steps, **sizes)
    curves: dict[str, list[list[float]]] = {}
    names, seeds = (BF16, *asked.recipes), range(asked.seeds)
    pool = ProcessPoolExecutor(asked.jobs, get_context("spawn")) if asked.jobs > 1 else None
    waiting = {
        name: [pool.submit(losses_of, name, seed, config, device).result for seed in seeds]
        if pool
        else [partial(losses_of, name, seed, config, device) for seed in seeds]
        for name in names
    }
    for name in names:
        began = time.perf_counter()
        curves[name] = [losses() for losses in waiting[name]]
        ends = [at_the_end(losses) for losses in curves[name]]
        print(
            f"{name:16} {fmean(ends):8.4f}  {min(ends):8.4f} to {max(ends):8.4f}  {time.perf_counter() - began:6.1f} s",
            flush=True,
        )
        if asked.json is not None:
            asked.json.write_text(json.dumps(curves), encoding="utf-8")
    if pool:
        pool.shutdown()
    return curves


def read(paths: list[Path]) -> dict[str, list[list[float]]]:
    """The losses of several runs, all of each name together: attention's gradients are not repeatable on a card."""
    curves: dict[str, list[list[float]]] = {}
    for path in paths:
        for name, runs in json.loads(path.read_text(encoding="utf-8")).items():
            curves.setdefault(name, []).extend(runs)
    return curves


def compare(curves: dict[str, list[list[float]]]) -> int:
    """Prints how far each recipe ends from bf16; 1 if one is beyond its limit."""
    plain = fmean(at_the_end(losses) for losses in curves[BF16])
    worse = 0
    print(f"{'':16} {'at the end':>10} {'from bf16':>10}  limit")
    print(f"{BF16:16} {plain:10.4f}")
    for recipe in (name for name in curves if name != BF16):
        end, limit = fmean(at_the_end(losses) for losses in curves[recipe]), limit_of(recipe)
        worse += abs(end / plain - 1) > limit
        print(f"{recipe:16} {end:10.4f} {end / plain - 1:10.2%}  {limit:.0%}")
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())

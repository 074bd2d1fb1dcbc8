"""Fits the constants of layoutc.estimate to what was measured, and compares every recorded point with its estimate.

    python tests/bench/fit_steps.py

Prints the constants, which `layoutc/estimate/machine.py` has rounded, and a table: each point, its estimate, the
residual in percent of what was measured, and whether the point was used in the fit or held out. Points were measured
with torch 2.11.0+cu130 on H200s of one host: 8 Llama-shaped blocks of dim 4096 and ffn 14336. A range is taken as its
middle. torchao's host time is not fitted, nor that of compiled models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from layoutc.build.operands import layouts_of
from layoutc.build.pipeline import plan_for
from layoutc.estimate.links import Link
from layoutc.estimate.machine import H200, NVLINK, PRODUCTS, SOCKETS, Machine
from layoutc.estimate.model import Model, llama
from layoutc.estimate.step import StepEstimate, estimate, sent
from layoutc.estimate.work import PASSES, Use, copied_bytes
from layoutc.ints.sizes import cdiv
from layoutc.plan.plan import Plan
from layoutc.spec.checks.read import read_spec_bytes

SPECS = Path(__file__).parent.parent.parent / "specs"


@dataclass(frozen=True)
class Point:
    """A recorded time in seconds: what it is of, and whether the constants are fitted to it."""

    label: str
    measured: float
    fitted: bool
    estimate: Callable[[Constants], float]


@dataclass(frozen=True)
class Constants:
    """What is fitted."""

    machine: Machine = H200
    nvlink: Link = NVLINK
    sockets: Link = SOCKETS

    def link(self, name: str) -> Link:
        """By name."""
        return self.nvlink if name == "NVLink" else self.sockets


@cache
def plan_of(name: str) -> Plan:
    """Of a recipe in specs/."""
    path = SPECS / f"{name}.yaml"
    spec, _ = read_spec_bytes(path.read_bytes(), str(path))
    assert spec is not None
    return plan_for(spec, layouts_of(spec, path.read_bytes(), str(path))[0])


@cache
def use(words: str) -> Use:
    """`bf16`, `fp8_block`, `cast fp8_block`, `fp8_block+low`; torchao: tensorwise, which travels as fp8_current."""
    if words == "bf16":
        return Use(words)
    if words == "torchao":
        return Use(words, plan_of("fp8_current"), cast=True, low=True)
    name = words.removeprefix("cast ").removesuffix("+low")
    return Use(words, plan_of(name), words.startswith("cast "), words.endswith("+low"))


def blocks(sequence: int = 4096, batch: int = 1) -> Model:
    """The model of tests/bench/step.py."""
    return llama("blocks", 4096, 14336, 32, 8, 8, sequence, batch)


LARGE = llama("blocks of 70B", 8192, 28672, 64, 8, 1, 4096, 1)


def step(words: str, model: Model, world: int, link: str, eager: bool) -> Callable[[Constants], StepEstimate]:
    return lambda at: estimate(use(words), model, world, at.link(link), at.machine, eager)


def total(words: str, model: Model, world: int, link: str, eager: bool) -> Callable[[Constants], float]:
    made = step(words, model, world, link, eager)
    return lambda at: made(at).total


def gathers(words: str, link: str) -> Callable[[Constants], float]:
    """All gathers of a step on two ranks."""
    made = step(words, blocks(), 2, link, True)
    return lambda at: made(at).gather_forward + made(at).gather_backward


def gather_alone(words: str, model: Model, world: int, copies: bool) -> Callable[[Constants], float]:
    """One gather of a group of plain bf16 shards, or planes; with copies until the weights are ready."""

    def seconds(at: Constants) -> float:
        shapes = model.block.weights
        own = sum(sent(use(words), shape, world, "forward") for shape in shapes)
        rows = sum(cdiv(m, world) * k for m, k in shapes)
        moved = 2 * own * (1 + world) if words == "bf16" else copied_bytes(use(words), world, own, rows)
        return at.nvlink.gather(own, world) + (moved / at.machine.memory if copies else 0)

    return seconds


# What travels of a step on two ranks, ms: 16 gathers.
IN_STEPS = {
    "NVLink": {"bf16": 15.3, "fp8_block": 8.0, "mxfp8": 8.1, "nvfp4": 4.8},
    "sockets": {"bf16": 369, "torchao": 189, "fp8_block": 185, "mxfp8": 188, "nvfp4": 97},
}
REDUCED = 390.5  # 370 to 411: 8 reduce-scatters over sockets
# Products of a step at batch 4, ms: two harnesses.
CARD = {"bf16": (238.1, 253.5), "torchao": (145.0, 129.0), "fp8_current+low": (123.8,), "fp8_block+low": (153.2,)}
# Gathers until the weights are there, host included, ms: RESULTS.md, "Gathers".
WAITED = {
    2: {"bf16": 1.435, "mxfp8": 1.074, "fp8_block": 1.083, "fp8_current": 1.122, "nvfp4": 0.997},
    4: {"bf16": 1.593, "mxfp8": 1.144, "fp8_block": 1.147, "fp8_current": 1.185, "nvfp4": 0.869},
}
# Whole steps, ms: sequence, batch, ranks, link and how; *: the constants are fitted to it. Lines of one kind are of
# different harnesses.
STEPS = """
512 1 2 NVLink eager: bf16 55*, fp8_block 99.5*, cast fp8_block 116*
4096 1 2 NVLink eager: bf16 108.7, fp8_block 112, mxfp8 113, nvfp4 114
4096 1 2 NVLink eager: cast fp8_block 123, cast mxfp8 121, cast nvfp4 116
4096 1 2 NVLink eager: bf16 107.6, fp8_current+low 129.7
4096 4 2 NVLink eager: bf16 349, fp8_block 345, mxfp8 344, nvfp4 349
4096 4 2 NVLink eager: cast fp8_block 350, cast mxfp8 347, cast nvfp4 349
4096 4 2 NVLink eager: bf16 347.2, fp8_current+low 243.8
4096 1 2 NVLink compiled: bf16 108.3*, fp8_block 106, mxfp8 112, nvfp4 112
4096 1 2 NVLink compiled: cast fp8_block 122, cast mxfp8 120, cast nvfp4 116, torchao 96.1
4096 1 2 NVLink compiled: bf16 106.3, torchao 115.6, fp8_current+low 116.4, fp8_block+low 127.9
4096 4 2 NVLink compiled: bf16 335*, fp8_block 331, mxfp8 333, nvfp4 331
4096 4 2 NVLink compiled: cast fp8_block 333, cast mxfp8 330, cast nvfp4 331, torchao 243
4096 4 2 NVLink compiled: bf16 340.9, torchao 249.3, fp8_current+low 234.3, fp8_block+low 264.9
4096 1 1 NVLink compiled: bf16 104.6, torchao 124.2, fp8_current+low 96.0, fp8_block+low 130.9
4096 4 1 NVLink compiled: bf16 331.9, torchao 252.6, fp8_current+low 225.3*, fp8_block+low 250.4
4096 1 1 NVLink eager: bf16 104.5, fp8_current+low 135, fp8_block+low 102
4096 1 4 NVLink eager: bf16 107
4096 1 4 NVLink compiled: bf16 108, torchao 104
4096 1 2 sockets eager: bf16 848*, fp8_block 642*, nvfp4 554*, mxfp8 715, cast nvfp4 550, torchao 748
"""


def points() -> list[Point]:
    """Everything that is recorded of gathers and steps."""
    made: list[Point] = []

    def add(label: str, ms: float, fitted: bool, seconds: Callable[[Constants], float]) -> None:
        made.append(Point(label, ms / 1e3, fitted, seconds))

    for link, rows in IN_STEPS.items():
        for words, ms in rows.items():
            add(f"gathers in a step, 2 ranks, {link}, {words}", ms, True, gathers(words, link))
    for words, ms in (("torchao", 7.7), ("cast fp8_block", 8.9), ("cast mxfp8", 8.8), ("cast nvfp4", 5.3)):
        add(f"gathers in a step, 2 ranks, NVLink, {words}", ms, False, gathers(words, "NVLink"))
    reduced = step("bf16", blocks(), 2, "sockets", True)
    add("reduce-scatters in a step, 2 ranks, sockets", REDUCED, True, lambda at: reduced(at).reduce_scatter)
    for words, ms in (("bf16", 0.888), ("fp8_block", 0.475), ("mxfp8", 0.487), ("nvfp4", 0.380)):
        add(f"gather alone, 2 ranks, NVLink, {words}", ms, False, gather_alone(words, blocks(), 2, False))
    for words, ms in (("bf16", 1.139), ("fp8_current", 0.651), ("mxfp8", 0.648), ("nvfp4", 0.359)):
        add(f"gather alone, 4 ranks, NVLink, {words}", ms, False, gather_alone(words, blocks(), 4, False))
    for words, ms in (("bf16", 1.271), ("fp8_block", 0.690), ("mxfp8", 0.732), ("nvfp4", 0.392)):
        add(f"gather to ready, 2 ranks, NVLink, {words}", ms, False, gather_alone(words, blocks(), 2, True))
    for words, ms in (("bf16", 4.327), ("fp8_block", 2.387), ("nvfp4", 1.290)):
        add(f"gather to ready, 2 ranks, NVLink, 70B, {words}", ms, False, gather_alone(words, LARGE, 2, True))
    for world, rows in WAITED.items():
        for words, ms in rows.items():
            label = f"gather and wait, {world} ranks, NVLink, {words}"
            add(label, ms, False, gather_alone(words, blocks(), world, True))
    for line in STEPS.strip().splitlines():
        where, _, times = line.partition(": ")
        sequence, batch, world, link, how = (int(word) if word.isdigit() else word for word in where.split())
        for time in times.split(", "):
            words, _, ms = time.rpartition(" ")
            label = f"step, {world} rank{'s' * (world > 1)}, {link}, sequence {sequence}, batch {batch}, {how}, {words}"
            seconds = total(words, blocks(sequence, batch), world, link, how == "eager")
            add(label, float(ms.rstrip("*")), ms.endswith("*"), seconds)
    return made


def fit_links() -> tuple[Link, Link]:
    """launch and bandwidth of each link: the least squares of relative residuals, which is linear in 1 / bandwidth."""
    found: dict[str, Link] = {}
    for name, rows in IN_STEPS.items():
        lines = []
        for words, ms in rows.items():
            weights = blocks().block.weights
            own = {one: sum(sent(use(words), shape, 2, one) for shape in weights) for one in PASSES}
            lines.append(np.array([16, 8 * sum(own.values())]) / (ms / 1e3))
        (latency, inverse), *_ = np.linalg.lstsq(np.array(lines), np.ones(len(lines)), rcond=None)
        start = NVLINK if name == "NVLink" else SOCKETS
        found[name] = replace(start, launch=float(latency) - start.hop, bandwidth=float(1 / inverse), reduced=1.0)
    fp32 = sum(m * k for m, k in blocks().block.weights) // 2 * 4
    alone = REDUCED / 8e3 - found["sockets"].latency(2)
    reduced = fp32 / (found["sockets"].bandwidth * alone)
    return replace(found["NVLink"], reduced=reduced), replace(found["sockets"], reduced=reduced)


def fit_products() -> float:
    """in_step: the factor by which products in steps are as fast as alone, least squares of relative residuals."""
    weights = blocks(batch=4)
    operations = 2 * weights.tokens * weights.block.elements * weights.groups
    rates = {
        "bf16": (PRODUCTS[""],) * 3,
        "torchao": (PRODUCTS["TensorWise"],) * 3,
        "fp8_current+low": (PRODUCTS["TensorWise"],) * 3,
        "fp8_block+low": (PRODUCTS["BlockWise128x128"],) * 2 + (PRODUCTS["BlockWise1x128"],),
    }
    shares = np.array(
        [sum(operations / r for r in rates[words]) / (ms / 1e3) for words, row in CARD.items() for ms in row]
    )
    return float(shares @ shares / shares.sum())


# The rest follows whole steps: where each begins, and the least that it can be.
NAMES = ("token_bytes", "operand_bytes", "interference", "group_host", "weight_host", "cast_host")
SCALES = np.array([20.0, 5.0, 0.3, 5e-3, 5e-4, 1e-3])


def fit_steps(at: Constants) -> Constants:
    """Gauss-Newton of relative residuals, with numeric derivatives and halved steps where a step does not help."""
    steps = [point for point in points() if point.fitted and point.label.startswith("step")]

    def with_(x: np.ndarray) -> Constants:
        return replace(at, machine=replace(at.machine, **dict(zip(NAMES, map(float, x * SCALES), strict=True))))

    def residuals(x: np.ndarray) -> np.ndarray:
        made = with_(x)
        return np.array([point.estimate(made) / point.measured - 1 for point in steps])

    x = np.ones(len(NAMES))
    for _ in range(30):
        now = residuals(x)
        slopes = np.array([(residuals(x + 1e-4 * one) - now) / 1e-4 for one in np.eye(len(x))]).T
        move, *_ = np.linalg.lstsq(slopes, -now, rcond=1e-6)
        for _ in range(12):
            new = np.maximum(x + move, 0)
            if np.square(residuals(new)).sum() < np.square(now).sum():
                break
            move = move / 2
        else:
            break
        x = new
    return with_(x)


def fit() -> Constants:
    """All constants."""
    nvlink, sockets = fit_links()
    start = Constants(replace(H200, in_step=fit_products()), nvlink, sockets)
    return fit_steps(start)


def main() -> None:
    """Prints the constants and the table."""
    found = fit()
    for link in (found.nvlink, found.sockets):
        speed = f"{link.bandwidth / 1e9:.2f} GB/s"
        print(f"{link.name}: {speed}, launch {link.launch * 1e6:.0f} us, reduced {link.reduced:.3f}")
    print(f"in_step {found.machine.in_step:.3f}")
    print(", ".join(f"{name} {getattr(found.machine, name):.4g}" for name in NAMES))
    print("\n| point | measured, ms | estimate, ms | residual | used |\n|---|--:|--:|--:|---|")
    kept = Constants()
    errors: dict[tuple[str, bool], list[float]] = {}
    for point in points():
        seconds = point.estimate(kept)
        error = 100 * (seconds / point.measured - 1)
        errors.setdefault((point.label.split(",")[0].split(" ")[0].rstrip("s"), point.fitted), []).append(error)
        print(
            f"| {point.label} | {point.measured * 1e3:.5g} | {seconds * 1e3:.4g} | {error:+.1f}% | "
            f"{'fitted' if point.fitted else 'held out'} |"
        )
    print()
    for (kind, fitted), some in errors.items():
        size = np.abs(some)
        how = "fitted" if fitted else "held out"
        print(f"{kind}, {how}: {len(some)} points, median {np.median(size):.1f}%, largest {size.max():.1f}%")


if __name__ == "__main__":
    main()

"""Fits the constants of layoutc.estimate to what was measured, and compares every recorded point with its estimate.

    python tests/bench/fit_steps.py

Prints the constants with the points that each rests on, which `layoutc/estimate/machine.py` has rounded, and a table:
each point with its runs (`recorded_steps.py`), how far these are apart, its estimate, the residual against the middle
of the runs and against the nearest of their range (0 within it), in percent, and whether the point was used in the fit
or held out. A point with one run has one residual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import recorded_steps as recorded
from blocks import Blocks, estimate, llama, sent

from layoutc.build.operands import layouts_of
from layoutc.build.pipeline import plan_for
from layoutc.estimate.links import Link, Links, Ring
from layoutc.estimate.machine import (
    CARDS,
    H100,
    H200,
    HOST_MEMORY,
    NVLINK,
    NVLINK_4,
    PRODUCTS,
    SOCKETS,
    Machine,
    factor_of,
)
from layoutc.estimate.state import EXCHANGED
from layoutc.estimate.work import PASSES, Parts, Runs, Use, copied_bytes
from layoutc.ints.sizes import cdiv
from layoutc.plan.plan import Plan
from layoutc.spec.checks.read import read_spec_bytes

SPECS = Path(__file__).parent.parent.parent / "specs"
# The peer's host, measured inside FSDP2 and not fitted: a gather of a weight takes 117 to 141 us; finding the amaxes of
# 64 weights after a step takes 2.2 ms. Compiled, its casts are Inductor's kernels, and call no operators.
PEER_GATHER, PEER_AMAXES = 129e-6, 2.2e-3 / 64


@dataclass(frozen=True)
class Point:
    """A recorded time in seconds: what it is of, its runs, and whether the constants are fitted to their middle."""

    label: str
    runs: tuple[float, ...]
    fitted: bool
    estimate: Callable[[Constants], float]

    @property
    def measured(self) -> float:
        """The middle of the runs."""
        return (min(self.runs) + max(self.runs)) / 2

    @property
    def spread(self) -> float:
        """How far the runs are apart, in percent of the middle."""
        return 100 * (max(self.runs) - min(self.runs)) / self.measured

    def errors(self, at: Constants) -> tuple[float, float]:
        """Percent of the middle of the runs, and of the nearest of their range."""
        seconds = self.estimate(at)
        nearest = min(max(seconds, min(self.runs)), max(self.runs))
        return 100 * (seconds / self.measured - 1), 100 * (seconds / nearest - 1)


@dataclass(frozen=True)
class Constants:
    """What is fitted. Of the peer in eager mode: peer_operand_bytes, whose casts are not fused; peer_linear, seconds of
    the host for each of four casts in a linear layer's step."""

    machine: Machine = H200
    nvlink: Link = NVLINK
    nvlink_4: Link = NVLINK_4
    sockets: Link = SOCKETS
    peer_operand_bytes: float = 114.0
    peer_linear: float = 597e-6

    def link(self, name: str, world: int = 2) -> Link:
        """By name; that of four ranks is another."""
        if name == "host-memory":
            return HOST_MEMORY
        return self.sockets if name == "sockets" else self.nvlink_4 if world == 4 else self.nvlink

    def machine_for(self, words: str, how: str, card: Machine = H200) -> Machine:
        """The machine with a card's memory, or as the peer uses it."""
        machine = replace(self.machine, name=card.name, memory=card.memory)
        if words != "torchao":
            return machine
        host = replace(machine, low_host=0.0, gather_host=PEER_GATHER)
        if how.startswith("eager"):
            eager = replace(host, cast_host=4 * self.peer_linear + PEER_AMAXES)
            return replace(eager, operand_bytes=self.peer_operand_bytes)
        return replace(host, cast_host=machine.weight_host + PEER_AMAXES)


@cache
def plan_of(name: str) -> Plan:
    """Of a recipe in specs/."""
    path = SPECS / f"{name}.yaml"
    spec, _ = read_spec_bytes(path.read_bytes(), str(path))
    assert spec is not None
    return plan_for(spec, layouts_of(spec, path.read_bytes(), str(path))[0])


@cache
def use(words: str) -> Use:
    """`bf16`, `fp8_block`, `cast fp8_block`, `fp8_block+low`, `fp8_block+on_gather`, any with `+exchange`, by layers if
    not on gather; torchao: tensorwise, which travels as fp8_current."""
    if words.endswith("+exchange"):
        return replace(use(words.removesuffix("+exchange")), exchange=EXCHANGED)
    if words.endswith("+on_gather"):
        return replace(use(words.removesuffix("+on_gather")), on_gather=True)
    if words == "bf16":
        return Use(words)
    if words == "torchao":
        return Use(words, plan_of("fp8_current"), cast=True, low=True, on_gather=False)
    name = words.removeprefix("cast ").removesuffix("+low")
    return Use(words, plan_of(name), words.startswith("cast "), words.endswith("+low"), on_gather=False)


def blocks(sequence: int = 4096, batch: int = 1) -> Blocks:
    """The model of tests/bench/step.py."""
    return llama(4096, 14336, 32, 8, 8, sequence, batch)


LARGE = llama(8192, 28672, 64, 8, 1, 4096, 1)


def over(link: Link) -> Links:
    """Ranks of one host."""
    return Links(link, link)


def step(
    words: str, model: Blocks, world: int, link: str, how: str, card: Machine = H200, together: int = 1
) -> Callable[[Constants], Parts]:
    """how: eager or compiled, and -graph where the step is captured in a CUDA graph. together: steps in a row."""

    def made(at: Constants) -> Parts:
        machine = at.machine_for(words, how, card)
        runs: Runs = "graph" if how.endswith("-graph") else "eager" if how == "eager" else "compiled"
        return estimate(use(words), model, world, at.link(link, world), machine, runs, together)

    return made


def total(
    words: str, model: Blocks, world: int, link: str, how: str, card: Machine, together: int = 1
) -> Callable[[Constants], float]:
    made = step(words, model, world, link, how, card, together)
    return lambda at: made(at).total


_HOSTS: dict[str, float] = {}


def host_beside(
    seconds: float, machine: Machine, link: Link, size: tuple[int, int], world: int, runs: Runs, together: int
) -> float:
    """The factor of a host where bf16's step takes so many seconds: found once for all that was timed beside it."""
    key, plain, model = repr((seconds, machine, link, size, world, runs, together)), use("bf16"), blocks(*size)
    if key not in _HOSTS:
        _HOSTS[key] = factor_of(
            seconds, machine, lambda one: estimate(plain, model, world, link, one, runs, together).total
        )
    return _HOSTS[key]


def beside(
    words: str, ms: float, size: tuple[int, int], world: int, link: str, how: str, card: Machine, together: int = 1
) -> Callable[[Constants], float]:
    """A step on a host where bf16's takes so many milliseconds, both of so many in a row. size: sequence and batch."""
    runs: Runs = "eager" if how == "eager" else "compiled"

    def seconds(at: Constants) -> float:
        own, over = at.machine_for("bf16", how, card), at.link(link, world)
        factor = host_beside(ms / 1e3, own, over, size, world, runs, together)
        machine = at.machine_for(words, how, card).with_host(factor)
        return estimate(use(words), blocks(*size), world, over, machine, runs, together).total

    return seconds


def gathers(words: str, link: str) -> Callable[[Constants], float]:
    """All gathers of a step on two ranks."""
    made = step(words, blocks(), 2, link, "eager")
    return lambda at: made(at).gather_forward + made(at).gather_backward


def gather_alone(words: str, model: Blocks, world: int, copies: bool) -> Callable[[Constants], float]:
    """One gather of a group of plain bf16 shards, or planes; with copies until the weights are ready."""

    def seconds(at: Constants) -> float:
        shapes = model.shapes
        own = sum(sent(use(words), shape, world, "forward") for shape in shapes)
        rows = sum(cdiv(m, world) * k for m, k in shapes)
        moved = 2 * own * (1 + world) if words == "bf16" else copied_bytes(use(words), world, own, rows)
        return over(at.link("NVLink", world)).gather(own, Ring(world, world)) + (
            moved / at.machine.memory if copies else 0
        )

    return seconds


def gather_and_wait(words: str, world: int, host: float) -> Callable[[Constants], float]:
    """The same with the host's time as it was measured beside: half of it lies before the collective (the hooks, copies
    in), half after (views, copies out), and the card is not done before the host has issued all."""
    ready = gather_alone(words, blocks(), world, True)
    return lambda at: max(host / 2 + ready(at), host)


def points() -> list[Point]:
    """Everything that is recorded of gathers and steps."""
    made: list[Point] = []

    def add(label: str, ms: tuple[float, ...] | float, fitted: bool, seconds: Callable[[Constants], float]) -> None:
        runs = ms if isinstance(ms, tuple) else (ms,)
        made.append(Point(label, tuple(run / 1e3 for run in runs), fitted, seconds))

    for link, rows in recorded.IN_STEPS.items():
        for words, ms in rows.items():
            add(f"gathers in a step, 2 ranks, {link}, {words}", ms, True, gathers(words, link))
    for words, ms in recorded.OTHERS_IN_STEPS.items():
        add(f"gathers in a step, 2 ranks, NVLink, {words}", ms, False, gathers(words, "NVLink"))
    reduced = step("bf16", blocks(), 2, "sockets", "eager")
    add("reduce-scatters in a step, 2 ranks, sockets", recorded.REDUCED, True, lambda at: reduced(at).reduce_scatter)
    for world, alone in recorded.ALONE.items():
        for words, ms in alone.items():
            label, fitted = f"gather alone, {world} ranks, NVLink, {words}", (world, words) == (4, "bf16")
            add(label, ms, fitted, gather_alone(words, blocks(), world, False))
    for words, ms in recorded.READY.items():
        add(f"gather to ready, 2 ranks, NVLink, {words}", ms, False, gather_alone(words, blocks(), 2, True))
    for words, ms in recorded.READY_70B.items():
        add(f"gather to ready, 2 ranks, NVLink, 70B, {words}", ms, False, gather_alone(words, LARGE, 2, True))
    for world, waited in recorded.WAITED.items():
        for words, (ms, host) in waited.items():
            seconds = gather_and_wait(words, world, host / 1e3)
            add(f"gather and wait, {world} ranks, NVLink, {words}", ms, False, seconds)
    for kind, lines, more, card in (
        ("step", recorded.STEPS, "", H200),
        ("exchanged", recorded.EXCHANGED, "+exchange", H200),
        ("H100", recorded.ON_H100S, "", H100),
        ("on-gather", recorded.ON_GATHER, "", H100),
    ):
        for line in lines.strip().splitlines():
            where, _, times = line.partition(": ")
            *sizes, link, how = where.split()
            sequence, batch, world = map(int, sizes)
            for time in times.split(", "):
                parts = time.rstrip("*").split(" ")
                count = 2 if parts[0] == "cast" else 1
                words, runs = " ".join(parts[:count]) + more, tuple(map(float, parts[count:]))
                ranks = f"{world} rank{'s' * (world > 1)}"
                label = f"{kind}, {ranks}, {link}, sequence {sequence}, batch {batch}, {how}, {words}"
                add(label, runs, time.endswith("*"), total(words, blocks(sequence, batch), world, link, how, card))
    for line in recorded.PAIRED.strip().splitlines():
        start, _, times = line.partition(": ")
        *sizes, link, how, name = start.split()
        (sequence, batch, world), card = map(int, sizes), CARDS[name.lower()]
        (_, plain), *others = (time.rsplit(" ", 1) for time in times.split(", "))
        for words, ms in others:
            fitted, ms = ms.endswith("*"), ms.rstrip("*")
            where = f"{name}, {world} ranks, {link}, sequence {sequence}, batch {batch}, {how}"
            label = f"paired, {where}, bf16 {plain}: {words}"
            seconds = beside(words, float(plain), (sequence, batch), world, link, how, card)
            add(label, float(ms), fitted, seconds)
    for line in recorded.TOGETHER.strip().splitlines():
        start, _, times = line.partition(": ")
        *sizes, link, how, name, together = start.split()
        (sequence, batch, world, steps), card = map(int, (*sizes, together)), CARDS[name.lower()]
        every = [time.rsplit(" ", 1) for time in times.split(", ")]
        where = f"together, {name}, {world} ranks, {link}, sequence {sequence}, batch {batch}, {how}, {steps} in a row"
        model, plain = blocks(sequence, batch), every[0][1]
        for words, ms in every if sequence > 512 else every[1:]:
            if sequence > 512:
                label, seconds = f"{where}, {words}", total(words, model, world, link, how, card, steps)
            else:
                label = f"{where}, bf16 {plain}: {words}"
                seconds = beside(words, float(plain), (sequence, batch), world, link, how, card, steps)
            add(label, float(ms), False, seconds)
    return made


def fit_links() -> tuple[Link, Link, Link]:
    """launch and bandwidth of each link: the least squares of relative residuals, which is linear in 1 / bandwidth."""
    found: dict[str, Link] = {}
    for name, rows in recorded.IN_STEPS.items():
        lines = []
        for words, ms in rows.items():
            weights = blocks().shapes
            own = {one: sum(sent(use(words), shape, 2, one) for shape in weights) for one in PASSES}
            lines.append(np.array([16, 8 * sum(own.values())]) / (ms / 1e3))
        (latency, inverse), *_ = np.linalg.lstsq(np.array(lines), np.ones(len(lines)), rcond=None)
        start = NVLINK if name == "NVLink" else SOCKETS
        found[name] = replace(start, launch=float(latency) - start.hop, bandwidth=float(1 / inverse), reduced=1.0)
    elements = sum(m * k for m, k in blocks().shapes)
    alone = sum(recorded.REDUCED) / 2 / 8e3 - over(found["sockets"]).latency(Ring(2, 2))
    reduced = elements // 2 * 4 / (found["sockets"].bandwidth * alone)
    nvlink, sockets = (replace(found[name], reduced=reduced) for name in ("NVLink", "sockets"))
    others = elements // 4 * 2 * 3
    four = replace(nvlink, bandwidth=others / (recorded.ALONE[4]["bf16"] / 1e3 - over(nvlink).latency(Ring(4, 4))))
    return nvlink, four, sockets


def fit_products() -> float:
    """in_step: the factor by which products in steps are as fast as alone, least squares of relative residuals."""
    weights = blocks(batch=4)
    operations = 2 * weights.load.tokens * sum(m * k for m, k in weights.shapes) * len(weights.model.layers)
    rates = {
        "bf16": (PRODUCTS[""],) * 3,
        "torchao": (PRODUCTS["TensorWise"],) * 3,
        "fp8_current+low": (PRODUCTS["TensorWise"],) * 3,
        "fp8_block+low": (PRODUCTS["BlockWise128x128"],) * 2 + (PRODUCTS["BlockWise1x128"],),
    }
    shares = np.array(
        [sum(operations / r for r in rates[words]) / (ms / 1e3) for words, row in recorded.CARD.items() for ms in row]
    )
    return float(shares @ shares / shares.sum())


# The rest follows whole steps: where each begins, and the least that it can be.
NAMES = (
    *("token_bytes", "operand_bytes", "interference"),
    *("group_host", "weight_host", "cast_host", "low_host", "graph_host"),
)
SCALES = np.array([20.0, 5.0, 0.3, 5e-3, 5e-4, 5e-4, 1e-4, 1e-4, 50.0, 5e-4])


def fit_steps(at: Constants, start: np.ndarray | None = None, rounds: int = 30) -> Constants:
    """Gauss-Newton of relative residuals, with numeric derivatives and halved steps where a step does not help.

    start: in SCALES.
    """
    steps = [point for point in points() if point.fitted and point.label.startswith(("step", "paired"))]

    def with_(x: np.ndarray) -> Constants:
        *own, peer, linear = map(float, x * SCALES)
        machine = replace(at.machine, **dict(zip(NAMES, own, strict=True)))
        return replace(at, machine=machine, peer_operand_bytes=peer, peer_linear=linear)

    def residuals(x: np.ndarray) -> np.ndarray:
        made = with_(x)
        return np.array([point.estimate(made) / point.measured - 1 for point in steps])

    x = np.ones(len(SCALES)) if start is None else start
    now = residuals(x)
    for _ in range(rounds):
        slopes = np.array([(residuals(x + 1e-4 * one) - now) / 1e-4 for one in np.eye(len(x))]).T
        move, *_ = np.linalg.lstsq(slopes, -now, rcond=1e-6)
        for _ in range(12):
            new = np.maximum(x + move, 0)
            then = residuals(new)
            if np.square(then).sum() < np.square(now).sum():
                break
            move = move / 2
        else:
            break
        x, now = new, then
    return with_(x)


def places(kept: Constants) -> np.ndarray:
    """Where constants stand, in SCALES."""
    own = [getattr(kept.machine, name) for name in NAMES]
    return np.array([*own, kept.peer_operand_bytes, kept.peer_linear]) / SCALES


# What is fitted, how many constants, and to what.
FITTED = (
    ("launch and bandwidth of NVLink", 2, f"{len(recorded.IN_STEPS['NVLink'])} sums of gathers"),
    ("launch and bandwidth of sockets", 2, f"{len(recorded.IN_STEPS['sockets'])} sums of gathers"),
    ("bandwidth among four ranks", 1, "1 gather"),
    ("reduced", 1, "1 sum of reduce-scatters"),
    ("in_step", 1, f"{sum(map(len, recorded.CARD.values()))} sums of products"),
    (
        f"{', '.join(NAMES)} and the peer's operand_bytes and linear",
        len(SCALES),
        f"{recorded.STEPS.count('*')} steps and {recorded.PAIRED.count('*')} beside bf16's",
    ),
)


def fit(near: Constants | None = None) -> Constants:
    """All constants. near: one round of the fit from there, which moves what is no fit, and costs little."""
    nvlink, four, sockets = fit_links()
    start = Constants(replace(H200, in_step=fit_products()), nvlink, four, sockets)
    return fit_steps(start) if near is None else fit_steps(start, places(near), rounds=1)


def main() -> None:
    """Prints the constants and the table."""
    found = fit()
    for name, link in (("NVLink", found.nvlink), ("NVLink, 4 ranks", found.nvlink_4), ("sockets", found.sockets)):
        print(f"{name}: {link.bandwidth / 1e9:.2f} GB/s, launch {link.launch * 1e6:.0f} us, reduced {link.reduced:.3f}")
    print(f"in_step {found.machine.in_step:.3f}")
    print(", ".join(f"{name} {getattr(found.machine, name):.4g}" for name in NAMES))
    print(f"the peer's operand_bytes, eager: {found.peer_operand_bytes:.4g}, linear {found.peer_linear * 1e6:.0f} us")
    for which, count, basis in FITTED:
        print(f"{count} fitted: {which}, to {basis}")
    print("\n| point | runs, ms | spread | estimate, ms | of the middle | of the nearest | used |")
    print("|---|--:|--:|--:|--:|--:|---|")
    kept = Constants()
    errors: dict[tuple[str, bool], list[tuple[float, float, list[float]]]] = {}
    for point in points():
        middle, nearest = point.errors(kept)
        errors.setdefault((point.label.split(",")[0].split(" ")[0].rstrip("s"), point.fitted), []).append(
            (middle, nearest, [100 * (point.estimate(kept) / run - 1) for run in point.runs])
        )
        runs = " ".join(f"{run * 1e3:.5g}" for run in point.runs)
        spread = f"{point.spread:.0f}%" if len(point.runs) > 1 else ""
        print(
            f"| {point.label} | {runs} | {spread} | {point.estimate(kept) * 1e3:.4g} | {middle:+.1f}% | "
            f"{nearest:+.1f}% | {'fitted' if point.fitted else 'held out'} |"
        )
    print()
    for (kind, fitted), some in errors.items():
        print(f"{kind}, {'fitted' if fitted else 'held out'}: {len(some)} points")
        middles, nearests, each = (list(column) for column in zip(*some, strict=True))
        runs = [run for row in each for run in row]
        for what, residuals in (
            ("the middle", middles),
            ("the nearest", nearests),
            (f"each of {len(runs)} runs", runs),
        ):
            size = np.abs(residuals)
            beyond = f"{(size > 15).sum()} beyond 15%"
            print(f"    of {what}: median {np.median(size):.1f}%, largest {size.max():.1f}%, {beyond}")


if __name__ == "__main__":
    main()

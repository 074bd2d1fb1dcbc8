"""Estimates of training steps as tables: for each link, a row for each world size and recipe, bf16 first."""

from __future__ import annotations

from collections.abc import Sequence

from layoutc.estimate.links import Link
from layoutc.estimate.machine import H200, HOST_MEMORY, SOCKETS, Machine
from layoutc.estimate.model import Model
from layoutc.estimate.step import StepEstimate
from layoutc.report.tables import Table

HEADS = (
    *("ranks", "weights", "gathered", "forward", "backward", "gather", "reduce", "optimizer", "host", "exposed"),
    *("undisturbed", "step", "of bf16"),
)
_HOST = "of compiled models, without --eager; none with --graph"
_MEASURED = (
    "the parts are as if each ran alone; exposed: of the step, without compute and optimizer",
    "gathered: GB that have arrived after all gathers of a forward, with the padding of shards",
    "left out: the loss, memory, other parallelism; each rank of the world is one of FSDP's",
)


def measured(machine: Machine, host: float | None = None, together: int = 1) -> list[str]:
    """Notes on what the estimates of a machine rest on. host: how many times as long its own takes, if it is known.
    together: steps that follow one another."""
    own = (
        "as on a few hosts, which differed by up to 2 (--host)"
        if host is None
        else f"{host:.2f} times as long as on those that were measured"
    )
    slower = f"{1 + machine.interference:.2f}"
    return [
        "measured: steps on 1, 2 and 4 H200s by NVLink, on 2 over sockets and through host memory; else extrapolated",
        *([f"card: an {machine.name} is an H200 with slower memory"] if machine.name != H200.name else []),
        f"link and products, attention too, slow one another by {slower} where they overlap: fitted, least certain",
        "undisturbed: the step without that; ratios to bf16 depend on it little, times do",
        f"host: {own}; {_HOST}",
        *in_a_row(together),
        *_MEASURED,
    ]


def in_a_row(steps: int) -> list[str]:
    """A note on steps that follow one another, if there are several."""
    said = f"a step is the mean of {steps} in a row; constants are fitted to steps that begin when all are at rest"
    return [said] if steps > 1 else []


# Of weights that are dequantized on gather.
IN_TIME = [
    "weights are dequantized on gather: after each gather, all of a group; their products take what those of bf16 do",
    "so do they of the host, whose gathers take what those of recipes do",
]


def exchanges(apart: Sequence[int], per_host: int, within: str) -> list[str]:
    """Notes on gradients that are exchanged. apart: worlds where several hosts shard together; within: how not to."""
    notes = [
        "gradients are exchanged, of plain weights too; the time of the link has their copies and sums",
        f"an exchange reaches {SOCKETS.exchanged:.2f} of the bandwidth over sockets, {HOST_MEMORY.exchanged:.2f} "
        "through host memory, as measured; else all of it",
    ]
    if apart:
        worlds = ", ".join(f"{world:,}" for world in apart)
        notes += [
            f"on {worlds} ranks hosts shard together, which exchange_gradients refuses without across_hosts=True:",
            f"a host of {per_host} sends up to {per_host / 2:g} times what a ring does in fp32, which the time has",
            f"what works there: {within}",
        ]
    return notes


def tables(model: Model, made: Sequence[tuple[Link, Sequence[StepEstimate]]], notes: Sequence[str]) -> list[Table]:
    """Estimates of a model: for each link those of all worlds and recipes, in order."""
    found = [
        Table(_title(model, link), HEADS, _rows(model, rows), frozenset({0, *range(2, len(HEADS))}))
        for link, rows in made
    ]
    return [*found, Table("What this rests on", (), tuple((line,) for line in notes))]


def _title(model: Model, link: Link) -> str:
    size = (
        f"{model.groups} groups of {model.block.elements / 1e6:,.0f} M weights, {model.batch} x {model.sequence} tokens"
    )
    return f"{model.name}, {size}, {link.name} a rank, {link.rule}: ms of a step"


def _rows(model: Model, rows: Sequence[StepEstimate]) -> tuple[tuple[str, ...], ...]:
    plain = {one.world: one.total for one in rows if one.name == "bf16"}
    return tuple(
        (
            f"{one.world:,}",
            one.name,
            f"{one.bytes_forward * model.groups / 1e9:,.1f}",
            *(_ms(part) for part in (one.forward, one.backward, one.gather_forward + one.gather_backward)),
            *(_ms(part) for part in (one.reduce_scatter, one.optimizer, one.host, one.exposed)),
            *(_ms(part) for part in (one.undisturbed, one.total)),
            f"{plain[one.world] / one.total:.2f}x",
        )
        for one in rows
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"

"""Estimates of training steps as tables: for each link, a row for each world size and recipe, bf16 first."""

from __future__ import annotations

from collections.abc import Sequence

from layoutc.estimate.links import Link
from layoutc.estimate.machine import H200
from layoutc.estimate.model import Model
from layoutc.estimate.step import StepEstimate
from layoutc.report.tables import Table

HEADS = (
    *("ranks", "weights", "gathered", "forward", "backward", "gather", "reduce", "optimizer", "host", "exposed"),
    *("undisturbed", "step", "of bf16"),
)
MEASURED = (
    "measured: steps on 1, 2 and 4 H200s by NVLink, on 2 over sockets of 9.5 GB/s; all else is extrapolated",
    f"compute and link slow one another by {1 + H200.interference:.2f} where they overlap: fitted, least certain",
    "host: of eager and compiled models alike, as on a few hosts, which differed by up to 2; none with --graph",
    "undisturbed: the step without that; ratios to bf16 depend on it little, times do",
    "the parts are as if each ran alone; exposed: of the step, without compute and optimizer",
    "gathered: GB that a rank holds after all gathers of a forward, with the padding of shards",
    "left out: the loss, memory, other parallelism; each rank of the world is one of FSDP's",
)


def tables(model: Model, made: Sequence[tuple[Link, Sequence[StepEstimate]]]) -> list[Table]:
    """Estimates of a model: for each link those of all worlds and recipes, in order."""
    found = [
        Table(_title(model, link), HEADS, _rows(model, rows), frozenset({0, *range(2, len(HEADS))}))
        for link, rows in made
    ]
    return [*found, Table("What this rests on", (), tuple((line,) for line in MEASURED))]


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

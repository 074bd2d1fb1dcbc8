"""The parts of steps as a table: for each number of cards, a row per recipe, bf16 first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layoutc.report.budgets.figures import NOTES as MEMORY
from layoutc.report.budgets.figures import faster, label, ms, title
from layoutc.report.tables import Table

HEADS = (
    *("cards", "weights", "gathered", "forward", "backward", "gather", "reduce", "replicas", "optimizer", "host"),
    *("exposed", "undisturbed", "step", "as fast as bf16"),
)
NOTES = (
    "ms; the parts are as if each ran alone; exposed: of the step, without compute and optimizer",
    "gathered: GB that have arrived after all gathers of a forward; replicas: all-reduces among them",
    "left out: the loss and memory that runs out; each card is one of FSDP's ranks",
)


def table(data: Mapping[str, Any]) -> list[Table]:
    """The table of a plan in JSON values."""
    rows = tuple(_row(one, of) for one, of in zip(data["budgets"], faster(data["budgets"]), strict=True))
    notes = [*NOTES, *data["model"]["notes"], *(note for note in data["notes"] if note not in MEMORY)]
    return [
        Table(title(data), HEADS, rows, frozenset({0, *range(2, len(HEADS))})),
        Table("What this rests on", (), tuple((line,) for line in notes)),
    ]


def _row(one: Mapping[str, Any], of_bf16: str) -> tuple[str, ...]:
    step, world = one["step"], one["mesh"]["world"]
    return (
        f"{world:,}",
        label(one),
        f"{one['traffic']['forward'] * (world // one['mesh']['replicas']) / 1e9:,.1f}",
        *(ms(part) for part in (step["forward"], step["backward"], step["gather_forward"] + step["gather_backward"])),
        *(ms(step[part]) for part in ("reduce_scatter", "all_reduce", "optimizer", "host", "exposed", "undisturbed")),
        ms(step["total"]),
        of_bf16,
    )

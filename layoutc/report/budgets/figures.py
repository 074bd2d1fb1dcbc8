"""Budgets of models as tables, as JSON values and as rows of CSV: one dict of figures, which all of them print."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from layoutc.budget.totals import Budget, Setting
from layoutc.models.weights import Model
from layoutc.report.describe import as_data
from layoutc.report.tables import Table

VERSION = 1  # of the JSON
HEADS = (
    *("ranks", "recipe", "quantized", "weights", "masters", "moments", "gradients", "gathered", "peak", "memory"),
    *("sent fwd", "sent bwd", "reduced", "gather ms", "step ms", "of first"),
)
NOTES = (
    "a rank's GB, of the rank that holds the most; sent: what it puts into the collectives of a step",
    "gathered: the root, which stays, and the largest other layer; peak: the most that gathers and gradients add",
    "memory: weights, masters, moments and the peak; activations, laid out and dequantized weights are not in it",
    "step: estimated as `layoutc estimate` does, from steps on up to four H200s; all else is extrapolated",
)

# Of weights that are dequantized on gather.
IN_MEMORY = [
    "gathered: of codes their values, in plain weights' dtype; peak: with the codes until values are made of them,",
    "and with the tensor in which planes of a group travel, where each rank has whole blocks and multiples of 16 bytes",
]


def data_of(model: Model, at: Setting, budgets: Sequence[Budget], sequence: int, batch: int) -> dict[str, Any]:
    """Everything as JSON values, from which tables, CSV and charts are made."""
    return {
        "layoutc_plan": VERSION,
        "model": {
            "name": model.name,
            "source": model.source,
            "elements": model.elements,
            "layers": len(model.layers),
            "notes": list(model.notes),
        },
        "setting": {
            "sequence": sequence,
            "batch": batch,
            "bytes": as_data(at.dtypes),
            "link": as_data(at.link),
            "machine": at.machine.name,
            "host": at.runs != "graph",
            "runs": at.runs,
            "together": at.together,
            "exchange": any(one.exchange for one in budgets),
            "on_gather": any(one.on_gather for one in budgets),
        },
        "notes": list(NOTES),
        "budgets": [_budget(one) for one in budgets],
    }


def _budget(one: Budget) -> dict[str, Any]:
    data = as_data(one)
    assert isinstance(data, dict)
    data["resident"]["total"] = one.resident.total
    data["memory"] = one.memory
    return data


FIGURES: Mapping[str, tuple[str, ...]] = {
    "recipe": ("recipe",),
    "how": ("how",),
    "exchange": ("exchange",),
    "on_gather": ("on_gather",),
    "world": ("mesh", "world"),
    "replicas": ("mesh", "replicas"),
    "tensor": ("mesh", "tensor"),
    "experts": ("mesh", "experts"),
    "quantized_elements": ("quantized",),
    "plain_elements": ("plain",),
    "weights_bytes": ("resident", "weights"),
    "masters_bytes": ("resident", "masters"),
    "moments_bytes": ("resident", "moments"),
    "gradients_bytes": ("resident", "gradients"),
    "left_bytes": ("resident", "left"),
    "root_gathered_bytes": ("peaks", "root"),
    "layer_gathered_bytes": ("peaks", "layer"),
    "peak_forward_bytes": ("peaks", "forward"),
    "peak_backward_bytes": ("peaks", "backward"),
    "memory_bytes": ("memory",),
    "sent_forward_bytes": ("traffic", "forward"),
    "sent_backward_bytes": ("traffic", "backward"),
    "reduced_bytes": ("traffic", "reduced"),
    "replicated_bytes": ("traffic", "replicated"),
    "exchanged_bytes": ("traffic", "exchanged"),
    "gather_forward_seconds": ("step", "gather_forward"),
    "gather_backward_seconds": ("step", "gather_backward"),
    "reduce_scatter_seconds": ("step", "reduce_scatter"),
    "step_seconds": ("step", "total"),
}


def figure(budget: Mapping[str, Any], name: str) -> Any:
    """One of FIGURES, of a budget in JSON values."""
    value: Any = budget
    for key in FIGURES[name]:
        value = value[key]
    return value


def as_csv(data: Mapping[str, Any]) -> str:
    """A line for each recipe and world, with a head; bytes, seconds and elements."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(FIGURES)
    writer.writerows([figure(one, name) for name in FIGURES] for one in data["budgets"])
    return text.getvalue()


def label(budget: Mapping[str, Any]) -> str:
    """A recipe with its use."""
    return f"{budget['recipe']} cast" if budget["how"] == "cast on gather" else str(budget["recipe"])


def tables(data: Mapping[str, Any], weights: bool = False) -> list[Table]:
    """The figures of each world and recipe, what stays plain, and cuts inside of blocks. weights: a line for each."""
    budgets = data["budgets"]
    found = [Table(_title(data), HEADS, _rows(budgets), frozenset({0, *range(2, len(HEADS))}))]
    last = _of_largest_world(budgets)
    if weights:
        found += [_weights(one) for one in last]
    found += [_plain(last)]
    found += [table for one in budgets if (table := _cuts(one))]
    notes = [*data["model"]["notes"], *data["notes"]]
    return [*found, Table("What this rests on", (), tuple((line,) for line in notes))]


def _of_largest_world(budgets: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    most = max(one["mesh"]["world"] for one in budgets)
    return [one for one in budgets if one["mesh"]["world"] == most]


def _title(data: Mapping[str, Any]) -> str:
    model, setting = data["model"], data["setting"]
    mesh = data["budgets"][0]["mesh"]
    words = [f"{mesh[key]} {word}" for key, word in _PARALLEL if mesh[key] > 1]
    words += words_of(setting)
    size = f"{model['elements'] / 1e9:,.2f}e9 parameters in {model['layers']} layers and the root"
    load = f"{setting['batch']} x {setting['sequence']} tokens a rank"
    return ", ".join([str(model["name"]), size, *words, load, f"{setting['link']['name']} a rank"])


def words_of(setting: Mapping[str, Any]) -> list[str]:
    """How weights and gradients travel, where it is not FSDP2's way."""
    said = {"exchange": "gradients exchanged", "on_gather": "weights dequantized on gather"}
    return [words for key, words in said.items() if setting[key]]


_PARALLEL = (("replicas", "replicas"), ("tensor", "tensor-parallel"), ("experts", "expert-parallel"))


def _rows(budgets: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], ...]:
    first: dict[int, float] = {}
    made = []
    for one in budgets:
        world, held, step = one["mesh"]["world"], one["resident"], one["step"]
        first.setdefault(world, step["total"])
        made.append(
            (
                f"{world:,}",
                label(one),
                f"{100 * one['quantized'] / max(1, one['quantized'] + one['plain']):.1f}%",
                *(_gb(held[key]) for key in ("weights", "masters", "moments", "gradients")),
                _gb(one["peaks"]["root"] + one["peaks"]["layer"]),
                _gb(max(one["peaks"]["forward"], one["peaks"]["backward"])),
                _gb(one["memory"]),
                *(_gb(one["traffic"][key]) for key in ("forward", "backward", "reduced")),
                _ms(step["gather_forward"] + step["gather_backward"]),
                _ms(step["total"]),
                f"{first[world] / step['total']:.2f}x",
            )
        )
    return tuple(made)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.3f}" if nbytes < 1e10 else f"{nbytes / 1e9:,.1f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def _plain(budgets: Sequence[Mapping[str, Any]]) -> Table:
    """What each recipe leaves plain, by reason."""
    rows = []
    for one in budgets:
        if one["how"] == "plain":
            continue
        reasons: dict[str, list[Mapping[str, Any]]] = {}
        for line in one["weights"]:
            if line["plain"]:
                reasons.setdefault(line["plain"], []).append(line)
        for reason, lines in reasons.items():
            elements = sum(line["count"] * _product(line["shape"]) for line in lines)
            names = ", ".join(line["name"] for line in lines[:3]) + (", ..." if len(lines) > 3 else "")
            rows.append((label(one), f"{elements:,}", reason, names))
    return Table("Left plain", ("recipe", "elements", "why", "weights"), tuple(rows), frozenset({1}))


def _product(shape: Sequence[int]) -> int:
    size = 1
    for one in shape:
        size *= one
    return size


def _cuts(one: Mapping[str, Any]) -> Table | None:
    rows = tuple(
        (
            line["name"],
            str(line["count"]),
            f"{line['rows']:,} over {line['ranks']:,}",
            f"{line['inside']:,} inside a block of {line['block']}",
            _either(line["free_rows"]),
            _either(line["free_worlds"]),
        )
        for line in one["cuts"]
    )
    if not rows:
        return None
    title = f"{label(one)} on {one['mesh']['world']:,} ranks: cuts that fall inside blocks, and sizes that have none"
    return Table(title, ("weight", "of them", "rows", "cuts", "rows without", "ranks without"), rows, frozenset({1}))


def _either(sizes: Sequence[int]) -> str:
    return " or ".join(f"{size:,}" for size in sizes) or "-"


def _weights(one: Mapping[str, Any]) -> Table:
    heads = ("weight", "of them", "shape", "kind", "in", "resident", "sent fwd", "sent bwd")
    rows = tuple(
        (
            line["name"],
            str(line["count"]),
            "x".join(map(str, line["shape"])),
            line["kind"],
            "plain" if line["plain"] else label(one),
            *(f"{line[key]:,}" for key in ("resident", "forward", "backward")),
        )
        for line in one["weights"]
    )
    title = f"{label(one)} on {one['mesh']['world']:,} ranks: bytes of rank 0, of one weight of each kind"
    return Table(title, heads, rows, frozenset({1, 5, 6, 7}))

"""Budgets of models as tables, JSON values and rows of CSV, all printed from one dict of figures."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from layoutc.budget.totals import Budget, Setting
from layoutc.models.weights import Model
from layoutc.report.describe import as_data
from layoutc.report.tables import Table

VERSION = 2  # of the JSON
HEADS = (
    *("cards", "recipe", "quantized", "weights", "masters", "moments", "gradients", "gathered", "peak", "again"),
    *("activations", "memory", "to spare", "sent fwd", "sent bwd", "reduced", "gather ms", "step ms", "as fast as"),
)
NOTES = (
    "a card's GB, of the one that holds the most; sent: what it puts into the collectives of a step",
    "gathered: the root, which stays, and the largest other layer; peak: the most that gathers and gradients add",
    "again: layers whose forward backward computes again, as few as fit; activations: in bf16, with flash attention",
    "memory: at the highest point of a step; laid out weights are not in it; to spare: of the card, less 4 GiB",
    "as fast as: how many times as fast as the first recipe of as many cards; above 1 is faster",
)


def data_of(model: Model, at: Setting, budgets: Sequence[Budget], sequence: int, batch: int) -> dict[str, Any]:
    """Everything as JSON values, from which tables, CSV and charts are made."""
    return {
        "layoutc_plan": VERSION,
        "model": {
            **{"name": model.name, "source": model.source, "elements": model.elements},
            **{"layers": len(model.layers), "notes": list(model.notes)},
        },
        "setting": {
            "sequence": sequence,
            "batch": batch,
            **{"bytes": as_data(at.dtypes), "links": as_data(at.links), "machine": as_data(at.machine)},
            **{"host": at.runs != "graph", "runs": at.runs, "together": at.together},
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
    data["memory"], data["spare"] = one.memory, one.room - one.memory
    return data


# Name in CSV -> path in a budget's JSON values.
FIGURES: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("recipe", "how", "exchange", "on_gather")},
    **{name: ("mesh", name) for name in ("world", "replicas", "tensor", "experts")},
    **{f"{name}_elements": (name,) for name in ("quantized", "plain")},
    **{f"{name}_bytes": ("resident", name) for name in ("weights", "masters", "moments", "gradients", "left")},
    **{f"{name}_gathered_bytes": ("peaks", name) for name in ("root", "layer")},
    **{f"peak_{name}_bytes": ("peaks", name) for name in ("forward", "backward")},
    **{"policy": ("policy",), "activations_bytes": ("peaks", "activations")},
    **{f"{name}_bytes": (name,) for name in ("memory", "spare")},
    **{f"sent_{name}_bytes": ("traffic", name) for name in ("forward", "backward")},
    **{f"{name}_bytes": ("traffic", name) for name in ("reduced", "replicated", "exchanged")},
    **{f"{name}_seconds": ("step", name) for name in ("gather_forward", "gather_backward", "reduce_scatter")},
    **{"all_reduce_seconds": ("step", "all_reduce"), "step_seconds": ("step", "total")},
    "tokens_per_second": ("tokens",),
}


def figure(budget: Mapping[str, Any], name: str) -> Any:
    """One of FIGURES from a budget in JSON values."""
    value: Any = budget
    for key in FIGURES[name]:
        value = value[key]
    return value


def as_csv(data: Mapping[str, Any]) -> str:
    """A header and a line for each recipe and world, in bytes, seconds and elements."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(FIGURES)
    writer.writerows([figure(one, name) for name in FIGURES] for one in data["budgets"])
    return text.getvalue()


def label(budget: Mapping[str, Any]) -> str:
    """A recipe with its use."""
    words = [str(budget["recipe"]), "cast" * (budget["how"] == "cast on gather"), "low" * budget["low"]]
    return " ".join(filter(None, words))


def faster(budgets: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each budget's speed relative to the first one on the same number of cards."""
    first: dict[int, float] = {}
    for one in budgets:
        first.setdefault(one["mesh"]["world"], one["step"]["total"])
    return [f"{first[one['mesh']['world']] / one['step']['total']:.2f}x" for one in budgets]


def tables(data: Mapping[str, Any], weights: bool = False) -> list[Table]:
    """The figures of each world and recipe, what stays plain, and cuts inside blocks. weights: a line per weight."""
    budgets = data["budgets"]
    found = [Table(title(data), HEADS, _rows(budgets), frozenset({0, *range(2, len(HEADS))}))]
    most = max(one["mesh"]["world"] for one in budgets)
    last = [one for one in budgets if one["mesh"]["world"] == most]
    if weights:
        found += [_weights(one) for one in last]
    found += [table] if (table := _plain(last)).rows else []
    found += [cuts for one in budgets if (cuts := _cuts(one))]
    notes = [*too_large(data), *data["model"]["notes"], *data["notes"]]
    return [*found, Table("What this rests on", (), tuple((line,) for line in notes))]


def too_large(data: Mapping[str, Any]) -> list[str]:
    """A line on what does not fit on a card; none if everything does."""
    over = [one for one in data["budgets"] if one["spare"] < 0]
    if not over:
        return []
    most = max(over, key=lambda one: int(one["memory"]))
    room = data["setting"]["machine"]["name"], _gb(most["room"])
    which = "none fits" if len(over) == len(data["budgets"]) else f"{len(over)} of {len(data['budgets'])} do not fit"
    largest = f"{label(most)} on {most['mesh']['world']:,} takes {_gb(most['memory'])} GB"
    return [f"{which} an {room[0]} ({room[1]} GB): {largest}"]


def title(data: Mapping[str, Any]) -> str:
    model = data["model"]
    size = f"{model['elements'] / 1e9:,.2f}e9 parameters in {model['layers']} layers and the root"
    return ", ".join([str(model["name"]), size, *run_of(data)])


def run_of(data: Mapping[str, Any]) -> list[str]:
    """How ranks share the model, what they send, a card's tokens, and the links."""
    setting, mesh = data["setting"], data["budgets"][0]["mesh"]
    words = {"replicas": "replicas", "tensor": "tensor-parallel", "experts": "expert-parallel"}
    parallel = [f"{mesh[key]} {word}" for key, word in words.items() if mesh[key] > 1]
    return [*parallel, *described(setting), load_of(setting), links_of(setting)]


def load_of(setting: Mapping[str, Any]) -> str:
    """A card's tokens per step."""
    return f"{setting['batch']} x {setting['sequence']:,} tokens a card"


def links_of(setting: Mapping[str, Any]) -> str:
    """Both links of a card."""
    links = setting["links"]
    return f"{links['within']['name']} within hosts of {links['per_host']}, {links['across']['name']} a card across"


def described(setting: Mapping[str, Any]) -> list[str]:
    """How weights and gradients are sent, if not as FSDP2 does."""
    said = {"exchange": "gradients exchanged", "on_gather": "weights dequantized on gather"}
    among = setting.get("replica_gradients")
    return [words for key, words in said.items() if setting[key]] + ([f"{among} among replicas"] if among else [])


def _rows(budgets: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], ...]:
    return tuple((*_row(one), as_fast) for one, as_fast in zip(budgets, faster(budgets), strict=True))


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    peaks, step = one["peaks"], one["step"]
    return (
        f"{one['mesh']['world']:,}",
        label(one),
        f"{100 * one['quantized'] / max(1, one['quantized'] + one['plain']):.1f}%",
        *(_gb(one["resident"][key]) for key in ("weights", "masters", "moments", "gradients")),
        *(_gb(size) for size in (peaks["root"] + peaks["layer"], max(peaks["forward"], peaks["backward"]))),
        one["policy"],
        *(_gb(size) for size in (peaks["activations"], one["memory"], one["spare"])),
        *(_gb(one["traffic"][key]) for key in ("forward", "backward", "reduced")),
        *(ms(seconds) for seconds in (step["gather_forward"] + step["gather_backward"], step["total"])),
    )


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.3f}" if abs(nbytes) < 1e10 else f"{nbytes / 1e9:,.1f}"


def ms(seconds: float) -> str:
    """Seconds as milliseconds."""
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
            elements = sum(line["count"] * prod(line["shape"]) for line in lines)
            names = ", ".join(line["name"] for line in lines[:3]) + (", ..." if len(lines) > 3 else "")
            rows.append((label(one), f"{elements:,}", reason, names))
    return Table("Left plain", ("recipe", "elements", "why", "weights"), tuple(rows), frozenset({1}))


def _cuts(one: Mapping[str, Any]) -> Table | None:
    if not one["cuts"]:
        return None
    rows = []
    for line in one["cuts"]:
        over, inside = (
            f"{line['rows']:,} over {line['ranks']:,}",
            f"{line['inside']:,} inside a block of {line['block']}",
        )
        free = (_either(line[key]) for key in ("free_rows", "free_worlds"))
        rows.append((line["name"], str(line["count"]), over, inside, *free))
    title = f"{label(one)} on {one['mesh']['world']:,} ranks: cuts that fall inside blocks, and sizes that have none"
    return Table(
        title, ("weight", "of them", "rows", "cuts", "rows without", "ranks without"), tuple(rows), frozenset({1})
    )


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

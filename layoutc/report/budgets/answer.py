"""One run's answer on one screen: recipes ranked by whether they fit and how fast they are, and what bounds them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from layoutc.report.budgets.figures import NOTES, faster, label, run_of
from layoutc.report.estimates import ON_GATHER
from layoutc.report.tables import Table

HEADS = (
    *("recipe", "state", "gathered", "activations", "again", "total", "to spare", "step", "tokens/s"),
    *("as fast as bf16", "bound by", "loss"),
)
MOST = 12  # rows


@cache
def losses() -> Mapping[str, Mapping[str, Any]]:
    """Measured losses of recipes."""
    text = (Path(__file__).parent.parent / "losses.yaml").read_text(encoding="utf-8")
    found: Mapping[str, Mapping[str, Any]] = yaml.safe_load(text)
    return found


def ranked(budgets: Sequence[Mapping[str, Any]]) -> list[int]:
    """Indices of budgets in order: those that fit by time, then the others by missing memory."""

    def place(at: int) -> tuple[bool, float]:
        spare = budgets[at]["spare"]
        return (False, budgets[at]["step"]["total"]) if spare >= 0 else (True, -spare)

    return sorted(range(len(budgets)), key=place)


def tables(data: Mapping[str, Any]) -> list[Table]:
    """A title with the verdict, the rows, and notes on what they are based on."""
    budgets, as_fast = data["budgets"], faster(data["budgets"])
    order = ranked(budgets)[:MOST]
    rows = tuple(_row(budgets[at], as_fast[at]) for at in order)
    notes = tuple((line,) for line in (*_notes(data), *data["model"]["notes"], *_kept(data["notes"])))
    numbers = frozenset({*range(1, 4), *range(5, 10)})
    return [
        Table(_where(data), (), ((_verdict(data, order),), (_to_do(data, order),))),
        Table("", HEADS, rows, numbers),
        Table("", (), notes),
    ]


def _where(data: Mapping[str, Any]) -> str:
    model, world = data["model"], data["budgets"][0]["mesh"]["world"]
    size = f"{model['elements'] / 1e9:,.1f}e9 parameters"
    return ", ".join([f"{model['name']} ({size}) on {world:,} {data['setting']['machine']['name']}", *run_of(data)])


def _verdict(data: Mapping[str, Any], order: Sequence[int]) -> str:
    best = data["budgets"][order[0]]
    room = f"{best['room'] / 1e9:,.1f} GB of a card"
    if best["spare"] < 0:
        lacking = f"{best['memory'] / 1e9:,.1f} GB, {-best['spare'] / 1e9:,.1f} more than the {room}"
        return f"does not fit: {label(best)} takes least, {lacking}"
    step = best["step"]
    tokens = best["tokens"] * best["mesh"]["world"] / best["mesh"]["tensor"]
    return (
        f"fits: {label(best)} is fastest, {best['memory'] / 1e9:,.1f} of the {room}; {step['total']:,.2f} s a step, "
        f"{tokens:,.0f} tokens/s in all, bound by {bound(step)}"
    )


def _to_do(data: Mapping[str, Any], order: Sequence[int]) -> str:
    """The code for the fastest recipe; if nothing fits, what would."""
    best = data["budgets"][order[0]]
    if best["spare"] < 0:
        return f"would fit: {'; '.join(data.get('instead', ())) or 'none of more cards, smaller states, a frozen base'}"
    convert = {"plain": "", "cast on gather": "cast_on_gather_"}.get(best["how"], "quantize_")
    again = {"full": "each layer checkpointed", "half": "every second layer checkpointed"}
    converted = f'layoutc.{convert}(model, "{best["recipe"]}"{_filter(best["weights"])})'
    if convert == "quantize_" and not best["resident"]["masters"]:  # a frozen base
        converted = f"model.requires_grad_(False), {converted} and adapters, in this order,"
    converted += " before fully_shard"
    parts = [
        converted if convert else "fully_shard of a plain model",
        'steps within layoutc.products("low_precision")' if best["low"] else "",
        _exchanging(data["setting"]) if best["exchange"] or data["setting"].get("replica_gradients") else "",
        again.get(best["policy"], ""),
    ]
    return f"in code: {', '.join(filter(None, parts))}"


def _filter(weights: Sequence[Mapping[str, Any]]) -> str:
    """The argument that chooses the weights of the plan; "" if these are what the default chooses."""
    taken = [one["name"] for one in weights if not one["plain"]]
    plain = [one["name"] for one in weights if one["plain"]]
    if all((one["kind"] == "linear") != bool(one["plain"]) and not one["tied"] for one in weights):
        return ""
    if not {*taken}.isdisjoint(plain):
        return ", param_filter=<those that --weights lists>"  # of some layers
    others = [*plain, *(name for one in weights for name in one["tied"])]
    return f", param_filter={json.dumps([*dict.fromkeys(_short(name, others) for name in taken)])}"


def _short(name: str, others: Sequence[str]) -> str:
    """A pattern for a name: as few of its last parts as match none of `others`."""
    parts = name.split(".")
    ends = [".".join(["*", *parts[-count:]]) for count in range(2 if parts[-1] == "weight" else 1, len(parts))]
    return next((end for end in ends if not any(fnmatchcase(other, end) for other in others)), name)


def _exchanging(setting: Mapping[str, Any]) -> str:
    """The call that sets up this exchange of gradients."""
    recipe, among = (setting.get(name) for name in ("gradients", "replica_gradients"))
    given = ["model", *([f'"{recipe}"'] if recipe else []), *([f'replicas="{among}"'] if among else [])]
    return f"layoutc.exchange_gradients({', '.join(given)})"


def bound(step: Mapping[str, float]) -> str:
    """What takes most of a step's time, with its share."""
    parts = {
        "products": step["forward"] + step["backward"] - (step["memory"] - step["optimizer"]),
        "memory": step["memory"],
        "links within hosts": step["within"],
        "links across hosts": step["across"],
        "the host": step["host"],
    }
    most = max(parts, key=lambda name: parts[name])
    return f"{most} {100 * parts[most] / step['total']:.0f}%"


def _row(one: Mapping[str, Any], as_fast: str) -> tuple[str, ...]:
    held, peaks = one["resident"], one["peaks"]
    state = held["total"] - held["gradients"]
    return (
        label(one),
        *(_gb(size) for size in (state, one["memory"] - state - peaks["activations"], peaks["activations"])),
        one["policy"],
        _gb(one["memory"]),
        _gb(one["spare"]) if one["spare"] >= 0 else f"no: {_gb(one['spare'])}",
        f"{one['step']['total']:,.2f}",
        f"{one['tokens']:,.0f}",
        as_fast,
        bound(one["step"]),
        _loss(one),
    )


def _loss(one: Mapping[str, Any]) -> str:
    found = losses().get(one["recipe"], {})
    if one["how"] == "plain":
        return "bf16's"
    if one["low"] and "low" in found:
        percent, seeds = found["low"]
        return f"{percent:+.2f}% of {seeds} seeds"
    if not one["low"] and "weights" in found:
        return f"{found['weights']:+.3f}% tuned"
    return "not measured"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f}"


def _notes(data: Mapping[str, Any]) -> list[str]:
    low = "of low, 1,000 steps from scratch; " if any(one["low"] for one in data["budgets"]) else ""
    return [
        "GB of the fullest card, s, tokens/s of a card; state: weights, masters, moments; gathered: with gradients",
        "again: layers that backward computes again, as few as fit; to spare: of the card, less 4 GiB of CUDA and NCCL",
        f"as fast: above 1 is faster than bf16; loss, above bf16's: {low}tuned: 30 steps at 1e-5, products in bf16",
    ]


def _kept(notes: Sequence[str]) -> list[str]:
    """The notes without those that the table or the title already has."""
    return [note for note in notes if note not in (*NOTES, *ON_GATHER)]

"""Charts of what was measured, from the JSON of `layoutc bench` and `layoutc demo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layoutc.charts import style

Row = Mapping[str, Any]
MIB = 1 << 20


def draw_kernels(data: Mapping[str, Any], path: Path) -> list[str]:
    """Writes shares of a copy's bandwidth, a line for each work from bf16; returns their names.

    Kernels are filled marks, peers hollow ones. Of several shapes, the one with most rows. Raises ValueError for other
    JSON, and where nothing was timed; else as `style.page`.
    """
    _check(data, "kernels", "layoutc bench")
    kernels, shape = _of_one_shape(data["kernels"])
    if not kernels:
        raise ValueError("no kernels were timed: the machine had no card")
    peers = [row for row in data["peers"] if tuple(row["shape"]) == shape and row["dtype"] == "bfloat16"]
    recipes = list(dict.fromkeys(row["recipe"] for row in kernels))
    rows = [row for recipe in recipes for row in (*kernels, *peers) if row["recipe"] == recipe]
    rows += [row for row in peers if row["recipe"] not in recipes]
    names = [" ".join(filter(None, (row["recipe"], row["work"]))) for row in rows]
    in_graphs = all(row["share"] is not None for row in rows)
    with style.page(path, (1,), (8, 0.9 + 0.17 * len(rows))) as (drawn, (axes,)):
        axes.axvline(1, color="#808080", linewidth=0.8, linestyle=":")
        for at, row in enumerate(rows):
            number = recipes.index(row["recipe"]) if row["recipe"] in recipes else 0
            colour, mine = style.line(number)["color"], row["differs"] is None
            share = row["share"] if in_graphs else row["flushed_share"]
            axes.plot([0, share], [at, at], color="#e0e0e0", linewidth=0.8, zorder=1)
            axes.scatter(share, at, s=24, edgecolors=colour, facecolors=colour if mine else "white", zorder=2)
        axes.set_yticks(range(len(rows)), names, size=7)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(left=0)
        how = "in CUDA graphs" if in_graphs else "after a flush of L2, host included"
        axes.set_xlabel("share of a copy's bandwidth")
        axes.set_title(f"{data['device']}, {shape[0]} x {shape[1]} from bf16")
        versions = f"torch {data['torch']}, triton {data['triton']}"
        drawn.supxlabel(f"{how}; peers are hollow; {versions}", size=8, color="#606060")
    return names


def _of_one_shape(rows: Sequence[Row]) -> tuple[list[Row], tuple[int, ...]]:
    """The rows from bf16 of the shape that has most of them, the first of such; without those of many weights."""
    found: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        if row["dtype"] == "bfloat16" and " weights of " not in row["work"]:
            found.setdefault(tuple(row["shape"]), []).append(row)
    if not found:
        return [], ()
    shape = max(found, key=lambda one: len(found[one]))
    return found[shape], shape


def draw_demo(data: Mapping[str, Any], path: Path) -> list[str]:
    """Writes losses, bytes gathered in a step, and bytes of a rank's parameters; returns the names of its lines.

    Raises ValueError for other JSON; else as `style.page`.
    """
    _check(data, "demo", "layoutc demo")
    rows: Sequence[Row] = data["rows"]
    names = [str(row["name"]) for row in rows]
    with style.page(path, (2.2, 1, 1), (9, 3.4)) as (drawn, (losses, gathered, resident)):
        for number, row in enumerate(rows):
            colour = style.line(number)["color"]
            steps = range(1, len(row["losses"]) + 1)
            losses.plot(steps, row["losses"], color=colour, linewidth=1.2, label=row["name"])
            for axes, name in ((gathered, "gathered"), (resident, "resident")):
                axes.bar(number, row[name] / MIB, color=colour, width=0.7)
        losses.set_title("Loss")
        losses.set_xlabel("step")
        losses.set_ylabel("nats")
        losses.legend(frameon=False)
        for axes, title in ((gathered, "Gathered in a step"), (resident, "Parameters of a rank")):
            axes.set_title(title)
            axes.set_ylabel("MiB")
            axes.set_xticks(range(len(names)), names, rotation=30, ha="right", size=7)
        drawn.supxlabel(
            f"layoutc demo, {data['processes']} ranks, {data['device']}, torch {data['torch']}", size=8, color="#606060"
        )
    return names


def _check(data: object, kind: str, command: str) -> None:
    """Raises ValueError for what the command has not written."""
    if not isinstance(data, Mapping) or data.get("kind") != kind:
        raise ValueError(f"it is not what `{command} --json` writes")

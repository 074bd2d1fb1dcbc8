"""Charts of budgets, from the JSON that `layoutc plan` writes: step time and memory per rank over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, floor
from pathlib import Path
from typing import Any

from layoutc.charts import style
from layoutc.report.budgets.figures import described, figure, label, links_of, load_of

PANELS = (("step_seconds", 1e3, "Step, estimated", "ms"), ("memory_bytes", 1e-9, "Memory of a card", "GB"))


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between the ends of a logarithmic axis: few, but at least two if there are two."""
    found = [size * 10.0**power for power in range(-6, 12) for size in (1, 2, 5) if low <= size * 10.0**power <= high]
    if len(found) >= 3:
        return found
    steps = (size * 10.0**power for power in range(-9, 12) for size in (1, 2, 5))
    step = next(step for step in steps if (high - low) / step <= 6)  # even steps on a short axis
    return [step * number for number in range(ceil(low / step), floor(high / step) + 1)]


def draw(data: Mapping[str, Any], path: Path) -> list[str]:
    """Writes the chart and returns the names of its lines. The path's suffix selects the format.

    Raises ImportError without matplotlib, and OSError if writing fails.
    """
    from matplotlib.ticker import FuncFormatter

    lines: dict[str, list[Mapping[str, Any]]] = {}
    for one in data["budgets"]:
        lines.setdefault(label(one), []).append(one)
    worlds = sorted({one["mesh"]["world"] for one in data["budgets"]})
    with style.page(path, (1,) * len(PANELS), (9, 3.6)) as (drawn, places):
        for axes, (name, scale, title, unit) in zip(places, PANELS, strict=True):
            for number, (recipe, budgets) in enumerate(lines.items()):
                ordered = sorted(budgets, key=lambda one: int(one["mesh"]["world"]))
                x = [one["mesh"]["world"] for one in ordered]
                y = [figure(one, name) * scale for one in ordered]
                axes.plot(x, y, **style.line(number), markersize=4, linewidth=1.2, label=recipe)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(worlds, [f"{world:,}" for world in worlds])
            axes.minorticks_off()
            low, high = axes.get_ylim()
            axes.set_yticks(_ticks(low, high))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
            axes.set_xlabel("cards")
            axes.set_ylabel(unit)
            axes.set_title(title)
            axes.grid(axis="y", linewidth=0.3)
        handles, names = places[0].get_legend_handles_labels()
        drawn.legend(handles, names, loc="outside upper center", ncols=min(6, len(names)), frameon=False)
        setting = data["setting"]
        words = (data["model"]["name"], load_of(setting), links_of(setting), *described(setting))
        drawn.supxlabel(", ".join(words), size=8, color="#606060")
    return list(lines)

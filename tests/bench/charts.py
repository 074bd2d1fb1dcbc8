"""One page of charts of what was measured, from the JSON that the benchmarks write.

    python tests/bench/charts.py FILE.json... --png FILE.png        needs matplotlib: pip install matplotlib

Files are those that `step.py`, `curves.py`, `host.py` and `gather.py` of this folder and `python -m layoutc.bench`
write with --json, several of each at once. Runs of one thing are drawn together: a bar is the median of their medians,
its line reaches from the fastest to the slowest step, and a dot is one run. Panels without data are left out. Files of
step.py that are older than its field `kind` don't say how models ran: their names do, as in compiled1.json and
eager.json. Nor do they say how fast the fastest step was: their lines are centred on the median. A page is A4 where
its labels have room there: runs in three modes, and everything else beside them, make it higher.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chart_panels as charts
from chart_files import Found, read
from chart_panels import Look

A4 = (8.27, 11.69)  # inches
SQUEEZED = 0.8  # of the height that panels want: with less, labels would overlap, and the page is higher than A4
STYLE = {
    **{"font.size": 7.5, "axes.titlesize": 8.5, "axes.titleweight": "bold", "axes.titlelocation": "left"},
    **{"legend.fontsize": 6.5, "legend.handlelength": 1.4, "axes.spines.top": False, "axes.spines.right": False},
    **{"axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6, "hatch.linewidth": 0.6},
}


@dataclass(frozen=True)
class Panel:
    """A chart, how wide it is in halves of the page, and how high in inches."""

    name: str
    title: str
    draw: Callable[[Found, Look, Any], None]
    halves: int = 1
    inches: float = 2.3


def panels(found: Found) -> list[Panel]:
    """Those that have data."""
    made, clusters = [], charts.clusters(found.steps)
    bars = sum(len(group) for group in clusters.values())
    wide = 2 if bars > 12 else 1
    if found.steps:
        made.append(Panel("steps", "Time of a training step", charts.draw_steps, wide))
        if any(row["peak_bytes"] for row in found.steps):
            made.append(Panel("memory", "Peak memory of a card", charts.draw_memory, wide, 1.9))
        if any(row["parts_ms"] for row in found.steps):
            made.append(
                Panel(
                    "parts",
                    "Where the card's time goes",
                    charts.draw_parts,
                    2,
                    0.7 + 0.15 * (bars + 1.2 * len(clusters)),
                )
            )
    if found.host:
        made.append(Panel("host", "A gather, on the host", charts.draw_host, 2 if len(found.host) > 4 else 1, 2.0))
    if found.gathers:
        made.append(Panel("gathers", "A gather of one block, on the card", charts.draw_gathers))
    if found.kernels and (rows := len(charts.kernel_rows(found.kernels)[1])):
        made.append(
            Panel("kernels", "Quantizing bf16: kernels and peers", charts.draw_kernels, 1, max(1.8, 0.8 + 0.16 * rows))
        )
    if found.curves:
        made.append(Panel("losses", "Training loss", charts.draw_losses, 1, 2.0))
        if "bf16" in found.curves and len(found.curves) > 1:
            made.append(Panel("distances", "Training loss, distance from bf16", charts.draw_distances, 1, 2.0))
    return made


def rows_of(made: list[Panel]) -> list[list[Panel]]:
    """Panels in rows of a page, in order: wide ones alone, others with the next one that is not wide."""
    rows: list[list[Panel]] = []
    for panel in made:
        half = next((row for row in rows if panel.halves == len(row) == row[0].halves == 1), None)
        if half is None:
            rows.append([panel])
        else:
            half.append(panel)
    return rows


def page(found: Found, path: Path) -> list[str]:
    """Draws, and returns the names of the panels. Raises ValueError if nothing can be drawn."""
    from matplotlib import pyplot, rc_context  # type: ignore[import-not-found]

    made = panels(found)
    if not made:
        raise ValueError("the files have nothing that can be drawn")
    names = [*(row["variant"] for row in found.steps), *found.host, *(row["recipe"] for row in found.gathers)]
    look = Look([*names, *(row["recipe"] for row in found.kernels), *found.curves])
    rows = rows_of(made)
    heights = [max(panel.inches for panel in row) + 0.35 for row in rows]
    with rc_context(STYLE):
        wanted = sum(heights) + 0.9
        figure = pyplot.figure(figsize=(A4[0], max(min(A4[1], wanted), SQUEEZED * wanted)), layout="constrained")
        figure.get_layout_engine().set(h_pad=0.08, w_pad=0.06, hspace=0.03)
        grids = figure.add_gridspec(len(rows), 1, height_ratios=heights)
        for row, grid in zip(rows, grids, strict=True):
            places = grid.subgridspec(1, len(row) if row[0].halves == 2 else 2)
            for panel, place in zip(row, places, strict=False):
                axes = figure.add_subplot(place)
                panel.draw(found, look, axes)
                axes.set_title(panel.title)
                axes.set_label(panel.name)
        handles = look.legend()
        figure.legend(handles=handles, loc="outside upper center", ncols=min(5, len(handles)), frameon=False)
        if found.machines:
            figure.supxlabel("; ".join(found.machines), size=6.5, color="#606060")
        figure.savefig(path, dpi=200)
        pyplot.close(figure)
    return [panel.name for row in rows for panel in row]


def main() -> int:
    """Reads, draws, and says which panels there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("--png", type=Path, required=True)
    asked = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("charts need matplotlib: pip install matplotlib")
    try:
        drawn = page(read(asked.files), asked.png)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{asked.png}: {', '.join(drawn)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

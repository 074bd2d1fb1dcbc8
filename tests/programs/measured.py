"""The page of measurements, made of the runs in `tests/bench/runs`: a section and a table for each theme.

A run is the JSON of a benchmark (`kind` "step" or "optimizer"), or a table that was taken from what a benchmark printed
(`kind` "table"): `unit`, `columns`, and `rows` of a name and a cell for each column. A cell is a number or a text, or
`median` with `spread`, with `least` and `most`, with `share` of a copy, and with `of`, a time to be compared with. A
row that no page cites is a `detail`, which the page leaves to the run.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUNS = Path(__file__).parents[2] / "tests" / "bench" / "runs"
THEMES = {
    "Time of a step": ("steps", "back_to_back", "graphs", "experts", "links", "gradient_codes"),
    "Parts of a step": ("gathers", "host", "memory", "optimizer", "kernels"),
    "Loss": ("losses", "forms", "tuning"),
    "Plans, checkpoints, files": ("plans", "estimates", "checkpoints", "files"),
}
NAMES = {
    "bf16": "bf16 weights",
    "torchao": "torchao FP8",
    "layoutc:nvfp4": "layoutc nvfp4",
    "layoutc:fp8_current+low": "layoutc fp8_current, FP8 products",
}
HEAD = """# What was measured

Each section lists recorded runs: what ran, on which machine, with which versions, when, and by which command. A table
shows their figures. `tests/bench/runs` has the runs as JSON, with more rows, and `python tests/programs/front.py`
writes this page. *(n)* is the spread of the runs, *x* how many times as fast. Llama blocks have dim 4096 and ffn
14336. Git has older runs: `git log -p -- tests/bench/runs tests/bench/RESULTS.md`.
"""


@dataclass(frozen=True)
class Shown:
    """A run as the page shows it. rows: a name, and a cell for each column."""

    title: str
    said: str  # what was run, where, when, and how
    columns: list[str]
    rows: list[list[str]]

    @property
    def text(self) -> str:
        return "\n".join([self.said, *map(_row, self.rows)])


@dataclass(frozen=True)
class Setting:
    """Runs of one file and batch, on one machine. peaks: of variants that were held one at a time, not in turns."""

    title: str
    rows: list[dict[str, Any]]  # as step.py writes them
    peaks: bool

    @property
    def plain(self) -> dict[str, Any]:
        return next(row for row in self.rows if row["variant"] == "bf16")


def run(name: str) -> dict[str, Any]:
    """A recorded run."""
    found: dict[str, Any] = json.loads((RUNS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def settings() -> list[Setting]:
    """All steps that were recorded, in the order of the files' names."""
    found = []
    for file in sorted(RUNS.glob("steps_*.json")):
        data = run(file.stem)
        for batch in sorted({row["batch"] for row in data["rows"]}):
            rows = [row for row in data["rows"] if row["batch"] == batch and row["variant"] in NAMES]
            found.append(Setting(f"sequence {data['sequence']}, batch {batch}", rows, data["turns"] == 1))
    return found


def steps_table() -> str:
    """ms of a step (spread), how many times as fast as bf16, and the peak of a card."""
    return _table(*_cells_of_steps())


def errors_table() -> str:
    """What rounding to each recipe costs."""
    data = run("numerics")
    return _table(data["columns"], [[row["name"], *row["cells"]] for row in data["rows"]])


def page() -> str:
    """All of it."""
    return "\n".join([HEAD, *(_theme(title, [_shown(name) for name in names]) for title, names in THEMES.items())])


def sections() -> dict[str, str]:
    """Anchor to text, of all runs."""
    shown = [_shown(name) for names in THEMES.values() for name in names]
    return {anchor(one.title): one.text for one in shown}


def anchor(title: str) -> str:
    """What a link to a heading says, on the site and in repositories."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _theme(title: str, runs: list[Shown]) -> str:
    """What was run, run by run, and one table: a row with the columns' names begins each run."""
    listed = [f'- <a id="{anchor(one.title)}"></a>**{one.title}**: {one.said}' for one in runs]
    width = max(len(one.columns) for one in runs)
    rows = []
    for one in runs:
        rows += [[f"**{one.title}**", *(f"*{name}*" for name in one.columns)], *one.rows]
    first, *others = [row + [""] * (width + 1 - len(row)) for row in rows]
    return "\n".join([f"## {title}\n", *listed, "", _row(first), "|---|" + "--:|" * width, *map(_row, others), ""])


def _shown(name: str) -> Shown:
    if name == "steps":
        return _steps()
    return _optimizer() if name == "optimizer" else _of_table(run(name))


def _steps() -> Shown:
    runs = [run(file.stem) for file in sorted(RUNS.glob("steps_*.json"))]
    where = {**runs[0], "machine": f"two {runs[0]['device']}, NVLink"}
    said = "8 Llama blocks, compiled. The host's noise is in the spread of steps at sequence 512."
    commands = [f"torchrun --nproc-per-node 2 {one['command']}" for one in runs]
    return Shown("Steps", _said(said, "ms", where, commands), *_cells_of_steps())


def _cells_of_steps() -> tuple[list[str], list[list[str]]]:
    found, rows = settings(), []
    for variant, name in NAMES.items():
        cells = []
        for setting in found:
            row = next((row for row in setting.rows if row["variant"] == variant), None)
            if row is None:
                cells.append("")
                continue
            faster = setting.plain["median_ms"] / row["median_ms"]
            peak = f", {row['peak_bytes'] / 2**30:.1f} GiB" if setting.peaks else ""
            cells.append(f"{row['median_ms']:.1f} ({row['spread_ms']:.1f}), {faster:.2f}x{peak}")
        rows.append([name, *cells])
    return [setting.title for setting in found], rows


def _of_table(data: dict[str, Any]) -> Shown:
    shown = [row for row in data["rows"] if not row.get("detail")]
    rows = [[row["name"], *(_cell(cell) for cell in row["cells"])] for row in shown]
    return Shown(data["title"], _said(data["said"], data["unit"], data, data["commands"]), data["columns"], rows)


def _optimizer() -> Shown:
    """Each form of the optimizer, beside what each recipe's weights take under MasterWeights."""
    data, beside, rows = run("optimizer"), {}, []
    for row in data["rows"]:
        if row.get("detail"):
            continue
        recipe = row["name"].partition(":")[0]
        if "MasterWeights" in row["name"]:
            beside[recipe] = row["ms"]
        faster = f", {beside[recipe] / row['ms']:.2f}x" if recipe in beside and beside[recipe] != row["ms"] else ""
        ms = f"{row['ms']:.2f} ({row['least']:.2f} to {row['most']:.2f}){faster}"
        name = row["name"].replace("the same", "layoutc.AdamW, bf16 masters, 8bit")
        rows.append([name, ms, f"{row['bytes']:.2f}", f"{row['share']:.2f}"])
    said = (
        "2^28 parameters in weights of 4096 x 14336, by turns; bytes that a parameter moves, and the share of a copy's "
        "bandwidth. Times are against MasterWeights."
    )
    where = {**data, "machine": f"one {data['device']}"}
    said = _said(said, "ms", where, [f"python {data['command']}"])
    return Shown("The optimizer's step", said, ["step", "bytes", "share"], rows)


def _said(said: str, unit: str, where: dict[str, Any], commands: list[str]) -> str:
    versions = [f"{name} {where[name]}" for name in ("torch", "triton", "torchao", "transformers") if where.get(name)]
    ran = f"On {where['machine']}; {', '.join(versions)}{'; ' if versions else ''}{where['date']}."
    ways = ", ".join(f"`{one}`" for one in commands)
    return f"{said} {ran}{f' In {unit}.' if unit else ''} By {ways}."


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns)]
    return "\n".join([*lines, *map(_row, rows)]) + "\n"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Any) -> str:
    if not isinstance(cell, dict):
        return "" if cell is None else str(cell)
    text = f"{cell['median']}"
    if "spread" in cell:
        text += f" ({cell['spread']})"
    if "least" in cell:
        text += f" ({cell['least']} to {cell['most']})"
    if "share" in cell:
        text += f" ({cell['share']:.2f} of a copy)"
    if "of" in cell:
        text += f", {cell['of'] / cell['median']:.2f}x"
    return text

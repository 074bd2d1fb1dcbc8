"""Fills in what README and a page show of other files: the spec, what is generated from it, and what was measured.

    python tests/programs/front.py [--check]

A block between `<!-- from SOURCE -->` and `<!-- end -->` is written anew. SOURCE is a file; a file and a function of
it, as `generated/nvfp4/tensor.py:fsdp_pre_all_gather`; `measured`, a table of the steps in `tests/bench/runs`;
`losses`, those that `layoutc plan` shows; or `numerics`, the errors of rounding. The chart of these steps and the page
of all recorded runs are written whole. --check writes nothing, and fails where something differs.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parent))
import measured  # beside this program

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs/pages/which.md", ROOT / "docs/pages/numerics.md")
LOSSES = ROOT / "layoutc/report/losses.yaml"
CHART, MEASURED = ROOT / "docs/pages/pictures/steps.svg", ROOT / "docs/pages/measured.md"
BLOCK = re.compile(r"(?P<head><!-- from (?P<source>\S+) -->\n).*?(?P<end><!-- end -->)", re.S)
WIDTH, BAR, GAP, LABEL = 760, 16, 26, 250  # of the chart, pixels
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600 }
.bf16 { fill: #8c959f } .torchao { fill: #bf8700 } .layoutc { fill: #0969da }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .layoutc { fill: #58a6ff } .torchao { fill: #d29922 } }
"""


def chart(found: list[measured.Setting]) -> str:
    """Milliseconds of a step: a bar for each run, against the slowest of its setting."""
    parts, y = [], 8
    for setting in found:
        slowest = max(row["median_ms"] for row in setting.rows)
        y += GAP
        parts.append(f'<text class="title" x="8" y="{y - 8}">{setting.title}</text>')
        for row in setting.rows:
            name, ms = measured.NAMES[row["variant"]], row["median_ms"]
            width = round((WIDTH - LABEL - 190) * ms / slowest)
            said = f"{ms:.1f} ms" + (f", {row['peak_bytes'] / 2**30:.1f} GiB" if setting.peaks else "")
            if row is not setting.plain:
                said += f", {setting.plain['median_ms'] / ms:.2f}x"
            parts.append(f'<text x="16" y="{y + 12}">{name}</text>')
            kind = row["variant"].split(":")[0]
            parts.append(f'<rect class="{kind}" x="{LABEL}" y="{y}" width="{width}" height="{BAR}" rx="2"/>')
            parts.append(f'<text x="{LABEL + width + 6}" y="{y + 12}">{said}</text>')
            y += BAR + 5
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 8}" role="img">'
    return "\n".join(
        [head, "<title>Time of a step and peak memory</title>", f"<style>{STYLE}</style>", *parts, "</svg>\n"]
    )


def losses() -> str:
    """What training in a recipe did to the loss: from scratch in low precision, and tuned with products in bf16."""
    lines = [
        "| recipe | seeds | from scratch, all products in low precision | tuned, products in bf16 |",
        "|---|--:|--:|--:|",
    ]
    for name, found in yaml.safe_load(LOSSES.read_text(encoding="utf-8")).items():
        percent, seeds = found["low"]
        tuned = f"{found['weights']:+.3f}%" if "weights" in found else ""
        lines.append(f"| `{name}` | {seeds} | {percent:+.2f}% | {tuned} |")
    return "\n".join(lines) + "\n"


def included(source: str) -> str:
    """A file, or a function of one, as a block of code."""
    path, _, name = source.partition(":")
    text = (ROOT / path).read_text(encoding="utf-8")
    if name:
        node = next(n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == name)
        text = textwrap.dedent("\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])) + "\n"
    return f"```{ {'.py': 'python', '.yaml': 'yaml'}[Path(path).suffix] }\n{text}```\n"


def filled(text: str) -> str:
    """A page with its blocks written anew."""
    made = {"measured": measured.steps_table, "losses": losses, "numerics": measured.errors_table}

    def block(found: re.Match[str]) -> str:
        source = found["source"]
        return found["head"] + (made[source]() if source in made else included(source)) + found["end"]

    return BLOCK.sub(block, text)


def main(check: bool) -> int:
    """Writes the pages and the chart, or says which of them differ."""
    wanted = {page: filled(page.read_text(encoding="utf-8")) for page in PAGES}
    wanted |= {CHART: chart(measured.settings()), MEASURED: measured.page()}
    stale = [file for file, text in wanted.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
    for file in stale:
        if check:
            print(f"{file.relative_to(ROOT)} differs: run python tests/programs/front.py", file=sys.stderr)
        else:
            file.write_text(wanted[file], encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))

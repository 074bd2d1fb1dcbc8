"""Generated code is a recipe's facts and arithmetic: how long it is, and how much of it all recipes share."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.checkout
GENERATED = Path(__file__).resolve().parents[2] / "generated"
RECIPES = sorted(path.parent for path in GENERATED.glob("*/layout.py"))
TEMPLATES = sorted((GENERATED.parent / "layoutc" / "emit" / "templates").glob("*.j2"))
MOST_LINES, MOST_KERNEL_LINES, MOST_BINDING_LINES = 605, 320, 160
# Of the lines of a kernels.py that are no decorators and no brackets alone.
MOST_SHARED = 0.40


def code_lines(path: Path) -> list[str]:
    """Lines of code, without imports, docstrings, comments, decorators and lone brackets."""
    text = path.read_text(encoding="utf-8")
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= set(range(node.lineno, (node.end_lineno or 0) + 1))
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node):
            left_out |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    numbered = enumerate((line.partition("  #")[0].strip() for line in text.splitlines()), 1)
    kept = [line for number, line in numbered if number not in left_out]
    return [line for line in kept if line.strip("()[]{}:,") and not line.startswith(("#", "@"))]


def test_a_recipe_is_short() -> None:
    for folder in RECIPES:
        lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in folder.glob("*.py")}
        bindings = lines.pop("files.py", 0)  # data: a table of names for each program
        assert sum(lines.values()) <= MOST_LINES, folder.name
        assert bindings <= MOST_BINDING_LINES, folder.name
        assert lines["kernels.py"] <= MOST_KERNEL_LINES, folder.name


def test_little_of_the_kernels_is_the_same_in_all_recipes() -> None:
    every = {folder.name: code_lines(folder / "kernels.py") for folder in RECIPES}
    files = {name: lines for name, lines in every.items() if lines}  # but for those that are another recipe's
    common = set.intersection(*map(set, files.values()))
    shares = {name: sum(line in common for line in lines) / len(lines) for name, lines in files.items()}
    assert {name: share for name, share in shares.items() if share > MOST_SHARED} == {}
    assert sum(shares.values()) / len(shares) < 0.28


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_a_template_places_text(template: Path) -> None:
    """At most 150 lines, blocks at most two deep, and no work on strings."""
    text = template.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    depth = deepest = 0
    for tag in re.findall(r"\{%-?\s*(\w+)", text):
        depth += (tag in ("for", "if", "filter")) - tag.startswith("end")
        deepest = max(deepest, depth)
    assert depth == 0
    assert deepest <= 2
    assert not re.findall(r"\[\s*\d*:\s*\d*\]|\.replace\(|\.split\(", "".join(re.findall(r"\{[{%].*?[%}]\}", text)))


def test_what_templates_place_is_typed() -> None:
    modules = sorted(TEMPLATES[0].parent.parent.glob("*.py"))
    assert [path.name for path in modules if re.search(r"\bAny\b", path.read_text(encoding="utf-8"))] == []

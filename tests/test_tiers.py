"""Both tiers together run every test that there is."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from tiers import chosen

pytestmark = pytest.mark.checkout
TESTS = Path(__file__).parent


def functions(path: Path) -> Counter[str]:
    """How often a file defines each test, those of classes among them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for one in tree.body:
        if isinstance(one, ast.ClassDef) and one.name.startswith("Test"):
            found += [node for node in one.body if isinstance(node, ast.FunctionDef)]
    return Counter(node.name for node in found if node.name.startswith("test_"))


def collected(*words: str, room: str = "") -> set[str]:
    """Node ids, without parameters."""
    folder = str(TESTS / room)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *words, folder]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    lines = [line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line]
    return {line.removeprefix("tests/") for line in lines}


def test_no_test_hides_another_of_its_name() -> None:
    twice = {path.name: [name for name, times in functions(path).items() if times > 1] for path in TESTS.rglob("*.py")}
    assert {path: names for path, names in twice.items() if names} == {}


def test_tests_stand_in_files_that_are_collected() -> None:
    elsewhere = [path.name for path in TESTS.rglob("*.py") if not path.name.startswith("test_") and functions(path)]
    assert elsewhere == []


@pytest.mark.thorough
def test_both_tiers_collect_every_test() -> None:
    """Whole files may be left out where a package is missing: those say so themselves."""
    one = collected("-m", "thorough or not thorough", room="spec")
    assert collected(room="spec") | collected("-m", "thorough", room="spec") == one
    both = collected("-m", "thorough or not thorough")
    assert one <= both
    files = {one.partition("::")[0] for one in both}
    for path in TESTS.rglob("test_*.py"):
        file = path.relative_to(TESTS).as_posix()
        names = {one.rpartition("::")[2] for one in both if one.startswith(f"{file}::")}
        assert file not in files or functions(path).keys() <= names


def test_what_is_skipped_without_a_package_runs_with_it() -> None:
    """`.ci/run` runs the first tier in README's environment, and again the files that ask for a package it lacks."""
    asked = set()
    for path in (*TESTS.rglob("test_*.py"), *TESTS.rglob("conftest.py")):
        if path.parent.name != "integrations":
            asked |= set(re.findall(r'(?:find_spec|importorskip)\(\s*"(\w+)', path.read_text(encoding="utf-8")))
    script = (TESTS.parent / ".ci" / "run").read_text(encoding="utf-8")
    found = re.search(r"^lacks='\(find_spec\|importorskip\)\\\(\"\((.*)\)'$", script, re.MULTILINE)
    assert found is not None
    here = {"safetensors", "torch", "torchao", "triton"}
    nowhere = {"expecttest", "matplotlib"}  # of torch's own tests, and of charts: not among the development packages
    assert asked - here - nowhere <= set(found[1].split("|"))


def test_a_sample_has_as_many_pairs_of_values_as_it_can() -> None:
    grid = [{"recipe": recipe, "use": use, "keeps": keeps} for recipe in "abc" for use in "xy" for keeps in (0, 1)]
    six = [grid[at] for at in sorted(chosen(grid, 6))]
    for first, second in combinations(("recipe", "use", "keeps"), 2):
        assert len({(one[first], one[second]) for one in six}) == len({(one[first], one[second]) for one in grid})
    assert chosen(grid, 1) == {0}
    assert chosen(grid, 99) == set(range(12))


def test_a_sample_of_one_value_each_is_spread() -> None:
    assert chosen([{"size": size} for size in range(9)], 3) == {0, 4, 8}
    assert chosen([{"options": {}}, {"options": {"a": 1}}, {"options": {}}], 2) == {0, 1}

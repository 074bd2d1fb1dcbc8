"""Both tiers together run every test that there is."""

from __future__ import annotations

import ast
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
import tiers

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


def test_no_test_hides_another_of_its_name() -> None:
    twice = {path.name: [name for name, times in functions(path).items() if times > 1] for path in TESTS.rglob("*.py")}
    assert {path: names for path, names in twice.items() if names} == {}


def test_tests_stand_in_files_that_are_collected() -> None:
    elsewhere = [path.name for path in TESTS.rglob("*.py") if not path.name.startswith("test_") and functions(path)]
    assert elsewhere == []


def test_both_tiers_collect_every_test(request: pytest.FixtureRequest) -> None:
    """Of the files that this run has collected. Whole files may be left out where a package is missing: those say so
    themselves."""
    if any("::" in argument for argument in request.config.args):
        pytest.skip("was asked for single tests")
    every = request.config.stash[tiers.COLLECTED]
    files = {one.partition("::")[0] for one in every}
    for path in TESTS.rglob("test_*.py"):
        file = path.relative_to(request.config.rootpath).as_posix()
        names = {one.rpartition("::")[2] for one in every if one.startswith(f"{file}::")}
        assert file not in files or functions(path).keys() <= names, file
    items = request.session.items
    first, second, others = tiers.parted(items)
    assert Counter([*first, *second]) == Counter(items)
    assert others == []
    assert len(first) + len(second) > 0


def test_three_weeks_in_a_row_run_every_case() -> None:
    weeks = ("2026-W52", "2026-W53", "2027-W01")
    for count in range(1, 12):
        of_each = [set(range(count)) - set(tiers.others(range(count), week)) for week in weeks]
        assert set.union(*of_each) == set(range(count))
        assert all(of_each)
        assert sum(map(len, of_each)) == max(count, 3)
    grid = [(recipe, use) for recipe in "abc" for use in "xyz"]
    for week in weeks:
        kept = set(grid) - set(tiers.others(grid, week))
        assert {recipe for recipe, _ in kept} == set("abc")
        assert {use for _, use in kept} == set("xyz")


def test_a_sample_has_as_many_pairs_of_values_as_it_can() -> None:
    grid = [{"recipe": recipe, "use": use, "keeps": keeps} for recipe in "abc" for use in "xy" for keeps in (0, 1)]
    six = [grid[at] for at in sorted(tiers.chosen(grid, 6))]
    for first, second in combinations(("recipe", "use", "keeps"), 2):
        assert len({(one[first], one[second]) for one in six}) == len({(one[first], one[second]) for one in grid})
    assert tiers.chosen(grid, 1) == {0}
    assert tiers.chosen(grid, 1, 7) == {7}
    assert not tiers.alike(grid)
    assert tiers.alike([{"recipe": recipe, "keeps": keeps} for recipe in ("mxfp8", "nvfp4") for keeps in (True, False)])
    assert tiers.chosen(grid, 99) == set(range(12))


def test_a_sample_of_one_value_each_is_spread() -> None:
    assert tiers.chosen([{"size": size} for size in range(9)], 3) == {0, 4, 8}
    assert tiers.chosen([{"options": {}}, {"options": {"a": 1}}, {"options": {}}], 2) == {0, 1}

"""Two tiers of tests: `pytest` runs the first, `pytest -m thorough` the second.

The first tells whether a change is right, in minutes. The second has what takes long and seldom fails alone: other
cases of what the first samples, compilers, injected faults, random specs in numbers, programs that are killed. Both:
`pytest -m "thorough or not thorough"`.

Of a file's cases that the first tier leaves out, the second runs a third: others each week, all of them in three, and
of two cases one; likewise of the tests of developers' own programs (TOOLS). With the mark `every_week` a test runs all.
The week stands in the header of a run; LAYOUTC_WEEK=2026-W48 runs those of another one, and LAYOUTC_ALL_PAIRS=1 all.

A test that is named by its node id runs in whichever tier it is.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from itertools import combinations
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import pytest
import torch
from places import EXCHANGED, SPECS, UNSHIPPED

Case = TypeVar("Case")
COLLECTED = pytest.StashKey[set[str]]()  # of this run, before tests were left out: node ids without parameters


RANKS = {"one", "two", "three", "four"}  # fixtures of groups of processes
# Cases of a test without a `sample` of its own: where they differ in recipes and flags alone, and where in more.
CASES = {"distributed": (1, 2), "runtime": (2, 4), "checkpoint": (1, 3), "integrations": (1, 2)}
if not torch.cuda.is_available():
    CASES["gpu"] = (1, 1)  # all are skipped, and one of each test says so
WEEK = os.environ.setdefault("LAYOUTC_WEEK", datetime.now(UTC).strftime("%G-W%V"))  # workers have that of their session
THOROUGH, OTHER_WEEK = pytest.mark.thorough, pytest.mark.other_week  # to make one for each item takes a second
TOOLS = {"programs", "bench"}  # what they test is run by hand
EVERY, TURNS = os.environ.get("LAYOUTC_ALL_PAIRS") == "1", 3
RECIPES = {path.stem for folder in (SPECS, UNSHIPPED, EXCHANGED) for path in folder.glob("*.yaml")}


def mark(items: Iterable[pytest.Item]) -> None:
    """Gives the mark `thorough` to cases that a sample leaves out of the first tier, and to what other packages train
    on ranks. A sample: by a test's mark `sample(count)`, else by its folder."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.path.parent.name == "integrations" and not RANKS.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(THOROUGH)
        if hasattr(item, "callspec"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_one in cases.values():
        found = of_one[0].get_closest_marker("sample")
        params = [one.callspec.params for one in of_one]  # type: ignore[attr-defined]
        few, some = CASES.get(of_one[0].path.parent.name, (len(of_one), len(of_one)))
        count = (few if alike(params) else some) if found is None else found.args[0]
        first = crc32(of_one[0].nodeid.partition("[")[0].encode()) if found is None and count == 1 else 0
        kept = chosen(params, count, first % len(params))
        for number, item in enumerate(of_one):
            if number not in kept:
                item.add_marker(THOROUGH)
    left: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in () if EVERY else items:
        is_of_tools, marks = item.path.parent.name in TOOLS, {mark.name for mark in item.iter_markers()}
        if (is_of_tools or hasattr(item, "callspec")) and "thorough" in marks and "every_week" not in marks:
            left[item.path.parent if is_of_tools else item.path].append(item)
    for of_file in left.values():
        for item in others(of_file, WEEK):
            item.add_marker(OTHER_WEEK)


def others(cases: Sequence[Case], week: str) -> list[Case]:
    """The cases of other weeks than this one: a third of all is of it, and at least one. Three weeks in a row have all.

    Neighbors are of different weeks, and so are those that stand at one place of such threes.
    """
    year, number = week.split("-W")
    turns = min(TURNS, len(cases))
    turn = (date.fromisocalendar(int(year), int(number), 1).toordinal() // 7) % TURNS
    return [case for at, case in enumerate(cases) if (at + at // TURNS - turn) % turns]


def alike(cases: Sequence[Mapping[str, Any]]) -> bool:
    """Whether cases differ in recipes and flags alone: tests of a folder then share these among them."""
    values = [_comparable(value) for case in cases for value in case.values()]
    return all(isinstance(value, bool) or value in RECIPES for value in values)


def chosen(cases: Sequence[Mapping[str, Any]], count: int, first: int = 0) -> set[int]:
    """Which of a test's cases are a sample: `count` of them, the first one among them.

    Each next one has the most values, and pairs of values, that none before it has; among equals, the one that stands
    farthest from these.
    """
    if count >= len(cases):
        return set(range(len(cases)))
    values = [{(name, type(value), _comparable(value)) for name, value in case.items()} for case in cases]
    has = [own | set(combinations(sorted(own, key=itemgetter(0)), 2)) for own in values]
    left, kept, away = set(range(len(cases))) - {first}, [first], [abs(at - first) for at in range(len(cases))]
    seen = set(has[first])
    while left and len(kept) < count:
        best = max(left, key=lambda at: (len(has[at] - seen), away[at], -at))
        left.remove(best)
        kept.append(best)
        seen |= has[best]
        away = [min(steps, abs(at - best)) for at, steps in enumerate(away)]
    return set(kept)


def _comparable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def parted(items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item], list[pytest.Item]]:
    """The tests of the first tier, those of the second, and what is of other weeks."""
    parts: tuple[list[pytest.Item], list[pytest.Item], list[pytest.Item]] = ([], [], [])
    for item in items:
        thorough, other = (item.get_closest_marker(name) is not None for name in ("thorough", "other_week"))
        parts[2 if other else int(thorough)].append(item)
    return parts

"""Two tiers of tests: `pytest` runs the first, `pytest -m thorough` the second.

The first tells whether a change is right, in minutes. The second has what takes long and seldom fails alone: other
cases of what the first samples, compilers, injected faults, random specs in numbers, programs that are killed. Both:
`pytest -m "thorough or not thorough"`.

A test that is named by its node id runs in whichever tier it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

COLLECTED = pytest.StashKey[set[str]]()  # of this run, before tests were left out: node ids without parameters


RANKS = {"one", "two", "three", "four"}  # fixtures of groups of processes
CASES = {"distributed": 2, "runtime": 6, "checkpoint": 4, "integrations": 2}  # of a test without a `sample` of its own


def mark(items: Iterable[pytest.Item]) -> None:
    """Gives the mark `thorough` to cases that a sample leaves out of the first tier, and to what other packages train
    on ranks. A sample: by a test's mark `sample(count)`, else by its folder."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.path.parent.name == "integrations" and not RANKS.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("thorough")
        if hasattr(item, "callspec"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_one in cases.values():
        found = of_one[0].get_closest_marker("sample")
        count = CASES.get(of_one[0].path.parent.name, len(of_one)) if found is None else found.args[0]
        kept = chosen([one.callspec.params for one in of_one], count)  # type: ignore[attr-defined]
        for number, item in enumerate(of_one):
            if number not in kept:
                item.add_marker("thorough")


def chosen(cases: Sequence[Mapping[str, Any]], count: int) -> set[int]:
    """Which of a test's cases are a sample: `count` of them, the first one among them.

    Each next one has the most values, and pairs of values, that none before it has; among equals, the one that stands
    farthest from these.
    """
    if count >= len(cases):
        return set(range(len(cases)))
    values = [{(name, type(value), _comparable(value)) for name, value in case.items()} for case in cases]
    has = [own | {frozenset(pair) for pair in combinations(own, 2)} for own in values]
    left, kept, away = set(range(1, len(cases))), [0], list(range(len(cases)))
    seen = set(has[0])
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


def parted(items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests of the first tier, and those of the second."""
    every = list(items)
    second = [item for item in every if item.get_closest_marker("thorough") is not None]
    return [item for item in every if item.get_closest_marker("thorough") is None], second

"""Two tiers of tests: `pytest` runs the first, `pytest -m thorough` the second.

The first tells whether a change is right, in minutes. The second has what takes long and seldom fails alone: other
cases of what the first samples, compilers, injected faults, random specs in numbers, programs that are killed. Both:
`pytest -m "thorough or not thorough"`.

A test that is named by its node id runs in whichever tier it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest


def mark(items: Iterable[pytest.Item]) -> None:
    """Gives the mark `thorough` to cases that a test's mark `sample(count)` leaves out of the first tier."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") is not None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_one in cases.values():
        found = of_one[0].get_closest_marker("sample")
        assert found is not None
        kept = spread(len(of_one), *found.args)
        for number, item in enumerate(of_one):
            if number not in kept:
                item.add_marker("thorough")


def spread(cases: int, count: int) -> set[int]:
    """Which of a number of cases are a sample: `count` of them, the first one among them, evenly apart."""
    return {number * cases // count for number in range(count)}


def parted(items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests of the first tier, and those of the second."""
    every = list(items)
    second = [item for item in every if item.get_closest_marker("thorough") is not None]
    return [item for item in every if item.get_closest_marker("thorough") is None], second

"""Which modules faults are put into, and which faults of all."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

from mutation.fault import Fault, is_fault


def choose(
    faults: dict[str, list[Fault]], sources: dict[str, str], count: int, seed: int, by_lines: bool = False
) -> list[Fault]:
    """So many faults of all modules: each time of any module, and there of all kinds in turn. The same for a seed.

    by_lines: of two modules, one that has twice as many lines is chosen twice as often.
    """
    rng, queues = random.Random(seed), dict[str, list[Fault]]()
    for module in sorted(faults):
        kinds: dict[str, list[Fault]] = {}
        for fault in faults[module]:
            kinds.setdefault(fault.kind, []).append(fault)
        piles = [kinds[kind] for kind in sorted(kinds)]
        rng.shuffle(piles)
        for pile in piles:
            rng.shuffle(pile)
        queues[module] = [pile[turn] for turn in range(len(faults[module])) for pile in piles if turn < len(pile)]
    chosen: list[Fault] = []
    while len(chosen) < count and (left := [module for module in queues if queues[module]]):
        weights = [sources[module].count("\n") for module in left] if by_lines else None
        fault = queues[rng.choices(left, weights)[0]].pop(0)
        if is_fault(fault, sources[fault.module]):
            chosen.append(fault)
    return chosen


def modules(places: Iterable[str], root: Any) -> Iterator[str]:
    """Modules under a root, as paths relative to it, of files and folders."""
    for place in places:
        path = root / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            yield file.relative_to(root).as_posix()

"""Proofs about other checkpoint formats: no part of a weight is lost, and none is stored twice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from layoutc.layout.bindings import dims, where
from layoutc.layout.planes import AMAX
from layoutc.plan.plan import Plan
from layoutc.report.proof import Proof, proof
from layoutc.spec.notation import MATRICES, FileLayout

MANY, FEW = 3, 1  # repetitions of a split along rows and columns, and the fallback if those are too many to enumerate
BUDGET = 1 << 15


def planes_are_in_files(plan: Plan) -> Iterator[Proof]:
    """The first source's planes and the amax have one tensor each; other sources are quantized from its values."""
    first = plan.layout.sources[0]
    stored = [plane.name for plane in plan.layout.planes if plane in first.planes or plane.name == AMAX.name]
    for binding in (one.binding for one in plan.layout.files):
        held = list(binding.planes)
        wrong = next((name for name in stored if held.count(name) != 1), "")
        counter = f"{wrong} is in {held.count(wrong)} tensors" if wrong else ""
        yield proof(f"files {binding.name}", f"every plane of {first.name} has one tensor", "names of planes", counter)


def bindings_are_bijections(plan: Plan) -> Iterator[Proof]:
    """Values of a plane and places in the file's tensor correspond one to one."""
    statement = "every value lies at a place of its own in the tensor, and every place is a value's"
    for files, plane, layout in ((one, *pair) for one in plan.layout.files for pair in one.layouts.items()):
        if layout is None:
            continue
        rows, columns, matrices = _sample(layout)
        method = f"every value enumerated, {rows} x {columns} of them"
        counter = _not_a_bijection(layout, rows, columns, matrices)
        yield proof(f"files {files.binding.name}, {plane}", statement, method, counter)


def _sample(layout: FileLayout) -> tuple[int, int, int]:
    """Rows, columns and matrices of a plane that every split divides, several times if affordable."""
    sizes = dict(layout.sizes)
    known = [prod(sizes.get(name, 1) for name in names) for names in (layout.rows, layout.columns)]
    times = MANY if prod(known) * MANY**2 * 2 <= BUDGET else FEW
    matrices = 2 if MATRICES in layout.rows else 1
    return known[0] * times * matrices, known[1] * times, matrices


def _not_a_bijection(layout: FileLayout, rows: int, columns: int, matrices: int) -> str:
    """The first counterexample; "" if there is none."""
    sizes = dims(layout, rows, columns, matrices)
    taken: dict[tuple[int, ...], tuple[int, int]] = {}
    for value in product(range(rows), range(columns)):
        place = where(layout, sizes, value)
        if place in taken:
            return f"the values at {taken[place]} and {value} both lie at {place}"
        taken[place] = value
    places = product(*(range(sizes[name]) for name in layout.order))
    return next((f"no value lies at {place}" for place in places if place not in taken), "")


OF_FILES = (planes_are_in_files, bindings_are_bijections)

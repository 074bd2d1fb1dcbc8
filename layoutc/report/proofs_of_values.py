"""Proofs about what happens to values besides scaling: random bits are distinct, transforms can be undone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import lcm, prod

from layoutc.layout.layout import Source, Transform, stream_of
from layoutc.plan.plan import Plan
from layoutc.plan.products import OPERANDS
from layoutc.report.proof import Proof, proof

SAMPLE = (6, 24)  # rows and columns of the matrix whose random bits are compared


def bits_are_their_own(plan: Plan) -> Iterator[Proof]:
    """No two elements are rounded by the same word of the generator."""
    sources = [source for source in plan.layout.sources if source.quantization.stochastic]
    if not sources:
        return
    taken: dict[tuple[int, ...], str] = {}
    counter = ""
    places = list(product(range(SAMPLE[0]), range(SAMPLE[1])))
    for source, (i, j) in product(sources, places):
        word, told = (j // 4, i, stream_of(source), 0, j % 4), f"({i}, {j}) of {source.name}"
        counter = counter or (f"{told} has the bits of {taken[word]}" if word in taken else "")
        taken[word] = told
    statement = "every element is rounded by 32 random bits that no other element of the matrix is rounded by"
    yield proof("random bits", statement, f"every counter enumerated, matrices of {SAMPLE[0]} x {SAMPLE[1]}", counter)


def transforms_can_be_undone(plan: Plan) -> Iterator[Proof]:
    """Each transform is orthogonal, keeps values within the amax that scales are made for, and no cut splits it."""
    for name, transform in plan.layout.transforms.items():
        rows = _matrix(transform)
        method = f"every pair of the {transform.size} rows of its matrix, in whole numbers"
        yield proof(name, f"its transform, {transform}, is undone by its inverse", method, _not_orthogonal(rows))
        grown = max(sum(map(abs, row)) for row in rows) ** 2 / transform.size
        statement = f"no transformed value is above {transform.headroom:g} times the amax"
        counter = "" if grown <= transform.headroom**2 else f"one may be {grown**0.5:g} times as large"
        yield proof(name, statement, "sums of magnitudes of the rows", counter)
        statement = f"every {transform.size} values that are mixed lie in one block, which no cut splits"
        yield proof(name, statement, "sizes of blocks and shapes", _cut(plan, plan.layout.source(name), transform))


def transforms_cancel(plan: Plan) -> Iterator[Proof]:
    """A kernel multiplies transformed codes directly, so sums of products must not depend on the transforms."""
    if plan.products is None:
        return
    roles = {"weight": plan.layout, "activation": plan.products.activation, "gradient": plan.products.gradient}
    for one in plan.products.products:
        sides = [(roles[role].transforms.get(orientation), orientation) for role, orientation in OPERANDS[one.name]]
        found = [transform for transform, _ in sides]
        if one.cards is None or not any(found):
            continue
        method = "products of every two unit vectors, by the matrices of both operands, in whole numbers"
        contracted = {"rowwise": "k", "columnwise": "m"}
        wrong = (made for made, name in sides if made and made.axis != contracted[name])
        aside = (f"{made} does not run along the contraction" for made in wrong)
        counter = next(aside, "") or _uncancelled(*found)
        yield proof(one.name, "the transforms of both operands cancel", method, counter)


def _uncancelled(a: Transform | None, b: Transform | None) -> str:
    """Two unit vectors whose product changes when they are transformed; "" if there are none.

    Products are linear in both vectors, so what holds for unit vectors holds for all. Matrices are integers here, so a
    product is too large by the square root of the product of both sizes.
    """
    grown = prod(one.size for one in (a, b) if one)
    length = lcm(*(one.size for one in (a, b) if one))
    left, right = (_units(one, length) for one in (a, b))
    for (i, one), (j, other) in product(enumerate(left), enumerate(right)):
        made = sum(x * y for x, y in zip(one, other, strict=True))
        if made < 0 or made * made != (grown if i == j else 0):
            return f"entries {i} and {j} of a group multiply to {made / grown**0.5:g}, not {int(i == j)}"
    return ""


def _units(transform: Transform | None, length: int) -> list[list[int]]:
    """Each transformed unit vector of a length, before normalization."""
    if transform is None:
        return [[int(i == j) for j in range(length)] for i in range(length)]
    size, columns = transform.size, list(zip(*_matrix(transform), strict=True))
    groups = ((i // size * size, columns[i % size]) for i in range(length))
    return [[*[0] * start, *column, *[0] * (length - start - size)] for start, column in groups]


def _matrix(transform: Transform) -> list[list[int]]:
    """The matrix that a group is multiplied by, before normalization: a row per result."""
    rows = []
    for result in range(transform.size):
        signs = (-1 if transform.signs >> entry & 1 else 1 for entry in range(transform.size))
        rows.append([sign * (-1) ** (result & entry).bit_count() for entry, sign in enumerate(signs)])
    return rows


def _not_orthogonal(rows: list[list[int]]) -> str:
    for (i, one), (j, other) in product(enumerate(rows), repeat=2):
        if sum(a * b for a, b in zip(one, other, strict=True)) != (len(rows) if i == j else 0):
            return f"rows {i} and {j} are not orthogonal"
    return ""


def _cut(plan: Plan, source: Source, transform: Transform) -> str:
    block = source.quantization.block
    size = block.m if transform.axis == "m" else block.k
    multiple = plan.layout.multiple_m if transform.axis == "m" else plan.layout.multiple_k
    if not size or size % transform.size:
        return f"blocks have {size or 'all'} steps along {transform.axis}"
    return f"a matrix may have {multiple} steps along {transform.axis}" if multiple % transform.size else ""


OF_VALUES = (bits_are_their_own, transforms_can_be_undone, transforms_cancel)

"""Chains for weights of any size: the same steps, with sizes that are functions of rows and columns.

A formula is data. Code that shows layouts, for instance in a page, reads formulas and needs no other rules.
"""

from __future__ import annotations

from dataclasses import dataclass

from layoutc.ints.sizes import cdiv
from layoutc.layout.chain import Chain, Index, Join, Pad, Permute, Reorder, Repeat, Split
from layoutc.spec.notation import Axis


@dataclass(frozen=True)
class Size:
    """Entries along an axis of the weight, one per `per` rows or columns; without an axis, one entry in all."""

    axis: Axis | None = None
    per: int = 1

    def at(self, m: int, k: int) -> int:
        """The number of entries for a weight of (m, k)."""
        return 1 if self.axis is None else cdiv(m if self.axis == "m" else k, self.per)

    def index(self, row: int, column: int) -> int:
        """The index of an element's entry."""
        return 0 if self.axis is None else (row if self.axis == "m" else column) // self.per


@dataclass(frozen=True)
class RepeatUpTo:
    """A Repeat whose limit depends on the weight's size."""

    dim: int
    times: int
    limit: Size


FormulaStep = Permute | RepeatUpTo | Pad | Split | Reorder | Join


@dataclass(frozen=True)
class Formula:
    """From a plane's values to bytes, for any weight: sizes of the plane's array, then steps as in a Chain."""

    start: tuple[Size, ...]
    steps: tuple[FormulaStep, ...]
    bits: int
    low_first: bool = True

    def at(self, m: int, k: int) -> Chain:
        """The chain for a weight of (m, k)."""
        steps = tuple(
            Repeat(step.dim, step.times, step.limit.at(m, k)) if isinstance(step, RepeatUpTo) else step
            for step in self.steps
        )
        return Chain(tuple(size.at(m, k) for size in self.start), steps, self.bits, self.low_first)

    def index(self, row: int, column: int) -> Index:
        """The index in the start array of an element's value."""
        return tuple(size.index(row, column) for size in self.start)

    def then(self, *steps: FormulaStep) -> Formula:
        """The formula with more steps before its values are packed."""
        return Formula(self.start, (*self.steps, *steps), self.bits, self.low_first)


def of_plane(per_m: int | None, per_k: int | None, bits: int, low_first: bool) -> Formula:
    """The formula of a plane, which stores each value once, row by row. per_m, per_k: the plane's."""
    start = (Size("m", per_m) if per_m else Size(), Size("k", per_k) if per_k else Size())
    return Formula(start, (), bits, low_first)

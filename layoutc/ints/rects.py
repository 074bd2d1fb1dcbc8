"""Rectangles: rows and columns of a matrix, or of the planes of a tensor. Pure integers."""

from __future__ import annotations

from typing import NamedTuple, Self


class Rect(NamedTuple):
    """Rows r0..r1 and columns c0..c1, ends excluded. Empty if an end is not above its start."""

    r0: int
    r1: int
    c0: int
    c1: int

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.r1 - self.r0, self.c1 - self.c0

    @property
    def area(self) -> int:
        """Number of elements; 0 for an empty rectangle."""
        return max(self.r1 - self.r0, 0) * max(self.c1 - self.c0, 0)

    def meet(self, other: Rect) -> Rect:
        """The intersection; its area is 0 if the rectangles do not overlap."""
        return Rect(
            max(self.r0, other.r0), min(self.r1, other.r1), max(self.c0, other.c0), min(self.c1, other.c1)
        )  # fmt: skip

    def moved(self, rows: int, columns: int) -> Self:
        """The rectangle moved down and to the right."""
        return type(self)(self.r0 + rows, self.r1 + rows, self.c0 + columns, self.c1 + columns)

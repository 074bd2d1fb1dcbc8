"""Which tile a launch has, and what else follows from the orientations that it writes and from the dtype of x."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from layoutc.runtime.kernels.direct import Constants

Tile = tuple[int, int, int, int, int | None]  # rows, columns, pieces, warps, most registers of a thread
Tiles = Mapping[tuple[int, *tuple[bool, ...]], Tile]  # by bytes per value of x, and which sources are written
Covers = Mapping[tuple[int, *tuple[bool, ...]], tuple[int, int]]  # by the same: rows and columns of a tile

_ALL = 1 << 62  # more columns than a matrix has
_LEAST = 512  # columns of a tile that is fitted to few


class Choice(NamedTuple):
    """What all launches for the same orientations and dtype of x share."""

    rowwise: bool
    columnwise: bool
    input_max: float | None
    tile: Tile
    cover: tuple[int, int]  # the tile's rows and columns that hold whole blocks; (0, 0): all of them
    rows: tuple[int, int, int]  # of blocks that span all columns, of both sources; which depend on ranges (a bit each)
    constants: dict[Any, Constants]  # by everything else that they depend on

    @property
    def step(self) -> tuple[int, int]:
        """Rows and columns from one tile to the next."""
        return self.cover if self.cover[0] else (self.tile[0], self.tile[1])

    @property
    def span(self) -> tuple[int, int]:
        """Rows and columns from one program to the next: those of a tile, or all columns where blocks span them."""
        return (self.step[0], _ALL) if any(self.rows[:2]) else self.step

    def fitted(self, k: int) -> Choice:
        """The same for matrices of at most k columns, where blocks span them: without columns that would be idle.

        Blocks of another source may need these.
        """
        rows, columns, pieces, warps, registers = self.tile
        fit, alone = fitting(k), self.rowwise != self.columnwise
        if not (alone and any(self.rows[:2])) or self.cover[0] or pieces > 1 or fit >= columns:
            return self
        return self._replace(tile=(rows, fit, pieces, max(warps * fit // columns, 1), registers))


def fitting(k: int) -> int:
    """The columns of a tile that has k of them, if others would be idle."""
    return max(1 << (k - 1).bit_length(), _LEAST)

"""The tile of a launch, and what else follows from its orientations and the dtype of x."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_ALL = 1 << 62  # more columns than a matrix has
_LEAST = 512  # the fewest columns of a fitted tile


class Tile(NamedTuple):
    """Rows and columns of a program, its warps, adjacent 16-byte pieces of a row in a thread, the limit of registers of
    a thread, and the rows and columns that hold whole blocks (the rest are idle); (0, 0): all of them."""

    rows: int
    columns: int
    warps: int
    pieces: int = 1
    registers: int | None = None
    cover: tuple[int, int] = (0, 0)


NO_TILE = Tile(0, 0, 0)
Tiles = Mapping[tuple[int, *tuple[str, ...]], Tile]  # by bytes per value of x, and the sources that are written


class Choice(NamedTuple):
    """What all launches for the same orientations and dtype of x share."""

    rowwise: bool
    columnwise: bool
    input_max: float | None
    tile: Tile
    rows: tuple[int, int, int]  # of blocks that span all columns, of both sources; which depend on ranges (a bit each)

    @property
    def step(self) -> tuple[int, int]:
        """Rows and columns from one tile to the next."""
        return self.tile.cover if self.tile.cover[0] else self.tile[:2]

    @property
    def span(self) -> tuple[int, int]:
        """Rows and columns from one program to the next: those of a tile, or all columns where blocks span them."""
        return (self.step[0], _ALL) if any(self.rows[:2]) else self.step

    def fitted(self, k: int) -> Choice:
        """The choice for matrices of at most k columns, if blocks span them: without idle columns.

        Blocks of another source may need these columns.
        """
        tile, fit, alone = self.tile, fitting(k), self.rowwise != self.columnwise
        if not (alone and any(self.rows[:2])) or tile.cover[0] or tile.pieces > 1 or fit >= tile.columns:
            return self
        return self._replace(tile=tile._replace(columns=fit, warps=max(tile.warps * fit // tile.columns, 1)))


def fitting(k: int) -> int:
    """The columns of a tile for k columns, without idle ones."""
    return max(1 << (k - 1).bit_length(), _LEAST)

"""Which tile a launch has, and what else follows from the orientations that it writes and from the dtype of x."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from layoutc.runtime.kernels.direct import Constants

Tile = tuple[int, int, int, int, int | None]  # rows, columns, pieces, warps, most registers of a thread
Tiles = Mapping[tuple[int, *tuple[bool, ...]], Tile]  # by bytes per value of x, and which sources are written
Covers = Mapping[tuple[int, *tuple[bool, ...]], tuple[int, int]]  # by the same: rows and columns of a tile


class Choice(NamedTuple):
    """What all launches for the same orientations and dtype of x share."""

    rowwise: bool
    columnwise: bool
    input_max: float | None
    tile: Tile
    cover: tuple[int, int]  # the tile's rows and columns that hold whole blocks; (0, 0): all of them
    constants: dict[Any, Constants]  # by everything else that they depend on

    @property
    def step(self) -> tuple[int, int]:
        """Rows and columns from one tile to the next."""
        return self.cover if self.cover[0] else (self.tile[0], self.tile[1])

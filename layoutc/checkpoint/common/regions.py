"""Regions: the part of a whole weight that a rank holds, and the plane entries that cover it. Only integers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from torch import Tensor

from layoutc.ints.rects import Rect
from layoutc.ints.sizes import cdiv, up
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Plane
from layoutc.runtime.sharding import meshes
from layoutc.runtime.torch_private import local_tensor


class Box(NamedTuple):
    """The entries first..last (exclusive) of each dim of a tensor."""

    first: tuple[int, ...]
    last: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dim."""
        return tuple(b - a for a, b in zip(self.first, self.last, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the whole tensor."""
        return tuple(slice(a, b) for a, b in zip(self.first, self.last, strict=True))


def box_of(tensor: Tensor, name: str = "a weight") -> Box:
    """This rank's part of a DTensor, as a box of the whole; all of any other tensor.

    Raises LayoutError if the shard's shape contradicts its placements.
    """
    slices, local = meshes.slices_of(tensor), tuple(local_tensor(tensor).shape)
    box = Box(tuple(s.start for s in slices), tuple(s.stop for s in slices))
    if box.shape != local:
        raise LayoutError(
            f"{name}: this rank's shard has shape {local}, but by its placements it should have {box.shape} of "
            f"{tuple(tensor.shape)}"
        )
    return box


def rows_of(shape: Sequence[int], box: Box) -> list[Rect]:
    """The runs of adjacent rows, in the (m, k) matrix of a weight of `shape`, that make up a box; [] if empty."""
    if 0 in box.shape:
        return []
    lead = list(shape[:-1])
    dim = len(lead) - 1
    while dim > 0 and box.shape[dim] == lead[dim]:
        dim -= 1
    inner, runs = prod(lead[dim + 1 :]), []
    for index in product(*(range(a, b) for a, b in zip(box.first[:dim], box.last[:dim], strict=True))):
        start = 0
        for size, at in zip(lead, index, strict=False):
            start = start * size + at
        start *= lead[dim]
        runs.append(
            Rect((start + box.first[dim]) * inner, (start + box.last[dim]) * inner, box.first[-1], box.last[-1])
        )
    return runs


def whole_blocks(rows: Rect, block_rows: int, block_columns: int, m: int, k: int) -> Rect:
    """The rectangle of whole blocks of an (m, k) matrix that `rows` touches."""
    return Rect(
        rows.r0 // block_rows * block_rows,
        min(up(rows.r1, block_rows), m),
        rows.c0 // block_columns * block_columns,
        min(up(rows.c1, block_columns), k),
    )


def entries_of(plane: Plane, shape: Sequence[int], rows: Rect, k: int) -> tuple[slice, ...]:
    """The entries of a stored plane of `shape` that cover rows of a weight with k columns."""
    index = [slice(0, size) for size in shape]
    if plane.rows_per_value is not None:
        index[0] = slice(rows.r0 // plane.rows_per_value, cdiv(rows.r1, plane.rows_per_value))
    if plane.columns_per_value is not None:
        first = int(rows.c0 / plane.columns_per_value)
        last = shape[-1] if rows.c1 == k else -int(-rows.c1 // plane.columns_per_value)
        index[-1] = slice(first, last)
    return tuple(index)

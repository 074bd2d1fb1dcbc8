"""Planes in parts, one per rank, as a gather of many weights leaves them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from layoutc.ints.sizes import cdiv
from layoutc.runtime.facts import Layout


class Parts(NamedTuple):
    """The layout of planes that were gathered in parts, one per rank, in rank order.

    rows: per part; the last parts may have fewer rows of the matrix, or none. nbytes: from one part to the next.
    """

    ranks: int
    rows: int
    nbytes: int

    def of(self, layout: Layout, planes: Mapping[str, Tensor], part: int, rows: int) -> dict[str, Tensor]:
        """The planes of one part. planes: those of the first part. rows: how many this part has."""
        found = dict(planes)
        for name, plane in planes.items():
            if (per := layout.stored[name].rows_per_value) is not None:
                start = plane.storage_offset() + part * self.nbytes // plane.element_size()
                found[name] = plane.as_strided((cdiv(rows, per), *plane.shape[1:]), plane.stride(), start)
        return found

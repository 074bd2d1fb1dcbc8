"""The buffers of a weight that launches fill: which there are, and which rows and columns they take."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from layoutc.ints.sizes import cdiv, up
from layoutc.runtime.facts import Layout
from layoutc.runtime.kernels import launch

Padding = tuple[tuple[int, int], ...]  # (per, multiple): an axis has ceil(size / per) entries, rounded up to a multiple


class Entry(NamedTuple):
    """A buffer of an orientation. plane: the plane that is this buffer; None if the buffer is laid out."""

    name: str
    plane: str | None
    is_flat: bool
    is_swizzled: bool

    @property
    def source(self) -> tuple[bool, str]:
        """Whether it is a plane, and the name of that plane, or its own."""
        return self.plane is not None, self.plane or self.name


def new(layout: Layout, m: int, k: int, orientations: tuple[str, ...], device: torch.device) -> dict[str, Tensor]:
    """New, uninitialized buffers of the orientations, by name: those that are not planes."""
    return launch.new(layout.laid_out(m, k, orientations), device)


@lru_cache(maxsize=4096)
def are_made(layout: Layout, orientations: tuple[str, ...]) -> bool:
    """Whether any buffer of the orientations is not a plane."""
    return bool(layout.laid_out(layout.multiple_m, layout.multiple_k, orientations))


@lru_cache(maxsize=4096)
def entries(layout: Layout, orientations: tuple[str, ...]) -> list[Entry]:
    """The buffers of orientations, in the layout's order."""
    facts = layout.buffers(layout.multiple_m, layout.multiple_k)
    return [
        Entry(name, layout.as_stored.get(name), name in layout.as_stored and len(shape) == 1, name in layout.swizzled)
        for name, (shape, _) in facts.items()
        if name == "amax" or name.split("_")[0] in orientations
    ]


@lru_cache(maxsize=4096)
def cover(padding: tuple[Padding, Padding], m: int, k: int) -> tuple[int, int]:
    """The rows and columns that tiles must cover: those of the weight, and the padding of all buffers."""
    sizes = (
        max([size, *(up(cdiv(size, per), multiple) * per for per, multiple in axis)])
        for size, axis in zip((m, k), padding, strict=True)
    )
    rows, columns = sizes
    return rows, columns

"""Allocating buffers for one weight or many, and listing the launches that fill them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from layoutc.ints.sizes import cdiv, up
from layoutc.runtime.facts import Facts, Layout
from layoutc.runtime.kernels import batches, launch

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


def new_for_batch(
    layout: Layout,
    shapes: Sequence[tuple[int, int]],
    orientations: tuple[str, ...],
    weights: Sequence[Mapping[str, Tensor]],
) -> list[dict[str, Tensor]]:
    """As `new` for each of several weights. Buffers of the same name and shape share an allocation.

    weights: their planes. Raises ValueError if these are on several devices.
    """
    made: list[dict[str, Tensor]] = [{} for _ in shapes]
    devices = {plane.device for planes in weights for plane in planes.values()}
    if len(devices) > 1:
        raise ValueError(
            f"{layout.name}: the weights of a batch must be on one device, not on {', '.join(map(str, devices))}"
        )
    for name, (shape, dtype), members in _stackable_buffers(layout, orientations, *shapes) if weights else ():
        new = torch.empty((len(members), *shape), dtype=dtype, device=next(iter(devices))).unbind()
        for index, buffer in zip(members, new, strict=True):
            made[index][name] = buffer
    return made


@lru_cache(maxsize=batches.CACHED)
def _stackable_buffers(
    layout: Layout, orientations: tuple[str, ...], *shapes: tuple[int, int]
) -> list[tuple[str, Facts, list[int]]]:
    """Buffers of the same name, shape and dtype: these, and the indices of the weights that have them.

    A buffer whose size is not a multiple of 16 bytes gets its own allocation; the next one in it would be misaligned.
    """
    groups: dict[tuple[str, Facts, int], list[int]] = defaultdict(list)
    for index, (m, k) in enumerate(shapes):
        for name, facts in layout.laid_out(m, k, orientations).items():
            groups[name, facts, index if facts.nbytes % 16 else -1].append(index)
    return [(name, facts, members) for (name, facts, _), members in groups.items()]


def split(
    planes: Sequence[str],
    names: Sequence[str],
    weights: Sequence[Mapping[str, Tensor]],
    made: Sequence[Mapping[str, Tensor]],
    shapes: Sequence[tuple[int, int]],
    covers: Sequence[tuple[int, int]],
    tile: tuple[int, int],
    word: int,
) -> tuple[Sequence[batches.Table], Sequence[int]]:
    """The tables of launches that fill buffers, and the indices of weights that take a launch each.

    planes, names: names of planes and of buffers, in the order of the kernel's arguments. made: the buffers of each
    weight. covers: the rows and columns that tiles cover, padding included. word: rows and columns whose codes are
    moved at a time.
    """
    if not weights or not made[0]:
        return (), ()
    tensors = [[one.get(name) for one in each] for each, of in ((weights, planes), (made, names)) for name in of]
    columns = [tuple(0 if one is None else one.data_ptr() for one in each) for each in tensors]
    ms, ks = zip(*shapes, strict=True)
    fields, wide = [ms, ks, tuple(cover[1] for cover in covers), *columns], [True, True, False, *[True] * len(columns)]
    some = next(iter(made[0].values()))
    return batches.tables_of(some.device, covers, fields, wide, tile, (word, word))


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

"""Buffers to write into, of one weight or of many, and the launches that fill them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from layoutc.runtime.facts import Facts, Layout
from layoutc.runtime.kernels import batches


def new(layout: Layout, m: int, k: int, orientations: tuple[str, ...], device: torch.device) -> dict[str, Tensor]:
    """New buffers of orientations to write into, of those that are no planes."""
    facts = _buffer_facts(layout, m, k, orientations)
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in facts.items()}


def planes_as_buffers(
    layout: Layout, m: int, k: int, orientations: tuple[str, ...], device: torch.device
) -> dict[str, Tensor]:
    """New planes to write into, of those that are buffers of the orientations as they are."""
    facts = _plane_facts(layout, m, k, orientations)
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in facts.items()}


@lru_cache(maxsize=4096)
def _plane_facts(layout: Layout, m: int, k: int, orientations: tuple[str, ...]) -> dict[str, Facts]:
    read = {plane for buffer, plane in layout.as_stored.items() if buffer.split("_")[0] in orientations}
    return {name: fact for name, fact in layout.written(m, k, orientations).items() if name in read}


@lru_cache(maxsize=4096)
def _buffer_facts(layout: Layout, m: int, k: int, orientations: tuple[str, ...]) -> dict[str, Facts]:
    return layout.laid_out(m, k, orientations)


def new_for_batch(
    layout: Layout,
    shapes: Sequence[tuple[int, int]],
    orientations: tuple[str, ...],
    weights: Sequence[Mapping[str, Tensor]],
) -> list[dict[str, Tensor]]:
    """New buffers for each of many weights, of those that are no planes; one allocation for those of a name and shape.

    Raises ValueError where planes of the weights lie on several devices.
    """
    made: list[dict[str, Tensor]] = [{} for _ in shapes]
    places = {plane.device for planes in weights for plane in planes.values()}
    if len(places) > 1:
        raise ValueError(
            f"{layout.name}: the weights of a batch lie on one device, not on {', '.join(map(str, places))}"
        )
    for name, (shape, dtype), members in _stackable_buffers(layout, orientations, *shapes) if weights else ():
        new = torch.empty((len(members), *shape), dtype=dtype, device=next(iter(places))).unbind()
        for index, buffer in zip(members, new, strict=True):
            made[index][name] = buffer
    return made


@lru_cache(maxsize=batches.CACHED)
def _stackable_buffers(
    layout: Layout, orientations: tuple[str, ...], *shapes: tuple[int, int]
) -> list[tuple[str, Facts, list[int]]]:
    """Name and facts of buffers, and of which weights they are; alone where the next would begin between 16 bytes."""
    found: dict[tuple[str, Facts, int], list[int]] = defaultdict(list)
    for index, (m, k) in enumerate(shapes):
        for name, facts in layout.laid_out(m, k, orientations).items():
            found[name, facts, index if facts.nbytes % 16 else -1].append(index)
    return [(name, facts, members) for (name, facts, _), members in found.items()]


def split(
    planes: Sequence[str],
    names: Sequence[str],
    weights: Sequence[Mapping[str, Tensor]],
    made: Sequence[Mapping[str, Tensor]],
    shapes: Sequence[tuple[int, int]],
    covers: Sequence[tuple[int, int]],
    tile: tuple[int, int, int],
    word: int,
) -> list[tuple[int, batches.Table | None]]:
    """The launches that fill buffers: the position of a weight, and a table of it and others, or None for it alone.

    planes, names: of planes and of buffers, as the kernel takes them. covers: the rows and columns that tiles cover,
    with all padding. word: rows and columns whose codes are moved at a time.
    """
    if not weights or not made[0]:
        return []
    held = [[one.get(name) for one in each] for each, of in ((weights, planes), (made, names)) for name in of]
    columns = [tuple(0 if one is None else one.data_ptr() for one in each) for each in held]
    ms, ks = zip(*shapes, strict=True)
    fields, wide = [ms, ks, tuple(cover[1] for cover in covers), *columns], [True, True, False, *[True] * len(columns)]
    some = next(iter(made[0].values()))
    tables, single = batches.tables_of(some.device, covers, fields, wide, (tile[0], tile[1]), (word, word))
    return [*((0, table) for table in tables), *((index, None) for index in single)]

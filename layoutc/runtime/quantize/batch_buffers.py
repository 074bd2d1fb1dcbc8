"""Buffers of many weights: what a GEMM reads of a block's weights, after a gather, laid out in one launch a recipe."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from layoutc.ints.sizes import cdiv
from layoutc.runtime.errors import MissingOrientation
from layoutc.runtime.facts import Facts, Layout
from layoutc.runtime.kernels import launch
from layoutc.runtime.quantize import batches
from layoutc.runtime.quantize.weights import chosen_orientations
from layoutc.runtime.weight import gathered_in_graphs, operators
from layoutc.runtime.weight.tensor import QuantizedTensor


def buffers_of(
    tensors: Sequence[QuantizedTensor], *, orientations: Sequence[str] | None = None, swizzled: bool = False
) -> list[dict[str, Tensor]]:
    """`buffers()` of each of many quantized tensors, of any recipes, in their order: as after a gather, of a block.

    On a card, those of a recipe are laid out in one launch, and what is new of one shape and name shares an allocation.
    orientations: those to lay out, by default all that a tensor holds; each tensor must hold them. swizzled: as for
    buffers(). Raises, before any work, TypeError for what is no quantized tensor, ValueError for orientations that a
    recipe has not and where it states no swizzle, MissingOrientation for those that a tensor does not hold.
    """
    kinds: dict[tuple[type[QuantizedTensor], torch.device, bool, tuple[str, ...]], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, QuantizedTensor):
            raise TypeError(f"buffers_of takes quantized tensors, not {type(tensor).__name__}")
        tensor.LAYOUT.check_swizzled(swizzled)
        gathered_in_graphs.check_held(tensor)
        empty = 0 in tensor._matrix
        kinds[type(tensor), tensor.device, empty, _asked(tensor, orientations)].append(index)
    found: list[dict[str, Tensor]] = [{} for _ in tensors]
    for (cls, _, _, asked), members in kinds.items():
        weights = [tensors[index]._planes for index in members]
        shapes = [tensors[index]._matrix for index in members]
        for index, laid_out in zip(members, _lay_out(cls, weights, shapes, asked, swizzled), strict=True):
            found[index] = laid_out
    return found


def _asked(tensor: QuantizedTensor, orientations: Sequence[str] | None) -> tuple[str, ...]:
    """The orientations to lay a tensor out in, which it holds."""
    held = tensor.orientations
    asked = held if orientations is None else chosen_orientations(tensor.LAYOUT, orientations)
    if not asked or any(name not in held for name in asked):
        raise MissingOrientation(
            f"{tensor._label()} holds {', '.join(held) or 'no orientation'}, not {', '.join(asked) or 'any to lay out'}"
        )
    return asked


def _lay_out(
    cls: type[QuantizedTensor],
    weights: Sequence[Mapping[str, Tensor]],
    shapes: Sequence[tuple[int, int]],
    orientations: tuple[str, ...],
    swizzled: bool,
) -> list[dict[str, Tensor]]:
    """The buffers of many weights of a recipe: together where a kernel can, else one by one."""
    together = getattr(cls, "_lay_out_group", None)  # of recipes that have kernels, and buffers that are no planes
    first = next(iter(weights[0].values()))
    if together is not None and len(weights) > 1 and launch.usable(first) and not operators.traced(first):
        return together(weights, shapes, orientations, swizzled)  # type: ignore[no-any-return]
    return [
        operators.lay_out(cls, one, *shape, orientations, swizzled) for one, shape in zip(weights, shapes, strict=True)
    ]


def new(
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
            f"{layout.name}: the weights of a group lie on one device, not on {', '.join(map(str, places))}"
        )
    for name, (shape, dtype), members in _alike_buffers(layout, orientations, *shapes) if weights else ():
        new = torch.empty((len(members), *shape), dtype=dtype, device=next(iter(places))).unbind()
        for index, buffer in zip(members, new, strict=True):
            made[index][name] = buffer
    return made


@lru_cache(maxsize=batches.KEPT)
def _alike_buffers(
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
    cover: Callable[[int, int], tuple[int, int]] | None,
    tile: tuple[int, int, int],
    word: int,
) -> list[tuple[int, batches.Table | None]]:
    """The launches that fill buffers: the position of a weight, and a table of it and others, or None for it alone.

    planes, names: of planes and of buffers, as the kernel takes them. cover: (m, k) -> the rows and columns that tiles
    cover, where these are more. word: rows and columns whose codes are moved at a time.
    """
    if not weights or not made[0]:
        return []
    held = [[one.get(name) for one in each] for each, of in ((weights, planes), (made, names)) for name in of]
    columns = [tuple(0 if one is None else one.data_ptr() for one in each) for each in held]
    ms, ks = zip(*shapes, strict=True)
    known = {shape: shape if cover is None else cover(*shape) for shape in set(shapes)}
    covers = [known[shape] for shape in shapes]
    fields, wide = [ms, ks, tuple(cover[1] for cover in covers), *columns], [True, True, False, *[True] * len(columns)]
    some = next(iter(made[0].values()))
    tables, single = batches.listed(some.device, covers, fields, wide, (tile[0], tile[1]), (word, word))
    return [*((0, table) for table in tables), *((index, None) for index in single)]


def alone(m: int, k: int, tile_m: int, tile_k: int, even: bool) -> batches.Table:
    """What a launch for one matrix has in place of a table; m, k: the rows and columns that tiles cover."""
    return batches.Table(None, 0, cdiv(m, tile_m) * cdiv(k, tile_k), False, even)

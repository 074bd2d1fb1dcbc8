"""The buffers of orientations, by name; and as operators return them: no plane twice, since results share no memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from types import ModuleType

from torch import Tensor

from layoutc.runtime.facts import Facts, Layout


def named(
    layout: Layout, planes: Mapping[str, Tensor], made: Mapping[str, Tensor], matrix: tuple[int, int], of: Sequence[str]
) -> dict[str, Tensor]:
    """The buffers of orientations, in order: laid out ones, and planes or flat views of planes."""
    buffers: dict[str, Tensor] = {}
    for name, (shape, _) in layout.buffers(*matrix).items():
        if name == "amax" or name.split("_")[0] in of:
            stored = None if name in made else planes[layout.as_stored[name]]
            buffers[name] = made[name] if stored is None else stored.flatten() if len(shape) == 1 else stored
    return buffers


def distinct(layout: Layout, m: int, k: int, orientations: tuple[str, ...], swizzled: bool) -> Mapping[str, Facts]:
    """As _known_distinct, for sizes that may be symbols, which can't be cached."""
    known = type(m) is int and type(k) is int
    return (_known_distinct if known else _known_distinct.__wrapped__)(layout, m, k, orientations, swizzled)


def by_reference(
    layout: Layout, reference: ModuleType, planes: Mapping[str, Tensor], matrix: tuple[int, int], of: tuple[str, ...]
) -> dict[str, Tensor]:
    """The buffers that a recipe's reference lays out; none if all of them are planes."""
    made = reference.lay_out(planes, *matrix, of) if hasattr(reference, "lay_out") else {}
    return named(layout, planes, made, matrix, of)


@lru_cache(maxsize=4096)
def _known_distinct(layout: Layout, m: int, k: int, orientations: tuple[str, ...], swizzled: bool) -> dict[str, Facts]:
    """The buffers of orientations, each plane once: what an operator returns."""
    laid_out = layout.laid_out(m, k, orientations, swizzled)
    first = first_of_planes(layout, orientations, laid_out)
    return {
        name: laid_out.get(name, facts)
        for name, facts in layout.buffers(m, k).items()
        if name in laid_out or name in first.values()
    }


def first_of_planes(layout: Layout, orientations: Collection[str], laid_out: Collection[str]) -> dict[str, str]:
    """Plane -> the first buffer of orientations that is this plane."""
    first: dict[str, str] = {}
    for name, plane in layout.as_stored.items():
        if name not in laid_out and name.split("_")[0] in orientations:
            first.setdefault(plane, name)
    return first


def quantized_names(
    layout: Layout, m: int, k: int, orientations: tuple[str, ...], swizzled: bool, with_amax: bool
) -> list[str]:
    """What the operator that quantizes to buffers returns; the amax too, if it is a buffer that it computes."""
    names = list(_known_distinct(layout, m, k, orientations, swizzled))
    return [*names, "amax"] if with_amax and "amax" in layout.as_stored else names


@lru_cache(maxsize=256)
def laid_out_names(layout: Layout, orientations: tuple[str, ...], swizzled: bool) -> tuple[list[str], list[str]]:
    """The buffers that laying out returns, and the planes that it needs."""
    made = layout.laid_out(layout.multiple_m, layout.multiple_k, orientations, swizzled)
    return list(made), needed_planes(layout, orientations)


def needed_planes(layout: Layout, orientations: Sequence[str]) -> list[str]:
    """The planes that buffers of orientations are made of, in order."""
    needed = {name for orientation in orientations for name in layout.sources[orientation]}
    return [name for name in layout.stored if name in needed]

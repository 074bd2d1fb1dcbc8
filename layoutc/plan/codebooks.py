"""Codebooks that kernels look up in memory: of scales, zero points and super-block scales, and long ones of elements.

They have up to 256 values. Comparing each code with every value took longer than the kernel's memory traffic. Programs
hold smaller codebooks of elements (`from_codebook`). The steps of long codebooks of elements follow the values, for
optimizer kernels, which encode as many elements as they decode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from layoutc.layout.layout import Layout
from layoutc.plan.conversions import is_long
from layoutc.plan.kernels import level_suffix, suffixes_of
from layoutc.spec.formats import Format

Kind = Literal["element", "scale", "zero"]


@dataclass(frozen=True)
class Codebook:
    """The values of a format, one for each code, among those of all codebooks of a recipe."""

    suffix: str  # of the functions that use the format
    kind: Kind  # what they use it for
    first: int  # index of the first value
    steps: int | None = None  # index of the first step between elements, if elements are encoded by a look-up


def codebooks_of(layout: Layout) -> dict[Format, Codebook]:
    """A recipe's codebooks that are looked up in memory, in memory order."""
    used = list[tuple[str, Kind, Format]]()
    for source in layout.sources:
        q, suffix = source.quantization, suffixes_of(layout)[source.name]
        for stored, level in q.own_levels.items():
            of = level_suffix(stored, suffix)
            used += [(of, "element", level.quantization.element), (of, "scale", level.quantization.scale)]
        used += [(suffix, "element", q.element)] if _is_looked_up(q.element, layout) else []
        used += [] if q.scales else [(suffix, "scale", q.scale)]
        used += [] if q.zero is None or q.zeros is not None else [(suffix, "zero", q.zero)]
    found, first = dict[Format, Codebook](), 0
    for suffix, kind, fmt in used:
        if fmt.values and fmt not in found:
            found[fmt] = Codebook(suffix, kind, first)
            first += 1 << fmt.bits
    for fmt in {source.quantization.element: None for source in layout.sources}:
        if _is_looked_up(fmt, layout):
            found[fmt] = replace(found[fmt], steps=first)
            first += 1 << fmt.bits
    return found


def _is_looked_up(element: Format, layout: Layout) -> bool:
    """Whether elements are decoded and encoded by look-ups in memory: in long codebooks, and in those of optimizer
    states, where a launch encodes as many elements as it decodes and comparing each with all steps is too slow."""
    return is_long(element) or (bool(element.values) and layout.use == "state")


def steps_of(element: Format, codebooks: Mapping[Format, Codebook]) -> int | None:
    """The index of the first step of an element's codebook; None if programs hold it, or the format has no codebook."""
    return codebooks[element].steps if element in codebooks else None


def places(codebooks: Iterable[tuple[Format, Codebook]]) -> int:
    """How many numbers codebooks and their steps have in memory, each padded to 2**bits."""
    return sum((1 if book.steps is None else 2) << fmt.bits for fmt, book in codebooks)

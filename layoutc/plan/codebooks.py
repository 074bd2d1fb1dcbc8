"""Codebooks that kernels look up in memory: of scales, zero points, what super-blocks share, and elements if long.

They have up to 256 values. Each takes a comparison of its own for each code otherwise, which took longer than all that
is read and written. Smaller codebooks of elements are held by programs (`from_codebook`). Behind the values are the
steps of long codebooks of elements, for kernels that encode as many elements as they decode: those of optimizers.
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

    suffix: str  # of the arithmetic that has the format
    kind: Kind  # what it is there
    first: int  # the place of the first value
    steps: int | None = None  # that of the first number at which elements step up, if they are encoded by a look-up


def codebooks_of(layout: Layout) -> dict[Format, Codebook]:
    """The codebooks of a recipe that are looked up in memory, in the order that they lie in there."""
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
    """Whether elements are decoded, and encoded, by what lies in memory: long codebooks, and those of states, of which
    a launch encodes as many as it decodes, and has no time to compare each with all steps."""
    return is_long(element) or (bool(element.values) and layout.use == "state")


def steps_of(element: Format, codebooks: Mapping[Format, Codebook]) -> int | None:
    """Where the steps of an element's codebook begin; None: programs hold it, or it is none."""
    return codebooks[element].steps if element in codebooks else None


def places(codebooks: Iterable[tuple[Format, Codebook]]) -> int:
    """How many numbers codebooks and their steps are, with those that fill them up to powers of two."""
    return sum((1 if book.steps is None else 2) << fmt.bits for fmt, book in codebooks)

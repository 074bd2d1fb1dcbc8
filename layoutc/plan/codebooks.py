"""Codebooks that kernels look up in memory: of scales, zero points, what super-blocks share, and elements if long.

They have up to 256 values. Each takes a comparison of its own for each code otherwise, which took longer than all that
is read and written. Smaller codebooks of elements are held by programs (`from_codebook`).
"""

from __future__ import annotations

from dataclasses import dataclass
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


def codebooks_of(layout: Layout) -> dict[Format, Codebook]:
    """The codebooks of a recipe that are looked up in memory, in the order that they lie in there."""
    used = list[tuple[str, Kind, Format]]()
    for source in layout.sources:
        q, suffix = source.quantization, suffixes_of(layout)[source.name]
        for stored, level in q.own_levels.items():
            of = level_suffix(stored, suffix)
            used += [(of, "element", level.quantization.element), (of, "scale", level.quantization.scale)]
        used += [(suffix, "element", q.element)] if is_long(q.element) else []
        used += [] if q.scales else [(suffix, "scale", q.scale)]
        used += [] if q.zero is None or q.zeros is not None else [(suffix, "zero", q.zero)]
    found, first = dict[Format, Codebook](), 0
    for suffix, kind, fmt in used:
        if fmt.values and fmt not in found:
            found[fmt] = Codebook(suffix, kind, first)
            first += 1 << fmt.bits
    return found

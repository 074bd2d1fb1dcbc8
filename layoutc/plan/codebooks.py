"""Codebooks that kernels look up in memory: those of scales, zero points, and what super-blocks share.

They have up to 256 values. Each takes a comparison of its own for each code otherwise, which took longer than all that
is read and written. Codebooks of elements are smaller, and programs hold them (`from_codebook`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from layoutc.layout.layout import Layout
from layoutc.plan.kernels import arithmetics_of
from layoutc.spec.formats import Format


@dataclass(frozen=True)
class Codebook:
    """The values of a format, one for each code, among those of all codebooks of a recipe."""

    suffix: str  # of the arithmetic whose codec has them
    what: Literal["ELEMENT", "SCALE", "ZERO"]
    first: int  # the place of the first value


def codebooks_of(layout: Layout) -> dict[Format, Codebook]:
    """The codebooks of a recipe that are looked up in memory, in the order that they lie in there."""
    owned = {id(level.quantization) for source in layout.sources for level in source.quantization.own_levels.values()}
    found: dict[Format, Codebook] = {}
    first = 0
    for suffix, q in arithmetics_of(layout).items():
        formats: list[tuple[Literal["ELEMENT", "SCALE", "ZERO"], Format]] = []
        formats += [("ELEMENT", q.element)] if id(q) in owned else []
        formats += [("SCALE", q.scale)] if not q.scales else []
        formats += [("ZERO", q.zero)] if q.zero is not None and q.zeros is None else []
        for what, fmt in formats:
            if fmt.values and fmt not in found:
                found[fmt] = Codebook(suffix, what, first)
                first += 1 << fmt.bits
    return found

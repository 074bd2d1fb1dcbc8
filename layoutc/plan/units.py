"""Blocks whose sizes are not powers of two: the units that kernels cut them into, and the tiles that hold whole blocks.

A tile's sizes are powers of two. It holds as many whole blocks as fit; the remaining lanes are idle and move no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm, prod

from layoutc.layout.layout import Block, Source, codes_per_group

_LEAST_COLUMNS = 64  # a cache line of bf16; a tile has fewer only if it would have too many elements
_MOST_COLUMNS = 1024
_MOST_ROWS = 128


@dataclass(frozen=True)
class Units:
    """A unit's rows and columns, and a block's unit count along each axis; 0 and 1 for an axis that the block spans."""

    sizes: tuple[int, int]
    counts: tuple[int, int]


def units_of(block: Block) -> Units | None:
    """The units of a block; None if its sizes are powers of two (the block is one unit)."""
    sizes = unit(block.m or 0), unit(block.k or 0)
    m, k = ((size or 1) // (one or 1) for size, one in zip((block.m, block.k), sizes, strict=True))
    return Units(sizes, (m, k)) if m > 1 or k > 1 else None


def unit(size: int) -> int:
    """The largest power of two that divides a size."""
    return size & -size


def lanes(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def steps(sources: Sequence[Source]) -> tuple[int, int]:
    """The fewest rows and columns that hold whole blocks of all sources, and whole words of codes if there are units.

    They hold whole super-blocks, too.
    """
    m, k = (lcm(*(getattr(source.whole, axis) or 1 for source in sources)) for axis in ("m", "k"))
    if not any(units_of(source.quantization.block) for source in sources):
        return m, k
    return m, lcm(k, *(8 if source.data.bits == 4 else codes_per_group(source.data.bits) for source in sources))


def sizes_of(step: tuple[int, int], most: int) -> tuple[int, int]:
    """Rows and columns of the tile with the fewest idle lanes.

    step: the least that it must hold, from `steps`. most: the most elements, unless a step needs more. Ties go to the
    largest tile, then to the widest: for a step of 24 x 24 and 8192 elements, it is 32 x 256, of which blocks fill
    24 x 240.
    """
    rows = lanes(step[0])
    columns = max(lanes(step[1]), min(_LEAST_COLUMNS, max(most // rows, 1)))
    fitting = [
        (rows << up, columns << over)
        for up in range(15)
        for over in range(15)
        if rows * columns << (up + over) <= max(rows * columns, most)
        and rows << up <= max(rows, _MOST_ROWS)
        and columns << over <= max(columns, _MOST_COLUMNS)
    ]

    def rank(size: tuple[int, int]) -> tuple[float, int, int]:
        lanes = size[0] * size[1]
        return prod(covered(size, step)) / lanes, lanes, size[1]

    return max(fitting, key=rank)


def covered(size: tuple[int, int], step: tuple[int, int]) -> tuple[int, int]:
    """How many of a tile's rows and columns hold whole blocks."""
    return size[0] // step[0] * step[0], size[1] // step[1] * step[1]

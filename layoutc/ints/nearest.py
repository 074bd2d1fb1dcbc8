"""The nearest sizes and world sizes at which no cut falls inside a block. Pure integers."""

from __future__ import annotations

from math import lcm

from layoutc.ints.cuts import Cuts
from layoutc.ints.sizes import cdiv, up


def nearest_rows(rows: int, world: int, multiple: int, accepted: int) -> tuple[int, ...]:
    """The nearest row counts below and above, multiples of `accepted`, whose cuts fall between blocks."""
    step = lcm(multiple, accepted)
    sizes = []
    size = up(rows, step) - step
    while size > 0 and not Cuts.of(size, world).aligned(multiple):
        size = cdiv(size, world) // multiple * multiple * world // step * step  # at most this many whole blocks a rank
    if size > 0:
        sizes.append(size)
    size = rows // step * step + step
    while not Cuts.of(size, world).aligned(multiple):
        size = up((up(cdiv(size, world), multiple) - 1) * world + 1, step)  # at least this many
    return (*sizes, size)


def nearest_worlds(rows: int, world: int, multiple: int) -> tuple[int, ...]:
    """The nearest world sizes below and above that cut `rows` rows between blocks, up to 4 * world."""
    worlds = []
    ranks = world - 1
    while ranks > 0 and not Cuts.of(rows, ranks).aligned(multiple):
        ranks = max(1, cdiv(rows, up(cdiv(rows, ranks), multiple) - 1) - 1)  # the most ranks with this many rows each
    if ranks > 0:
        worlds.append(ranks)
    ranks = world + 1
    while ranks <= 4 * world and not Cuts.of(rows, ranks).aligned(multiple):
        whole = cdiv(rows, ranks) // multiple * multiple
        ranks = cdiv(rows, whole) if whole else 4 * world + 1  # the fewest with at most this many
    if ranks <= 4 * world:
        worlds.append(ranks)
    return tuple(worlds)


def nearest_multiple(size: int, multiple: int) -> tuple[int, ...]:
    """The nearest multiples at or below, and above; only the one above if there is none below."""
    below = size // multiple * multiple
    return (below, below + multiple) if below else (multiple,)

"""Where FSDP2 cuts a weight's rows, what cuts inside blocks cost, and the nearest sizes without such cuts.

Pure integers.
"""

from __future__ import annotations

from math import gcd, lcm

from layoutc.ints.sizes import cdiv, up


def aligned(rows: int, world: int, multiple: int) -> bool:
    """True when the shards of `world` ranks, ceil(rows / world) rows each, are cut at multiples of `multiple` rows."""
    per_rank = cdiv(rows, world)
    return per_rank >= rows or per_rank % multiple == 0


def cuts_inside(rows: int, world: int, block: int) -> int:
    """How many of the cuts between ranks fall inside a block of `block` rows."""
    per_rank = cdiv(rows, world)
    cuts = cdiv(rows, per_rank) - 1
    return cuts - cuts // _cycle(per_rank, block)


def ranks_cutting(rows: int, world: int, block: int) -> int:
    """How many ranks hold a part of a block whose other rows other ranks hold."""
    if aligned(rows, world, block):
        return 0
    per_rank = cdiv(rows, world)
    last = cdiv(rows, per_rank) - 1
    # Of neighbouring cuts one falls inside a block, so only the last rank, which ends with the weight, may hold none.
    return last + (last * per_rank % block > 0)


def sent_blocks(rows: int, world: int, block: int) -> int:
    """Blocks of `block` rows whose values a rank sends: as many as the rank that has rows of the most."""
    per_rank = cdiv(rows, world)
    if aligned(rows, world, block):
        return cdiv(per_rank, block)
    last = cdiv(rows, per_rank) - 1
    looked_at: list[int] = [*range(min(_cycle(per_rank, block), last)), last]
    return max(cdiv(min((rank + 1) * per_rank, rows), block) - rank * per_rank // block for rank in looked_at)


def _cycle(per_rank: int, block: int) -> int:
    """The number of ranks after which cuts fall where they fell in a block before."""
    return block // gcd(per_rank, block)


def nearest_rows(rows: int, world: int, multiple: int, accepted: int) -> tuple[int, ...]:
    """The nearest numbers of rows below and above, in whole blocks and as `accepted`, that are cut between blocks."""
    step = lcm(multiple, accepted)
    found = []
    size = up(rows, step) - step
    while size > 0 and not aligned(size, world, multiple):
        size = cdiv(size, world) // multiple * multiple * world // step * step  # at most so many whole blocks a rank
    if size > 0:
        found.append(size)
    size = rows // step * step + step
    while not aligned(size, world, multiple):
        size = up((up(cdiv(size, world), multiple) - 1) * world + 1, step)  # at least so many
    return (*found, size)


def nearest_worlds(rows: int, world: int, multiple: int) -> tuple[int, ...]:
    """The nearest world sizes below and above that cut `rows` rows between blocks, up to four times as many ranks."""
    found = []
    ranks = world - 1
    while ranks > 0 and not aligned(rows, ranks, multiple):
        ranks = max(1, cdiv(rows, up(cdiv(rows, ranks), multiple) - 1) - 1)  # the most with so many rows each
    if ranks > 0:
        found.append(ranks)
    ranks = world + 1
    while ranks <= 4 * world and not aligned(rows, ranks, multiple):
        whole = cdiv(rows, ranks) // multiple * multiple
        ranks = cdiv(rows, whole) if whole else 4 * world + 1  # the fewest with at most so many
    if ranks <= 4 * world:
        found.append(ranks)
    return tuple(found)


def nearest_multiple(size: int, multiple: int) -> tuple[int, ...]:
    """The nearest multiples below and above."""
    below = size // multiple * multiple
    return (below, below + multiple) if below else (multiple,)

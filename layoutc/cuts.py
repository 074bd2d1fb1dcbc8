"""Where FSDP2 cuts a weight's rows, and the nearest sizes at which no cut crosses a block. Pure integers."""

from __future__ import annotations

from math import lcm

from layoutc.chain import cdiv, up


def aligned(rows: int, world: int, multiple: int) -> bool:
    """True when the shards of `world` ranks, ceil(rows / world) rows each, are cut at multiples of `multiple` rows."""
    per_rank = cdiv(rows, world)
    return per_rank >= rows or per_rank % multiple == 0


def nearest_rows(rows: int, world: int, multiple: int, accepted: int) -> tuple[int, ...]:
    """The nearest numbers of rows below and above that shard over `world` ranks; whole blocks, multiples of `accepted`.

    Multiples of world x step always work, so at most that far is looked.
    """
    step = lcm(multiple, accepted)
    below = range(up(rows, step) - step, max(0, rows - (world + 1) * step), -step)
    above = range(rows // step * step + step, rows + (world + 1) * step, step)
    found = (next((size for size in sizes if aligned(size, world, multiple)), None) for sizes in (below, above))
    return tuple(size for size in found if size is not None)


def nearest_worlds(rows: int, world: int, multiple: int) -> tuple[int, ...]:
    """The nearest world sizes below and above over which `rows` rows shard, up to four times as many ranks."""
    below = next((w for w in range(world - 1, 0, -1) if aligned(rows, w, multiple)), None)
    above = next((w for w in range(world + 1, 4 * world + 1) if aligned(rows, w, multiple)), None)
    return tuple(w for w in (below, above) if w is not None)


def nearest_multiple(size: int, multiple: int) -> tuple[int, ...]:
    """The nearest multiples below and above."""
    below = size // multiple * multiple
    return (below, below + multiple) if below else (multiple,)

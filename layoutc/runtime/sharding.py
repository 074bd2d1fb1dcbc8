"""Shard alignment: does a cut between ranks fall between blocks? Pure integers, the same answer on every rank."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from layoutc.runtime.errors import ShardAlignmentError

if TYPE_CHECKING:
    from layoutc.runtime.facts import Layout


def aligned(rows: int, rows_per_rank: int, multiple: int) -> bool:
    """True when cutting `rows` every `rows_per_rank` crosses no group of `multiple` rows."""
    return rows_per_rank >= rows or rows_per_rank % multiple == 0


def check_alignment(
    layout: Layout, shape: tuple[int, ...], per_rank: int, *, world: int | None = None, name: str = "weight"
) -> None:
    """Refuses to cut a weight of `shape` every `per_rank` entries of dim 0 where a cut would split a block.

    Every rank asks with the same numbers, so all raise or none does. `world` is derived from the cut when unknown.
    Raises ShardAlignmentError with the parameter's name, the numbers, and the nearest sizes that work.
    """
    inner = prod(shape[1:-1])  # matrix rows for one entry of dim 0
    rows, multiple = shape[0] * inner, layout.shard_rows
    if aligned(rows, per_rank * inner, multiple):
        return
    world = world or -(-shape[0] // per_rank)
    sizes = [size for size in (_nearest_size(layout, shape[0], inner, world, step) for step in (-1, 1)) if size]
    worlds = _worlds(shape[0], inner, multiple, world)
    blocks = ", ".join(f"{block} {orientation}" for orientation, block in layout.blocks.items())
    raise ShardAlignmentError(
        f"{name}: shape {tuple(shape)} does not shard over {world} ranks in {layout.name}: {per_rank * inner} rows a "
        f"rank, but a cut must fall at a multiple of {multiple} rows ({layout.shard_reason}; blocks {blocks}). "
        f"At world size {world}, dim 0 can be {_either(sizes)}; "
        f"with dim 0 of {shape[0]}, the world size can be {_either(worlds)}."
    )


def _nearest_size(layout: Layout, size: int, inner: int, world: int, step: int) -> int | None:
    """The nearest size of dim 0 in the direction of `step` that is whole blocks and shards over `world` ranks."""
    for candidate in range(size + step, max(0, size + step * (world + 1) * layout.shard_rows), step):
        rows, per_rank = candidate * inner, -(-candidate // world) * inner
        whole = rows % layout.shard_rows == 0 and rows % layout.multiple_m == 0
        if whole and per_rank % layout.shard_rows == 0:
            return candidate
    return None


def _worlds(size: int, inner: int, multiple: int, world: int) -> list[int]:
    """The nearest world sizes below and above that work."""
    below = next(w for w in range(world, 0, -1) if aligned(size * inner, -(-size // w) * inner, multiple))
    above = next((w for w in range(world, 4 * world + 1) if -(-size // w) * inner % multiple == 0), None)
    return [below] if above is None else [below, above]


def _either(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers) or "no size near it"

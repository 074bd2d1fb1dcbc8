"""Where FSDP2 cuts the rows of a weight, and what each rank then holds and sends. Pure integers, equal on every rank.

If a cut falls inside a block, the ranks on both sides hold the block's scale, and the planes of their shards cover the
whole block. The rows of the planes that are not the shard's own are its *halo*.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import NamedTuple, Self

from layoutc.ints.sizes import cdiv


class Halo(NamedTuple):
    """Rows of a tensor's planes that are not its own, before and after its rows: the rest of the blocks that it cuts.

    tied_before, tied_after: the rest of that block lies in the tensor of which this one is a part, not on other ranks.
    """

    before: int = 0
    after: int = 0
    tied_before: bool = False
    tied_after: bool = False

    @property
    def rows(self) -> int:
        """The number of rows before and after."""
        return self.before + self.after

    @property
    def tied(self) -> bool:
        """True if writing scales of this tensor would change the values of the rest of a larger one."""
        return self.tied_before or self.tied_after


NO_HALO = Halo()


@dataclass(frozen=True)
class Cuts:
    """`rows` of a matrix over `world` ranks, `per_rank` rows each; the last ranks have fewer, or none."""

    rows: int
    per_rank: int
    world: int

    @classmethod
    def of(cls, rows: int, world: int) -> Self:
        """As FSDP2 cuts: ceil(rows / world) rows each."""
        return cls(rows, cdiv(rows, world), world)

    @property
    def last(self) -> int:
        """The last rank that has rows."""
        return cdiv(self.rows, self.per_rank) - 1

    def bounds(self, rank: int) -> tuple[int, int]:
        """First and last row (exclusive) of a rank."""
        return min(rank * self.per_rank, self.rows), min((rank + 1) * self.per_rank, self.rows)

    def aligned(self, block: int) -> bool:
        """True if no cut falls inside a block of so many rows."""
        return self.per_rank >= self.rows or self.per_rank % block == 0

    def touched(self, rank: int, block: int) -> tuple[int, int]:
        """First and last block (exclusive) of `block` rows that a rank has rows of."""
        first, last = self.bounds(rank)
        return first // block, cdiv(last, block) if last > first else first // block

    def halo(self, rank: int, block: int) -> Halo:
        """The halo of a rank: the rest of the blocks that its cuts split."""
        first, last = self.bounds(rank)
        if first == last:
            return NO_HALO
        return Halo(first % block, min(cdiv(last, block) * block, self.rows) - last)

    def inside(self, block: int) -> int:
        """How many of the cuts fall inside a block of so many rows."""
        return self.last - self.last // self._cycle(block)

    def ranks_inside(self, block: int) -> int:
        """How many ranks hold a part of a block whose other rows other ranks hold."""
        if self.aligned(block):
            return 0
        # Of two neighbouring cuts one is inside a block; only the last rank, where the rows end, may have no part.
        return self.last + (self.last * self.per_rank % block > 0)

    def _cycle(self, block: int) -> int:
        """The number of ranks after which cuts fall where they fell in a block before."""
        return block // gcd(self.per_rank, block)


@lru_cache(maxsize=4096)
def sent_blocks(cuts: Cuts, block: int) -> int:
    """The blocks of `block` rows that each rank sends: as many as the rank that touches the most."""
    if cuts.aligned(block):
        return cdiv(cuts.per_rank, block)
    ranks = [*range(min(cuts._cycle(block), cuts.last)), cuts.last]
    return max(last - first for first, last in (cuts.touched(rank, block) for rank in ranks))


@lru_cache(maxsize=4096)
def picks(cuts: Cuts, block: int) -> tuple[int, ...] | None:
    """For each block of the matrix, its index among the world * sent_blocks received ones; None: the first ones, in
    order.

    A block that several ranks send is taken from the first of them.
    """
    if cuts.aligned(block):
        return None
    sent = sent_blocks(cuts, block)
    owners = ((number, number * block // cuts.per_rank) for number in range(cdiv(cuts.rows, block)))
    return tuple(rank * sent + number - cuts.touched(rank, block)[0] for number, rank in owners)

"""Where FSDP2 cuts a weight's rows, and what each rank then holds and sends. Pure integers, equal on every rank.

If a cut falls inside a block, the ranks on both sides hold the block's scale, and their shards' planes cover the whole
block. Rows of the planes that are not the shard's own are its *halo*.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import NamedTuple, Self

from layoutc.ints.sizes import cdiv


class Halo(NamedTuple):
    """Rows of a tensor's planes before and after its own rows: the rest of the blocks that its cuts split.

    tied_before, tied_after: that rest belongs to the larger tensor of which this is a part, not to other ranks.
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
        """True if writing this tensor's scales would change other values of the larger tensor."""
        return self.tied_before or self.tied_after


NO_HALO = Halo()


@dataclass(frozen=True)
class Cuts:
    """`rows` of a matrix, split over `world` ranks with `per_rank` rows each; the last ranks have fewer, or none."""

    rows: int
    per_rank: int
    world: int

    @classmethod
    def of(cls, rows: int, world: int) -> Self:
        """FSDP2's cuts: ceil(rows / world) rows per rank."""
        return cls(rows, cdiv(rows, world), world)

    @property
    def last(self) -> int:
        """The last rank that has rows."""
        return cdiv(self.rows, self.per_rank) - 1

    def bounds(self, rank: int) -> tuple[int, int]:
        """First and last row (exclusive) of a rank."""
        return min(rank * self.per_rank, self.rows), min((rank + 1) * self.per_rank, self.rows)

    def aligned(self, block: int) -> bool:
        """True if no cut falls inside a block of `block` rows."""
        return self.per_rank >= self.rows or self.per_rank % block == 0

    def touched(self, rank: int, block: int) -> tuple[int, int]:
        """First and last block (exclusive), of `block` rows each, of which a rank has rows."""
        first, last = self.bounds(rank)
        return first // block, cdiv(last, block) if last > first else first // block

    def halo(self, rank: int, block: int) -> Halo:
        """A rank's halo: the rest of the blocks that its cuts split."""
        first, last = self.bounds(rank)
        if first == last:
            return NO_HALO
        return Halo(first % block, min(cdiv(last, block) * block, self.rows) - last)

    def inside(self, block: int) -> int:
        """How many cuts fall inside a block of `block` rows."""
        return self.last - self.last // self._cycle(block)

    def ranks_inside(self, block: int) -> int:
        """How many ranks share a block with other ranks."""
        if self.aligned(block):
            return 0
        # At least one of two adjacent cuts is inside a block. Only the last rank, where rows end, may share none.
        return self.last + (self.last * self.per_rank % block > 0)

    def _cycle(self, block: int) -> int:
        """The number of ranks after which the cuts' offsets within a block repeat."""
        return block // gcd(self.per_rank, block)


@lru_cache(maxsize=4096)
def sent_blocks(cuts: Cuts, block: int) -> int:
    """The number of blocks of `block` rows that each rank sends: that of the rank that touches the most."""
    if cuts.aligned(block):
        return cdiv(cuts.per_rank, block)
    ranks = [*range(min(cuts._cycle(block), cuts.last)), cuts.last]
    return max(last - first for first, last in (cuts.touched(rank, block) for rank in ranks))


@lru_cache(maxsize=4096)
def picks(cuts: Cuts, block: int) -> tuple[int, ...] | None:
    """The index of each block of the matrix among the world * sent_blocks received ones; None: the first, in order.

    If several ranks send a block, the first of them is used.
    """
    if cuts.aligned(block):
        return None
    sent = sent_blocks(cuts, block)
    owners = ((number, number * block // cuts.per_rank) for number in range(cdiv(cuts.rows, block)))
    return tuple(rank * sent + number - cuts.touched(rank, block)[0] for number, rank in owners)

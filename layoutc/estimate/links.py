"""Links between ranks, and the time of a collective on them: bytes divided by bandwidth, plus the latency of each hop.

A ring of w ranks moves (w-1)/w of the gathered bytes over each rank's link in w-1 steps. NCCL uses the same model:
src/graph/tuning.cc at 01afd20 has `nsteps = nRanks-1` and `nInterSteps = nNodes-1` for all-gathers and reduce-scatters,
with one latency per step within a host and another between hosts; it runs both only as rings. A tree, in libraries that
have one, sends as many bytes in ceil(log2 w) steps, ceil(log2 hosts) of them between hosts.

A ring over several hosts uses the adapters of all its cards on each: one ring per adapter carries a part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from layoutc.ints.sizes import cdiv

Rule = Literal["ring", "tree"]


@dataclass(frozen=True)
class Link:
    """A card's link.

    bandwidth: bytes per second in each direction. launch: seconds that every collective costs. hop: seconds per step.
    reduced, exchanged: the share of the bandwidth that reductions and exchanges reach. disturbed: how much concurrent
    products slow it, from 0 to 1.
    """

    name: str
    bandwidth: float
    launch: float
    hop: float
    reduced: float = 1.0
    exchanged: float = 1.0
    disturbed: float = 1.0


@dataclass(frozen=True)
class Ring:
    """The ranks of a collective. near: how many of them share a host."""

    ranks: int
    near: int

    @property
    def crosses(self) -> bool:
        """Whether the ring spans hosts."""
        return self.near < self.ranks


@dataclass(frozen=True)
class Links:
    """A card's links. within: to cards on the same host. across: to other hosts, by its adapter or its share of one."""

    within: Link
    across: Link
    per_host: int = 8
    rule: Rule = "ring"

    def bandwidth(self, ring: Ring) -> float:
        """Bytes per second that a rank receives in a ring."""
        if not ring.crosses:
            return self.within.bandwidth
        far = ring.near * self.across.bandwidth
        return min(far, self.within.bandwidth) if ring.near > 1 else far

    def latency(self, ring: Ring) -> float:
        """Seconds of a collective of 0 bytes."""
        if ring.ranks == 1:
            return 0.0
        hosts, launch = cdiv(ring.ranks, ring.near), (self.across if ring.crosses else self.within).launch
        steps, far = (ring.ranks - 1, hosts - 1)
        if self.rule == "tree":
            steps, far = steps.bit_length(), far.bit_length()
        return launch + far * self.across.hop + (steps - far) * self.within.hop

    def gather(self, bytes_per_rank: int, ring: Ring) -> float:
        """Seconds of an all-gather to which each rank contributes `bytes_per_rank`."""
        return self.latency(ring) + bytes_per_rank * (ring.ranks - 1) / self.bandwidth(ring)

    def reduce_scatter(self, bytes_per_rank: int, ring: Ring) -> float:
        """Seconds of a reduce-scatter whose output on each rank has `bytes_per_rank`."""
        reduced = self.bandwidth(ring) * (self.across if ring.crosses else self.within).reduced
        return self.latency(ring) + bytes_per_rank * (ring.ranks - 1) / reduced

    def all_reduce(self, nbytes: int, ring: Ring) -> float:
        """Seconds of an all-reduce of `nbytes`: a reduce-scatter, then an all-gather."""
        part = cdiv(nbytes, ring.ranks)
        return self.reduce_scatter(part, ring) + self.gather(part, ring) if ring.ranks > 1 else 0.0

    def exchange(self, bytes_for_each: int, ring: Ring) -> float:
        """Seconds of an all-to-all in which each rank sends `bytes_for_each` to each other rank, in w-1 rounds.

        Nothing is summed on the way: bytes for other hosts leave by the card's own adapter. With three or more ranks
        per host, these are more than a ring's sums at twice the bytes per element.
        """
        if ring.ranks == 1:
            return 0.0
        near = bytes_for_each * (ring.near - 1) / (self.within.bandwidth * self.within.exchanged)
        far = bytes_for_each * (ring.ranks - ring.near) / (self.across.bandwidth * self.across.exchanged)
        steps = Links(self.within, self.across, self.per_host).latency(ring)
        return steps + max(near, far)

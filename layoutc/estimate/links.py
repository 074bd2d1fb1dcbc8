"""Links between ranks, and what a collective takes on them: bytes over the bandwidth, and latencies of its hops.

A ring of w ranks moves (w-1)/w of the gathered bytes over each rank's link in w-1 steps. NCCL computes with the same:
src/graph/tuning.cc at 01afd20 takes `nsteps = nRanks-1` and `nInterSteps = nNodes-1` for all-gathers and
reduce-scatters, and one latency for each step within a host and another between hosts; it runs both as rings alone. A
tree, for libraries that have one, sends as many bytes in ceil(log2 w) steps, ceil(log2 hosts) of them between hosts.

A ring over several hosts enters and leaves each by the adapters of all its cards there: NCCL has as many rings as there
are adapters, each of which carries its part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from layoutc.ints.sizes import cdiv

Rule = Literal["ring", "tree"]


@dataclass(frozen=True)
class Link:
    """What a card's link carries.

    bandwidth: bytes a second in each direction. launch: seconds that any collective takes. hop: seconds of a step.
    reduced, exchanged: the share of the bandwidth that reductions and exchanges reach. disturbed: how much products
    beside it slow it.
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
    """The ranks of a collective. near: those that lie in one host."""

    ranks: int
    near: int

    @property
    def crosses(self) -> bool:
        """Whether it has ranks of several hosts."""
        return self.near < self.ranks


@dataclass(frozen=True)
class Links:
    """within: to the cards of the same host. across: what each card has to other hosts; its adapter, or its part of
    the host's."""

    within: Link
    across: Link
    per_host: int = 8
    rule: Rule = "ring"

    def bandwidth(self, ring: Ring) -> float:
        """Bytes a second that a rank receives in a ring."""
        if not ring.crosses:
            return self.within.bandwidth
        far = ring.near * self.across.bandwidth
        return min(far, self.within.bandwidth) if ring.near > 1 else far

    def latency(self, ring: Ring) -> float:
        """Seconds of a collective without bytes."""
        if ring.ranks == 1:
            return 0.0
        hosts, launch = cdiv(ring.ranks, ring.near), (self.across if ring.crosses else self.within).launch
        steps, far = (ring.ranks - 1, hosts - 1)
        if self.rule == "tree":
            steps, far = steps.bit_length(), far.bit_length()
        return launch + far * self.across.hop + (steps - far) * self.within.hop

    def gather(self, bytes_per_rank: int, ring: Ring) -> float:
        """Seconds of an all-gather to which each rank contributes so many bytes: it receives those of the others."""
        return self.latency(ring) + bytes_per_rank * (ring.ranks - 1) / self.bandwidth(ring)

    def reduce_scatter(self, bytes_per_rank: int, ring: Ring) -> float:
        """Seconds of a reduce-scatter that leaves so many bytes on each rank."""
        reduced = self.bandwidth(ring) * (self.across if ring.crosses else self.within).reduced
        return self.latency(ring) + bytes_per_rank * (ring.ranks - 1) / reduced

    def all_reduce(self, nbytes: int, ring: Ring) -> float:
        """Seconds in which ranks add up so many bytes of each: a reduce-scatter and a gather of their parts."""
        part = cdiv(nbytes, ring.ranks)
        return self.reduce_scatter(part, ring) + self.gather(part, ring) if ring.ranks > 1 else 0.0

    def exchange(self, bytes_for_each: int, ring: Ring) -> float:
        """Seconds of an all-to-all in which each rank sends so many bytes to each other one, in w-1 rounds.

        Nothing is added up on the way: what is for other hosts leaves by the card's own adapter, which from three ranks
        of a host on is more than a ring's sums in twice as many bytes.
        """
        if ring.ranks == 1:
            return 0.0
        near = bytes_for_each * (ring.near - 1) / (self.within.bandwidth * self.within.exchanged)
        far = bytes_for_each * (ring.ranks - ring.near) / (self.across.bandwidth * self.across.exchanged)
        steps = Links(self.within, self.across, self.per_host).latency(ring)
        return steps + max(near, far)

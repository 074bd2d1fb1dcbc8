"""Links between ranks, and what a collective takes on one: bytes over the bandwidth, and latencies of its hops.

A ring of w ranks moves (w-1)/w of the gathered bytes over each rank's link in w-1 steps. NCCL computes with the same:
src/graph/tuning.cc at 01afd20 takes `nsteps = nRanks-1` and `nInterSteps = nNodes-1` for all-gathers and
reduce-scatters, and one latency for each step within a host and another between hosts; it runs both as rings alone. A
tree, for libraries that have one, sends as many bytes in ceil(log2 w) steps, ceil(log2 hosts) of them between hosts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from layoutc.ints.sizes import cdiv

Rule = Literal["ring", "tree"]


@dataclass(frozen=True)
class Link:
    """What a rank's link carries.

    bandwidth: bytes a second in each direction. launch: seconds that any collective takes. hop, far_hop: seconds of a
    step within a host, and between hosts of `per_host` ranks each. reduced: the share of the bandwidth that
    reduce-scatters reach.
    """

    name: str
    bandwidth: float
    launch: float
    hop: float
    far_hop: float
    per_host: int = 8
    reduced: float = 1.0
    exchanged: float = 1.0
    disturbed: float = 1.0
    rule: Rule = "ring"

    def latency(self, world: int) -> float:
        """Seconds of a collective without bytes."""
        if world == 1:
            return 0.0
        hosts = cdiv(world, self.per_host)
        if self.rule == "tree":
            far = (hosts - 1).bit_length()
            return self.launch + far * self.far_hop + ((world - 1).bit_length() - far) * self.hop
        return self.launch + (world - hosts) * self.hop + (hosts - 1) * self.far_hop

    def gather(self, bytes_per_rank: int, world: int) -> float:
        """Seconds of an all-gather to which each rank contributes so many bytes: it receives those of the others."""
        return 0.0 if world == 1 else self.latency(world) + bytes_per_rank * (world - 1) / self.bandwidth

    def reduce_scatter(self, bytes_per_rank: int, world: int) -> float:
        """Seconds of a reduce-scatter that leaves so many bytes on each rank."""
        if world == 1:
            return 0.0
        return self.latency(world) + bytes_per_rank * (world - 1) / (self.bandwidth * self.reduced)

    def exchange(self, bytes_for_each: int, world: int) -> float:
        """Seconds of an all-to-all in which each rank sends so many bytes to each other one, in w-1 rounds.

        Nothing is added up on the way. All that a host sends to others goes through
        what a ring has between them: from three ranks of a host on, more than a ring's sums in twice as many bytes.
        """
        if world == 1:
            return 0.0
        away = self.per_host * (world - self.per_host)  # parts that a host's ranks send to other hosts
        return replace(self, rule="ring").latency(world) + bytes_for_each * max(world - 1, away) / (
            self.bandwidth * self.exchanged
        )

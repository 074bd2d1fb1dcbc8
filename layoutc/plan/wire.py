"""The bytes that each rank sends in a pass's all-gather, for a weight of any size over any number of ranks."""

from __future__ import annotations

from itertools import zip_longest

from layoutc.ints.cuts import Cuts, sent_blocks
from layoutc.layout.layout import Plane
from layoutc.plan.plan import Gather, Plan


def sent_bytes(plane: Plane, m: int, k: int, world: int) -> int:
    """The bytes of a plane that a rank sends."""
    rows = plane.per_m or 1
    return plane.nbytes(sent_blocks(Cuts.of(m, world), rows) * rows, k)


def own_bytes(gather: Gather, m: int, k: int, world: int) -> int:
    """The bytes that a rank sends of a pass's planes."""
    return sum(sent_bytes(plane, m, k, world) for plane in gather.planes)


def bytes_per_rank(plan: Plan, gather: Gather, m: int, k: int, world: int) -> int:
    """The same, with the padding that makes both passes send as many: FSDP2 sizes a slot once, for the larger one."""
    passes = (plan.forward, plan.backward)
    cut = not Cuts.of(m, world).aligned(plan.block_rows)
    if gather in passes and (plan.slots_differ or (plan.passes_differ and cut)):
        slots = ([sent_bytes(plane, m, k, world) for plane in one.planes] for one in passes)
        return sum(map(max, zip_longest(*slots, fillvalue=0)))
    return own_bytes(gather, m, k, world)

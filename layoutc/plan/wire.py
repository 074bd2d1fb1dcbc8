"""Bytes that each rank sends in a pass's all-gather, for any weight and number of ranks."""

from __future__ import annotations

from layoutc.ints import gathers
from layoutc.ints.cuts import Cuts, sent_blocks
from layoutc.layout.layout import Plane
from layoutc.plan.plan import Gather, Plan


def sent_bytes(plane: Plane, cuts: Cuts, k: int) -> int:
    """Bytes that a rank sends of a plane of a matrix with k columns."""
    rows = plane.per_m or 1
    return plane.nbytes(sent_blocks(cuts, rows) * rows, k)


def own_bytes(gather: Gather, cuts: Cuts, k: int) -> int:
    """Bytes that a rank sends of a pass's planes, without padding."""
    return sum(sent_bytes(plane, cuts, k) for plane in gather.planes)


def slots(plan: Plan, gather: Gather, cuts: Cuts, k: int) -> tuple[int, ...]:
    """Bytes of each plane of a pass, padded so that both passes send equally many."""
    passes = (plan.forward, plan.backward)
    if gather in passes and (plan.slots_differ or (plan.passes_differ and not cuts.aligned(plan.block_rows))):
        forward, backward = ([sent_bytes(plane, cuts, k) for plane in one.planes] for one in passes)
        return gathers.slots(forward, backward)
    return tuple(sent_bytes(plane, cuts, k) for plane in gather.planes)


def packs(gather: Gather, cuts: Cuts, k: int) -> bool:
    """Whether a weight can be dequantized directly from the gather's output."""
    return gathers.fits_pack([(plane.per_m or 1, sent_bytes(plane, cuts, k)) for plane in gather.planes], cuts)


def bytes_per_rank(plan: Plan, gather: Gather, m: int, k: int, world: int) -> int:
    """Bytes that each rank sends of an (m, k) weight that FSDP2 shards on its rows, padding included."""
    return sum(slots(plan, gather, Cuts.of(m, world), k))

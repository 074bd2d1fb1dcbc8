"""The bytes of one weight: a rank's shards, a gather's buffers, gradients. Pure integers.

They model the allocations of FSDP2 in torch 2.11 to 2.14 (FSDPParam, FSDPParamGroup), and the runtime's for the planes
of a quantized shard; tests/distributed/test_planned_bytes.py checks both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd, lcm
from operator import add

from layoutc.budget.mesh import Placed
from layoutc.estimate.state import ADAMW, State
from layoutc.ints.cuts import picks
from layoutc.layout.layout import Plane
from layoutc.plan.plan import Gather, Plan
from layoutc.plan.wire import own_bytes, packs, sent_bytes, slots

FP32 = 4
HANDLE, INDEX = 1, 8


@dataclass(frozen=True)
class Dtypes:
    """Bytes per element: stored (parameters as the model is built, and final gradients), gathered (FSDP2's param_dtype)
    and reduced (reduce_dtype). state: the optimizer's."""

    stored: int = 4
    gathered: int = 2
    reduced: int = 4
    state: State = ADAMW


@dataclass(frozen=True)
class Piece:
    """A weight under FSDP2. plan: its recipe's; None for a plain one. cast: it is quantized at each gather. stays: it
    is gathered once per step and kept until backward is done. on_gather: its gathers leave values. packed: all planes
    of its group can be dequantized from the gather's output."""

    placed: Placed
    plan: Plan | None = field(default=None, hash=False)  # hashing its thousands of parts is slow
    cast: bool = False
    trains: bool = True
    stays: bool = False
    on_gather: bool = False
    packed: bool = False

    @property
    def is_codes(self) -> bool:
        """True if shards are stored as codes."""
        return self.plan is not None and not self.cast

    @property
    def packs(self) -> bool:
        """True if it can be dequantized from the gather's output; see `layoutc.plan.wire.packs`."""
        placed, plan = self.placed, self.plan
        if plan is None or not self.on_gather or placed.ranks == 1 or placed.dim:
            return False
        return packs(plan.forward, placed.cuts, placed.matrix[1])


@dataclass(frozen=True)
class Resident:
    """Bytes that a rank holds of one or more weights: between steps, and gradients until the optimizer has stepped.

    left: what gathers leave behind: scales of gathered weights, amaxes, and indices of blocks that cuts split.
    """

    weights: int = 0
    masters: int = 0
    moments: int = 0
    gradients: int = 0
    left: int = 0

    def __add__(self, other: Resident) -> Resident:
        return Resident(*map(add, self.sizes, other.sizes))

    def times(self, count: int) -> Resident:
        """The bytes of `count` equal weights."""
        return Resident(*(count * size for size in self.sizes))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The fields, in order."""
        return self.weights, self.masters, self.moments, self.gradients, self.left

    @property
    def kept(self) -> int:
        """The sum without gradients."""
        return sum(self.sizes) - self.gradients

    @property
    def total(self) -> int:
        """The sum of all fields."""
        return sum(self.sizes)


@lru_cache(maxsize=65536)
def resident(piece: Piece, rank: int, dtypes: Dtypes) -> Resident:
    """What a rank of the weight's group holds. The gradient has the shard's padding."""
    rows = _own(piece.placed, rank)
    weights = _planes(piece.plan, piece.placed, 0 if piece.placed.dim else rank) if piece.plan and piece.is_codes else 0
    if not piece.is_codes:
        weights = piece.placed.shard * dtypes.stored
    left = _left(piece)
    if not piece.trains:
        return Resident(weights, left=left)
    whole, columns = piece.placed.whole, piece.placed.columns
    master = dtypes.state.master(whole, columns)
    has_master = piece.is_codes or (dtypes.stored != FP32 and master.bits != 8 * dtypes.stored)
    return Resident(
        weights,
        master.nbytes(rows) if has_master else 0,
        dtypes.state.moment_bytes(rows, whole, columns) + dtypes.state.counter,
        piece.placed.shard * dtypes.stored,
        left,
    )


def _own(placed: Placed, rank: int) -> int:
    """Elements of a rank's shard, without padding."""
    size, per = placed.shape[placed.dim], placed.per_rank
    return max(0, min(size - rank * per, per)) * (placed.shard // per)


def _planes(plan: Plan, placed: Placed, rank: int) -> int:
    """Bytes of a rank's planes of all orientations, halo rows included. rank: 0 for shards on a dim other than the
    first, which have equal lengths."""
    cuts, k = placed.cuts, placed.matrix[1]
    first, last = cuts.bounds(rank)
    halo = cuts.halo(rank, plan.block_rows).rows
    rows = last - first + halo if halo else cuts.per_rank  # without a halo, FSDP2's padding applies
    return sum(
        _shared(plan, plane, k) if plane.per_m is None else plane.nbytes(rows, k) for plane in plan.layout.planes
    )


def _shared(plan: Plan, plane: Plane, k: int) -> int:
    """Bytes of a plane that is the same on all shards."""
    if plan.layout.history and not any(plane in source.planes for source in plan.layout.sources):
        return plan.layout.history * plane.itemsize
    return plane.nbytes(1, k)


def _left(piece: Piece) -> int:
    """Bytes that a weight's gathers leave: shared planes that are not the shard's, the amax that a cast with a history
    remembers, the planes that a cast in a group of one rank makes after the first, which FSDP2 frees, and the handle's
    byte of a weight whose passes gather different planes."""
    plan = piece.plan
    if plan is None:
        return 0
    if piece.on_gather:
        return _left_beside_values(piece, plan) if piece.cast else 0
    left = HANDLE if plan.passes_differ and not piece.stays else 0
    if piece.cast or piece.stays:
        left += sum(_shared(plan, plane, piece.placed.matrix[1]) for plane in plan.shared)
    if piece.cast and piece.placed.ranks == 1:  # FSDP2 frees only the first plane
        gather = plan.both if piece.stays else plan.backward
        left += sum(slots(plan, gather, piece.placed.cuts, piece.placed.matrix[1])[1:])
    if piece.cast and plan.layout.history:
        left += FP32 + (plan.layout.history * FP32 if piece.stays else 0)
    return left


def _left_beside_values(piece: Piece, plan: Plan) -> int:
    """Like `_left`, for a weight that is cast and dequantized on gather: the shared planes that dequantizing reads stay
    until the next gather, and with a history, the amax that the cast remembers."""
    history = plan.layout.history
    if history and not piece.packed:
        return FP32 + FP32 * history
    shared = sum(_shared(plan, plane, piece.placed.matrix[1]) for plane in plan.shared)
    return shared + (FP32 if history else 0)


def indices(pieces: Iterable[Piece]) -> int:
    """Bytes of the block indices that join planes of weights whose cuts split blocks; equal index lists are shared."""
    ways: set[tuple[int, ...] | None] = set()
    for piece in pieces:
        plan, cuts = piece.plan, piece.placed.cuts
        if plan is None or piece.placed.ranks == 1:
            continue
        passes = (plan.both,) if piece.stays else (plan.forward, plan.backward)
        for gather in (plan.forward,) if piece.on_gather else passes:
            ways |= {picks(cuts, plane.per_m or 1) for plane in gather.planes}
    return INDEX * sum(len(way) for way in ways if way is not None)


@dataclass(frozen=True)
class Gathered:
    """One gather of a weight, in bytes. sent: by each rank. held: afterwards. arrived: received codes that are freed
    once dequantized, if the gather leaves values."""

    sent: int
    held: int
    arrived: int = 0


@lru_cache(maxsize=16384)
def gathered(piece: Piece, which: str, dtypes: Dtypes) -> Gathered:
    """A gather in a pass: forward, backward, or both for a weight that stays gathered after forward."""
    placed, plan = piece.placed, piece.plan
    if plan is None:
        return Gathered(placed.shard * dtypes.gathered, placed.ranks * placed.shard * dtypes.gathered)
    if piece.on_gather:
        return _gathered_values(placed, plan.forward, dtypes)  # the same in both passes
    gather: Gather = getattr(plan, which)
    own = slots(plan, gather, placed.cuts, placed.matrix[1])
    # With one rank, FSDP2 copies only the first plane; the other ones are the shard's.
    sent, joined = (own[0], 0) if placed.ranks == 1 else (sum(own), sum(dict(_joined(plan, placed, which)).values()))
    return Gathered(sent, placed.ranks * sent + joined)


def _gathered_values(placed: Placed, gather: Gather, dtypes: Dtypes) -> Gathered:
    cuts, (m, k) = placed.cuts, placed.matrix
    values = m * k * dtypes.gathered
    if placed.ranks == 1:
        first = sent_bytes(gather.planes[0], cuts, k)
        return Gathered(first, values, first)
    cut = [plane.nbytes(m, k) for plane in gather.planes if placed.dim or not cuts.aligned(plane.per_m or 1)]
    sent = own_bytes(gather, cuts, k)
    return Gathered(sent, values + sum(cut), placed.ranks * sent)


def _joined(plan: Plan, placed: Placed, which: str) -> Iterator[tuple[str, int]]:
    """(name, bytes) of planes that are joined by a copy after a gather, for all passes that gather the weight. FSDP2
    allocates and frees them with its outputs."""
    cuts, (m, k) = placed.cuts, placed.matrix
    for gather in (plan.both,) if which == "both" else (plan.forward, plan.backward):
        for plane, slot in zip(gather.planes, slots(plan, gather, cuts, k), strict=False):
            sent = sent_bytes(plane, cuts, k)
            if placed.dim or not cuts.aligned(plane.per_m or 1):
                yield plane.name, plane.nbytes(m, k)
            elif slot != sent:
                yield plane.name, placed.ranks * sent


def period(piece: Piece) -> int:
    """After how many ranks shard sizes repeat, because cuts fall at the same offsets within blocks."""
    if not piece.is_codes or piece.plan is None or piece.placed.dim:
        return 1
    cuts, block = piece.placed.cuts, piece.plan.block_rows
    return 1 if cuts.aligned(block) else block // gcd(cuts.per_rank, block)


def largest(pieces: tuple[Piece, ...], dtypes: Dtypes) -> Resident:
    """The bytes of the rank that holds the most of some weights, which are all sharded over equally many ranks.

    Only the first ranks count: since last shards are shorter, rank r has no more than rank r modulo the period.
    """
    counts: dict[Piece, int] = {}
    for piece in pieces:
        counts[piece] = counts.get(piece, 0) + 1
    ranks = min(max((piece.placed.ranks for piece in counts), default=1), lcm(*(map(period, counts))))
    found = Resident()
    for rank in range(ranks):
        at = Resident()
        for piece, count in counts.items():
            at += resident(piece, rank, dtypes).times(count)
        found = max(found, at, key=lambda held: held.total)
    return found

"""The budget of a model in a recipe on a mesh: everything that `layoutc plan` reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from layoutc.budget.activations import POLICIES, Policy, activations, again
from layoutc.budget.choice import Picks
from layoutc.budget.groups import Group, Groups, Member, groups_of, work_of
from layoutc.budget.mesh import Mesh
from layoutc.budget.peaks import Peaks, peaks
from layoutc.budget.shards import Dtypes, Piece, Resident, gathered, indices, largest, resident
from layoutc.estimate.links import Links
from layoutc.estimate.machine import Machine
from layoutc.estimate.work import Load, Parts, Runs, Use, Work, is_low, step
from layoutc.ints.nearest import nearest_rows, nearest_worlds
from layoutc.ints.sizes import cdiv
from layoutc.models.weights import Model

EXCHANGED = 4  # bytes of an fp32 value that ranks exchange about split blocks


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in a step. forward, backward: into gathers. reduced: its part of reduce-scatters'
    outputs, or what a gradient exchange sends to one rank. replicated: into all-reduces among replicas, or codes for
    one replica. exchanged: about amaxes and split blocks, in the optimizer's step."""

    forward: int
    backward: int
    reduced: int
    replicated: int
    exchanged: int


@dataclass(frozen=True)
class CutWeight:
    """Weights whose shards split blocks: how many cuts fall inside a block, and nearby sizes that avoid it."""

    name: str
    count: int
    rows: int
    ranks: int
    block: int
    inside: int
    free_rows: tuple[int, ...]
    free_worlds: tuple[int, ...]


@dataclass(frozen=True)
class WeightLine:
    """Identical weights over all layers. Bytes are those of one weight: resident on the rank with the most, and sent by
    each rank in each pass. plain: why it is not quantized; "". tied: names of the same parameter elsewhere."""

    name: str
    count: int
    shape: tuple[int, ...]
    kind: str
    plain: str
    tied: tuple[str, ...]
    ranks: int
    resident: int
    forward: int
    backward: int


@dataclass(frozen=True)
class Budget:
    """A recipe on a mesh. quantized, plain: elements of whole weights. padding: bytes of shards' padding. exchange:
    some group's gradients are exchanged. on_gather: some weight's gathers leave values. low: products run in low
    precision. policy: which layers backward recomputes. room: bytes available on a card. tokens: per rank and
    second."""

    recipe: str
    how: str
    exchange: bool
    on_gather: bool
    mesh: Mesh
    quantized: int
    plain: int
    resident: Resident
    padding: int
    peaks: Peaks
    traffic: Traffic
    cuts: tuple[CutWeight, ...]
    step: Parts
    weights: tuple[WeightLine, ...]
    low: bool
    policy: Policy
    room: int
    tokens: float

    @property
    def memory(self) -> int:
        """Peak bytes of the largest rank in a step."""
        return self.resident.kept + max(self.peaks.whole, self.resident.gradients)


@dataclass(frozen=True)
class Setting:
    """What all budgets of one plan share. runs: how steps run. together: how many steps run back to back. policy:
    which layers backward recomputes; None: the fewest that fit."""

    picks: Picks
    dtypes: Dtypes
    load: Load
    links: Links
    machine: Machine
    runs: Runs = "compiled"
    together: int = 1
    policy: Policy | None = None

    def on(self, machine: Machine) -> Setting:
        """A copy for another machine."""
        return replace(self, machine=machine)


def budget(model: Model, use: Use, mesh: Mesh, at: Setting) -> Budget:
    """Raises ValueError for an impossible mesh or use; see `Mesh.problem`, `Use.problem`."""
    if problem := mesh.problem() or use.problem:
        raise ValueError(problem)
    groups = groups_of(model, use, at.picks, mesh, at.dtypes)
    by_ranks: dict[int, list[Piece]] = {}
    for piece in groups.pieces:
        by_ranks.setdefault(piece.placed.ranks, []).append(piece)
    held = Resident()
    for pieces in by_ranks.values():
        held += largest(tuple(pieces), at.dtypes)
    held += Resident(left=indices(groups.pieces) + sum(group.kept_gradients for group in groups.every))
    policies = POLICIES if at.policy is None else (at.policy,)
    for policy in policies:
        most = peaks(groups, activations(model, mesh, at.load, at.runs, policy))
        if held.kept + max(most.whole, held.gradients) <= at.machine.room:
            break
    works = works_of(model, groups, mesh, at.links.per_host, policy)
    parts = step(use, works[1:], works[0], at.load, at.links, at.machine, at.runs, at.together)
    alike = _alike(model, groups)
    members = [member for group in groups.every for member in group.members]
    taken = sum(member.weight.elements for member in members if member.piece.plan is not None)
    return Budget(
        recipe=use.name,
        how="plain" if use.plan is None else "cast on gather" if use.cast else "quantized",
        exchange=any(group.exchanges for group in groups.every),
        on_gather=any(piece.on_gather for piece in groups.pieces),
        mesh=mesh,
        quantized=taken,
        plain=model.elements - taken,
        resident=held,
        padding=_padding(groups.pieces, mesh, at.dtypes),
        peaks=most,
        traffic=_traffic(groups),
        cuts=tuple(_cuts(alike)),
        step=parts,
        weights=tuple(_lines(alike, at.dtypes)),
        low=is_low(use, at.machine),
        policy=policy,
        room=at.machine.room,
        tokens=at.load.tokens / parts.total,
    )


def estimated(model: Model, use: Use, mesh: Mesh, at: Setting) -> Parts:
    """The time estimate of a step, without its memory."""
    root, *works = works_of(model, groups_of(model, use, at.picks, mesh, at.dtypes), mesh, at.links.per_host)
    return step(use, works, root, at.load, at.links, at.machine, at.runs, at.together)  # nothing is recomputed


def works_of(model: Model, groups: Groups, mesh: Mesh, per_host: int, policy: Policy = "none") -> list[Work]:
    """What each layer does in a step, the root first."""
    made: dict[object, Work] = {}
    found = []
    twice = [False, *again(len(model.layers), policy)]
    for layer, own, recomputed in zip(model.all_layers, (groups.root, *groups.layers), twice, strict=True):
        key = id(own), layer.attention, layer.width, recomputed
        if key not in made:
            made[key] = replace(work_of(layer, own, mesh, per_host), again=recomputed)
        found.append(made[key])
    return found


def _padding(pieces: list[Piece], mesh: Mesh, dtypes: Dtypes) -> int:
    """Bytes of plain shards' padding over all ranks: FSDP2 pads all shards to the longest."""
    plain = (piece.placed for piece in pieces if not piece.is_codes)
    return sum((one.shard * one.ranks - prod(one.shape)) * dtypes.stored * (mesh.world // one.ranks) for one in plain)


def _traffic(groups: Groups) -> Traffic:
    several = [group for group in groups.every if group.ranks > 1]
    return Traffic(
        forward=sum(group.gather("forward").sent for group in several),
        backward=sum(group.gather("backward").sent for group in several),
        reduced=sum(group.sent_gradients for group in several),
        replicated=sum(group.replicated for group in groups.every),
        exchanged=sum(_exchanged(piece) for piece in groups.pieces),
    )


def _exchanged(piece: Piece) -> int:
    """Bytes that a rank exchanges per step: amaxes over shards and over TP or EP parts, and for split blocks at both
    ends of a shard, each column's minimum and maximum, or all values. A weight that is cast exchanges them at each
    gather."""
    plan, k, placed = piece.plan, piece.placed.matrix[1], piece.placed
    if plan is None:
        return 0
    values = 0
    if plan.shares_amax:
        values += cdiv(k, plan.amax_columns) if plan.amax_columns else 1
        values += 1 if piece.cast and plan.layout.history else 0  # whether any rank has new values
        values *= (placed.ranks > 1) + (placed.parts > 1)  # one all-reduce per mesh dim
    if placed.ranks > 1 and not placed.cuts.aligned(plan.block_rows):
        values += 2 * (2 if plan.extremes else plan.block_rows) * k
    times = (1 if piece.stays else 2) if piece.cast else int(piece.trains)
    return values * times * EXCHANGED


def _alike(model: Model, groups: Groups) -> list[tuple[str, int, Member]]:
    """(name with layer numbers as *, count, member) of identical weights."""
    found: dict[tuple[str, Member], int] = {}
    same: dict[tuple[str, tuple[Group, ...]], int] = {}
    for layer, own in zip(model.all_layers, (groups.root, *groups.layers), strict=True):
        stem, _, number = layer.name.rpartition(".")
        key = f"{stem}.*." if number.isdigit() else "", own
        same[key] = same.get(key, 0) + 1
    for (prefix, own), count in same.items():
        for member in (member for group in own for member in group.members):
            name = prefix + member.weight.name, member
            found[name] = found.get(name, 0) + count
    return [(name, count, member) for (name, member), count in found.items()]


def _cuts(alike: list[tuple[str, int, Member]]) -> Iterator[CutWeight]:
    for name, count, member in alike:
        plan, placed = member.piece.plan, member.piece.placed
        if plan is None or placed.dim or placed.cuts.aligned(plan.block_rows):
            continue
        m, ranks, rows, inside = placed.matrix[0], placed.ranks, plan.shard_rows, placed.cuts.inside(plan.block_rows)
        free: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
        if len(placed.shape) == 2:
            free = nearest_rows(m, ranks, rows, plan.layout.multiple_m), nearest_worlds(m, ranks, rows)
        yield CutWeight(name, count, m, ranks, plan.block_rows, inside, *free)


def _lines(alike: list[tuple[str, int, Member]], dtypes: Dtypes) -> Iterator[WeightLine]:
    for name, count, member in alike:
        of = ("both", "") if member.piece.stays else ("forward", "backward")
        piece, weight = member.piece, member.weight
        sizes = (gathered(piece, which, dtypes).sent if which and piece.placed.ranks > 1 else 0 for which in of)
        plain = member.why_plain if piece.plan is None else ""
        held = resident(piece, 0, dtypes).total
        yield WeightLine(name, count, weight.shape, weight.kind, plain, weight.tied, piece.placed.ranks, held, *sizes)

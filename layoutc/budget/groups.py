"""A model's FSDP groups in a recipe: which weights are gathered together, over how many ranks, and what that moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod

from layoutc.budget.choice import Picks, why_plain
from layoutc.budget.mesh import Mesh, place
from layoutc.budget.shards import FP32, Dtypes, Gathered, Piece, gathered
from layoutc.estimate.state import Wire
from layoutc.estimate.work import Product, Sent, Use, Work
from layoutc.ints.gathers import in_few_steps, reduces_in_few_steps
from layoutc.models.weights import Layer, Model, Weight
from layoutc.plan.plan import Plan


@dataclass(frozen=True)
class Member:
    """A weight in a group. why_plain: "" if it is quantized."""

    weight: Weight
    piece: Piece
    why_plain: str


@dataclass(frozen=True)
class Group:
    """Weights that FSDP2 gathers in one collective. stays: gathered in forward and kept until backward is done, like
    FSDP2's root. exchange: how gradients are exchanged if their reduction dtype is wider. replicas: copies of the
    weights (HSDP), each sharded over `ranks`. among: how replicas exchange their sums."""

    members: tuple[Member, ...]
    ranks: int
    stays: bool
    dtypes: Dtypes
    exchange: Wire | None = None
    replicas: int = 1
    among: Wire | None = None

    def gather(self, which: str) -> Gathered:
        """Bytes of the gather in forward or backward. A group that stays gathered sends nothing in backward."""
        if self.stays and which == "backward":
            return Gathered(0, self.gather("forward").held)
        return self._gathers["both" if self.stays else which]

    @cached_property
    def _gathers(self) -> dict[str, Gathered]:
        found = {}
        for which in ("both",) if self.stays else ("forward", "backward"):
            each = [gathered(member.piece, which, self.dtypes) for member in self.members]
            if self.at_once:
                each = [replace(one, arrived=0) for one in each]
            sizes = zip(*((one.sent, one.held, one.arrived) for one in each), strict=True)
            found[which] = Gathered(*map(sum, sizes))
        return found

    @cached_property
    def at_once(self) -> int:
        """Bytes of planes that kernels dequantize from the gather's output, without a copy, after the first gather. 0
        unless all weights are sharded on dim 0 and kernels can address every plane in a rank's row."""
        pieces = [one.piece for one in self.members]
        if any(one.placed.dim or (one.plan is not None and not one.packs) for one in pieces):
            return 0
        sizes = [gathered(one, "forward", self.dtypes).sent for one in pieces]
        starts = accumulate(sizes, initial=0)
        found = [(start, size) for start, size, one in zip(starts, sizes, pieces, strict=False) if one.packs]
        return sum(size for _, size in found) if in_few_steps([start for start, _ in found], sum(sizes)) else 0

    @cached_property
    def reduces_in_few_steps(self) -> bool:
        """Whether gradients are reduced without FSDP2's loops: the group has quantized weights, all its weights are
        trained and sharded on dim 0, and there are only shards to reduce over."""
        pieces = [one.piece for one in self.members]
        if self.ranks == 1 or all(one.plan is None for one in pieces) or not all(one.trains for one in pieces):
            return False
        return reduces_in_few_steps(self.replicas, [(one.placed.dim, one.placed.parts) for one in pieces])

    @cached_property
    def trained(self) -> tuple[Piece, ...]:
        """The weights that have gradients."""
        return tuple(member.piece for member in self.members if member.piece.trains)

    @cached_property
    def trained_elements(self) -> int:
        """Elements of a rank's shards of trained weights."""
        return sum(piece.placed.shard for piece in self.trained)

    @cached_property
    def gradients(self) -> int:
        """Bytes of whole gradients, before the reduction."""
        return sum(piece.placed.matrix[0] * piece.placed.matrix[1] for piece in self.trained) * self.dtypes.gathered

    @cached_property
    def reduced(self) -> int:
        """Bytes of a reduce-scatter's output on a rank; its input has `ranks` times as many."""
        return self.trained_elements * self.dtypes.reduced

    @property
    def exchanges(self) -> bool:
        """Whether `layoutc.exchange_gradients` acts on this group."""
        wire = self.exchange
        return wire is not None and self.ranks > 1 and (wire.codes or self.dtypes.gathered < self.dtypes.reduced)

    @property
    def sent_gradients(self) -> int:
        """Bytes of gradients on the wire per destination rank: a reduce-scatter's output, or what an exchange sends to
        each rank. The total is `ranks` times as much."""
        if self.exchange is None or not self.exchanges:
            return self.reduced
        return self.exchange.sent.nbytes(self.trained_elements)

    @property
    def sent_among(self) -> tuple[int, int] | None:
        """Bytes of (codes, sums) that a rank sends to each other replica; None: FSDP2 all-reduces `reduced`."""
        if self.among is None or self.replicas == 1 or not self.trained:
            return None
        return self.among.among(self.trained_elements, self.replicas, self.dtypes.reduced)

    @property
    def replicated(self) -> int:
        """Bytes that a rank puts into all-reduces among replicas, or sends to each other replica."""
        return 0 if self.replicas == 1 else self.reduced if self.sent_among is None else sum(self.sent_among)

    @property
    def kept_gradients(self) -> int:
        """Bytes of whole gradients and of sums that exchanges keep across steps (error feedback)."""
        kept = self.exchange.kept if self.exchange and self.exchanges else None
        whole = sum(kept.nbytes(prod(piece.placed.shape)) for piece in self.trained) if kept else 0
        kept = self.among.kept if self.among and self.sent_among else None
        return whole + (kept.nbytes(self.trained_elements) if kept else 0)

    @property
    def optimized(self) -> int:
        """Bytes of memory that the optimizer's step moves, including requantizing from masters."""
        every = [one.piece for one in self.members]
        state, codes = self.dtypes.state, [one for one in every if one.is_codes and one.trains]
        moved = sum(state.moved(one.placed.shard, one.placed.whole, one.placed.columns) for one in self.trained)
        if codes and not state.writes_codes:
            moved += FP32 * self.trained_elements
        elif codes:
            again = [one.placed for one in codes if one.plan is None or _is_quantized_apart(one.plan)]
            moved += sum(state.master(one.whole, one.columns).nbytes(one.shard) for one in again)
        return moved + sum(gathered(one, "both", self.dtypes).sent for one in codes)


def _is_quantized_apart(plan: Plan) -> bool:
    """Whether the launch that steps masters can't quantize them, since scales depend on more than a tile's blocks."""
    blocks = [source.quantization.block for source in plan.layout.sources]
    return plan.shares_amax or plan.layout.stochastic or any(None in (block.m, block.k) for block in blocks)


@dataclass(frozen=True)
class Groups:
    """All groups of a model: the root's and each layer's."""

    root: tuple[Group, ...]
    layers: tuple[tuple[Group, ...], ...]

    @property
    def every(self) -> list[Group]:
        """All groups in order, the root's first."""
        return [*self.root, *(group for layer in self.layers for group in layer)]

    @property
    def pieces(self) -> list[Piece]:
        """The pieces of all weights."""
        return [member.piece for group in self.every for member in group.members]


def groups_of(model: Model, use: Use, picks: Picks, mesh: Mesh, dtypes: Dtypes) -> Groups:
    """The groups of a model. Layers with the same weights share the same groups."""
    made: dict[tuple[Weight, ...] | str, tuple[Group, ...]] = {}
    by_name = bool(picks.only or picks.leave)

    def of_layer(layer: Layer, stays: bool) -> tuple[Group, ...]:
        key = layer.name if by_name else layer.weights
        if key not in made:
            made[key] = tuple(
                Group(members, members[0].piece.placed.ranks, stays, dtypes, use.exchange, mesh.replicas, use.among)
                for members in _split(layer, use, picks, mesh, stays, dtypes)
            )
        return made[key]

    return Groups(of_layer(model.root, True), tuple(of_layer(layer, False) for layer in model.layers))


def _split(layer: Layer, use: Use, picks: Picks, mesh: Mesh, stays: bool, dtypes: Dtypes) -> list[tuple[Member, ...]]:
    """Splits a layer's weights by the ranks that shard them: dense ones, then experts if expert parallelism is on."""
    found: dict[bool, list[Member]] = {}
    for weight in layer.weights:
        why = why_plain(layer, weight, use, picks, mesh)
        taken = not why
        piece = Piece(place(weight, mesh), use.plan if taken else None, use.cast and taken, weight.trains, stays, taken)
        found.setdefault(weight.kind == "experts" and mesh.experts > 1, []).append(Member(weight, piece, why))
    return [_gathered_together(members, use, stays, dtypes) for _, members in sorted(found.items())]


def _gathered_together(members: Sequence[Member], use: Use, stays: bool, dtypes: Dtypes) -> tuple[Member, ...]:
    """The members with one choice for all: their gathers leave values, or codes. Sets `packed` if all planes of the
    group are dequantized from the gather's output."""
    packs = [one.piece.packs for one in members if one.piece.plan is not None]
    values = use.leaves_values(packs, stays, dtypes.gathered)
    packed = values and all(packs)
    return tuple(
        replace(one, piece=replace(one.piece, on_gather=values, packed=packed)) if one.piece.plan is not None else one
        for one in members
    )


def work_of(layer: Layer, groups: Sequence[Group], mesh: Mesh, per_host: int) -> Work:
    """What a layer's groups do in a step on hosts of `per_host` ranks, for the time estimate."""
    replicas = mesh.ring(mesh.replicas, mesh.shards * mesh.tensor, per_host)
    quantized = [member for group in groups for member in group.members if member.piece.plan is not None]
    sent = []
    for group in groups:
        ring = mesh.ring(group.ranks, mesh.shards * mesh.tensor // group.ranks, per_host)
        forward, backward = (group.gather(which).sent for which in ("forward", "backward"))
        reduced = group.trained_elements, group.sent_gradients, group.exchanges, group.replicated, replicas
        sent.append(Sent(ring, forward, backward, *reduced, group.at_once, group.sent_among))
    members = [member for group in groups for member in group.members if member.weight.share > 0]
    return Work(
        sent=tuple(sent),
        products=tuple(product(member, mesh) for member in members),
        optimizer=sum(group.optimized for group in groups),
        quantized=sum(member.piece.placed.matrix[0] * member.piece.placed.matrix[1] for member in quantized),
        weights=len(quantized),
        values=any(member.piece.on_gather for member in quantized),
        attention=layer.attention / mesh.tensor,
        width=layer.width / mesh.tensor,
    )


def product(member: Member, mesh: Mesh) -> Product:
    """A rank's product with a weight. Experts multiply as many tokens in total as if the rank had all of them."""
    weight = member.weight
    *lead, m, k = weight.shape if len(weight.shape) > 1 else (*weight.shape, 1)
    count = lead[0] if lead else 1
    tensor = mesh.tensor if weight.cut != "none" else 1
    return Product(m, k, weight.share * count / tensor, member.piece.plan is not None, weight.trains)

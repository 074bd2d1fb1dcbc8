"""Weights that are gathered as codes, in few steps: each plane is copied from its shard into what the rank sends, and
from what all have sent into FSDP2's outputs, of which gathered weights have views. A plane that is smaller than that of
the other pass is copied into a tensor of its own, which FSDP2 frees. What fills it up in between is left as it is, as
are rows that a short shard lacks: nobody reads them. Of blocks that cuts split, scales arrive more than once, and are
picked from FSDP2's outputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from layoutc.runtime.facts import PassName
from layoutc.runtime.fsdp2 import hooks, steady, wire
from layoutc.runtime.fsdp2.pack import Member, Quantizing, Slot, quantizing_into
from layoutc.runtime.fsdp2.runs import PlaneInPlace, in_words
from layoutc.runtime.fsdp2.wire import Gathering
from layoutc.runtime.parts import Parts
from layoutc.runtime.sharding import gathered
from layoutc.runtime.sharding.registry import Sharding, find
from layoutc.runtime.torch_private import foreach_copy_, keeping_version
from layoutc.runtime.weight.tensor import QuantizedTensor


@dataclass
class Weight:
    """A weight of a group, as a gather for a pass has sent and delivered it."""

    param: Any  # FSDPParam
    sharding: Sharding
    shard: weakref.ref[Any]
    gathering: Gathering
    sources: tuple[steady.Source, ...] | None  # the planes that were sent; None: values are quantized in each gather
    sent: tuple[Tensor, ...]  # what the shard sends of each leg, in bytes; () if values are quantized in each gather
    outputs: list[Tensor]  # FSDP2's, in the order of legs; then those of slots that the other pass fills
    starts: tuple[int, ...]  # of these in the row of each rank, in bytes

    def is_steady(self) -> bool:
        """True if the shard would send what lies where it lay, to where it arrived."""
        shard = self.shard()
        if (
            shard is None
            or gathered.shard_of(self.param) is not shard
            or gathered.outputs_of(self.param) is not self.outputs
        ):
            return False
        return self.sources is None or steady.unchanged(shard, self.param, self.sources)

    def pieces(self) -> Iterator[tuple[PlaneInPlace | None, int]]:
        """Its planes, None for one that is not copied in words; and where each starts in a row, in bytes."""
        targets = self._targets()
        # Of a weight whose values are quantized into the row, only the target is used.
        for source, target, start in zip(self.sent or targets, targets, self.starts, strict=False):
            yield in_words(source, target, self.gathering.route.world), start

    def others(self) -> Iterator[Tensor]:
        """What FSDP2's steps allocate, and planes do not arrive in."""
        targets = {id(one) for one in self._targets()}
        yield from [one for one in (*self.outputs, *self.gathering.joined.values()) if id(one) not in targets]

    def picks(self) -> Iterator[tuple[Gathering, str, Tensor]]:
        """Planes that arrive with scales of some blocks more than once: what `wire.arrived` makes them of, once these
        are in FSDP2's outputs."""
        for (name, leg), output in zip(self.gathering.route.legs.items(), self.outputs, strict=False):
            if leg.chosen is not None:
                yield self.gathering, name, output

    def _targets(self) -> list[Tensor]:
        """Where each plane arrives: in FSDP2's output; one that does not fill that, where it is joined."""
        legs, joined = self.gathering.route.legs, self.gathering.joined
        pairs = zip(legs.items(), self.outputs, strict=False)
        return [
            output if leg.joined is None or leg.chosen is not None else joined[name] for (name, leg), output in pairs
        ]

    def deliver(self, shared: Mapping[str, Tensor]) -> None:
        """Gives the gathered weight its planes: views of the outputs, and those that all ranks have."""
        shard: Any = self.shard()
        before = self.gathering.before
        assert before is not None
        planes = {**before.planes, **shared} if shared else before.planes
        hooks.deliver(shard, planes, gathered.gathered_of(self.param))

    def member(self) -> Member:
        """As one of those that are quantized into a row."""
        route = self.gathering.route
        slots = [Slot(name, at, leg) for (name, leg), at in zip(route.legs.items(), self.starts, strict=False)]
        state, parts = hooks.gathered_of(self.sharding), Parts(route.world, 0, 0)
        shard: Any = self.shard()
        return Member(shard.QUANTIZED, weakref.ref(self.param), state, tuple(slots), parts, self.gathering)


class Codes:
    """The quantized weights of a group in one pass."""

    def __init__(
        self, weights: Sequence[Weight], members: Sequence[Member] = (), quantizing: Quantizing | None = None
    ) -> None:
        self.weights, self.members, self.quantizing = weights, members, quantizing
        self.sharing = [at for at, weight in enumerate(weights) if weight.gathering.shared]
        self.copies: dict[int, dict[str, Tensor]] = {}  # by the weight's position; see `_copied`
        self.others = [one for weight in weights for one in weight.others()]
        self.picks = [one for weight in weights for one in weight.picks()]

    def is_steady(self) -> bool:
        """True if all of them would send what lies where it lay."""
        if self.quantizing is not None and not self.quantizing.is_ready():
            return False
        return all(weight.is_steady() for weight in self.weights)

    @property
    def which(self) -> PassName | None:
        """The pass; None if weights are gathered for several."""
        passes = {weight.gathering.which for weight in self.weights}
        return passes.pop() if len(passes) == 1 else None

    def fill(self, sent: Tensor, _: Callable[[], Any]) -> None:
        """Quantizes the values of weights that are cast on gather into the row of this rank, (nbytes,) uint8; planes
        are copied by runs. Collective as their hooks are."""
        if self.quantizing is None:
            return
        done = self.quantizing(sent)
        assert done, "is_steady() has said that kernels may write, and codes_of that there are launches"
        for weight, member in zip(self.weights, self.members, strict=True):
            assert member.gathering is not None
            weight.gathering = member.gathering

    def arrive(self, _: Tensor, __: int) -> None:
        """Gives gathered weights their planes, which are being copied to where they lie."""
        for one in self.others:  # also what nobody reads: FSDP2's steps have it too, and plans
            gathered.allocate(one)
        for pick in self.picks:
            wire.arrived(*pick)
        copied = self._copied()
        for at, weight in enumerate(self.weights):
            weight.deliver(copied.get(at, weight.gathering.shared))

    def _copied(self) -> dict[int, dict[str, Tensor]]:
        """Copies of planes that all ranks have, if shards may be quantized anew while their weights are still gathered:
        in memory that each gather writes, as it writes all other planes."""
        if not self.sharing or self.weights[0].sharding.frees_after_pass:  # which is the same for all of a group
            return {}
        shared = [self.weights[at].gathering.shared for at in self.sharing]
        if not self.copies:
            with torch.inference_mode(False):
                self.copies = dict(zip(self.sharing, wire.copies_of_all(shared), strict=True))
            return self.copies
        targets = [plane for one in self.copies.values() for plane in one.values()]
        with keeping_version(*targets):
            foreach_copy_(targets, [plane for one in shared for plane in one.values()])
        return self.copies


def weight_of(param: Any, metadata: Any, sizes: Sequence[int], start: int) -> Weight | None:
    """A quantized weight that FSDP2 has gathered; None if a gather in few steps can't do what its hooks do.

    sizes: the bytes of each tensor that it has sent. start: of the first, in the row of each rank.
    """
    shard = gathered.shard_of(param)
    sharding = find(shard)
    if sharding is None or sharding.dim or not isinstance(metadata, Gathering) or gathered.is_offloaded(param):
        return None
    route, before = metadata.route, metadata.before
    legs = route.legs.values()
    outputs = gathered.outputs_of(param)
    if route.world == 1 or before is None or not before.planes or any(map(Tensor.is_inference, outputs)):
        return None
    own_sizes = [leg.sent * leg.width for leg in legs]
    if tuple(sizes) != (route.slots or tuple(own_sizes)):
        return None
    is_codes = isinstance(shard, QuantizedTensor)
    kept = steady.kept(shard, route.which) if is_codes else None
    # Of values that are cast, ranks ask one another for amaxes of the blocks that they share.
    if kept is None and (is_codes or any(leg.chosen is not None for leg in legs)):
        return None
    starts = tuple(accumulate(sizes[:-1], initial=start))
    # A gathering of its own: the hooks' one is theirs, to be changed by a gather that takes FSDP2's steps.
    shared = {name: shard.store.planes[name] if kept else plane for name, plane in metadata.shared.items()}
    own, sources, sent = replace(metadata, shared=shared), kept and kept.sources, kept.own if kept else ()
    return Weight(param, sharding, weakref.ref(shard), own, sources, sent, outputs, starts)


def codes_of(weights: Sequence[Weight], sent: Tensor) -> Codes | None:
    """What gathers weights again; None if some of them are quantized in each gather, and no launch does that for all.

    sent: the row that this rank has sent.
    """
    cast = [weight.sources is None for weight in weights]
    if not any(cast):
        return Codes(weights)
    if not all(cast):
        return None
    members = [weight.member() for weight in weights]
    quantizing = quantizing_into(members)
    if quantizing is None or not quantizing.is_able_into(sent):
        return None
    return Codes(weights, members, quantizing)


def pass_of(param: Any) -> PassName:
    """The pass that gathers an FSDPParam."""
    sharding = find(gathered.shard_of(param))
    return "forward" if sharding is None else hooks.pass_of(sharding, hooks.gathered_of(sharding))

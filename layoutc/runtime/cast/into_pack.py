"""Weights that are cast on gather and travel in one pack: quantized into what a rank sends, in one launch.

A gather by hooks quantizes a group into tensors of its own, hands a part to each weight's hook, and copies all parts
into the pack. Here, as long as the shards lie where they did, kernels write each plane where the pack has it. What all
ranks have without sending it (amaxes, and scales that follow from them) stays in one place, so that the launches that
dequantize are kept as well: nobody reads it but the gather that it was made for.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from layoutc.ints.gathers import ALIGNED
from layoutc.runtime.captures import capturing
from layoutc.runtime.cast import gather_group
from layoutc.runtime.cast.shared_amax import decide_all
from layoutc.runtime.facts import Facts
from layoutc.runtime.fsdp2 import on_gather
from layoutc.runtime.fsdp2.wire import Gathering
from layoutc.runtime.sharding import gathered
from layoutc.runtime.streams import stream_of
from layoutc.runtime.torch_private import foreach_copy_, traced

if TYPE_CHECKING:
    from layoutc.runtime.cast.tensor import CastOnGather
    from layoutc.runtime.fsdp2.pack import Member

_MOST = 16  # places that a pack is sent from, whose launches are kept


class Kind(NamedTuple):
    """Weights of one recipe and dtype."""

    members: tuple[int, ...]
    launches: Any  # a LaunchPlan


class Source:
    """A weight's values, and where what follows from them is written."""

    def __init__(self, member: Member, shard: CastOnGather, gathering: Gathering) -> None:
        layout = shard.LAYOUT
        self.member, self.shard = member, weakref.ref(shard)
        self.gathering: Gathering | None = gathering
        self.planes, self.matrix = shard.store, gather_group.matrix(shard)
        self.address = shard.store["values"].data_ptr()
        self.orientations = layout.serves[gathering.which]
        m, k = self.matrix.shape
        self.facts = layout.written(m, k, self.orientations)
        self.amax: Tensor | None = None
        self.stays: dict[str, Tensor] = {}  # planes that do not travel

    def is_able(self) -> bool:
        """True if a kernel reads the values and writes what is sent; of a short shard less, which nobody reads."""
        slots, recipe = self.member.slots, self.member.recipe
        return recipe.quantizing_kernels(self.matrix) is not None and all(
            slot.name in self.facts and self.facts[slot.name].shape[0] <= slot.leg.sent for slot in slots
        )

    def kept(self) -> dict[str, Facts]:
        """What needs memory that stays: planes that do not travel, and under "" the amax that decides a scale."""
        layout, travels = self.member.recipe.LAYOUT, {slot.name for slot in self.member.slots}
        found = {name: facts for name, facts in self.facts.items() if name not in travels}
        assert self.gathering is not None
        found |= {name: Facts(tuple(plane.shape), plane.dtype) for name, plane in self.gathering.shared.items()}
        if layout.shares_amax:
            found[""] = Facts(layout.amax_shape(self.matrix.shape[1]), torch.float32)
        return found

    def keep(self, memory: dict[str, Tensor]) -> None:
        """Takes it."""
        assert self.gathering is not None
        self.amax, self.stays = memory.pop("", None), memory
        self.gathering = replace(self.gathering, shared={name: memory[name] for name in self.gathering.shared})

    def holds(self) -> bool:
        """True if the FSDPParam still has this shard, with its values where they were, and no other dtype."""
        shard = self.shard()
        if shard is None or gathered.shard_of(self.member.param()) is not shard or shard.store is not self.planes:
            return False
        values: Tensor = self.planes["values"]
        return values.data_ptr() == self.address

    def places_in(self, sent: Tensor) -> dict[str, Tensor]:
        """All planes that kernels write: those that travel, in what the rank sends, and the others."""
        found = dict(self.stays)
        for name, start, _ in self.member.slots:
            facts = self.facts[name]
            found[name] = sent[start : start + facts.nbytes].view(facts.dtype).view(facts.shape)
        return {name: found[name] for name in self.facts}


class IntoPack:
    """Quantizes the weights of a pack, for as long as they stay where they are."""

    def __init__(self, members: Sequence[Member]) -> None:
        """members: all of them cast on gather, after a gather by their hooks."""
        self.sources: list[Source] = []
        for member in members:
            shard: Any = gathered.shard_of(member.param())
            assert member.gathering is not None
            self.sources.append(Source(member, shard, member.gathering))
        self.is_able = all(one.is_able() for one in self.sources)
        if self.is_able:
            self._keep(self.sources[0].matrix.device)
        else:
            for one in self.sources:
                one.gathering = None  # which may hold planes
        self.kept: dict[tuple[int, int], list[Kind]] = {}
        self.last: list[Tensor] = []  # the amaxes and planes that were copied last

    def _keep(self, device: torch.device) -> None:
        """Allocates what stays, in one piece: kernels count amaxes from the first one."""
        wanted = [(one, name, facts) for one in self.sources for name, facts in one.kept().items()]
        sizes = [-(-facts.nbytes // ALIGNED) * ALIGNED for _, _, facts in wanted]
        memory: dict[int, dict[str, Tensor]] = defaultdict(dict)
        with torch.inference_mode(False):  # gathers that train use it as well
            pieces = torch.split(torch.empty(sum(sizes), dtype=torch.uint8, device=device), sizes)
            for (one, name, facts), piece in zip(wanted, pieces, strict=True):
                memory[id(one)][name] = piece[: facts.nbytes].view(facts.dtype).view(facts.shape)
        for one in self.sources:
            one.keep(memory[id(one)])

    def holds(self) -> bool:
        """True if the pack has the same weights, where they were."""
        return all(one.holds() for one in self.sources)

    def is_ready(self) -> bool:
        """True if kernels may do it now."""
        return self.is_able and not traced(self.sources[0].matrix) and self.holds()

    def is_able_into(self, sent: Tensor) -> bool:
        """True if launches write into this memory. Where some weight has none, it has none elsewhere."""
        self.is_able = self.is_able and self._kinds_into(sent) is not None
        return self.is_able

    def __call__(self, sent: Tensor) -> bool:
        """Quantizes into (nbytes,) uint8; false: nothing is done, and hooks must be asked.

        Collective if shards share amaxes that were not precomputed, exactly as hooks are: other ranks may ask theirs.
        """
        if capturing(sent.device) or not self.is_ready() or not self.is_able_into(sent):
            return False
        kinds = self.kept[_place(sent)]
        shards: list[Any] = [one.shard() for one in self.sources]
        for one, shard in zip(self.sources, shards, strict=True):
            on_gather.check_unwritten(shard, one.member.gathered.values)
            one.member.gathering = one.gathering
        self._take(decide_all(shards, lambda at: self.sources[at].matrix))
        for members, launches in kinds:
            amax = self.sources[members[0]].amax
            launches(*() if amax is None else (amax,))
        return True

    def _take(self, decided: Sequence[tuple[Tensor | None, dict[str, Tensor]]]) -> None:
        """Copies what was decided to where launches read it, unless it lies there since the last gather."""
        new: list[Tensor] = []
        into: list[Tensor] = []
        for source, (amax, planes) in zip(self.sources, decided, strict=True):
            if amax is not None and source.amax is not None:
                new.append(amax)
                into.append(source.amax)
            new += planes.values()
            into += [source.stays[name] for name in planes]
        if len(new) == len(self.last) and all(map(is_, new, self.last)):
            return
        self.last = new
        if new:
            foreach_copy_(into, new)

    def _kinds_into(self, sent: Tensor) -> list[Kind] | None:
        """The launches that write planes into this memory, from the current stream; None if some weight has none."""
        key = _place(sent)
        if (kinds := self.kept.get(key)) is not None:
            return kinds
        alike: dict[Any, list[int]] = defaultdict(list)
        for at, source in enumerate(self.sources):
            alike[source.member.recipe, source.matrix.dtype, source.orientations].append(at)
        kinds = []
        for (recipe, _, orientations), members in alike.items():
            ones = [self.sources[at] for at in members]
            amaxes = [one.amax for one in ones if one.amax is not None] or None
            xs, outs = [one.matrix for one in ones], [one.places_in(sent) for one in ones]
            launches = recipe.launches_into(xs, amaxes, orientations, outs)
            if launches is None:
                return None
            kinds.append(Kind(tuple(members), launches))
        if len(self.kept) >= _MOST:
            self.kept.clear()
        self.kept[key] = kinds
        return kinds


def _place(sent: Tensor) -> tuple[int, int]:
    """Where a rank sends from, and the stream that tables for it were copied on."""
    return sent.data_ptr(), stream_of(sent.device)

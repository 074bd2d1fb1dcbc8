"""Cast-on-gather weights, quantized into the row that a rank sends: one launch for all that are alike.

While shards stay at their addresses, kernels write each plane directly into the row; without kernels, planes are
copied. What all ranks have without sending it (amaxes, and the scales computed from them) stays at one address, so the
dequantizing launches can be reused. Only the gather that it was made for reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layoutc.ints.gathers import ALIGNED
from layoutc.runtime.cast import gather_group
from layoutc.runtime.cast.shared_amax import decide_all
from layoutc.runtime.facts import Facts
from layoutc.runtime.kernels.plans import Plans
from layoutc.runtime.sharding import shards
from layoutc.runtime.streams import stream_of
from layoutc.runtime.torch_private import foreach_copy_, traced

if TYPE_CHECKING:
    from layoutc.runtime.fsdp2.gather_plan import Weight


class Source:
    """A weight's values, and the memory for what is computed from them."""

    def __init__(self, weight: Weight) -> None:
        self.weight, self.shard = weight, weight.shard
        shard: Any = weight.shard()
        shards.check_cuts(shard)
        self.planes, self.matrix = shard.store, gather_group.matrix(shard)
        self.address = shard.store["values"].data_ptr()
        self.orientations = shard.LAYOUT.serves[weight.gathering.route.which]
        self.facts = shard.LAYOUT.written(self.matrix.shape[0], self.matrix.shape[1], self.orientations)
        self.amax: Tensor | None = None
        self.stays: dict[str, Tensor] = {}  # planes that do not travel

    def is_able(self) -> bool:
        """True if batched kernels can read the values and write what is sent. Padding of a short shard is not written;
        nothing reads it. Split blocks need other ranks first."""
        kernels, x = self.weight.recipe.quantizing_kernels(self.matrix), self.matrix
        if kernels is None or not kernels.batched or not x.is_contiguous() or not 0 < x.numel() < 2**31:
            return False
        shard: Any = self.shard()
        if (cuts := shards.row_sharding(shard)) is not None and cuts.splits_blocks(self.weight.recipe.LAYOUT):
            return False
        return all(
            leg.chosen is None and name in self.facts and self.facts[name].shape[0] <= leg.sent
            for name, _, leg in self.weight.slots
        )

    def kept(self) -> dict[str, Facts]:
        """What stays at a fixed address: planes that do not travel, and, under "", the amax that decides a scale."""
        layout, travels = self.weight.recipe.LAYOUT, {slot.name for slot in self.weight.slots}
        (m, k), which = self.matrix.shape, self.weight.gathering.route.which
        found = {name: facts for name, facts in self.facts.items() if name not in travels}
        found |= {name: layout.planes(m, k)[name] for name in layout.shared_in[which]}
        if layout.shares_amax:
            found[""] = Facts(layout.amax_shape(k), torch.float32)
        return found

    def keep(self, memory: dict[str, Tensor]) -> None:
        """Sets the memory of `kept`."""
        self.amax, self.stays = memory.pop("", None), memory
        gathering, layout = self.weight.gathering, self.weight.recipe.LAYOUT
        shared = {name: memory[name] for name in layout.shared_in[gathering.route.which]}
        self.weight.gathering = replace(gathering, shared=shared)

    def holds(self) -> bool:
        """True if the values have the same address and dtype."""
        shard: Any = self.shard()
        if shard is None or shard.store is not self.planes:
            return False
        values: Tensor = self.planes["values"]
        return bool(values.data_ptr() == self.address)

    def places_in(self, sent: Tensor) -> dict[str, Tensor]:
        """All planes that kernels write: those that travel, in the rank's row, and the others."""
        found = dict(self.stays)
        for name, start, _ in self.weight.slots:
            facts = self.facts[name]
            found[name] = sent[start : start + facts.nbytes].view(facts.dtype).view(facts.shape)
        return {name: found[name] for name in self.facts}


class IntoRow:
    """Quantizes the cast-on-gather weights of a group while they stay at their addresses."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.sources = [Source(weight) for weight in weights]
        self.is_able = all(one.is_able() for one in self.sources)
        if self.is_able:
            self._keep(self.sources[0].matrix.device)
        self.launches = Plans()  # for the weights of each recipe and dtype, by the row's address
        self.last: list[Tensor] = []  # the amaxes and planes copied last

    def _keep(self, device: torch.device) -> None:
        """Allocates what stays, in one piece: kernels find amaxes by their offset from the first."""
        wanted = [(one, name, facts) for one in self.sources for name, facts in one.kept().items()]
        sizes = [-(-facts.nbytes // ALIGNED) * ALIGNED for _, _, facts in wanted]
        memory: dict[int, dict[str, Tensor]] = defaultdict(dict)
        with torch.inference_mode(False):  # training uses it too
            pieces = torch.split(torch.empty(sum(sizes), dtype=torch.uint8, device=device), sizes)
            for (one, name, facts), piece in zip(wanted, pieces, strict=True):
                memory[id(one)][name] = piece[: facts.nbytes].view(facts.dtype).view(facts.shape)
        for one in self.sources:
            one.keep(memory[id(one)])

    def holds(self) -> bool:
        """True if no values have moved."""
        return all(one.holds() for one in self.sources)

    def __call__(self, sent: Tensor) -> None:
        """Quantizes into (nbytes,) uint8. Collective exactly as hooks are: other ranks may run theirs."""
        if self.is_able and not traced(self.sources[0].matrix):
            self.by_kernels(sent)
            return
        for one, made in zip(self.sources, gather_group.quantized([one.shard() for one in self.sources]), strict=True):
            weight, planes = one.weight, made.store.planes
            for name, start, _ in weight.slots:
                own = made.entries(name).reshape(-1).view(torch.uint8)
                sent[start : start + own.numel()].copy_(own)
            shared = {name: planes[name] for name in made.LAYOUT.shared_in[weight.gathering.route.which]}
            weight.gathering = replace(weight.gathering, shared=shared)

    def delivered(self) -> None:
        """Lets go of planes that gathered weights hold now, unless kernels read them where they are: the other pass has
        its own."""
        if self.is_able:
            return
        for one in self.sources:
            if not one.weight.leaves_values:
                one.weight.gathering = replace(one.weight.gathering, shared={})

    def by_kernels(self, sent: Tensor) -> None:
        """The same with kernels, one launch for all weights that are alike."""
        weights: list[Any] = [one.shard() for one in self.sources]
        self._take(decide_all(weights, lambda at: self.sources[at].matrix))
        # Tables are copied on the current stream.
        for launches, amax in self.launches.of((sent.data_ptr(), stream_of(sent.device)), lambda: self._kinds(sent)):
            launches(*amax)

    def _take(self, decided: Sequence[tuple[Tensor | None, dict[str, Tensor]]]) -> None:
        """Copies amaxes and planes to where launches read them, unless the last gather left them there."""
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

    def _kinds(self, sent: Tensor) -> list[tuple[Any, list[Tensor]]]:
        alike: dict[Any, list[Source]] = defaultdict(list)
        for source in self.sources:
            alike[source.weight.recipe, source.matrix.dtype, source.orientations].append(source)
        kinds = []
        for (recipe, _, orientations), members in alike.items():
            amaxes = [one.amax for one in members if one.amax is not None]
            outs = [one.places_in(sent) for one in members]
            launches = recipe.batch_plan([one.matrix for one in members], amaxes or None, orientations, outs)
            assert launches is not None, "is_able has said that they fit into tables"
            kinds.append((launches, amaxes[:1]))
        return kinds

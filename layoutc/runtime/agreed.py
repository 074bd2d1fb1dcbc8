"""The amax that shards of a weight in high precision share: reduced at each gather, or for all weights at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from layoutc.runtime import operators
from layoutc.runtime.amax import reduce_max, with_history
from layoutc.runtime.errors import UnsupportedOperator

if TYPE_CHECKING:
    from layoutc.runtime.casting import CastOnGather

Stamp = tuple[int, int]


@dataclass
class Agreed:
    """What a weight's shards have agreed on: alike on all ranks, but for stamps, which say of which values it is."""

    writes: int = 0
    amax: Tensor | None = None  # that decides the scale
    plane: Tensor | None = None  # the `amax` plane: with a history, that of all values so far, latest first
    of: Stamp | None = None  # the values whose amax is in it
    ahead: Stamp | None = None  # the values for which it was found ahead of gathers, which then reduce nothing

    def decide(self, tensor: CastOnGather, matrix: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The amax that decides the scale of a shard, and the `amax` plane where the recipe stores one.

        Collective over the shards that FSDP2 holds, unless `precompute_amaxes` came after the last write.
        """
        layout, cls = tensor.LAYOUT, tensor.QUANTIZED
        if not layout.shares_amax:
            return None, {}
        if operators.traced(matrix):
            return self._traced(tensor, matrix)
        stamp = tensor._stamp()
        if self.ahead == stamp:
            return self._held(tensor)
        from layoutc.runtime import fsdp

        group, _ = fsdp.amax_group(tensor)
        current = operators.shared_amax(cls, matrix)
        if not layout.history:
            return with_history(layout, reduce_max(current, group), None)
        found = reduce_max(torch.cat([current, self.is_new(stamp, current)]), group)
        self.advance(tensor, found[:1], found[1:])
        return self._held(tensor)

    def is_new(self, stamp: Stamp, like: Tensor) -> Tensor:
        """(1,): 1 where the values have changed since their amax was taken in; the largest over all ranks counts."""
        return like.new_full((1,), float(self.of != stamp))

    def advance(self, tensor: CastOnGather, current: Tensor, new: Tensor) -> None:
        """Takes in the amax of all shards. A history advances where `new`, of all shards, is 1."""
        layout, (held, before) = tensor.LAYOUT, self._on(current.device)
        amax, extra = with_history(layout, current, before)
        plane = extra.get("amax")
        if amax is not None and plane is not None and layout.history and before is not None:
            # Decided on the device: to ask a card whether another rank has written would stall each gather.
            amax, plane = torch.where(new > 0, amax, held), torch.where(new > 0, plane, before)
        self.amax, self.plane, self.of = amax, plane, tensor._stamp()

    def forget(self) -> None:
        """For values that have nothing to do with those before."""
        self.amax = self.plane = self.of = self.ahead = None

    def _held(self, tensor: CastOnGather) -> tuple[Tensor | None, dict[str, Tensor]]:
        amax, plane = self._on(tensor.device)
        return amax, {} if plane is None else {"amax": plane}

    def _on(self, device: torch.device) -> Iterator[Any]:
        """The two tensors: CPU offload takes the amax of what is on the card, and of what is not."""
        return (None if one is None else one.to(device) for one in (self.amax, self.plane))

    def _traced(self, tensor: CastOnGather, matrix: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        if tensor.LAYOUT.history:
            raise UnsupportedOperator(
                f"{tensor._label()}: its scale follows a history of amaxes, which a traced graph would never advance; "
                "shard it with fully_shard, whose gathers run outside of graphs, or leave its module uncompiled"
            )
        return with_history(tensor.LAYOUT, operators.shared_amax(tensor.QUANTIZED, matrix), None)

    def snapshot(self, stamp: Stamp) -> tuple[Tensor | None, Tensor | None, bool, bool]:
        """What a copy of the weight takes along."""
        return self.amax, self.plane, self.of == stamp, self.ahead == stamp

    @classmethod
    def restored(cls, snapshot: Any, stamp: Stamp) -> Self:
        """The inverse, for a copy with another stamp."""
        amax, plane, of, ahead = snapshot
        return cls(stamp[0], amax, plane, stamp if of else None, stamp if ahead else None)


@torch.no_grad()
def precompute_amaxes(model: nn.Module) -> None:
    """Finds the amaxes of all weights of `model` that are cast on gather: one all-reduce for each process group.

    Call it on all ranks after optimizer.step(): gathers reduce nothing until a weight is written again. Without it each
    gather of a weight whose shards share an amax reduces its own; bytes are the same. Weights of other recipes take no
    part. Whoever writes some shards of a weight and not the others, below its DTensor, calls it again on all ranks.
    """
    from layoutc.runtime import fsdp
    from layoutc.runtime.casting import find_cast
    from layoutc.runtime.groups import shared_amaxes

    batches: dict[tuple[int, str], list[CastOnGather]] = defaultdict(list)
    groups: dict[int, dist.ProcessGroup | None] = {}
    for param in model.parameters():
        tensor = find_cast(param)
        if tensor is not None and tensor.LAYOUT.shares_amax and not tensor.is_meta:
            group, _ = fsdp.amax_group(tensor)
            groups[id(group)] = group
            batches[id(group), tensor.device.type].append(tensor)
    for (key, _), tensors in batches.items():
        found, shapes = shared_amaxes([(tensor.QUANTIZED, tensor.as_matrix()) for tensor in tensors])
        news = [tensor._agreed.is_new(tensor._stamp(), found) for tensor in tensors]
        found = reduce_max(torch.cat([found, *news]), groups[key])
        *pieces, all_new = torch.split(found, [*map(prod, shapes), len(tensors)])
        for tensor, piece, shape, new in zip(tensors, pieces, shapes, all_new.unsqueeze(1), strict=True):
            tensor._agreed.advance(tensor, piece.view(shape), new)
            tensor._agreed.ahead = tensor._stamp()

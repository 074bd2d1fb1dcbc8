"""The amax that shards of a weight that is cast on gather share: reduced at each gather, unless it was precomputed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from layoutc.runtime.errors import UnsupportedOperator
from layoutc.runtime.quantize.amax import reduce_max, with_history
from layoutc.runtime.sharding import registry, shards
from layoutc.runtime.weight import operators

if TYPE_CHECKING:
    from layoutc.runtime.cast.tensor import CastOnGather


@dataclass
class Agreed:
    """The amax that a weight's shards have agreed on: equal on all ranks, whatever FSDP2 does to a short shard's
    tensors.

    A weight, its views, and the tensors that FSDP2 makes to hold its shards have one object in common.
    """

    writes: int = 0  # how often the values have changed
    seen: tuple[int, int] | None = None  # id and version of the planes at the last look
    amax: Tensor | None = None  # the one that decides the scale, fp32
    plane: Tensor | None = None  # the `amax` plane: with a history, the amaxes so far, latest first
    of: int | None = None  # `writes` when `amax` was found
    ahead: int | None = None  # `writes` when it was precomputed: gathers reduce nothing as long as they are equal
    owner: int | None = None  # the id of the planes that it was precomputed for

    def decide(self, tensor: CastOnGather, matrix: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The amax that decides a shard's scale, None if shards share none; and {"amax": plane} if the recipe stores
        it.

        matrix: the shard's values, (rows, k). Collective over the shards that FSDP2 holds, unless `precompute_amaxes`
        was called after the last write. Raises UnsupportedOperator for a recipe with a history in a traced graph.
        """
        layout, cls = tensor.LAYOUT, tensor.QUANTIZED
        if not layout.shares_amax:
            return None, {}
        # FSDP2 gathers outside of graphs, so a dispatch mode there is a flop counter or a debugger, not a tracer.
        if operators.traced(matrix) and registry.find(tensor) is None:
            return self._traced(tensor, matrix)
        if self.ahead == self.count(tensor) and (self.owner == id(tensor._planes) or registry.find(tensor) is not None):
            return self._current(tensor)
        groups, _ = shards.amax_groups(tensor)
        current = operators.shared_amax(cls, matrix)
        if not layout.history:
            return with_history(layout, reduce_max(current, groups), None)
        reduced = reduce_max(torch.cat([current, self.is_new(tensor, current)]), groups)
        self.advance(tensor, reduced[:1], reduced[1:])
        return self._current(tensor)

    def count(self, tensor: CastOnGather) -> int:
        """How often values have been written: through the class, or to a plain tensor that shares their memory."""
        planes = (tensor if tensor._source is None else tensor._source)._planes
        now = id(planes), 0 if planes["values"].is_inference() else planes["values"]._version
        # If the planes are other ones, FSDP2 has moved the shard, perhaps on some ranks only: the values are the same.
        if self.seen is not None and self.seen[0] == now[0] and self.seen != now:
            self.writes += 1
        self.seen = now
        return self.writes

    def is_new(self, tensor: CastOnGather, like: Tensor) -> Tensor:
        """(1,): 1 if the values have changed since their amax was found, else 0. The maximum over all ranks counts."""
        return like.new_full((1,), float(self.of != self.count(tensor)))

    def advance(self, tensor: CastOnGather, current: Tensor, new: Tensor) -> None:
        """Records the amax of all shards. A history advances only if `new`, the maximum over all shards, is 1."""
        layout, (last, before) = tensor.LAYOUT, self._on(current.device)
        amax, extra = with_history(layout, current, before)
        plane = extra.get("amax")
        if amax is not None and plane is not None and layout.history and before is not None:
            # Decided on the device: asking a card whether another rank has written would stall each gather.
            amax, plane = torch.where(new > 0, amax, last), torch.where(new > 0, plane, before)
        self.amax, self.plane, self.of = amax, plane, self.count(tensor)

    def forget(self) -> None:
        """Forgets the amax and its history, for values that are unrelated to the old ones."""
        self.amax = self.plane = self.of = self.ahead = None

    def _current(self, tensor: CastOnGather) -> tuple[Tensor | None, dict[str, Tensor]]:
        amax, plane = self._on(tensor.device)
        return amax, {} if plane is None else {"amax": plane}

    def _on(self, device: torch.device) -> Iterator[Any]:
        """`amax` and `plane` on a device: with CPU offload, shards are quantized on both."""
        return (None if one is None else one.to(device) for one in (self.amax, self.plane))

    def _traced(self, tensor: CastOnGather, matrix: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        if tensor.LAYOUT.history:
            raise UnsupportedOperator(
                f"{tensor._label()}: its scale follows a history of amaxes, which a traced graph would never advance; "
                "shard it with fully_shard, whose gathers run outside of graphs, or leave its module uncompiled"
            )
        return with_history(tensor.LAYOUT, operators.shared_amax(tensor.QUANTIZED, matrix), None)

    def snapshot(self, tensor: CastOnGather) -> tuple[Tensor | None, Tensor | None, bool, bool]:
        """The state that a copy of all values takes along."""
        writes = self.count(tensor)
        return self.amax, self.plane, self.of == writes, self.ahead == writes

    @classmethod
    def restored(cls, snapshot: Any, tensor: CastOnGather) -> Self:
        """The inverse of `snapshot`, for the copy."""
        amax, plane, of, ahead = snapshot
        agreed = cls(0, None, amax, plane, 0 if of else None, 0 if ahead else None, id(tensor._planes))
        agreed.count(tensor)
        return agreed

"""The amax that shards of a cast-on-gather weight share: reduced in each gather unless it was precomputed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from layoutc.runtime.errors import LayoutError, UnsupportedOperator
from layoutc.runtime.facts import Group
from layoutc.runtime.quantize.amax import agree_on_amax, join, reduce_max, shared_amaxes, with_history
from layoutc.runtime.sharding import registry, shards
from layoutc.runtime.streams import capturing
from layoutc.runtime.torch_private import traced, version_of
from layoutc.runtime.torch_private.fsdp2 import shard_of
from layoutc.runtime.weight import operators

Cast = Any  # a `CastOnGather`, whose module imports this one


@dataclass
class Agreed:
    """The amax that a weight's shards have agreed on: equal on all ranks, whatever FSDP2 does to short shards.

    A weight, its views, and the tensors that FSDP2 makes for its shards share one object.
    """

    writes: int = 0  # how often the values have changed
    seen: tuple[int, int] | None = None  # id and version of the planes when last checked
    amax: Tensor | None = None  # the one that decides the scale, fp32
    plane: Tensor | None = None  # the `amax` plane: with a history, the amaxes so far, latest first
    of: int | None = None  # `writes` when `amax` was found
    ahead: int | None = None  # `writes` when it was precomputed: gathers don't reduce while they are equal
    owner: int | None = None  # the id of the planes that it was precomputed for
    fused: Group | None = None  # the weights that share its amax

    def decide(self, tensor: Cast, matrix: Tensor, shape: Sequence[int]) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The amax that decides a shard's scale, None if shards share none; and {"amax": plane} if it is stored.

        matrix: the shard's values, (rows, k). shape: of these; that of all values where `tensor` is a view of them.
        Collective over the shards that FSDP2 holds, unless `precompute_amaxes` was called after the last write. Raises
        UnsupportedOperator for a recipe with a history in a traced graph.
        """
        layout, cls = tensor.LAYOUT, tensor.QUANTIZED
        if not layout.shares_amax:
            return None, {}
        # FSDP2 gathers outside of graphs, so a dispatch mode there is a flop counter or a debugger, not a tracer.
        if traced(matrix) and registry.find(tensor) is None:
            return self._traced(tensor, matrix, shape)
        if self.is_ahead(tensor) and (self.owner == id(tensor.store) or registry.find(tensor) is not None):
            return self.current(tensor)
        if self.fused is not None:  # weights that are gathered with it may be in its group
            sharding = registry.find(tensor)
            near = [tensor] if sharding is None else list(map(shard_of, sharding.params_of_group()))
            joined = [one for one in near if isinstance(one, type(tensor)) and one._agreed.fused == self.fused]
            decided = decide_all(joined, lambda at: joined[at]._plain.reshape(-1, tensor.shape[-1]))
            return next(own for one, own in zip(joined, decided, strict=True) if one._agreed is self)
        groups, _ = shards.amax_groups(tensor)
        if layout.amax_of_matrices:
            amax_of_rows = agree_on_amax(cls, matrix, None, groups, None, matrices=layout.amaxes_of(shape))
            return with_history(layout, amax_of_rows, None)
        amax = operators.shared_amax(cls, matrix)
        if not layout.history:
            return self.follow(tensor, reduce_max(amax, groups), None)
        reduced = reduce_max(torch.cat([amax, self.is_new(tensor, amax)]), groups)
        return self.follow(tensor, reduced[:1], reduced[1:])

    def follow(self, tensor: Cast, amax: Tensor, new: Tensor | None) -> tuple[Tensor | None, dict[str, Tensor]]:
        """What `decide` returns, from the amax of all shards. It is recorded only if the recipe has a history."""
        if new is None:
            return with_history(tensor.LAYOUT, amax, None)
        self.advance(tensor, amax, new)
        return self.current(tensor)

    def is_ahead(self, tensor: Cast) -> bool:
        """True if the amax was precomputed and no values were written since.

        False while a CUDA graph is captured: its replays write values without being counted.
        """
        return self.ahead is not None and self.ahead == self.count(tensor) and not capturing(tensor._plain.device)

    def count(self, tensor: Cast) -> int:
        """How often values were written, through the class or a plain tensor that shares their memory."""
        planes = (tensor if tensor._source is None else tensor._source).store
        now = id(planes), 0 if planes["values"].is_inference() else version_of(planes["values"])
        # With other planes, FSDP2 has moved the shard, perhaps on some ranks only; the values are the same.
        if self.seen is not None and self.seen[0] == now[0] and self.seen != now:
            self.writes += 1
        self.seen = now
        return self.writes

    def is_new(self, tensor: Cast, like: Tensor) -> Tensor:
        """(1,): 1 if the values have changed since their amax was found, else 0. The maximum over all ranks counts."""
        return like.new_full((1,), float(self.of != self.count(tensor)))

    def advance(self, tensor: Cast, current: Tensor, new: Tensor | None) -> None:
        """Records the amax of all shards. A history advances only if `new`, the maximum over all shards, is 1.

        Raises LayoutError for a recipe with a history while a CUDA graph is captured.
        """
        layout = tensor.LAYOUT
        if not layout.history:
            plane = operators.stored_amax(layout, current) if "amax" in layout.stored else None
            self.amax, self.plane, self.of = current, plane, self.count(tensor)
            return
        if capturing(current.device):
            raise LayoutError(
                f"{tensor.label()} takes its scale from a history of amaxes, which replays of a CUDA graph would not "
                "advance: use layoutc.quantize_, which keeps histories in the weights, or a recipe without a history"
            )
        last, before = self._on(current.device)
        amax, extra = with_history(layout, current, before)
        plane = extra.get("amax")
        if amax is not None and plane is not None and new is not None and before is not None:
            # Decided on the device: reading whether another rank has written would stall each gather.
            amax, plane = torch.where(new > 0, amax, last), torch.where(new > 0, plane, before)
        self.amax, self.plane, self.of = amax, plane, self.count(tensor)

    def forget(self) -> None:
        """Forgets the amax and its history: new values are unrelated to the old ones."""
        self.amax = self.plane = self.of = self.ahead = None

    def current(self, tensor: Cast) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The recorded amax, on the tensor's device, and the `amax` plane if there is one."""
        amax, plane = self._on(tensor._plain.device)
        return amax, {} if plane is None else {"amax": plane}

    def _on(self, device: torch.device) -> Iterator[Any]:
        """`amax` and `plane` on a device: with CPU offload, shards are quantized on both."""
        return (one if one is None or one.device == device else one.to(device) for one in (self.amax, self.plane))

    def _traced(self, tensor: Cast, matrix: Tensor, shape: Sequence[int]) -> tuple[Tensor | None, dict[str, Tensor]]:
        why = ""
        if self.fused is not None:
            why = f"shares one amax with other weights ({self.fused[1]}), which a traced graph does not see"
        elif tensor.peers:
            why = "is a part, and shares an amax with those of other ranks, which a traced graph does not see"
        elif tensor.LAYOUT.history:
            why = "takes its scale from a history of amaxes, which a traced graph would never advance"
        if why:
            raise UnsupportedOperator(
                f"{tensor.label()} {why}: shard it with fully_shard, whose gathers run outside of graphs, or leave its "
                "module uncompiled"
            )
        amax = agree_on_amax(tensor.QUANTIZED, matrix, None, None, None, matrices=tensor.LAYOUT.amaxes_of(shape))
        return with_history(tensor.LAYOUT, amax, None)

    def snapshot(self, tensor: Cast) -> tuple[Tensor | None, Tensor | None, bool, bool, Group | None]:
        """The state for a copy of all values."""
        writes = self.count(tensor)
        return self.amax, self.plane, self.of == writes, self.ahead == writes, self.fused

    @classmethod
    def restored(cls, snapshot: Any, tensor: Cast) -> Self:
        """The inverse of `snapshot`, for the copy."""
        amax, plane, of, ahead, *fused = snapshot  # earlier versions have no group
        agreed = cls(0, None, amax, plane, 0 if of else None, 0 if ahead else None, id(tensor.store), *fused)
        agreed.count(tensor)
        return agreed


class Found(NamedTuple):
    """A weight and the amax of all its shards; and (1,), not 0 if a shard has changed since the last amax."""

    tensor: Cast
    amax: Tensor
    new: Tensor | None  # None for a recipe without a history


def measured(weights: Sequence[tuple[Cast, Tensor]]) -> list[Found]:
    """The amaxes of several weights: one launch, and one all-reduce for each process group. Collective.

    weights: with this rank's values, as (m, k). All recipes share an amax.
    """
    batches: dict[tuple[tuple[int, ...], str], list[tuple[Cast, Tensor]]] = defaultdict(list)
    groups: dict[tuple[int, ...], Sequence[dist.ProcessGroup]] = {}
    for tensor, matrix in weights:
        own_groups = shards.process_groups(tensor)
        key = tuple(map(id, own_groups))
        groups[key] = own_groups
        batches[key, matrix.device.type].append((tensor, matrix))
    found: list[Found] = []
    for members in batches.values():
        _check_whole([tensor for tensor, _ in members])
    for (key, _), members in batches.items():
        amaxes, shapes = shared_amaxes([(tensor.QUANTIZED, matrix) for tensor, matrix in members])
        with_history = [tensor for tensor, _ in members if tensor.LAYOUT.history]
        if with_history:
            amaxes = torch.cat([amaxes, *(tensor._agreed.is_new(tensor, amaxes) for tensor in with_history)])
        sizes = [*map(prod, shapes), *[1] * len(with_history)]
        pieces = iter(torch.split(reduce_max(amaxes, groups[key]), sizes))
        own = [next(pieces) for _ in members]
        join(own, [tensor._agreed.fused for tensor, _ in members])
        for (tensor, _), piece, shape in zip(members, own, shapes, strict=True):
            new = next(pieces) if tensor.LAYOUT.history else None
            found.append(Found(tensor, piece if len(shape) == 1 else piece.view(shape), new))
    return found


def _check_whole(tensors: Sequence[Cast]) -> None:
    """Raises LayoutError for weights whose group is incomplete: on all ranks, which measure the same weights."""
    count = Counter(tensor._agreed.fused for tensor in tensors)
    for tensor in tensors:
        if (group := tensor._agreed.fused) is not None and count[group] < group[2]:
            raise LayoutError(
                f"{tensor.label()} shares one amax with other weights ({group[1]}), but FSDP2 gathers them apart or "
                "shards them over other ranks: call fully_shard on the module that has all of them, or "
                "layoutc.precompute_amaxes(model) after each step"
            )


def decide_all(
    tensors: Sequence[Cast], matrix_of: Callable[[int], Tensor]
) -> list[tuple[Tensor | None, dict[str, Tensor]]]:
    """`Agreed.decide` for several shards that FSDP2 holds: one launch, and one all-reduce. Collective as that is.

    matrix_of: the values of a shard, (rows, k), by its position.
    """
    decided: list[tuple[Tensor | None, dict[str, Tensor]]] = [(None, {})] * len(tensors)
    agreed = [tensor._agreed for tensor in tensors]
    for at, tensor in enumerate(tensors):
        if tensor.LAYOUT.amax_of_matrices:
            decided[at] = agreed[at].decide(tensor, matrix_of(at), tensor.shape)
    sharing = [at for at, one in enumerate(tensors) if one.LAYOUT.shares_amax and not one.LAYOUT.amax_of_matrices]
    missing = [at for at in sharing if not agreed[at].is_ahead(tensors[at])]
    fused = {group for at in missing if (group := agreed[at].fused) is not None}
    for at in sharing:
        if at not in missing and agreed[at].fused not in fused:
            decided[at] = agreed[at].current(tensors[at])
    missing = [at for at in sharing if at in missing or agreed[at].fused in fused]
    if missing:
        found = {id(one.tensor): one for one in measured([(tensors[at], matrix_of(at)) for at in missing])}
        for at in missing:
            tensor, amax, new = found[id(tensors[at])]
            decided[at] = agreed[at].follow(tensor, amax, new)
    return decided

"""Cast-on-gather weights of one FSDP2 group: quantized in one launch, in the first one's hook.

FSDP2 calls the pre-all-gather hooks of a group's parameters one after another. The first one reduces all amaxes and
quantizes all weights of the group; the others take their part. The gather fast path quantizes into the rank's row
(`into_row`).

A part is taken once, and only if the weight's values have not changed. A weight that was written in between, or that
was not expected, is quantized alone.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from layoutc.runtime.cast.shared_amax import Cast, decide_all
from layoutc.runtime.fsdp2 import hooks
from layoutc.runtime.kernels import launch
from layoutc.runtime.quantize.block_edges import with_halos
from layoutc.runtime.quantize.weights import as_matrix
from layoutc.runtime.sharding import registry, shards
from layoutc.runtime.sharding.registry import Sharding
from layoutc.runtime.torch_private import traced
from layoutc.runtime.torch_private.fsdp2 import shard_of
from layoutc.runtime.weight import operators
from layoutc.runtime.weight.tensor import QuantizedTensor

Sent = tuple[tuple[Tensor, ...], Any]  # what a pre-all-gather hook returns


class Part(NamedTuple):
    """A weight that was quantized with its group, and what identifies the values that were quantized."""

    quantized: QuantizedTensor
    planes: dict[str, Tensor]
    version: int
    writes: int  # through views and aliases, whose version counters are their own

    def is_of(self, shard: Cast) -> bool:
        """True if the values were neither written nor replaced, and the same pass gathers."""
        serves = shard.LAYOUT.serves[hooks.passing(shard)]
        return (self.planes is shard.store) and self[1:] == _stamp(shard) and self.quantized.orientations == serves


_parts: weakref.WeakKeyDictionary[Any, dict[int, Part]] = weakref.WeakKeyDictionary()  # by FSDPParamGroup, and shard


def _part_of(shard: Cast, sharding: Sharding) -> QuantizedTensor | None:
    """A weight's part; None if it must be quantized alone.

    The first hook of a pass quantizes all weights. Collective, as their hooks are.
    """
    parts = _parts.setdefault(sharding.group(), {})
    if next(members_of(sharding)) is shard:
        parts.clear()  # of a failed gather
        members = list(members_of(sharding))
        held = [tensor.store["values"] for tensor in members]  # in ordinary memory on all ranks or on none
        if all(type(values) is Tensor and not values.is_meta for values in held):
            made = zip(members, quantized(members), strict=True)
            parts.update((id(tensor), Part(one, *_stamp(tensor))) for tensor, one in made)
    part = parts.pop(id(shard), None)
    return part.quantized if part is not None and part.is_of(shard) else None


def send(shard: Cast, mesh: Any) -> Sent:
    """What the pre-all-gather hook returns: what a quantized weight sends. Collective if scales or blocks are."""
    sharding = registry.find(shard)
    part = _part_of(shard, sharding) if sharding is not None and sharding.is_of(shard) else None
    return send_alone(shard, mesh) if part is None else _send(shard, part, mesh)


def send_alone(shard: Cast, mesh: Any) -> Sent:
    """What a tensor sends in the current pass, quantized alone. Collective if its scales or blocks are."""
    shards.check_cuts(shard)
    return _send(shard, shard.quantize(shard.LAYOUT.serves[hooks.passing(shard)]), mesh)


def _send(shard: Cast, quantized: Any, mesh: Any) -> Sent:
    """Sends through the hook of the recipe's class."""
    registry.stand_in(quantized, shard)
    return quantized.fsdp_pre_all_gather(mesh)  # type: ignore[no-any-return]


def members_of(sharding: Sharding) -> Iterator[Cast]:
    """The cast-on-gather shards of a parameter's group, in the order of their hooks."""
    for local in map(shard_of, sharding.params_of_group()):
        if hasattr(local, "QUANTIZED") and not isinstance(local, QuantizedTensor):
            yield local


def matrix(tensor: Cast) -> Tensor:
    """The values of a shard, (rows, k), without the rows that FSDP2 pads a short one with."""
    values = tensor._plain
    return as_matrix(values, (prod(values.shape[:-1]), values.shape[-1]))


def _stamp(tensor: Cast) -> tuple[dict[str, Tensor], int, int]:
    return tensor.store, _version(tensor.store["values"]), tensor._agreed.writes


def _version(values: Tensor) -> int:
    """How often values were written. In inference mode torch does not count, and FSDP2 makes padded shards again on
    some ranks only, which must still quantize like the others."""
    return -1 if values.is_inference() else values._version


def quantized(tensors: Sequence[Cast]) -> list[QuantizedTensor]:
    """The shards of a group, quantized for the current pass: one launch for all that are alike.

    Collective if they share amaxes, or if cuts split blocks of some of them.
    """
    for tensor in tensors:
        shards.check_cuts(tensor)
    decided = decide_all(tensors, lambda at: matrix(tensors[at]))
    orientations = [tensor.LAYOUT.serves[hooks.passing(tensor)] for tensor in tensors]
    cuts = [shards.row_sharding(tensor) for tensor in tensors]
    whole = with_halos([tensor.LAYOUT for tensor in tensors], list(map(matrix, tensors)), cuts)
    kinds: dict[Any, list[int]] = defaultdict(list)
    for at, (tensor, values) in enumerate(zip(tensors, whole, strict=True)):
        kinds[tensor.QUANTIZED, orientations[at], values.dtype, values.device, values.numel() > 0].append(at)
    planes: list[dict[str, Tensor]] = [{} for _ in tensors]
    for (cls, asked, *_), members in kinds.items():
        xs, amaxes = [whole[at] for at in members], [decided[at][0] for at in members]
        made = [launch.new(cls.LAYOUT.written(x.shape[0], x.shape[1], asked), x.device) for x in xs]
        shared = [amax for amax in amaxes if amax is not None] or None
        if traced(xs[0]) or not cls.quantize_batch(xs, shared, asked, made):
            made = [operators.quantize(cls, x, amax, asked) for x, amax in zip(xs, amaxes, strict=True)]
        for at, one in zip(members, made, strict=True):
            planes[at] = one | decided[at][1]
    return [tensor.quantized(planes[at], whole[at], orientations[at], cuts[at]) for at, tensor in enumerate(tensors)]

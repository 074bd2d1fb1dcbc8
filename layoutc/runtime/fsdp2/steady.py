"""The steady state of the hooks: what the first gather of each pass works out is kept, and used again.

A gather differs from the one before in the bytes alone, as long as the shard holds the same planes in the same memory.
Then the same tensors are sent, and since FSDP2 keeps its outputs, the same views of them arrive. Any other gather goes
the way of the first one, and so does one whose hooks copy: planes that are padded or filled up, or joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layoutc.runtime.facts import PassName
from layoutc.runtime.fsdp2 import hooks, wire
from layoutc.runtime.fsdp2.wire import Arrived, Gathering
from layoutc.runtime.sharding import gathered
from layoutc.runtime.sharding.registry import Sharding, find
from layoutc.runtime.weight.tensor import QuantizedTensor

Sent = tuple[tuple[Tensor, ...], Gathering]


class Source(NamedTuple):
    """A plane of the shard, as it was when it was first sent."""

    name: str
    plane: Tensor
    address: int


class Kept(NamedTuple):
    """What is sent in a pass, and the planes that it consists of."""

    sources: tuple[Source, ...]
    own: tuple[Tensor, ...]  # views of planes, as bytes: of each what this shard sends
    tensors: tuple[Tensor, ...] | None  # what FSDP2 is given; None: in some, copies of planes are padded or filled up
    gathering: Gathering


@dataclass
class Steady:
    """What a shard sends in each pass so far."""

    sharding: Sharding
    gathered: hooks.Gathered
    passes: dict[PassName, Kept] = field(default_factory=dict)


def again(shard: QuantizedTensor) -> Sent | None:
    """What the pre-hook returns, if this gather is like the one before it; else None."""
    steady: Steady | None = shard._steady
    if steady is None or hooks.simulated():
        return None
    sharding = steady.sharding
    if not sharding.is_of(shard):
        return None
    last = steady.passes.get(hooks.pass_of(sharding, steady.gathered))
    if last is None or last.tensors is None or not unchanged(shard, sharding.param(), last.sources):
        return None
    gathering = last.gathering
    if gathering.shared and hooks.keeps_codes(shard, sharding):
        gathering = replace(gathering, shared=wire.copies(gathering.shared))
    return last.tensors, gathering


def unchanged(shard: QuantizedTensor, param: Any, sources: tuple[Source, ...]) -> bool:
    """True if the shard of an FSDPParam would send the memory that it has sent."""
    planes, writes = shard.store.planes, shard.store.writes
    if writes.waiting or (writes.initial is not None and not gathered.trains(param)):
        return False  # the second: it has been frozen, and `begin` frees them
    return all(planes.get(name) is plane and plane.data_ptr() == address for name, plane, address in sources)


def kept(shard: QuantizedTensor, which: PassName) -> Kept | None:
    """What a shard sends in a pass, as long as its planes stay in place; None if they do not lie in one piece."""
    return None if shard._steady is None else shard._steady.passes.get(which)


def sent(shard: QuantizedTensor, tensors: tuple[Tensor, ...], gathering: Gathering) -> Sent:
    """What the pre-hook returns, for the first time: kept if it consists of views of the shard's own planes, or of
    these padded or filled up."""
    tensors, gathering = wire.send(tensors, gathering)
    sharding = None if hooks.simulated() else find(shard)
    if sharding is None or sharding.dim or not sharding.is_of(shard):
        return tensors, gathering
    names = shard.LAYOUT.travels[gathering.which]
    planes = [shard.store.planes[name] for name in names]
    entries = [shard.entries(name) for name in names]
    if all(map(Tensor.is_contiguous, entries)):
        own = tuple([one.reshape(-1).view(torch.uint8) for one in entries])
        gathering.before = Arrived()
        shared = {name: shard.store.planes[name] for name in gathering.shared}
        held = {**dict(zip(names, planes, strict=True)), **shared}
        sources = tuple(Source(name, plane, plane.data_ptr()) for name, plane in held.items())
        every = (*tensors, *gathering.alone)
        as_they_are = all(map(_is_view, every, planes))  # nobody reads what is in slots after them
        if shard._steady is None or shard._steady.sharding is not sharding:
            shard._steady = Steady(sharding, hooks.gathered_of(sharding))
        given = tensors if as_they_are else None
        shard._steady.passes[gathering.which] = Kept(sources, own, given, replace(gathering, shared=shared))
    return tensors, gathering


def _is_view(one: Tensor, plane: Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == plane.untyped_storage()._cdata)


def arrived(shard: hooks.Gatherable, out: Tensor | None, gathering: Gathering, outputs: Sequence[Tensor]) -> bool:
    """Gives a gathered weight its planes, if they arrived where those of the gather before did; False otherwise.

    Views follow their storage when FSDP2 frees it and allocates it anew, so equal addresses mean the same storage.
    """
    before = gathering.before
    if before is None:
        return False
    as_they_are = all(leg.joined is None for leg in gathering.route.legs.values())
    if out is not None and as_they_are and before.planes and all(map(_same_memory, outputs, before.outputs)):
        hooks.deliver(shard, before.planes | gathering.shared, out)
        return True
    before.outputs, before.planes = tuple(outputs), {}  # `finish` has the planes, if it gets that far
    return False


def _same_memory(one: Tensor, other: Tensor) -> bool:
    address = one.data_ptr()
    return address == other.data_ptr() and address != 0

"""Weights that are dequantized on gather travel together: all planes of a group in one tensor, which stays in one.

The pre-all-gather hook of the first weight sends the planes of all, one after another; the others send nothing. FSDP2
then handles one tensor in place of two or three for each weight. What arrives has each rank's planes in a row, and is
dequantized from where it lies. Each rank decides by what is equal on all: recipes, shapes, and how they are cut.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from operator import is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layoutc.runtime.fsdp2 import hooks, on_gather
from layoutc.runtime.fsdp2.wire import Gathering, Leg, Route
from layoutc.runtime.sharding import gathered
from layoutc.runtime.sharding.registry import Sharding, find
from layoutc.runtime.torch_private import foreach_copy_
from layoutc.runtime.weight.planes import Parts
from layoutc.runtime.weight.tensor import QuantizedTensor

Sent = tuple[tuple[Tensor, ...], Any]
_ALIGNED = 16  # bytes that kernels move at a time


class Slot(NamedTuple):
    """Where a plane lies in what each rank sends."""

    name: str
    start: int  # in bytes
    leg: Leg


@dataclass
class Member:
    """A weight of a pack."""

    param: weakref.ref[Any]  # FSDPParam
    slots: tuple[Slot, ...]
    parts: Parts
    gathering: Gathering | None = None  # of the gather that goes on
    planes: dict[str, Tensor] = field(default_factory=dict)  # of the first rank, where the last gather left them


@dataclass
class Pack:
    """The weights of a group that travel together."""

    members: list[Member]
    nbytes: int  # that each rank sends
    sent: list[Tensor] = field(default_factory=list)  # what was sent last, if those are shards' own planes
    sources: list[Tensor] = field(default_factory=list)  # the same, of one dim
    output: Tensor | None = None  # what arrived last


class Packed(NamedTuple):
    """The metadata of a weight that travels in a pack."""

    pack: Pack
    number: int


_packs: weakref.WeakKeyDictionary[Any, Pack | None] = weakref.WeakKeyDictionary()  # by FSDPParamGroup
_packing: ContextVar[bool] = ContextVar("layoutc_packing", default=False)  # while the first weight asks the others


# ---------------------------------------------------------------------------------------------------------------- hooks
def send(shard: Any, mesh: Any) -> Sent | None:
    """What the pre-all-gather hook of a shard returns, if it travels in a pack; else None."""
    if not on_gather.leaves_values(shard) or _packing.get() or hooks.simulated():
        return None
    sharding = find(shard)
    if sharding is None or not sharding.is_of(shard):
        return None
    owner, param = sharding.group(), sharding.param()
    if owner not in _packs:
        _packs[owner] = _pack_of(sharding)
    pack = _packs[owner]
    number = -1 if pack is None else next((at for at, one in enumerate(pack.members) if one.param() is param), -1)
    if pack is None or number < 0:
        return None
    return ((_planes_of_all(pack, mesh),) if number == 0 else ()), Packed(pack, number)


def arrive(shard: Any, outputs: Sequence[Tensor], packed: Packed, dtype: torch.dtype, out: Tensor | None) -> Any:
    """What the post-all-gather hook of a shard in a pack returns: as hooks.finish."""
    pack, number = packed
    member = pack.members[number]
    if number == 0:
        _take_apart(pack, outputs[0])
    assert member.gathering is not None
    values = None
    if out is None:
        assert pack.output is not None
        values = hooks.new_values(shard, member.gathering.route, dtype, pack.output.device)
    hooks.deliver(shard, member.planes | member.gathering.shared, out, member.parts)
    return None if values is None else (values, (values,))


def forget(sharding: Sharding) -> None:
    """Has the group of a weight decide anew what travels together."""
    pack = _packs.pop(sharding.group(), None)
    for member in [] if pack is None else pack.members:
        gathered.forget_outputs(member.param())


# ------------------------------------------------------------------------------------------------------------- one pack
def _pack_of(sharding: Sharding) -> Pack | None:
    """The pack of a weight's group; None if fewer than two weights can travel together."""
    members, start = [], 0
    for param in sharding.params_of_group():
        if not on_gather.is_awaited(param):
            continue
        own = find(gathered.shard_of(param))
        route = None if own is None else hooks.route_of(own, gathered.shard_of(param))
        if own is None or route is None or not _fits(param, own, route):
            continue
        sizes = [leg.sent * leg.width for leg in route.legs.values()]
        starts = accumulate(sizes, initial=start)
        slots = tuple([Slot(name, at, leg) for (name, leg), at in zip(route.legs.items(), starts, strict=False)])
        members.append(Member(weakref.ref(param), slots, Parts(route.world, prod(own.padded_shape[:-1]), 0)))
        start += sum(sizes)
    if len(members) < 2:
        return None
    for member in members:
        member.parts = member.parts._replace(nbytes=start)
    return Pack(members, start)


def _fits(param: Any, sharding: Sharding, route: Route) -> bool:
    """True if each rank sends whole blocks of rows, and planes of multiples of 16 bytes, of a shard on the device."""
    if route.world == 1 or sharding.dim or route.slots or gathered.is_offloaded(param):
        return False
    return all(leg.joined is None and leg.sent * leg.width % _ALIGNED == 0 for leg in route.legs.values())


def _planes_of_all(pack: Pack, mesh: Any) -> Tensor:
    """The planes of all members, by the hooks of each."""
    token = _packing.set(True)
    try:
        sent: list[Tensor] = []
        for member in pack.members:
            tensors, member.gathering = gathered.shard_of(member.param()).fsdp_pre_all_gather(mesh)
            sent.extend(tensors)
    finally:
        _packing.reset(token)
    sources = pack.sources
    if len(sent) != len(pack.sent) or any(map(is_not, sent, pack.sent)):
        sources = [one.reshape(-1) for one in sent]
        if all(isinstance(gathered.shard_of(one.param()), QuantizedTensor) for one in pack.members):
            pack.sent, pack.sources = sent, sources  # views of shards; what was cast is sent once
    made = torch.empty(pack.nbytes, dtype=torch.uint8, device=sent[0].device)
    foreach_copy_(list(torch.split_with_sizes(made, [one.numel() for one in sources])), sources)
    return made


def _take_apart(pack: Pack, output: Tensor) -> None:
    """Gives members views of what has arrived; they follow its storage, which FSDP2 frees and allocates anew."""
    before = pack.output
    if before is not None and before.data_ptr() == output.data_ptr() != 0:
        return
    pack.output = output
    for member in pack.members:
        member.planes = {}
        for name, start, leg in member.slots:
            plane = output[start : start + leg.sent * leg.width].view(leg.sent, leg.width)
            member.planes[name] = plane if leg.dtype == torch.uint8 else plane.view(leg.dtype)

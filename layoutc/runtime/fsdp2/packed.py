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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from layoutc.runtime.captures import capturing
from layoutc.runtime.fsdp2 import hooks, on_gather, steady
from layoutc.runtime.fsdp2.wire import Gathering, Leg, Route
from layoutc.runtime.parts import Parts
from layoutc.runtime.sharding import gathered
from layoutc.runtime.sharding.registry import Sharding, find
from layoutc.runtime.torch_private import foreach_copy_
from layoutc.runtime.weight.tensor import QuantizedTensor

if TYPE_CHECKING:
    from layoutc.runtime.kernels.reading import Launch

Sent = tuple[tuple[Tensor, ...], Any]
_ALIGNED = 16  # bytes that kernels move at a time
_MOST = 16  # places that a pack has lain in, whose launches are kept


class Slot(NamedTuple):
    """Where a plane lies in what each rank sends."""

    name: str
    start: int  # in bytes
    leg: Leg


@dataclass
class Member:
    """A weight of a pack."""

    recipe: type[QuantizedTensor]
    param: weakref.ref[Any]  # FSDPParam
    gathered: hooks.Gathered  # has the values, (m, k), which gathers write
    slots: tuple[Slot, ...]
    parts: Parts
    gathering: Gathering | None = None  # of the gather that goes on
    sent: tuple[weakref.ref[Any], tuple[steady.Source, ...]] | None = None  # the shard, and the planes that it sent
    planes: dict[str, Tensor] = field(default_factory=dict)  # of the first rank, where gathers leave them; and shared


@dataclass
class Pack:
    """The weights of a group that travel together."""

    members: list[Member]
    nbytes: int  # that each rank sends
    is_all: bool  # no other weight of the group is dequantized on gather
    sources: list[Tensor] = field(default_factory=list)  # what was sent last, of one dim, if that is shards' own planes
    output: Tensor | None = None  # what arrived last: FSDP2 frees its storage, and allocates it anew
    launches: dict[tuple[int, ...], list[Launch]] = field(default_factory=dict)  # by where all of it lies


class Packed(NamedTuple):
    """The metadata of a weight that travels in a pack, which its shard keeps."""

    pack: Pack
    number: int  # ALONE: it fits into no pack, or its gathers leave codes
    gathered: hooks.Gathered


ALONE = -1
_NO_PACK = Pack([], 0, False)
_packing: ContextVar[bool] = ContextVar("layoutc_packing", default=False)  # while the first weight asks the others


# ---------------------------------------------------------------------------------------------------------------- hooks
def send(shard: Any, mesh: Any) -> Sent | None:
    """What the pre-all-gather hook of a shard returns, if it travels in a pack; else None."""
    packed: Packed | None = shard._packed
    if packed is None and (packed := _join(shard)) is None:
        return None
    if packed.number == ALONE or _packing.get():
        on_gather.check_unwritten(shard, packed.gathered.values)
        return None
    return ((_planes_of_all(packed.pack, mesh),) if packed.number == 0 else ()), packed


def is_packing() -> bool:
    """True while the first weight of a pack asks the others for what they send."""
    return _packing.get()


def arrive(shard: Any, outputs: Sequence[Tensor], packed: Packed, dtype: torch.dtype, out: Tensor | None) -> Any:
    """What the post-all-gather hook of a shard in a pack returns: as hooks.finish."""
    pack, number = packed.pack, packed.number
    member = pack.members[number]
    if number == 0:
        _take_apart(pack, outputs[0])
    made = None
    if out is None:
        assert member.gathering is not None
        assert pack.output is not None
        made = hooks.new_values(shard, member.gathering.route, dtype, pack.output.device)
    if not pack.is_all:
        hooks.deliver(shard, member.planes, out, member.parts)
    elif number == len(pack.members) - 1:
        _dequantize(pack)
    return None if made is None else (made, (made,))


# ------------------------------------------------------------------------------------------------------------- one pack
def _join(shard: Any) -> Packed | None:
    """The place of a shard that has none yet: a new one, or one that has taken the place of another."""
    if _packing.get() or hooks.simulated():
        return None
    sharding = find(shard)
    if sharding is None or not sharding.is_of(shard):
        return None
    if not on_gather.is_awaited(sharding.param()):
        shard._packed = Packed(_NO_PACK, ALONE, hooks.gathered_of(sharding))
        return None
    awaited = [param for param in sharding.params_of_group() if on_gather.is_awaited(param)]
    shards = [gathered.shard_of(param) for param in awaited]
    known = next((one._packed.pack for one in shards if one._packed and one._packed.number != ALONE), None)
    pack = _pack_of(awaited) if known is None else known
    numbers = {id(member.param()): number for number, member in enumerate(pack.members)}
    for one, param in zip(shards, awaited, strict=True):
        own = find(one)
        assert own is not None
        one._packed = Packed(pack, numbers.get(id(param), ALONE), hooks.gathered_of(own))
    found: Packed = shard._packed
    return found


def _pack_of(awaited: Sequence[Any]) -> Pack:
    """The pack of a group's weights; an empty one if fewer than two can travel together."""
    members, start = [], 0
    for param in awaited:
        shard = gathered.shard_of(param)
        own = find(shard)
        if own is None or not _fits(param, own, route := hooks.route_of(own, shard)):
            continue
        sizes = [leg.sent * leg.width for leg in route.legs.values()]
        starts = accumulate(sizes, initial=start)
        slots = tuple([Slot(name, at, leg) for (name, leg), at in zip(route.legs.items(), starts, strict=False)])
        rows = prod(own.padded_shape[:-1])
        state = hooks.gathered_of(own)
        members.append(Member(shard.QUANTIZED, weakref.ref(param), state, slots, Parts(route.world, rows, 0)))
        start += sum(sizes)
    for member in members:
        member.parts = member.parts._replace(nbytes=start)
    pack = Pack(members if len(members) > 1 else [], start, len(members) == len(awaited))
    for member in pack.members:
        member.gathered.launches = pack.launches
    return pack


def _fits(param: Any, sharding: Sharding, route: Route) -> bool:
    """True if each rank sends whole blocks of rows, and planes of multiples of 16 bytes, of a shard on the device."""
    if route.world == 1 or sharding.dim or route.slots or gathered.is_offloaded(param):
        return False
    return all(leg.joined is None and leg.sent * leg.width % _ALIGNED == 0 for leg in route.legs.values())


def _planes_of_all(pack: Pack, mesh: Any) -> Tensor:
    """The planes of all members, one after another: those of the last gather, where they lie, or by all their hooks."""
    sources = pack.sources
    if not sources or not all(map(_sends_the_same, pack.members)):
        sources = _by_hooks(pack, mesh)
    made = torch.empty(pack.nbytes, dtype=torch.uint8, device=sources[0].device)
    foreach_copy_(list(torch.split_with_sizes(made, [one.numel() for one in sources])), sources)
    return made


def _sends_the_same(member: Member) -> bool:
    """True if the shard would send the memory that it sent in the last gather, as `steady.again` asks it."""
    param: Any = member.param()
    if member.sent is None:
        return False
    shard: Any = member.sent[0]()
    if gathered.shard_of(param) is not shard:
        return False
    if (values := member.gathered.values) is not None and values._version:  # written, which the hooks refuse
        return False
    return steady.unchanged(shard, param, member.sent[1])


def _by_hooks(pack: Pack, mesh: Any) -> list[Tensor]:
    """What the hooks of all members send, as tensors of one dim."""
    sources: list[Tensor] = []
    token = _packing.set(True)
    try:
        for member in pack.members:
            shard = gathered.shard_of(member.param())
            tensors, gathering = shard.fsdp_pre_all_gather(mesh)
            sources += [one.reshape(-1) for one in tensors]
            member.gathering = gathering
            member.planes.update(gathering.shared)
            own = steady.sources(shard, gathering.which) if isinstance(shard, QuantizedTensor) else None
            member.sent = None if own is None else (weakref.ref(shard), own)
    finally:
        _packing.reset(token)
    pack.sources = sources if all(member.sent is not None for member in pack.members) else []
    return sources


def _take_apart(pack: Pack, output: Tensor) -> None:
    """Gives members views of what has arrived, which follow its storage."""
    before = pack.output
    if before is not None and before.data_ptr() == output.data_ptr() != 0:
        return
    pack.output = output
    for member in pack.members:
        for name, start, leg in member.slots:
            plane = output[start : start + leg.sent * leg.width].view(leg.sent, leg.width)
            member.planes[name] = plane if leg.dtype == torch.uint8 else plane.view(leg.dtype)


def _dequantize(pack: Pack) -> None:
    """Writes the values of all members: by the launches of an earlier gather, if all of it lay where it lies now."""
    output = pack.output
    assert output is not None
    places = [output.data_ptr()]
    for member in pack.members:
        places.append(member.gathered.values.data_ptr())  # type: ignore[union-attr]
        places += [plane.data_ptr() for plane in member.gathering.shared.values()]  # type: ignore[union-attr]
    if output.device.type == "cuda":
        places.append(torch.cuda.current_stream(output.device).cuda_stream)
    key = tuple(places)
    launches = None if capturing(output.device) else pack.launches.get(key)
    if launches is not None:
        for launched, tensors in launches:
            launched(*tensors)
    else:
        _dequantize_anew(pack, key)
    gathered.free_outputs([pack.members[0].param()])


def _dequantize_anew(pack: Pack, key: tuple[int, ...]) -> None:
    arrivals = []
    for member in pack.members:
        values = member.gathered.values
        assert values is not None
        arrivals.append(on_gather.Arrival(member.recipe, member.planes, values, member.parts))
    made = on_gather.dequantize_all(arrivals)
    if made is not None:
        if len(pack.launches) >= _MOST:
            pack.launches.clear()
        pack.launches[key] = made

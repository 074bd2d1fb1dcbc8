"""Weights that are dequantized on gather travel together: all planes of a group in one tensor, which stays in one.

The pre-all-gather hook of the first weight sends the planes of all, one after another; the others send nothing. FSDP2
then handles one tensor in place of two or three for each weight. What arrives has each rank's planes in a row, and is
dequantized from where it lies. Each rank decides by what is equal on all: recipes, shapes, and how they are cut.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layoutc.runtime import product_mode
from layoutc.runtime.fsdp2 import hooks, on_gather
from layoutc.runtime.fsdp2.pack import Member, Pack, Slot, is_filling
from layoutc.runtime.parts import Parts
from layoutc.runtime.product_mode import Settings
from layoutc.runtime.sharding import gathered, values_or_codes
from layoutc.runtime.sharding.registry import Sharding, find
from layoutc.runtime.torch_private import say_changed

Sent = tuple[tuple[Tensor, ...], Any]


class Packed(NamedTuple):
    """The metadata of a weight that travels in a pack, which its shard keeps."""

    pack: Pack
    number: int  # ALONE: it fits into no pack, or its gathers leave codes
    gathered: hooks.Gathered
    mode: Settings  # of all weights, when it was decided what gathers leave


ALONE = -1
_NO_PACK = Pack([], 0, False)


# ---------------------------------------------------------------------------------------------------------------- hooks
def send(shard: Any, mesh: Any) -> Sent | None:
    """What the pre-all-gather hook of a shard returns, if it travels in a pack; else None."""
    packed: Packed | None = shard._packed
    if (packed is None or _is_of_another_mode(shard, packed)) and (packed := _join(shard)) is None:
        return None
    if packed.number == ALONE or is_filling():
        on_gather.check_unwritten(shard, packed.gathered.values)
        return None
    if packed.number:
        return (), packed
    sent = torch.empty(packed.pack.nbytes, dtype=torch.uint8, device=shard.device)
    packed.pack.fill(sent, lambda: mesh)
    return (sent,), packed


def arrive(shard: Any, outputs: Sequence[Tensor], packed: Packed, dtype: torch.dtype, out: Tensor | None) -> Any:
    """What the post-all-gather hook of a shard in a pack returns: as hooks.finish."""
    pack, number = packed.pack, packed.number
    member = pack.members[number]
    if number == 0:
        pack.received = outputs[0]
    assert pack.received is not None
    made = None
    if out is None:
        assert member.gathering is not None
        made = hooks.new_values(shard, member.gathering.route, dtype, pack.received.device)
    if not pack.is_all:
        hooks.deliver(shard, member.planes(pack.received, 0), out, member.parts)
    elif number == len(pack.members) - 1:
        pack.arrive(pack.received, 0, pack.nbytes)
        gathered.free_outputs([pack.members[0].param()])
    return None if made is None else (made, (made,))


def _is_of_another_mode(shard: Any, packed: Packed) -> bool:
    """True if what gathers leave must be decided anew, which gathers for forward do."""
    if packed.mode == product_mode.current():
        return False
    sharding = find(shard)
    return sharding is not None and not sharding.gathers_for_backward


# ------------------------------------------------------------------------------------------------------------- one pack
def _join(shard: Any) -> Packed | None:
    """The place of a shard that has none yet, as one that has taken the place of another, or that was found under
    another mode of all weights."""
    if is_filling() or hooks.simulated():
        return None
    sharding = find(shard)
    if sharding is None or not sharding.is_of(shard):
        return None
    values_or_codes.decide(sharding)
    decision = gathered.decision_of(sharding.param())
    assert decision is not None
    mode = decision.mode
    if not on_gather.is_awaited(sharding.param()):
        shard._packed = Packed(_NO_PACK, ALONE, hooks.gathered_of(sharding), mode)
        _carry_codes(sharding)
        return None
    awaited = [param for param in sharding.params_of_group() if on_gather.is_awaited(param)]
    shards = [gathered.shard_of(param) for param in awaited]
    known = next((one._packed.pack for one in shards if one._packed and one._packed.number != ALONE), None)
    pack = _pack_of(awaited, sharding.group()) if known is None else known
    numbers = {id(member.param()): number for number, member in enumerate(pack.members)}
    for one, param in zip(shards, awaited, strict=True):
        own = find(one)
        assert own is not None
        one._packed = Packed(pack, numbers.get(id(param), ALONE), hooks.gathered_of(own), mode)
    found: Packed = shard._packed
    return found


def _pack_of(awaited: Sequence[Any], group: Any) -> Pack:
    """The pack of a group's weights; an empty one if fewer than two can travel together."""
    members, start = [], 0
    for param in awaited:
        shard = gathered.shard_of(param)
        own = find(shard)
        if own is None or not values_or_codes.fits(param, own, shard):
            continue
        route = hooks.route_of(own, shard)
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
    if pack.members and pack.is_all:
        _carry(group, pack, pack.members[0].param())
    return pack


def _carry_codes(sharding: Sharding) -> None:
    """Has a group whose gathers leave codes gather in few steps, once its first quantized weight is asked."""
    params = [param for param in sharding.params_of_group() if hasattr(gathered.shard_of(param), "QUANTIZED")]
    if params[0] is sharding.param() and not any(map(on_gather.is_awaited, params)):
        _carry(sharding.group(), None, params[0])


def _carry(group: Any, pack: Pack | None, leader: Any) -> None:
    """Has a group gather in fewer steps than FSDP2 takes."""
    try:
        from layoutc.runtime.fsdp2 import steady_group
    except ImportError as error:
        say_changed(str(error), "gathers and reductions")
        return
    steady_group.carry(group, pack, leader)

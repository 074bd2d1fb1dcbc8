"""How planes travel through an all-gather: from a shard as bytes, and back as planes of the whole weight.

Usually nothing is copied: the bytes of all ranks, in rank order, are the plane. A copy is needed in three cases: a cut
falls inside a block (ranks on both sides send its scale, and one of them is picked), a plane has fewer bytes than that
of the other pass (FSDP2 allocates outputs once, so it is padded), or a dim other than the first is sharded. Such planes
are joined in tensors that FSDP2 frees and allocates together with its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from layoutc.ints.cuts import Cuts, picks
from layoutc.runtime.facts import Layout, PassName
from layoutc.runtime.quantize.block_edges import as_bytes, padded_rows
from layoutc.runtime.torch_private import keeping_version
from layoutc.runtime.weight.tensor import QuantizedTensor


class Leg(NamedTuple):
    """How one plane travels in a pass. Sizes are in rows and bytes of the plane."""

    sent: int  # rows that each rank sends
    width: int  # bytes of each such row
    rows: int  # rows of the whole weight's plane
    dtype: torch.dtype
    chosen: tuple[int, ...] | None  # which received rows make up the plane; None: the first ones, in order
    joined: tuple[int, int] | None  # (rows, bytes of a row) of a plane that must be copied together; None: it is a view
    runs: int  # if a dim other than the first is sharded: a rank's runs of adjacent bytes in the whole plane


class Route(NamedTuple):
    """How the planes of a weight travel in a pass, the same on every rank."""

    which: PassName
    world: int
    matrix: tuple[int, int]  # (m, k) of the whole weight
    shape: tuple[int, ...]
    legs: Mapping[str, Leg]
    slots: tuple[int, ...]  # bytes of each slot, if the passes' planes differ in size


@lru_cache(maxsize=4096)
def route_for(
    layout: Layout,
    which: PassName,
    world: int,
    shape: tuple[int, ...],
    rows: int,
    k: int,
    dim: int,
    always: bool = False,
) -> Route:
    """The route of a weight of `shape` in a pass. rows, k: of a padded shard's matrix. dim: the sharded one. always:
    all gathers are of this pass, so slots need no room for the other one."""
    cuts = Cuts(rows, rows, 1) if dim else Cuts(prod(shape[:-1]), rows, world)
    sent, slots = layout.sent(which, cuts, k), () if always else layout.slots(which, cuts, k)
    whole, legs = layout.planes(prod(shape[:-1]), shape[-1]), {}
    for number, (name, facts) in enumerate(sent.items()):
        width = prod(facts.shape[1:]) * facts.dtype.itemsize
        chosen = picks(cuts, layout.stored[name].rows_per_value or 1)
        joined, runs = None, 1
        if dim:
            joined = whole[name].shape[0], prod(whole[name].shape[1:]) * facts.dtype.itemsize
            runs = joined[0] if dim == len(shape) - 1 else prod(shape[:dim])
        elif chosen is not None:
            joined = len(chosen), width
        elif slots and slots[number] != facts.nbytes:
            joined = world * facts.shape[0], width
        legs[name] = Leg(facts.shape[0], width, whole[name].shape[0], facts.dtype, chosen, joined, runs)
    return Route(which, world, (prod(shape[:-1]), shape[-1]), shape, legs, slots)


@dataclass
class Gathering:
    """What the pre-all-gather hook hands to the other; equal on all ranks except for `alone` and `joined`."""

    route: Route
    shared: dict[str, Tensor] = field(default_factory=dict)  # planes that all ranks have
    alone: tuple[Tensor, ...] = ()  # planes that a group of one rank does not send
    joined: dict[str, Tensor] = field(default_factory=dict)  # planes that are copied together, by name


def outgoing(shard: QuantizedTensor, gathering: Gathering, name: str) -> Tensor:
    """A plane of a shard as it is sent: uint8 (rows, bytes of a row), padded with zeros to the same size on all ranks.

    If a cut falls inside a block, the ranks on both sides send the block's scale. A view unless rows had to be padded.
    """
    return as_bytes(padded_rows(shard, name, gathering.route.legs[name].sent))


def send(planes: tuple[Tensor, ...], gathering: Gathering) -> tuple[tuple[Tensor, ...], Gathering]:
    """What the pre-all-gather hook returns: the tensors to gather, and the metadata.

    In a group of one rank FSDP2 hands back only the first tensor, so the others go into the metadata.
    """
    if gathering.route.slots:
        planes = filled(planes, gathering.route.slots)
    if gathering.route.world == 1:
        gathering.alone = planes[1:]
        return planes[:1], gathering
    return planes, gathering


def filled(planes: tuple[Tensor, ...], slots: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Planes in slots of fixed sizes in bytes. Planes smaller than their slot are padded with zeros.

    A slot that only the other pass fills is a view of the first plane, which nothing reads.
    """
    made = []
    for slot, nbytes in enumerate(slots):
        plane = planes[slot] if slot < len(planes) else planes[0].reshape(-1)[:nbytes]
        if plane.numel() != nbytes:
            buffer = planes[0].new_zeros(nbytes)
            buffer[: plane.numel()] = plane.reshape(-1)
            plane = buffer
        made.append(plane)
    return tuple(made)


def arrived(gathering: Gathering, name: str, received: Tensor) -> Tensor:
    """A plane of the whole weight, in its own dtype, from the bytes of all ranks."""
    leg, world = gathering.route.legs[name], gathering.route.world
    if leg.joined is not None:
        plane = _joined(gathering, name, leg, received.device)
        sent = received.view(world, -1)[:, : leg.sent * leg.width]
        with keeping_version(plane):
            if leg.chosen is not None:
                torch.index_select(sent.reshape(-1, leg.width), 0, _index(leg.chosen, received.device), out=plane)
            elif leg.runs > 1:
                plane.view(leg.runs, world, -1).copy_(sent.view(world, leg.runs, -1).transpose(0, 1))
            else:
                plane.view(world, -1).copy_(sent)
    return place_of(gathering, name, received)


def place_of(gathering: Gathering, name: str, received: Tensor) -> Tensor:
    """The memory of a whole plane after `arrived`: the received bytes, or a joined tensor."""
    leg = gathering.route.legs[name]
    is_whole = leg.joined is None
    plane = received.view(-1, leg.width) if is_whole else _joined(gathering, name, leg, received.device)
    plane = plane if plane.shape[0] == leg.rows else plane[: leg.rows]
    return plane if leg.dtype == torch.uint8 else plane.view(leg.dtype)


def _joined(gathering: Gathering, name: str, leg: Leg, device: torch.device) -> Tensor:
    if name not in gathering.joined:
        assert leg.joined is not None
        with torch.inference_mode(False):  # training writes it too, even if inference gathers first
            gathering.joined[name] = torch.empty(leg.joined, dtype=torch.uint8, device=device)
    return gathering.joined[name]


@lru_cache(maxsize=1024)
def _index(chosen: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(chosen, device=device)


def to_be_freed(gathering: Gathering, passes: Sequence[Route], device: torch.device) -> tuple[Tensor, ...]:
    """The tensors that planes are joined in, of all passes: FSDP2 asks only once which tensors to free."""
    for other in passes:
        for name, leg in other.legs.items():
            if leg.joined is not None:
                _joined(gathering, name, leg, device)
    return tuple(gathering.joined.values())

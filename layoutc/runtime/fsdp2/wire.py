"""How planes travel through an all-gather: out of a shard as bytes, and back as planes of the whole weight.

A plane whose rows are the weight's own arrives as it is: what all ranks have sent, in rank order, is the plane, and
nothing is copied. Three things make a copy necessary: a cut inside a block (ranks on both sides send its scale, and one
is taken), a pass whose planes have fewer bytes than the other pass's (FSDP2 allocates outputs once), and shards of
another dim than the first. Such planes are put together in tensors that FSDP2 frees and allocates with its own.
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
from layoutc.runtime.torch_private import keeping_version
from layoutc.runtime.weight.tensor import QuantizedTensor


class Leg(NamedTuple):
    """How one plane travels in a pass."""

    sent: int  # rows that each rank sends
    width: int  # bytes of a row that is sent
    rows: int  # rows of the plane of the whole weight
    dtype: torch.dtype
    chosen: tuple[int, ...] | None  # which of the rows that arrive make the plane; None: the first ones
    joined: tuple[int, int] | None  # (rows, bytes of a row) of what has to be put together; None: a view will do
    runs: int  # of adjacent bytes in which a rank's rows lie in the whole, where another dim than the first is cut


class Route(NamedTuple):
    """How the planes of a weight travel in a pass, the same on every rank."""

    which: PassName
    world: int
    matrix: tuple[int, int]  # (m, k) of the whole weight
    shape: tuple[int, ...]
    legs: Mapping[str, Leg]
    slots: tuple[int, ...]  # bytes of each slot, where the passes' planes differ in bytes


@lru_cache(maxsize=4096)
def route(layout: Layout, which: PassName, world: int, shape: tuple[int, ...], rows: int, k: int, dim: int) -> Route:
    """shape: of the whole weight. rows, k: matrix rows and columns of a padded shard. dim: the one that is sharded."""
    cuts = Cuts(rows, rows, 1) if dim else Cuts(prod(shape[:-1]), rows, world)
    sent, slots = layout.sent(which, cuts, k), layout.slots(which, cuts, k)
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
    """What the pre-all-gather hook tells the post-all-gather hook. Equal on all ranks but for `alone`."""

    route: Route
    shared: dict[str, Tensor] = field(default_factory=dict)
    alone: tuple[Tensor, ...] = ()  # what does not travel in a group of one rank
    joined: dict[str, Tensor] = field(default_factory=dict)  # planes that are no gather outputs, by name

    @property
    def which(self) -> PassName:
        """The pass."""
        return self.route.which


def wire(shard: QuantizedTensor, gathering: Gathering, name: str) -> Tensor:
    """A plane as it travels: bytes, as many rows from each rank, zeros after those of a short shard.

    Of blocks that a cut goes through, the ranks on both sides send what the block's rows share. A view where nothing is
    short.
    """
    plane, rows = shard._entries(name), gathering.route.legs[name].sent
    if plane.shape[0] != rows:
        full = plane.new_zeros(rows, *plane.shape[1:])
        full[: plane.shape[0]] = plane
        plane = full
    if plane.dtype == torch.uint8 and plane.is_contiguous():
        return plane
    # Flat before it becomes bytes: a dim of one entry may have any stride and still be contiguous.
    return plane.reshape(-1).view(torch.uint8).view(plane.shape[0], plane.shape[1] * plane.element_size())


def send(planes: tuple[Tensor, ...], gathering: Gathering) -> tuple[tuple[Tensor, ...], Gathering]:
    """What the pre-all-gather hook returns.

    In a group of one rank FSDP2 hands back the first tensor alone, so the others, which need no gather there, go along
    as metadata.
    """
    if gathering.route.slots:
        planes = _fill(planes, gathering.route.slots)
    if gathering.route.world == 1:
        gathering.alone = planes[1:]
        return planes[:1], gathering
    return planes, gathering


def _fill(planes: tuple[Tensor, ...], slots: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Planes in slots of fixed bytes, zeros after each."""
    filled = []
    for slot, nbytes in enumerate(slots):
        buffer = planes[0].new_zeros(nbytes)
        if slot < len(planes):
            buffer[: planes[slot].numel()] = planes[slot].reshape(-1)
        filled.append(buffer)
    return tuple(filled)


def receive(outputs: Sequence[Tensor], gathering: Gathering) -> tuple[Tensor, ...]:
    """All slots that travelled, in order: bytes of all ranks."""
    return (*outputs, *gathering.alone)


def arrived(gathering: Gathering, name: str, received: Tensor) -> Tensor:
    """A plane of the whole weight, from the bytes of all ranks."""
    leg, world = gathering.route.legs[name], gathering.route.world
    if leg.joined is None:
        plane = received.view(world * leg.sent, leg.width)
    else:
        plane = _joined(gathering, name, leg, received.device)
        sent = received.view(world, -1)[:, : leg.sent * leg.width]
        with keeping_version(plane):
            if leg.chosen is not None:
                torch.index_select(sent.reshape(-1, leg.width), 0, _index(leg.chosen, received.device), out=plane)
            elif leg.runs > 1:
                plane.view(leg.runs, world, -1).copy_(sent.view(world, leg.runs, -1).transpose(0, 1))
            else:
                plane.view(world, -1).copy_(sent)
    if plane.shape[0] != leg.rows:
        plane = plane[: leg.rows]
    return plane if leg.dtype == torch.uint8 else plane.view(leg.dtype)


def _joined(gathering: Gathering, name: str, leg: Leg, device: torch.device) -> Tensor:
    if name not in gathering.joined:
        assert leg.joined is not None
        gathering.joined[name] = torch.empty(leg.joined, dtype=torch.uint8, device=device)
    return gathering.joined[name]


@lru_cache(maxsize=1024)
def _index(chosen: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(chosen, device=device)


def to_be_freed(gathering: Gathering, passes: Sequence[Route], device: torch.device) -> tuple[Tensor, ...]:
    """All tensors that planes are put together in, in any pass: FSDP2 asks once which it shall free."""
    for other in passes:
        for name, leg in other.legs.items():
            if leg.joined is not None:
                _joined(gathering, name, leg, device)
    return tuple(gathering.joined.values())

"""The planes of a group's weights in one tensor: what fills it, and what writes values from where it has arrived.

What stays the same from gather to gather is kept: where planes lie in a shard, the launch that copies them, and the
launches that dequantize, by the addresses of all that they read and write.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from layoutc.runtime.captures import capturing
from layoutc.runtime.fsdp2 import hooks, on_gather, steady
from layoutc.runtime.fsdp2.wire import Gathering, Leg
from layoutc.runtime.kernels.copies import WORD, as_words, copies_in
from layoutc.runtime.parts import Parts
from layoutc.runtime.sharding import gathered
from layoutc.runtime.streams import stream_of
from layoutc.runtime.torch_private import foreach_copy_
from layoutc.runtime.weight.tensor import QuantizedTensor

if TYPE_CHECKING:
    from layoutc.runtime.kernels.direct import LaunchPlan
    from layoutc.runtime.kernels.reading import Launch

_MOST = 16  # places that a pack has lain in, whose launches are kept
_filling: ContextVar[bool] = ContextVar("layoutc_filling", default=False)


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

    @property
    def values(self) -> Tensor:
        """Those that gathers write, once the first one has begun to arrive."""
        assert self.gathered.values is not None
        return self.gathered.values

    @property
    def shared(self) -> dict[str, Tensor]:
        """The planes that all ranks have already."""
        assert self.gathering is not None
        return self.gathering.shared

    def planes(self, received: Tensor, start: int) -> dict[str, Tensor]:
        """Those of the first rank, in what all have sent; and shared ones. start: of the pack."""
        found = dict(self.shared)
        for name, at, leg in self.slots:
            at += start
            plane = received[at : at + leg.sent * leg.width].view(leg.sent, leg.width)
            found[name] = plane if leg.dtype == torch.uint8 else plane.view(leg.dtype)
        return found


class Quantizing(Protocol):
    """What quantizes the weights of a pack where they are sent from."""

    def holds(self) -> bool:
        """True if the pack has the same weights, where they were."""

    def is_ready(self) -> bool:
        """True if they are, and kernels may write now."""

    def is_able_into(self, sent: Tensor) -> bool:
        """True if there are launches that write there."""

    def __call__(self, sent: Tensor) -> bool:
        """Writes what `Pack.fill` writes; false: nothing is done, and hooks must be asked."""


@dataclass
class Pack:
    """The weights of a group that travel together."""

    members: list[Member]
    nbytes: int  # that each rank sends
    is_all: bool  # no other weight of the group is dequantized on gather
    sources: list[Tensor] = field(default_factory=list)  # what was sent last, of one dim, if that is shards' own planes
    copies: dict[int, LaunchPlan | None] = field(default_factory=dict)  # of the sources, by the stream that they run on
    quantizing: Quantizing | None = None  # weights that are cast on gather, where all of them are
    received: Tensor | None = None  # FSDP2's gather output, which it frees and allocates
    launches: dict[tuple[int, ...], list[Launch]] = field(default_factory=dict)  # by where all of it lies

    def fill(self, sent: Tensor, mesh: Callable[[], Any]) -> None:
        """Copies the planes of all members, one after another, into (nbytes,) uint8: those of the last gather, where
        they lie, or what their hooks return. mesh: gives what FSDP2 calls hooks with."""
        if self.sources and all(map(_sends_the_same, self.members)):
            sources = self.sources
            if (copies := self._copies_into(sent)) is not None:
                copies(sent)
                return
        elif self.quantizing is not None and self.quantizing(sent):
            return
        else:
            sources = self._by_hooks(mesh())
        foreach_copy_(list(torch.split_with_sizes(sent, [one.numel() for one in sources])), sources)

    def _copies_into(self, sent: Tensor) -> LaunchPlan | None:
        """What copies the sources, on the current stream; None where no kernel does it."""
        if capturing(sent.device):
            return None
        stream = stream_of(sent.device)
        if stream not in self.copies and (words := as_words(self.sources)) is not None:
            starts = [*accumulate([one.numel() for one in words[:-1]], initial=0)]
            self.copies[stream] = copies_in(words, starts, WORD, sent)
        return self.copies.get(stream)

    def _by_hooks(self, mesh: Any) -> list[Tensor]:
        """What the hooks of all members send, as tensors of one dim."""
        sources: list[Tensor] = []
        with filling():
            for member in self.members:
                shard = gathered.shard_of(member.param())
                tensors, gathering = shard.fsdp_pre_all_gather(mesh)
                sources += [one.reshape(-1) for one in tensors]
                member.gathering = gathering
                kept = steady.kept(shard, gathering.which) if isinstance(shard, QuantizedTensor) else None
                as_they_are = kept is not None and kept.tensors is not None  # else what hooks have returned are copies
                member.sent = (weakref.ref(shard), kept.sources) if kept and as_they_are else None
        self.sources = sources if all(member.sent is not None for member in self.members) else []
        self.copies.clear()
        if self.quantizing is None or not self.quantizing.holds():
            self.quantizing = quantizing_into(self.members)
        return sources

    def arrive(self, received: Tensor, start: int, row: int) -> None:
        """Allocates and writes the values of all members, from what all ranks have sent: `row` bytes of each, in which
        the pack begins at `start`. By the launches of an earlier gather, if all of it lay where it lies now."""
        places = [received.data_ptr() + start, row]
        for member in self.members:
            values = member.values
            gathered.allocate(values)
            places.append(values.data_ptr())
            places += [plane.data_ptr() for plane in member.shared.values()]
        key = (*places, stream_of(received.device))
        launches = None if capturing(received.device) else self.launches.get(key)
        if launches is None:
            self._dequantize(received, start, row, key)
            return
        for one in launches:
            one.bound(*one.tensors)

    def _dequantize(self, received: Tensor, start: int, row: int, key: tuple[int, ...]) -> None:
        arrivals = []
        for member in self.members:
            parts = member.parts._replace(nbytes=row)
            arrivals.append(on_gather.Arrival(member.recipe, member.planes(received, start), member.values, parts))
        made = on_gather.dequantize_all(arrivals) or []
        kept = [again for one in made if (again := one.letting_go(received)) is not None]
        if not kept or len(kept) < len(made):
            return
        if len(self.launches) >= _MOST:
            self.launches.clear()
        self.launches[key] = kept


def quantizing_into(members: Sequence[Member]) -> Quantizing | None:
    """What quantizes the values of weights into what is sent; None unless all of them are cast on gather."""
    makers = {getattr(gathered.shard_of(member.param()), "INTO_PACK", None) for member in members}
    make = makers.pop() if len(makers) == 1 else None
    made: Quantizing | None = None if make is None else make(members)
    return made


@contextmanager
def filling() -> Iterator[None]:
    """Inside, hooks of members return what they send: a pack asks them."""
    token = _filling.set(True)
    try:
        yield
    finally:
        _filling.reset(token)


def is_filling() -> bool:
    """True inside of `filling`."""
    return _filling.get()


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

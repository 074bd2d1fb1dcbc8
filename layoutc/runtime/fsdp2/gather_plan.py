"""What a group's gather sends and leaves in a pass: computed from layouts, shardings and modes.

Each rank sends a row: the tensors that hooks would return, in FSDP2's order, so ranks may mix plans and hooks. Planes
are copied into the row, or values are quantized into it. Gathered weights are views of received rows, or their values.

FSDP2 allocates its outputs once, in the first gather, so a plan is made after that. A plan is valid while shards keep
their memory. Padding of slots and of short shards is not initialized; nothing reads it. Scales of split blocks arrive
from two ranks, and one of them is picked.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layoutc.ints.gathers import in_few_steps
from layoutc.runtime.fsdp2 import hooks, on_gather, wire
from layoutc.runtime.fsdp2.runs import Part, Run, in_place, plain, runs_of
from layoutc.runtime.fsdp2.wire import Gathering, Leg
from layoutc.runtime.kernels.plans import Plans, place_of
from layoutc.runtime.parts import Parts
from layoutc.runtime.sharding import gathered
from layoutc.runtime.sharding.registry import Sharding
from layoutc.runtime.torch_private import foreach_copy_, fsdp2, keeping_version, say_left
from layoutc.runtime.weight.tensor import QuantizedTensor


class Slot(NamedTuple):
    """The position of a plane in a row."""

    name: str
    start: int  # in bytes
    leg: Leg


class Source(NamedTuple):
    """A plane of a shard when the plan was made."""

    name: str
    plane: Tensor
    address: int


@dataclass(eq=False)
class Weight:
    """A weight of a group in one pass."""

    param: Any  # FSDPParam
    sharding: Sharding
    shard: Callable[[], Any]  # a weak reference
    gathering: Gathering
    slots: tuple[Slot, ...]
    sources: tuple[Source, ...]  # the planes that are sent or shared; () if each gather quantizes values
    outputs: list[Tensor]  # FSDP2's: of this pass's slots, then of the other pass's
    leaves_values: bool
    rows: int  # of the longest shard's matrix
    state: hooks.Gathered

    @property
    def recipe(self) -> type[QuantizedTensor]:
        """The class of the gathered weight."""
        found: type[QuantizedTensor] = self.shard().QUANTIZED
        return found

    @property
    def values(self) -> Tensor:
        """The values that gathers write, (m, k)."""
        assert self.state.values is not None
        return self.state.values

    def holds(self) -> bool:
        """True if neither the shard's memory nor the outputs' has changed."""
        shard, param = self.shard(), self.param
        if shard is None or fsdp2.shard_of(param) is not shard or fsdp2.outputs_of(param) is not self.outputs:
            return False
        if not self.sources:
            return True
        planes, writes = shard.store.planes, shard.store.writes
        if writes.waiting or (writes.initial is not None and not fsdp2.trains(param)):
            return False  # frozen since: `all_gather.send` frees its initial values
        return all(planes.get(name) is plane and plane.data_ptr() == address for name, plane, address in self.sources)

    def arriving(self) -> Iterator[Part]:
        """Planes in FSDP2's outputs; a plane that does not fill its output is joined elsewhere."""
        for (name, start, leg), output in zip(self.slots, self.outputs, strict=False):
            fills = leg.joined is None or leg.chosen is not None
            yield in_place(output if fills else self.gathering.joined[name], start, self.gathering.route.world)

    def planes(self) -> dict[str, Tensor]:
        """The whole weight's planes, after scales were picked."""
        pairs = zip(self.slots, self.outputs, strict=False)
        return {name: wire.place_of(self.gathering, name, output) for (name, *_), output in pairs}

    def picks(self) -> Iterator[tuple[Gathering, str, Tensor]]:
        """Planes with scales of split blocks, as arguments of `wire.arrived`."""
        for (name, _, leg), output in zip(self.slots, self.outputs, strict=False):
            if leg.chosen is not None:
                yield self.gathering, name, output

    def arrival(self, rows: Tensor, nbytes: int) -> on_gather.Arrival:
        """Planes in the rows of all ranks, `nbytes` each; names refer to those of the first rank."""
        found = dict(self.gathering.shared)
        for name, start, leg in self.slots:
            plane = rows[start : start + leg.sent * leg.width].view(leg.sent, leg.width)
            found[name] = plane if leg.dtype == torch.uint8 else plane.view(leg.dtype)
        parts = Parts(self.gathering.route.world, self.rows, nbytes)
        return on_gather.Arrival(self.recipe, found, self.values, parts)


class GatherPlan:
    """The gather of a group in one pass."""

    def __init__(self, weights: Sequence[Weight], nbytes: int, sent: Iterable[Part], plain: Sequence[Part]) -> None:
        """nbytes: of a row. sent: what is copied into it unchanged. plain: plain parameters as they arrive."""
        self.nbytes, self.weights = nbytes, weights
        cast = [one for one in weights if not one.sources]
        self.quantizing = cast[0].shard().INTO_ROW(cast) if cast else None  # an `IntoRow`
        self.sending, self.plain = runs_of(sent), plain
        self.of_values = [one for one in weights if one.leaves_values]
        self.of_codes = [one for one in weights if not one.leaves_values]
        self.sharing = [one for one in self.of_codes if one.gathering.shared]
        self.outputs = [output for one in self.of_codes for output in (*one.outputs, *one.gathering.joined.values())]
        self.picks = [pick for one in self.of_codes for pick in one.picks()]
        self.arriving: list[Run] | None = None  # None until the first gather: freed memory has no views
        self.planes: list[dict[str, Tensor]] = []  # of weights that are gathered as codes
        self.copies: dict[int, dict[str, Tensor]] = {}  # by the weight's id; see `_copied`
        self.launches = Plans()  # dequantizing launches, by addresses

    def holds(self) -> bool:
        """True if no shard's memory has changed."""
        if self.quantizing is not None and not self.quantizing.holds():
            return False
        return all(weight.holds() for weight in self.weights)

    def fill(self, sent: Tensor) -> None:
        """Writes this rank's row, (nbytes,) uint8. Collective if hooks are."""
        for weight in self.of_values:
            on_gather.check_unwritten(weight.shard(), weight.values)
        for run in self.sending:
            run.fill(sent)
        if self.quantizing is not None:
            self.quantizing(sent)

    def arrive(self, received: Tensor) -> None:
        """Builds the whole parameters from the rows of all ranks, (ranks * nbytes,) uint8."""
        for one in self.outputs:  # also those that nothing reads: FSDP2 and budgets count them
            fsdp2.allocate(one)
        for run in self.arriving or self._views():
            run.arrive(received)
        if self.of_values:
            self._dequantize(received)
        for pick in self.picks:
            wire.arrived(*pick)
        copied = self._copied()
        for weight, planes in zip(self.of_codes, self.planes, strict=True):
            shared = copied.get(id(weight), weight.gathering.shared)
            whole = {**planes, **shared} if shared else planes
            hooks.deliver(weight.shard(), whole, fsdp2.gathered_of(weight.param))
        if self.quantizing is not None:
            self.quantizing.delivered()

    @torch.inference_mode(False)  # whose views have no versions
    def _views(self) -> list[Run]:
        """What is copied out unchanged, once outputs are allocated. Releases what hooks kept of their gather."""
        for one in self.of_values:
            one.state.read = None
        self.planes = [one.planes() for one in self.of_codes]
        pieces = [piece for one in self.of_codes for piece in one.arriving()]
        self.arriving = runs_of([*self.plain, *pieces])
        return self.arriving

    def _copied(self) -> dict[int, dict[str, Tensor]]:
        """Copies of planes that all ranks have, if shards may be requantized while their weights are gathered. Each
        gather writes them, like all other planes."""
        if not self.sharing or self.sharing[0].sharding.frees_after_pass:  # the same for the whole group
            return {}
        if not self.copies:
            with torch.inference_mode(False):
                for one in self.sharing:
                    self.copies[id(one)] = {name: plane.clone() for name, plane in one.gathering.shared.items()}
            return self.copies
        targets = [plane for one in self.copies.values() for plane in one.values()]
        with keeping_version(*targets):
            foreach_copy_(targets, [plane for one in self.sharing for plane in one.gathering.shared.values()])
        return self.copies

    def _dequantize(self, received: Tensor) -> None:
        """Allocates and writes values, by the launches of an earlier gather if no address has changed."""
        places = [received]
        for weight in self.of_values:
            fsdp2.allocate(values := weight.values)
            places += [values, *weight.gathering.shared.values()]
        place = place_of(places, received.device)
        if (launches := self.launches.get(place)) is not None:
            launches()
            return
        launches = on_gather.dequantize_all([one.arrival(received, self.nbytes) for one in self.of_values])
        if place is not None:
            self.launches[place] = launches


# ---------------------------------------------------------------------------------------------------- computing a plan
def plan_of(group: Any, world: int) -> GatherPlan | None:
    """The plan of an FSDPParamGroup in the current pass. Returns None, and says why, if FSDP2's own steps must gather
    it. Raises as `hooks.gathering_of`."""
    plan = _plan_of(group, world)
    if isinstance(plan, GatherPlan):
        return plan
    param, reason = plan
    say_left(fsdp2.name_of(param), reason)
    return None


def _plan_of(group: Any, world: int) -> GatherPlan | tuple[Any, str]:
    """The plan, or the parameter that no plan can send, and why."""
    sent, arriving, nbytes = list[Part](), list[Part](), 0
    weights: list[Weight] = []
    for param in group.fsdp_params:
        outputs, shard = fsdp2.outputs_of(param), fsdp2.shard_of(param)
        if not hasattr(shard, "QUANTIZED"):
            if reason := fsdp2.why_not_plain(param):
                return param, reason
            if not outputs[0].numel() or nbytes % outputs[0].itemsize:
                return param, "it has no elements, or starts between two of them"
            own, whole = plain(param, outputs[0].dtype, nbytes, outputs[0].numel() // world)
            sent.append(own)
            arriving.append(whole)
            nbytes += outputs[0].nbytes // world
            continue
        # The group's own: `find` may return that of another model with the same shard.
        sharding = Sharding(weakref.ref(shard), weakref.ref(param), weakref.ref(group))
        weight = _weight_of(param, shard, sharding, nbytes)
        if isinstance(weight, str):
            return param, weight
        weights.append(weight)
        nbytes += sum(one.numel() for one in outputs) // world
        for name, start, _ in weight.slots if weight.sources else ():
            if (plane := shard.entries(name)).numel():
                sent.append(in_place(plane.reshape(-1).view(torch.uint8), start))
    by_kernels = [one for one in weights if one.leaves_values or not one.sources]
    if not in_few_steps([slot.start for one in by_kernels for slot in one.slots], nbytes):
        return group.fsdp_params[0], "planes that kernels reach begin between words"
    return GatherPlan(weights, nbytes, sent, arriving)


def _weight_of(param: Any, shard: Any, sharding: Sharding, start: int) -> Weight | str:
    """The weight at `start` in a row, or why no plan sends it."""
    if reason := fsdp2.why_elsewhere(param):
        return reason
    is_cast, leaves_values = not isinstance(shard, QuantizedTensor), on_gather.is_awaited(param)
    outputs = fsdp2.outputs_of(param)
    if leaves_values and not gathered.fits(param, sharding, shard):
        return "cuts go through its blocks, or ranks send planes of other than multiples of 16 bytes"
    if not leaves_values and any(map(Tensor.is_inference, outputs)):  # whose planes only inference may write
        return fsdp2.FOR_INFERENCE
    state, route = hooks.gathered_of(param), hooks.route_of(sharding, shard)
    gathering = Gathering(route, joined=state.joined) if is_cast else hooks.gathering_of(shard, sharding, route)
    legs = route.legs.values()
    sizes = route.slots or tuple([leg.sent * leg.width for leg in legs])
    assert [one.numel() for one in outputs] == [size * route.world for size in sizes], "what FSDP2 has allocated"
    sources: tuple[Source, ...] = ()
    if not is_cast:
        gathering.shared = {name: shard.store.planes[name] for name in gathering.shared}  # and no copies
        names = (*route.legs, *gathering.shared)
        sources = tuple([Source(name, shard.store.planes[name], shard.store.planes[name].data_ptr()) for name in names])
        if not all(shard.entries(name).is_contiguous() for name in route.legs):
            return "its planes are not contiguous"
    starts = accumulate(sizes, initial=start)
    slots = tuple([Slot(name, at, leg) for (name, leg), at in zip(route.legs.items(), starts, strict=False)])
    rows = prod(sharding.padded_shape[:-1])
    return Weight(param, sharding, weakref.ref(shard), gathering, slots, sources, outputs, leaves_values, rows, state)

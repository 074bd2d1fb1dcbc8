"""Weights that FSDP2 gathers together and that are cast on gather: quantized in one launch, at the first one's hook.

FSDP2 calls the pre-all-gather hooks of a group's parameters one after another. The first of them quantizes all weights
of the group, and agrees on all their amaxes; the others take their part. What stays the same from gather to gather (the
members, where they lie, the launch, what each of them sends) is worked out in the first gather of each pass.

A part is taken only by the weight whose turn it is, and only if its values are still those that were quantized. A
weight that was written in between, or that nobody expected, is quantized by itself.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from layoutc.runtime.cast.shared_amax import decide_all
from layoutc.runtime.facts import Facts, Layout, PassName
from layoutc.runtime.fsdp2 import hooks, packed
from layoutc.runtime.fsdp2.pack import is_filling
from layoutc.runtime.fsdp2.wire import Arrived, filled
from layoutc.runtime.quantize.block_edges import with_halos
from layoutc.runtime.quantize.weights import as_matrix
from layoutc.runtime.sharding import registry, shards
from layoutc.runtime.sharding.registry import Sharding
from layoutc.runtime.weight import operators
from layoutc.runtime.weight.tensor import QuantizedTensor

if TYPE_CHECKING:
    from layoutc.runtime.cast.tensor import CastOnGather

Sent = tuple[tuple[Tensor, ...], Any]  # what a pre-all-gather hook returns

_groups: weakref.WeakKeyDictionary[Any, GatherGroup] = weakref.WeakKeyDictionary()  # by FSDPParamGroup


class Hook:
    """The pre-all-gather hook of a shard whose group is known."""

    __slots__ = ("group", "index", "shard")
    __signature__ = registry.HOOK_SIGNATURE  # FSDP2 asks before each gather

    def __init__(self, group: GatherGroup, index: int, shard: CastOnGather) -> None:
        self.group, self.index, self.shard = group, index, weakref.ref(shard)

    def __call__(self, mesh: Any) -> Sent:
        """What the shard sends in the pass that gathers now."""
        shard = self.shard()
        assert shard is not None
        if (sent := packed.send(shard, mesh)) is not None:
            return sent
        part = self.group.part_of(self.index, shard, is_filling())
        if part is None:
            return send_alone(shard, mesh)
        return part.send(mesh) if isinstance(part, Part) else part


class Stamp(NamedTuple):
    """What says that a weight still holds the values that were quantized."""

    planes: dict[str, Tensor]
    version: int
    writes: int  # through views and aliases, whose version counters are their own

    def holds(self, shard: CastOnGather) -> bool:
        """True if nobody has written the values or replaced them."""
        planes = shard._planes
        same = planes is self.planes and _version(planes["values"]) == self.version
        return same and shard._agreed.writes == self.writes


class Example(NamedTuple):
    """What a weight that is quantized in a batch has sent in a pass: the same planes in each gather.

    One `gathering` serves them all, as a gather of a weight begins after the one before has ended.
    """

    gathering: Any
    sent: tuple[int, ...]  # which of the planes that were quantized
    shared: tuple[tuple[str, int | None, Facts], ...]  # those that all ranks have: which ones, None for the amax

    def again(self, planes: Sequence[Tensor], extra: dict[str, Tensor]) -> Sent:
        """The same with other bytes."""
        gathering = self.gathering
        if self.shared:
            gathering.shared = {
                name: extra[name] if at is None else _typed(planes[at], facts) for name, at, facts in self.shared
            }
        sent = tuple([planes[at] for at in self.sent])
        if gathering.route.slots:
            sent = filled(sent, gathering.route.slots)
        if gathering.route.world == 1:
            gathering.alone = sent[1:]
            return sent[:1], gathering
        return sent, gathering


def _typed(plane: Tensor, facts: Facts) -> Tensor:
    """A plane of a batch, which may be bytes."""
    return plane if plane.dtype == facts.dtype else plane.view(facts.dtype).view(facts.shape)


class Part:
    """A weight that was quantized with its group, and is sent as any quantized weight is."""

    __slots__ = ("_note", "_quantized", "_shard")

    def __init__(
        self, shard: CastOnGather, quantized: QuantizedTensor, note: Callable[[Layout, Sent], None] | None
    ) -> None:
        self._shard, self._quantized, self._note = shard, quantized, note

    def send(self, mesh: Any) -> Sent:
        """Through the hook of the recipe's class. What that returns is the example for later gathers."""
        registry.stand_in(self._quantized, self._shard)
        quantized: Any = self._quantized
        sent: Sent = quantized.fsdp_pre_all_gather(mesh)
        if self._note is not None:
            self._note(quantized.LAYOUT, sent)
        return sent


class Batch(Protocol):
    """A launch that quantizes several matrices again and again."""

    names: tuple[str, ...]

    def __call__(self, amaxes: Sequence[Tensor] | None) -> list[tuple[Tensor, ...]] | None:
        """New planes for each matrix, in the order of `names`; None: nothing is done."""

    def stored(self, index: int, planes: Sequence[Tensor]) -> dict[str, Tensor]:
        """Those of one matrix, by name, as a quantized tensor has them."""


class Kind(NamedTuple):
    """The weights of a group that one batch quantizes."""

    members: tuple[int, ...]
    batch: Batch


class Plan:
    """How a group's weights are quantized and sent in one pass, for as long as they stay where they are."""

    def __init__(
        self, tensors: Sequence[CastOnGather], addresses: tuple[int, ...], passes: tuple[PassName, ...]
    ) -> None:
        """passes: the one that each weight is gathered for."""
        for tensor in tensors:
            shards.check_cuts(tensor)
        self.addresses = addresses
        self.orientations = [tensor.LAYOUT.serves[which] for tensor, which in zip(tensors, passes, strict=True)]
        self.row_shardings = [shards.row_sharding(tensor) for tensor in tensors]
        self.examples: list[Example | None] = [None] * len(tensors)
        self.kinds: list[Kind] = []
        alike: dict[Any, list[int]] = defaultdict(list)
        for at, (tensor, row_sharding) in enumerate(zip(tensors, self.row_shardings, strict=True)):
            value = tensor._planes["values"]
            if row_sharding is None or not row_sharding.splits_blocks(tensor.LAYOUT):
                alike[tensor.QUANTIZED, self.orientations[at], value.dtype, value.device, value.numel() > 0].append(at)
        for (cls, *_), members in alike.items():
            batch = cls._batch_of([matrix(tensors[at]) for at in members], self.orientations[members[0]])
            if batch is not None:
                self.kinds.append(Kind(tuple(members), batch))
        batched = {at for kind in self.kinds for at in kind.members}
        self.rest = [at for at in range(len(tensors)) if at not in batched]  # each is quantized by itself


class GatherGroup:
    """The weights of one FSDPParamGroup that are cast on gather, in the order of their hooks."""

    def __init__(self, sharding: Sharding) -> None:
        self.sharding = sharding
        self.hooks: list[Hook] = []
        self.plans: dict[tuple[PassName, ...], Plan] = {}
        self.parts: list[Sent | Part | None] = []
        self.stamps: list[Stamp] = []
        self.turn = 0  # whose part is taken next

    def part_of(self, index: int, shard: CastOnGather, early: bool = False) -> Sent | Part | None:
        """A weight's part; None if it must be quantized by itself. early: it travels with an earlier weight."""
        if index == 0 or not self.parts:
            self.parts = []
            if not self._quantize(shard):
                return None
            index = 0
        if self.turn != index and not early:
            self.parts = []
            return None
        part = self.parts[index] if self.stamps[index].holds(shard) else None
        self.parts[index] = None
        while self.turn < len(self.parts) and self.parts[self.turn] is None:
            self.turn += 1
        if self.turn == len(self.parts):
            self.parts, self.stamps = [], []
        return part

    def adopt(self, tensors: list[CastOnGather]) -> None:
        """Makes weights the members of the group."""
        self.parts, self.plans = [], {}
        self.hooks = [Hook(self, index, tensor) for index, tensor in enumerate(tensors)]
        for tensor, hook in zip(tensors, self.hooks, strict=True):
            tensor._hook = hook

    def _quantize(self, first: CastOnGather) -> bool:
        """Quantizes all weights for the pass that begins with the first one's hook. Collective, as their hooks are.

        False: nothing is done, since that is not the first one, or since values are not in ordinary memory.
        """
        tensors = members(self.sharding)
        if hooks.simulated() or not tensors or tensors[0] is not first:
            return False
        if [tensor._hook for tensor in tensors] != self.hooks:
            self.adopt(tensors)
        values = [tensor._planes["values"] for tensor in tensors]
        if not all(map(_is_ordinary, values)):
            return False
        addresses, passes = tuple(map(Tensor.data_ptr, values)), tuple(map(hooks.passing, tensors))
        plan = self.plans.get(passes)
        if plan is None or plan.addresses != addresses:
            plan = self.plans[passes] = Plan(tensors, addresses, passes)
        decided = decide_all(tensors, lambda at: matrix(tensors[at]))
        parts: list[Sent | Part | None] = [None] * len(tensors)
        rest = plan.rest
        for kind in plan.kinds:
            if operators.traced(values[0]) or not _in_one_launch(kind, plan, tensors, decided, parts):
                rest = [*rest, *kind.members]
        _one_by_one(sorted(rest), plan, tensors, decided, parts)
        self.parts, self.turn = parts, 0
        self.stamps = [
            Stamp(tensor._planes, _version(value), tensor._agreed.writes)
            for tensor, value in zip(tensors, values, strict=True)
        ]
        return True


def join(shard: CastOnGather) -> Hook | None:
    """The hook of a shard that FSDP2 holds, as a member of its group; None for any other tensor."""
    sharding = registry.find(shard)
    if sharding is None or not sharding.is_of(shard) or hooks.simulated():
        return None
    owner = sharding.group()
    group = _groups.get(owner)
    if group is None:
        group = _groups[owner] = GatherGroup(sharding)
    group.sharding = sharding
    group.adopt(members(sharding))
    hook: Hook | None = shard._hook
    return hook


def send_alone(shard: CastOnGather, mesh: Any) -> Sent:
    """What a tensor sends in the pass that gathers now, quantized by itself. Collective if its scales or blocks are."""
    shards.check_cuts(shard)
    return Part(shard, shard.quantize(shard.LAYOUT.serves[hooks.passing(shard)]), None).send(mesh)


def members(sharding: Sharding) -> list[CastOnGather]:
    """The shards that are cast on gather in a parameter's group, in the order of their hooks."""
    from layoutc.runtime.cast.tensor import CastOnGather

    return [local for local in sharding.locals_of_group() if isinstance(local, CastOnGather)]


def matrix(tensor: CastOnGather) -> Tensor:
    """The values of a shard, (rows, k), without the rows that FSDP2 pads a short one with."""
    values = tensor._plain
    return as_matrix(values, (prod(values.shape[:-1]), values.shape[-1]))


def _is_ordinary(values: Tensor) -> bool:
    """True for values with an address, which is so on all ranks or on none."""
    return type(values) is Tensor and not values.is_meta


def _version(values: Tensor) -> int:
    """How often values were written. In inference mode torch does not count, and FSDP2 makes what it pads anew: on
    some ranks alone, which must not quantize otherwise than the others for that."""
    return -1 if values.is_inference() else values._version


# ------------------------------------------------------------------------------------------------------- quantizing
Decided = Sequence[tuple[Tensor | None, dict[str, Tensor]]]  # of each weight: the amax, and planes that follow from it


def _in_one_launch(
    kind: Kind, plan: Plan, tensors: Sequence[CastOnGather], decided: Decided, parts: list[Sent | Part | None]
) -> bool:
    """Makes the parts of weights that a batch quantizes; false: nothing is done, as a CUDA graph is captured."""
    amaxes = [amax for amax in [decided[at][0] for at in kind.members] if amax is not None]
    made = kind.batch(amaxes or None)
    if made is None:
        return False
    for number, (at, planes) in enumerate(zip(kind.members, made, strict=True)):
        example, extra = plan.examples[at], decided[at][1]
        if example is not None:
            parts[at] = example.again(planes, extra)
            continue
        tensor, stored = tensors[at], kind.batch.stored(number, planes) | extra
        quantized = tensor.quantized(stored, matrix(tensor), plan.orientations[at], plan.row_shardings[at])
        parts[at] = Part(tensor, quantized, partial(_note, plan.examples, at, kind.batch.names, planes))
    return True


def _note(
    examples: list[Example | None], at: int, names: Sequence[str], planes: Sequence[Tensor], layout: Layout, part: Sent
) -> None:
    """Keeps what a weight has sent as the example of later gathers, if that was its planes as they are; and has what
    arrives kept."""
    sent, gathering = part
    route = gathering.route
    everything, travels = (*sent, *gathering.alone), layout.travels[route.which]
    positions = tuple(map(names.index, travels))
    if route.world > 1:
        gathering.before = Arrived()  # what arrives is in the same memory in each gather
    for one, plane in zip(everything, [planes[position] for position in positions], strict=False):
        if (one.data_ptr(), one.shape, one.dtype) != (plane.data_ptr(), plane.shape, plane.dtype):
            return
    shared = tuple(
        [
            (name, names.index(name) if name in names else None, Facts(tuple(plane.shape), plane.dtype))
            for name, plane in gathering.shared.items()
        ]
    )
    examples[at] = Example(gathering, positions, shared)


def _one_by_one(
    positions: Sequence[int],
    plan: Plan,
    tensors: Sequence[CastOnGather],
    decided: Decided,
    parts: list[Sent | Part | None],
) -> None:
    """Makes the parts of weights that no batch quantizes. Collective if cuts split blocks of some of them."""
    layouts, row_shardings = [tensors[at].LAYOUT for at in positions], [plan.row_shardings[at] for at in positions]
    whole = with_halos(layouts, [matrix(tensors[at]) for at in positions], row_shardings)
    for at, values, row_sharding in zip(positions, whole, row_shardings, strict=True):
        (amax, extra), tensor, orientations = decided[at], tensors[at], plan.orientations[at]
        planes = operators.quantize(tensor.QUANTIZED, values, amax, orientations) | extra
        parts[at] = Part(tensor, tensor.quantized(planes, values, orientations, row_sharding), None)

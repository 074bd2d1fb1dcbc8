"""The launches of a step: tables of all shards, built once, and the arguments that change between steps."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from math import isnan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layoutc.ints.sizes import cdiv
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.kernels import batches, launch
from layoutc.runtime.kernels.launch_plan import LaunchPlan
from layoutc.runtime.kernels.plans import Plans
from layoutc.runtime.optim.rules import Rule
from layoutc.runtime.optim.states import as_matrix
from layoutc.runtime.sharding.shards import RowSharding
from layoutc.runtime.streams import capturing, stream_of
from layoutc.runtime.weight.tensor import QuantizedTensor

_FIELDS = 17  # of a table
STRIP = 1024  # elements that a program updates at a time; x 2 or x 4 if blocks are quantized after the update
MOST = 8192  # the most elements of a tile that is updated and quantized at once
PER_WARP = 256  # elements of a strip per warp
STRIPS = 8  # per program, if it prefetches


class Member(NamedTuple):
    """A shard that a kernel updates. target: its weight, if the kernel writes that too."""

    master: Tensor
    moments: tuple[Tensor, ...]
    step: Tensor
    target: Tensor | None
    group: int
    number: int
    place: tuple[int, int]  # the first row and column in the whole weight
    amax: Tensor | None = None  # (1,) int32: fp32 bits, which the launch raises to the amax of the updated master

    @property
    def matrix(self) -> Tensor:
        """The master, or the bf16 plane of an f24 master, as kernels see it."""
        return as_matrix(planes_of(self.master)[0])

    def tensors(self) -> list[Tensor]:
        """All plain tensors that a step writes."""
        planes = chain.from_iterable(map(planes_of, (self.master, *self.moments, self.target)))
        return [self.step, *planes, *([] if self.amax is None else [self.amax])]


class Form(NamedTuple):
    """What the members of a launch share."""

    master: torch.dtype
    moments: tuple[type[QuantizedTensor] | None, ...]
    target: Any  # a recipe's class, a dtype, or None
    orientations: tuple[str, ...]
    grad: torch.dtype
    splits: bool = False  # masters are bf16 and a byte
    measures: bool = False  # the launch raises amaxes

    @property
    def is_quick(self) -> bool:
        """Whether masters or moments are rounded, so that the `quick` arithmetic applies (optim/rules.py)."""
        return self.master != torch.float32 or any(self.moments)


def planes_of(tensor: Tensor | None) -> list[Tensor]:
    """The plain tensors of a tensor, in the order of its recipe."""
    if tensor is None:
        return []
    if not isinstance(tensor, QuantizedTensor):
        return [tensor]
    return [tensor.store.planes[name] for name in _names(type(tensor)) if name in tensor.store.planes]


def _names(cls: type[QuantizedTensor]) -> list[str]:
    """The planes that a recipe's kernels read and write."""
    return [name for name in cls.LAYOUT.stored if name != "amax"]


def why_apart(target: QuantizedTensor, rows: RowSharding | None) -> str:
    """Why the launch that updates a master can't write its weight's codes; "": it can.

    rows: how the weight is sharded. If any cut splits a block, all ranks exchange edges, even those with whole blocks.
    """
    layout = target.LAYOUT
    cut = rows is not None and rows.splits_blocks(layout)
    kernels = _kernels(type(target), next(iter(target.store.planes.values())))
    if kernels is None or not kernels.batched:
        return f"no kernel quantizes many weights in {layout.name} here"
    if layout.shares_amax:
        return f"scales of {layout.name} follow from an amax of the whole weight"
    if kernels.row_blocks or any(tile.cover[0] for tile in kernels.quantize_sizes.values()):
        return f"blocks of {layout.name} span whole rows, or no power of two"
    if cut or target.store.halo.rows or target.store.part is not None or target.store.matrix[0] != target.store.rows:
        return "its shards cut blocks"
    if not launch.all_writable([target.store.planes], target.device):
        return "its planes are not contiguous"
    return ""


class Updates:
    """Updates the same members at each step, as long as their addresses do not change."""

    def __init__(self, rule: Rule, members: Sequence[Member], grads: Sequence[Tensor], groups: int) -> None:
        self._rule = rule
        device = self._device = members[0].master.device
        steps = torch.stack([member.step.to(device, torch.float32).reshape(()) for member in members])
        self._steps = steps  # members' steps are views of it
        self.members = [member._replace(step=step) for member, step in zip(members, steps, strict=True)]
        self._places = _places(self.members)
        self._forms = [_form(member, grad) for member, grad in zip(members, grads, strict=True)]
        self._stream = stream_of(device)
        self._groups = torch.tensor([member.group for member in members], dtype=torch.int32, device="cpu").to(device)
        self.options = torch.zeros(groups, 8, dtype=torch.float64, device=device)
        self._given: list[Any] = [None] * groups
        self._scalars = torch.zeros(len(members), 8, dtype=torch.float32, device=device)
        places = [[member.number, *member.place, 0] for member in members]
        self._numbers = torch.tensor(places, dtype=torch.int32, device="cpu").to(device)
        self._grads = torch.zeros(len(members), dtype=torch.int64, device=device)
        self._amaxes: Tensor | None = None
        if any(form.measures for form in self._forms):
            amaxes = [0 if member.amax is None else member.amax.data_ptr() for member in members]
            self._amaxes = torch.tensor(amaxes, dtype=torch.int64, device="cpu").to(device)
        self._addresses: tuple[int, ...] = ()
        self._every = Plans()  # all launches of a step, by which of the scaler's tensors there are
        self._kept: list[Tensor] = []  # pinned memory that captured graphs read
        self._seed_given = 0
        self.seed = torch.zeros((), dtype=torch.int64, device=device)
        kinds: dict[Any, list[int]] = defaultdict(list)
        for slot, (form, grad) in enumerate(zip(self._forms, grads, strict=True)):
            if self.members[slot].master.numel():
                kinds[form, grad.data_ptr() % 16 == 0].append(slot)
        self._aligned = tuple(grad.data_ptr() % 16 == 0 for grad in grads)
        self._launches = [
            plan for (form, aligned), slots in kinds.items() for plan in self._plans(form, aligned, slots)
        ]

    def holds(self, members: Sequence[Member], grads: Sequence[Tensor]) -> bool:
        """True if members have the same addresses as at the start, and gradients the same dtypes and alignment."""
        same = len(members) == len(self.members) and self._places == _places(members)
        same = same and all(form.grad == grad.dtype for form, grad in zip(self._forms, grads, strict=True))
        same = same and self._aligned == tuple(grad.data_ptr() % 16 == 0 for grad in grads)
        return same and (capturing(self._device) or self._stream == stream_of(self._device))

    def set_options(self, groups: Sequence[tuple[Any, ...]], seed: int) -> None:
        """Sets the rule's options of each group. Numbers are copied to the card when they change; tensors are copied
        on the card at each call."""
        if seed != self._seed_given:
            self.seed.fill_(seed)
            self._seed_given = seed
        for at, given in enumerate(groups):
            numbers = tuple(0.0 if isinstance(one, Tensor) else float(one) for one in given)
            if numbers != self._given[at]:
                if capturing(self._device) and self._given[at] is not None:
                    raise LayoutError(
                        "an option has changed since the last step, and the CUDA graph that is being captured would "
                        "fix its value; make it a tensor on the card, as in lr=torch.tensor(3e-4, device='cuda')"
                    )
                row = torch.tensor(numbers, dtype=torch.float64, device="cpu")
                self.options[at, : len(given)].copy_(row)
                self._given[at] = numbers
            for position, one in enumerate(given):
                if isinstance(one, Tensor):
                    self.options[at, position].copy_(one)

    def __call__(self, grads: Sequence[Tensor], skipped: Tensor | None, scale: Tensor | None) -> None:
        """Updates all members by their gradients. skipped, scale: one-element fp32 tensors of torch.amp.GradScaler."""
        from layoutc.runtime.optim.kernels import scalars_kernel

        self._point_to(grads)
        count, given = len(self.members), [one for one in (skipped, scale) if one is not None]

        def plan() -> LaunchPlan:
            own = self._steps, self._groups, self.options, self._scalars, self._amaxes
            args = *own[:3], skipped, scale, *own[3:], count, 128, self._rule.name, self._rule.decoupled
            first = LaunchPlan.of(scalars_kernel, cdiv(count, 128), args, 4, bound=own)
            return LaunchPlan.joined([first, *self._launches])

        self._every.of((skipped is None, scale is None), plan)(*given)

    def _point_to(self, grads: Sequence[Tensor]) -> None:
        addresses = tuple(map(Tensor.data_ptr, grads))
        if addresses == self._addresses:
            return
        row = torch.tensor(addresses, dtype=torch.int64, device="cpu")
        if self._device.type == "cuda":
            row = row.pin_memory()
        self._grads.copy_(row, non_blocking=True)
        self._addresses = addresses
        if capturing(self._device):
            self._kept.append(row)
            self._addresses = ()  # eager steps can't see what a replay copies

    def _plans(self, form: Form, grads_aligned: bool, slots: list[int]) -> Iterator[LaunchPlan]:
        from layoutc.runtime.optim.kernels import update_kernel

        plan = _tiles(form)
        fields, wide = self._fields(slots)
        shapes = [tuple(self.members[slot].matrix.shape) for slot in slots]
        span, level = (plan.span_m, plan.span_k), launch.hardware(self._device)
        tables, alone = batches.tables_of(self._device, shapes, fields, wide, span, span)
        assert not alone
        example = self.members[slots[0]].matrix
        *moments, target = kernels = [_kernels(cls, example) for cls in (*form.moments, form.target)]
        books = [None if one is None else one.to(self._device) for one in map(books_of, (*moments, None))][:2]
        input_max = torch.finfo(form.master).max if target and target.takes_input_max else None
        amaxes = self._amaxes if form.measures else None
        tensors: list[Any] = [self._grads, self._scalars, self._numbers, self.seed, self._steps, amaxes, *books]
        for table in tables:
            facts = table.rows, table.aligned and grads_aligned, table.even
            constants, own = constants_of(self._rule, form, kernels, plan, facts, level), table.entries
            args, bound = (own, *tensors, input_max, *constants), [own, *tensors]
            yield LaunchPlan.of(update_kernel, table.programs, args, plan.warps, plan.registers, bound=bound)

    def _fields(self, slots: list[int]) -> tuple[list[tuple[int, ...]], list[bool]]:
        """A table's fields, and which of them must be multiples of 16 for threads to move 16 bytes at a time."""
        rows = []
        for slot in slots:
            member = self.members[slot]
            first, second = (*member.moments, None)[:2]
            planes = [_addresses(first, 3), _addresses(second, 3), _addresses(member.target, 6)]
            master, rest = _addresses(member.master, 2)
            rows.append((*member.matrix.shape, slot, master, *chain.from_iterable(planes), rest))
        return list(zip(*rows, strict=True)), [False, True, False] + [True] * (_FIELDS - 3)


class Tiling(NamedTuple):
    """Rows and columns of a program, the rows that it updates at a time, and the tiles that it then quantizes."""

    span_m: int
    span_k: int
    strip: int
    tile_m: int
    tile_k: int
    stages: int  # strips in flight
    keep: bool  # L2 keeps masters until they are read again to be quantized
    warps: int
    registers: int | None = None  # maximum per thread


def _tiles(form: Form) -> Tiling:
    """Sizes that were fastest on an H200 (tests/bench/optimizer_tiles.py), or have the fewest instructions."""
    coded = [cls.LAYOUT.column_multiple for cls in form.moments if cls is not None]
    rows, block_k = 1, 1
    quantizes = isinstance(form.target, type) and issubclass(form.target, QuantizedTensor)
    if quantizes:
        rows, block_k = form.target.LAYOUT.block_rows, form.target.LAYOUT.column_multiple
    columns = max([256, block_k, *coded])
    if rows * columns <= MOST:
        strip = max(STRIP // columns, rows)
        updates_alone = bool(coded) and not quantizes
        strips, stages = (STRIPS, 3) if updates_alone or form.master != torch.float32 else (1, 1)
        warps = min(max(strip * columns // PER_WARP, 1), 16)
        registers = 80 if updates_alone else None
        return Tiling(strips * strip, columns, strip, strip, columns, stages, False, warps, registers)
    tile_k = max(block_k, 1 << (MOST // rows).bit_length() - 1)
    if not coded:  # narrower, so that more is still in L2 when it is quantized
        columns = max(128, block_k)
        return Tiling(rows, columns, max(2 * STRIP // columns, 1), rows, tile_k, 2, True, 16, 64)
    return Tiling(rows, columns, max(2 * STRIP // columns, 1), rows, tile_k, 3, True, 8, 80)


@functools.cache
def books_of(kernels: Any) -> Tensor | None:
    """A recipe's codebooks, then their steps, or words that count the steps a value reaches; None without codebooks."""
    from layoutc.runtime.triton.codebooks import words_of

    if kernels is None or not kernels.codebooks:
        return None
    books, count = torch.tensor(kernels.codebooks, device="cpu"), len(kernels.codebooks) // 2
    if isnan(kernels.codebooks[-1]) and (words := words_of(kernels.codebooks[count:-1])):
        books = torch.cat([books[:count], torch.tensor(words, dtype=torch.int32, device="cpu").view(torch.float32)])
    return books


def _form(member: Member, grad: Tensor) -> Form:
    target = member.target
    kind: Any = None if target is None else target.dtype
    orientations: tuple[str, ...] = ()
    if isinstance(target, QuantizedTensor):
        kind, orientations = type(target), target.orientations
    moments = tuple([type(one) if isinstance(one, QuantizedTensor) else None for one in member.moments])
    splits = isinstance(member.master, QuantizedTensor)
    return Form(member.matrix.dtype, moments, kind, orientations, grad.dtype, splits, member.amax is not None)


def _places(members: Sequence[Member]) -> tuple[int, ...]:
    return tuple(map(Tensor.data_ptr, [tensor for member in members for tensor in member.tensors()]))


def _addresses(tensor: Tensor | None, count: int) -> list[int]:
    """The address of each plane of a recipe; 0 for planes that a tensor does not have."""
    if isinstance(tensor, QuantizedTensor):
        held = [tensor.store.planes.get(name) for name in _names(type(tensor))]
        found = [0 if plane is None else plane.data_ptr() for plane in held]
    else:
        found = [] if tensor is None else [tensor.data_ptr()]
    return found + [0] * (count - len(found))


def _dtypes(target: Any) -> list[torch.dtype]:
    """The dtypes of planes. target: a recipe's class, the dtype of plain values, or None."""
    if not (isinstance(target, type) and issubclass(target, QuantizedTensor)):
        return [] if target is None else [target]
    return [target.LAYOUT.dtypes[name] for name in _names(target)]


def _kernels(cls: Any, x: Tensor) -> Any:
    """A recipe's kernels if they can run on x; else None."""
    return cls.quantizing_kernels(x) if isinstance(cls, type) and issubclass(cls, QuantizedTensor) else None


def constants_of(
    rule: Rule, form: Form, kernels: Sequence[Any], plan: Tiling, table: tuple[int, bool, bool], level: int
) -> tuple[Any, ...]:
    """The constants of `update_kernel`, in its order.

    kernels: of the moments and the weight; None where there is no recipe. table: rows, aligned and even of a table.
    """
    from layoutc.runtime.triton.batch import DTYPES, kinds_of

    *moments, target = kernels
    rows, aligned, even = table
    found: list[Any] = [DTYPES[form.grad], DTYPES[form.master], form.splits]
    for cls, one in zip(form.moments, moments, strict=True):
        found += [
            *((one.dequantize_tile, one.quantize_tile) if one else (None, None)),
            kinds_of(_dtypes(cls or torch.float32)),
        ]
    found += [None, None, 0] * (2 - len(moments))
    served = target.serves if target else {}
    sources = [any(one in form.orientations for one in served.get(name, ())) for name in ("rowwise", "columnwise")]
    found += [target.quantize_tile if target else None, *sources, kinds_of(_dtypes(form.target))]
    found.append(DTYPES[form.target] if isinstance(form.target, torch.dtype) else None)
    each = min(plan.strip * plan.span_k // (32 * plan.warps), 16) if any(form.moments) else 0
    return (*found, rows, aligned, *plan[:7], each, even, level, 0, 0, rule.name, rule.decoupled, form.is_quick)

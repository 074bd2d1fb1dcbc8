"""The launches of a step: tables of all shards, made once, and what moves from step to step beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layoutc.ints.sizes import cdiv
from layoutc.runtime.captures import capturing
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.kernels import batches, launch
from layoutc.runtime.kernels.direct import Bound, Constants
from layoutc.runtime.optim.states import as_matrix
from layoutc.runtime.streams import stream_of
from layoutc.runtime.weight.tensor import QuantizedTensor

_KINDS = {torch.uint8: 1, torch.float32: 2, torch.float16: 3, torch.bfloat16: 4}  # of planes, as kernels number them
_FIELDS = 18  # of a table
STRIP = 2048  # elements that a program updates at a time
MOST = 8192  # of a tile that is updated and quantized at once
PER_WARP = 512  # of a strip
STRIPS = 8  # of a program


class Member(NamedTuple):
    """A shard that one kernel updates. target: the weight, where the kernel writes it too."""

    master: Tensor
    low: Tensor | None
    first: Tensor
    second: Tensor
    step: Tensor
    target: Tensor | None
    group: int
    number: int
    place: tuple[int, int]  # the first row and column in the whole weight

    def tensors(self) -> list[Tensor]:
        """All that a step writes, as plain tensors."""
        found = [
            self.step,
            self.master,
            *([] if self.low is None else [self.low]),
            *planes_of(self.first),
            *planes_of(self.second),
        ]
        return found + planes_of(self.target)


class Form(NamedTuple):
    """What members of one launch share."""

    master: torch.dtype
    low: bool
    first: type[QuantizedTensor] | None
    second: type[QuantizedTensor] | None
    target: Any  # a recipe's class, a dtype, or None
    orientations: tuple[str, ...]
    grad: torch.dtype


def planes_of(tensor: Tensor | None) -> list[Tensor]:
    """The tensors that kernels see of one, in the order of the recipe."""
    if tensor is None:
        return []
    if not isinstance(tensor, QuantizedTensor):
        return [tensor]
    return [tensor.store.planes[name] for name in _names(type(tensor)) if name in tensor.store.planes]


def _names(cls: type[QuantizedTensor]) -> list[str]:
    """The planes that a recipe's kernels know."""
    return [name for name in cls.LAYOUT.stored if name != "amax"]


def why_apart(target: QuantizedTensor) -> str:
    """Why the launch that updates a master can't write its weight's codes; "": it can."""
    layout = target.LAYOUT
    kernels = _kernels(type(target), next(iter(target.store.planes.values())))
    if kernels is None or not kernels.batched:
        return f"no kernel quantizes many weights in {layout.name} here"
    if layout.shares_amax:
        return f"scales of {layout.name} follow from an amax of the whole weight"
    if layout.stochastic or kernels.row_blocks or any(tile.cover[0] for tile in kernels.quantize_sizes.values()):
        return f"blocks of {layout.name} span whole rows, or no power of two, or are rounded by random bits"
    if target.store.halo.rows or target.store.part is not None or target.store.matrix[0] != target.store.rows:
        return "its shards cut blocks"
    if not launch.all_writable([target.store.planes], target.device):
        return "its planes are not contiguous"
    return ""


class Updates:
    """Updates members, again and again, for as long as they stay where they are."""

    def __init__(self, members: Sequence[Member], grads: Sequence[Tensor], groups: int) -> None:
        device = self._device = members[0].master.device
        steps = torch.stack([member.step.to(device, torch.float32).reshape(()) for member in members])
        self._steps = steps  # of all, of which members' own are views
        self.members = [member._replace(step=step) for member, step in zip(members, steps, strict=True)]
        self._places = _places(self.members)
        self._forms = [_form(member, grad) for member, grad in zip(members, grads, strict=True)]
        self._stream = stream_of(device)
        self._groups = torch.tensor([member.group for member in members], dtype=torch.int32).to(device)
        self.options = torch.zeros(groups, 8, dtype=torch.float64, device=device)
        self._given: list[Any] = [None] * groups
        self._scalars = torch.zeros(len(members), 8, dtype=torch.float32, device=device)
        places = [[member.number, *member.place, 0] for member in members]
        self._numbers = torch.tensor(places, dtype=torch.int32).to(device)
        self._grads = torch.zeros(len(members), dtype=torch.int64, device=device)
        self._addresses: tuple[int, ...] = ()
        self._kept: list[Tensor] = []  # pinned memory that captured graphs read
        self._seed_given = 0
        self.seed = torch.zeros((), dtype=torch.int64, device=device)
        kinds: dict[Any, list[int]] = defaultdict(list)
        for slot, (form, grad) in enumerate(zip(self._forms, grads, strict=True)):
            if self.members[slot].master.numel():
                kinds[form, grad.data_ptr() % 16 == 0].append(slot)
        self._aligned = tuple(grad.data_ptr() % 16 == 0 for grad in grads)
        self._launches: list[tuple[Bound, list[Tensor]]] = []
        for (form, aligned), slots in kinds.items():
            self._launches += self._bound(form, aligned, slots)

    def holds(self, members: Sequence[Member], grads: Sequence[Tensor]) -> bool:
        """True if these are the members that it was made for, where they were, and gradients of the same kind."""
        same = len(members) == len(self.members) and self._places == _places(members)
        same = same and all(form.grad == grad.dtype for form, grad in zip(self._forms, grads, strict=True))
        same = same and self._aligned == tuple(grad.data_ptr() % 16 == 0 for grad in grads)
        return same and (capturing(self._device) or self._stream == stream_of(self._device))

    def set_options(self, groups: Sequence[tuple[Any, ...]], seed: int) -> None:
        """lr, beta1, beta2, eps and weight decay of each group. Numbers are copied to the card when they change;
        tensors are read on it."""
        if seed != self._seed_given:
            self.seed.fill_(seed)
            self._seed_given = seed
        for at, given in enumerate(groups):
            numbers = tuple(0.0 if isinstance(one, Tensor) else float(one) for one in given)
            if numbers != self._given[at]:
                if capturing(self._device) and self._given[at] is not None:
                    raise LayoutError(
                        "an option of AdamW has changed since the last step before a CUDA graph is captured, which "
                        "would fix it; make it a tensor on the card, as lr=torch.tensor(3e-4, device='cuda')"
                    )
                row = torch.tensor(numbers, dtype=torch.float64)
                self.options[at, : len(given)].copy_(row)
                self._given[at] = numbers
            for position, one in enumerate(given):
                if isinstance(one, Tensor):
                    self.options[at, position].copy_(one)

    def __call__(self, grads: Sequence[Tensor], skipped: Tensor | None, scale: Tensor | None) -> None:
        """Updates all members by their gradients. skipped, scale: fp32 of one element, as torch.amp.GradScaler sets
        them."""
        from layoutc.runtime.kernels.direct import run
        from layoutc.runtime.optim.kernels import scalars_kernel

        self._point_to(grads)
        count = len(self.members)
        arguments = (self._steps, self._groups, self.options, skipped, scale, self._scalars, count, 128)
        run(scalars_kernel, (cdiv(count, 128),), arguments, 4)
        for bound, tensors in self._launches:
            bound(*tensors)

    def _point_to(self, grads: Sequence[Tensor]) -> None:
        addresses = tuple(map(Tensor.data_ptr, grads))
        if addresses == self._addresses:
            return
        row = torch.tensor(addresses, dtype=torch.int64)
        if self._device.type == "cuda":
            row = row.pin_memory()
        self._grads.copy_(row, non_blocking=True)
        self._addresses = addresses
        if capturing(self._device):
            self._kept.append(row)
            self._addresses = ()  # what a replay copies, eager steps do not know of

    def _bound(self, form: Form, grads_aligned: bool, slots: list[int]) -> list[tuple[Bound, list[Tensor]]]:
        from layoutc.runtime.optim.kernels import update_kernel
        from layoutc.runtime.triton.batch import DTYPES

        plan = _tiles(form)
        fields, wide = self._fields(form, slots)
        shapes = [tuple(as_matrix(self.members[slot].master).shape) for slot in slots]
        span, level = (plan.span_m, plan.span_k), launch.hardware(self._device)
        tables, alone = batches.tables_of(self._device, shapes, fields, wide, span, span)
        assert not alone
        found = []
        example = self.members[slots[0]].master
        kernels = _kernels(form.target, example) if isinstance(form.target, type) else None
        served = kernels.serves if kernels else {}
        sources = [any(one in form.orientations for one in served.get(name, ())) for name in ("rowwise", "columnwise")]
        codecs = [_codec(cls, example) for cls in (form.first, form.second)]
        books = [codec.book for codec in codecs]
        input_max = torch.finfo(form.master).max if not form.low else torch.finfo(torch.float32).max
        for table in tables:
            assert table.entries is not None
            constants = Constants(
                (
                    *(DTYPES[form.grad], DTYPES[form.master], form.low),
                    *codecs[0].constants,
                    *codecs[1].constants,
                    *(kernels.quantize_tile if kernels else None, *sources, _kinds(form.target)),
                    DTYPES[form.target] if isinstance(form.target, torch.dtype) else None,
                    *(table.rows, table.aligned and grads_aligned),
                    *plan[:5],
                    *(table.even, level, 0, 0),
                )
            )
            tensors = [table.entries, self._grads, self._scalars, self._numbers, self.seed, self._steps]
            args = (*tensors, None, *books, input_max if kernels and kernels.takes_input_max else None)
            tensors += [book for book in books if book is not None]
            found.append((Bound(update_kernel, (table.programs,), args, plan.warps, None, constants), tensors))
        return found

    def _fields(self, form: Form, slots: list[int]) -> tuple[list[tuple[int, ...]], list[bool]]:
        """The columns of a table, and which must be multiples of 16 for threads to move 16 bytes at a time."""
        rows = []
        for slot in slots:
            member = self.members[slot]
            low = 0 if member.low is None else member.low.data_ptr()
            planes = [_addresses(member.first, 3), _addresses(member.second, 3), _addresses(member.target, 6)]
            m, k = as_matrix(member.master).shape
            rows.append((m, k, slot, member.master.data_ptr(), low, 0, *chain.from_iterable(planes)))
        single = [False, True, False, True, True, False]
        return list(zip(*rows, strict=True)), single + [True] * (_FIELDS - len(single))


class Tiling(NamedTuple):
    """Rows and columns of a program, rows that it updates at a time, and the tiles in which it quantizes then."""

    span_m: int
    span_k: int
    strip: int
    tile_m: int
    tile_k: int
    warps: int


def _tiles(form: Form) -> Tiling:
    columns = max([256, *(cls.LAYOUT.column_multiple for cls in (form.first, form.second) if cls is not None)])
    rows, block_k = 1, 1
    if isinstance(form.target, type) and issubclass(form.target, QuantizedTensor):
        rows, block_k = form.target.LAYOUT.block_rows, form.target.LAYOUT.column_multiple
    columns = max(columns, block_k)
    strip = max(STRIP // columns, 1)
    if rows * columns <= MOST:
        strip = max(strip, rows)
        return Tiling(STRIPS * strip, columns, strip, strip, columns, max(strip * columns // PER_WARP, 1))
    return Tiling(rows, columns, strip, rows, max(block_k, 1 << (MOST // rows).bit_length() - 1), 8)


def _form(member: Member, grad: Tensor) -> Form:
    target = member.target
    orientations: tuple[str, ...] = ()
    if isinstance(target, QuantizedTensor):
        kind: Any = type(target)
        orientations = target.orientations
    else:
        kind = None if target is None else target.dtype
    first, second = (type(one) if isinstance(one, QuantizedTensor) else None for one in (member.first, member.second))
    return Form(member.master.dtype, member.low is not None, first, second, kind, orientations, grad.dtype)


def _places(members: Sequence[Member]) -> tuple[int, ...]:
    return tuple(map(Tensor.data_ptr, [tensor for member in members for tensor in member.tensors()]))


def _addresses(tensor: Tensor | None, count: int) -> list[int]:
    """The address of each plane of a recipe, 0 for those that a tensor does not hold."""
    if isinstance(tensor, QuantizedTensor):
        held = [tensor.store.planes.get(name) for name in _names(type(tensor))]
        found = [0 if plane is None else plane.data_ptr() for plane in held]
    else:
        found = [] if tensor is None else [tensor.data_ptr()]
    return found + [0] * (count - len(found))


def _kinds(target: Any) -> int:
    """The dtypes of planes, three bits for each. target: a recipe's class, the dtype of plain values, or None."""
    if not (isinstance(target, type) and issubclass(target, QuantizedTensor)):
        return 0 if target is None else _KINDS[target]
    return sum(_KINDS[target.LAYOUT.dtypes[name]] << (3 * at) for at, name in enumerate(_names(target)))


def _kernels(cls: type[QuantizedTensor], x: Tensor) -> Any:
    """A recipe's kernels, where they run on x; else None."""
    return cls.quantizing_kernels(x)


class Codec(NamedTuple):
    """What reads and writes a tile of a moment, the dtypes of its planes; and its codebook."""

    constants: tuple[Any, Any, int]
    book: Tensor | None


def _codec(cls: type[QuantizedTensor] | None, x: Tensor) -> Codec:
    if cls is None:
        return Codec((None, None, _kinds(torch.float32)), None)
    kernels = _kernels(cls, x)
    book = launch.codebooks(kernels.codebooks, x.device)
    return Codec((kernels.dequantize_tile, kernels.quantize_tile, _kinds(cls)), book)

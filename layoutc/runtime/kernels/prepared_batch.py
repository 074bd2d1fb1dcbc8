"""A batch that is quantized again and again, with planes that are allocated anew each time, together; single values
stay where they are.

The matrices stay where they are, so everything about the launch is worked out once: sizes, and where each plane begins
in its allocation. What is left is one allocation for each plane, and the launch. A gather quantizes its weights so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from operator import is_not
from typing import NamedTuple

import torch
from torch import Tensor

from layoutc.runtime.captures import capturing
from layoutc.runtime.facts import Layout
from layoutc.runtime.kernels import batches, launch
from layoutc.runtime.kernels.batches import Table
from layoutc.runtime.kernels.direct import Arguments, Bound, Constants, LaunchPlan
from layoutc.runtime.streams import stream_of
from layoutc.runtime.triton.kernels import quantize_kernel

_MOST = 16  # places that planes were allocated at, whose tables are kept


class Binding(NamedTuple):
    """How a recipe's kernel is launched for the matrices of a table.

    names: the planes that the kernel takes, in its order. span, step: rows and columns of a program, and of its tiles.
    arguments: of the launch for a table, with the first amax.
    """

    layout: Layout
    names: tuple[str, ...]
    orientations: tuple[str, ...]
    span: tuple[int, int]
    step: tuple[int, int]
    arguments: Callable[[Table, Tensor | None], Arguments]

    def split(
        self, xs: Sequence[Tensor], amaxes: Sequence[Tensor] | None, outs: Sequence[Mapping[str, Tensor]]
    ) -> tuple[Sequence[Table], Sequence[int]]:
        """As batches.split."""
        return batches.split(self.layout, self.names, xs, amaxes, self.orientations, outs, self.span, self.step)

    def plan(self, tables: Sequence[Table], amax: Tensor | None) -> LaunchPlan:
        """The launches for tables, to be called again and again: with an amax, if there are any."""
        kept = [table for table in tables if table.entries is not None]
        return LaunchPlan([Bound(quantize_kernel, *self.arguments(one, amax), one.entries) for one in kept])


class Column(NamedTuple):
    """A plane of several matrices, in one allocation, each from a multiple of 16 bytes on: bytes, in rows that are
    equally long; or single fp32 values."""

    members: tuple[int, ...]  # the matrices
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: tuple[int, ...]  # of each matrix, with those that fill it up to a multiple of 16 bytes
    own: tuple[int, ...]  # of each matrix alone; () if that is the same
    starts: tuple[int, ...]  # where the plane of each matrix begins, in bytes
    stays: bool  # in the same memory: a gathered weight has its single values until the next gather of the same pass


class PreparedBatch:
    """Quantizes matrices of one recipe, dtype and device, which fit into tables, into planes that it allocates."""

    def __init__(self, binding: Binding, xs: Sequence[Tensor]) -> None:
        layout, names, orientations, self._span, self._step, _ = binding
        self._plan = binding.plan
        self._device = xs[0].device
        self._shapes = [(x.shape[0], x.shape[1]) for x in xs]
        self._addresses = tuple(map(Tensor.data_ptr, xs))
        self._facts = facts = [launch.plane_facts(layout, m, k, orientations) for m, k in self._shapes]
        self._names = [name if name in facts[0] else None for name in names]
        self.names = tuple(filter(None, self._names))
        self._columns = [_columns([(one[name].shape, one[name].dtype) for one in facts]) for name in self.names]
        self._wide = [len(facts[0][name].shape) > 1 if name is not None else False for name in self._names]
        self._orders = [_order(columns) for columns in self._columns]
        self._amaxes: Sequence[Tensor] | None = None
        self._offsets: tuple[int, ...] = (0,) * len(xs)
        self._launches: dict[tuple[int, ...], LaunchPlan] = {}
        self._kept: dict[tuple[str, Column, int], Tensor] = {}  # the memory of columns that stay, by plane and stream

    def __call__(self, amaxes: Sequence[Tensor] | None) -> list[tuple[Tensor, ...]] | None:
        """New planes for each matrix, in the order of `names`: as bytes of (rows, bytes of a row), or (1,) fp32.

        amaxes: of each matrix, fp32, if the recipe shares one; a tensor never moves. None: nothing is done, as a CUDA
        graph is captured, which could outlive the tables.
        """
        if capturing(self._device):
            return None
        stream = stream_of(self._device)
        made: list[Sequence[Tensor]] = []
        places = [stream]
        for name, columns, order in zip(self.names, self._columns, self._orders, strict=True):
            parts: list[Tensor] = []
            for column in columns:
                whole = self._whole(name, column, stream) if column.stays else self._allocated(column)
                places.append(whole.data_ptr())
                pieces: Sequence[Tensor] = torch.split_with_sizes(whole, column.rows)
                if column.own:
                    pieces = [piece[:rows] for piece, rows in zip(pieces, column.own, strict=True)]
                parts.extend(pieces)
            made.append(parts if order is None else [parts[index] for index in order])
        if amaxes is not None and (self._amaxes is None or any(map(is_not, amaxes, self._amaxes))):
            self._place(amaxes)
        key = tuple(places)
        launches = self._launches.get(key)
        if launches is None:
            launches = self._prepare(key, amaxes)
        launches(*amaxes[:1] if amaxes else ())
        return list(zip(*made, strict=True))

    def stored(self, index: int, planes: Sequence[Tensor]) -> dict[str, Tensor]:
        """The planes of one matrix by name, in their own dtypes and shapes."""
        facts = self._facts[index]
        return {
            name: plane.view(facts[name].dtype).view(facts[name].shape)
            for name, plane in zip(self.names, planes, strict=True)
        }

    def _whole(self, name: str, column: Column, stream: int) -> Tensor:
        """The memory of a column that stays. Small tensors would come to lie elsewhere in each gather, as those of
        other groups are still alive, and each place has tables of its own."""
        whole = self._kept.get((name, column, stream))
        if whole is None:
            with torch.inference_mode(False):  # gathers that train use it as well
                whole = self._kept[name, column, stream] = self._allocated(column)
        return whole

    def _allocated(self, column: Column) -> Tensor:
        return torch.empty(column.shape, dtype=column.dtype, device=self._device)

    def _place(self, amaxes: Sequence[Tensor]) -> None:
        """Works out where amaxes lie from the first one, in values."""
        first, *_ = addresses = tuple(map(Tensor.data_ptr, amaxes))
        offsets = tuple([(address - first) // 4 for address in addresses])
        if offsets != self._offsets:
            self._offsets = offsets
            self._launches.clear()
        self._amaxes = amaxes

    def _prepare(self, key: tuple[int, ...], amaxes: Sequence[Tensor] | None) -> LaunchPlan:
        """The launches for planes that have been allocated in these places."""
        bases = iter(key[1:])
        placed = iter([self._addresses_of(columns, bases) for columns in self._columns])
        none = (0,) * len(self._shapes)
        planes = [none if name is None else next(placed) for name in self._names]
        ms, ks = zip(*self._shapes, strict=True)
        fields = [ms, ks, self._offsets, self._addresses, *planes]
        wide = [False, True, False, True, *self._wide]
        tables, alone = batches.tables_of(self._device, self._shapes, fields, wide, self._span, self._step)
        assert not alone
        if len(self._launches) >= _MOST:
            self._launches.clear()
        self._launches[key] = plan = self._plan(tables, amaxes[0] if amaxes else None)
        return plan

    def _addresses_of(self, columns: Sequence[Column], bases: Iterator[int]) -> tuple[int, ...]:
        """Of a plane of each matrix."""
        addresses = [0] * len(self._shapes)
        for column in columns:
            base = next(bases)
            for member, start in zip(column.members, column.starts, strict=True):
                addresses[member] = base + start
        return tuple(addresses)


def launches_into(
    bindings: Sequence[Binding],
    xs: Sequence[Tensor],
    amaxes: Sequence[Tensor] | None,
    outs: Sequence[Mapping[str, Tensor]],
) -> LaunchPlan | None:
    """Launches that quantize matrices into planes, both of which stay where they are; None if no table takes them all.

    bindings: all that one matrix takes. amaxes: an example: later ones lie as they do from the first one. Raises as
    batches.split.
    """
    bounds: list[Bound] = []
    for binding in bindings:
        tables, alone = binding.split(xs, amaxes, outs)
        if alone:
            return None
        bounds += binding.plan(tables, amaxes[0] if amaxes else None)
    return LaunchPlan(bounds)


def amax_launches(
    packed: Tensor, offsets: Sequence[int], xs: Sequence[Tensor], block_k: int | None
) -> LaunchPlan | None:
    """Launches that do what batches.raise_amaxes does, with any `packed` of that size; None as launches_into."""
    from layoutc.runtime.triton.batch import amax_batch_kernel

    launches, alone = batches.amax_launches(packed, offsets, xs, block_k)
    if alone:
        return None
    bounds = []
    for table, rest, warps in launches:
        args, grid = (table.entries, packed), (table.programs,)
        bounds.append(Bound(amax_batch_kernel, grid, args, warps, None, Constants(rest), table.entries))
    return LaunchPlan(bounds)


def _columns(facts: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> tuple[Column, ...]:
    """How a plane of each matrix is allocated: those with rows of equally many bytes together."""
    kinds: dict[int | None, list[int]] = defaultdict(list)
    for index, (shape, dtype) in enumerate(facts):
        kinds[prod(shape[1:]) * dtype.itemsize if len(shape) > 1 else None].append(index)
    columns = []
    for width, members in kinds.items():
        own = tuple(facts[index][0][0] for index in members)
        if width is None:  # single values: kernels take them anywhere, but cuBLAS wants a scale at 16 bytes
            dtype = facts[members[0]][1]
            slots = tuple(-(-size * dtype.itemsize // 16) * 16 // dtype.itemsize for size in own)
            starts = tuple(start * dtype.itemsize for start in accumulate(slots, initial=0))[:-1]
            columns.append(Column(tuple(members), (sum(slots),), dtype, slots, own, starts, True))
            continue
        rows = tuple(next(n for n in range(size, size + 16) if n * width % 16 == 0) for size in own)
        starts = tuple(start * width for start in accumulate(rows, initial=0))[:-1]
        shape = sum(rows), width
        columns.append(Column(tuple(members), shape, torch.uint8, rows, () if rows == own else own, starts, False))
    return tuple(columns)


def _order(columns: Sequence[Column]) -> tuple[int, ...] | None:
    """Where the piece of each matrix is among those of all columns; None if they are in order."""
    members = [member for column in columns for member in column.members]
    order = tuple(sorted(range(len(members)), key=members.__getitem__))
    return None if order == tuple(range(len(order))) else order

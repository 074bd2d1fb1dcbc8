"""Launches a recipe's kernels: for one weight or a batch, into planes or into the buffers that a GEMM reads."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from layoutc.ints.sizes import cdiv
from layoutc.runtime.facts import Layout
from layoutc.runtime.kernels import amaxes, batches, buffers, launch, plans, reading
from layoutc.runtime.kernels.choices import NO_TILE, Choice, Tile, Tiles, fitting
from layoutc.runtime.kernels.direct import Arguments, Constants, run
from layoutc.runtime.kernels.launch_plan import LaunchPlan
from layoutc.runtime.random_bits import draw_seed
from layoutc.runtime.triton.batch import DTYPES
from layoutc.runtime.triton.kernels import lay_out_kernel, quantize_kernel

Planes = Mapping[str, Tensor]
_KINDS = (torch.uint8, torch.float32, torch.float16, torch.bfloat16)  # dtypes of planes, by their number in kernels
_SOURCES = ("rowwise", "columnwise")
_NONE = (None,) * 6  # a kernel's six planes, or six buffers, if it has none


@dataclass(frozen=True, eq=False, kw_only=True)
class Kernels:
    """The kernels of one recipe: its tile functions, and the sizes of their launches.

    A recipe's kernels.py makes one, as KERNELS. Planes and buffers go by name. They run on the card of their tensors.
    """

    layout: Layout
    quantize_tile: Any = None  # None: the reference quantizes, on every device
    dequantize_tile: Any
    lay_out_tile: Any = None  # None: every buffer is a plane
    serves: Mapping[str, tuple[str, ...]]  # each source -> the orientations that its planes serve
    quantize_sizes: Tiles = field(default_factory=dict)
    buffer_sizes: Tiles | None = None  # those that differ; None: buffers that are no planes take two launches
    dequantize_sizes: Mapping[str, Tile]  # by orientation
    codebooks: tuple[float, ...] = ()  # values that dequantizing looks up in memory
    by_reference: Callable[..., dict[str, Tensor]] | None = None  # what lays out in the place of kernels
    lay_out_size: Tile = NO_TILE
    moved: tuple[str, ...] = ()  # the planes that lay_out_tile reads
    word: int = 1  # how many rows and columns of codes are moved at a time
    padding: tuple[buffers.Padding, buffers.Padding] = ((), ())  # of m and k, over all buffers
    batched: bool = True  # False: a launch quantizes one matrix
    takes_input_max: bool = False  # True: scales depend on the largest value of x's dtype
    row_blocks: Mapping[str, int] = field(default_factory=dict)  # sources with blocks of whole rows -> their rows
    row_ranges: tuple[str, ...] = ()  # those of them whose scales depend on the lowest and highest value
    gemm_scale: Callable[..., Tensor] | None = None  # reorders scales for the GEMM, if a plane needs it
    _choices: dict[Any, Choice] = field(default_factory=dict, init=False)
    _moving: dict[Any, Constants] = field(default_factory=dict, init=False)

    # ------------------------------------------------------------------------------------------------------- quantize
    def quantize(
        self,
        x: Tensor,
        amax: Tensor | None,
        orientations: tuple[str, ...],
        out: Planes | None = None,
        seed: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """(m, k) in fp32, bf16 or fp16 -> planes of the orientations.

        amax: the shared amax, fp32; default: that of x. seed: (1,) int64, if elements are rounded by random bits;
        default: drawn. out: planes to write into; default: new ones. Raises ValueError for a shape that the recipe does
        not take, and for an `out` of another shape, dtype or alignment.
        """
        m, k = x.shape
        planes = launch.planes(self.layout, m, k, orientations, x.device, out)
        if m and k:
            shared = self._shared_amax(x, amax, orientations)
            x = launch.in_rows(x) if self.row_blocks else launch.in_runs(x)  # a program goes through few whole rows
            for together in self._together(orientations):
                choice = self._choice(self.quantize_sizes, together, x.dtype, k)
                run(quantize_kernel, *self._quantizing(x, shared, planes, {}, choice, m, k, False, seed))
        return planes

    def _together(self, orientations: tuple[str, ...]) -> list[tuple[str, ...]]:
        """The orientations of each launch that quantizes into planes: those of each source, where sources are apart."""
        if not self._apart:
            return [orientations]
        return [served for served in self.serves.values() if any(name in orientations for name in served)]

    @cached_property
    def _apart(self) -> bool:
        """Whether each source is quantized in a launch of its own: there are no tiles for all."""
        return len(self.serves) > 1 and not any(len(key) > len(self.serves) for key in self.quantize_sizes)

    def quantize_buffers(
        self,
        x: Tensor,
        amax: Tensor | None,
        orientations: tuple[str, ...],
        swizzled: bool = False,
        seed: Tensor | None = None,
        typed: bool = False,
    ) -> dict[str, Tensor]:
        """(m, k) in fp32, bf16 or fp16 -> buffers of the orientations. Raises ValueError as `quantize`.

        Takes one launch if all are planes, or m and k are multiples of `word`; else two. swizzled: scales are flat, in
        the GEMM's order. amax: as for `quantize`; that of the whole matrix may be in x's dtype, and that of each row,
        (m,), if no buffer is the amax: the kernel takes the largest. typed: those of one launch have the dtypes of
        `Layout.operand_dtypes`, and their amax may be a part of a larger tensor.
        """
        m, k = x.shape
        amax = self._shared_amax(x, amax, orientations, typed)
        kept = {"amax": amax} if amax is not None and "amax" in self.layout.as_stored else {}
        shared = {name: self.layout.stored_amax(one.to(torch.float32)) for name, one in kept.items()}
        odd = self.buffer_sizes is None or m % self.word or k % self.word
        if self._apart or not m or not k or (odd and buffers.are_made(self.layout, orientations)):
            planes = self.quantize(x, amax, orientations, None, seed)
            return self.lay_out(planes | shared, m, k, orientations, swizzled)
        if seed is None and self.layout.stochastic:
            seed = draw_seed(x)
        x = launch.in_rows(x)
        inputs = [one for one in (x, amax, seed) if one is not None]
        key = self, launch.quantized_like(x, amax, orientations, swizzled, typed)
        plan: LaunchPlan | None = plans.cache.get(key)
        if plan is not None:
            return plan.named(inputs, shared)
        launch.plane_facts(self.layout, m, k, orientations)  # raises for a shape that the recipe does not take
        made = buffers.new(self.layout, m, k, orientations, x.device)
        planes = buffers.planes_as_buffers(self.layout, m, k, orientations, x.device)
        choice = self._choice(self.buffer_sizes or self.quantize_sizes, orientations, x.dtype, k)
        cover = buffers.cover(self.padding, m, k) if made else (m, k)
        arguments = self._quantizing(x, amax, planes, made, choice, *cover, swizzled, seed)
        if self._reorders(orientations, swizzled):  # a launch of its own
            run(quantize_kernel, *arguments)
            return self._buffers(planes | shared, made, orientations, swizzled)
        written = _ordered(planes, self._planes), _ordered(made, self._made)
        dtypes = self.layout.operand_dtypes if typed else {}
        entries = buffers.entries(self.layout, orientations)
        plan = plans.cache[key] = LaunchPlan.of(quantize_kernel, arguments).making(*written, entries, swizzled, dtypes)
        return plan.named(inputs, shared)

    def quantize_batch(
        self,
        xs: Sequence[Tensor],
        shared: Sequence[Tensor] | None,
        orientations: tuple[str, ...],
        outs: Sequence[Planes],
    ) -> None:
        """As `quantize` for each of xs, into its planes of `outs`, in as few launches as possible.

        shared: an fp32 amax for each; default: those of xs. Raises as batches.split.
        """
        if not xs:
            return
        if shared is None and self.layout.takes_amax(orientations):
            shared = amaxes.batch_amaxes(xs, self.layout.amax_columns)
        for together in self._together(orientations):
            found, alone = self._batch(xs, shared, together, outs)
            for plan in found:
                plan(*(shared or ())[:1])
            for index in alone:
                self.quantize(xs[index], None if shared is None else shared[index], together, outs[index])

    def plan_of_batch(
        self,
        xs: Sequence[Tensor],
        shared: Sequence[Tensor] | None,
        orientations: tuple[str, ...],
        outs: Sequence[Planes],
    ) -> LaunchPlan | None:
        """What does `quantize_batch` again, while xs and outs stay where they are, with the first amax, if any: others
        lie as they do from it now. None if tables do not take all matrices. Raises as batches.split."""
        found, alone = zip(*[self._batch(xs, shared, one, outs) for one in self._together(orientations)], strict=True)
        return None if any(alone) else LaunchPlan.joined(chain(*found))

    def _batch(
        self, xs: Sequence[Tensor], shared: Sequence[Tensor] | None, together: tuple[str, ...], outs: Sequence[Planes]
    ) -> tuple[list[LaunchPlan], Sequence[int]]:
        """What quantizes all matrices that tables take, and which others there are."""
        x, amax = xs[0], shared[0] if shared else None
        most = max(x.shape[1] for x in xs)
        choice = self._choice(self.quantize_sizes, together, x.dtype, most)
        tables, alone = batches.split(self.layout, self._written, xs, shared, together, outs, choice.span, choice.step)
        key = self, together, x.dtype, most, amax is None
        return [table.plans.of(key, partial(self._plan_of_table, table, amax, choice, x)) for table in tables], alone

    def _plan_of_table(self, table: batches.Table, amax: Tensor | None, choice: Choice, x: Tensor) -> LaunchPlan:
        """What quantizes the matrices of a table. amax: the first one, if any. x: one of the matrices."""
        rowwise, columnwise, input_max, (tile_m, tile_k, warps, pieces, registers, cover), rows, _ = choice
        fixed = self.quantize_tile, rowwise, columnwise, False, *self._masks, DTYPES[x.dtype], *table.kind[:2]
        level, most = launch.hardware(x.device), launch.registers(x.device, registers)
        constants = Constants((*fixed, tile_m, tile_k, pieces, table.even, level, *cover, 0, *rows))
        args = table.entries, *_NONE, amax, input_max, None, *_NONE, *_NONE
        arguments = Arguments((table.programs,), args, warps, most, constants)
        return LaunchPlan.of(quantize_kernel, arguments, [table.entries])

    def _quantizing(
        self,
        x: Tensor,
        amax: Tensor | None,
        planes: Planes,
        made: Planes,
        choice: Choice,
        cover_m: int,
        cover_k: int,
        swizzled: bool,
        seed: Tensor | None,
    ) -> Arguments:
        """Of a launch that quantizes x, which lies in runs, into planes and buffers; what is missing is not written."""
        m, k = x.shape
        rowwise, columnwise, input_max, (tile_m, tile_k, warps, pieces, registers, cover), rows, cached = choice
        step_m, step_k = choice.step
        even = m % step_m == 0 and k % step_k == 0 and cover_m == m and cover_k == k
        device = x.device
        several = amax is not None and amax.numel() > 1 and self.layout.amax_columns is None
        kind = swizzled, even, launch.hardware(device), 1 << (m - 1).bit_length() if several else 0
        constants = cached.get(kind)
        if constants is None:
            fixed = self.quantize_tile, rowwise, columnwise, swizzled, 0, 0, 0, None, 0, False
            constants = cached[kind] = Constants((*fixed, tile_m, tile_k, pieces, *kind[1:3], *cover, kind[3], *rows))
        stride_m, stride_k = x.stride()
        p0, p1, p2, p3, p4, p5 = map(planes.get, self._planes)
        b0, b1, b2, b3, b4, b5 = map(made.get, self._made) if made else _NONE
        if seed is None and self.layout.stochastic:
            seed = draw_seed(x)
        shared = amax, input_max, seed
        args = (None, x, m, k, stride_m, stride_k, cover_k, *shared, p0, p1, p2, p3, p4, p5, b0, b1, b2, b3, b4, b5)
        grid = launch.programs(cover_m, cover_k, *choice.span)
        return Arguments(grid, args, warps, launch.registers(device, registers), constants)

    def _shared_amax(
        self, x: Tensor, amax: Tensor | None, orientations: tuple[str, ...], passing: bool = False
    ) -> Tensor | None:
        """The caller's amax; if there is none and scales need one, that of x. passing: as of matrix_amax."""
        if amax is None and self.layout.takes_amax(orientations):
            return amaxes.matrix_amax(x, self.layout.amax_columns, passing=passing)
        return amax

    def again(self, key: Hashable, names: Sequence[str], typed: bool) -> LaunchPlan | None:
        """What returns the buffers `names` as the launch of a key made them; None if there is none, or it does not
        write them all. typed: in the dtypes of `Layout.operand_dtypes`."""
        plan: LaunchPlan | None = plans.cache.get((self, key))
        return None if plan is None else plan.returning(names, self.layout.operand_dtypes if typed else {})

    def _choice(self, tiles: Tiles, orientations: tuple[str, ...], dtype: torch.dtype, k: int) -> Choice:
        key = tiles is self.quantize_sizes, orientations, dtype, fitting(k) if self.row_blocks else 0
        choice = self._choices.get(key)
        if choice is None:
            written = {name: any(one in orientations for one in served) for name, served in self.serves.items()}
            input_max = torch.finfo(dtype).max if self.takes_input_max else None
            at: tuple[int, *tuple[str, ...]] = (dtype.itemsize, *[name for name, asked in written.items() if asked])
            flags = written.get("rowwise", False), written.get("columnwise", False)
            spanning = [self.row_blocks.get(name, 0) if written.get(name) else 0 for name in _SOURCES]
            rows = spanning[0], spanning[1], sum(1 << bit for bit in (0, 1) if _SOURCES[bit] in self.row_ranges)
            tile = tiles[at] if at in tiles else self.quantize_sizes[at]
            choice = Choice(*flags, input_max, tile, rows, {}).fitted(k)
            self._choices[key] = choice
        return choice

    @cached_property
    def _written(self) -> tuple[str, ...]:
        """The planes that kernels write and read, in the layout's order."""
        return tuple(name for name in self.layout.stored if name != "amax")

    @cached_property
    def _planes(self) -> tuple[str, ...]:
        """The same, filled up to the six that kernels take."""
        return launch.pad_to_six(self._written)

    @cached_property
    def _made(self) -> tuple[str, ...]:
        """The buffers that are made from planes, in order, filled up to the six that kernels take."""
        facts = self.layout.buffers(self.layout.multiple_m, self.layout.multiple_k)
        return launch.pad_to_six(tuple(name for name in facts if name not in self.layout.as_stored))

    @cached_property
    def _moved(self) -> tuple[str, ...]:
        """The planes that lay_out_tile reads, filled up to the six that kernels take."""
        return launch.pad_to_six(self.moved)

    @cached_property
    def _masks(self) -> tuple[int, int, int]:
        """How many planes there are; two bits for the dtype of each; a bit for each that has one value."""
        facts = self.layout.planes(self.layout.multiple_m, self.layout.multiple_k)
        dtypes = sum(_KINDS.index(facts[name].dtype) << 2 * index for index, name in enumerate(self._written))
        scalars = sum((self.layout.stored[n][:2] == (None, None)) << at for at, n in enumerate(self._written))
        return len(self._written), dtypes, scalars

    # ----------------------------------------------------------------------------------------------------- dequantize
    def dequantize(self, planes: Planes, m: int, k: int, orientation: str, dtype: torch.dtype) -> Tensor:
        """Planes -> the (m, k) values of an orientation, computed in fp32 and rounded once to `dtype`."""
        read = reading.read_of(self, launch.readable(planes))
        if not (m and k):
            return torch.empty(m, k, dtype=dtype, device=next(iter(read.values())).device)
        (values,) = reading.plan_of(self, (m, k), dtype, read, orientation)(*read.values())
        return values

    # -------------------------------------------------------------------------------------------------------- lay out
    def lay_out(
        self, planes: Planes, m: int, k: int, orientations: tuple[str, ...], swizzled: bool = False
    ) -> dict[str, Tensor]:
        """Planes -> buffers of the orientations, in one launch or none. Raises ValueError for planes not of (m, k)."""
        launch.check_planes(self.layout, planes, m, k)
        if self.by_reference is not None:
            made = self.by_reference(planes, m, k, orientations)
            return self._buffers(planes, made, orientations, swizzled)
        planes = launch.readable(planes)
        if self.lay_out_tile is None or not m or not k:
            return self._buffers(planes, {}, orientations, swizzled)
        device = next(iter(planes.values())).device
        moved = [name for name in self.moved if name in planes]
        key = self, launch.laid_out_like(m, k, device, orientations, swizzled, len(moved))
        if (plan := plans.cache.get(key)) is None:
            made = buffers.new(self.layout, m, k, orientations, device)
            if not made or self._reorders(orientations, swizzled):
                self._lay_out(planes, made, m, k, swizzled, None)
                return self._buffers(planes, made, orientations, swizzled)
            launches = LaunchPlan.of(lay_out_kernel, self._laying_out(planes, made, m, k, swizzled, None))
            entries = buffers.entries(self.layout, orientations)
            plan = plans.cache[key] = launches.reading(moved).making({}, _ordered(made, self._made), entries, swizzled)
        return plan.named([planes[name] for name in moved], planes)

    def lay_out_batch(
        self,
        weights: Sequence[Planes],
        shapes: Sequence[tuple[int, int]],
        orientations: tuple[str, ...],
        swizzled: bool = False,
    ) -> list[dict[str, Tensor]]:
        """As `lay_out` for each of several weights, in few launches. Raises ValueError if these are on two devices."""
        if self.by_reference is not None:
            return [self.lay_out(one, *at, orientations, swizzled) for one, at in zip(weights, shapes, strict=True)]
        for planes, shape in zip(weights, shapes, strict=True):
            launch.check_planes(self.layout, planes, *shape)
        weights = [launch.readable(planes) for planes in weights]
        made = buffers.new_for_batch(self.layout, shapes, orientations, weights)
        covers = [buffers.cover(self.padding, *shape) for shape in shapes]
        launches = buffers.split(
            self.moved, tuple(filter(None, self._made)), weights, made, shapes, covers, self.lay_out_size[:2], self.word
        )
        for index, table in launches:
            self._lay_out(weights[index], made[index], *shapes[index], swizzled, table)
        return [self._buffers(planes, new, orientations, swizzled) for planes, new in zip(weights, made, strict=True)]

    def _lay_out(
        self, planes: Planes, made: Planes, m: int, k: int, swizzled: bool, table: batches.Table | None
    ) -> None:
        """Fills the buffers in `made` from the planes of a weight; with a table, those of all weights in it."""
        if made and (table is None or table.programs):
            run(lay_out_kernel, *self._laying_out(planes, made, m, k, swizzled, table))

    def _laying_out(
        self, planes: Planes, made: Planes, m: int, k: int, swizzled: bool, table: batches.Table | None
    ) -> Arguments:
        """Of a launch that lays out a weight, or those of a table.

        The weight is then one of the table's: it says which planes and buffers there are, and their dtypes.
        """
        cover_m, cover_k = buffers.cover(self.padding, m, k)
        tile_m, tile_k, warps, *_ = self.lay_out_size
        if table is None:
            programs = cdiv(cover_m, tile_m) * cdiv(cover_k, tile_k)
            even = m % self.word == 0 and k % self.word == 0
            table = batches.Table(None, 0, programs, False, even, plans.Plans())
        moved, tiled = len(self.moved), (tile_m, tile_k, launch.hardware(next(iter(made.values())).device))
        kind = swizzled, table.rows, table.aligned, table.even, tiled[2]
        constants = self._moving.get(kind)
        if constants is None:
            constants = self._moving[kind] = Constants((self.lay_out_tile, moved, *kind[:4], *tiled))
        args = (table.entries, m, k, cover_k, *map(planes.get, self._moved), *map(made.get, self._made))
        return Arguments((table.programs,), args, warps, None, constants)

    def _buffers(
        self, planes: Planes, made: Planes, orientations: tuple[str, ...], swizzled: bool
    ) -> dict[str, Tensor]:
        """All buffers of the orientations, in the layout's order: planes that serve as they are, and `made` ones."""
        result: dict[str, Tensor] = {}
        for name, plane, is_flat, is_swizzled in buffers.entries(self.layout, orientations):
            buffer = made[name] if plane is None else planes[plane]
            if is_swizzled and swizzled:
                buffer = self._in_order(name, buffer) if plane or self.by_reference else buffer.flatten()
            result[name] = buffer.flatten() if is_flat else buffer
        return result

    def _reorders(self, orientations: tuple[str, ...], swizzled: bool) -> bool:
        """True if a plane that serves as a buffer must be put in the GEMM's order, which is a launch of its own."""
        return swizzled and any(
            one.is_swizzled and one.plane is not None for one in buffers.entries(self.layout, orientations)
        )

    def _in_order(self, name: str, scale: Tensor) -> Tensor:
        """A scale, or zero point, that no kernel orders, in the GEMM's order: 1-D."""
        assert self.gemm_scale is not None
        orientation, _, kind = name.rpartition("_")
        return self.gemm_scale({name: scale}, orientation, kind)


def _ordered(tensors: Planes, names: Sequence[str]) -> dict[str, Tensor]:
    """Tensors in the order of a kernel's arguments."""
    return {name: tensors[name] for name in names if name in tensors}

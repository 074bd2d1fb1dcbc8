"""Launches a recipe's kernels: for one weight or a batch, into planes or into the buffers that a GEMM reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from layoutc.runtime.kernels import amaxes, batches, buffers, launch, plans
from layoutc.runtime.kernels.choices import NO_TILE, Choice, Tile, Tiles, fitting
from layoutc.runtime.kernels.launch import Like
from layoutc.runtime.kernels.launch_plan import LaunchPlan
from layoutc.runtime.kernels.reading import Planes, Reading
from layoutc.runtime.random_bits import draw_seed
from layoutc.runtime.triton.batch import DTYPES, kinds_of
from layoutc.runtime.triton.kernels import lay_out_kernel, quantize_kernel

Made = Mapping[tuple[bool, str], Tensor]  # planes (True) and buffers (False) of one launch
_SOURCES = ("rowwise", "columnwise")
_NONE = (None,) * 6  # a kernel's six planes, or six buffers, if it has none


@dataclass(frozen=True, eq=False, kw_only=True)
class Kernels(Reading):
    """The kernels of one recipe: its tile functions, and the sizes of their launches.

    A recipe's kernels.py defines one, KERNELS. Planes and buffers go by name. Kernels run on the card of their tensors.
    """

    quantize_tile: Any = None  # None: the reference quantizes, on every device
    lay_out_tile: Any = None  # None: every buffer is a plane
    quantize_sizes: Tiles = field(default_factory=dict)
    buffer_sizes: Tiles | None = None  # tiles that differ; None: buffers that are not planes take two launches
    by_reference: Callable[..., dict[str, Tensor]] | None = None  # lays out instead of kernels
    lay_out_size: Tile = NO_TILE
    moved: tuple[str, ...] = ()  # the planes that lay_out_tile reads
    word: int = 1  # rows and columns of codes that are moved at a time
    padding: tuple[buffers.Padding, buffers.Padding] = ((), ())  # of m and k, over all buffers
    batched: bool = True  # False: a launch quantizes one matrix
    takes_input_max: bool = False  # True: scales depend on the largest value of x's dtype
    row_blocks: Mapping[str, int] = field(default_factory=dict)  # sources with blocks of whole rows -> their rows
    row_ranges: tuple[str, ...] = ()  # those of them whose scales depend on the lowest and highest value
    gemm_scale: Callable[..., Tensor] | None = None  # reorders scales for the GEMM, if a plane needs it
    _choices: dict[Any, Choice] = field(default_factory=dict, init=False)

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
            x = launch.in_rows(x) if self.row_blocks else launch.in_runs(x)  # a program processes whole rows
            names = [name for name in self._written if name in planes]
            for together in self._together(orientations):
                bits = draw_seed(x) if seed is None and self.layout.stochastic else seed
                key = self, launch.quantized_like(x, shared, together, False, False), *names
                choice = partial(self._choice, self.quantize_sizes, together, x.dtype, k)
                plan = plans.cache.of(key, partial(self._quantizing, x, shared, bits, planes, {}, choice, (m, k)))
                plan(*[one for one in (x, shared, bits) if one is not None], *[planes[name] for name in names])
        return planes

    def _together(self, orientations: tuple[str, ...]) -> list[tuple[str, ...]]:
        """The orientations of each launch that quantizes into planes: those of each source, where sources are apart."""
        if not self._apart:
            return [orientations]
        return [served for served in self.serves.values() if any(name in orientations for name in served)]

    @cached_property
    def _apart(self) -> bool:
        """Whether each source is quantized in a separate launch: there are no tiles for all."""
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

        Takes one launch if all are planes, or m is a multiple of `word` and k of 16; else two. swizzled: scales are
        flat, in the GEMM's order. amax: as for `quantize`; that of the whole matrix may be in x's dtype, and that of
        each row, (m,), if no buffer is the amax: the kernel takes the largest. typed: those of one launch have the
        dtypes of `Layout.operand_dtypes`, and their amax may be a part of a larger tensor.
        """
        m, k = x.shape
        amax = self._shared_amax(x, amax, orientations, typed)
        kept = {"amax": amax} if amax is not None and "amax" in self.layout.as_stored else {}
        shared = {name: self.layout.stored_amax(one.to(torch.float32)) for name, one in kept.items()}
        odd = self.buffer_sizes is None or m % self.word or k % launch.WIDE
        if self._apart or (odd and buffers.are_made(self.layout, orientations)):
            planes = self.quantize(x, amax, orientations, None, seed)
            return self.lay_out(planes | shared, m, k, orientations, swizzled)
        if seed is None and self.layout.stochastic:
            seed = draw_seed(x)
        x = launch.in_rows(x)
        like = launch.quantized_like(x, amax, orientations, swizzled, typed)
        key, planned = (self, like), lambda: self._quantizing_buffers(x, amax, seed, like, typed)
        plan: LaunchPlan = plans.cache.get(key) or plans.cache.of(key, planned)
        made = plan(*[one for one in (x, amax, seed) if one is not None])
        return self._buffers(shared, dict(zip(plan.new, made, strict=True)), orientations, swizzled)

    def _quantizing_buffers(
        self, x: Tensor, amax: Tensor | None, seed: Tensor | None, like: Like, typed: bool
    ) -> LaunchPlan:
        """The plan that quantizes matrices like x directly into buffers, and into planes that are buffers."""
        (m, k), (*_, orientations, swizzled) = x.shape, like
        launch.plane_facts(self.layout, m, k, orientations)  # raises for an unsupported shape
        made = buffers.new(self.layout, m, k, orientations, x.device)
        read = {one.plane for one in buffers.entries(self.layout, orientations)}
        facts = self.layout.written(m, k, orientations)
        planes = launch.new({name: one for name, one in facts.items() if name in read}, x.device)
        choice = partial(self._choice, self.buffer_sizes or self.quantize_sizes, orientations, x.dtype, k)
        cover = buffers.cover(self.padding, m, k) if made else (m, k)
        plan = self._quantizing(x, amax, seed, planes, made, choice, cover, swizzled)
        return plan.making(self._new(planes, made, orientations, typed))

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
        """A plan that repeats `quantize_batch` while xs and outs keep their addresses, given the first amax, if any;
        others keep their offsets from it. None if tables do not take all matrices. Raises as batches.split."""
        found, alone = zip(*[self._batch(xs, shared, one, outs) for one in self._together(orientations)], strict=True)
        return None if any(alone) else LaunchPlan.joined(chain(*found))

    def _batch(
        self, xs: Sequence[Tensor], shared: Sequence[Tensor] | None, together: tuple[str, ...], outs: Sequence[Planes]
    ) -> tuple[list[LaunchPlan], Sequence[int]]:
        """The plans of all matrices that tables take, and the other matrices."""
        x, amax = xs[0], shared[0] if shared else None
        most = max(x.shape[1] for x in xs)
        choice = self._choice(self.quantize_sizes, together, x.dtype, most)
        tables, alone = batches.split(self.layout, self._written, xs, shared, together, outs, choice.span, choice.step)
        key = self, together, x.dtype, most, amax is None
        return [table.plans.of(key, partial(self._plan_of_table, table, amax, choice, x)) for table in tables], alone

    def _plan_of_table(self, table: batches.Table, amax: Tensor | None, choice: Choice, x: Tensor) -> LaunchPlan:
        """The plan for the matrices of a table. amax: the first one, if any. x: one of the matrices."""
        given = *_NONE, amax, choice.input_max, None, *_NONE, *_NONE
        return self._launching(choice, table, given, (*self._masks, DTYPES[x.dtype]), x.device)

    def _quantizing(
        self,
        x: Tensor,
        amax: Tensor | None,
        seed: Tensor | None,
        planes: Planes,
        made: Planes,
        chosen: Callable[[], Choice],
        cover: tuple[int, int],
        swizzled: bool = False,
    ) -> LaunchPlan:
        """The plan that quantizes matrices like x, from `in_runs`, into those planes and buffers that are given.

        cover: the rows and columns that tiles cover.
        """
        (m, k), choice = x.shape, chosen()
        step_m, step_k = choice.step
        even = m % step_m == 0 and k % step_k == 0 and cover == (m, k)
        table = batches.Table(None, 0, launch.programs(*cover, *choice.span), False, even, plans.Plans())
        several = amax is not None and amax.numel() > 1 and self.layout.amax_columns is None
        tensors = *map(planes.get, self._planes), *map(made.get, self._made)
        given = x, m, k, *x.stride(), cover[1], amax, choice.input_max, seed, *tensors
        amaxes = 1 << (m - 1).bit_length() if several else 0
        return self._launching(choice, table, given, (0, 0, None), x.device, swizzled, amaxes)

    def _launching(
        self,
        choice: Choice,
        table: batches.Table,
        given: tuple[Any, ...],
        kinds: tuple[Any, ...],
        device: torch.device,
        swizzled: bool = False,
        amaxes: int = 0,
    ) -> LaunchPlan:
        """The launch of quantize_kernel. given: its arguments after the table. kinds: KINDS to DTYPE."""
        tile_m, tile_k, warps, pieces, registers, cover = choice.tile
        flags = self.quantize_tile, choice.rowwise, choice.columnwise, swizzled, *kinds, table.rows, table.aligned
        sizes = tile_m, tile_k, pieces, table.even, launch.hardware(device), *cover, amaxes, *choice.rows
        args, most = (table.entries, *given, *flags, *sizes), launch.registers(device, registers)
        return LaunchPlan.of(quantize_kernel, table.programs, args, warps, most, bound=[table.entries])

    def _shared_amax(
        self, x: Tensor, amax: Tensor | None, orientations: tuple[str, ...], passing: bool = False
    ) -> Tensor | None:
        """The caller's amax, else that of x if scales need one. passing: as of matrix_amax."""
        if amax is None and self.layout.takes_amax(orientations):
            return amaxes.matrix_amax(x, self.layout.amax_columns, passing=passing)
        return amax

    def again(self, like: Like, names: Sequence[str], typed: bool) -> LaunchPlan | None:
        """The plan that returns buffers `names` as the launch for `like` did; None if there is none, or it does not
        write all of them. typed: in the dtypes of `Layout.operand_dtypes`."""
        plan: LaunchPlan | None = plans.cache.get((self, like))
        *_, orientations, swizzled = like
        entries = {one.name: one for one in buffers.entries(self.layout, orientations)}
        if plan is None or any(one.plane and one.is_swizzled and swizzled for one in entries.values()):
            return None
        dtypes = self.layout.operand_dtypes if typed else {}
        wanted = [entries[name] for name in names]
        flat = [one.is_flat or (one.is_swizzled and swizzled) for one in wanted]
        return plan.returning([(one.source, dtypes.get(one.name), to) for one, to in zip(wanted, flat, strict=True)])

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
            choice = Choice(*flags, input_max, tile, rows).fitted(k)
            self._choices[key] = choice
        return choice

    @cached_property
    def _made(self) -> tuple[str, ...]:
        """The buffers that are not planes, in order, padded to the six that kernels take."""
        facts = self.layout.buffers(self.layout.multiple_m, self.layout.multiple_k)
        return launch.pad_to_six(tuple(name for name in facts if name not in self.layout.as_stored))

    @cached_property
    def _moved(self) -> tuple[str, ...]:
        """The planes that lay_out_tile reads, padded to the six that kernels take."""
        return launch.pad_to_six(self.moved)

    @cached_property
    def _masks(self) -> tuple[int, int]:
        """The dtypes of planes; a bit for each with a single value."""
        scalars = sum((self.layout.stored[n][:2] == (None, None)) << at for at, n in enumerate(self._written))
        return kinds_of(self.layout.dtypes[name] for name in self._written), scalars

    # -------------------------------------------------------------------------------------------------------- lay out
    def lay_out(
        self, planes: Planes, m: int, k: int, orientations: tuple[str, ...], swizzled: bool = False
    ) -> dict[str, Tensor]:
        """Planes -> buffers of the orientations, in one launch or none. Raises ValueError for planes not of (m, k)."""
        launch.check_planes(self.layout, planes, m, k)
        if self.by_reference is not None:
            made = self.by_reference(planes, m, k, orientations)
            new: Made = {(False, name): buffer for name, buffer in made.items()}
            return self._buffers(planes, new, orientations, swizzled)
        planes = launch.readable(planes)
        moved = [name for name in self.moved if name in planes]
        device = next(iter(planes.values())).device
        like = launch.laid_out_like(m, k, device, orientations, swizzled, len(moved))

        def plan() -> LaunchPlan:
            made = buffers.new(self.layout, m, k, orientations, device)
            launches = self._laying_out(planes, made, m, k, swizzled) if made else LaunchPlan([])
            return launches.reading(moved).making(self._new({}, made, orientations, False))

        found: LaunchPlan = plans.cache.get((self, like)) or plans.cache.of((self, like), plan)
        new = dict(zip(found.new, found(*[planes[name] for name in moved]), strict=True))
        return self._buffers(planes, new, orientations, swizzled)

    def _laying_out(self, planes: Planes, made: Planes, m: int, k: int, swizzled: bool) -> LaunchPlan:
        """The plan that fills the buffers in `made` from a weight's planes."""
        cover_m, cover_k = buffers.cover(self.padding, m, k)
        tile_m, tile_k, warps, *_ = self.lay_out_size
        in_words = m % self.word == 0 and k % self.word == 0
        tiled = in_words, tile_m, tile_k, launch.hardware(next(iter(made.values())).device)
        tensors = *map(planes.get, self._moved), *map(made.get, self._made)
        args = m, k, cover_k, *tensors, self.lay_out_tile, swizzled, *tiled
        return LaunchPlan.of(lay_out_kernel, launch.programs(cover_m, cover_k, tile_m, tile_k), args, warps)

    def _new(self, planes: Planes, made: Planes, orientations: tuple[str, ...], typed: bool) -> Made:
        """The tensors that a launch makes, in the order of its arguments. typed: in the dtypes of
        `Layout.operand_dtypes`, if all buffers that share a tensor have the same one."""
        dtypes: dict[tuple[bool, str], set[Any]] = defaultdict(set)
        for one in buffers.entries(self.layout, orientations):
            dtypes[one.source].add(self.layout.operand_dtypes.get(one.name) if typed else None)
        every = [((True, name), planes[name]) for name in self._planes if name in planes]
        every += [((False, name), made[name]) for name in self._made if name in made]
        return {
            source: tensor.view(*dtypes[source]) if len(dtypes[source] - {None}) == len(dtypes[source]) == 1 else tensor
            for source, tensor in every
        }

    def _buffers(self, planes: Planes, made: Made, orientations: tuple[str, ...], swizzled: bool) -> dict[str, Tensor]:
        """All buffers of the orientations, in the layout's order: planes, and `made` ones."""
        result: dict[str, Tensor] = {}
        for name, plane, is_flat, is_swizzled in buffers.entries(self.layout, orientations):
            source = plane is not None, plane or name
            buffer = made[source] if source in made else planes[source[1]]
            if is_swizzled and swizzled:
                buffer = self._in_order(name, buffer) if plane or self.by_reference else buffer.flatten()
            result[name] = buffer.flatten() if is_flat else buffer
        return result

    def _in_order(self, name: str, scale: Tensor) -> Tensor:
        """A scale or zero point that no kernel reorders, in the GEMM's order: 1-D."""
        assert self.gemm_scale is not None
        orientation, _, kind = name.rpartition("_")
        return self.gemm_scale({name: scale}, orientation, kind)

"""Dequantizing: one weight, the same weight repeatedly, and many in one launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from layoutc.ints.sizes import up
from layoutc.runtime.facts import Layout
from layoutc.runtime.kernels import batches, launch, plans
from layoutc.runtime.kernels.choices import Tile
from layoutc.runtime.kernels.launch_plan import LaunchPlan
from layoutc.runtime.parts import Parts
from layoutc.runtime.triton.kernels import dequantize_kernel

Planes = Mapping[str, Tensor]
Alone = tuple[LaunchPlan, list[Tensor]]  # with the tensors that it writes
_NEVER = (2**31, 2**31)  # beyond all row counts


@dataclass(frozen=True, eq=False, kw_only=True)
class Reading:
    """Dequantizes the planes of one recipe: its tile function, and the sizes of its launches."""

    layout: Layout
    dequantize_tile: Any
    dequantize_sizes: Mapping[str, Tile]  # by orientation
    serves: Mapping[str, tuple[str, ...]]  # each source -> the orientations that its planes serve
    codebooks: tuple[float, ...] = ()  # values that dequantizing looks up in memory

    @cached_property
    def _written(self) -> tuple[str, ...]:
        """The planes that kernels write and read, in the layout's order."""
        return tuple(name for name in self.layout.stored if name != "amax")

    @cached_property
    def _planes(self) -> tuple[str, ...]:
        """`_written`, padded to the six that kernels take."""
        return launch.pad_to_six(self._written)

    def dequantize(self, planes: Planes, m: int, k: int, orientation: str, dtype: torch.dtype) -> Tensor:
        """Planes -> the (m, k) values of an orientation, computed in fp32 and rounded once to `dtype`."""
        read = self.read_of(launch.readable(planes))
        if not (m and k):
            return torch.empty(m, k, dtype=dtype, device=next(iter(read.values())).device)
        (values,) = self.values_plan((m, k), dtype, read, orientation)(*read.values())
        return values

    def read_of(self, planes: Planes) -> dict[str, Tensor]:
        """The planes that dequantizing reads, in order."""
        return {name: planes[name] for name in ("amax", *self._written) if name in planes}

    def values_plan(
        self, shape: tuple[int, int], dtype: torch.dtype, read: Planes, orientation: str, parts: Parts | None = None
    ) -> LaunchPlan:
        """The plan for the (m, k) values of planes from `read_of`, which differ between calls, as after gathers."""
        device = next(iter(read.values())).device

        def plan() -> LaunchPlan:
            (m, k), (tile_m, tile_k, *_) = shape, self.dequantize_sizes[orientation]
            out = launch.template(shape, dtype, device)
            grid = launch.programs(*_covered(m, k, tile_m, parts), tile_m, tile_k)
            kind = 0, False, _is_even(m, k, (tile_m, tile_k), parts)
            launches = self._reading(None, grid, shape, read, orientation, out, parts, kind)
            return launches.reading(read).making({"values": out})

        return plans.cache.of((self, "values", shape, dtype, device, orientation, tuple(read), parts), plan)

    def into(
        self, weights: Sequence[Planes], orientation: str, outs: Sequence[Tensor], parts: Sequence[Parts | None]
    ) -> tuple[LaunchPlan, list[Alone]]:
        """Launches that write the values of weights, as `dequantize`: few of them, valid while no address changes,
        without arguments; and one for each weight that no table takes.

        weights: the planes of each, or those of its first part. outs: (m, k) of each, contiguous, of one dtype, on one
        device, at multiples of 4 bytes. parts: of each.
        """
        tile = self.dequantize_sizes[orientation][:2]
        kinds: dict[tuple[bool, bool], list[int]] = {}
        for index, (out, own) in enumerate(zip(outs, parts, strict=True)):
            kinds.setdefault((own is not None, _is_even(out.shape[0], out.shape[1], tile, own)), []).append(index)
        found: list[LaunchPlan] = []
        alone: list[Alone] = []
        for (in_parts, even), members in kinds.items():
            read = [self.read_of(weights[at] if in_parts else launch.readable(weights[at])) for at in members]
            those, own_parts = [outs[at] for at in members], [parts[at] for at in members]
            tables, others = self._tables_of_kind(read, those, own_parts, tile, even)
            # A launch only keeps the memory of the table and the first amax; of other tensors it reads the dtype.
            stand_ins = {name: plane if name == "amax" else _stand_in(plane) for name, plane in read[0].items()}
            like = (None, None), stand_ins, orientation, _stand_in(those[0]), own_parts[0]
            found += [self._reading(table.entries, table.programs, *like, table.kind) for table in tables]
            for at in others:
                out, planes = those[at], read[at]
                if out.numel():
                    shape = out.shape[0], out.shape[1]
                    plan = self.values_plan(shape, out.dtype, planes, orientation, own_parts[at])
                    alone.append((plan, [*planes.values(), out]))
        return LaunchPlan.joined(found), alone

    def _tables_of_kind(
        self,
        weights: Sequence[Planes],
        outs: Sequence[Tensor],
        parts: Sequence[Parts | None],
        tile: tuple[int, int],
        even: bool,
    ) -> tuple[Sequence[batches.Table], Sequence[int]]:
        """The tables of one kind: in parts or whole, of whole tiles or not."""
        columns = {name: tuple([planes[name].data_ptr() for planes in weights]) for name in weights[0]}
        amaxes = columns.pop("amax", (0,) * len(outs))
        offsets = tuple([(address - amaxes[0]) // 4 for address in amaxes])  # in fp32 values from the first one
        shapes = [(out.shape[0], out.shape[1]) for out in outs]
        none = (0,) * len(outs)
        read = [columns.get(one, none) for one in self._planes]
        fields = [*zip(*shapes, strict=True), offsets, batches.addresses_of(outs), *read]
        wide = [False, True, False, *[True] * 7]
        if parts[0] is not None:
            fields += [tuple([one.rows for one in parts if one]), tuple([one.nbytes for one in parts if one])]
            wide += [False, True]
        covers = [_covered(*shape, tile[0], own) for shape, own in zip(shapes, parts, strict=True)]
        return batches.tables_of(outs[0].device, covers, fields, wide, tile, tile if even else _NEVER)

    def _reading(
        self,
        entries: Tensor | None,
        grid: int,
        shape: tuple[int | None, int | None],
        planes: Planes,
        orientation: str,
        out: Tensor,
        parts: Parts | None,
        kind: tuple[int, bool, bool],
    ) -> LaunchPlan:
        """The launch of dequantize_kernel. kind: ROWS, ALIGNED and EVEN. With a table, no tensor is given in calls."""
        tile_m, tile_k, warps, *_ = self.dequantize_sizes[orientation]
        serves = (orientation in self.serves.get(name, ()) for name in ("rowwise", "columnwise"))
        stored, parted = self.layout.stored, 0
        for at, name in enumerate(self._written if parts is not None else ()):
            parted |= (name in planes and stored[name].rows_per_value is not None) << at
        rows, aligned, even = kind
        sizes = parted, rows, aligned, tile_m, tile_k, even, launch.hardware(out.device)
        books = launch.codebooks(self.codebooks, out.device)
        of_parts = (None, None) if parts is None or entries is not None else (parts.rows, parts.nbytes)
        read = planes.get("amax"), *map(planes.get, self._planes), books, *of_parts
        args = entries, out, *shape, *read, self.dequantize_tile, *serves, *sizes
        bound = [books] if entries is None else [one for one in args if isinstance(one, Tensor)]
        return LaunchPlan.of(dequantize_kernel, grid, args, warps, bound=bound, last=out)


def _stand_in(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def _covered(m: int, k: int, tile_m: int, parts: Parts | None) -> tuple[int, int]:
    """The rows and columns that tiles cover: whole tiles of each part."""
    return (m if parts is None else parts.ranks * up(parts.rows, tile_m)), k


def _is_even(m: int, k: int, tile: tuple[int, int], parts: Parts | None) -> bool:
    """True if the matrix, or each part of it, consists of whole tiles."""
    whole = parts is None or (m == parts.ranks * parts.rows and parts.rows % tile[0] == 0)
    return whole and m % tile[0] == 0 and k % tile[1] == 0

"""Dequantizing: one weight, the same one again and again, and many in one launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from layoutc.ints.sizes import up
from layoutc.runtime.facts import Layout
from layoutc.runtime.kernels import batches, launch, plans
from layoutc.runtime.kernels.choices import Tile
from layoutc.runtime.kernels.direct import Arguments, Constants
from layoutc.runtime.kernels.launch_plan import LaunchPlan
from layoutc.runtime.parts import Parts
from layoutc.runtime.triton.kernels import dequantize_kernel

Planes = Mapping[str, Tensor]
_NEVER = (2**31, 2**31)  # no matrix has so many rows


class Kernels(Protocol):
    """What dequantizing asks of a recipe's kernels."""

    @property
    def layout(self) -> Layout: ...
    @property
    def dequantize_tile(self) -> Any: ...
    @property
    def dequantize_sizes(self) -> Mapping[str, Tile]: ...
    @property
    def serves(self) -> Mapping[str, tuple[str, ...]]: ...
    @property
    def codebooks(self) -> tuple[float, ...]: ...
    @property
    def _written(self) -> tuple[str, ...]: ...
    @property
    def _planes(self) -> tuple[str, ...]: ...


def read_of(kernels: Kernels, planes: Planes) -> dict[str, Tensor]:
    """The planes that dequantizing reads, in its order."""
    return {name: planes[name] for name in ("amax", *kernels._written) if name in planes}


def plan_of(
    kernels: Kernels,
    shape: tuple[int, int],
    dtype: torch.dtype,
    read: Planes,
    orientation: str,
    parts: Parts | None = None,
) -> LaunchPlan:
    """What makes the (m, k) values of such planes. They may be other tensors each time, as gathers bring them."""
    device = next(iter(read.values())).device

    def plan() -> LaunchPlan:
        (m, k), (tile_m, tile_k, *_) = shape, kernels.dequantize_sizes[orientation]
        out = launch.template(shape, dtype, device)
        grid = launch.programs(*_covered(m, k, tile_m, parts), tile_m, tile_k)
        kind = 0, False, _is_even(m, k, (tile_m, tile_k), parts)
        arguments, books = _arguments(kernels, None, grid, shape, read, orientation, out, parts, kind)
        launches = LaunchPlan.of(dequantize_kernel, arguments, [books], last=out)
        return launches.reading(read).making({"values": out})

    return plans.cache.of((kernels, "values", shape, dtype, device, orientation, tuple(read), parts), plan)


Alone = tuple[LaunchPlan, list[Tensor]]  # with the tensors that it is launched into


def into(
    kernels: Kernels,
    weights: Sequence[Planes],
    orientation: str,
    outs: Sequence[Tensor],
    parts: Sequence[Parts | None],
) -> tuple[LaunchPlan, list[Alone]]:
    """What writes the values of weights as `Kernels.dequantize` gives them: few launches, good while all stay in place,
    which need no tensors; and those of weights that no table takes.

    weights: the planes of each, or those of its first part. outs: (m, k) of each, contiguous, of one dtype, on one
    device, at multiples of 4 bytes. parts: of each.
    """
    tile = kernels.dequantize_sizes[orientation][:2]
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for index, (out, own) in enumerate(zip(outs, parts, strict=True)):
        kinds.setdefault((own is not None, _is_even(out.shape[0], out.shape[1], tile, own)), []).append(index)
    found: list[LaunchPlan] = []
    alone: list[Alone] = []
    for (in_parts, even), members in kinds.items():
        read = [read_of(kernels, weights[at] if in_parts else launch.readable(weights[at])) for at in members]
        of_kind = [outs[at] for at in members], [parts[at] for at in members]
        tables, others = _tables_of_kind(kernels, read, *of_kind, tile, even)
        found += [_of_table(kernels, one, read[0], orientation, of_kind[0][0], of_kind[1][0]) for one in tables]
        for at in others:
            out, own = of_kind[0][at], of_kind[1][at]
            if out.numel():
                plan = plan_of(kernels, (out.shape[0], out.shape[1]), out.dtype, read[at], orientation, own)
                alone.append((plan, [*read[at].values(), out]))
    return LaunchPlan.joined(found), alone


def _tables_of_kind(
    kernels: Kernels,
    weights: Sequence[Planes],
    outs: Sequence[Tensor],
    parts: Sequence[Parts | None],
    tile: tuple[int, int],
    even: bool,
) -> tuple[Sequence[batches.Table], Sequence[int]]:
    """Of those in parts, or those that are whole; of those of whole tiles, or the others."""
    columns = {name: tuple([planes[name].data_ptr() for planes in weights]) for name in weights[0]}
    amaxes = columns.pop("amax", (0,) * len(outs))
    offsets = tuple([(address - amaxes[0]) // 4 for address in amaxes])  # in fp32 values from the first one
    shapes = [(out.shape[0], out.shape[1]) for out in outs]
    ms, ks = zip(*shapes, strict=True)
    none = (0,) * len(outs)
    fields = [ms, ks, offsets, tuple(map(Tensor.data_ptr, outs)), *[columns.get(one, none) for one in kernels._planes]]
    wide = [False, True, False, *[True] * 7]
    if parts[0] is not None:
        fields += [tuple([one.rows for one in parts if one]), tuple([one.nbytes for one in parts if one])]
        wide += [False, True]
    covers = [_covered(*shape, tile[0], own) for shape, own in zip(shapes, parts, strict=True)]
    return batches.tables_of(outs[0].device, covers, fields, wide, tile, tile if even else _NEVER)


def _of_table(
    kernels: Kernels, table: batches.Table, planes: Planes, orientation: str, out: Tensor, parts: Parts | None
) -> LaunchPlan:
    """The launch for a table of weights like this one. It keeps no memory but that of the table and the first amax:
    dtypes alone are looked at of other planes, and of values."""
    dtypes = {name: plane if name == "amax" else _stand_in(plane) for name, plane in planes.items()}
    like = (None, None), dtypes, orientation, _stand_in(out), parts, table.kind
    arguments, _ = _arguments(kernels, table.entries, (table.programs,), *like)
    return LaunchPlan.of(dequantize_kernel, arguments, arguments.args)


def _stand_in(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def _arguments(
    kernels: Kernels,
    entries: Tensor | None,
    grid: tuple[int],
    shape: tuple[int | None, int | None],
    planes: Planes,
    orientation: str,
    out: Tensor,
    parts: Parts | None,
    kind: tuple[int, bool, bool],
) -> tuple[Arguments, Tensor | None]:
    """Of the kernel, and codebooks among them. kind: ROWS, ALIGNED and EVEN."""
    tile_m, tile_k, warps, *_ = kernels.dequantize_sizes[orientation]
    serves = (orientation in kernels.serves.get(name, ()) for name in ("rowwise", "columnwise"))
    stored, parted = kernels.layout.stored, 0
    for at, name in enumerate(kernels._written if parts is not None else ()):
        parted |= (name in planes and stored[name].rows_per_value is not None) << at
    rows, aligned, even = kind
    sizes = parted, rows, aligned, tile_m, tile_k, even, launch.hardware(out.device)
    books = launch.codebooks(kernels.codebooks, out.device)
    of_parts = (None, None) if parts is None or entries is not None else (parts.rows, parts.nbytes)
    args = (entries, out, *shape, planes.get("amax"), *map(planes.get, kernels._planes), books, *of_parts)
    return Arguments(grid, args, warps, None, Constants((kernels.dequantize_tile, *serves, *sizes))), books


def _covered(m: int, k: int, tile_m: int, parts: Parts | None) -> tuple[int, int]:
    """The rows and columns that tiles cover: whole tiles of each part."""
    return (m if parts is None else parts.ranks * up(parts.rows, tile_m)), k


def _is_even(m: int, k: int, tile: tuple[int, int], parts: Parts | None) -> bool:
    """True if the matrix, or each part of it, consists of whole tiles."""
    whole = parts is None or (m == parts.ranks * parts.rows and parts.rows % tile[0] == 0)
    return whole and m % tile[0] == 0 and k % tile[1] == 0

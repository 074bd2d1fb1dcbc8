"""Dequantizing: one weight, the same one again and again, and many in one launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from layoutc.ints.sizes import up
from layoutc.runtime.facts import Layout
from layoutc.runtime.kernels import batches, launch
from layoutc.runtime.kernels.choices import Tile
from layoutc.runtime.kernels.direct import Bound, Constants
from layoutc.runtime.parts import Parts
from layoutc.runtime.torch_private import storage_key
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
    @property
    def _reading(self) -> launch.Launches[Bound]: ...


# ----------------------------------------------------------------------------------------------------------- one weight
def read_of(kernels: Kernels, planes: Planes) -> dict[str, Tensor]:
    """The planes that dequantizing reads, in its order."""
    return {name: planes[name] for name in ("amax", *kernels._written) if name in planes}


def dequantizing(kernels: Kernels, out: Tensor, read: Planes, orientation: str, parts: Parts | None = None) -> Bound:
    """The launch that dequantizes such planes into such a tensor, (m, k), kept for the next of them."""
    (m, k), key = out.shape, (*out.shape, out.device, orientation, out.dtype, tuple(read), parts)
    if (bound := kernels._reading.get(key)) is None:
        tile_m, tile_k, *_ = kernels.dequantize_sizes[orientation]
        grid = launch.programs(*_covered(m, k, tile_m, parts), tile_m, tile_k)
        kind = 0, False, _is_even(m, k, (tile_m, tile_k), parts)
        bound = kernels._reading[key] = _bound(kernels, None, grid, (m, k), read, orientation, out, parts, kind)
    return bound


class Reading:
    """A launch for planes of a layout and a shape. They may be other tensors each time, as gathers bring them."""

    __slots__ = ("_bound", "_card", "_names", "_template", "shape")

    def __init__(self, bound: Bound, planes: Planes, shape: tuple[int, int], dtype: torch.dtype) -> None:
        """planes: what the launch reads, in its order. shape: (m, k) of the matrix that they hold."""
        self._bound, self._names, self.shape = bound, tuple(planes), shape
        self._template = launch.template(shape, dtype, next(iter(planes.values())).device)
        self._card = self._template.get_device()  # -1 for a CPU

    @classmethod
    def of(
        cls, kernels: Kernels, planes: Planes, shape: tuple[int, int], orientation: str, dtype: torch.dtype
    ) -> Reading | None:
        """What does `Kernels.dequantize` again; None where that copies planes first, or launches nothing."""
        read = read_of(kernels, planes)
        if 0 in shape or any(one is not read[name] for name, one in launch.readable(read).items()):
            return None
        out = torch.empty(shape, dtype=dtype, device=next(iter(read.values())).device)
        return cls(dequantizing(kernels, out, read, orientation), read, shape, dtype)

    def __call__(self, planes: Planes) -> Tensor | None:
        """The (m, k) values; None if anything is not as it was: then the ordinary way finds out what it is.

        That is: planes that are missing, freed, strided, misaligned or on another device.
        """
        card, found = self._card, []
        for name in self._names:
            plane = planes.get(name)
            if plane is None or not plane.is_contiguous() or plane.get_device() != card:
                return None
            address = plane.data_ptr()
            if address == 0 or address & 3:
                return None
            found.append(plane)
        out = torch.empty_like(self._template)
        self._bound(out, *found)
        return out


# --------------------------------------------------------------------------------------------------------- many weights
class Launch(NamedTuple):
    """What writes the values of some weights."""

    bound: Bound
    tensors: tuple[Tensor, ...]  # what it is called with
    is_of_table: bool  # which has all addresses of planes and values: of the tensors, dtypes alone are looked at

    def letting_go(self, storage: Tensor) -> Launch | None:
        """The same without a reference to the memory of a tensor, into which others must have been written at the same
        address before it is called; None if it needs one."""
        memory = storage_key(storage)
        tensors = tuple([_stand_in(one) if storage_key(one) == memory else one for one in self.tensors])
        return self._replace(tensors=tensors) if self.is_of_table else None


def _stand_in(plane: Tensor) -> Tensor:
    return torch.empty(0, dtype=plane.dtype, device=plane.device)


def launches(
    kernels: Kernels,
    weights: Sequence[Planes],
    orientation: str,
    outs: Sequence[Tensor],
    parts: Sequence[Parts | None],
) -> list[Launch]:
    """What writes the values of weights as `Kernels.dequantize` gives them: few launches, good while all stay in place.

    weights: the planes of each, or those of its first part. outs: (m, k) of each, contiguous, of one dtype, on one
    device, at multiples of 4 bytes. parts: of each.
    """
    tile = kernels.dequantize_sizes[orientation][:2]
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for index, (out, own) in enumerate(zip(outs, parts, strict=True)):
        kinds.setdefault((own is not None, _is_even(out.shape[0], out.shape[1], tile, own)), []).append(index)
    found: list[Launch] = []
    for (in_parts, even), members in kinds.items():
        read = [read_of(kernels, weights[at] if in_parts else launch.readable(weights[at])) for at in members]
        of_kind = [outs[at] for at in members], [parts[at] for at in members]
        found += _launches_of_kind(kernels, read, orientation, *of_kind, even)
    return found


def _launches_of_kind(
    kernels: Kernels,
    weights: Sequence[Planes],
    orientation: str,
    outs: Sequence[Tensor],
    parts: Sequence[Parts | None],
    even: bool,
) -> list[Launch]:
    """Of those in parts, or those that are whole; of those of whole tiles, or the others."""
    tile = kernels.dequantize_sizes[orientation][:2]
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
    tables, alone = batches.tables_of(outs[0].device, covers, fields, wide, tile, tile if even else _NEVER)
    found: list[Launch] = []
    for table in tables:
        assert table.entries is not None
        bound = _of_table(kernels, table, weights[0], orientation, outs[0], parts[0])
        found.append(Launch(bound, (table.entries, outs[0], *weights[0].values()), True))
    for index in alone:
        if outs[index].numel():
            bound = dequantizing(kernels, outs[index], weights[index], orientation, parts[index])
            found.append(Launch(bound, (outs[index], *weights[index].values()), False))
    return found


def _of_table(
    kernels: Kernels, table: batches.Table, planes: Planes, orientation: str, out: Tensor, parts: Parts | None
) -> Bound:
    """The launch for a table of weights like this one, kept for the next such table."""
    in_parts = parts is not None
    key = "batch", *table[1:], out.device, orientation, out.dtype, tuple(planes), in_parts
    if (bound := kernels._reading.get(key)) is None:
        grid, kind = (table.programs,), (table.rows, table.aligned, table.even)
        bound = _bound(kernels, table.entries, grid, (None, None), planes, orientation, out, parts, kind)
        kernels._reading[key] = bound
    return bound


def _bound(
    kernels: Kernels,
    entries: Tensor | None,
    grid: tuple[int],
    shape: tuple[int | None, int | None],
    planes: Planes,
    orientation: str,
    out: Tensor,
    parts: Parts | None,
    kind: tuple[int, bool, bool],
) -> Bound:
    """kind: ROWS, ALIGNED and EVEN of the kernel."""
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
    constants = Constants((kernels.dequantize_tile, *serves, *sizes))
    return Bound(dequantize_kernel, grid, args, warps, None, constants, kept=books)


def _covered(m: int, k: int, tile_m: int, parts: Parts | None) -> tuple[int, int]:
    """The rows and columns that tiles cover: whole tiles of each part."""
    return (m if parts is None else parts.ranks * up(parts.rows, tile_m)), k


def _is_even(m: int, k: int, tile: tuple[int, int], parts: Parts | None) -> bool:
    """True if the matrix, or each part of it, consists of whole tiles."""
    whole = parts is None or (m == parts.ranks * parts.rows and parts.rows % tile[0] == 0)
    return whole and m % tile[0] == 0 and k % tile[1] == 0

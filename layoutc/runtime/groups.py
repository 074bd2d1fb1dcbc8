"""Host side of grouped kernels: one launch for many matrices, which a table on the card lists.

A table holds addresses, so it is made anew only when a matrix has moved, or what is written: parameters and their
masters stay where they are from step to step. Matrices that no table holds (strided, empty, or of 2^31 elements and
more) are served one by one; so are all of them while a CUDA graph is captured, which would outlive a table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from layoutc.runtime import launch, operators
from layoutc.runtime.facts import Facts, Layout, cdiv
from layoutc.runtime.tensor import QuantizedTensor

ROWS = (32, 256)  # sizes of tables: every program looks for its matrix among all rows
KEPT = 128  # tables, the latest ones
AMAX_TILE = (1, 8192, 8)  # rows, columns and warps; a contiguous matrix is one row
_MOST = 2**31 - 1  # programs of a launch; elements of a matrix in a table


class Table(NamedTuple):
    """Matrices of one launch. `entries`: int64, what triton_groups reads, in `rows` rows; the rest: see there."""

    entries: Tensor
    rows: int
    programs: int
    aligned: bool
    even: bool


# (aligned, even, row): what a matrix's launch is compiled for, and its programs and fields.
Member = tuple[bool, bool, tuple[int, ...]]


# ------------------------------------------------------------------------------------------------------------- quantize
def split(
    layout: Layout,
    names: Sequence[str],
    xs: Sequence[Tensor],
    amaxes: Sequence[Tensor] | None,
    orientations: Sequence[str],
    outs: Sequence[Mapping[str, Tensor]],
    tile: tuple[int, int],
) -> tuple[list[Table], list[int]]:
    """Tables of the matrices that are quantized together, and the positions of those that are to be one by one.

    names: the planes that the kernel takes, in its order. amaxes: fp32; their places are as seen from the first. Raises
    ValueError where matrices differ in dtype or device, where amaxes or outs are not as many or lie elsewhere, and for
    planes that a kernel can't write into: the card can't tell, as it only sees addresses.
    """
    if len(outs) != len(xs) or (amaxes is not None and len(amaxes) != len(xs)):
        raise ValueError(f"{layout.name}: {len(xs)} matrices need as many outs, and as many amaxes where any are given")
    where = xs[0].get_device()
    if any(x.dtype != xs[0].dtype or x.get_device() != where for x in xs):
        raise ValueError(f"{layout.name}: the matrices of a group have one dtype and lie on one device")
    if any(amax.dtype != torch.float32 or amax.get_device() != where for amax in amaxes or ()):
        raise ValueError(f"{layout.name}: amaxes of a group are float32, on the device of its matrices")
    slots = {shape: _slots(layout, names, shape, orientations) for shape in {x.shape for x in xs}}
    capturing = _capturing(xs)
    base = amaxes[0].data_ptr() if amaxes else 0
    members, alone = [], []
    for index, (x, out) in enumerate(zip(xs, outs, strict=True)):
        (m, k), address = x.shape, x.data_ptr()
        fields = [m, k, (amaxes[index].data_ptr() - base) // 4 if amaxes else 0, address, *[0] * len(names)]
        unaligned = k | address
        for slot, name, shape, dtype in slots[x.shape]:
            plane = out[name]
            fields[slot] = address = plane.data_ptr()
            if plane.shape != shape or plane.dtype != dtype or address % 4 or not plane.is_contiguous():
                launch.given_planes(layout, {name: Facts(shape, dtype)}, out)  # says what is wrong
            if plane.get_device() != where:
                raise ValueError(f"{layout.name}: {name} lies on {plane.device}, the matrices on {x.device}")
            if len(shape) > 1:
                unaligned |= address
        if capturing or not _fits(x):
            alone.append(index)
        else:
            members.append(_member(fields, unaligned, tile))
    return _tables(xs[0].device, members) if members else [], alone


def _slots(
    layout: Layout, names: Sequence[str], shape: Sequence[int], orientations: Sequence[str]
) -> list[tuple[int, str, tuple[int, ...], torch.dtype]]:
    """(field, name, shape, dtype) of each plane that is written for a matrix."""
    facts = launch.plane_facts(layout, shape[0], shape[1], tuple(orientations))
    return [(4 + slot, name, *facts[name]) for slot, name in enumerate(names) if name in facts]


# --------------------------------------------------------------------------------------------------------------- amaxes
def group_amax(xs: Sequence[Tensor], block_k: int | None = None) -> Tensor:
    """The largest magnitude of each of n matrices in fp32, bf16 or fp16 on one device, (n,) fp32; NaN wins.

    block_k: what matrix_amax gives for it instead, (1, blocks) for each matrix, flattened and one after another. Raises
    ValueError where they lie on several devices.
    """
    places = list(accumulate((_count(x, block_k) for x in xs), initial=0))
    packed = torch.zeros(places.pop(), dtype=torch.int32, device=xs[0].device if xs else None)
    _raise_amaxes(packed, list(zip(places, xs, strict=True)), block_k)
    return packed.view(torch.float32)


def group_amaxes(xs: Sequence[Tensor], block_k: int | None) -> Sequence[Tensor]:
    """group_amax, cut into the part of each matrix."""
    return torch.split(group_amax(xs, block_k), [_count(x, block_k) for x in xs])


def shared_amaxes(
    weights: Sequence[tuple[type[QuantizedTensor], Tensor]],
) -> tuple[Tensor, list[tuple[int, ...]]]:
    """What shards of many weights must agree on: the `_shared_amax` of each, flat, one after another; and its shapes.

    weights: classes of recipes that share an amax, and (m, k) matrices on one device. Of a recipe, nothing matters but
    the columns that an amax is for, so that kernels serve several recipes in one launch.
    """
    counts = [_count(x, cls.LAYOUT.amax_columns) for cls, x in weights]
    packed = torch.zeros(sum(counts), dtype=torch.int32, device=weights[0][1].device)
    kinds: dict[int | None, list[tuple[int, Tensor]]] = defaultdict(list)
    for place, count, (cls, x) in zip(accumulate(counts, initial=0), counts, weights, strict=False):
        if launch.usable(x):
            kinds[cls.LAYOUT.amax_columns].append((place, x))
        else:
            packed[place : place + count] = operators.shared_amax(cls, x).reshape(-1).view(torch.int32)
    for block_k, matrices in kinds.items():
        _raise_amaxes(packed, matrices, block_k)
    return packed.view(torch.float32), [cls.LAYOUT.amax_shape(x.shape[1]) for cls, x in weights]


def _count(x: Tensor, block_k: int | None) -> int:
    return 1 if block_k is None else cdiv(x.shape[1], block_k)


def _raise_amaxes(packed: Tensor, matrices: Sequence[tuple[int, Tensor]], block_k: int | None) -> None:
    """Raises entries of `packed`, bits of fp32, from given places on to the amaxes of matrices."""
    from layoutc.runtime import triton_groups

    tile_m, tile_k, warps = AMAX_TILE if block_k is None else launch.column_tile(block_k)
    kinds: dict[torch.dtype, list[Member]] = defaultdict(list)
    capturing = _capturing([x for _, x in matrices])
    alone = []
    if any(x.get_device() != packed.get_device() for _, x in matrices):
        raise ValueError("matrices whose amaxes are taken together lie on one device")
    for place, x in matrices:
        if capturing or not _fits(x):
            alone.append((place, x))
            continue
        (m, k), address = (1, x.numel()) if block_k is None else x.shape, x.data_ptr()
        kinds[x.dtype].append(_member([m, k, place, address], k | address, (tile_m, tile_k)))
    for dtype, members in kinds.items():
        for table in _tables(packed.device, members):
            triton_groups.amax_group_kernel[(table.programs,)](
                table.entries,
                packed,
                triton_groups.DTYPES[dtype],
                tile_k if block_k is None else block_k,
                tile_m,
                tile_k,
                block_k is None,
                table.rows,
                table.aligned,
                table.even,
                launch.hardware(packed.device),
                num_warps=warps,
            )
    for place, x in alone:
        found = launch.matrix_amax(x, block_k).view(torch.int32).reshape(-1)
        packed[place : place + found.numel()] = found


# --------------------------------------------------------------------------------------------------------------- tables
def _capturing(xs: Sequence[Tensor]) -> bool:
    """True where a table could be gone when what is launched now runs again."""
    return bool(xs) and xs[0].is_cuda and torch.cuda.is_current_stream_capturing()


def _fits(x: Tensor) -> bool:
    """True for matrices that a table can hold."""
    return x.is_contiguous() and 0 < x.numel() <= _MOST


def _member(fields: Sequence[int], unaligned: int, tile: tuple[int, int]) -> Member:
    """The row of a matrix. unaligned: k and the addresses of what is moved 16 bytes at a time, or-ed."""
    m, k, tile_m, tile_k = fields[0], fields[1], tile[0], tile[1]
    programs = cdiv(m, tile_m) * cdiv(k, tile_k)
    return unaligned % 16 == 0, m % tile_m == 0 and k % tile_k == 0, (programs, *fields)


def _tables(device: torch.device, members: Iterable[Member]) -> list[Table]:
    """A table for the matrices that a launch can be compiled alike for, or more where they are too many for one."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    kinds: dict[tuple[bool, bool], list[tuple[int, ...]]] = defaultdict(list)
    for aligned, even, row in members:
        kinds[aligned, even].append(row)
    return [
        Table(*_uploaded(device, stream, rows), aligned, even)
        for (aligned, even), all_rows in kinds.items()
        for rows in _launches(all_rows)
    ]


def _launches(rows: list[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Runs of rows that fit into one table, and whose programs fit into one launch."""
    first = programs = 0
    for index, row in enumerate(rows):
        programs += row[0]
        if programs > _MOST or index - first == ROWS[-1]:
            yield tuple(rows[first:index])
            first, programs = index, row[0]
    yield tuple(rows[first:])


@lru_cache(maxsize=KEPT)
def _uploaded(device: torch.device, stream: int, rows: tuple[tuple[int, ...], ...]) -> tuple[Tensor, int, int]:
    """(table, its rows, programs of its launch). A function of nothing else, so that what it keeps is never stale.

    `stream`, the current one, orders the copy before each launch that reads it.
    """
    size = next(size for size in ROWS if len(rows) <= size)
    *starts, programs = accumulate((row[0] for row in rows), initial=0)
    filling = size - len(rows)
    head = torch.tensor(starts + [_MOST] * filling, dtype=torch.int32, device="cpu")
    fields = [(*field, *[0] * filling) for field in list(zip(*rows, strict=True))[1:]]
    table = torch.cat([head.view(torch.int64), torch.tensor(fields, dtype=torch.int64, device="cpu").flatten()])
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return table, size, programs

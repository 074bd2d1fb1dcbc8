"""Batches: one launch for many matrices, which a table on the card lists.

A table holds addresses, so it is made anew only when a matrix has moved, or what is written: parameters and their
masters stay where they are from step to step, and what a pass gathers is mostly allocated where it was. Matrices that
no table holds (strided, empty, or of 2^31 elements and more) are served one by one; so are all of them while a CUDA
graph is captured, which would outlive a table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from itertools import accumulate, compress
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor

from layoutc.ints.sizes import cdiv
from layoutc.runtime.facts import Facts, Layout
from layoutc.runtime.kernels import amaxes, launch

ROWS = (32, 256)  # sizes of tables: every program looks for its matrix among all rows
CACHED = 512  # the batches used last, whose tables are cached
AMAX_TILE = (1, 8192, 8)  # rows, columns and warps; a contiguous matrix is one row
_MOST = 2**31 - 1  # programs of a launch; elements of a matrix in a table


class Table(NamedTuple):
    """Matrices of one launch. `entries`: int64, as triton/batch.py reads it, in `rows` rows; the rest: see there.

    `even`: all of them are whole tiles, or, where they are laid out, whole words. No entries: it stands for a launch of
    one matrix, which needs no table.
    """

    entries: Tensor | None
    rows: int
    programs: int
    aligned: bool
    even: bool


# ------------------------------------------------------------------------------------------------------------- quantize
def split(
    layout: Layout,
    names: Sequence[str],
    xs: Sequence[Tensor],
    shared: Sequence[Tensor] | None,
    orientations: Sequence[str],
    outs: Sequence[Mapping[str, Tensor]],
    tile: tuple[int, int],
) -> tuple[Sequence[Table], Sequence[int]]:
    """Tables of the matrices that are quantized together, and the positions of those that are to be one by one.

    names: the planes that the kernel takes, in its order. shared: amaxes, fp32; their places are as seen from the
    first. Raises ValueError where matrices differ in dtype or device, where amaxes or outs are not as many or lie
    elsewhere, and for planes that a kernel can't write into: the card can't tell, as it only sees addresses.
    """
    if len(outs) != len(xs) or (shared is not None and len(shared) != len(xs)):
        raise ValueError(f"{layout.name}: {len(xs)} matrices need as many outs, and as many amaxes where any are given")
    where = xs[0].get_device()
    if not _same_dtype_and_device(xs, xs[0].dtype, where):
        raise ValueError(f"{layout.name}: the matrices of a batch have one dtype and lie on one device")
    if shared and not _same_dtype_and_device(shared, torch.float32, where):
        raise ValueError(f"{layout.name}: amaxes of a batch are float32, on the device of its matrices")
    shapes = [x.shape for x in xs]
    columns, wide = [_addresses(xs)], [True]
    for name, expected in zip(names, _written(layout, tuple(names), tuple(orientations), *shapes), strict=True):
        columns.append(_plane_addresses(layout, name, expected, outs, where) if expected else (0,) * len(xs))
        wide.append(bool(expected) and len(expected[0].shape) > 1)
    base, *_ = starts = _addresses(shared) if shared else (0,) * len(xs)
    places = [(start - base) // 4 for start in starts]
    return _matrices(xs, shapes, places, columns, wide, tile)


@lru_cache(maxsize=CACHED)
def _written(
    layout: Layout, names: tuple[str, ...], orientations: tuple[str, ...], *shapes: tuple[int, ...]
) -> list[list[Facts]]:
    """For each name the planes that are written for matrices of the given shapes; none where it is not written."""
    facts = [launch.plane_facts(layout, m, k, orientations) for m, k in shapes]
    return [[one[name] for one in facts if name in one] for name in names]


def _plane_addresses(
    layout: Layout, name: str, expected: Sequence[Facts], outs: Sequence[Mapping[str, Tensor]], where: int
) -> tuple[int, ...]:
    """Where a plane of each matrix begins, all of which are as a kernel can write into. Raises ValueError."""
    planes = [out[name] for out in outs]
    found = _addresses(planes)
    same = [plane.shape for plane in planes] == [shape for shape, _ in expected]
    same = same and _same_dtype_and_device(planes, expected[0].dtype, where)
    if not (same and _all_contiguous(planes) and reduce(or_, found) % 4 == 0):
        for out, plane, facts in zip(outs, planes, expected, strict=True):
            launch.checked_planes(layout, {name: facts}, out)
            if plane.get_device() != where:
                raise ValueError(f"{layout.name}: {name} lies on {plane.device}, the matrices elsewhere")
    return found


# --------------------------------------------------------------------------------------------------------------- amaxes
def batch_amax(xs: Sequence[Tensor], block_k: int | None = None) -> Tensor:
    """The largest magnitude of each of n matrices in fp32, bf16 or fp16 on one device, (n,) fp32; NaN wins.

    block_k: what matrix_amax gives for it instead, (1, blocks) for each matrix, flattened and one after another. Raises
    ValueError where they lie on several devices.
    """
    places = list(accumulate((_count(x, block_k) for x in xs), initial=0))
    packed = torch.zeros(places.pop(), dtype=torch.int32, device=xs[0].device if xs else None)
    raise_amaxes(packed, places, xs, block_k)
    return packed.view(torch.float32)


def batch_amaxes(xs: Sequence[Tensor], block_k: int | None) -> Sequence[Tensor]:
    """batch_amax, cut into the part of each matrix."""
    return torch.split(batch_amax(xs, block_k), [_count(x, block_k) for x in xs])


def _count(x: Tensor, block_k: int | None) -> int:
    return 1 if block_k is None else cdiv(x.shape[1], block_k)


def raise_amaxes(packed: Tensor, places: Sequence[int], xs: Sequence[Tensor], block_k: int | None) -> None:
    """Raises entries of `packed`, bits of fp32, from given places on to the amaxes of matrices."""
    from layoutc.runtime.kernels import direct
    from layoutc.runtime.triton import batch

    where = packed.get_device()
    if any(x.get_device() != where for x in xs):
        raise ValueError("matrices whose amaxes are taken together lie on one device")
    kinds: dict[torch.dtype, list[tuple[int, Tensor]]] = defaultdict(list)
    for place, x in zip(places, xs, strict=True):
        kinds[x.dtype].append((place, x))
    tile_m, tile_k, warps = AMAX_TILE if block_k is None else amaxes.column_tile(block_k)
    for dtype, members in kinds.items():
        starts, alike = zip(*members, strict=True)
        shapes = [(1, x.numel()) if block_k is None else x.shape for x in alike]
        tables, single = _matrices(alike, shapes, starts, [_addresses(alike)], [True], (tile_m, tile_k))
        for table in tables:
            args = (
                table.entries,
                packed,
                batch.DTYPES[dtype],
                tile_k if block_k is None else block_k,
                tile_m,
                tile_k,
                block_k is None,
                table.rows,
                table.aligned,
                table.even,
                launch.hardware(packed.device),
            )
            direct.run(batch.amax_batch_kernel, (table.programs,), args, warps)
        for index in single:
            found = amaxes.matrix_amax(alike[index], block_k).view(torch.int32).reshape(-1)
            packed[starts[index] : starts[index] + found.numel()] = found


# --------------------------------------------------------------------------------------------------------------- tables
def _matrices(
    xs: Sequence[Tensor],
    shapes: Sequence[tuple[int, ...]],
    places: Sequence[int],
    addresses: Sequence[tuple[int, ...]],
    wide: Sequence[bool],
    tile: tuple[int, int],
) -> tuple[Sequence[Table], Sequence[int]]:
    """Tables of matrices that are read, and the positions of those that no table holds.

    shapes: the rows and columns that kernels take a matrix for. places: of the amaxes. addresses: what begins where,
    the matrices and each plane; wide: which of them are moved 16 bytes at a time.
    """
    strided = () if _all_contiguous(xs) else tuple(index for index, x in enumerate(xs) if not x.is_contiguous())
    fields = [*zip(*shapes, strict=True), tuple(places), *addresses]
    return tables_of(xs[0].device, shapes, fields, [False, True, False, *wide], tile, tile, strided)


def tables_of(
    device: torch.device,
    covers: Sequence[tuple[int, ...]],
    fields: Sequence[tuple[int, ...]],
    wide: Sequence[bool],
    tile: tuple[int, int],
    step: tuple[int, int],
    strided: tuple[int, ...] = (),
) -> tuple[Sequence[Table], Sequence[int]]:
    """Tables of matrices on one device, and the positions of those that no table holds; see _tables."""
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():  # a table could be gone when what is launched now runs again
            return (), range(len(covers))
        stream = torch.cuda.current_stream(device).cuda_stream
    return _tables(device, stream, tile, step, tuple(covers), tuple(fields), tuple(wide), strided)


def _all_contiguous(tensors: Sequence[Tensor]) -> bool:
    return all(map(Tensor.is_contiguous, tensors))


def _same_dtype_and_device(tensors: Sequence[Tensor], dtype: torch.dtype, where: int) -> bool:
    """True where all are of one dtype, on one device."""
    count = len(tensors)
    return [one.dtype for one in tensors].count(dtype) == [one.get_device() for one in tensors].count(where) == count


def _addresses(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    return tuple(map(Tensor.data_ptr, tensors))


@lru_cache(maxsize=CACHED)
def _tables(
    device: torch.device,
    stream: int,
    tile: tuple[int, int],
    step: tuple[int, int],
    covers: tuple[tuple[int, int], ...],
    fields: tuple[tuple[int, ...], ...],
    wide: tuple[bool, ...],
    strided: tuple[int, ...],
) -> tuple[list[Table], list[int]]:
    """A function of nothing but its arguments, so that what it keeps is never stale.

    A table for the matrices that a launch can be compiled alike for, or more where they are too many for one; and the
    positions of those that none holds. `stream`, the current one, orders the copy of a table before each launch that
    reads it. tile: rows and columns of a program; covers: those that a matrix's programs cover. fields: of a table, of
    all matrices: rows, columns, places, addresses; wide: which of them are to be multiples of 16, for aligned. step: of
    what rows and columns are to be multiples, for even. strided: positions to leave out.
    """
    single: list[int] = []
    kinds: dict[tuple[bool, bool], list[tuple[int, ...]]] = defaultdict(list)
    for index, ((rows, columns), field) in enumerate(zip(covers, zip(*fields, strict=True), strict=True)):
        m, k, *_ = field
        if index in strided or not 0 < m * k <= _MOST:
            single.append(index)
            continue
        aligned = reduce(or_, compress(field, wide), 0) % 16 == 0
        even = m % step[0] == 0 and k % step[1] == 0
        kinds[aligned, even].append((cdiv(rows, tile[0]) * cdiv(columns, tile[1]), *field))
    tables = [
        Table(*_uploaded(device, rows), aligned, even)
        for (aligned, even), all_rows in kinds.items()
        for rows in _launches(all_rows)
    ]
    return tables, single


def _launches(rows: list[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Runs of rows that fit into one table, and whose programs fit into one launch."""
    first = programs = 0
    for index, row in enumerate(rows):
        programs += row[0]
        if programs > _MOST or index - first == ROWS[-1]:
            yield tuple(rows[first:index])
            first, programs = index, row[0]
    yield tuple(rows[first:])


def _uploaded(device: torch.device, rows: tuple[tuple[int, ...], ...]) -> tuple[Tensor, int, int]:
    """(table, its rows, programs of its launch)."""
    size = next(size for size in ROWS if len(rows) <= size)
    *starts, programs = accumulate((row[0] for row in rows), initial=0)
    filling = size - len(rows)
    head = torch.tensor(starts + [_MOST] * filling, dtype=torch.int32, device="cpu")
    fields = [(*field, *[0] * filling) for field in list(zip(*rows, strict=True))[1:]]
    table = torch.cat([head.view(torch.int64), torch.tensor(fields, dtype=torch.int64, device="cpu").flatten()])
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return table, size, programs

"""Batches: one launch for many matrices, which a table on the card lists.

A table has the addresses of matrices and of their outputs. It is cached, and rebuilt only if an address has changed:
parameters and masters keep their addresses from step to step, and gathered weights mostly get the same memory again.
Matrices that do not fit into a table (strided, empty, or of 2^31 elements or more) take a launch each. So do all
matrices while a CUDA graph is captured, because the graph could outlive the table.
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
from layoutc.runtime.kernels import launch
from layoutc.runtime.kernels.plans import Plans
from layoutc.runtime.streams import capturing, keep, stream_of

ROWS = (32, 256)  # capacities of tables; every program searches all rows for its matrix
CACHED = 512  # batches whose tables are cached; the least recently used go first
_MOST = 2**31 - 1  # the limit of programs in a launch, and of elements of a matrix in a table


class Table(NamedTuple):
    """The matrices of one launch.

    entries: int64, in the format that triton/batch.py defines, with room for `rows` matrices; None for a launch of one
    matrix, which needs no table. programs: of the launch. aligned: all addresses, and sizes that matter, are multiples
    of 16. even: all matrices are whole tiles; or, if they are laid out, whole words.
    """

    entries: Tensor | None
    rows: int
    programs: int
    aligned: bool
    even: bool
    plans: Plans  # of launches that read it, freed with it

    @property
    def kind(self) -> tuple[int, bool, bool]:
        """The constants of kernels: ROWS, ALIGNED and EVEN."""
        return self.rows, self.aligned, self.even


# ------------------------------------------------------------------------------------------------------------- quantize
def split(
    layout: Layout,
    names: Sequence[str],
    xs: Sequence[Tensor],
    shared: Sequence[Tensor] | None,
    orientations: Sequence[str],
    outs: Sequence[Mapping[str, Tensor]],
    span: tuple[int, int],
    step: tuple[int, int],
) -> tuple[Sequence[Table], Sequence[int]]:
    """Tables of the matrices to quantize together, and the indices of those that take a launch each.

    names: the planes that the kernel takes, in its order. shared: an fp32 amax for each matrix, if the recipe shares
    one. outs: planes to write, for each matrix. span, step: rows and columns of a program, and of its tiles.

    Raises ValueError if matrices differ in dtype or device, if amaxes or outs differ in number or device, and for
    planes that a kernel can't write into. The kernel can't check any of that: it only sees addresses.
    """
    if len(outs) != len(xs) or (shared is not None and len(shared) != len(xs)):
        raise ValueError(f"{layout.name}: {len(xs)} matrices need as many outs, and as many amaxes if there are any")
    device_index = xs[0].get_device()
    if not _same_dtype_and_device(xs, xs[0].dtype, device_index):
        raise ValueError(f"{layout.name}: the matrices of a batch must have one dtype and be on one device")
    if shared and not _same_dtype_and_device(shared, torch.float32, device_index):
        raise ValueError(f"{layout.name}: amaxes of a batch must be float32, and on the device of its matrices")
    shapes = [x.shape for x in xs]
    columns, wide = [addresses_of(xs)], [True]
    for name, expected in zip(names, _written(layout, tuple(names), tuple(orientations), *shapes), strict=True):
        columns.append(_plane_addresses(layout, name, expected, outs, device_index) if expected else (0,) * len(xs))
        wide.append(bool(expected) and len(expected[0].shape) > 1)
    base, *_ = starts = addresses_of(shared) if shared else (0,) * len(xs)
    offsets = [(start - base) // 4 for start in starts]  # in fp32 values from the first amax
    return of_matrices(xs, shapes, offsets, columns, wide, span, step)


@lru_cache(maxsize=CACHED)
def _written(
    layout: Layout, names: tuple[str, ...], orientations: tuple[str, ...], *shapes: tuple[int, ...]
) -> list[list[Facts]]:
    """For each name, the plane of each matrix; an empty list for a plane that these orientations lack."""
    facts = [launch.plane_facts(layout, m, k, orientations) for m, k in shapes]
    return [[one[name] for one in facts if name in one] for name in names]


def _plane_addresses(
    layout: Layout, name: str, expected: Sequence[Facts], outs: Sequence[Mapping[str, Tensor]], device_index: int
) -> tuple[int, ...]:
    """The address of one plane of each matrix. Raises ValueError if a kernel can't write into one of them."""
    planes = [out[name] for out in outs]
    addresses = addresses_of(planes)
    same = [plane.shape for plane in planes] == [shape for shape, _ in expected]
    same = same and _same_dtype_and_device(planes, expected[0].dtype, device_index)
    if not (same and _all_contiguous(planes) and reduce(or_, addresses) % 4 == 0):
        for out, plane, facts in zip(outs, planes, expected, strict=True):
            launch.checked_planes(layout, {name: facts}, out)
            if plane.get_device() != device_index:
                raise ValueError(f"{layout.name}: {name} is on {plane.device}, and the matrices are on another device")
    return addresses


# --------------------------------------------------------------------------------------------------------------- tables
def of_matrices(
    xs: Sequence[Tensor],
    shapes: Sequence[tuple[int, ...]],
    offsets: Sequence[int],
    addresses: Sequence[tuple[int, ...]],
    wide: Sequence[bool],
    span: tuple[int, int],
    step: tuple[int, int],
) -> tuple[Sequence[Table], Sequence[int]]:
    """Tables of the matrices that a kernel reads, and the indices of those that take a launch each.

    shapes: rows and columns as the kernel sees a matrix. offsets: of the amax of each matrix. addresses: those of the
    matrices, then those of each plane. wide: for each of these columns, whether a thread moves 16 bytes at a time.
    span, step: as for split.
    """
    strided = () if _all_contiguous(xs) else tuple(index for index, x in enumerate(xs) if not x.is_contiguous())
    fields = [*zip(*shapes, strict=True), tuple(offsets), *addresses]
    return tables_of(xs[0].device, shapes, fields, [False, True, False, *wide], span, step, strided)


def tables_of(
    device: torch.device,
    covers: Sequence[tuple[int, ...]],
    fields: Sequence[tuple[int, ...]],
    wide: Sequence[bool],
    tile: tuple[int, int],
    step: tuple[int, int],
    strided: tuple[int, ...] = (),
) -> tuple[Sequence[Table], Sequence[int]]:
    """Tables of matrices on one device, and the indices of those that take a launch each. Arguments as for _tables."""
    tables = _tables.__wrapped__ if capturing(device) else _tables  # a replay fills what a capture uploads
    return tables(device, stream_of(device), tile, step, tuple(covers), tuple(fields), tuple(wide), strided)


def fit(xs: Sequence[Tensor]) -> bool:
    """True if one table can list all these matrices, whose dtype and device are then the same."""
    same = _same_dtype_and_device(xs, xs[0].dtype, xs[0].get_device())
    return same and _all_contiguous(xs) and all(0 < x.numel() <= _MOST for x in xs)


def _all_contiguous(tensors: Sequence[Tensor]) -> bool:
    """True if all tensors are contiguous."""
    return all(map(Tensor.is_contiguous, tensors))


def _same_dtype_and_device(tensors: Sequence[Tensor], dtype: torch.dtype, device_index: int) -> bool:
    """True if all tensors have the dtype and are on the device. device_index: -1 for the CPU."""
    same_dtype = [one.dtype for one in tensors].count(dtype)
    same_device = [one.get_device() for one in tensors].count(device_index)
    return same_dtype == same_device == len(tensors)


def addresses_of(tensors: Iterable[Tensor]) -> tuple[int, ...]:
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
    """Tables of matrices, and the indices of those that take a launch each.

    A pure function of its arguments, so cached tables are never stale. Matrices that share a compiled kernel are in one
    table, or in several if there are too many. stream: the current one; a table is copied to the card
    on it, before every launch that reads the table.

    tile: rows and columns of a program. covers: the rows and columns that the programs of each matrix cover. fields:
    the columns of a table, each with an entry for each matrix: rows, columns, offset, addresses. wide: which fields
    must be multiples of 16 for a table to be aligned. step: what rows and columns must be multiples of for it to be
    even. strided: indices to leave out.
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
        Table(*_uploaded(device, rows), aligned, even, Plans())
        for (aligned, even), all_rows in kinds.items()
        for rows in _launches(all_rows)
    ]
    return tables, single


def _launches(rows: list[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Splits the rows of a table so that each part fits into one table, and its programs into one launch."""
    first = programs = 0
    for index, row in enumerate(rows):
        programs += row[0]
        if programs > _MOST or index - first == ROWS[-1]:
            yield tuple(rows[first:index])
            first, programs = index, row[0]
    yield tuple(rows[first:])


def _uploaded(device: torch.device, rows: tuple[tuple[int, ...], ...]) -> tuple[Tensor, int, int]:
    """Copies a table to the device: (table, how many rows it has room for, programs of its launch)."""
    size = next(size for size in ROWS if len(rows) <= size)
    *starts, programs = accumulate((row[0] for row in rows), initial=0)
    filling = size - len(rows)
    head = torch.tensor(starts + [_MOST] * filling, dtype=torch.int32, device="cpu")
    fields = [(*field, *[0] * filling) for field in list(zip(*rows, strict=True))[1:]]
    table = torch.cat([head.view(torch.int64), torch.tensor(fields, dtype=torch.int64, device="cpu").flatten()])
    if device.type == "cuda":
        pinned = table.pin_memory()
        table = pinned.to(device, non_blocking=True)
        if capturing(device):
            keep(pinned, table)
    return table, size, programs

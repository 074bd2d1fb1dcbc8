"""Copies between tensors and the rows that ranks send: one launch, reused while the tensors keep their addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from layoutc.runtime.kernels import batches, launch
from layoutc.runtime.kernels.launch_plan import LaunchPlan

WORD = torch.int64  # the dtype in which bytes are copied
TILE, WARPS = 2048, 8
MOVING = 8  # the most tensors of a launch that each call may give


def copies_in(sources: Sequence[Tensor], starts: Sequence[int], dtype: torch.dtype, row: Tensor) -> LaunchPlan | None:
    """The plan that writes tensors of one dtype into a row like `row`, as `dtype`. starts: in elements of `dtype`.

    None without a kernel.
    """
    if not (launch.usable(row) and batches.fit(sources)):
        return None
    from layoutc.runtime.triton.batch import DTYPES, copy_in_kernel

    source = sources[0].dtype
    if source not in DTYPES or dtype not in DTYPES or source not in (dtype, torch.float32):
        return None
    fields = _fields(1, [one.numel() for one in sources], starts, [one.data_ptr() for one in sources])
    options = (DTYPES[source], DTYPES[dtype]), (launch.hardware(row.device),)
    return _copies(copy_in_kernel, fields, row, (), *options)


def copies_out(
    targets: Sequence[Tensor], starts: Sequence[int], ranks: int, rows: Tensor, moving: Sequence[int] = ()
) -> LaunchPlan | None:
    """The plan that writes tensors of one dtype from all ranks' rows, like `rows`: each joins all ranks' parts.

    starts: the start of a tensor in each rank's row, in its elements. moving: the positions of tensors, at most MOVING,
    that each call gives, at multiples of 16 bytes. None as of `copies_in`.
    """
    if not (launch.usable(rows) and batches.fit(targets)):
        return None
    from layoutc.runtime.triton.batch import DTYPES, copy_out_kernel

    dtype = targets[0].dtype
    if dtype not in DTYPES:
        return None
    row = rows.numel() // ranks // dtype.itemsize
    addresses = [0 if at in moving else one.data_ptr() for at, one in enumerate(targets)]
    which = tuple([moving.index(at) + 1 if at in moving else 0 for at in range(len(targets))])
    fields = [*_fields(ranks, [one.numel() // ranks for one in targets], starts, addresses), which]
    given = [targets[at] for at in moving]
    others = row, *given, *[None] * (MOVING - len(given))
    return _copies(copy_out_kernel, fields, rows, others, (DTYPES[dtype],), ())


def _fields(
    ranks: int, numels: Sequence[int], starts: Sequence[int], addresses: Sequence[int]
) -> list[tuple[int, ...]]:
    """The fields of a table, with each tensor as equal rows of elements."""
    return [(ranks,) * len(numels), tuple(numels), tuple(starts), tuple(addresses)]


def _copies(
    kernel: Any,
    fields: Sequence[tuple[int, ...]],
    row: Tensor,
    others: tuple[Any, ...],
    dtypes: tuple[Any, ...],
    options: tuple[Any, ...],
) -> LaunchPlan | None:
    """others: the kernel's arguments after the row."""
    tile, wide = (1, TILE), [False, True, True, True, False][: len(fields)]
    tables, alone = batches.tables_of(row.device, [*zip(*fields[:2], strict=True)], fields, wide, tile, tile)
    if alone:
        return None
    found = []
    for table in tables:
        args = table.entries, row, *others, *dtypes, TILE, table.rows, table.aligned, *options
        found.append(LaunchPlan.of(kernel, table.programs, args, WARPS, bound=[table.entries]))
    return LaunchPlan.joined(found)

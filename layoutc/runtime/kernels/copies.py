"""Copies between tensors and what ranks send each other, in one launch that is kept while the tensors stay in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layoutc.runtime.kernels import batches, launch

WORD = torch.int64  # as which bytes are copied
TILE, WARPS = 2048, 8


class Copies(NamedTuple):
    """Launches of one kernel, by tables."""

    launches: tuple[tuple[Any, Tensor], ...]

    def __call__(self, row: Tensor) -> None:
        """With the bytes of one rank, or of all."""
        for bound, entries in self.launches:
            bound(entries, row)


def copies_in(sources: Sequence[Tensor], starts: Sequence[int], dtype: torch.dtype, row: Tensor) -> Copies | None:
    """What writes tensors of one dtype into such bytes as `row`, as `dtype`, each where it starts in elements of that.

    None where no kernel does it, or while a CUDA graph is captured, which could outlive the table.
    """
    if not (launch.usable(row) and batches.fit(sources)):
        return None
    from layoutc.runtime.triton.batch import DTYPES, copy_in_kernel

    source = sources[0].dtype
    if source not in DTYPES or dtype not in DTYPES or source not in (dtype, torch.float32):
        return None
    numels = [one.numel() for one in sources]
    options = (DTYPES[source], DTYPES[dtype]), (launch.hardware(row.device),)
    return _copies(copy_in_kernel, 1, numels, starts, sources, row, (), *options)


def copies_out(targets: Sequence[Tensor], starts: Sequence[int], ranks: int, rows: Tensor) -> Copies | None:
    """What writes tensors of one dtype from such bytes of all ranks as `rows`: a rank's part of each after another's.

    starts: where a tensor starts in each rank's row, in its elements. None as of `copies_in`.
    """
    if not (launch.usable(rows) and batches.fit(targets)):
        return None
    from layoutc.runtime.triton.batch import DTYPES, copy_out_kernel

    dtype = targets[0].dtype
    if dtype not in DTYPES:
        return None
    numels = [one.numel() // ranks for one in targets]
    row = rows.numel() // ranks // dtype.itemsize
    return _copies(copy_out_kernel, ranks, numels, starts, targets, rows, (row,), (DTYPES[dtype],), ())


def as_words(sources: Sequence[Tensor]) -> list[Tensor] | None:
    """Tensors of bytes as larger elements, which are copied faster; None if one does not consist of these."""
    size = WORD.itemsize
    if any((one.data_ptr() | one.numel()) % size or one.storage_offset() % size for one in sources):
        return None
    return [one.view(WORD) for one in sources]


def _copies(
    kernel: Any,
    ranks: int,
    numels: Sequence[int],
    starts: Sequence[int],
    tensors: Sequence[Tensor],
    row: Tensor,
    sizes: tuple[int, ...],
    dtypes: tuple[Any, ...],
    options: tuple[Any, ...],
) -> Copies | None:
    from layoutc.runtime.kernels.direct import Bound, Constants

    every, tile = (ranks,) * len(numels), (1, TILE)
    fields = [every, tuple(numels), tuple(starts), tuple(map(Tensor.data_ptr, tensors))]
    covers = [*zip(every, numels, strict=True)]
    tables, alone = batches.tables_of(row.device, covers, fields, [False, True, True, True], tile, tile)
    if alone:
        return None
    launches = []
    for table in tables:
        assert table.entries is not None
        constants = Constants((*dtypes, TILE, table.rows, table.aligned, *options))
        args = table.entries, row, *sizes
        launches.append((Bound(kernel, (table.programs,), args, WARPS, None, constants), table.entries))
    return Copies(tuple(launches))

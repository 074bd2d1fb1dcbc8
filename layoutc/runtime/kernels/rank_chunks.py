"""Copies gradients into what ranks send each other: each rank's chunks in a row, as FSDP2's chunk_cat lays them.

A table on the card says where chunks go. It has no addresses, since backward rarely leaves gradients where it left them
in the step before: these are arguments of the launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from itertools import accumulate
from operator import or_
from typing import Any

import torch
from torch import Tensor

from layoutc.ints.sizes import cdiv
from layoutc.runtime.captures import capturing
from layoutc.runtime.kernels import batches, launch
from layoutc.runtime.streams import stream_of

TILE, WARPS = 4096, 8
GRADS = 16  # of a launch, as arguments of the kernel


class _Launch:
    """One that copies GRADS gradients of a group, some more than once if they are fewer."""

    def __init__(self, table: batches.Table, members: Sequence[int]) -> None:
        self._table = table
        self._members = [*members, *[members[0]] * (GRADS - len(members))]
        self._bound: dict[tuple[Any, ...], Callable[..., None]] = {}

    def __call__(self, grads: Sequence[Tensor], aligned: bool, out: Tensor) -> None:
        """aligned: whether all of the gradients begin at multiples of 16 bytes."""
        chosen = [grads[member] for member in self._members]
        key = aligned, grads[0].dtype, out.dtype, out.shape[1]
        if key not in self._bound:
            self._bound[key] = self._bind(chosen, aligned, out)
        self._bound[key](out, *chosen)

    def _bind(self, chosen: Sequence[Tensor], aligned: bool, out: Tensor) -> Callable[..., None]:
        from layoutc.runtime.kernels import direct
        from layoutc.runtime.triton.batch import rank_chunks_kernel

        entries, rows, programs, table_aligned, _ = self._table
        constants = direct.Constants((TILE, rows, aligned and table_aligned))
        args = entries, out, out.shape[1], *chosen
        return direct.Bound(rank_chunks_kernel, (programs,), args, WARPS, None, constants, entries)


def rank_chunks(grads: Sequence[Tensor], ranks: int, out: Tensor) -> bool:
    """Copies gradients into `out`, (ranks, n / ranks), of their dtype or fp32: a rank's chunks in their order.

    Each gradient is cut into `ranks` chunks of equally many first-dim entries, filled up with zeros, as torch.chunk
    and FSDP2 do it. False: nothing is done, as there is no kernel for these, or a CUDA graph is captured.
    """
    if capturing(out.device) or not (launch.usable(out) and batches.fit(grads)):
        return False
    dtype = grads[0].dtype
    if dtype not in launch.FLOATS or out.dtype not in (dtype, torch.float32):
        return False
    launches = _launches(out.device, stream_of(out.device), ranks, *[grad.shape for grad in grads])
    aligned = reduce(or_, map(Tensor.data_ptr, grads)) % 16 == 0
    for one in launches:
        one(grads, aligned, out)
    return bool(launches)


@lru_cache(maxsize=batches.CACHED)
def _launches(device: torch.device, stream: int, ranks: int, *shapes: torch.Size) -> list[_Launch]:
    """For gradients of these shapes; none if one of them is too large for a table. stream: the current one, on which
    tables are copied to the card before they are read."""
    numels = [shape.numel() for shape in shapes]
    chunks = [cdiv(shape[0], ranks) * (numel // shape[0]) for shape, numel in zip(shapes, numels, strict=True)]
    starts = [*accumulate(chunks, initial=0)][:-1]
    found: list[_Launch] = []
    for first in range(0, len(shapes), GRADS):
        part = slice(first, first + GRADS)
        members = range(len(shapes))[part]
        covers = [(ranks, chunk) for chunk in chunks[part]]
        columns = [ranks] * len(members), chunks[part], starts[part], range(len(members)), numels[part]
        wide, tile = [False, True, True, False, True], (1, TILE)
        tables, alone = batches.tables_of(device, covers, [*map(tuple, columns)], wide, tile, tile)
        if alone:
            return []
        found += [_Launch(table, members) for table in tables]
    return found

"""The rows that ranks send: each rank's chunks of gradients, in the order of FSDP2's chunk_cat.

Codes are made from the gradients themselves (rank_sums.py). Other rows are copied: a table on the card says where
chunks go. Addresses of gradients change, so they are arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor

from layoutc.ints.sizes import cdiv
from layoutc.runtime.kernels import batches, launch, plans
from layoutc.runtime.kernels.launch_plan import LaunchPlan
from layoutc.runtime.streams import capturing, stream_of

TILE, WARPS = 4096, 8
GRADS = 16  # of a launch, as arguments of the kernel


class Chunks(NamedTuple):
    """Rows of n values, one for each rank: its chunks of all gradients.

    Each gradient is cut into `ranks` chunks of equal first dims, padded with zeros, as in torch.chunk and FSDP2.
    """

    grads: Sequence[Tensor]
    ranks: int
    n: int

    @property
    def sizes(self) -> list[int]:
        """Elements of a chunk of each gradient."""
        return [cdiv(len(grad), self.ranks) * (grad.numel() // len(grad)) for grad in self.grads]

    @property
    def fit(self) -> bool:
        """Whether one launch reads them all: not empty, contiguous, of one dtype."""
        dtype = self.grads[0].dtype
        every = [launch.usable(grad) and grad.dtype == dtype and grad.is_contiguous() for grad in self.grads]
        return len(every) <= GRADS and all(every)


def rank_chunks(grads: Sequence[Tensor], ranks: int, out: Tensor) -> bool:
    """Copies gradients into `out`, (ranks, n / ranks), of their dtype or fp32: the rows of `Chunks`.

    Returns False, and does nothing, without a kernel.
    """
    if not (launch.usable(out) and batches.fit(grads)):
        return False
    dtype = grads[0].dtype
    if dtype not in launch.FLOATS or out.dtype not in (dtype, torch.float32):
        return False
    aligned = reduce(or_, map(Tensor.data_ptr, grads)) % 16 == 0
    like = ranks, aligned, dtype, out.dtype, out.shape[1], *[grad.shape for grad in grads]
    # Tables are copied on the current stream before they are read.
    key = None if capturing(out.device) else ("rank_chunks", out.device, stream_of(out.device), like)
    parts = plans.cache.at(key, lambda: _plans(grads, ranks, out, aligned))
    for plan, members in parts:
        plan(out, *[grads[member] for member in members])
    return bool(parts)


def _plans(grads: Sequence[Tensor], ranks: int, out: Tensor, aligned: bool) -> list[tuple[LaunchPlan, list[int]]]:
    """Launches of GRADS gradients, some of them more than once if they are fewer; none if one is too large for a table.

    aligned: whether all of the gradients begin at multiples of 16 bytes.
    """
    from layoutc.runtime.triton.batch import rank_chunks_kernel

    numels = [grad.numel() for grad in grads]
    chunks = Chunks(grads, ranks, out.shape[1]).sizes
    starts = [*accumulate(chunks, initial=0)][:-1]
    found = []
    for first in range(0, len(grads), GRADS):
        part = slice(first, first + GRADS)
        members = [*range(len(grads))[part]]
        covers = [(ranks, chunk) for chunk in chunks[part]]
        columns = [ranks] * len(members), chunks[part], starts[part], range(len(members)), numels[part]
        wide, tile = [False, True, True, False, True], (1, TILE)
        tables, alone = batches.tables_of(out.device, covers, [*map(tuple, columns)], wide, tile, tile)
        if alone:
            return []
        members += [first] * (GRADS - len(members))
        for entries, rows, programs, table_aligned, *_ in tables:
            given = out, out.shape[1], *[grads[member] for member in members]
            args = entries, *given, TILE, rows, aligned and table_aligned
            found.append((LaunchPlan.of(rank_chunks_kernel, programs, args, WARPS, bound=[entries]), members))
    return found

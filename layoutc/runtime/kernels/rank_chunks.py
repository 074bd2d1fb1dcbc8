"""Copies gradients into what ranks send each other: each rank's chunks in a row, as FSDP2's chunk_cat lays them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from layoutc.ints.sizes import cdiv
from layoutc.runtime.kernels import batches, launch

TILE, WARPS = 4096, 8


def rank_chunks(grads: Sequence[Tensor], ranks: int, out: Tensor) -> bool:
    """Copies gradients into `out`, (ranks, n / ranks), of their dtype or fp32: a rank's chunks in their order.

    Each gradient is cut into `ranks` chunks of equally many first-dim entries, filled up with zeros, as torch.chunk
    and FSDP2 do it. False: nothing is done, as there is no kernel for these, or a CUDA graph is captured.
    """
    if not (launch.usable(out) and batches.fit(grads)):
        return False
    from layoutc.runtime.kernels import direct
    from layoutc.runtime.triton.batch import DTYPES, rank_chunks_kernel

    dtype = grads[0].dtype
    if dtype not in launch.FLOATS or out.dtype not in (dtype, torch.float32):
        return False
    shapes = [(grad.shape[0], grad.numel()) for grad in grads]
    chunks = tuple([cdiv(rows, ranks) * (numel // rows) for rows, numel in shapes])
    starts = tuple(accumulate(chunks, initial=0))[:-1]
    every, numels = (ranks,) * len(grads), tuple([numel for _, numel in shapes])
    fields = [every, chunks, starts, tuple(map(Tensor.data_ptr, grads)), numels]
    covers, tile = [*zip(every, chunks, strict=True)], (1, TILE)
    tables, alone = batches.tables_of(out.device, covers, fields, [False, True, True, True, True], tile, tile)
    if alone:
        return False
    for table in tables:
        constants = direct.Constants((DTYPES[dtype], TILE, table.rows, table.aligned))
        direct.run(rank_chunks_kernel, (table.programs,), (table.entries, out, out.shape[1]), WARPS, None, constants)
    return True

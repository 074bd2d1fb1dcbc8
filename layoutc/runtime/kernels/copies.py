"""Copies tensors of bytes one after another, again and again, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from layoutc.runtime.kernels import batches, launch

WORD = 8  # bytes; what the kernel copies are multiples of them
TILE, WARPS = 2048, 8  # words


class Copying:
    """A launch that copies tensors, as long as they stay where they are."""

    def __init__(self, launches: Sequence[tuple[Any, Tensor]]) -> None:
        self._launches = launches

    @classmethod
    def of(cls, sources: Sequence[Tensor], out: Tensor) -> Copying | None:
        """Of tensors of bytes into such as `out`, (n,) uint8; None where no kernel does it, or a graph is captured."""
        if not (launch.usable(out) and batches.fit(sources)):
            return None
        sizes = [one.numel() for one in sources]
        if any((one.data_ptr() | size) % WORD for one, size in zip(sources, sizes, strict=True)):
            return None
        from layoutc.runtime.kernels.direct import Bound, Constants
        from layoutc.runtime.triton.batch import DTYPES, rank_chunks_kernel

        words = tuple([size // WORD for size in sizes])
        starts = tuple(accumulate(words, initial=0))[:-1]
        ones = (1,) * len(words)
        fields = [ones, words, starts, tuple(map(Tensor.data_ptr, sources)), words]
        covers, tile = [*zip(ones, words, strict=True)], (1, TILE)
        tables, alone = batches.tables_of(out.device, covers, fields, [False, True, True, True, True], tile, tile)
        if alone:
            return None
        example, launches = out.view(torch.int64), []
        for table in tables:
            assert table.entries is not None
            constants = Constants((DTYPES[torch.int64], TILE, table.rows, table.aligned))
            args = table.entries, example, sum(words)
            launches.append((Bound(rank_chunks_kernel, (table.programs,), args, WARPS, None, constants), table.entries))
        return cls(launches)

    def __call__(self, out: Tensor) -> None:
        """Copies them into (n,) uint8."""
        words = out.view(torch.int64)
        for bound, entries in self._launches:
            bound(entries, words)

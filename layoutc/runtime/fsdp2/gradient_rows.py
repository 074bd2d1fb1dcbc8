"""Copies gradients into FSDP2's reduction buffer in one launch.

FSDP2's own copy builds a table on the host and sends it to the card, for each group in each step. Here the parts that
do not change between steps stay on the card. The reduced bytes are the same. `exchange` uses the same copy for
gradients that are sent in their own dtype. `torch_private.reductions` copies without a buffer class; the class is for
FSDP2's own steps, which run when a reduction is not plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from layoutc.runtime.kernels.rank_chunks import rank_chunks
from layoutc.runtime.torch_private import without_torch_function


class Turns:
    """Tells FSDP2's allocations for a reduction apart: first the buffer, then the result, 1 / ranks of its size."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._buffer: int | None = None  # the size of the buffer whose result is allocated next

    def is_result(self, numel: int) -> bool:
        """Whether this allocation is the result for the previous buffer."""
        found = self._buffer == numel * self._ranks
        self._buffer = None if found else numel
        return found


class GradientRows(Tensor):
    """The buffer that FSDP2 copies gradients into: (n,) or (ranks, n / ranks). Otherwise it acts as a plain tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs FSDP2's copy by a kernel if one supports these gradients; all else as for a plain tensor."""
        kwargs = kwargs or {}
        with without_torch_function():
            if func is Tensor.view:
                return func(*args, **kwargs).as_subclass(cls)
            if func is torch.ops.fsdp.chunk_cat and _copied(*args, **kwargs):
                return None
            return func(*args, **kwargs)


def in_rows(grads: Sequence[Tensor], ranks: int, numel: int, dtype: torch.dtype, dim: int = 0) -> Tensor:
    """Copies each rank's chunks of the gradients into its row: (ranks, numel / ranks), by one launch or FSDP2's copy.

    FSDP2's copy costs 0.25 to 0.5 ms of host time for a layer on two ranks; a table on the card saves that.
    dim: the dim that gradients are cut on.
    """
    made = torch.empty(ranks, numel // ranks, dtype=dtype, device=grads[0].device)
    if dim or not rank_chunks(grads, ranks, made):
        torch.ops.fsdp.chunk_cat(grads, dim, ranks, out=made)
    return made


def _copied(grads: Sequence[Tensor], dim: int, num_chunks: int, *, out: Tensor) -> bool:
    return dim == 0 and rank_chunks(grads, num_chunks, out.as_subclass(Tensor))

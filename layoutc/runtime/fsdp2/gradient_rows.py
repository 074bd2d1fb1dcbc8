"""Gradients that FSDP2 reduces are copied into its buffer by one launch.

FSDP2's own copy makes a table on the host, and sends it to the card, for each group in each step. Here what does not
change from step to step stays on the card. What is reduced are the same bytes. `exchange` has the same copy for
gradients that travel in their own dtype. `torch_private.reductions` copies without a buffer of a class; that is for
FSDP2's own steps, which are taken where a reduction is not plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from layoutc.runtime.kernels.rank_chunks import rank_chunks
from layoutc.runtime.torch_private import without_torch_function


class Turns:
    """Tells what FSDP2 allocates for a reduction apart: the buffer, then the result, smaller by the number of ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._buffer: int | None = None  # the size of the one whose result will be asked for next

    def is_result(self, numel: int) -> bool:
        """True for the result of the buffer before it."""
        found = self._buffer == numel * self._ranks
        self._buffer = None if found else numel
        return found


class GradientRows(Tensor):
    """The buffer that FSDP2 copies gradients into: (n,) or (ranks, n / ranks). To all others a plain tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """FSDP2's copy by a kernel, where there is one for these gradients; all else as of a plain tensor."""
        kwargs = kwargs or {}
        with without_torch_function():
            if func is Tensor.view:
                return func(*args, **kwargs).as_subclass(cls)
            if func is torch.ops.fsdp.chunk_cat and _copied(*args, **kwargs):
                return None
            return func(*args, **kwargs)


def in_rows(grads: Sequence[Tensor], ranks: int, numel: int, dtype: torch.dtype, dim: int = 0) -> Tensor:
    """Each rank's chunks of gradients in a row, (ranks, numel / ranks): by one launch, or FSDP2's own copy.

    FSDP2's takes 0.25 to 0.5 ms of the host for a block of two ranks, which a table on the card takes the place of.
    dim: that they are cut on.
    """
    made = torch.empty(ranks, numel // ranks, dtype=dtype, device=grads[0].device)
    if dim or not rank_chunks(grads, ranks, made):
        torch.ops.fsdp.chunk_cat(grads, dim, ranks, out=made)
    return made


def _copied(grads: Sequence[Tensor], dim: int, num_chunks: int, *, out: Tensor) -> bool:
    return dim == 0 and rank_chunks(grads, num_chunks, out.as_subclass(Tensor))

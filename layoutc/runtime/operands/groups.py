"""Groups of tokens, one per expert, moved apart so that no block of a recipe spans two groups.

Only the device knows where groups end, so all sizes here depend on the number of tokens alone: nothing synchronizes,
and torch.compile and CUDA graphs can record it.
"""

from __future__ import annotations

from math import lcm
from typing import NamedTuple

import torch
from torch import Tensor

from layoutc.runtime.facts import Layout


class Groups(NamedTuple):
    """Where groups of tokens end: (experts,) int32. Tokens past the last end belong to no group.

    each: the number of tokens per group, if all groups have the same.
    """

    ends: Tensor
    tokens: int
    each: int | None = None

    def apart(self, multiple: int) -> Apart | None:
        """Moves each group to start at a multiple of `multiple` rows; None if nothing moves."""
        if multiple == 1:
            return None
        ends = torch.cat((self.ends.long(), self.ends.new_full((1,), self.tokens, dtype=torch.int64)))
        sizes = torch.diff(ends, prepend=ends.new_zeros(1))
        padded = (sizes + (multiple - 1)) // multiple * multiple
        padded_ends = padded.cumsum(0)
        token = torch.arange(self.tokens, device=ends.device)
        moved = (padded_ends - padded) - (ends - sizes)
        most = self.tokens + len(ends) * (multiple - 1)
        rows = token + moved[torch.searchsorted(ends, token, right=True)]
        return Apart(rows, padded_ends[:-1].int(), (most + multiple - 1) // multiple * multiple)


class Apart(NamedTuple):
    """Tokens with zero rows between groups: the row of each token, where groups end, and the total number of rows."""

    rows: Tensor
    ends: Tensor
    size: int

    def spread(self, x: Tensor) -> Tensor:
        """(tokens, features) -> (size, features)."""
        return x.new_zeros((self.size, x.shape[1])).index_copy(0, self.rows, x)


def equal_groups(experts: int, tokens: int, device: torch.device) -> Groups:
    """Groups of the same number of tokens."""
    ends = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * tokens
    return Groups(ends, experts * tokens, tokens)


def rows_together(layout: Layout, orientation: str) -> int:
    """How many rows share a block or a byte in an orientation; scales that cover all rows do not count."""
    planes = (layout.stored[name].rows_per_value for name in layout.sources[orientation])
    return lcm(layout.multiple_m, *(rows for rows in planes if rows is not None))


def shares_all_rows(layout: Layout, orientation: str) -> bool:
    """Whether a scale covers all rows but not all columns: then each group would need its own scale."""
    return any(
        layout.stored[name].rows_per_value is None and layout.stored[name].columns_per_value is not None
        for name in layout.sources[orientation]
    )

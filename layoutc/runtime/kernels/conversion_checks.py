"""Checks that a card's conversions to small formats give the right bytes, before kernels rely on them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import PTXASError

from layoutc.runtime.triton.conversions import COMPARISONS, count_kernel

Comparison = tuple[str, Any, Any]  # name, the conversion, what must give the same codes
TILE = (8, 512)  # rows and columns of a program

__all__ = ["COMPARISONS", "differing", "patterns"]


def patterns(device: torch.device) -> Tensor:
    """(524288,) fp32: every bf16 value, NaNs included, with its fp32 neighbors and the midpoint to the next value.

    These contain all ties of formats with fewer than 7 bits of mantissa. Consecutive entries are far apart in value, so
    that the comparison notices codes that are swapped within a word.
    """
    upper = torch.arange(1 << 16, dtype=torch.int32, device=device) * 40503 & 0xFFFF  # odd, so each occurs once
    upper = (upper - (1 << 15)) * (1 << 16)
    lower = torch.tensor([0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], dtype=torch.int32, device=device)
    return (lower[:, None] + upper).flatten().view(torch.float32)


def differing(device: torch.device, comparisons: Sequence[Comparison]) -> list[str]:
    """The names, in order, of conversions that give wrong codes, or that the assembler does not know.

    device: a CUDA device; any device under Triton's interpreter. Synchronizes with the device.
    """
    x, one = patterns(device), torch.ones(1, device=device)
    counts = torch.empty(x.numel() // (TILE[0] * TILE[1]), dtype=torch.int32, device=device)
    names: dict[str, None] = {}
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for name, convert, expect in comparisons:
            try:
                count_kernel[(counts.numel(),)](x, one, counts, convert, expect, *TILE, enable_fp_fusion=False)
            except PTXASError:
                names[name] = None
                continue
            if counts.any():
                names[name] = None
    return list(names)

"""Whether a card's conversions to small formats give the bytes that they should, before kernels rely on them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import PTXASError

from layoutc.runtime.triton.comparisons import COMPARISONS, count_kernel

Comparison = tuple[str, Any, Any]  # name, what converts, what it has to give
TILE = (8, 512)  # rows and columns of a program

__all__ = ["COMPARISONS", "differing", "patterns"]


def patterns(device: torch.device) -> Tensor:
    """(524288,) fp32: every bf16 value, of both signs and with every NaN, what lies one and two steps beside it, and
    the middle to the next with its neighbours.

    All ties of formats with less than 7 bits of mantissa are among these. Values that follow one another are far apart,
    so that codes which change places in a word do not go unseen.
    """
    upper = torch.arange(1 << 16, dtype=torch.int32, device=device) * 40503 & 0xFFFF  # odd: each once
    upper = (upper - (1 << 15)) * (1 << 16)
    lower = torch.tensor([0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], dtype=torch.int32, device=device)
    return (lower[:, None] + upper).flatten().view(torch.float32)


def differing(device: torch.device, comparisons: Sequence[Comparison]) -> list[str]:
    """The names, in order, of conversions that give other codes than they have to, or that the assembler doesn't know.

    device: a CUDA device; under Triton's interpreter any. Waits for the device.
    """
    x, one = patterns(device), torch.ones(1, device=device)
    counts = torch.empty(x.numel() // (TILE[0] * TILE[1]), dtype=torch.int32, device=device)
    found: dict[str, None] = {}
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for name, convert, expect in comparisons:
            try:
                count_kernel[(counts.numel(),)](x, one, counts, convert, expect, *TILE, enable_fp_fusion=False)
            except PTXASError:
                found[name] = None
                continue
            if counts.any():
                found[name] = None
    return list(found)

"""Sums over ranks of what each has sent, in fp32 and in the order of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from layoutc.ints.sizes import cdiv
from layoutc.runtime.kernels import launch
from layoutc.runtime.kernels.launch import Launches

if TYPE_CHECKING:
    from layoutc.runtime.kernels.direct import Bound

TILE, WARPS = 4096, 8
_bound: Launches[Bound] = Launches()


def rank_sum(parts: Tensor, out: Tensor, divisor: int) -> None:
    """(ranks, n) contiguous, in bf16 or fp16 -> their sum over ranks, over `divisor`, into `out`, (n,) fp32.

    One rank after the other is added, and each addition and the division are rounded as IEEE 754 says.
    """
    if not (launch.usable(parts) and launch.usable(out)):
        by = torch.full((), divisor, dtype=torch.float32, device=out.device)  # a card multiplies by a number's inverse
        torch.div(sum_in_order(parts), by, out=out)
        return
    key = parts.shape, parts.dtype, parts.device, divisor
    if (bound := _bound.get(key)) is None:
        bound = _bound[key] = _bind(parts, out, divisor)
    bound(parts, out)


def sum_in_order(parts: Tensor) -> Tensor:
    """(ranks, ...) -> (...) fp32."""
    total = parts[0].to(torch.float32)
    for part in parts[1:]:
        total = total + part
    return total


def _bind(parts: Tensor, out: Tensor, divisor: int) -> Bound:
    from layoutc.runtime.kernels import direct
    from layoutc.runtime.triton.reductions import rank_sum_kernel

    ranks, numel = parts.shape
    number, divides = scaling(divisor)
    args, constants = (parts, out, numel, ranks, number), direct.Constants((divides, TILE))
    made: Bound = direct.Bound(rank_sum_kernel, (cdiv(numel, TILE),), args, WARPS, None, constants)
    return made


def scaling(divisor: int) -> tuple[float, bool]:
    """The kernel's number, and whether it divides by that: the inverse of a power of two is exact, and costs less."""
    return (float(divisor), True) if divisor & (divisor - 1) else (1 / divisor, False)

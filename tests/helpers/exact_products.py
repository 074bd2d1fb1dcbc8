"""Values that recipes quantize without loss, and whose products fp32 adds up without rounding, in any order."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Every block of 16 or more, along rows and along columns, has the largest: then its scale is a power of two.
EIGHT_BITS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75)  # the maxima of e4m3 and e5m2 are 1.75 times powers of two
FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1


def exact(recipe: str, rows: int, columns: int, seed: int) -> Tensor:
    """(rows, columns) fp32."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.tensor(FOUR_BITS if "nvfp4" in recipe else EIGHT_BITS)
    x = magnitudes[torch.randint(0, 8, (rows, columns), generator=generator)]
    x[:, ::16] = x[::16] = magnitudes[-1]
    return x * torch.randint(0, 2, x.shape, generator=generator).mul(2).sub(1)


def product(a: Tensor, b: Tensor) -> NDArray[np.float64]:
    """a b in whole numbers of sixteenths."""
    quarters = (np.rint(one.double().numpy() * 4).astype(np.int64) for one in (a, b))
    left, right = quarters
    return (left @ right) / 16.0

"""Codes that files have in place of fp32 values: what they stand for, and codes of new values, as bitsandbytes makes
them when it quantizes the scales of a weight again."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from layoutc.checkpoint.held.stored import Read, Stored
from layoutc.checkpoint.untrusted.files import json_of, short
from layoutc.runtime import numerics as num
from layoutc.runtime.errors import DamagedError, LayoutError

STEPS = 65535  # of the table of nearest codes


class Meaning(NamedTuple):
    """What the codes stand for that files have in place of a plane's values: tensors, as `Codes` says."""

    codebook: Stored
    scale: Stored
    text: Stored
    block: int
    offset: str

    def of(self, codes: Tensor, rows: range, columns: range, width: int, fetch: Read) -> Tensor:
        """The values, fp32, of codes at these rows and columns of `width`. Raises as `added` does."""
        numbers = torch.arange(rows.start, rows.stop)[:, None] * width + torch.arange(columns.start, columns.stop)
        values = fetch(self.codebook, ())[codes.long()] * fetch(self.scale, ())[numbers // self.block]
        return values + torch.tensor(self.added(fetch), dtype=torch.float32)

    def added(self, fetch: Read) -> float:
        """The offset. Raises DamagedError for one that is no number of fp32."""
        text = json_of(bytes(fetch(self.text, ()).numpy()), f"{self.text.name} in the files")
        offset = text.get(self.offset)
        if not isinstance(offset, int | float) or not abs(offset) <= num.F32_MAX:
            raise DamagedError(f"{self.text.name} in the files has {short(offset)} as {self.offset}: no number to add")
        return offset


class Encoded(NamedTuple):
    """Codes of a plane's values.

    codes: uint8, of the plane's shape. scale: fp32 (blocks,). codebook: fp32 (256,). offset: what is added. error: the
    largest difference between a value and what its code stands for, over the largest value. kept: the files that the
    values were read from have these codes.
    """

    codes: Tensor
    scale: Tensor
    codebook: Tensor
    offset: float
    error: float
    kept: bool = False


def encode(values: Tensor, codebook: tuple[float, ...], block: int) -> Encoded:
    """Codes of fp32 values (rows, columns), in blocks counted row by row; on the CPU, whatever device values are on.

    codebook: the value of each of 256 codes, ascending from -1 to 1. The bytes are those of bitsandbytes 0.50 on an x86
    CPU, in one thread: each step below is rounded to fp32 as there. Raises LayoutError for values that have no finite
    mean, or blocks without a finite scale.
    """
    flat = values.detach().cpu().reshape(-1)
    # The mean as torch computes it in one thread: with several, a long sum is added up in as many pieces, and the same
    # weight would get other bytes on another machine. Of two rows torch gives each thread whole ones.
    offset = flat.expand(2, -1).mean(1)[0] if len(flat) else flat.new_zeros(())
    rest = torch.nn.functional.pad(flat - offset, (0, -len(flat) % block)).view(-1, block)
    scale = rest.abs().amax(1) if len(rest) else rest.new_empty(0)
    if not bool(torch.isfinite(scale).all()) or not bool(torch.isfinite(offset)):
        raise LayoutError("its values are not finite, or too large to subtract their mean, so they have no codes")
    normal = (rest * (1 / scale)[:, None]).clamp(-1, 1)
    # A scale near the least of fp32 has no reciprocal: bitsandbytes' index of what is no number is 0.
    numbers = ((normal + 1) * 0.5 * STEPS + 0.5).nan_to_num(0).long()
    codes = _nearest(codebook)[numbers].masked_fill((scale == 0)[:, None], 0).view(-1)[: len(flat)]
    table = torch.tensor(codebook, dtype=torch.float32)
    stands = table[codes.long()] * scale.repeat_interleave(block)[: len(flat)] + offset
    largest = float(flat.abs().amax()) if len(flat) else 0.0
    error = float((stands - flat).abs().amax()) / largest if largest else 0.0
    return Encoded(codes.view(values.shape), scale, table, float(offset), error)


@cache
def _nearest(codebook: tuple[float, ...]) -> Tensor:
    """The code of each of 65,536 values from -1 to 1: the number of midpoints between codes that are less than it."""
    values = torch.tensor(codebook, dtype=torch.float32)
    midpoints = 0.5 * (values[:-1] + values[1:])
    grid = -1 + 2 * torch.arange(STEPS + 1, dtype=torch.float32) / STEPS
    return torch.searchsorted(midpoints, grid).to(torch.uint8)

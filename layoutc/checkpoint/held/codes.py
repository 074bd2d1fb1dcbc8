"""Codes that files store in place of fp32 values: decodes them, and encodes new values the way bitsandbytes does when
it quantizes a weight's scales (double quantization)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from layoutc.checkpoint.held.stored import Read, Stored
from layoutc.checkpoint.untrusted.files import json_of, short
from layoutc.runtime import numerics as num
from layoutc.runtime.errors import DamagedError, LayoutError

STEPS = 65535  # steps of the nearest-code table


class Meaning(NamedTuple):
    """The tensors that decode the codes that files store in place of a plane's values (see `Codes`)."""

    codebook: Stored
    scale: Stored
    text: Stored
    block: int
    offset: str

    def of(self, codes: Tensor, rows: range, columns: range, width: int, fetch: Read) -> Tensor:
        """The fp32 values of codes at these rows and columns, in rows of `width`. Raises like `added`."""
        first = torch.arange(rows.start, rows.stop, device="cpu")[:, None] * width
        numbers = first + torch.arange(columns.start, columns.stop, device="cpu")
        values = fetch(self.codebook, ())[codes.long()] * fetch(self.scale, ())[numbers // self.block]
        return values + torch.tensor(self.added(fetch), dtype=torch.float32, device="cpu")

    def added(self, fetch: Read) -> float:
        """The offset. Raises DamagedError if it is not a finite fp32 number."""
        text = json_of(bytes(fetch(self.text, ()).numpy()), f"{self.text.name} in the files")
        offset = text.get(self.offset)
        if not isinstance(offset, int | float) or not abs(offset) <= num.F32_MAX:
            raise DamagedError(f"{self.text.name} in the files has {short(offset)} as {self.offset}: no number to add")
        return offset


class Encoded(NamedTuple):
    """Codes of a plane's values.

    codes: uint8, in the plane's shape. scale: fp32 (blocks,). codebook: fp32 (256,). offset: added after scaling.
    error: the largest decoding error, relative to the largest magnitude. kept: the codes are those of the source.
    """

    codes: Tensor
    scale: Tensor
    codebook: Tensor
    offset: float
    error: float
    kept: bool = False


def encode(values: Tensor, codebook: tuple[float, ...], block: int) -> Encoded:
    """Encodes fp32 values (rows, columns), in blocks counted row by row. Runs on the CPU for values on any device.

    codebook: the value of each of 256 codes, ascending from -1 to 1. The bytes equal those of bitsandbytes 0.50 on an
    x86 CPU, in one thread: each step below rounds to fp32 as it does. Raises LayoutError if the mean or a block's scale
    is not finite.
    """
    flat = values.detach().cpu().reshape(-1)
    # Computes the mean as torch does in one thread. With several threads, torch splits a long sum, so the bytes would
    # depend on the machine. Given two rows, torch assigns whole rows to threads.
    offset = flat.expand(2, -1).mean(1)[0] if len(flat) else flat.new_zeros(())
    rest = torch.nn.functional.pad(flat - offset, (0, -len(flat) % block)).view(-1, block)
    scale = rest.abs().amax(1) if len(rest) else rest.new_empty(0)
    if not bool(torch.isfinite(scale).all()) or not bool(torch.isfinite(offset)):
        raise LayoutError("its values are not finite, or too large to subtract their mean, so they have no codes")
    normal = (rest * (1 / scale)[:, None]).clamp(-1, 1)
    # A scale near the fp32 minimum has an infinite reciprocal. bitsandbytes' index for NaN is 0.
    numbers = ((normal + 1) * 0.5 * STEPS + 0.5).nan_to_num(0).long()
    codes = _nearest(codebook)[numbers].masked_fill((scale == 0)[:, None], 0).view(-1)[: len(flat)]
    table = torch.tensor(codebook, dtype=torch.float32, device="cpu")
    stands = table[codes.long()] * scale.repeat_interleave(block)[: len(flat)] + offset
    largest = float(flat.abs().amax()) if len(flat) else 0.0
    error = float((stands - flat).abs().amax()) / largest if largest else 0.0
    return Encoded(codes.view(values.shape), scale, table, float(offset), error)


@cache
def _nearest(codebook: tuple[float, ...]) -> Tensor:
    """The code of each of 65,536 values from -1 to 1: how many midpoints between codes are less than the value."""
    values = torch.tensor(codebook, dtype=torch.float32, device="cpu")
    midpoints = 0.5 * (values[:-1] + values[1:])
    grid = -1 + 2 * torch.arange(STEPS + 1, dtype=torch.float32, device="cpu") / STEPS
    return torch.searchsorted(midpoints, grid).to(torch.uint8)

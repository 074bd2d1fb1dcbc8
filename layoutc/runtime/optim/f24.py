"""f24: fp32 masters rounded to 24 bits, stored as a bf16 plane and a byte plane; layout, reference and tensor.

The sign, the exponent and 15 bits of mantissa are kept, rounded to nearest, ties to even. The bf16 is that value
rounded to nearest, ties away from zero. The byte is the remainder in two's complement: the bits of the fp32 value are
`(bf16 << 16) + (byte << 8)`. So the bf16 can serve as the weight. NVIDIA's apex stores all 16 lower bits this way
(store_param_remainders). FlashOptim (arXiv 2602.23349) has a byte too, in fractions of the bf16's last place. f24 is
not a spec because a spec's elements have at most 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from layoutc.runtime.dispatch.table import HANDLERS
from layoutc.runtime.facts import Layout, Plane
from layoutc.runtime.weight.recipe_methods import plane
from layoutc.runtime.weight.tensor import QuantizedTensor, register

LAYOUT = Layout(
    name="f24",
    summary="Masters in 24 bits: bf16 and a byte",
    spec_sha256="",
    layout_id="f24",
    shard_reason="each element is by itself",
    column_multiple=1,
    blocks={"rowwise": "1x1"},
    bytes_per_element=3.0,
    stored={"rowwise_data": Plane(1, 1, torch.bfloat16), "rowwise_rest": Plane(1, 1, torch.uint8)},
    sources={"rowwise": ("rowwise_data", "rowwise_rest")},
    forward=("rowwise_data", "rowwise_rest"),
    as_stored={"rowwise_data": "rowwise_data", "rowwise_rest": "rowwise_rest"},
    not_weights="for the masters of optimizers, not for weights",
    operands={"rowwise": "no product reads masters"},
)


class _Reference:
    """f24's arithmetic in plain torch, on any device. Kernels (optim/stored_masters.py) match it byte for byte."""

    @staticmethod
    def quantize_reference(
        x: Tensor, *, amax: Tensor | None = None, orientations: tuple[str, ...] = ("rowwise",)
    ) -> dict[str, Tensor]:
        """(m, k) in fp32, bf16 or fp16 -> planes. amax must be None."""
        bits = x.float().contiguous().view(torch.int32)
        kept = (bits + 0x7F + ((bits >> 8) & 1)) >> 8  # 24 bits
        upper = torch.where(x.isnan(), 0x7FC0, (kept + 0x80) >> 8)
        rest = torch.where(x.isnan(), 0, kept & 0xFF)
        data = upper.to(torch.int16).view(torch.bfloat16)
        return {"rowwise_data": data, "rowwise_rest": rest.to(torch.uint8)}

    @staticmethod
    def dequantize_reference(planes: Mapping[str, Tensor], m: int, k: int, orientation: str = "rowwise") -> Tensor:
        """Planes -> (m, k) fp32 values."""
        upper = planes["rowwise_data"].contiguous().view(torch.int16).to(torch.int32)
        rest = (planes["rowwise_rest"].to(torch.int32) << 24) >> 16  # sign-extended
        return ((upper << 16) + rest).view(torch.float32)


@register
class F24Tensor(QuantizedTensor):
    """Masters in 24 bits: bf16 and a byte."""

    LAYOUT, HANDLERS, REFERENCE, KERNELS = LAYOUT, HANDLERS, cast(ModuleType, _Reference), None

    rowwise_data = plane("rowwise_data")  # (m, k) bfloat16
    rowwise_rest = plane("rowwise_rest")  # (m, k) uint8

"""One product in low precision by torch.nn.functional.scaled_mm, and its operands in the form that it accepts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from layoutc.runtime.facts import Layout, Operand
from layoutc.runtime.torch_private import scaled_mm, scaled_mm_of_tensors


class Side(NamedTuple):
    """An operand: codes (free, contracted), and scales with the kind and the order of each."""

    codes: Tensor
    scales: list[Tensor]
    kinds: list[int]
    orders: list[int]


def side(layout: Layout, orientation: str, buffers: Mapping[str, Tensor], free: int, *, is_left: bool) -> Side:
    """An operand from the buffers of an orientation; scales are swizzled if the recipe says so.

    free: the size of the dim that is not contracted, without padding. is_left: whether it is the left operand.
    """
    operand = layout.operands[orientation]
    assert isinstance(operand, Operand)  # else there is no kernel
    codes = buffers[f"{orientation}_data"]
    codes = _as(codes.t().contiguous() if operand.transposes else codes, operand.codes)
    scale = _as(buffers[f"{orientation}_scale"], operand.scale)
    if type(scale) is Tensor and scale.data_ptr() % 16:  # an unaligned piece of a larger tensor: cuBLAS rejects it
        scale = scale.clone()
    scales = [as_read(operand.scaling, scale, free, is_left)]
    if operand.tensor_scale is not None:
        scales.append(buffers["amax"][:1] * operand.tensor_scale)
    return Side(codes, scales, *facts(operand))


def _as(stored: Tensor, dtype: torch.dtype) -> Tensor:
    return stored if stored.dtype == dtype else stored.view(dtype)


@cache
def facts(operand: Operand) -> tuple[list[int], list[int]]:
    """Kinds and orders of scales, as numbers: enum lookups cost more host time than the views."""
    swizzled = operand.scale.itemsize == 1  # scales of 1x32 and 1x16 blocks
    kinds = [ScalingType.__members__[operand.scaling]]
    orders = [SwizzleType.SWIZZLE_32_4_4 if swizzled else SwizzleType.NO_SWIZZLE]
    if operand.tensor_scale is not None:
        kinds.append(ScalingType.TensorWise)
        orders.append(SwizzleType.NO_SWIZZLE)
    return [int(kind.value) for kind in kinds], [int(order.value) for order in orders]


def as_read(scaling: str, scale: Tensor, free: int, is_left: bool) -> Tensor:
    """A scale's buffer in the shape and strides that scaled_mm expects."""
    if scaling == "RowWise":
        return scale[:free].view((free, 1) if is_left else (1, free))
    if scaling == "BlockWise1x128":  # (contracted / 128, free), padded: scales are contiguous along rows
        return (scale if scale.shape[1] == free else scale[:, :free].contiguous()).t()
    return scale.t() if scaling == "BlockWise128x128" else scale


def multiply(a: Side, b: Side, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """a b^T in a dtype: (free of a, contracted) by (free of b, contracted).

    fast: let Hopper accumulate in its tensor cores' precision, if the kind of scales allows. torchao and Transformer
    Engine do so in forward, but not for gradients.
    """
    given = dtype if supports_output_dtype(a.kinds, dtype) else torch.bfloat16
    made = _product(a, b, given, fast)
    return made if made.dtype == dtype else made.to(dtype)


def multiply_into(out: Tensor, a: Side, b: Side, *, fast: bool = False) -> None:
    """`multiply` into `out`, whose dtype must pass `supports_output_dtype`."""
    _product(a, b, out.dtype, fast, out=out)


def _product(a: Side, b: Side, dtype: torch.dtype, fast: bool, **into: Tensor) -> Tensor:
    """Calls scaled_mm, into new memory or into `out`."""
    if a.kinds == b.kinds == _WHOLE[0] and a.codes.is_cuda:
        return scaled_mm_of_tensors(a.codes, b.codes.t(), *a.scales, *b.scales, None, None, dtype, fast, **into)
    sides = a.codes, b.codes.t(), a.scales, a.kinds, a.orders, b.scales, b.kinds, b.orders
    return scaled_mm(*sides, None, dtype, [], fast and a.kinds in _WHOLE, **into)


def supports_output_dtype(kinds: list[int], dtype: torch.dtype) -> bool:
    """Whether scaled_mm supports an output dtype for the left operand's scale kinds: bf16 always, fp32 tensor-wise."""
    return dtype == torch.bfloat16 or (kinds == _WHOLE[0] and dtype == torch.float32)


_WHOLE = [[int(kind.value)] for kind in (ScalingType.TensorWise, ScalingType.RowWise)]  # no scale along the contraction

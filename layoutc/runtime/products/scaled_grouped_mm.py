"""Multiplies groups of tokens by expert weights with torch.nn.functional.scaled_grouped_mm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from layoutc.runtime.facts import Grouped, Layout, Operand
from layoutc.runtime.products.choice import TILE, Sizes
from layoutc.runtime.torch_private import scaled_grouped_mm, scaled_grouped_mm_v2

Buffers = Mapping[str, Tensor]


class Side(NamedTuple):
    """An operand: codes, scales of rows or blocks, and the tensor's scale if there is one."""

    codes: Tensor
    scale: Tensor
    of_tensor: Tensor | None


def tokens(layout: Layout, buffers: Buffers, kernel: Grouped) -> Side:
    """The left operand, rowwise. For block scales each group starts at a tile, so groups' scales are the matrix's."""
    operand = _operand(layout, "rowwise")
    codes = buffers["rowwise_data"]
    codes = codes.t().contiguous() if operand.transposes else codes
    scale, rows = buffers["rowwise_scale"].view(operand.scale), codes.shape[0]
    if kernel.kind == "RowWise":
        scale = scale[:rows] if operand.scaling == kernel.kind else scale.expand(rows)
        return Side(codes.view(operand.codes), scale.contiguous(), None)
    return Side(codes.view(operand.codes), scale.view(rows, -1), _of_tensor(operand, buffers))


def experts(layout: Layout, orientation: str, buffers: Buffers, kernel: Grouped, sizes: Sizes) -> Side:
    """The right operand: the matrix that stacks all experts, split into one (contracted, free) matrix per expert."""
    operand = _operand(layout, orientation)
    count, is_row = sizes.experts, orientation == "rowwise"
    rows, columns = sizes.stored
    codes = buffers[f"{orientation}_data"]
    if is_row:
        codes = codes.t().contiguous() if operand.transposes else codes
        codes = codes.view(count, rows, -1)
    elif operand.transposes:
        codes = codes.view(count, rows, -1).transpose(1, 2).contiguous()
    else:
        codes = codes.view(columns, count, -1).transpose(0, 1)
        codes = codes if kernel.kind == "RowWise" else codes.contiguous()  # kernels for blocks ignore strides
    scale = buffers[f"{orientation}_scale"].view(operand.scale)
    free = rows if is_row else columns
    if kernel.kind == "RowWise":
        each = operand.scaling == kernel.kind and is_row  # else experts share scales: the tensor's, or the columns'
        scale = scale[: count * free].view(count, free) if each else scale[:free].expand(count, free)
        return Side(codes.view(operand.codes).transpose(1, 2), scale.contiguous(), None)
    if not is_row:  # for a range of columns, the tiles of all experts are contiguous
        scale = scale.view(-(-free // TILE[0]), count, -1).transpose(0, 1)
    return Side(codes.view(operand.codes).transpose(1, 2), scale.reshape(count, -1), _of_tensor(operand, buffers))


def columns(layout: Layout, codes: Tensor, scale: Tensor) -> Side:
    """An operand of a weight's gradient: (columns, rows), with column scales per group."""
    return Side(codes.view(_operand(layout, "columnwise").codes), scale.flatten(), None)


def _operand(layout: Layout, orientation: str) -> Operand:
    operand = layout.operands[orientation]
    assert isinstance(operand, Operand)  # else there is no kernel
    return operand


def _of_tensor(operand: Operand, buffers: Buffers) -> Tensor | None:
    return None if operand.tensor_scale is None else buffers["amax"][:1] * operand.tensor_scale


def multiply(a: Side, b: Side, ends: Tensor, kernel: Grouped, dtype: torch.dtype) -> Tensor:
    """Multiplies each group of rows of a by its matrix of b -> (tokens, free) in a dtype. ends: end rows of groups.

    Hopper accumulates in its tensor cores' precision (fast accumulation), for gradients too: torchao does the same for
    experts, and the alternative takes up to twice as long.
    """
    bf16 = torch.bfloat16  # the only output dtype of its kernels
    if a.of_tensor is None or b.of_tensor is None:
        is_fast = kernel.kind == "RowWise"
        made = scaled_grouped_mm(a.codes, b.codes, a.scale, b.scale, ends, None, None, bf16, is_fast)
    else:
        kinds = [int(ScalingType.__members__[kernel.kind].value), int(ScalingType.TensorWise.value)]
        orders = [int(SwizzleType.SWIZZLE_32_4_4.value), int(SwizzleType.NO_SWIZZLE.value)]
        left, right = (
            [side.scale, of_tensor.expand(len(ends)).contiguous()]
            for side, of_tensor in ((a, a.of_tensor), (b, b.of_tensor))
        )
        made = scaled_grouped_mm_v2(
            a.codes, b.codes, left, kinds, orders, right, kinds, orders, ends, None, bf16, [], False
        )
    return made.to(dtype)

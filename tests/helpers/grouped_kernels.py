"""What the kernels of scaled_grouped_mm read, by their own sources: groups of rows, in tiles of scales of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _values(codes: Tensor) -> Tensor:
    """(..., bytes) -> fp32; of two codes in a byte, the low one is first."""
    if codes.dtype != torch.float4_e2m1fn_x2:
        return codes.float()
    data = codes.contiguous().view(torch.uint8)
    both = torch.stack((data & 15, data >> 4), -1).flatten(-2)
    return _E2M1[(both & 7).long()] * torch.where(both > 7, -1.0, 1.0)


def _tiled(flat: Tensor, rows: int, blocks: int, block: int) -> Tensor:
    """Scales of rows in tiles of 128 rows by 4, each tile as 32 x 4 x 4, for each column of the operand."""
    tiles = flat.float().view(_up(rows, 128) // 128, _up(blocks, 4) // 4, 32, 4, 4)
    matrix = tiles.permute(0, 3, 2, 1, 4).reshape(_up(rows, 128), _up(blocks, 4))
    return matrix[:rows, :blocks].repeat_interleave(block, 1)


def _multiply(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, alpha: Tensor | None) -> Tensor:
    assert (a.dim(), b.dim(), offs.dtype) == (2, 3, torch.int32)
    assert a.is_contiguous()
    assert b.stride(1) == 1
    left, right = _values(a), _values(b.transpose(1, 2))  # (experts, free, contracted)
    experts, free, contracted = right.shape
    assert all(size % 16 == 0 for size in (a.shape[1], *b.shape[1:]))
    assert (left.shape[1], len(offs)) == (contracted, experts)
    out = torch.full((a.shape[0], free), float("nan"))
    block = {torch.float32: 0, torch.float8_e8m0fnu: 32, torch.float8_e4m3fn: 16}[scale_a.dtype]
    if not block:
        assert (scale_a.shape, scale_b.shape) == ((a.shape[0],), (experts, free))
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
    else:
        assert b.transpose(1, 2).is_contiguous()  # their strides are fixed
        assert (scale_a.dim(), scale_a.shape[0] >= a.shape[0]) == (2, True)
        assert scale_b.shape == (experts, _up(free, 128) * _up(contracted // block, 4))
    start, tiles = 0, 0
    for expert, end in enumerate(offs.tolist()):
        if block:
            size = _up(end - start, 128) * _up(contracted // block, 4)
            of_rows = _tiled(scale_a.flatten()[tiles : tiles + size], end - start, contracted // block, block)
            of_expert = _tiled(scale_b[expert], free, contracted // block, block)
            tiles += size
        else:
            of_rows, of_expert = scale_a[start:end, None], scale_b[expert, :, None]
        made = (left[start:end] * of_rows) @ (right[expert] * of_expert).t()
        out[start:end] = made if alpha is None else made * alpha[expert]
        start = end
    return out.bfloat16()


def _contract_groups(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor) -> Tensor:
    """As prepare_grouped_gemm_data asks of groups that are contracted: none is empty, each begins at 16 bytes."""
    assert (a.stride(1), b.stride(0), offs.dtype) == (1, 1, torch.int32)
    (free, size), experts = a.shape, len(offs)
    assert size % 16 == b.shape[0] % 16 == b.shape[1] % 16 == 0
    assert (scale_a.shape, scale_b.shape) == ((experts * free,), (experts * b.shape[1],))
    made, start = [], 0
    for expert, end in enumerate(offs.tolist()):
        assert end > start
        assert end % 16 == 0
        assert end <= size
        left = a[:, start:end].float() * scale_a.view(experts, -1)[expert, :, None]
        right = b[start:end].float() * scale_b.view(experts, -1)[expert]
        made.append(left @ right)
        start = end
    return torch.stack(made).bfloat16()


def one_scale(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, bias: None, result: None, *rest: Any
) -> Tensor:
    """As aten._scaled_grouped_mm."""
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert rest[0] == torch.bfloat16
    if b.dim() == 2:
        return _contract_groups(a, b, scale_a, scale_b, offs)
    return _multiply(a, b, scale_a, scale_b, offs, None)


def two_scales(
    a: Tensor,
    b: Tensor,
    scale_a: list[Tensor],
    kinds_a: list[int],
    orders_a: list[int],
    scale_b: list[Tensor],
    kinds_b: list[int],
    orders_b: list[int],
    offs: Tensor,
    *rest: Any,
) -> Tensor:
    """As aten._scaled_grouped_mm_v2, for blocks under a scale of the tensor."""
    assert a.dtype == b.dtype == torch.float4_e2m1fn_x2
    assert kinds_a == kinds_b == [ScalingType.BlockWise1x16.value, ScalingType.TensorWise.value]
    assert orders_a == orders_b == [1, 0]
    assert rest[1] == torch.bfloat16
    assert scale_a[1].shape == scale_b[1].shape == offs.shape
    return _multiply(a, b, scale_a[0], scale_b[0], offs, scale_a[1] * scale_b[1])

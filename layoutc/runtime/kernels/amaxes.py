"""Amaxes of one matrix on a card: of all of it, or of each block of columns."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from layoutc.ints.sizes import cdiv
from layoutc.runtime.captures import capturing
from layoutc.runtime.kernels import launch
from layoutc.runtime.kernels.launch import Launches
from layoutc.runtime.streams import stream_of

if TYPE_CHECKING:
    from layoutc.runtime.kernels.direct import Bound

_bound: Launches[Bound] = Launches()
TILE = (8, 1024, 8)  # rows, columns and warps of a program
ZEROS = 512  # how many amaxes are made at a time, 16 bytes each


def _kernels() -> tuple[ModuleType, ModuleType]:
    """The modules that launch kernels and define them. They are imported here because both need Triton."""
    from layoutc.runtime.kernels import direct
    from layoutc.runtime.triton import reductions

    return direct, reductions


def column_tile(block_k: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a program that computes amaxes of blocks of columns."""
    return 64, max(128, 1 << (block_k - 1).bit_length()), 8


def covered(tile_k: int, block_k: int) -> int:
    """How many of a tile's columns hold whole blocks."""
    return tile_k // block_k * block_k


def matrix_amax(x: Tensor, block_k: int | None, *, passing: bool = False) -> Tensor:
    """The amax of a matrix, (1,) fp32; or of each `block_k` columns over all rows, (1, blocks) fp32. NaN propagates.

    x: (m, k) in fp32, bf16 or fp16. The bytes are those of numerics.matrix_amax. passing: one that lives as long as a
    step, so that its memory may be a part of something larger.
    """
    if passing and block_k is None:
        amax = passing_zero(x.device)
    else:
        amax = torch.zeros(_shape(x, block_k), dtype=torch.float32, device=x.device)
    if x.numel():
        measuring(x, block_k)(x, amax)
    return amax


def _shape(x: Tensor, block_k: int | None) -> tuple[int, ...]:
    return (1,) if block_k is None else (1, cdiv(x.shape[1], block_k))


def measuring(x: Tensor, block_k: int | None) -> Bound:
    """The launch that raises amaxes of matrices like x, from zeros: products measure the same sizes in each step."""
    key = x.shape, x.stride(), x.dtype, x.device, block_k
    if (bound := _bound.get(key)) is None:
        bound = _bound[key] = _bind(x, block_k)
    return bound


def passing_zero(device: torch.device) -> Tensor:
    """An amax to be raised, (1,) fp32, that lives as long as a step: a part of something larger, where it can be."""
    if torch.is_inference_mode_enabled() or capturing(device):
        return torch.zeros((1,), dtype=torch.float32, device=device)
    key = device.index, stream_of(device)
    if not (left := _zeros.get(key)):
        zeros = torch.zeros((ZEROS, 4), dtype=torch.float32, device=device)
        left = _zeros[key] = [*zeros[:, :1].unbind()]
    return left.pop()


# Zeros that nobody has had yet, at multiples of 16 bytes, since a fill for each would be a launch: by the card and the
# stream that has filled them. None of inference mode, whose tensors autograd can't save: others of the same fill may be
# wanted for backward.
_zeros: dict[tuple[int | None, int], list[Tensor]] = {}


def _bind(x: Tensor, block_k: int | None) -> Bound:
    """A launch that reads amaxes as integers, which are in the same order."""
    direct, kernels = _kernels()
    amax = torch.zeros(_shape(x, block_k), dtype=torch.int32, device=x.device)
    m, k = x.shape
    tile_m, tile_k, warps = TILE if block_k is None else column_tile(block_k)
    block = tile_k if block_k is None else block_k
    cover = covered(tile_k, block)
    even = m % tile_m == 0 and k % cover == 0
    constants = direct.Constants((block, tile_m, tile_k, block_k is None, even, launch.hardware(x.device)))
    args = x, amax, m, k, *x.stride(), amax.shape[-1]
    made: Bound = direct.Bound(kernels.amax_kernel, launch.programs(m, k, tile_m, cover), args, warps, None, constants)
    return made

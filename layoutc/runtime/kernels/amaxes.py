"""Amaxes of one matrix on a card: of all of it, of each block of columns, or of each block of rows."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from layoutc.ints.sizes import cdiv
from layoutc.runtime.kernels import launch

TILE = (8, 1024, 8)  # rows, columns and warps of a program


def _kernels() -> tuple[ModuleType, ModuleType]:
    """The modules that launch kernels and define them. They are imported here because both need Triton."""
    from layoutc.runtime.kernels import direct
    from layoutc.runtime.triton import tiles

    return direct, tiles


def column_tile(block_k: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a program that computes amaxes of blocks of columns."""
    return 64, max(128, block_k), 8


def matrix_amax(x: Tensor, block_k: int | None) -> Tensor:
    """The amax of a matrix, (1,) fp32; or of each `block_k` columns over all rows, (1, blocks) fp32. NaN propagates.

    x: (m, k) in fp32, bf16 or fp16. The bytes are those of numerics.matrix_amax.
    """
    direct, tiles = _kernels()
    m, k = x.shape
    columns = 1 if block_k is None else cdiv(k, block_k)
    amax = torch.zeros((1,) if block_k is None else (1, columns), dtype=torch.int32, device=x.device)
    if x.numel():
        tile_m, tile_k, warps = TILE if block_k is None else column_tile(block_k)
        grid = launch.programs(m, k, tile_m, tile_k)
        args = (
            x,
            amax,
            m,
            k,
            x.stride(0),
            x.stride(1),
            columns,
            tile_k if block_k is None else block_k,
            tile_m,
            tile_k,
            block_k is None,
            m % tile_m == 0 and k % tile_k == 0,
            launch.hardware(x.device),
        )
        direct.run(tiles.amax_kernel, grid, args, warps)
    return amax.view(torch.float32)


def row_amax(x: Tensor, block_m: int) -> Tensor:
    """(m, k) in fp32, bf16 or fp16 -> the amax of each `block_m` rows over all columns, (blocks, 1) fp32."""
    direct, tiles = _kernels()
    m, k = x.shape
    amax = torch.empty((cdiv(m, block_m), 1), dtype=torch.float32, device=x.device)
    if m:
        args = (x, amax, m, k, x.stride(0), x.stride(1), block_m, max(8192 // block_m, 128), launch.hardware(x.device))
        direct.run(tiles.row_amax_kernel, (cdiv(m, block_m),), args, 4)
    return amax

"""Amaxes on a card: of a whole matrix or each block of columns, of one matrix or many in one launch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from layoutc.ints.sizes import cdiv
from layoutc.runtime.kernels import batches, launch, plans
from layoutc.runtime.kernels.launch_plan import LaunchPlan
from layoutc.runtime.streams import capturing, stream_of

TILE = (8, 1024, 8)  # rows, columns and warps of a program
BATCH_TILE = (1, 8192, 8)  # the same for many matrices, each read as one long row
ZEROS = 512  # how many amaxes are made at a time, 16 bytes each


def column_tile(block_k: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a program that computes amaxes of blocks of columns."""
    return 64, max(128, 1 << (block_k - 1).bit_length()), 8


def covered(tile_k: int, block_k: int) -> int:
    """How many of a tile's columns hold whole blocks."""
    return tile_k // block_k * block_k


def matrix_amax(x: Tensor, block_k: int | None, *, passing: bool = False) -> Tensor:
    """The amax of a matrix, (1,) fp32; or of each `block_k` columns over all rows, (1, blocks) fp32. NaN propagates.

    x: (m, k) in fp32, bf16 or fp16. The bytes are those of numerics.matrix_amax. passing: it lives for one step, so its
    memory may be part of a larger tensor.
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


def measuring(x: Tensor, block_k: int | None) -> LaunchPlan:
    """The plan that computes amaxes of matrices like x from zeros: products see the same sizes in each step."""
    key = "amax", x.shape, x.stride(), x.dtype, x.device, block_k
    return plans.cache.of(key, lambda: _plan(x, block_k))


def passing_zero(device: torch.device) -> Tensor:
    """A zero for an amax, (1,) fp32, that lives for one step: part of a larger tensor if possible."""
    if torch.is_inference_mode_enabled() or capturing(device):
        return torch.zeros((1,), dtype=torch.float32, device=device)
    key = device.index, stream_of(device)
    if not (left := _zeros.get(key)):
        zeros = torch.zeros((ZEROS, 4), dtype=torch.float32, device=device)
        left = _zeros[key] = [*zeros[:, :1].unbind()]
    return left.pop()


# Unused zeros at multiples of 16 bytes, by card and by the stream that filled them: a fill for each would be a launch.
# Never from inference mode: autograd can't save its tensors, and backward may need others of the same fill.
_zeros: dict[tuple[int | None, int], list[Tensor]] = {}


def _plan(x: Tensor, block_k: int | None) -> LaunchPlan:
    """A launch that compares amaxes as integers, which have the same order."""
    from layoutc.runtime.triton.reductions import amax_kernel

    amax = torch.zeros(_shape(x, block_k), dtype=torch.int32, device=x.device)
    m, k = x.shape
    tile_m, tile_k, warps = TILE if block_k is None else column_tile(block_k)
    block = tile_k if block_k is None else block_k
    cover = covered(tile_k, block)
    even = m % tile_m == 0 and k % cover == 0
    constants = block, tile_m, tile_k, block_k is None, even, launch.hardware(x.device)
    args = x, amax, m, k, *x.stride(), amax.shape[-1], *constants
    return LaunchPlan.of(amax_kernel, launch.programs(m, k, tile_m, cover), args, warps)


# ------------------------------------------------------------------------------------------------------ many matrices
def batch_amax(xs: Sequence[Tensor], block_k: int | None = None) -> Tensor:
    """The amax of each of n matrices in fp32, bf16 or fp16, (n,) fp32; NaN propagates.

    block_k: instead, the amaxes of each `block_k` columns of each matrix, as matrix_amax returns them, flattened and
    concatenated. Raises ValueError if the matrices are on several devices.
    """
    offsets = list(accumulate((_count(x, block_k) for x in xs), initial=0))
    packed = torch.zeros(offsets.pop(), dtype=torch.int32, device=xs[0].device if xs else None)
    raise_amaxes(packed, offsets, xs, block_k)
    return packed.view(torch.float32)


def batch_amaxes(xs: Sequence[Tensor], block_k: int | None) -> Sequence[Tensor]:
    """batch_amax, split by matrix."""
    return torch.split(batch_amax(xs, block_k), [_count(x, block_k) for x in xs])


def _count(x: Tensor, block_k: int | None) -> int:
    """How many amaxes a matrix has."""
    return 1 if block_k is None else cdiv(x.shape[1], block_k)


def raise_amaxes(packed: Tensor, offsets: Sequence[int], xs: Sequence[Tensor], block_k: int | None) -> None:
    """Raises entries of `packed` to the amaxes of matrices, in place.

    packed: (n,) int32, the bits of fp32 magnitudes. offsets: where the amaxes of each matrix begin. Raises ValueError
    if the matrices and `packed` are on several devices.
    """
    found, single = amax_plans(packed, offsets, xs, block_k)
    for plan in found:
        plan(packed)
    for index in single:
        amax = matrix_amax(xs[index], block_k).view(torch.int32).reshape(-1)
        packed[offsets[index] : offsets[index] + amax.numel()] = amax


def amax_plans(
    packed: Tensor, offsets: Sequence[int], xs: Sequence[Tensor], block_k: int | None
) -> tuple[list[LaunchPlan], list[int]]:
    """Plans for `raise_amaxes` with any `packed` of that size, while matrices keep their addresses; and the matrices
    that are in no table."""
    from layoutc.runtime.triton.batch import DTYPES, amax_batch_kernel

    device_index = packed.get_device()
    if any(x.get_device() != device_index for x in xs):
        raise ValueError("matrices whose amaxes are computed together must be on one device")
    kinds: dict[torch.dtype, list[int]] = defaultdict(list)
    for index, x in enumerate(xs):
        kinds[x.dtype].append(index)
    tile_m, tile_k, warps = BATCH_TILE if block_k is None else column_tile(block_k)
    block = tile_k if block_k is None else block_k
    cover = covered(tile_k, block)
    level = launch.hardware(packed.device)
    found: list[LaunchPlan] = []
    alone: list[int] = []
    for dtype, members in kinds.items():
        matrices, starts = [xs[index] for index in members], [offsets[index] for index in members]
        shapes = [(1, x.numel()) if block_k is None else x.shape for x in matrices]
        tables, single = batches.of_matrices(
            matrices, shapes, starts, [batches.addresses_of(matrices)], [True], (tile_m, cover), (tile_m, cover)
        )
        fixed = DTYPES[dtype], block, tile_m, tile_k, block_k is None

        def plan(table: batches.Table, fixed: tuple[Any, ...] = fixed) -> LaunchPlan:
            args = table.entries, packed, *fixed, *table.kind, level
            return LaunchPlan.of(amax_batch_kernel, table.programs, args, warps, bound=[table.entries])

        found += [table.plans.of(fixed, partial(plan, table)) for table in tables]
        alone += [members[index] for index in single]
    return found, alone

"""Quantizes grouped rows along each group: the operands of an expert weight's gradient, in low precision.

A group's columns become rows of codes, each with its own scale, as a recipe quantizes rows. So each group gets the
numbers of a linear layer with its expert's weight. Codes of groups are moved apart, as kernels require: each group
starts at a tile and is padded with zero codes. An empty group has a tile of zeros, since no kernel contracts 0 rows.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from layoutc.ints.sizes import cdiv
from layoutc.runtime import library
from layoutc.runtime.kernels import launch
from layoutc.runtime.kernels.launch_plan import launched
from layoutc.runtime.operands import expert_rows
from layoutc.runtime.operands.groups import shares_all_rows
from layoutc.runtime.weight import operators
from layoutc.runtime.weight.recipe_methods import RecipeMethods

TILE = 128  # rows of a tile, all of one group
COLUMNS, WARPS = 64, 8  # per program


def why_not(recipe: type[RecipeMethods]) -> str:
    """Why columns of groups can't be quantized as rows; "" if they can."""
    if reason := expert_rows.why_not(recipe, TILE):
        return reason
    layout = recipe.LAYOUT
    if "columnwise" not in layout.sources or not shares_all_rows(layout, "columnwise"):
        return f"{layout.name} has other columns than rows of the transposed matrix"
    return ""


def ends_apart(ends: Tensor) -> Tensor:
    """Where groups end after they are moved apart: (experts,) int32."""
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    return (torch.clamp((sizes + (TILE - 1)) // TILE, min=1) * TILE).cumsum(0).to(torch.int32)


def _size(rows: int, experts: int) -> int:
    """The upper bound of ends_apart: a multiple of the tile."""
    return (rows + experts * TILE) // TILE * TILE


def _planes(x: Tensor, order: Tensor | None, ends: Tensor) -> list[Tensor]:
    rows, columns, experts = len(x) if order is None else len(order), x.shape[1], len(ends)
    codes = x.new_empty((columns, _size(rows, experts)), dtype=torch.uint8)
    return [codes, x.new_empty((experts, columns), dtype=torch.float32)]


def _quantized(x: Tensor, order: Tensor | None, each: int, ends: Tensor, recipe: str) -> list[Tensor]:
    cls, x = operators.recipe_of(recipe), launch.in_rows(x.contiguous())
    made = _planes(x, order, ends)
    kernels = cls.quantizing_kernels(x)
    apart = ends_apart(ends)
    if kernels is None:
        _by_groups(cls, x if order is None else x[order // each], ends, apart, made)
        return made
    from layoutc.runtime.operands.column_kernels import amax_of_columns_kernel, quantize_columns_kernel

    codes, scale = made
    amax = torch.zeros(scale.shape, dtype=torch.int32, device=x.device)
    (columns, size), experts = codes.shape, len(ends)
    grid = size // TILE * cdiv(columns, COLUMNS)
    sizes = (columns, size, experts, 1 << (experts - 1).bit_length(), each, TILE, COLUMNS, launch.hardware(x.device))
    launched(amax_of_columns_kernel, grid, (x, order, ends, apart, amax, *sizes), WARPS)
    largest = torch.finfo(x.dtype).max if kernels.takes_input_max else None
    args = x, order, ends, apart, amax, codes, scale, None, largest, *sizes, kernels.quantize_tile
    launched(quantize_columns_kernel, grid, args, WARPS)
    return made


def _by_groups(cls: type[RecipeMethods], rows: Tensor, ends: Tensor, apart: Tensor, made: list[Tensor]) -> None:
    """Quantizes one group after the other with the recipe's own functions."""
    codes, scale = made
    codes.zero_()
    zero = rows.new_zeros((rows.shape[1], TILE))
    starts = (0, *apart.tolist())
    for group, (first, end) in enumerate(pairwise((0, *ends.tolist()))):
        of_group = rows[first:end].t().contiguous() if end > first else zero
        planes = operators.quantize(cls, of_group, None, ("rowwise",))
        data, of_rows = (planes[name] for name in expert_rows.PLANES)
        codes[:, starts[group] : starts[group] + of_group.shape[1]] = data
        scale[group] = of_rows.flatten()


quantized = library.define(
    "columns_of_groups_quantized(Tensor x, Tensor? order, int each, Tensor ends, str recipe) -> Tensor[]",
    _quantized,
    lambda x, order, each, ends, recipe: _planes(x, order, ends),
)
"""(x, order or None, each, ends, a recipe's key) -> codes (columns, rows apart) uint8 and scales (groups, columns).

Rows of x, or x[order // each], form groups that end at ends; rows past the last end are not read.
"""


def _values(codes: Tensor, scale: Tensor, ends: Tensor, rows: int, recipe: str) -> Tensor:
    cls, starts = operators.recipe_of(recipe), (0, *ends_apart(ends).tolist())
    out = scale.new_zeros((rows, codes.shape[0]))
    for group, (first, end) in enumerate(pairwise((0, *ends.tolist()))):
        if end > first:
            data = codes[:, starts[group] : starts[group] + end - first].contiguous()
            planes = dict(zip(expert_rows.PLANES, (data, scale[group, :, None]), strict=True))
            columns, size = data.shape
            out[first:end] = operators.dequantize(cls, planes, columns, size, "rowwise", torch.float32).t()
    return out


values = library.define(
    "columns_of_groups_values(Tensor codes, Tensor scale, Tensor ends, int rows, str recipe) -> Tensor",
    _values,
    lambda codes, scale, ends, rows, recipe: scale.new_empty((rows, codes.shape[0])),
)
"""The inverse, for the reference: (rows, columns) fp32, with groups moved together again."""

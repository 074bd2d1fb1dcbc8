"""The amax of an operand in a traced graph: Inductor fuses it with the operand's computation instead of rereading it.

Inductor stores the operand first, as for any operator that it does not know. The amax may then be taken of values that
are not rounded to the operand's dtype yet. Since rounding is monotone, the amax, rounded to the operand's dtype when it
is stored, is the amax of the rounded values. Kernels find the amax of fp32 operands.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from layoutc.runtime import library
from layoutc.runtime.torch_private import lower_in_inductor, traced
from layoutc.runtime.weight import operators
from layoutc.runtime.weight.tensor import QuantizedTensor

_ROWS = 1024  # up to this many row amaxes, each program reduces them itself; above, a separate launch does


def amax_of(recipe: type[QuantizedTensor], x: Tensor) -> Tensor | None:
    """That of an operand (m, k), in its dtype, (1,); or one per row, (m,), if its kernel reduces these. NaN propagates.

    None outside traces, for fp32, and for recipes without an amax of the whole matrix: what quantizes x finds its own.
    """
    layout, rows = recipe.LAYOUT, x.shape[0]
    if not layout.shares_amax or layout.amax_columns is not None:
        return None
    if x.dtype == torch.float32 or x.numel() == 0 or not traced(x):
        return None
    if "torch._inductor.lowering" in sys.modules:  # else no graph is compiled, or a cached one is used
        lower_in_inductor(_amax, _lower)
    by_rows = type(rows) is int and rows <= _ROWS and "amax" not in layout.as_stored
    found: Tensor = _amax(x, recipe.KEY, by_rows)
    return found


def _run(x: Tensor, recipe: str, by_rows: bool = False) -> Tensor:
    return x.abs().amax(1) if by_rows else operators.recipe_of(recipe).shared_amax(x).to(x.dtype)


def _lower(lowerings: Any, x: Any, recipe: str, by_rows: bool = False) -> Any:
    """The lowering: realizes x and reduces it by rows, so Inductor fuses this into row-wise kernels that make x."""
    aten = torch.ops.aten
    x.realize()
    rows = lowerings[aten.amax.default](lowerings[aten.abs.default](x), [1])
    return rows if by_rows else lowerings[aten.amax.default](rows, [0], True)


_amax = library.define(
    "amax(Tensor x, str recipe, bool by_rows=False) -> Tensor",
    _run,
    lambda x, recipe, by_rows=False: x.new_empty((x.shape[0] if by_rows else 1,)),
)

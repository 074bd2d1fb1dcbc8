"""Token rows in expert order: the way there and back, sums over a token's experts, their gradients, gated products.

Models usually write this as separate passes that gather each row, multiply it by its weight, scatter it and add it up.
Numbers of tokens stay on the device, so nothing synchronizes. Each token has rows for several experts, and sums run
over the rows of each token, so no row is written twice: torch's gradient of an index adds rows with atomics, or sorts
them first. silu(gate) * up is one launch, in forward and in backward, which saves only its input.

What makes rows also quantizes them in the same launch, given a recipe whose blocks are rows: a row's codes and scale
follow from the row, wherever it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from layoutc.ints.sizes import cdiv
from layoutc.runtime import library
from layoutc.runtime.kernels import launch
from layoutc.runtime.kernels.launch_plan import launched
from layoutc.runtime.torch_private import traced
from layoutc.runtime.weight import operators
from layoutc.runtime.weight.recipe_methods import RecipeMethods

TILE, WARPS = 1024, 4  # columns and warps of a program of sums
GATED_TILE = 4096  # the most columns of a program of gated products, unless it quantizes a whole row
PLANES = ("rowwise_data", "rowwise_scale")
_ROWWISE = ("rowwise",)
_MOST = 16384  # the most columns that a program can hold


def why_not(recipe: type[RecipeMethods], columns: int) -> str:
    """Why rows of this many columns can't be quantized by the kernels that make them; "" if they can."""
    layout = recipe.LAYOUT
    if layout.sources.get("rowwise") != PLANES or any(name not in layout.as_stored for name in PLANES):
        return f"{layout.name} has other planes than codes and scales that products read as they are"
    data, scale = (layout.stored[name] for name in PLANES)
    if (scale.rows_per_value, scale.columns_per_value) != (1, None) or data.rows_per_value != 1:
        return f"{layout.name} has blocks that are no rows"
    if layout.stochastic or layout.takes_amax(_ROWWISE) or layout.multiple_m != 1:
        return f"{layout.name} has scales or codes that depend on more than a row"
    return f"rows have {columns} columns, more than {_MOST}" if columns > _MOST else ""


def warps_of(tile: int) -> int:
    """The warps of a program that processes a whole row."""
    return max(WARPS, min(tile // 512, 16))


class _Quantizing:
    """How a launch quantizes the rows of a shape that it makes: `args` of its kernel, which fills `planes`."""

    def __init__(self, recipe: str | None, shape: Sequence[int], like: Tensor) -> None:
        """recipe: its key; None: the launch quantizes nothing."""
        self.planes: list[Tensor] = _planes(recipe, shape, like)
        self.args: tuple[Any, ...] = None, None, None, None  # codes, scales, None, the largest value of rows' dtype
        self.tile: Any = None  # the recipe's tile function
        if recipe is not None:
            kernels: Any = operators.recipe_of(recipe).quantizing_kernels(like)
            self.tile = kernels.quantize_tile
            self.args = *self.planes, None, torch.finfo(like.dtype).max if kernels.takes_input_max else None


def _by_kernels(recipe: str | None, like: Tensor) -> bool:
    """Whether a launch makes rows like these, and quantizes them."""
    return launch.usable(like) and (recipe is None or operators.recipe_of(recipe).quantizing_kernels(like) is not None)


def _planes(recipe: str | None, shape: Sequence[int], like: Tensor) -> list[Tensor]:
    facts = {} if recipe is None else operators.recipe_of(recipe).LAYOUT.planes(*shape)
    return [like.new_empty(facts[name].shape, dtype=facts[name].dtype) for name in PLANES if facts]


def _quantized(recipe: str | None, x: Tensor) -> list[Tensor]:
    made = {} if recipe is None else operators.quantize(operators.recipe_of(recipe), x, None, _ROWWISE)
    return [made[name] for name in PLANES if made]


# ------------------------------------------------------------------------------------------------- sums over experts
def _sum_of_experts(y: Tensor, rows: Tensor, weights: Tensor | None, ends: Tensor) -> Tensor:
    y = y.contiguous()
    (tokens, chosen), columns = rows.shape, y.shape[1]
    if not launch.usable(y):
        total = y.new_zeros((tokens, columns), dtype=torch.float32)
        for i in range(chosen):
            values = torch.where((rows[:, i] < ends[-1])[:, None], y[rows[:, i]], 0)
            total += values if weights is None else values * weights[:, i, None]
        return total.to(y.dtype)
    from layoutc.runtime.operands.kernels import sum_of_experts_kernel

    out = y.new_empty((tokens, columns))
    constants = chosen, weights is not None, TILE, launch.hardware(y.device)
    args = y, rows, rows if weights is None else weights.contiguous(), ends, out, columns, len(ends), *constants
    launched(sum_of_experts_kernel, tokens * cdiv(columns, TILE), args, WARPS)
    return out


def _of_experts(
    grad: Tensor, y: Tensor, rows: Tensor, weights: Tensor, ends: Tensor, recipe: str | None = None
) -> list[Tensor]:
    grad, y, weights = grad.contiguous(), y.contiguous(), weights.contiguous()
    (tokens, chosen), columns = weights.shape, y.shape[1]
    of_y, of_weights = torch.empty_like(y), torch.empty_like(weights)
    if not _by_kernels(recipe, y):
        within = (rows < ends[-1])[..., None]
        shared, theirs = torch.where(within, grad[:, None], 0), torch.where(within, y[rows], 0)
        of_y[rows] = (shared * weights[..., None]).to(y.dtype)
        of_weights = (shared.float() * theirs.float()).sum(-1).to(weights.dtype)
        return [of_y, of_weights, *_quantized(recipe, of_y)]
    from layoutc.runtime.operands.kernels import of_experts_kernel

    quantizing, tile = _Quantizing(recipe, y.shape, y), 1 << (columns - 1).bit_length()
    sizes = tokens, columns, len(ends), chosen, quantizing.tile, tile, launch.hardware(y.device)
    args = grad, y, rows, weights, ends, of_y, of_weights, *quantizing.args, *sizes
    launched(of_experts_kernel, tokens, args, warps_of(tile))
    return [of_y, of_weights, *quantizing.planes]


# --------------------------------------------------------------------------------------------------- gated products
def gated(both: Tensor) -> Tensor:
    """(..., 2 * columns), gates first -> silu(gate) * up, (..., columns), in fp32 and rounded once; in traced graphs,
    and where kernels can't run, by torch's functions, which the compiler fuses."""
    if traced(both) or not launch.usable(both, both.dtype):
        return _by_torch(both)
    made: Tensor = _Gated.apply(both)  # type: ignore[no-untyped-call]
    return made


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        both = both.contiguous()
        ctx.save_for_backward(both)
        return _launch_gated(both, None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        return _launch_gated_backward(grad.contiguous(), both, None, None)[0]


def _by_torch(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def _gated_rows(both: Tensor, recipe: str) -> list[Tensor]:
    both = both.contiguous()
    return _launch_gated(both, recipe) if _by_kernels(recipe, both) else _quantized(recipe, _by_torch(both))


def _launch_gated(both: Tensor, recipe: str | None) -> list[Tensor]:
    """The product, or its codes and scales."""
    from layoutc.runtime.operands.kernels import gated_kernel
    from layoutc.runtime.triton.batch import DTYPES

    shape = *both.shape[:-1], both.shape[-1] // 2
    quantizing, out = _Quantizing(recipe, shape, both), both.new_empty(shape) if recipe is None else None
    _launch(gated_kernel, both, (both, out, *quantizing.args), (DTYPES[both.dtype], quantizing.tile))
    return quantizing.planes if out is None else [out]


def _gated_rows_backward(grad: Tensor, both: Tensor, recipe: str | None) -> list[Tensor]:
    grad, both = grad.contiguous(), both.contiguous()
    if _by_kernels(recipe, both):
        return _launch_gated_backward(grad, both, torch.empty_like(grad), recipe)
    gate, up = both.chunk(2, dim=-1)
    share = F.silu(gate)
    of_both = torch.cat((torch.ops.aten.silu_backward(grad * up, gate), grad * share), -1)
    return [of_both, share * up, *_quantized(recipe, of_both)]


def _launch_gated_backward(grad: Tensor, both: Tensor, out: Tensor | None, recipe: str | None) -> list[Tensor]:
    """The gradient of `both`, `out` if that is to get the product again, and codes and scales of the gradient."""
    from layoutc.runtime.operands.kernels import gated_backward_kernel

    quantizing, of_both = _Quantizing(recipe, both.shape, both), torch.empty_like(both)
    _launch(gated_backward_kernel, both, (grad, both, of_both, out, *quantizing.args), (quantizing.tile,))
    return [of_both, *([] if out is None else [out]), *quantizing.planes]


def _launch(kernel: Any, both: Tensor, args: Sequence[Any], constants: Sequence[Any]) -> None:
    columns = both.shape[-1] // 2
    rows, whole = both.numel() // (2 * columns), 1 << (columns - 1).bit_length()
    tile, warps = (min(GATED_TILE, whole), WARPS) if constants[-1] is None else (whole, warps_of(whole))
    fixed = *constants, tile, launch.hardware(both.device)
    launched(kernel, rows * cdiv(columns, tile), (*args, rows, columns, *fixed), warps)


# --------------------------------------------------------------------------------------------------------- operators
sum_of_experts = library.define(
    "sum_of_experts(Tensor y, Tensor rows, Tensor? weights, Tensor ends) -> Tensor",
    _sum_of_experts,
    lambda y, rows, weights, ends: y.new_empty((rows.shape[0], y.shape[1])),
)
"""(y (rows, columns), rows (tokens, chosen), weights (tokens, chosen) or None, ends) -> (tokens, columns): for each
token, the fp32 sum of its rows of y in the order of `rows`. Each row is first multiplied by its weight, with torch's
type promotion. Rows from ends[-1] on belong to no expert and are skipped, whatever they hold."""
of_experts = library.define(
    "of_experts(Tensor grad, Tensor y, Tensor rows, Tensor weights, Tensor ends, str? recipe=None) -> Tensor[]",
    _of_experts,
    lambda grad, y, rows, weights, ends, recipe=None: [
        *(torch.empty_like(y), torch.empty_like(weights)),
        *_planes(recipe, y.shape, y),
    ],
)
"""(grad (tokens, columns), y, rows, weights, ends) -> the gradients of y and of weights; 0 from row ends[-1] on. With a
recipe's key, also codes and scales of the gradient of y."""
gated_rows = library.define(
    "gated_rows(Tensor both, str recipe) -> Tensor[]",
    _gated_rows,
    lambda both, recipe: _planes(recipe, (both.shape[0], both.shape[1] // 2), both),
)
"""(both (rows, 2 * columns), a recipe's key) -> codes and scales of `gated`."""
gated_rows_backward = library.define(
    "gated_rows_backward(Tensor grad, Tensor both, str? recipe) -> Tensor[]",
    _gated_rows_backward,
    lambda grad, both, recipe: [
        *(torch.empty_like(both), torch.empty_like(grad)),
        *_planes(recipe, both.shape, both),
    ],
)
"""(gradient of the product, both, key or None) -> the gradient of both, the product, and, with a key, codes and scales
of the gradient of both."""


# ------------------------------------------------------------------------------------------------------------ routes
class Routes(NamedTuple):
    """Rows in expert order. order: (rows,), each row's flat index in (tokens, chosen); rows: (tokens, chosen), its
    inverse, the row of each; ends: (experts,) int32, where the rows of each expert end."""

    order: Tensor
    rows: Tensor
    ends: Tensor


def routes_of(chosen: Tensor, experts: int) -> Routes:
    """chosen: (tokens, experts per token), the experts of each token, from 0 to experts - 1."""
    by_expert, order = torch.sort(chosen.reshape(-1), stable=True)  # CPU sorts are not stable by default
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order), device=order.device)
    every = torch.arange(experts, device=order.device, dtype=by_expert.dtype)
    ends = torch.searchsorted(by_expert, every, right=True, out_int32=True)
    return Routes(order, rows.view_as(chosen), ends)


class ToExperts(torch.autograd.Function):
    """Copies each token to a row for each of its experts. The gradient is the fp32 sum of the token's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends)
        return x[order // rows.shape[1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends = ctx.saved_tensors
        return sum_of_experts(grad, rows, None, ends), None, None, None


class FromExperts(torch.autograd.Function):
    """The weighted sum of each token's rows. Differentiable once, in rows and weights."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, order: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(y, rows, weights, ends)
        made: Tensor = sum_of_experts(y, rows, weights, ends)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *of_experts(grad, *ctx.saved_tensors), None, None, None

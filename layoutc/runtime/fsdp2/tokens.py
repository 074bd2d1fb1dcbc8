"""Tokens that ranks send to each other's experts, and the gradients sent back, as codes of a recipe.

Codes and scales of tokens travel in an all-to-all each, with the splits of the tokens. The received values equal those
of quantizing after the exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from layoutc.ints.sizes import up
from layoutc.runtime import installed, library
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.kernels.rank_sums import SIDE, not_by_rows
from layoutc.runtime.torch_private import c10d_functional
from layoutc.runtime.weight import operators
from layoutc.runtime.weight.tensor import QuantizedTensor

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_all_to_all, _wait = c10d_functional.all_to_all_single.default, c10d_functional.wait_tensor.default
Splits = Sequence[int] | None


def exchange_tokens(
    x: Tensor,
    output_splits: Splits,
    input_splits: Splits,
    group: dist.ProcessGroup | DeviceMesh,
    *,
    recipe: installed.Recipe | None = None,
    gradients: installed.Recipe | None = None,
) -> Tensor:
    """Sends rows of tokens to the ranks of their experts, by all-to-all; collective. Gradients travel back.

    x: (tokens, columns), in fp32, bf16 or fp16, rows for rank 0 first. output_splits, input_splits: the rows received
    from and sent to each rank, as for torch's all_to_all_single; None: equal splits. group: a process group, or a mesh
    of one dim. Returns (received rows, columns), in x's dtype.

    recipe: the recipe that quantizes tokens on the wire, such as "fp8_rowwise" or "mxfp8". Tokens arrive dequantized,
    and their gradient ignores the rounding. gradients: the recipe that quantizes gradients on the way back. None:
    unquantized. Name `recipe` where tokens are dispatched, and `gradients` where the experts' outputs are combined.

    Raises ValueError for an unknown recipe, a shape that its blocks do not take, and splits that do not match x;
    LayoutError for a recipe whose scales or codes depend on more than one row. Splits that are wrong on one rank raise
    on that rank alone, and the others wait in the all-to-all, as torch's do: agreeing would cost a collective a call.

    Example:

        >>> ranks = torch.distributed.group.WORLD
        >>> layoutc.exchange_tokens(torch.randn(4, 64), None, None, ranks, recipe="fp8_rowwise").shape
        torch.Size([4, 64])
    """
    if x.dim() != 2 or x.dtype not in _FLOATS:
        raise ValueError(
            f"exchange_tokens takes x of shape (tokens, columns) in fp32, bf16 or fp16, not {tuple(x.shape)} in "
            f"{x.dtype}"
        )
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    world, (rows, columns) = group.size(), x.shape
    if input_splits is None and rows % world:
        raise ValueError(f"exchange_tokens: {rows} tokens do not divide evenly among {world} ranks: pass input_splits")
    sends, takes = (list(splits or [rows // world] * world) for splits in (input_splits, output_splits))
    if not torch.compiler.is_compiling() and (sum(sends) != rows or len(sends) != world or len(takes) != world):
        raise ValueError(
            f"exchange_tokens: input_splits {sends} must have {world} entries that add up to {rows} tokens, and "
            f"output_splits {takes} as many entries"
        )
    keys = [None if one is None else _key(one, columns) for one in (recipe, gradients)]
    made: Tensor = _Exchange.apply(x, takes, sends, group.group_name, *keys)  # type: ignore[no-untyped-call]
    return made


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, takes: list[int], sends: list[int], group: str, recipe: str | None, gradients: str | None
    ) -> Tensor:
        ctx.back = sends, takes, group, gradients
        made: Tensor = _exchange(x, takes, sends, group, recipe)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grad, *ctx.back), None, None, None, None, None


def _run(x: Tensor, takes: list[int], sends: list[int], group: str, recipe: str | None) -> Tensor:
    if recipe is None:
        values: Tensor = _wait(_all_to_all(x.contiguous(), takes, sends, group))
        return values
    cls: Any = operators.recipe_of(recipe)
    (rows, columns), count = x.shape, sum(takes)
    planes = operators.quantize(cls, _filled(x, cls), None, (SIDE,)) if rows else {}
    sizes = _bytes_of_row(cls, columns)
    sent = {
        name: planes[name].view(torch.uint8).view(-1, size)[:rows]
        if rows
        else x.new_empty((0, size), dtype=torch.uint8)
        for name, size in sizes.items()
    }
    under_way = {name: _all_to_all(one, takes, sends, group) for name, one in sent.items()}
    came = {name: _filled(_wait(one), cls) for name, one in under_way.items()}
    if not count:
        return x.new_empty((0, columns))
    filled = up(count, cls.LAYOUT.multiple_m)
    facts = cls.LAYOUT.planes(filled, columns)
    read = {name: one.view(facts[name].dtype).view(facts[name].shape) for name, one in came.items()}
    return operators.dequantize(cls, read, filled, columns, SIDE, x.dtype)[:count]


_exchange = library.define(
    "exchange_tokens(Tensor x, SymInt[] takes, SymInt[] sends, str group, str? recipe) -> Tensor",
    _run,
    lambda x, takes, sends, group, recipe: x.new_empty((sum(takes), x.shape[1])),
)


def _filled(rows: Tensor, recipe: Any) -> Tensor:
    """The rows, padded with zeros to a number that the recipe takes."""
    missing = -len(rows) % recipe.LAYOUT.multiple_m
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


@cache
def _bytes_of_row(recipe: Any, columns: int) -> dict[str, int]:
    """Bytes per row of each plane that travels."""
    rows = recipe.LAYOUT.multiple_m
    facts = recipe.LAYOUT.planes(rows, columns)
    return {name: facts[name].nbytes // rows for name in recipe.LAYOUT.sources[SIDE]}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _key(recipe: installed.Recipe, columns: int) -> str:
    """The key of a recipe that takes rows of `columns`. Raises LayoutError for one that can't hold tokens."""
    module: Any = installed.find(recipe)
    if reason := not_by_rows(module.LAYOUT):
        layouts: list[Any] = [one.LAYOUT for one in installed.every()]
        fit = ", ".join(one.name for one in layouts if not one.not_weights and not not_by_rows(one))
        raise LayoutError(
            f"exchange_tokens: {module.LAYOUT.name} can't hold tokens that travel: {reason}. Recipes that can: {fit}"
        )
    cls: type[QuantizedTensor] = module.Tensor
    cls.LAYOUT.check_shape((cls.LAYOUT.multiple_m, columns), "x")
    return cls.KEY

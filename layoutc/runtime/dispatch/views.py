"""Views: the rows and columns of the (m, k) matrix for an operator's outer dims, starts and stops; views without any.

Views that codes can't follow, such as permuted dims, are refused, except when a model uses them in training: writes to
a copy would be lost. While autograd records, torch refuses writes to views of a weight that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layoutc.ints.cuts import NO_HALO, Halo
from layoutc.ints.rects import Rect
from layoutc.ints.sizes import up
from layoutc.runtime import callers, strict
from layoutc.runtime.errors import UnsupportedOperator
from layoutc.runtime.weight.tensor import QuantizedTensor

PLAIN = "for a plain copy, call .dequantize() first"


class Selection(NamedTuple):
    """A piece of a tensor: a rectangle of its matrix, in whole blocks of rows; its outer shape and halo."""

    rect: Rect
    shape: tuple[int, ...]
    halo: Halo = NO_HALO


def selection(tensor: QuantizedTensor, dim: int, start: int, stop: int, operator: Any) -> Selection:
    """The piece of entries start..stop of an outer dim.

    A cut between rows may fall inside a block: the rest of the block becomes the piece's halo. Raises
    UnsupportedOperator if a cut between columns falls inside a block, or the entries are not whole rows or columns.
    """
    (m, k), layout, shape = tensor.store.matrix, tensor.LAYOUT, tuple(tensor.shape)
    piece = (*shape[:dim], stop - start, *shape[dim + 1 :])
    if start == stop:
        return Selection(Rect(0, 0, 0, k), piece)
    if dim == len(shape) - 1 and len(shape) > 1 and shape[-1] == k:
        if start % layout.column_multiple or (stop % layout.column_multiple and stop != k):
            instead = "shard dim 0, or use another number of ranks" if callers.makes_shards() else PLAIN
            raise UnsupportedOperator(
                f"{operator}: columns {start} to {stop} of {tensor.label()} would cut a block: {layout.name} is exact "
                f"at multiples of {layout.column_multiple} columns; {instead}"
            )
        return Selection(Rect(0, m, start, stop), piece, tensor.store.halo)
    if any(size != 1 for size in shape[:dim]):
        raise UnsupportedOperator(
            f"{operator}: entries {start} to {stop} of dim {dim} of {tensor.label()} are not adjacent rows; {PLAIN}"
        )
    first, last = (entry * prod(shape[dim + 1 :]) for entry in (start, stop))
    if first % k or last % k:
        raise UnsupportedOperator(
            f"{operator}: entries {start} to {stop} of dim {dim} of {tensor.label()} are not whole rows; {PLAIN}"
        )
    block, around = layout.block_rows, tensor.store.halo  # all blocks that the rows touch
    ends = first == 0, last // k == tensor.store.rows
    first, last = around.before + first // k, around.before + last // k
    r0, r1 = first // block * block, min(up(last, block), m)
    halo = Halo(
        first - r0,
        r1 - last,
        first > r0 and (not ends[0] or around.tied_before),
        r1 > last and (not ends[1] or around.tied_after),
    )
    return Selection(Rect(r0, r1, 0, k), piece, halo)


def dim_of(dim: int, rank: int) -> int:
    """A dim as a number from 0. Raises IndexError as torch does."""
    rank = max(rank, 1)
    if not -rank <= dim < rank:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {dim})")
    return dim % rank


def bounds(size: int, start: int | None, stop: int | None) -> tuple[int, int]:
    """start and stop of a slice, clamped as Python does."""
    first, last, _ = slice(start, stop).indices(size)
    return first, max(first, last)


def matrix_for(tensor: QuantizedTensor, size: Sequence[int]) -> tuple[int, int] | None:
    """(m, k) of the planes of a new tensor of `size` in the same recipe; None if the recipe can't hold that size.

    With the tensor's number of columns, any number of rows is possible, as for shards: planes are rounded up. A 1-D
    size means a flattened weight with the tensor's columns, if the tensor is flat or the size is 0.
    """
    layout, k = tensor.LAYOUT, tensor.store.matrix[1]
    if len(size) == 0 or (len(size) == 1 and size[0] and (tensor.dim() != 1 or k == 0 or size[0] % k)):
        return None
    m, columns = (size[0] // max(k, 1), k) if len(size) == 1 else (prod(size[:-1]), size[-1])
    fits = columns == k or m % layout.multiple_m == 0
    return (up(m, layout.multiple_m), columns) if fits and columns % layout.multiple_k == 0 and columns > 0 else None


Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class InexactView(UnsupportedOperator):
    """A view that codes can't follow, and why."""

    def __init__(self, func: Any, tensor: QuantizedTensor, why: str) -> None:
        super().__init__(f"{func}: {tensor.label()} {why}; for a copy of the values, call .dequantize() first")


def or_values(handler: Handler) -> Handler:
    """A handler of views that returns a view of the values, instead of raising InexactView, while autograd records."""

    def handled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return handler(func, args, kwargs)
        except InexactView:
            if not (torch.is_grad_enabled() and args[0].requires_grad):
                raise
            return of_values(func, args, kwargs)

    handled.__doc__ = handler.__doc__
    return handled


def of_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | list[Tensor]:
    """The view of the weight's values. Raises ImplicitDequantize under strict()."""
    strict.count_dequantize(str(func), args[0].label())
    return func(args[0].dequantize(), *args[1:], **kwargs)  # type: ignore[no-any-return]

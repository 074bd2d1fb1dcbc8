"""Views that codes can't follow, as of dims in another order: they are refused, but for uses in a model that trains.

Writes to a copy in place of a view would be lost. To a view of a weight that trains, torch itself refuses them where
autograd records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layoutc.runtime import strict
from layoutc.runtime.errors import UnsupportedOperator
from layoutc.runtime.weight.tensor import QuantizedTensor

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class InexactView(UnsupportedOperator):
    """A view that is none of codes, and why."""

    def __init__(self, func: Any, tensor: QuantizedTensor, why: str) -> None:
        super().__init__(f"{func}: {tensor.label()} {why}; for a copy of the values, call .dequantize() first")


def or_values(handler: Handler) -> Handler:
    """A handler of views that gives, where autograd records, the view of the values in place of an InexactView."""

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

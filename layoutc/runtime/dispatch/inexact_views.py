"""Views that codes can't follow, such as permuted dims: refused, except when a model uses them in training.

Writes to a copy would be lost. While autograd records, torch refuses writes to views of a weight that trains.
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

"""Counts operators that dequantize weights implicitly, and rejects them under `strict()`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from layoutc.runtime.errors import ImplicitDequantize

_strict: ContextVar[bool] = ContextVar("layoutc_strict", default=False)
_counts: Counter[str] = Counter()


@contextmanager
def strict(enabled: bool = True) -> Iterator[None]:
    """Makes operators that implicitly dequantize a weight raise ImplicitDequantize; enabled=False allows them.

    Products (linear, matmul and the like), `dequantize()` and copies into plain tensors are explicit.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> layoutc.quantize_(model, "nvfp4")
        ['0.weight']
        >>> with layoutc.strict():
        ...     model[0].weight.sum()
        Traceback (most recent call last):
            ...
        layoutc.runtime.errors.ImplicitDequantize: ...
    """
    token = _strict.set(enabled)
    try:
        yield
    finally:
        _strict.reset(token)


def implicit_dequantizes() -> Counter[str]:
    """Counts implicit dequantizes in this process, by operator name; returns a copy of the counts.

    Raises nothing.

    Example:

        >>> weight = layoutc.recipes.nvfp4.quantize(torch.ones(128, 128))
        >>> total = weight.sum()
        >>> layoutc.implicit_dequantizes()["aten.sum.default"] > 0
        True
    """
    return Counter(_counts)


def count_dequantize(operator: str, label: str) -> None:
    """Counts one implicit dequantize. Raises ImplicitDequantize under strict()."""
    if _strict.get():
        raise ImplicitDequantize(
            f"{operator} is not exact on stored bytes and would dequantize {label}; "
            "call .dequantize() first if that is intended, or leave layoutc.strict()"
        )
    _counts[operator] += 1

"""Implicit dequantizes, by operators that were not asked to: always counted, and refused under `strict()`."""

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
    """Inside, an operator that would implicitly dequantize a weight raises ImplicitDequantize instead.

    Products (linear, matmul and the like), `dequantize()` and copies into plain tensors are not implicit.
    """
    token = _strict.set(enabled)
    try:
        yield
    finally:
        _strict.reset(token)


def implicit_dequantizes() -> Counter[str]:
    """How often each operator has implicitly dequantized in this process, by operator name. A copy."""
    return Counter(_counts)


def note(operator: str, label: str) -> None:
    """Counts one implicit dequantize. Raises ImplicitDequantize under strict()."""
    if _strict.get():
        raise ImplicitDequantize(
            f"{operator} is not exact on stored bytes and would dequantize {label}; "
            "call .dequantize() first if that is intended, or leave layoutc.strict()"
        )
    _counts[operator] += 1

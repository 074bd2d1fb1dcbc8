"""Which products the user wants: in low precision where a card has a kernel, everywhere, or nowhere."""

from __future__ import annotations

from types import TracebackType
from typing import Literal

from layoutc.runtime.facts import Layout

Mode = Literal["auto", "low", "dequantize"]
_MODES = ("auto", "low", "dequantize")
_mode: Mode = "dequantize"


def current() -> Mode:
    """The mode that products follow now."""
    return _mode


def of(layout: Layout) -> Mode:
    """The mode that products of a recipe follow now: a recipe without any is always dequantized."""
    return "dequantize" if layout.products is None else _mode


class products:
    """Sets how quantized weights are multiplied; as a context manager, until its end.

    auto: in low precision, if the recipe names one for activations and the card has a kernel; else as dequantize.
    low: in low precision also without a kernel: both operands are quantized, and their values multiplied in fp32. Slow;
    it is how numbers of a card that is not at hand are seen.
    dequantize: the weight's values, in the activations' dtype.

    Put it around whole steps: activation checkpointing runs forward again in backward, and must find the same mode.
    Raises ValueError for another mode.
    """

    def __init__(self, mode: Mode) -> None:
        global _mode
        if mode not in _MODES:
            raise ValueError(f"products are {', '.join(_MODES)}, not {mode!r}")
        self._before = _mode
        _mode = mode

    def __enter__(self) -> None:
        """The mode is set already."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Sets what was set before."""
        global _mode
        _mode = self._before

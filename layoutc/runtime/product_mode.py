"""Which products the user wants: in low precision where a card has a kernel, everywhere, or nowhere; set for all
weights, or for some. And what they keep of activations for backward."""

from __future__ import annotations

from functools import cache
from types import TracebackType
from typing import ClassVar, Literal, Protocol

from layoutc.runtime.facts import Layout

Mode = Literal["auto", "low", "dequantize", "dequantize_on_gather"]
_MODES = ("auto", "low", "dequantize", "dequantize_on_gather")
ON_GATHER: Mode = "dequantize_on_gather"
_mode: Mode = ON_GATHER

Saves = Literal["quantized", "input"]
_SAVES = ("quantized", "input")
_saves: Saves | None = None


def current() -> Mode:
    """The mode that products follow now."""
    return _mode


def saves(in_graph: bool) -> Saves:
    """What products in low precision keep of an activation, for the gradient of the weight. in_graph: of a trace."""
    return _saves or ("input" if in_graph else "quantized")


class Weight(Protocol):
    """A weight that products ask for its mode: a quantized one, or one that is cast on gather."""

    LAYOUT: ClassVar[Layout]
    _products: Mode | None  # its own choice, as `layoutc.set_products_` sets it; None: what is set for all


def of(weight: Weight) -> Mode:
    """The mode that products of a weight follow now: its own, else what is set for all.

    "dequantize" in place of "dequantize_on_gather", wherever codes are multiplied after all: where gathers leave codes,
    or nothing gathers them. A weight of a recipe without products is always dequantized.
    """
    if weight.LAYOUT.products is None:
        return "dequantize"
    mode = weight._products or _mode
    return "dequantize" if mode == ON_GATHER else mode


def read_as(weight: Weight, orientation: str) -> str:
    """The orientation whose values are multiplied, where those of one are asked for: the first one of recipes that
    don't have it; and of weights that are dequantized on gather, whose gathers leave the same values in both passes."""
    sources = weight.LAYOUT.sources
    return orientation if orientation in sources and weight._products != ON_GATHER else next(iter(sources))


def setting(weight: Weight) -> str:
    """All that products of a weight follow now: a graph that is traced under one must not run under another."""
    return _setting(ON_GATHER if weight._products == ON_GATHER else of(weight), _saves)


@cache
def _setting(mode: str, saves: Saves | None) -> str:
    return f"{mode}, saves {saves}"


def check(mode: str) -> None:
    """Raises ValueError for anything but a mode."""
    if mode not in _MODES:
        raise ValueError(f"products are {', '.join(_MODES)}, not {mode!r}")


class products:
    """Sets how quantized weights are multiplied; as a context manager, until its end.

    auto: in low precision, if the recipe names one for activations and the card has a kernel; else as dequantize.
    low: in low precision also without a kernel: both operands are quantized, and their values multiplied in fp32. Slow;
    it is how numbers of a card that is not at hand are seen.
    dequantize: the weight's values, in the activations' dtype, which each layer makes of codes.
    dequantize_on_gather: the default. The same, but FSDP2's gathers leave values, in place of codes, of groups in which
    that takes no more than a plain model does and gives the same: whose weights are all freed after forward, have
    values of 16 bits, and gather the same codes, whole blocks of each rank, in both passes. All others are dequantized
    by layers. `layoutc.set_products_` chooses it for weights of any other group.

    A weight that `layoutc.set_products_` has given a mode of its own keeps that one.

    saves: what is kept of an activation, from forward until the gradient of the weight is computed. "quantized": its
    codes, half of the memory of bf16 or less. "input": the activation itself, which backward quantizes again, to the
    same bytes; no more memory where something else keeps it too, or where the compiler computes it again. Default: the
    input in compiled graphs, since the compiler does; quantized in eager mode.

    Put it around whole steps: activation checkpointing runs forward again in backward, and must find the same mode.
    Raises ValueError for another mode, or another thing to keep.
    """

    def __init__(self, mode: Mode, *, saves: Saves | None = None) -> None:
        global _mode, _saves
        check(mode)
        if saves not in (None, *_SAVES):
            raise ValueError(f"products save what is {' or '.join(_SAVES)}, not {saves!r}")
        self._before = _mode, _saves
        _mode, _saves = mode, saves

    def __enter__(self) -> None:
        """The mode is set already."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Sets what was set before."""
        global _mode, _saves
        _mode, _saves = self._before

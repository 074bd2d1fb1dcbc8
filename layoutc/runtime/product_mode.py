"""How weights are multiplied: in low precision or dequantized; where they are dequantized: by gathers or by layers; and
what products keep of activations for backward. Set for all weights, or for some."""

from __future__ import annotations

from functools import cache
from typing import ClassVar, Literal, NamedTuple, Protocol, get_args

from layoutc.runtime.facts import Layout

Mode = Literal["low_precision", "dequantize", "reference"]  # reference: low precision without kernels, for tests
Where = Literal["gather", "layer"]
Saves = Literal["quantized", "input"]
_PUBLIC = ("low_precision", "dequantize")


class Settings(NamedTuple):
    """How weights are multiplied, and where they are dequantized. A weight's own may leave out either: None."""

    products: Mode | None = None
    dequantize: Where | None = None

    def __str__(self) -> str:
        """What sets it for all weights, after `with`."""
        calls = [f'layoutc.products("{self.products}")'] if self.products is not None else []
        if self.dequantize is not None and self.products in (None, "dequantize"):
            calls.append(f'layoutc.dequantize("{self.dequantize}")')
        return ", ".join(calls)


_all = Settings("dequantize", "gather")
_saves: Saves | None = None


def current() -> Settings:
    """What is set for all weights now."""
    return _all


def saves(in_graph: bool) -> Saves:
    """What products in low precision keep of an activation, for the gradient of the weight. in_graph: of a trace."""
    return _saves or ("input" if in_graph else "quantized")


class Weight(Protocol):
    """A weight that products ask for its mode: a quantized one, or one that is cast on gather."""

    LAYOUT: ClassVar[Layout]
    own_products: Settings | None  # its own, as `layoutc.set_products_` sets them; None: what is set for all


def of(weight: Weight) -> Mode:
    """The mode that products of a weight follow now: its own, else what is set for all. A weight of a recipe without
    products is always dequantized."""
    return "dequantize" if weight.LAYOUT.products is None else _mode(weight.own_products)


def _mode(own: Settings | None) -> Mode:
    mode = own.products if own is not None and own.products is not None else _all.products
    assert mode is not None
    return mode


def in_effect(own: Settings | None) -> Settings:
    """What a weight follows: its own settings, and what is set for all where it has none."""
    where = own.dequantize if own is not None and own.dequantize is not None else _all.dequantize
    return Settings(mode := _mode(own), where if mode == "dequantize" else None)


def gathers_values(own: Settings | None) -> bool | None:
    """Whether gathers leave values of a weight, not codes, by its own settings. None: where that costs nothing."""
    if in_effect(own) != ("dequantize", "gather"):
        return False
    return True if own is not None and own.dequantize == "gather" else None


def read_as(weight: Weight, orientation: str) -> str:
    """The orientation whose values are multiplied, where those of one are asked for: the first one of recipes that
    don't have it; and of weights that are dequantized on gather, whose gathers leave the same values in both passes."""
    sources = weight.LAYOUT.sources
    return orientation if orientation in sources and not _always_gathers_values(weight) else next(iter(sources))


def _always_gathers_values(weight: Weight) -> bool:
    return weight.own_products is not None and gathers_values(weight.own_products) is True


def setting(weight: Weight) -> str:
    """All that products of a weight follow now: a graph that is traced under one must not run under another."""
    return _setting(of(weight), _always_gathers_values(weight), _saves)


@cache
def _setting(mode: str, on_gather: bool, saves: Saves | None) -> str:
    return f"{mode}{' on gather' if on_gather else ''}, saves {saves}"


def checked(mode: Mode | None, where: Where | None = None) -> Settings:
    """Settings as a user writes them. Raises ValueError for anything else."""
    if mode not in (None, *_PUBLIC):
        raise ValueError(f"products take {' or '.join(_PUBLIC)}, not {mode!r}")
    if where not in (None, *get_args(Where)):
        raise ValueError(f"dequantize takes {' or '.join(get_args(Where))}, not {where!r}")
    return Settings(mode, where)


class _Set:
    """Changes what is set for all weights; as a context manager, until its end."""

    def __init__(self, changed: Settings) -> None:
        global _all
        before = _all
        self._before = Settings(
            None if changed.products is None else before.products,
            None if changed.dequantize is None else before.dequantize,
        )
        _all = _over(before, changed)

    def __enter__(self) -> None:
        """It is set already."""

    def __exit__(self, *error: object) -> None:
        """Sets what was set before."""
        global _all
        _all = _over(_all, self._before)


def _over(settings: Settings, changed: Settings) -> Settings:
    return Settings(changed.products or settings.products, changed.dequantize or settings.dequantize)


class products(_Set):
    """Sets how quantized weights are multiplied; as a context manager, until its end.

    mode: "low_precision" multiplies codes, if the recipe names one for activations and the card has a kernel, else as
    "dequantize". "dequantize", the default, multiplies the weight's values in the activations' dtype.
    `layoutc.dequantize` says where they are dequantized. `layoutc.set_products_` overrides both for single weights.

    saves: what forward keeps of an activation for the weight's gradient. "quantized": its codes, at most half of bf16's
    memory. "input": the activation itself, which backward quantizes again to the same bytes. That costs no memory where
    something else keeps it too, or where the compiler recomputes it. Default: "input" in compiled graphs, where the
    compiler recomputes; "quantized" in eager mode.

    Enter it around whole steps: activation checkpointing runs forward again in backward, and must find the same mode.
    Raises ValueError for an unknown `mode` or `saves`.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> layoutc.quantize_(model, "fp8_current")
        ['0.weight']
        >>> with layoutc.products("low_precision"):
        ...     model(torch.randn(16, 128)).sum().backward()
    """

    def __init__(self, mode: Mode, *, saves: Saves | None = None) -> None:
        global _saves
        if mode is None:
            raise ValueError(f"products take {' or '.join(_PUBLIC)}, not None")
        if saves not in (None, *get_args(Saves)):
            raise ValueError(f"saves must be {' or '.join(map(repr, get_args(Saves)))}, not {saves!r}")
        super().__init__(checked(mode))
        self._saved, _saves = _saves, saves

    def __exit__(self, *error: object) -> None:
        """Sets what was set before."""
        global _saves
        super().__exit__(*error)
        _saves = self._saved


class dequantize(_Set):
    """Sets where weights are dequantized, for products not in low precision; as a context manager, until its end.

    where: "gather", the default: FSDP2's gathers yield values, not codes, for groups in which that takes no more memory
    than a plain model and gives the same bytes. Such a group frees all its weights after forward, has values of 16
    bits, and gathers the same codes in both passes, in whole blocks of each rank. Layers dequantize all other weights.
    "layer": gathers yield codes, and each layer dequantizes its own.

    `layoutc.set_products_` overrides it for single weights, and can choose "gather" for weights of any group. Enter it
    around whole steps. Raises ValueError for any other `where`.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> layoutc.quantize_(model, "nvfp4")
        ['0.weight']
        >>> with layoutc.dequantize("layer"):
        ...     model(torch.randn(4, 128)).sum().backward()
    """

    def __init__(self, where: Where) -> None:
        if where is None:
            raise ValueError(f"dequantize takes {' or '.join(get_args(Where))}, not None")
        super().__init__(checked(None, where))


class reference_products(products):
    """As `products("low_precision")`, also where a card has no kernel: both operands are quantized, and their values
    multiplied in fp32. Slow; what kernels are compared with, by `layoutc test` and by tests."""

    def __init__(self, *, saves: Saves | None = None) -> None:
        super().__init__("low_precision", saves=saves)
        global _all
        _all = Settings("reference", _all.dequantize)

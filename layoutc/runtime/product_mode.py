"""The product mode: whether weights multiply in low precision or dequantized; where they are dequantized, on gather or
in the layer; and what products save of activations for backward. Set for all weights, or for some."""

from __future__ import annotations

from functools import cache
from typing import ClassVar, Literal, NamedTuple, Protocol, get_args

from layoutc.runtime.facts import Layout

Mode = Literal["low_precision", "dequantize", "reference"]  # reference: low precision without kernels, for tests
Where = Literal["gather", "layer"]
Saves = Literal["quantized", "input"]
_PUBLIC = ("low_precision", "dequantize")


class Settings(NamedTuple):
    """How weights are multiplied, and where they are dequantized. In a per-weight override, either may be None."""

    products: Mode | None = None
    dequantize: Where | None = None

    def __str__(self) -> str:
        """The calls that set this for all weights, to write after `with`."""
        calls = [f'layoutc.products("{self.products}")'] if self.products is not None else []
        if self.dequantize is not None and self.products in (None, "dequantize"):
            calls.append(f'layoutc.dequantize("{self.dequantize}")')
        return ", ".join(calls)


_all = Settings("dequantize", "gather")
_saves: Saves | None = None


def current() -> Settings:
    """The current setting for all weights."""
    return _all


def saves(in_graph: bool) -> Saves:
    """What low-precision products save of an activation for the weight's gradient. in_graph: in a traced graph."""
    return _saves or ("input" if in_graph else "quantized")


class Weight(Protocol):
    """A weight with a product mode: quantized or cast on gather."""

    LAYOUT: ClassVar[Layout]
    own_products: Settings | None  # its override by `layoutc.set_products_`; None: the setting for all weights


def of(weight: Weight) -> Mode:
    """The current mode of a weight's products: its override, else the setting for all weights. Weights of a recipe
    without products are always dequantized."""
    return "dequantize" if weight.LAYOUT.products is None else _mode(weight.own_products)


def _mode(own: Settings | None) -> Mode:
    mode = own.products if own is not None and own.products is not None else _all.products
    assert mode is not None
    return mode


def in_effect(own: Settings | None) -> Settings:
    """A weight's effective settings: its override, and the setting for all weights where that is None."""
    where = own.dequantize if own is not None and own.dequantize is not None else _all.dequantize
    return Settings(mode := _mode(own), where if mode == "dequantize" else None)


def gathers_values(own: Settings | None) -> bool | None:
    """Whether gathers yield a weight's values instead of codes, by its own settings. None: if that costs nothing."""
    if in_effect(own) != ("dequantize", "gather"):
        return False
    return True if own is not None and own.dequantize == "gather" else None


def read_as(weight: Weight, orientation: str) -> str:
    """The orientation to dequantize for a product that needs `orientation`. It is the recipe's first one if the recipe
    lacks `orientation`, or if an override dequantizes the weight on gather, where both passes get the same values."""
    sources = weight.LAYOUT.sources
    return orientation if orientation in sources and not _always_gathers_values(weight) else next(iter(sources))


def _always_gathers_values(weight: Weight) -> bool:
    return weight.own_products is not None and gathers_values(weight.own_products) is True


def setting(weight: Weight) -> str:
    """A key of all settings that a weight's products depend on: a graph traced under one must not run under another."""
    return _setting(of(weight), _always_gathers_values(weight), _saves)


@cache
def _setting(mode: str, on_gather: bool, saves: Saves | None) -> str:
    return f"{mode}{' on gather' if on_gather else ''}, saves {saves}"


def checked(mode: Mode | None, where: Where | None = None) -> Settings:
    """Settings from a user's arguments. Raises ValueError for invalid ones."""
    if mode not in (None, *_PUBLIC):
        raise ValueError(f"products take {' or '.join(_PUBLIC)}, not {mode!r}")
    if where not in (None, *get_args(Where)):
        raise ValueError(f"dequantize takes {' or '.join(get_args(Where))}, not {where!r}")
    return Settings(mode, where)


class _Set:
    """Changes the setting for all weights; as a context manager, until its end."""

    def __init__(self, changed: Settings) -> None:
        global _all
        before = _all
        self._before = Settings(
            None if changed.products is None else before.products,
            None if changed.dequantize is None else before.dequantize,
        )
        _all = _over(before, changed)

    def __enter__(self) -> None:
        """Does nothing: the constructor has set it."""

    def __exit__(self, *error: object) -> None:
        """Restores the previous setting."""
        global _all
        _all = _over(_all, self._before)


def _over(settings: Settings, changed: Settings) -> Settings:
    return Settings(changed.products or settings.products, changed.dequantize or settings.dequantize)


class products(_Set):
    """Sets how quantized weights are multiplied; as a context manager, until its end.

    mode: "low_precision" multiplies codes if the spec names a recipe for activations and the card has a kernel, else it
    acts like "dequantize". "dequantize", the default, multiplies the weight's values in the activations' dtype.
    `layoutc.dequantize` sets where they are dequantized. `layoutc.set_products_` overrides both for single weights.

    saves: what forward saves of an activation for the weight's gradient. "quantized": its codes, at most half of bf16's
    memory. "input": the activation itself, which backward quantizes again to the same bytes. That costs no memory if
    something else saves it too, or if the compiler recomputes it. Default: "input" in compiled graphs, where the
    compiler recomputes; "quantized" in eager mode.

    Enter it around whole steps: activation checkpointing reruns forward in backward, and must find the same mode.
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
        """Restores the previous setting."""
        global _saves
        super().__exit__(*error)
        _saves = self._saved


class dequantize(_Set):
    """Sets where weights are dequantized, for products not in low precision; as a context manager, until its end.

    where: "gather", the default: FSDP2's gathers yield values, not codes, for groups where that needs no more memory
    than a plain model and gives the same bytes. These groups free all their weights after forward, have 16-bit values,
    and gather the same codes in both passes, with whole blocks per rank. Layers dequantize all other weights.
    "layer": gathers yield codes, and each layer dequantizes its own weights.

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
    """`products("low_precision")` without kernels, on any card: quantizes both operands and multiplies their values in
    fp32. Slow; `layoutc test` and tests compare kernels with it."""

    def __init__(self, *, saves: Saves | None = None) -> None:
        super().__init__("low_precision", saves=saves)
        global _all
        _all = Settings("reference", _all.dequantize)

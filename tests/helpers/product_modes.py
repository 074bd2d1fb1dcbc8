"""How products run in tests, which tests vary by a name: both settings at once, and without kernels as well."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal

from torch import nn

import layoutc
from layoutc.runtime.product_mode import Saves, Settings, reference_products
from layoutc.runtime.products import per_weight_mode

# Low precision where there is a kernel, and everywhere; dequantized by layers, and by gathers.
ProductMode = Literal["low_precision", "reference", "dequantize", "gather"]
OWN = {
    "low_precision": Settings("low_precision"),
    "reference": Settings("reference"),
    "dequantize": Settings("dequantize", "layer"),
    "gather": Settings("dequantize", "gather"),
}


def products(mode: Any, *, saves: Saves | None = None) -> AbstractContextManager[Any]:
    """Sets a mode of all weights; as a context manager, until its end."""
    if mode == "reference":
        return reference_products(saves=saves)
    made = ExitStack()
    made.enter_context(layoutc.products(OWN[mode].products, saves=saves))
    if (where := OWN[mode].dequantize) is not None:
        made.enter_context(layoutc.dequantize(where))
    return made


def set_products_(model: nn.Module, mode: Any, *, filter_fn: Any = None) -> list[str]:
    """Sets a mode of some weights; None: that of all."""
    own = Settings() if mode is None else OWN[mode]
    if mode != "reference":
        return layoutc.set_products_(model, own.products, dequantize=own.dequantize, filter_fn=filter_fn)
    checked = per_weight_mode.checked
    per_weight_mode.checked = lambda *_: own  # users can't name it
    try:
        return layoutc.set_products_(model, filter_fn=filter_fn)
    finally:
        per_weight_mode.checked = checked


def named(own: Settings | None) -> Any:
    """The name of a weight's own settings; None of none."""
    return None if own is None else next(name for name, one in OWN.items() if one == own)

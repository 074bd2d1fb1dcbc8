"""Tells which parameters are expert weights stored as (experts, k, n), the order that `x @ w` reads."""

from __future__ import annotations

from torch import nn

_PAIR = ("gate_up_proj", "down_proj")


def is_stored_by_columns(module: nn.Module, key: str) -> bool:
    """True for a module's parameter that is known to be (experts, k, n), not (experts, n, k).

    Modules of transformers state it in `is_transposed`; the shapes of a gate_up_proj and down_proj pair also show it.
    For other parameters it is unknown until they are multiplied.
    """
    param = getattr(module, key, None)
    if not isinstance(param, nn.Parameter) or param.dim() != 3:
        return False
    said = getattr(module, "is_transposed", None)
    if isinstance(said, bool):
        return said
    up, down = (getattr(module, name, None) for name in _PAIR)
    if key not in _PAIR or not isinstance(up, nn.Parameter) or not isinstance(down, nn.Parameter):
        return False
    if up.dim() != 3 or down.dim() != 3:
        return False
    (_, a, b), (_, c, d) = up.shape, down.shape
    by_rows = (a, b) == (2 * d, c)
    return not by_rows and (b, a) == (2 * c, d)

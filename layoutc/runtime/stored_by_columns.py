"""Experts that are stored as (experts, k, n), as `x @ w` reads them: which parameters are known to be."""

from __future__ import annotations

from torch import nn

_PAIR = ("gate_up_proj", "down_proj")


def is_stored_by_columns(module: nn.Module, key: str) -> bool:
    """True for a parameter of a module that is known to be (experts, k, n), and not (experts, n, k).

    The modules of transformers say so themselves, in `is_transposed`; and the shapes of a pair of gate_up_proj and
    down_proj do. Nobody knows it of other parameters, until they are multiplied.
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

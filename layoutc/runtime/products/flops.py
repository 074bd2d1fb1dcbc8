"""Makes torch's FlopCounterMode count products in low precision: the same operations as for plain weights.

A counter copies torch's formulas when it is constructed, and their module imports triton. So the formulas are not
registered there: an active counter gets them just before its first product.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from layoutc.runtime.torch_private import dispatch_mode_stack


def tell_counters() -> None:
    """Registers formulas for layoutc's products with all active counters; a counter's custom_mapping comes first."""
    module: Any = sys.modules.get("torch.utils.flop_counter")
    for mode in () if module is None else dispatch_mode_stack():
        counter: Any = getattr(mode, "counter", None)
        if isinstance(counter, module.FlopCounterMode):
            for operator, formula in _formulas().items():
                counter.flop_registry.setdefault(operator, formula)


def _linear(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    """x (..., k) by (m, k)."""
    return 2 * x.numel() * weight.shape[0]


def _grouped(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    """x (..., k), each row by one matrix of (experts, k, n)."""
    return 2 * x.numel() * weight.shape[2]


def _backward(grad: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    """Counts one product per requested gradient. The arguments end with needs_input, keeps."""
    *_, needs_input, keeps = args
    products = int(needs_input) + int(keeps != "nothing")
    return 2 * grad.numel() * weight.shape[1] * products


def _formulas() -> Mapping[Any, Any]:
    ops = torch.ops.layoutc
    return {ops.linear: _linear, ops.linear_backward: _backward, ops.grouped: _grouped, ops.grouped_backward: _backward}

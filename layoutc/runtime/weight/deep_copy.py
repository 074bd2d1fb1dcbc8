"""copy.deepcopy of wrapper tensors: what quantized and cast-on-gather weights share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def deep_copied(tensor: Tensor, memo: dict[int, Any], make: Callable[[], Any]) -> Any:
    """What `tensor.__deepcopy__(memo)` returns. make: a copy of the tensor with its own memory, under no_grad.

    A parameter's copy is a parameter. Its gradient and the attributes that users have set on it are deep-copied too.
    """
    if id(tensor) in memo:
        return memo[id(tensor)]
    with torch.no_grad():
        other = make()
    other = nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other
    other.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = other
    for name, value in tensor.__dict__.items():
        if name not in other.__dict__:
            setattr(other, name, copy.deepcopy(value, memo))
    if tensor.grad is not None:
        other.grad = copy.deepcopy(tensor.grad, memo)
    return other

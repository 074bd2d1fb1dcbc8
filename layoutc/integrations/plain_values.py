"""Dequantized, unsharded state dicts, for trainers that write their own files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from layoutc.runtime.weight.tensor import QuantizedTensor


@torch.no_grad()
def plain(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Dequantizes and unshards all entries. Collective if there are shards: every rank calls it and gets all values."""
    return {name: _plain(value) for name, value in state_dict.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, QuantizedTensor):
        return value.dequantize()
    return value.detach() if isinstance(value, Tensor) else value

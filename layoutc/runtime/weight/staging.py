"""Staging: the CPU copies that torch.distributed.checkpoint allocates by zeros_like.

Optimizers allocate their state by the same operator, and want plain tensors. So the answer depends on the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from layoutc.runtime import callers

if TYPE_CHECKING:
    from layoutc.runtime.weight.tensor import QuantizedTensor

_STAGERS = "torch.distributed._state_dict_utils"  # where BlockingAsyncStager and others allocate their copies
_CHECKPOINTS = "torch.distributed.checkpoint"


def room_for(tensor: QuantizedTensor, device: torch.device | str) -> QuantizedTensor | None:
    """A tensor of the same class, shape and cut with zero bytes on `device`, if a stager asks; None for anyone else.

    A plain tensor would be filled with dequantized values, and the checkpoint would silently be dense.
    """
    if not callers.is_near(_STAGERS):
        return None
    planes = {name: torch.zeros(p.shape, dtype=p.dtype, device=device) for name, p in tensor._planes.items()}
    return tensor._with_planes(planes)


def copies_state() -> bool:
    """True while torch's own code copies a tensor for a checkpoint or a state dict."""
    return callers.is_near(_STAGERS, _CHECKPOINTS)

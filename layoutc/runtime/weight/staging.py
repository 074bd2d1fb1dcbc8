"""Room on the CPU for a copy of a quantized tensor, which torch.distributed.checkpoint asks for by zeros_like.

Optimizers ask for their state by the same operator, and want plain values. So who asks decides.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from layoutc.runtime.weight.tensor import QuantizedTensor

_STAGERS = "torch.distributed._state_dict_utils"  # where BlockingAsyncStager and others make what they copy into
_CHECKPOINTS = "torch.distributed.checkpoint"
_FRAMES = 8  # between a stager and a handler: __torch_dispatch__, and modes that are switched on


def room_for(tensor: QuantizedTensor, device: torch.device | str) -> QuantizedTensor | None:
    """Zero bytes of the same class, shape and cut, where a stager asks; None for anyone else.

    A plain tensor would take the values: the checkpoint would be dense, and nobody would have said so.
    """
    if not called_from(_STAGERS):
        return None
    planes = {name: torch.zeros(p.shape, dtype=p.dtype, device=device) for name, p in tensor._planes.items()}
    return tensor._with_planes(planes)


def copies_state() -> bool:
    """True where a tensor is copied for a checkpoint, or a state dict, by torch's code for that."""
    return called_from(_STAGERS, _CHECKPOINTS)


def called_from(*modules: str) -> bool:
    """True where code of a module, or of one below it, has led here by a few calls."""
    frame: Any = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if str(frame.f_globals.get("__name__")).startswith(modules):
            return True
        frame = frame.f_back
    return False

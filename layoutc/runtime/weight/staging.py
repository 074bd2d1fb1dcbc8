"""Room on the CPU for a copy of a quantized tensor, which torch.distributed.checkpoint asks for by zeros_like.

Optimizers ask for their state by the same operator, and want plain values. So who asks decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from layoutc.runtime import callers

if TYPE_CHECKING:
    from layoutc.runtime.weight.tensor import QuantizedTensor

_STAGERS = "torch.distributed._state_dict_utils"  # where BlockingAsyncStager and others make what they copy into
_CHECKPOINTS = "torch.distributed.checkpoint"


def room_for(tensor: QuantizedTensor, device: torch.device | str) -> QuantizedTensor | None:
    """Zero bytes of the same class, shape and cut, where a stager asks; None for anyone else.

    A plain tensor would take the values: the checkpoint would be dense, and nobody would have said so.
    """
    if not callers.is_near(_STAGERS):
        return None
    planes = {name: torch.zeros(p.shape, dtype=p.dtype, device=device) for name, p in tensor._planes.items()}
    return tensor._with_planes(planes)


def copies_state() -> bool:
    """True where a tensor is copied for a checkpoint, or a state dict, by torch's code for that."""
    return callers.is_near(_STAGERS, _CHECKPOINTS)

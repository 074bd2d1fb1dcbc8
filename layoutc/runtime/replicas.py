"""What DistributedDataParallel does when it is made: the first rank's weights, byte for byte, on all ranks.

It broadcasts dense copies, and copies those back into the weights. Quantizing such a copy moves scales, on the first
rank as well. So the dense copy stands for nothing here, and where it would be written, the planes are broadcast.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from layoutc.runtime import callers
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.tensor import QuantizedTensor, written


def receive(target: QuantizedTensor) -> bool:
    """Within that broadcast: overwrites the planes with those of the first rank, and is true. Else false.

    Collective. Raises LayoutError, on all ranks alike, where a rank holds the weight in another recipe or cut.
    """
    frame = callers.syncing_replicas()
    if frame is None:
        return False
    group: dist.ProcessGroup = frame.f_locals["process_group"]
    planes = target.planes()
    facts = [(name, tuple(plane.shape), plane.dtype) for name, plane in planes.items()]
    key = zlib.crc32(repr((target.LAYOUT.layout_id, target._matrix, target._halo, facts)).encode()) & 0x7FFFFFFF
    same = torch.tensor([key, -key], device=target.device)
    dist.all_reduce(same, dist.ReduceOp.MAX, group=group)
    if same.tolist() != [key, -key]:
        raise LayoutError(
            f"DistributedDataParallel: {target._label()} is quantized in another way on another rank; quantize the "
            "model alike on all ranks (layoutc.check_ranks(model) names what differs)"
        )
    packed = torch.cat([_bytes(plane) for plane in planes.values()])
    dist.broadcast(packed, group=group, group_src=frame.f_locals["src"])
    pieces = torch.split(packed, [plane.nbytes for plane in planes.values()])
    for plane, new in zip(planes.values(), pieces, strict=True):
        plane.copy_(new.clone().view(plane.dtype).view(plane.shape))
    written([target])
    return True


def dense(tensors: Any) -> Any:
    """What torch broadcasts: plain tensors in the place of weights. Nobody reads what it makes of them."""
    return tree_map(lambda one: one.dequantize() if isinstance(one, QuantizedTensor) else one, tensors)


def _bytes(plane: Tensor) -> Tensor:
    return plane.contiguous().view(-1).view(torch.uint8)

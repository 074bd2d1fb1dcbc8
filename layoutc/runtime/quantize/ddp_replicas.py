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

from layoutc.runtime import callers
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.torch_private import tree_map
from layoutc.runtime.weight import initial_values
from layoutc.runtime.weight.tensor import QuantizedTensor, written


def receive(target: QuantizedTensor) -> bool:
    """Within that broadcast: overwrites the planes with those of the first rank, and is true. Else false.

    Initial values come along, so that masters start alike. Collective. Raises LayoutError, on all ranks alike, where a
    rank holds the weight in another recipe or cut.
    """
    frame = callers.syncing_replicas()
    if frame is None:
        return False
    group, src = frame.f_locals["process_group"], frame.f_locals["src"]
    kept = initial_values.lookup(target)
    values = None if kept is None else initial_values.values(target, kept.values.dtype)
    keeps = _check_alike(target, values, group)
    held = [*target.planes().values(), *([values] if keeps and values is not None else [])]
    packed = torch.cat([_bytes(tensor) for tensor in held])
    before = packed.clone()
    dist.broadcast(packed, group=group, group_src=src)
    # Where no rank has held other bytes, masters that have been made of them are as good as they were, on all ranks.
    differs = torch.tensor([int(not torch.equal(packed, before))], device=target.device)
    dist.all_reduce(differs, dist.ReduceOp.MAX, group=group)
    if not differs.item():
        return True
    pieces = torch.split(packed, [tensor.nbytes for tensor in held])
    new = [piece.clone().view(one.dtype).view(one.shape) for one, piece in zip(held, pieces, strict=True)]
    for plane, sent in zip(target.planes().values(), new, strict=False):
        plane.copy_(sent)
    written([target])
    if keeps:
        initial_values.store(target, new[-1])
    return True


def _check_alike(target: QuantizedTensor, values: Tensor | None, group: dist.ProcessGroup) -> bool:
    """Whether all ranks have initial values of one dtype. Raises LayoutError where they hold a weight differently."""
    facts = [(name, tuple(plane.shape), plane.dtype) for name, plane in target.planes().items()]
    key = zlib.crc32(repr((target.LAYOUT.layout_id, target._matrix, target._halo, facts)).encode()) & 0x7FFFFFFF
    kind = 0 if values is None else zlib.crc32(str(values.dtype).encode()) & 0x7FFFFFFF
    found = torch.tensor([key, -key, kind, -kind], device=target.device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    most, least, kinds = found[0].item(), -found[1].item(), {found[2].item(), -found[3].item()}
    if most != least:
        raise LayoutError(
            f"DistributedDataParallel: {target._label()} is quantized in another way on another rank; quantize the "
            "model alike on all ranks (layoutc.check_ranks(model) names what differs)"
        )
    return kinds == {kind} and values is not None


def dense(tensors: Any) -> Any:
    """What torch broadcasts: plain tensors in the place of weights. Nobody reads what it makes of them."""
    return tree_map(lambda one: one.dequantize() if isinstance(one, QuantizedTensor) else one, tensors)


def _bytes(plane: Tensor) -> Tensor:
    return plane.contiguous().view(-1).view(torch.uint8)

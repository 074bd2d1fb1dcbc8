"""The broadcast in DistributedDataParallel's constructor: all ranks get the first rank's weights, byte for byte.

DDP broadcasts dense copies of the weights and copies those back. Quantizing a dense copy again would change scales, on
the first rank too. So the dense copies are ignored, and the planes are broadcast when DDP writes a copy back.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layoutc.runtime import callers
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.storage import initial_values
from layoutc.runtime.torch_private import tree_map
from layoutc.runtime.weight.tensor import QuantizedTensor, written


def receive(target: QuantizedTensor) -> bool:
    """During that broadcast: overwrites a weight's planes with those of the first rank and returns True. Else False.

    Initial values are broadcast as well, so that masters start equal. Collective. Raises LayoutError, on all ranks, if
    ranks differ in the weight's recipe, shape or planes.
    """
    frame = callers.syncing_replicas()
    if frame is None:
        return False
    group, src = frame.f_locals["process_group"], frame.f_locals["src"]
    stored = initial_values.lookup(target.store)
    values = None if stored is None else target.initial_values(stored.values.dtype)
    with_values = _check_equal_kinds(target, values, group)
    sent = [*target.planes().values(), *([values] if with_values and values is not None else [])]
    packed = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in sent])
    before = packed.clone()
    dist.broadcast(packed, group=group, group_src=src)
    # If all ranks already had the same bytes, masters that were made from them stay valid.
    differs = torch.tensor([int(not torch.equal(packed, before))], device=target.device)
    dist.all_reduce(differs, dist.ReduceOp.MAX, group=group)
    if not differs.item():
        return True
    pieces = torch.split(packed, [tensor.nbytes for tensor in sent])
    new = [piece.clone().view(one.dtype).view(one.shape) for one, piece in zip(sent, pieces, strict=True)]
    for plane, received in zip(target.planes().values(), new, strict=False):
        plane.copy_(received)
    written([target])
    if with_values:
        initial_values.keep(target.store, new[-1])
    return True


def _check_equal_kinds(target: QuantizedTensor, values: Tensor | None, group: dist.ProcessGroup) -> bool:
    """True if all ranks have initial values of the same dtype. Raises LayoutError if their planes differ in kind."""
    facts = [(name, tuple(plane.shape), plane.dtype) for name, plane in target.planes().items()]
    key = (
        zlib.crc32(repr((target.LAYOUT.layout_id, target.store.matrix, target.store.halo, facts)).encode()) & 0x7FFFFFFF
    )
    kind = 0 if values is None else zlib.crc32(str(values.dtype).encode()) & 0x7FFFFFFF
    largest = torch.tensor([key, -key, kind, -kind], device=target.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    most, least, kinds = largest[0].item(), -largest[1].item(), {largest[2].item(), -largest[3].item()}
    if most != least:
        raise LayoutError(
            f"DistributedDataParallel: another rank quantized {target.label()} differently; quantize the model in the "
            "same way on all ranks (layoutc.check_ranks(model) names what differs)"
        )
    return kinds == {kind} and values is not None


def dense(tensors: Any) -> Any:
    """A tree of tensors for torch to broadcast, with quantized weights dequantized. Nothing reads the result."""
    return tree_map(lambda one: one.dequantize() if isinstance(one, QuantizedTensor) else one, tensors)

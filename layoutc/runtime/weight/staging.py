"""What torch.distributed.checkpoint asks of a wrapper: room for copies on the host, and a shard's chunks.

It allocates room by zeros_like, as optimizers do for plain state. So the result depends on the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from layoutc.ints.cuts import Halo
from layoutc.runtime import callers
from layoutc.runtime.weight.padding import NOT_PADDED
from layoutc.runtime.weight.plane_tensor import PlaneTensor


def room_for(tensor: PlaneTensor, device: torch.device | str) -> PlaneTensor | None:
    """A tensor of the same class, shape and cut with zero bytes on `device`, for a stager; None for other callers.

    A plain tensor would be filled with dequantized values, and the checkpoint would silently be dense.
    """
    if not callers.is_near(callers.STAGERS):
        return None
    planes = {name: torch.zeros(p.shape, dtype=p.dtype, device=device) for name, p in tensor.store.planes.items()}
    return tensor.with_planes(planes)


def chunk_list(tensor: PlaneTensor) -> Callable[[], list[Any]]:
    """`__create_chunk_list__` of torch.distributed.checkpoint, for a shard without rows of a recipe with shared planes.

    Such a shard still holds the planes that all rows share (an amax), but a tensor without elements is not loaded. So
    it asks for the weight's first row and keeps its shared planes. Raises AttributeError for other tensors, which DCP
    reads itself.
    """
    size = _first_row(tensor, "__create_chunk_list__")

    def chunks() -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)]

    return chunks


def chunk_of(tensor: PlaneTensor) -> Callable[[Any], PlaneTensor]:
    """`__get_tensor_shard__`, as `chunk_list`."""
    size = _first_row(tensor, "__get_tensor_shard__")

    def shard(index: Any) -> PlaneTensor:
        if index.offset is not None and any(index.offset):  # a save writes the shard itself
            return tensor
        first: Any = tensor.new_zeros(size)
        planes, into = tensor.store.planes, first.store
        into.planes.update({name: planes[name] for name in tensor.LAYOUT.shared & planes.keys()})
        into.halo, into.writes, first.padding = Halo(0, into.halo.after), tensor.store.writes, NOT_PADDED
        return first  # type: ignore[no-any-return]

    return shard


def _first_row(tensor: PlaneTensor, name: str) -> torch.Size:
    if not tensor.LAYOUT.shared or tensor.dim() < 2 or tensor.shape[0] or 0 in tensor.shape[1:]:
        raise AttributeError(f"{type(tensor).__name__!r} object has no attribute {name!r}")
    return torch.Size((1, *tensor.shape[1:]))

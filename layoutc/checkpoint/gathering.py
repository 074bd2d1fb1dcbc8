"""The whole of a sharded weight, on every rank, quantized as it is: one weight at a time."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from layoutc.runtime import meshes
from layoutc.runtime.casting import CastOnGather
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import cdiv
from layoutc.runtime.halo import Place, gather_bytes
from layoutc.runtime.optim import place_of
from layoutc.runtime.plain_state import with_local
from layoutc.runtime.tensor import QuantizedTensor


def gathered_whole(value: Tensor) -> Tensor:
    """The whole of a DTensor, on a device that its group's backend knows; another tensor is whole. Collective.

    Weights that are cast on gather are their values. Raises LayoutError where a mesh without names cuts inside blocks
    and along another dim as well.
    """
    if not isinstance(value, DTensor):
        return value.plain if isinstance(value, CastOnGather) else value
    mesh, local = value.device_mesh, value._local_tensor
    found: Any = with_local(value, local.plain) if isinstance(local, CastOnGather) else value
    if isinstance(local, QuantizedTensor):
        place = place_of(value, local)
        if place is not None and place.joins(local.LAYOUT):
            held: Any = local.to(mesh.device_type)
            return _rejoined(value, _joined(held, place), place)
    if local.device.type != mesh.device_type:  # offloaded
        found = found.to(mesh.device_type)
    whole: Tensor = found.full_tensor()
    return whole


def _joined(local: QuantizedTensor, place: Place) -> QuantizedTensor:
    """Shards whose cuts go through blocks, which DTensor does not join: each rank's own rows, of one group.

    What several ranks hold of a block is the same on all of them.
    """
    layout, cuts, k = local.LAYOUT, place.cuts, local._matrix[1]
    planes = {}
    for name, facts in layout.planes(cuts.rows, k).items():
        if name not in local._planes:
            continue
        rows, own = layout.stored[name].rows_per_value, local._entries(name)
        if rows is None:
            planes[name] = own
            continue
        bounds = [cuts.bounds(rank) for rank in range(cuts.world)]
        entries = [(first // rows, cdiv(last, rows)) for first, last in bounds if last > first]
        sent = own.new_zeros(max(last - first for first, last in entries), *facts.shape[1:])
        if local._rows:
            sent[: len(own)] = own
        pieces = (
            gather_bytes(sent.flatten().view(torch.uint8), place.group).view(own.dtype).view(cuts.world, *sent.shape)
        )
        planes[name] = own.new_empty(facts.shape)
        for (first, last), piece in zip(entries, pieces, strict=False):  # ranks without rows are the last
            planes[name][first:last] = piece[: last - first]
    shape = (cuts.rows // prod(local.shape[1:-1]), *local.shape[1:])
    return type(local)(planes, shape, local.dtype, matrix=(cuts.rows, k), orientations=local._orientations)


def _rejoined(value: DTensor, joined: QuantizedTensor, place: Place) -> Tensor:
    """What tensor parallelism has cut as well, whole again; `joined` itself where it has cut nothing."""
    mesh, ranks = value.device_mesh, dist.get_process_group_ranks(place.group)
    rest = [
        (mesh_dim, dim)
        for mesh_dim, dim in meshes.cuts(value)
        if mesh.size(mesh_dim) > 1 and dist.get_process_group_ranks(mesh.get_group(mesh_dim)) != ranks
    ]
    if not rest:
        return joined
    if (names := mesh.mesh_dim_names) is None:
        raise LayoutError(f"{joined._label()} is cut along several dims of a mesh without names: name its dims")
    within = mesh[tuple(names[mesh_dim] for mesh_dim, _ in rest)]
    cut = [Shard(dim) for _, dim in rest]
    tensor = DTensor.from_local(joined, within, cut, run_check=False, shape=value.shape, stride=value.stride())
    whole: Tensor = tensor.full_tensor()
    return whole

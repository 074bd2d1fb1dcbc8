"""Gathers whole sharded weights on every rank, still quantized, one at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from layoutc.checkpoint.common.regions import Box, entries_of, rows_of
from layoutc.ints.sizes import cdiv
from layoutc.runtime.cast.precompute import precompute
from layoutc.runtime.cast.tensor import CastOnGather
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.quantize import weights
from layoutc.runtime.quantize.block_edges import gather_bytes
from layoutc.runtime.sharding import meshes, shards
from layoutc.runtime.torch_private import local_tensor
from layoutc.runtime.weight.tensor import QuantizedTensor


def cut(values: Tensor, names: Collection[str]) -> dict[str, Tensor]:
    """Plain values under their name in files, or in equal parts of rows under several."""
    parts = [values] if len(names) == 1 else values.flatten(0, -2).chunk(len(names))
    return dict(zip(names, parts, strict=True))


def gathered_whole(value: Tensor) -> Tensor:
    """Gathers a whole DTensor, on a device that its group's backend supports; returns other tensors as is. Collective.

    For a weight that is cast on gather, returns the plain values. Raises LayoutError if a mesh without dim names cuts
    inside blocks and also along another dim.
    """
    if not isinstance(value, DTensor):
        return value.plain if isinstance(value, CastOnGather) else value
    mesh, local = value.device_mesh, local_tensor(value)
    if isinstance(local, QuantizedTensor):
        on_device: Any = local.to(mesh.device_type)
        cuts = [(mesh_dim, dim) for mesh_dim, dim in meshes.cuts(value) if mesh.size(mesh_dim) > 1]
        between = [cut for cut in cuts if 0 < cut[1] < value.dim() - 1]
        row_sharding = shards.row_sharding_of(value, local)
        if row_sharding is not None and row_sharding.splits_blocks(local.LAYOUT):
            row_ranks = dist.get_process_group_ranks(row_sharding.group)
            rest = [cut for cut in cuts if dist.get_process_group_ranks(mesh.get_group(cut[0])) != row_ranks]
            entries = row_sharding.cuts.rows // prod(local.shape[1:-1])
            return _rejoined(value, _joined(on_device, 0, entries, row_sharding.group), rest)
        if between:
            mesh_dim, dim = between[0]
            rest = [cut for cut in cuts if cut != between[0]]
            return _rejoined(value, _joined(on_device, dim, value.shape[dim], mesh.get_group(mesh_dim)), rest)
    plain: Any = meshes.with_local(value, local.plain) if isinstance(local, CastOnGather) else value
    if local.device.type != mesh.device_type:  # offloaded
        plain = plain.to(mesh.device_type)
    whole: Tensor = plain.full_tensor()
    return whole


def _joined(local: QuantizedTensor, dim: int, size: int, group: dist.ProcessGroup) -> QuantizedTensor:
    """Joins a group's shards along a dim of `size` entries in total, in cases where DTensor can't join planes.

    Each rank sends the entries that cover its rows. Entries that several ranks hold are equal on all of them.
    """
    shape = (*local.shape[:dim], size, *local.shape[dim + 1 :])
    layout, m, k, each = local.LAYOUT, prod(shape[:-1]), shape[-1], cdiv(size, group.size())
    runs = []
    for rank in range(group.size()):
        first, last = [0] * len(shape), list(shape)
        first[dim], last[dim] = min(rank * each, size), min((rank + 1) * each, size)
        runs.append(rows_of(shape, Box(tuple(first), tuple(last))))
        if len(runs[-1]) > 1 and any(rows.r0 % layout.block_rows or rows.r1 % layout.block_rows for rows in runs[-1]):
            raise LayoutError(f"{local.label()} is cut inside blocks of {layout.block_rows} rows on dim {dim}")
    planes = {}
    for name, facts in layout.planes(m, k).items():
        if name not in local.store.planes:
            continue
        plane, own = layout.stored[name], local.entries(name)
        if plane.rows_per_value is None:
            planes[name] = own.clone()
            continue
        indexes = [[entries_of(plane, facts.shape, rows, k) for rows in of_rank] for of_rank in runs]
        most = max(sum(index[0].stop - index[0].start for index in of_rank) for of_rank in indexes)
        sent = own.new_zeros(most, *facts.shape[1:])
        if local.store.rows:
            sent[: len(own)] = own
        everywhere = gather_bytes(sent.flatten().view(torch.uint8), group).view(own.dtype)
        planes[name] = own.new_empty(facts.shape)
        for of_rank, piece in zip(indexes, everywhere.view(group.size(), *sent.shape), strict=True):
            start = 0
            for index in of_rank:
                length = index[0].stop - index[0].start
                planes[name][index] = piece[start : start + length]
                start += length
    return type(local)(planes, shape, local.dtype, orientations=local.store.declared)


def _rejoined(value: DTensor, joined: QuantizedTensor, rest: list[tuple[int, int]]) -> Tensor:
    """Gathers `joined` along the remaining cuts, (mesh dim, tensor dim) pairs, into the whole weight."""
    if not rest:
        return joined
    mesh = value.device_mesh
    if (names := mesh.mesh_dim_names) is None:
        raise LayoutError(f"{joined.label()} is cut along several dims of a mesh without names: name its dims")
    within, cut = mesh[tuple(names[mesh_dim] for mesh_dim, _ in rest)], [Shard(dim) for _, dim in rest]
    tensor = DTensor.from_local(joined, within, cut, run_check=False, shape=value.shape, stride=value.stride())
    whole: Tensor = tensor.full_tensor()
    return whole


def join_amaxes(values: Iterable[Tensor]) -> None:
    """Computes the amaxes of cast-on-gather weights that share an amax with other weights. Collective."""
    local = (local_tensor(value) for value in values)
    precompute([one for one in local if isinstance(one, CastOnGather) and one._agreed.fused is not None])


def joint_amax(value: Tensor) -> Tensor | None:
    """The shared amax that `join_amaxes` computed for a weight; None if it shares none, or is quantized."""
    local = local_tensor(value)
    fused = isinstance(local, CastOnGather) and local._agreed.fused is not None
    return local._agreed.current(local)[0] if isinstance(local, CastOnGather) and fused else None


def whole_planes(cls: type[QuantizedTensor] | None, whole: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
    """The planes of a gathered weight. Quantizes plain values to `cls`, as a gather does. amax: the shared one."""
    if not isinstance(whole, QuantizedTensor):
        assert cls is not None
        first = next(iter(cls.LAYOUT.sources))
        whole = weights.quantize(cls, whole.contiguous(), orientations=(first,), amax=amax)
    whole.check_not_freed()
    return {plane: whole.entries(plane) for plane in whole.planes()}

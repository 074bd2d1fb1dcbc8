"""The sharding of a shard's weight: where rows are cut, and which ranks share an amax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from layoutc.ints.cuts import Cuts
from layoutc.ints.sizes import cdiv
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Layout
from layoutc.runtime.sharding import meshes
from layoutc.runtime.sharding.registry import Shard, Sharding, find, parameter_name


@dataclass(frozen=True)
class RowSharding:
    """A weight's rows, cut over a process group: the group, this rank in it, and where the cuts are."""

    group: dist.ProcessGroup
    rank: int
    cuts: Cuts

    def splits_blocks(self, layout: Layout) -> bool:
        """True if some cut falls inside a block, so that all ranks must exchange what decides its scale."""
        return not self.cuts.aligned(layout.block_rows)


def amax_groups(shard: Shard) -> tuple[list[dist.ProcessGroup], str]:
    """The groups of FSDP2 and of tensor parallelism whose shards share an amax with this one; and its `tag`."""
    return (process_groups(shard), tag(shard)) if shard.LAYOUT.shares_amax else ([], "")


def process_groups(shard: Shard) -> list[dist.ProcessGroup]:
    """Those of amax_groups, for a recipe that shares an amax."""
    sharding = find(shard)
    if sharding is None or sharding.is_gone:
        return meshes.resolve(shard.peers or ())
    groups: list[dist.ProcessGroup] | None = sharding.known.get("process_groups")
    if groups is None:
        name = parameter_name(shard) or "a weight"
        groups = sharding.known["process_groups"] = meshes.amax_groups(shard.LAYOUT, sharding.parameter, name)
    return groups


def tag(shard: Shard) -> str:
    """The parameter that this tensor is a shard of, in words that are equal on all ranks."""
    sharding = find(shard)
    shape = () if sharding is None or sharding.is_gone else tuple(sharding.parameter.shape)
    return f"{parameter_name(shard) or 'a weight'} of shape {shape}"


def row_sharding(shard: Shard) -> RowSharding | None:
    """How FSDP2 shards the rows of this tensor's weight; None unless it is a shard, cut on dim 0."""
    sharding = find(shard)
    if sharding is None or sharding.is_gone:
        return None
    found: RowSharding | None = sharding.known.get("rows")
    if found is None and sharding.dim == 0 and (group := sharding.process_group) is not None:
        cuts = Cuts(prod(sharding.shape[:-1]), prod(sharding.padded_shape[:-1]), group.size())
        found = sharding.known["rows"] = RowSharding(group, group.rank(), cuts)
    return found


def row_sharding_of(param: Tensor, shard: Shard) -> RowSharding | None:
    """How a parameter's rows are sharded, by FSDP2 or as a DTensor; None if they are not, or if no block has two rows.

    shard: its local tensor.
    """
    if shard.LAYOUT.block_rows == 1 or not isinstance(param, DTensor):
        return None
    by_fsdp, cut = row_sharding(shard), [mesh_dim for mesh_dim, dim in meshes.cuts(param) if dim == 0]
    if by_fsdp is not None or len(cut) != 1:
        return by_fsdp
    group, inner = param.device_mesh.get_group(cut[0]), prod(param.shape[1:-1])
    cuts = Cuts(param.shape[0] * inner, cdiv(param.shape[0], group.size()) * inner, group.size())
    return RowSharding(group, group.rank(), cuts)


def check_cuts(shard: Shard) -> None:
    """Raises LayoutError on all ranks for cuts inside blocks by tensor parallelism, or by FSDP2 on a later dim."""
    sharding, layout = find(shard), shard.LAYOUT
    if sharding is None or sharding.is_gone:
        return
    if sharding.is_part:
        _check_parts_of(shard, sharding)
    if dim := sharding.dim:
        _check_cut(layout, sharding.shape, dim, shard.shape[dim], str(parameter_name(shard)), "", "shard dim 0")


def _check_parts_of(shard: Shard, sharding: Sharding) -> None:
    param: Tensor = sharding.parameter
    assert isinstance(param, DTensor)
    shape = list(param.shape)
    for mesh_dim, dim in meshes.cuts(param):
        if mesh_dim >= sharding.mesh_dims:
            parts = param.device_mesh.size(mesh_dim)
            check_parts(shard.LAYOUT, shape, dim, parts, parameter_name(shard) or "a weight")
            shape[dim] = cdiv(shape[dim], parts)


def check_parts(layout: Layout, shape: Sequence[int], dim: int, parts: int, name: str) -> None:
    """Raises LayoutError if tensor parallelism would cut blocks on a dim: ranks would quantize each part by itself."""
    if (each := cdiv(shape[dim], parts)) < shape[dim]:
        by, instead = "by tensor parallelism ", "leave the weight out of the recipe"
        _check_cut(layout, shape, dim, each, name, by, instead)


def _check_cut(layout: Layout, shape: Sequence[int], dim: int, each: int, name: str, by: str, instead: str) -> None:
    """Raises LayoutError for cuts of a dim, every `each` entries of it, that fall inside blocks."""
    size, multiple, what = each * prod(shape[dim + 1 : -1]), layout.block_rows, "rows"
    if dim == len(shape) - 1:
        size, multiple, what = each, layout.column_multiple, "columns"
    if size % multiple:
        raise LayoutError(
            f"{name}: shape {tuple(shape)} in {layout.name} is cut {by}on dim {dim} every {size} {what}, but a cut "
            f"must fall at a multiple of {multiple}; {instead}, or use another number of ranks"
        )

"""Where a shard lies among those of its weight: how the rows are cut, and with whom it shares an amax."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from math import prod

import torch.distributed as dist

from layoutc.ints.cuts import Cuts
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Layout
from layoutc.runtime.sharding import meshes
from layoutc.runtime.sharding.registry import Shard, find, parameter_name


@dataclass(frozen=True)
class Place:
    """Where a shard lies among the others: their process group, its rank in that, and how the rows are cut."""

    group: dist.ProcessGroup
    rank: int
    cuts: Cuts

    def joins(self, layout: Layout) -> bool:
        """True if some cut falls inside a block, so that all ranks must exchange scales."""
        return not self.cuts.aligned(layout.block_rows)


def amax_groups(shard: Shard) -> tuple[list[dist.ProcessGroup], int]:
    """The process groups whose shards share an amax with this one, of FSDP2 and of tensor parallelism; and its
    `tag`."""
    if not shard.LAYOUT.shares_amax:
        return [], 0
    sharding = find(shard)
    if sharding is None or sharding.is_gone:
        return meshes.resolve(shard._peers or ()), tag(shard)
    return meshes.amax_groups(shard.LAYOUT, sharding.parameter), tag(shard)


def tag(shard: Shard) -> int:
    """A number that identifies the parameter that this tensor is a shard of, equal on all ranks."""
    sharding = find(shard)
    shape = () if sharding is None or sharding.is_gone else tuple(sharding.parameter.shape)
    return zlib.crc32(f"{parameter_name(shard)} {shape}".encode()) & 0x7FFFFFFF


def place(shard: Shard) -> Place | None:
    """Where this tensor lies among the shards of a weight that FSDP2 shards on dim 0; None for any other tensor."""
    sharding = find(shard)
    if sharding is None or sharding.is_gone or sharding.dim != 0 or (group := sharding.process_group) is None:
        return None
    cuts = Cuts(prod(sharding.shape[:-1]), prod(sharding.padded_shape[:-1]), group.size())
    return Place(group, group.rank(), cuts)


def check_other_dim(shard: Shard) -> None:
    """Raises LayoutError on all ranks for a weight that is sharded on a dim other than 0, if cuts fall inside
    blocks."""
    sharding, layout = find(shard), shard.LAYOUT
    if sharding is None or sharding.is_gone or (dim := sharding.dim) == 0:
        return
    own, is_last = shard.shape, dim == len(sharding.shape) - 1
    size, multiple = (own[dim], layout.column_multiple) if is_last else (prod(own[dim:-1]), layout.block_rows)
    if size % multiple:
        raise LayoutError(
            f"{parameter_name(shard)}: shape {sharding.shape} in {layout.name} is cut on dim {dim} every {size} "
            f"{'columns' if is_last else 'rows'}, but a cut must fall at a multiple of {multiple}; shard dim 0, or use "
            "another number of ranks"
        )

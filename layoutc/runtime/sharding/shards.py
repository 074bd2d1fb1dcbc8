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
    """Where a shard lies among the others: their process group, its rank in it, and how the rows are cut."""

    group: dist.ProcessGroup
    rank: int
    cuts: Cuts

    def joins(self, layout: Layout) -> bool:
        """True when some cut falls inside a block: then all ranks take part in an exchange."""
        return not self.cuts.aligned(layout.block_rows)


def amax_groups(shard: Shard) -> tuple[list[dist.ProcessGroup], int]:
    """The process groups over which shards of this tensor share an amax, FSDP2's and those of tensor parallelism; and a
    number that stands for the parameter."""
    if not shard.LAYOUT.shares_amax:
        return [], 0
    known = find(shard)
    if known is None or known.is_gone:
        return meshes.resolve(shard._peers or ()), tag(shard)
    return meshes.amax_groups(shard.LAYOUT, known.parameter), tag(shard)


def tag(shard: Shard) -> int:
    """A number that stands for the parameter that this tensor is a shard of, alike on all ranks."""
    known = find(shard)
    shape = () if known is None or known.is_gone else tuple(known.parameter.shape)
    return zlib.crc32(f"{parameter_name(shard)} {shape}".encode()) & 0x7FFFFFFF


def place(shard: Shard) -> Place | None:
    """Where this tensor lies among the shards of a weight that FSDP2 holds; None where it does not."""
    known = find(shard)
    if known is None or known.is_gone or known.dim != 0 or (group := known.process_group) is None:
        return None
    cuts = Cuts(prod(known.shape[:-1]), prod(known.padded_shape[:-1]), group.size())
    return Place(group, group.rank(), cuts)


def check_other_dim(shard: Shard) -> None:
    """Raises LayoutError, on all ranks alike, for a shard of another dim than 0 whose cuts fall inside blocks."""
    known, layout = find(shard), shard.LAYOUT
    if known is None or known.is_gone or (dim := known.dim) == 0:
        return
    held, is_last = shard.shape, dim == len(known.shape) - 1
    size, multiple = (held[dim], layout.column_multiple) if is_last else (prod(held[dim:-1]), layout.block_rows)
    if size % multiple:
        raise LayoutError(
            f"{parameter_name(shard)}: shape {known.shape} in {layout.name} is cut on dim {dim} every {size} "
            f"{'columns' if is_last else 'rows'}, but a cut must fall at a multiple of {multiple}"
        )

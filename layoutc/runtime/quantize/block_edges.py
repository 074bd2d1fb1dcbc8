"""Quantizing shards whose cuts fall inside blocks: what the ranks on both sides of a cut tell one another.

A block's scale depends on all of its rows, so a shard is quantized as the whole blocks that it is part of. Of the rows
that are not its own (its halo) it needs no more than decides the scales: for most recipes the least and the greatest
value of each column. One all-gather a process group carries this for any number of weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from layoutc.runtime.errors import LayoutError, UnsupportedOperator
from layoutc.runtime.facts import Layout
from layoutc.runtime.sharding.shards import RowSharding
from layoutc.runtime.weight.tensor import QuantizedTensor


def check_whole_blocks(target: QuantizedTensor, row_sharding: RowSharding | None) -> None:
    """Raises where plain values can't be written: a part of a block, with nobody to ask for the rest.

    UnsupportedOperator for such a part, LayoutError for a shard that is not cut as `row_sharding` says.
    """
    halo, layout = target._halo, target.LAYOUT
    if row_sharding is None or not row_sharding.splits_blocks(layout):
        if halo.rows:
            raise UnsupportedOperator(
                f"{target._label()} is cut inside a block of {layout.block_rows} rows: quantizing it by itself would "
                "give the block two scales; quantize the whole weight"
            )
        return
    expected = row_sharding.cuts.halo(row_sharding.rank, layout.block_rows)
    if halo[:2] != expected[:2] or halo.tied:
        raise LayoutError(f"{target._label()}: rank {row_sharding.rank} should hold {expected}, but holds {halo}")


def with_halos(
    layouts: Sequence[Layout], values: Sequence[Tensor], row_shardings: Sequence[RowSharding | None]
) -> list[Tensor]:
    """The values of whole blocks: (rows, k) of each shard -> (m, k) of its planes, halo included, in the same dtype.

    The rows of the halo have the extremes, or the values, of the rows that other ranks hold there. Collective over each
    group, for all weights of which some rank's shard is cut inside a block; others come back as they are.
    """
    found = list(values)
    batches: dict[dist.ProcessGroup, list[int]] = defaultdict(list)
    for position, (layout, row_sharding) in enumerate(zip(layouts, row_shardings, strict=True)):
        if row_sharding is not None and row_sharding.splits_blocks(layout):
            batches[row_sharding.group].append(position)
    for group, members in batches.items():
        told = [_edges(layouts[i], values[i], row_shardings[i]) for i in members]
        everywhere = _all_gather(torch.cat([edges.flatten() for edges in told]), group)
        pieces = torch.split(everywhere, [edges.numel() for edges in told], dim=1)
        for i, edges, piece in zip(members, told, pieces, strict=True):
            heard = piece.view(group.size(), *edges.shape).to(values[i].device)
            found[i] = _with_halo(layouts[i], values[i], row_shardings[i], heard)
    return found


def _all_gather(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(n,) fp32 of each rank -> (ranks, n), on a device that the group's backend can use."""
    mine = mine.to(torch.device("cuda") if dist.get_backend(group) == "nccl" else mine.device)
    return gather_bytes(mine.view(torch.uint8), group).view(torch.float32).view(group.size(), -1)


def gather_bytes(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(n, ...) of each rank -> (ranks * n, ...), uint8, which every backend knows."""
    everywhere = mine.new_empty(group.size() * mine.shape[0], *mine.shape[1:])
    # all_gather_into_tensor goes by another name in later versions, and warns under the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(everywhere, mine, group=group)
    return everywhere


def _edges(layout: Layout, values: Tensor, row_sharding: RowSharding | None) -> Tensor:
    """What a rank tells of the first and the last block that it has rows of: (2, rows told, k), fp32.

    Least and greatest values, or all values where they stand in the block, zeros elsewhere.
    """
    assert row_sharding is not None
    block, (n, k) = layout.block_rows, values.shape
    first, last = row_sharding.cuts.bounds(row_sharding.rank)
    told = values.new_zeros(2, 2 if layout.extremes else block, k, dtype=torch.float32)
    if not n:
        return told
    ends = (first, min(last, first // block * block + block)), (max(first, (last - 1) // block * block), last)
    for edge, (start, stop) in zip(told, ends, strict=True):
        rows, at = values[start - first : stop - first], start % block
        if layout.extremes:
            edge[0], edge[1] = rows.amin(0), rows.amax(0)
        else:
            edge[at : at + stop - start] = rows
    return told


def _with_halo(layout: Layout, values: Tensor, row_sharding: RowSharding | None, heard: Tensor) -> Tensor:
    """Values with the halo's rows around them. heard: (ranks, 2, rows told, k)."""
    assert row_sharding is not None
    block, cuts = layout.block_rows, row_sharding.cuts
    halo = cuts.halo(row_sharding.rank, block)
    if not halo.rows:
        return values
    first, last = cuts.bounds(row_sharding.rank)
    whole = values.new_empty(len(values) + halo.rows, values.shape[1])
    whole[halo.before : len(whole) - halo.after] = values
    origin = first - halo.before  # the weight's row at which `whole` begins
    sides = (
        (range(row_sharding.rank), 1, origin, first),
        (range(row_sharding.rank + 1, cuts.world), 0, last, last + halo.after),
    )
    for ranks, edge, start, stop in sides:
        inside = [(rank, cuts.bounds(rank)) for rank in ranks]
        spans = [(rank, max(a, start), min(b, stop)) for rank, (a, b) in inside if max(a, start) < min(b, stop)]
        if not spans:
            continue
        if layout.extremes:
            told = heard[[rank for rank, *_ in spans], edge]
            rows = whole[start - origin : stop - origin]
            rows.copy_(told[:, 0].amin(0))
            rows[-1] = told[:, 1].amax(0)
        else:
            base = start // block * block
            for rank, a, b in spans:
                whole[a - origin : b - origin] = heard[rank, edge, a - base : b - base]
    return whole

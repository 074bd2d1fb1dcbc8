"""Quantizing shards whose cuts split blocks: what ranks on both sides of a cut exchange.

The scale of a block depends on all of its rows, so a shard is quantized together with the other rows of its first and
last block (its halo). Of those rows it only needs what decides the scales: for most recipes, the minimum and maximum of
each column. One all-gather per process group transfers this for any number of weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from layoutc.runtime.errors import LayoutError, UnsupportedOperator, whole_instead
from layoutc.runtime.facts import Layout
from layoutc.runtime.sharding.shards import RowSharding
from layoutc.runtime.torch_private import all_gather_single
from layoutc.runtime.weight.tensor import QuantizedTensor


def check_whole_blocks(target: QuantizedTensor, row_sharding: RowSharding | None) -> None:
    """Raises if plain values can't be written into a tensor, because its blocks can't be completed.

    UnsupportedOperator for a tensor that is cut inside a block and is not a shard: no rank has the rest of the block.
    LayoutError for a shard whose halo is not the one that `row_sharding` implies.
    """
    halo, layout = target.store.halo, target.LAYOUT
    if row_sharding is None or not row_sharding.splits_blocks(layout):
        if halo.rows:
            instead = "quantize the whole weight" if target.store.part is not None else whole_instead(layout.name)
            raise UnsupportedOperator(
                f"{target.label()} is cut inside a block of {layout.block_rows} rows: quantizing it by itself would "
                f"give the block two scales; {instead}"
            )
        return
    expected = row_sharding.cuts.halo(row_sharding.rank, layout.block_rows)
    if halo[:2] != expected[:2] or halo.tied:
        raise LayoutError(f"{target.label()}: rank {row_sharding.rank} should hold {expected}, but holds {halo}")


def with_halos(
    layouts: Sequence[Layout], values: Sequence[Tensor], row_shardings: Sequence[RowSharding | None]
) -> list[Tensor]:
    """Each shard's own values, (rows, k) -> the values of whole blocks, (rows + halo, k), in the same dtype.

    Rows of the halo get the values of the rows that other ranks have there, or values with the same minimum and maximum
    in each column. Collective over each group, for the weights whose blocks are cut on any rank. Values of other
    weights are returned unchanged.
    """
    extended = list(values)
    batches: dict[dist.ProcessGroup, list[int]] = defaultdict(list)
    for position, (layout, row_sharding) in enumerate(zip(layouts, row_shardings, strict=True)):
        if row_sharding is not None and row_sharding.splits_blocks(layout):
            batches[row_sharding.group].append(position)
    for group, members in batches.items():
        sent = [_edges(layouts[i], values[i], row_shardings[i]) for i in members]
        gathered = _all_gather(torch.cat([edges.flatten() for edges in sent]), group)
        pieces = torch.split(gathered, [edges.numel() for edges in sent], dim=1)
        for i, edges, piece in zip(members, sent, pieces, strict=True):
            received = piece.view(group.size(), *edges.shape).to(values[i].device)
            extended[i] = _with_halo(layouts[i], values[i], row_shardings[i], received)
    return extended


def _all_gather(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(n,) fp32 on each rank -> (ranks, n), on a device that the group's backend supports."""
    mine = mine.to(torch.device("cuda") if dist.get_backend(group) == "nccl" else mine.device)
    return gather_bytes(mine.view(torch.uint8), group).view(torch.float32).view(group.size(), -1)


def gather_bytes(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(n, ...) uint8 on each rank -> (ranks * n, ...). Every backend supports uint8."""
    gathered = mine.new_empty(group.size() * mine.shape[0], *mine.shape[1:])
    all_gather_single(gathered, mine, group=group)
    return gathered


def _edges(layout: Layout, values: Tensor, row_sharding: RowSharding | None) -> Tensor:
    """What a rank sends of its first and its last block: (2, rows sent, k), fp32.

    The minimum and maximum of each column, if they decide the scales. Otherwise all rows of the block, with zeros for
    other ranks' rows. A rank without rows sends zeros.
    """
    assert row_sharding is not None
    block, (n, k) = layout.block_rows, values.shape
    first, last = row_sharding.cuts.bounds(row_sharding.rank)
    edges = values.new_zeros(2, 2 if layout.extremes else block, k, dtype=torch.float32)
    if not n:
        return edges
    ends = (first, min(last, first // block * block + block)), (max(first, (last - 1) // block * block), last)
    for edge, (start, stop) in zip(edges, ends, strict=True):
        rows, at = values[start - first : stop - first], start % block
        if layout.extremes:
            edge[0], edge[1] = rows.amin(0), rows.amax(0)
        else:
            edge[at : at + stop - start] = rows
    return edges


def _with_halo(layout: Layout, values: Tensor, row_sharding: RowSharding | None, received: Tensor) -> Tensor:
    """Values, (rows, k) -> the same with the halo's rows. received: (ranks, 2, rows sent, k)."""
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
            extremes = torch.stack([received[rank, edge] for rank, *_ in spans])  # an index would be copied to a card
            rows = whole[start - origin : stop - origin]
            rows.copy_(extremes[:, 0].amin(0))
            rows[-1] = extremes[:, 1].amax(0)
        else:
            base = start // block * block
            for rank, a, b in spans:
                whole[a - origin : b - origin] = received[rank, edge, a - base : b - base]
    return whole


# ---------------------------------------------------------------------------------------------------- what is sent
def padded_rows(tensor: QuantizedTensor, name: str, rows: int) -> Tensor:
    """The entries of a plane that cover the tensor's own rows, padded with zeros to `rows` entries."""
    own = tensor.entries(name)
    if not tensor.store.rows and tensor.LAYOUT.stored[name].rows_per_value is not None:
        own = own[:0]
    if own.shape[0] == rows:
        return own
    full = own.new_zeros(rows, *own.shape[1:])
    full[: own.shape[0]] = own
    return full


def as_bytes(plane: Tensor, *, into: bool = False) -> Tensor:
    """A plane to send: contiguous uint8, which every backend supports. into: to receive into, so never a copy."""
    if into and not plane.is_contiguous():
        raise LayoutError("a collective can't write into some columns of a tensor: clone it first")
    plane = plane.contiguous()
    if plane.dtype == torch.uint8:
        return plane
    # Flattened before it is viewed as bytes: a dim of size 1 may have any stride in a contiguous tensor.
    return plane.view(-1).view(torch.uint8).view(*plane.shape[:-1], plane.shape[-1] * plane.element_size())

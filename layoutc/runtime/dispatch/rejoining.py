"""DTensor's collectives on shards that are cut inside blocks, where ranks on both sides of a cut hold its scales.

DTensor pads short shards, gathers or scatters, and cuts the padding off again. Such a shard has no bytes for padding:
when padded, it is an alias with the larger shape, and `Padding.rows` says how many rows it has. First the ranks
exchange how many rows each has and where in a block they begin, so that all agree before any plane is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, ValuesView
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from layoutc.ints.cuts import NO_HALO, Cuts, Halo, picks, sent_blocks
from layoutc.ints.sizes import cdiv, up
from layoutc.runtime.errors import LayoutError, ShardAlignmentError
from layoutc.runtime.quantize.block_edges import as_bytes, gather_bytes, padded_rows
from layoutc.runtime.storage import initial_values
from layoutc.runtime.storage.planes import MadePlanes, with_copies
from layoutc.runtime.torch_private import c10d_functional, is_fake, process_group
from layoutc.runtime.weight.padding import NOT_PADDED, Padding
from layoutc.runtime.weight.stored_form import with_halo
from layoutc.runtime.weight.tensor import QuantizedTensor


class StackedPlanes(MadePlanes):
    """The planes of several tensors stacked along the rows, where no tensor ends with a block.

    The stack is not a tensor of the recipe. It can be split into its tensors again, which DTensor does after gathering
    columns; any other use raises ShardAlignmentError.
    """

    def __init__(self, stacks: dict[str, Tensor], common: dict[str, Tensor], world: int, message: str) -> None:
        """stacks: planes of all tensors, stacked; common: planes equal in all of them; message: the error's."""
        self.stacks, self.common, self.world, self.message = stacks, common, world, message
        self.names = stacks | common

    def apart(self) -> list[dict[str, Tensor]]:
        """The planes of each tensor."""
        chunks = {name: stack.chunk(self.world) for name, stack in self.stacks.items()}
        return [self.common | {n: pieces[i] for n, pieces in chunks.items()} for i in range(self.world)]

    def values(self) -> ValuesView[Tensor]:
        """All tensors, for callers that ask for their devices and sizes."""
        return (self.stacks | self.common).values()

    def refused(self) -> LayoutError:
        """The error of any other use."""
        return ShardAlignmentError(self.message)

    def __getitem__(self, name: str) -> Tensor:
        raise self.refused()


def cuts_blocks(tensor: QuantizedTensor, world: int) -> bool:
    """True if shards of `tensor`'s outer size, which is equal on all ranks, are not whole blocks of rows."""
    return world > 1 and (tensor.store.halo.rows > 0 or prod(tensor.shape[:-1]) % tensor.LAYOUT.block_rows != 0)


def padded(tensor: QuantizedTensor, shape: Sequence[int]) -> QuantizedTensor:
    """A short shard under the shape of a full one, with only the planes that it has."""
    full = tensor.alias(shape)
    full.padding = Padding(rows=tensor.shape[0])
    return full


def with_zeros(tensor: QuantizedTensor, shape: Sequence[int]) -> QuantizedTensor:
    """A tensor of whole blocks padded to a larger shape, with codes of 0."""
    matrix, planes = (prod(shape[:-1]), shape[-1]), dict[str, Tensor]()
    if matrix == tensor.store.matrix:
        return tensor
    for name, facts in tensor.LAYOUT.planes(*matrix).items():
        if (plane := tensor.store.planes.get(name)) is not None:
            if plane.shape == facts.shape:
                planes[name] = plane.clone()
            else:
                planes[name] = plane.new_empty(facts.shape)
                tensor.LAYOUT.fill_with_zeros(name, planes[name])
                planes[name][: plane.shape[0], : plane.shape[1]] = plane
    full = tensor.with_planes(planes, shape, matrix=matrix)
    full.padding = NOT_PADDED
    if (values := initial_values.complete_matrix(tensor.store)) is not None:
        initial_values.keep(full.store, pad(values, (0, matrix[1] - values.shape[1], 0, matrix[0] - values.shape[0])))
    return full


# --------------------------------------------------------------------------------------------------------------- gather
def gather(func: Any, tensor: QuantizedTensor, world: int, group: Any) -> QuantizedTensor:
    """all_gather_into_tensor of shards that are not whole blocks; waits for it.

    world: ranks of `group`. Planes that cover all rows are copies of this rank's. Raises ShardAlignmentError on
    all ranks for tensors that are not shards of one weight, and while calls are traced.
    """
    layout, rows, k = tensor.LAYOUT, prod(tensor.shape[:-1]), tensor.store.matrix[1]
    message = (
        f"{tensor.label()}: tensors of {rows} rows that were quantized separately can't be joined: each must have a "
        f"multiple of {layout.shard_rows} rows ({layout.shard_reason}), such as {up(rows, layout.shard_rows)}; cut the "
        "whole quantized weight instead"
    )
    if torch.compiler.is_compiling() or any(is_fake(plane) for plane in tensor.store.planes.values()):
        raise ShardAlignmentError(
            f"{tensor.label()}: shards of {rows} rows can't be joined in a compiled graph: there, cuts must fall at "
            f"multiples of {layout.shard_rows} rows ({layout.shard_reason}); gather the weight outside of the graph"
        )
    shape = (tensor.shape[0] * world, *tensor.shape[1:])
    resolved: Any = process_group(group) if isinstance(group, str) else group
    extents = [[rows, 0, 0]] * world  # of each rank: its own rows, and its halo's rows before and after them
    if not tensor.is_meta:
        extents = gather_bytes(_extent(tensor, tensor.device), resolved).view(torch.int64).view(-1, 3).tolist()
    if extents.count(extents[0]) == world and extents[0][0]:  # no cuts between rows: DTensor gathers columns
        return _stacked(tensor, shape, world, group, message)
    cuts = Cuts(sum(n for n, *_ in extents), rows, world)
    for rank, extent in enumerate(extents):
        first, last = cuts.bounds(rank)
        if tuple(extent) != (last - first, *cuts.halo(rank, layout.block_rows)[:2]):
            raise ShardAlignmentError(message)
    names = [name for name in tensor.store.planes if layout.stored[name].rows_per_value is not None]
    sent = [
        as_bytes(padded_rows(tensor, name, sent_blocks(cuts, layout.stored[name].rows_per_value or 1)))
        for name in names
    ]
    planes, facts = with_copies(tensor.store.planes, layout.shared), layout.planes(cuts.rows, k)
    for name, received in zip(names, _gathered(sent, world, group), strict=True):
        chosen = picks(cuts, layout.stored[name].rows_per_value or 1)
        entries = received[: facts[name].shape[0]]
        if chosen is not None:
            entries = received.index_select(0, torch.tensor(chosen, device=received.device))
        planes[name] = entries.reshape(-1).view(facts[name].dtype).view(facts[name].shape)
    whole = tensor.with_planes(planes, shape, matrix=(cuts.rows, k), halo=NO_HALO)
    whole.padding = NOT_PADDED if cuts.rows == rows * world else Padding(rows=cuts.rows // prod(shape[1:-1]))
    return whole


def _extent(tensor: QuantizedTensor, device: torch.device) -> Tensor:
    extent = tensor.store.rows, *tensor.store.halo[:2]
    return torch.tensor(extent, dtype=torch.int64, device=device).view(torch.uint8)


def _stacked(tensor: QuantizedTensor, shape: tuple[int, ...], world: int, group: Any, message: str) -> QuantizedTensor:
    layout = tensor.LAYOUT
    common = layout.shared - layout.shared_by_columns
    names = [name for name in tensor.store.planes if name not in common]
    received = [tensor.store.planes[name] for name in names]
    if not tensor.is_meta:
        received = _gathered([as_bytes(plane) for plane in received], world, group)
    stacks = {}
    for name, plane in zip(names, received, strict=True):
        own = tensor.store.planes[name]
        full = own.new_empty(own.shape[0] * world, *own.shape[1:]) if tensor.is_meta else plane.reshape(-1)
        stacks[name] = full.view(own.dtype).view(-1, *own.shape[1:])
    copies = {name: plane.clone() for name, plane in tensor.store.planes.items() if name in common}
    return tensor.with_planes(StackedPlanes(stacks, copies, world, message), shape)


def unstacked(tensor: QuantizedTensor) -> list[QuantizedTensor]:
    """The tensors of StackedPlanes."""
    assert isinstance(tensor.store.planes, StackedPlanes)
    shape = (tensor.shape[0] // tensor.store.planes.world, *tensor.shape[1:])
    return [tensor.with_planes(planes, shape) for planes in tensor.store.planes.apart()]


def _gathered(sent: list[Tensor], world: int, group: Any) -> list[Tensor]:
    received = c10d_functional.all_gather_into_tensor_coalesced(sent, world, group)
    return [c10d_functional.wait_tensor(one) for one in received]


# -------------------------------------------------------------------------------------------------------------- scatter
def scatter_(
    func: Callable[..., Any], output: QuantizedTensor, pieces: Any, rest: Sequence[Any], kwargs: Any, waits: bool
) -> Any:
    """c10d's scatter_ into `output`, which becomes the received piece: its planes and its rows, which may be fewer.

    waits: whether to wait for each work but the last, which is returned.
    """
    world = dist.ProcessGroup.unbox(rest[0]).size()
    layout, rows, works = output.LAYOUT, prod(output.shape[:-1]), list[Any]()

    def scattered(into: Tensor, sent: list[Tensor]) -> None:
        works.append(func([into], [sent] if pieces else pieces, *rest, **kwargs)[1])

    outgoing: Sequence[QuantizedTensor] = pieces[0] if pieces else ()
    header = torch.empty(3, dtype=torch.int64, device=output.device)
    scattered(header.view(torch.uint8), [_extent(one, output.device) for one in outgoing])
    received, padded = dict[str, Tensor](), Cuts(rows * world, rows, world)
    for name, plane in output.store.planes.items():
        per_value = layout.stored[name].rows_per_value
        most = plane.shape[0] if per_value is None else sent_blocks(padded, per_value)
        sent = [as_bytes(padded_rows(one, name, most)) for one in outgoing]
        received[name] = plane.new_empty(most, *plane.shape[1:])
        scattered(as_bytes(received[name]), sent)
    for work in works if waits else ():
        work.wait()
    own, before, after = header.tolist()
    matrix, halo = (own + before + after, output.store.matrix[1]), Halo(before, after)
    for name, plane in received.items():
        if (per_value := layout.stored[name].rows_per_value) is not None:
            received[name] = plane[: cdiv(matrix[0] - after, per_value) - before // per_value]
    output.store.planes.clear()
    output.store.planes.update(with_halo(layout, received, matrix, halo) if halo.rows else received)
    output.store.matrix, output.store.halo = matrix, halo
    output.padding = NOT_PADDED if own == rows else Padding(rows=own // prod(output.shape[1:-1]))
    return works[-1]

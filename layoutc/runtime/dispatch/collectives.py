"""Collectives on quantized tensors, as DTensor calls them: bytes travel, nothing is dequantized.

An all-gather sends every plane as it is, all of them in one coalesced call: one launch on a card, and no copy into or
out of a packed buffer. It is asynchronous until `wait_tensor`. Planes that cover all rows of a weight (`Layout.shared`)
are not sent: all shards of a weight have equal ones, and the result gets copies of this rank's. That is true of weights
from distribute_tensor, quantize_ and MasterWeights. It is not checked for a DTensor that `from_local` made from shards
that were quantized separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad as functional_pad

from layoutc.runtime import callers
from layoutc.runtime.dispatch import broadcasts, merges, rejoining
from layoutc.runtime.dispatch.fallback import fallback
from layoutc.runtime.dispatch.handlers import Args, Kwargs
from layoutc.runtime.dispatch.views import dim_of
from layoutc.runtime.dispatch.written_by_ranks import WRITES, may_wait
from layoutc.runtime.errors import LayoutError, UnsupportedOperator
from layoutc.runtime.facts import Layout
from layoutc.runtime.quantize.block_edges import as_bytes
from layoutc.runtime.storage import initial_values
from layoutc.runtime.storage.planes import with_copies
from layoutc.runtime.torch_private import AsyncCollectiveTensor, c10d_functional, dtensor_ops, process_group, traced
from layoutc.runtime.weight.padding import ENDS_WHERE_CUT, NOT_PADDED
from layoutc.runtime.weight.tensor import QuantizedTensor, written

aten = torch.ops.aten
c10d = torch.ops.c10d


# ----------------------------------------------------------------------------------------------- functional collectives
def all_gather(func: Any, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """all_gather_into_tensor: all ranks' shards joined along the rows; asynchronous if they are whole blocks.

    Raises LayoutError on all ranks for tensors that are not shards of one weight.
    """
    tensor: QuantizedTensor = args[0]
    world, group = args[1:]
    if rejoining.cuts_blocks(tensor, world):
        _check_rows_of(func, tensor)
        return rejoining.gather(func, tensor, world, group)
    _check_straight(func, tensor)
    tensor, layout = rejoining.with_zeros(tensor, tensor.shape), tensor.LAYOUT
    names = [name for name in tensor.store.planes if _travels(layout, name)]
    sent = [as_bytes(tensor.store.planes[name]) for name in names]
    received = c10d_functional.all_gather_into_tensor_coalesced(sent, world, group)
    planes = with_copies(tensor.store.planes, layout.shared)
    stacked: dict[str, Tensor] = {}
    for name, plane in zip(names, received, strict=True):
        into = stacked if name in layout.shared else planes
        into[name] = plane.view(tensor.store.planes[name].dtype)
    shape = (tensor.shape[0] * world, *tensor.shape[1:])
    whole = tensor.with_planes(planes, shape, matrix=(tensor.store.matrix[0] * world, tensor.store.matrix[1]))
    whole.padding = ENDS_WHERE_CUT  # DTensor cuts the padding of short shards off before it waits
    whole.stacked = stacked
    return whole


def wait(func: Any, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """wait_tensor: waits for every plane. As in torch, the argument itself may then be used, too."""
    tensor: QuantizedTensor = args[0]
    if isinstance(tensor.store.planes, rejoining.StackedPlanes):  # already waited for
        return tensor
    if tensor.padding.ends_where_cut:
        tensor.padding = NOT_PADDED
    waited = tensor.with_planes(tensor.map_planes(func))
    waited.store.common = tensor.store.common
    waited.stacked = {name: func(plane) for name, plane in tensor.stacked.items()}
    return waited


def broadcast(func: Any, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """broadcast: every plane of the source rank, also those that cover all rows; asynchronous."""
    tensor, *rest = args
    _check_straight(func, tensor)
    return tensor.with_planes(  # type: ignore[no-any-return]
        tensor.map_planes(lambda plane: func(as_bytes(plane), *rest).view(plane.dtype))
    )


def shard_dim_alltoall(func: Any, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """shard_dim_alltoall: from shards of rows to shards of columns or back; each byte is sent once.

    If shards of rows are not whole blocks, the whole weight is gathered instead. Raises LayoutError on all ranks if the
    new dim can't be cut evenly, UnsupportedOperator if a new cut between columns would split a block.
    """
    tensor, gather_dim, shard_dim, group = args
    resolved: Any = process_group(group) if isinstance(group, str) else group
    world = resolved.size()
    gather_dim, shard_dim = dim_of(gather_dim, tensor.dim()), dim_of(shard_dim, tensor.dim())
    if tensor.shape[shard_dim] % world:
        raise LayoutError(
            f"{func}: dim {shard_dim} of {tensor.label()} can't be cut evenly over {world} ranks: it must be a "
            f"multiple of {world}"
        )
    rows = prod(tensor.shape[:-1]) // (1 if shard_dim == tensor.dim() - 1 else world)
    if rows % tensor.LAYOUT.block_rows:
        whole: Any = all_gather(func, (tensor, world, group), {})
        whole = wait(c10d_functional.wait_tensor.default, (whole,), {})
        whole = torch.cat(torch.chunk(whole, world), gather_dim) if gather_dim else whole
        mine: QuantizedTensor = torch.chunk(whole, world, shard_dim)[resolved.rank()].clone()
        return mine
    _check_straight(func, tensor)
    tensor = rejoining.with_zeros(tensor, tensor.shape)
    pieces: Sequence[Any] = torch.chunk(tensor, world, shard_dim)
    names = [name for name in tensor.store.planes if _travels(tensor.LAYOUT, name)]
    first = pieces[0].store.planes
    sizes = [first[name].numel() * first[name].element_size() for name in names]
    sent = torch.cat([as_bytes(piece.store.planes[name]).view(-1) for piece in pieces for name in names])
    each = [sum(sizes)] * world
    received = c10d_functional.wait_tensor(c10d_functional.all_to_all_single(sent, each, each, group))
    parts: list[Any] = []
    for chunk in received.view(world, -1):
        planes = dict(first)
        for name, flat in zip(names, chunk.split(sizes), strict=True):
            planes[name] = flat.clone().view(first[name].dtype).view(first[name].shape)
        parts.append(pieces[0].with_planes(planes))
    return torch.cat(parts, gather_dim)  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------------- collectives in place
def scatter_(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """scatter_: every plane of every piece, also those that cover all rows; `output` becomes the received piece.

    DTensor cuts the padding of a short piece off afterwards.
    """
    (output,), pieces, *rest = args
    for piece in (output, *(pieces[0] if pieces else ())):
        _check_rows_of(func, piece)
    waits = may_wait(func, args, kwargs, output)

    def send(into: Tensor, sent: list[Tensor]) -> Any:
        return func([into], [sent] if pieces else pieces, *rest, **kwargs)[1]

    sent = [initial_values.complete_matrix(piece.store) for piece in pieces[0]] if pieces else []
    values = _initial_values(output, sent, send, waits)
    return _done(output, [rejoining.scatter_(func, output, pieces, rest, kwargs, waits)], waits, values)


def broadcast_(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """broadcast_: called by DTensor, every plane of the source rank into the planes of the others.

    Other callers have plain buffers on the other ranks, and these get values (see `broadcasts`).
    """
    (tensor,), *rest = args
    if tensor.sent is not None or not broadcasts.among_quantized():
        waits = may_wait(func, args, kwargs, tensor)
        return [tensor], broadcasts.send_values(func, tensor, rest, kwargs, waits)
    _check_straight(func, tensor)
    waits = may_wait(func, args, kwargs, tensor)

    def send(into: Tensor, sent: list[Tensor]) -> Any:
        return func([into.copy_(sent[0]) if sent else into], *rest, **kwargs)[1]

    values = _initial_values(tensor, [initial_values.complete_matrix(tensor.store)], send, waits)
    works = [func([as_bytes(plane, into=True)], *rest, **kwargs)[1] for plane in tensor.store.planes.values()]
    return _done(tensor, works, waits, values)


_KINDS = (None, torch.float32, torch.bfloat16, torch.float16)  # dtypes of initial values, by their number in a message


def _initial_values(
    target: QuantizedTensor, every: Sequence[Tensor | None], send: Callable[[Tensor, list[Tensor]], Any], waits: bool
) -> Tensor | None:
    """Sends the initial values that belong to the bytes; returns the received ones, None if the source has none.

    They have the rows of `target`'s shape, equal on all ranks. every: what this rank sends. A first message says
    whether values follow, and in which dtype.
    """
    kinds = [None if value is None else value.dtype for value in every]
    code = _KINDS.index(kinds[0]) if kinds and len(set(kinds)) == 1 else 0
    kind = torch.zeros(1, dtype=torch.uint8, device=target.device)
    work = send(kind, [kind + code for _ in every])
    if waits:
        work.wait()
    if (dtype := _KINDS[int(kind)]) is None:
        return None
    rows = prod(target.shape[:-1])
    values = torch.empty(rows, target.shape[-1], dtype=dtype, device=target.device)
    fitting = [value for value in every if value is not None and value.dtype == dtype]
    sent = [as_bytes(functional_pad(value, (0, 0, 0, rows - value.shape[0]))) for value in fitting]
    work = send(as_bytes(values, into=True), sent if len(sent) == len(every) else [])
    if waits:
        work.wait()
    return values


def _done(
    tensor: QuantizedTensor, works: Sequence[Any], waits: bool, values: Tensor | None
) -> tuple[list[QuantizedTensor], Any]:
    """The result of an in-place collective. Waits for all works but the last, which the caller waits for."""
    for work in works[:-1] if waits else ():
        work.wait()
    written([tensor])
    if values is not None:
        tensor.store.writes.trains = True
        initial_values.keep(tensor.store, values[: tensor.store.rows])
    return [tensor], works[-1]


# --------------------------------------------------------------------------------------------------- padding and order
def pad(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """constant_pad_nd: of whole blocks to whole blocks, with zeros after the last row or column; else through fallback.

    DTensor pads short shards, which need not be whole blocks. Raises LayoutError for other padding, or for
    columns that don't end with a block.
    """
    tensor, amounts = args[0], args[1]
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    layout, shape = tensor.LAYOUT, list(tensor.shape)
    for position, amount in enumerate(amounts):
        shape[tensor.dim() - 1 - position // 2] += amount
    k, columns = tensor.store.matrix[1], shape[-1]
    only_after = not any(amounts[::2]) and min(amounts, default=0) >= 0
    whole = tensor.dim() > 1 and tensor.shape[-1] == k and not tensor.transposed
    takes = not value and only_after and whole and tuple(shape[1:-1]) == tuple(tensor.shape[1:-1])
    rows, block = prod(shape[:-1]), layout.block_rows
    if not any(amounts):
        return tensor.compact_copy()  # type: ignore[no-any-return]
    if not callers.makes_shards():
        is_cut = tensor.store.halo.rows or tensor.store.rows % block or rows % block or rows % layout.multiple_m
        ends = k % layout.column_multiple == 0 and columns % layout.column_multiple == 0
        exact = takes and ends and not is_cut and tensor.padding.rows is None
        return rejoining.with_zeros(tensor, shape) if exact else fallback(func, args, kwargs)
    if not takes:
        raise LayoutError(f"{func}: {tensor.label()} can only be padded with zeros after its last row or column")
    if columns == k and (tensor.store.halo.rows or rows % block or tensor.store.rows % block):
        return rejoining.padded(tensor, shape)
    if columns != k and (tensor.store.halo.rows or k % layout.column_multiple):
        raise LayoutError(
            f"{func}: the {k} columns of {tensor.label()} do not end with a block: shards of columns must be "
            f"multiples of {layout.column_multiple} columns"
        )
    return rejoining.with_zeros(tensor, shape)


def index_select(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """index_select: of whole blocks, with which DTensor reorders strided shards; else through fallback."""
    tensor, dim, index = args
    dim = dim_of(dim, tensor.dim())
    runs: list[list[int]] = []
    is_eager = dim in (0, tensor.dim() - 1) and not index.is_meta and not traced(index)
    for entry in index.tolist() if is_eager else ():
        if runs and runs[-1][1] == entry:
            runs[-1][1] += 1
        else:
            runs.append([entry, entry + 1])
    try:
        pieces = [tensor.narrow(dim, start, stop - start) for start, stop in runs]
    except UnsupportedOperator:
        pieces = []
    if not pieces or any(piece.store.halo.rows for piece in pieces):
        return fallback(func, args, kwargs)  # type: ignore[no-any-return]
    return torch.cat(pieces, dim)


# --------------------------------------------------------------------------------------------------------------- checks
def _check_straight(func: Any, tensor: QuantizedTensor) -> None:
    _check_rows_of(func, tensor)
    if tensor.store.halo.rows:
        raise LayoutError(
            f"{func}: {tensor.label()} is cut inside a block of {tensor.LAYOUT.block_rows} rows: gather the weight "
            "with full_tensor() first, or cut it into whole blocks"
        )


def _check_rows_of(func: Any, tensor: QuantizedTensor) -> None:
    (_, k), last = tensor.store.matrix, tensor.shape[-1:]
    if tensor.transposed or tensor.dim() < 2 or last != (k,):
        raise LayoutError(f"{func}: {tensor.label()} must be sent as rows of {k} columns, not transposed or flattened")


def _travels(layout: Layout, name: str) -> bool:
    """Whether ranks may hold different values in a plane: a plane over all rows still differs by columns."""
    return name not in layout.shared or name in layout.shared_by_columns


HANDLERS: dict[Any, Callable[..., Any]] = {
    c10d_functional.all_gather_into_tensor.default: all_gather,
    c10d_functional.wait_tensor.default: wait,
    c10d_functional.broadcast.default: broadcast,
    dtensor_ops.shard_dim_alltoall.default: shard_dim_alltoall,
    c10d.scatter_.default: scatter_,
    c10d.broadcast_.default: broadcast_,
    **WRITES,
    aten.constant_pad_nd.default: pad,
    aten.index_select.default: index_select,
    torch.Tensor.data: merges.assigned,  # plain values that are assigned to a tensor's data
    None: fallback,  # every other operator
}
if hasattr(c10d_functional, "_wrap_tensor_autograd"):  # not in every supported torch: it waits at its first use
    HANDLERS[c10d_functional._wrap_tensor_autograd.default] = lambda func, args, kwargs: AsyncCollectiveTensor(args[0])

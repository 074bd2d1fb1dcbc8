"""Collectives on quantized tensors, as DTensor asks for them: bytes travel, nothing is dequantized.

An all-gather sends every plane as it lies, all of them in one coalesced call: one launch on a card, and no copy into
and out of a packed buffer. Nothing waits for it until `wait_tensor` is asked to. Planes that cover all rows of a weight
(`Layout.shared`) do not travel: shards of one weight hold them alike, and the result has this rank's own. That holds
for what distribute_tensor, quantize_ and MasterWeights make; a DTensor put together by `from_local` from shards that
were quantized apart is no whole weight in that sense, and nothing here finds out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import _collective_utils  # noqa: F401  defines shard_dim_alltoall

from layoutc.runtime import initial, operators
from layoutc.runtime.dispatch import Args, Kwargs
from layoutc.runtime.errors import LayoutError, ShardAlignmentError, UnsupportedOperator
from layoutc.runtime.facts import Layout, up
from layoutc.runtime.fallback import fallback
from layoutc.runtime.tensor import QuantizedTensor, written
from layoutc.runtime.windows import dim_of

aten = torch.ops.aten
c10d = torch.ops.c10d
_functional = torch.ops._c10d_functional
_dtensor = torch.ops._dtensor


# ----------------------------------------------------------------------------------------------- functional collectives
def all_gather(func: Any, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """all_gather_into_tensor: the pieces of all ranks below one another, still on their way.

    Raises LayoutError, on all ranks alike, where pieces that are not whole blocks of rows would not join.
    """
    tensor: QuantizedTensor = args[0]
    world, group = args[1:]
    _check_straight(func, tensor)
    _check_rows(tensor, tensor._matrix[0], world)
    layout = tensor.LAYOUT
    names = [name for name in tensor._planes if _travels(layout, name)]
    sent = [_bytes(tensor._planes[name]) for name in names]
    received = _functional.all_gather_into_tensor_coalesced(sent, world, group)
    planes: dict[str, Tensor] = dict(tensor._planes)
    stacked: dict[str, Tensor] = {}
    for name, plane in zip(names, received, strict=True):
        into = stacked if name in layout.shared else planes
        into[name] = plane.view(tensor._planes[name].dtype)
    shape = (tensor.shape[0] * world, *tensor.shape[1:])
    whole = tensor._with_planes(planes, shape, matrix=(tensor._matrix[0] * world, tensor._matrix[1]))
    whole._is_new = True  # DTensor cuts off the filling of short shards before it waits: what is left is whole
    whole._stacked = stacked
    return whole


def wait(func: Any, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """wait_tensor: for every plane. As torch has it, the tensor that was waited for is good from then on as well."""
    tensor: QuantizedTensor = args[0]
    tensor._is_new = False
    waited = tensor._with_planes(tensor._map(func))
    waited._common = tensor._common
    waited._stacked = {name: func(plane) for name, plane in tensor._stacked.items()}
    return waited


def wrap(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """_wrap_tensor_autograd: what waits when it is used."""
    return functional.AsyncCollectiveTensor(args[0])


def broadcast(func: Any, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """broadcast: every plane of the source rank, those that cover all rows included, still on their way."""
    tensor, *rest = args
    _check_straight(func, tensor)
    return tensor._with_planes(  # type: ignore[no-any-return]
        tensor._map(lambda plane: func(_bytes(plane), *rest).view(plane.dtype))
    )


def shard_dim_alltoall(func: Any, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """shard_dim_alltoall: from shards of rows to shards of columns or back, each byte sent once.

    Raises LayoutError, on all ranks alike, where a new cut would split a block.
    """
    tensor, gather_dim, shard_dim, group = args
    _check_straight(func, tensor)
    resolved: Any = _resolve_process_group(group) if isinstance(group, str) else group  # type: ignore[arg-type]
    world = resolved.size()
    gather_dim, shard_dim = dim_of(gather_dim, tensor.dim()), dim_of(shard_dim, tensor.dim())
    pieces: Sequence[Any] = torch.chunk(tensor, world, shard_dim)
    if len({piece.shape for piece in pieces}) != 1 or len(pieces) != world:
        raise LayoutError(f"{func}: dim {shard_dim} of {tensor._label()} is not cut evenly over {world} ranks")
    names = [name for name in tensor._planes if _travels(tensor.LAYOUT, name)]
    first = pieces[0]._planes
    sizes = [first[name].numel() * first[name].element_size() for name in names]
    sent = torch.cat([_bytes(piece._planes[name]).view(-1) for piece in pieces for name in names])
    each = [sum(sizes)] * world
    received = _functional.wait_tensor(_functional.all_to_all_single(sent, each, each, group))
    parts: list[Any] = []
    for chunk in received.view(world, -1):
        planes = dict(first)
        for name, flat in zip(names, chunk.split(sizes), strict=True):
            planes[name] = flat.clone().view(first[name].dtype).view(first[name].shape)
        parts.append(pieces[0]._with_planes(planes))
    return torch.cat(parts, gather_dim)  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------------- collectives in place
def scatter_(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """scatter_: every plane of every piece, those that cover all rows included."""
    (output,), pieces, *rest = args
    for piece in (output, *(pieces[0] if pieces else ())):
        _check_straight(func, piece)

    works = []
    for name, plane in output._planes.items():
        sent = [[_bytes(piece._planes[name]) for piece in pieces[0]]] if pieces else pieces
        works.append(func([_bytes(plane, into=True)], sent, *rest, **kwargs)[1])

    def send(into: Tensor, given: list[Tensor]) -> Any:
        return func([into], [given] if pieces else pieces, *rest, **kwargs)[1]

    every = [initial.own(piece) for piece in pieces[0]] if pieces else []
    values = _initial_values(func, args, kwargs, output, every, send)
    output._is_new = True  # DTensor cuts off the filling of a short shard: what is left is whole
    return _done(func, args, kwargs, output, works, values)


def broadcast_(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """broadcast_: every plane of the source rank, into the planes of the others."""
    (tensor,), *rest = args
    _check_straight(func, tensor)
    works = [func([_bytes(plane, into=True)], *rest, **kwargs)[1] for plane in tensor._planes.values()]

    def send(into: Tensor, given: list[Tensor]) -> Any:
        return func([into.copy_(given[0]) if given else into], *rest, **kwargs)[1]

    values = _initial_values(func, args, kwargs, tensor, [initial.own(tensor)], send)
    return _done(func, args, kwargs, tensor, works, values)


_KINDS = (None, torch.float32, torch.bfloat16, torch.float16)  # of initial values, as ranks tell one another


def _initial_values(
    func: Any,
    args: Args,
    kwargs: Kwargs,
    target: QuantizedTensor,
    every: Sequence[Tensor | None],
    send: Callable[[Tensor, list[Tensor]], Any],
) -> Tensor | None:
    """The initial values that go with the bytes, alike on all ranks; None where the source has none.

    every: what this rank has to send. A first message says whether values follow, and in which dtype.
    """
    kinds = [None if value is None else value.dtype for value in every]
    code = _KINDS.index(kinds[0]) if kinds and len(set(kinds)) == 1 else 0
    kind = torch.zeros(1, dtype=torch.uint8, device=target.device)
    _wait(func, args, kwargs, send(kind, [kind + code for _ in every]))
    if (dtype := _KINDS[int(kind)]) is None:
        return None
    values = torch.empty(target._rows, target._matrix[1], dtype=dtype, device=target.device)
    fitting = [_bytes(value) for value in every if value is not None and value.dtype == dtype]
    _wait(func, args, kwargs, send(_bytes(values, into=True), fitting if len(fitting) == len(every) else []))
    return values


def _wait(func: Any, args: Args, kwargs: Kwargs, *works: Any) -> None:
    """Waits for works.

    On a card, a collective that is not asynchronous runs on the caller's stream, and its work is a null pointer in a
    Python object, which crashes when it is asked to wait.
    """
    if args[0][0].device.type == "cpu" or _argument(func, args, kwargs, "async_op", True):
        for work in works:
            work.wait()


def _done(
    func: Any, args: Args, kwargs: Kwargs, tensor: QuantizedTensor, works: Sequence[Any], values: Tensor | None
) -> tuple[list[QuantizedTensor], Any]:
    """What a collective in place returns: who waits for the last of several works has waited for all."""
    _wait(func, args, kwargs, *works[:-1])
    written([tensor])
    if values is not None:
        tensor._writes.trains = True
        initial.keep(tensor, values)
    return [tensor], works[-1]


def _argument(func: Any, args: Args, kwargs: Kwargs, name: str, default: Any) -> Any:
    """An argument of an operator by its name, wherever it is passed."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, default)
    return default


# --------------------------------------------------------------------------------------------------- filling, and order
def pad(func: Any, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """constant_pad_nd with zeros after the last row or column, as DTensor fills up short shards.

    Raises LayoutError where what is there does not end with a block.
    """
    tensor, amounts = args[0], args[1]
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    layout, shape = tensor.LAYOUT, list(tensor.shape)
    for place, amount in enumerate(amounts):
        shape[tensor.dim() - 1 - place // 2] += amount
    k, columns = tensor._matrix[1], shape[-1]
    only_after = not any(amounts[::2]) and min(amounts, default=0) >= 0
    whole = tensor.dim() > 1 and tensor.shape[-1] == k and not tensor._transposed
    if value or not only_after or not whole or tuple(shape[1:-1]) != tuple(tensor.shape[1:-1]):
        raise LayoutError(f"{func}: {tensor._label()} is filled up with zeros after its last row or column alone")
    rows = prod(shape[:-1])
    if tensor._halo.rows or (rows != tensor._rows and rows % layout.block_rows):
        raise LayoutError(_cut_inside(func, tensor))
    if columns != k and k % layout.column_multiple:
        raise LayoutError(
            f"{func}: the {k} columns of {tensor._label()} do not end with a block: shards of columns are multiples of "
            f"{layout.column_multiple} columns"
        )
    matrix = rows, columns
    facts, planes = layout.planes(*matrix), {}
    for name, plane in tensor._planes.items():
        planes[name] = plane
        if plane.shape != facts[name].shape:
            planes[name] = plane.new_zeros(facts[name].shape)
            planes[name][: plane.shape[0], : plane.shape[1]] = plane
    filled = tensor._with_planes(planes, shape, matrix=matrix)
    if (values := initial.own(tensor)) is not None:
        initial.keep(filled, torch.nn.functional.pad(values, (0, columns - k, 0, rows - tensor._rows)))
    return filled  # type: ignore[no-any-return]


def index_select(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """index_select of whole blocks in any order, as DTensor puts strided shards in order; else through fallback."""
    tensor, dim, index = args
    dim = dim_of(dim, tensor.dim())
    runs: list[list[int]] = []
    known = dim in (0, tensor.dim() - 1) and not index.is_meta and not operators.traced(index)
    for entry in index.tolist() if known else ():
        if runs and runs[-1][1] == entry:
            runs[-1][1] += 1
        else:
            runs.append([entry, entry + 1])
    try:
        pieces = [tensor.narrow(dim, start, stop - start) for start, stop in runs]
    except UnsupportedOperator:
        pieces = []
    if not pieces or any(piece._halo.rows for piece in pieces):
        return fallback(func, args, kwargs)  # type: ignore[no-any-return]
    return torch.cat(pieces, dim)


# --------------------------------------------------------------------------------------------------------------- checks
def _check_straight(func: Any, tensor: QuantizedTensor) -> None:
    (_, k), last = tensor._matrix, tensor.shape[-1:]
    if tensor._transposed or tensor.dim() < 2 or last != (k,):
        raise LayoutError(f"{func}: {tensor._label()} travels as rows of {k} columns, not transposed or flattened")
    if tensor._halo.rows:
        raise LayoutError(_cut_inside(func, tensor))


def _cut_inside(func: Any, tensor: QuantizedTensor) -> str:
    return (
        f"{func}: {tensor._label()} is cut inside a block of {tensor.LAYOUT.block_rows} rows, and such shards are "
        "joined by FSDP2's hooks alone: use fully_shard, or shards of whole blocks"
    )


def _check_rows(tensor: QuantizedTensor, rows: int, world: int) -> None:
    layout = tensor.LAYOUT
    if world > 1 and rows % layout.shard_rows:
        raise ShardAlignmentError(
            f"{tensor._label()}: shards of {rows} rows do not join: a cut must fall at a multiple of "
            f"{layout.shard_rows} rows ({layout.shard_reason}); the nearest that do have "
            f"{up(rows, layout.shard_rows)} rows"
        )


def _travels(layout: Layout, name: str) -> bool:
    """Whether ranks may hold different values of a plane: what covers all rows of some columns goes with columns."""
    return name not in layout.shared or name in layout.shared_by_columns


def _bytes(plane: Tensor, *, into: bool = False) -> Tensor:
    """A plane as it travels: contiguous uint8, which every backend knows. `into`: it is written, so never a copy."""
    if into and not plane.is_contiguous():
        raise LayoutError("a collective writes into whole tensors, not into some columns of one: clone it first")
    plane = plane.contiguous()
    if plane.dtype == torch.uint8:
        return plane
    # Flat before it becomes bytes: a dim of one entry may have any stride and still be contiguous.
    return plane.view(-1).view(torch.uint8).view(*plane.shape[:-1], plane.shape[-1] * plane.element_size())


HANDLERS = {
    _functional.all_gather_into_tensor.default: all_gather,
    _functional.wait_tensor.default: wait,
    _functional.broadcast.default: broadcast,
    _dtensor.shard_dim_alltoall.default: shard_dim_alltoall,
    c10d.scatter_.default: scatter_,
    c10d.broadcast_.default: broadcast_,
    aten.constant_pad_nd.default: pad,
    aten.index_select.default: index_select,
}
if hasattr(_functional, "_wrap_tensor_autograd"):  # not in every torch that is supported
    HANDLERS[_functional._wrap_tensor_autograd.default] = wrap

"""Dispatch handlers that cut, join or make planes."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from layoutc.ints.cuts import NO_HALO, Halo
from layoutc.runtime import callers
from layoutc.runtime.dispatch.fallback import fallback
from layoutc.runtime.dispatch.handlers import Args, Kwargs, like_plain
from layoutc.runtime.dispatch.rejoining import StackedPlanes, unstacked
from layoutc.runtime.dispatch.views import PLAIN, InexactView, Selection, bounds, dim_of, matrix_for, selection
from layoutc.runtime.dispatch.written_by_ranks import refuse_flat_parameters
from layoutc.runtime.errors import UnsupportedOperator
from layoutc.runtime.quantize import ddp_replicas
from layoutc.runtime.storage.planes import CutPlanes, ScatteredPlanes
from layoutc.runtime.weight.padding import NEW, NOT_PADDED, Padding
from layoutc.runtime.weight.tensor import QuantizedTensor


def _piece(tensor: QuantizedTensor, dim: int, start: int, stop: int, operator: Any) -> QuantizedTensor:
    """Entries start..stop of an outer dim, as views of the planes."""
    rows = tensor.padding.rows
    if (start, stop) == (0, tensor.shape[dim] if rows is None else rows):
        return _first_rows(tensor, dim, stop)
    if not tensor.transposed:
        return _cut(tensor, selection(tensor, dim, start, stop, operator))
    last = tensor.dim() - 1
    straight = tensor.alias((*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2]), transposed=False)
    piece = _piece(straight, {last: last - 1, last - 1: last}.get(dim, dim), start, stop, operator)
    return piece.alias((*piece.shape[:-2], piece.shape[-1], piece.shape[-2]), transposed=True)


def _first_rows(tensor: QuantizedTensor, dim: int, stop: int) -> QuantizedTensor:
    """All rows that a tensor holds: fewer than its shape if that is padded."""
    padding = tensor.padding
    piece = tensor.alias(None if padding.rows is None else (*tensor.shape[:dim], stop, *tensor.shape[dim + 1 :]))
    if not padding.ends_where_cut:
        piece.padding = Padding(first_rows_of=weakref.ref(tensor)) if padding.is_new else NOT_PADDED
    return piece


def _cut(tensor: QuantizedTensor, chosen: Selection) -> QuantizedTensor:
    """The piece `chosen` as a view, which may have its own halo."""
    rect, halo = chosen.rect, chosen.halo
    is_first = tensor.padding.ends_where_cut and rect.r0 == 0
    if is_first and halo.after:
        rect, halo = rect._replace(r1=rect.r1 - halo.after), NO_HALO
    rows = rect.shape[0] - halo.rows
    planes: MutableMapping[str, Tensor]
    own = tensor.store
    if isinstance(own.planes, ScatteredPlanes):  # these planes are copies: writes to a view of them would be lost
        if rows == own.rows:
            return own.planes.columns(rect.c0, rect.c1).alias(chosen.shape)  # type: ignore[no-any-return]
        raise UnsupportedOperator(
            f"{tensor.label()} consists of rows that are not adjacent, and can't be cut further: clone it first"
        )
    if getattr(own.planes, "handle", None) is not None:  # each pass replaces the weight's planes
        planes = CutPlanes(own.planes, own.matrix, rect, type(tensor)._cut)
    else:
        planes = type(tensor)._cut(own.planes, *rect)
    piece = tensor.with_planes(planes, chosen.shape, matrix=rect.shape, halo=halo)
    part = None if is_first else own.part_at(rect.r0, rect.c0)
    # FSDP2 cuts only the first rows of a new tensor (see Padding); other cuts give parts.
    if tensor.padding.is_new and rect.r0 + halo.before != own.halo.before:
        tensor.padding = NOT_PADDED
    piece.padding = tensor.padding.of_piece()
    if tensor.padding.is_new:
        piece.padding = Padding(first_rows_of=weakref.ref(tensor))
        piece.store.halo, part = Halo(*halo[:2]), None
    shares = rows != own.rows and not (tensor.padding.is_new or is_first)
    common = tensor.LAYOUT.shared if shares else frozenset()
    if rect.shape[1] != own.matrix[1]:
        common |= tensor.LAYOUT.shared_along_rows
    piece.store.cut_from(own, part, common)
    if is_first:
        piece.stacked = tensor.stacked  # still in flight: waiting for the piece waits for them
    return piece


def _fill(args: Args, defaults: Args) -> Args:
    """Positional arguments, completed with the schema's defaults."""
    return (*args, *defaults[len(args) :])


def slice_(func: Any, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """slice (also narrow): a view, with step 1. Columns, and rows of each expert, must be whole blocks.

    Raises UnsupportedOperator for anything else.
    """
    tensor, dim, start, stop, step = _fill(args, (None, 0, None, None, 1))
    if step != 1:
        raise InexactView(func, tensor, f"can't be sliced with step {step}, only with step 1")
    dim = dim_of(dim, tensor.dim())
    return _some(tensor, dim, *bounds(tensor.shape[dim], start, stop), func)


def _some(tensor: QuantizedTensor, dim: int, start: int, stop: int, operator: Any) -> QuantizedTensor:
    """Entries start..stop of an outer dim, whether their rows are adjacent or not."""
    cut = _scattered if _scatters(tensor, dim) and 0 < stop - start < tensor.shape[dim] else _piece
    return cut(tensor, dim, start, stop, operator)


def select(func: Any, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """select: an entry of a dim that is whole blocks (an expert), without that dim; a view if rows are adjacent."""
    tensor, dim, index = args
    dim = dim_of(dim, tensor.dim())
    index += tensor.shape[dim] if index < 0 else 0
    if (tensor.transposed and dim >= tensor.dim() - 2) or (tensor.dim() == 2 and dim == 1):
        raise UnsupportedOperator(f"{func}: entry {index} of dim {dim} of {tensor.label()} is not whole rows; {PLAIN}")
    if not 0 <= index < tensor.shape[dim]:
        raise IndexError(f"{func}: index {index} is out of range for dim {dim} of {tensor.label()}")
    piece = _some(tensor, dim, index, index + 1, func)
    return piece.alias((*piece.shape[:dim], *piece.shape[dim + 1 :]))


def unbind(func: Any, args: Args, kwargs: Kwargs) -> list[QuantizedTensor]:
    """unbind: `select` for every entry of a dim."""
    tensor, dim = _fill(args, (None, 0))
    return [select(func, (tensor, dim, i), {}) for i in range(tensor.shape[dim_of(dim, tensor.dim())])]


def split(func: Any, args: Args, kwargs: Kwargs) -> list[QuantizedTensor]:
    """split (also chunk): pieces of equal size, as views. FSDP2 shards by chunk on dim 0."""
    tensor, size, dim = _fill(args, (None, None, 0))
    if tensor.sent is not None and callers.is_called_from("torch.distributed.tensor"):
        return list(func(tensor.dequantize(), size, dim))  # DTensor's scatter sends values to the other ranks
    dim = dim_of(dim, tensor.dim())
    total = tensor.shape[dim]
    if isinstance(tensor.store.planes, StackedPlanes) and dim == 0 and size * tensor.store.planes.world == total:
        return unstacked(tensor)
    starts = range(0, total, size) if size else (0,)
    pieces = [_some(tensor, dim, start, min(start + size, total), func) for start in starts]
    for name, stack in tensor.stacked.items() if dim == 0 else ():  # DTensor splits what it has gathered
        for piece, own in zip(pieces, stack.chunk(len(pieces)), strict=True):
            piece.store.planes[name] = own
    return pieces


def _scatters(tensor: QuantizedTensor, dim: int) -> bool:
    """True if entries of a dim are not adjacent rows: some rows of each entry of the dims before it."""
    return 0 < dim < tensor.dim() - 1 and prod(tensor.shape[:dim]) > 1 and not tensor.transposed


def _scattered(tensor: QuantizedTensor, dim: int, start: int, stop: int, operator: Any) -> QuantizedTensor:
    """Entries of a dim whose rows are not adjacent (some rows of each expert).

    They are copied from the weight at each use, and a tensor of the same recipe can be copied into them. FSDP2 cuts
    expert weights like this to shard dim 1, and then copies the pieces; checkpoints load such shards into others.
    Raises UnsupportedOperator if a cut falls inside a block, or blocks span several entries of the dims before `dim`.
    """
    inner, layout = prod(tensor.shape[dim + 1 : -1]), tensor.LAYOUT
    total, first, last = (n * inner for n in (tensor.shape[dim], start, stop))
    if isinstance(tensor.store.planes, ScatteredPlanes):
        raise UnsupportedOperator(
            f"{operator}: {tensor.label()} consists of rows that are not adjacent, and can't be cut further: clone it "
            "first"
        )
    fits = tensor.shape[-1] == tensor.store.matrix[1] and not tensor.store.halo.rows
    if any(n % layout.block_rows for n in (total, first, last)) or not fits:
        raise UnsupportedOperator(
            f"{operator}: entries {start} to {stop} of dim {dim} of {tensor.label()} are {last - first} of each "
            f"{total} rows; both numbers, and where the cuts fall, must be multiples of {layout.block_rows}: cut dim "
            "0, which may fall anywhere, or store plain weights and quantize them when they are gathered "
            f'(layoutc.cast_on_gather_(model, "{layout.name}")); {PLAIN}'
        )
    shape = (*tensor.shape[:dim], stop - start, *tensor.shape[dim + 1 :])
    lead = prod(tensor.shape[:dim])
    whole = tensor.alias()
    whole.padding = whole.padding.of_piece()

    def runs() -> list[QuantizedTensor]:
        matrix, starts = whole.alias(tensor.store.matrix), range(0, lead * total, total)
        return [_cut(matrix, selection(matrix, 0, at + first, at + last, operator)) for at in starts]

    def columns(begin: int, end: int) -> QuantizedTensor:
        return _scattered(_piece(whole, whole.dim() - 1, begin, end, operator), dim, start, stop, operator)

    planes = ScatteredPlanes(tensor.store.planes, layout.stored, (lead, total, first, last), runs, columns)
    piece = tensor.with_planes(planes, shape, matrix=(lead * (last - first), tensor.store.matrix[1]))
    piece.store.cut_from(tensor.store, None, layout.shared)
    piece.padding = tensor.padding.of_piece()
    return piece


def split_with_sizes(func: Any, args: Args, kwargs: Kwargs) -> list[QuantizedTensor]:
    """split_with_sizes: pieces of given sizes, as views."""
    tensor, sizes, dim = _fill(args, (None, None, 0))
    dim = dim_of(dim, tensor.dim())
    if sum(sizes) != tensor.shape[dim]:
        raise RuntimeError(f"{func}: sizes {list(sizes)} do not add up to dim {dim} of {tensor.label()}")
    pieces, start = [], 0
    for size in sizes:
        pieces.append(_some(tensor, dim, start, start + size, func))
        start += size
    return pieces


def cat(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """cat: joins bytes if pieces end on block boundaries and have equal shared planes; else through fallback."""
    pieces = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    first = pieces[0]
    if not isinstance(first, QuantizedTensor) or not _joinable(pieces, dim := dim_of(dim, first.dim())):
        refuse_flat_parameters(pieces)
        if callers.syncing_replicas() is not None:
            return func(*ddp_replicas.dense(args), **kwargs)  # type: ignore[no-any-return]
        return fallback(func, args, kwargs)  # type: ignore[no-any-return]
    shape = (*first.shape[:dim], sum(piece.shape[dim] for piece in pieces), *first.shape[dim + 1 :])
    if dim:
        return _join_inside(pieces, dim, shape)
    matrix = (sum(piece.store.matrix[0] for piece in pieces), first.store.matrix[1])
    shared, each = first.LAYOUT.shared, [piece.store.planes for piece in pieces]
    planes = {n: each[0][n].clone() if n in shared else torch.cat([one[n] for one in each]) for n in each[0]}
    return first.with_planes(planes, shape, matrix=matrix)


def _joinable(pieces: list[Any], dim: int) -> bool:
    first = pieces[0]
    layout = first.LAYOUT
    if any(type(p) is not type(first) or p.transposed or p.dim() < 2 or p.dim() != first.dim() for p in pieces):
        return False
    others = [(*p.shape[:dim], *p.shape[dim + 1 :]) for p in pieces]
    if others.count(others[0]) < len(pieces) or any(p.store.planes.keys() != first.store.planes.keys() for p in pieces):
        return False
    halo = first.store.halo[:2] if dim == first.dim() - 1 > 0 else (0, 0)
    stores = [p.store for p in pieces]
    if any(s.halo[:2] != halo for s in stores) or any(p.padding.rows is not None for p in pieces):
        return False
    if dim and any(p.shape[-1] != p.store.matrix[1] for p in pieces):
        return False
    if 0 < dim < first.dim() - 1:
        if any(prod(p.shape[dim:-1]) % layout.block_rows for p in pieces):
            return False
    else:
        axis, multiple = (1, layout.column_multiple) if dim else (0, layout.block_rows)
        if any(s.matrix[axis] % multiple for s in stores[:-1]):
            return False
    shared = layout.shared if dim < first.dim() - 1 else layout.shared_along_rows
    ours = {name: plane for name, plane in first.store.planes.items() if name in shared}
    return all(s.planes[n] is own or torch.equal(s.planes[n], own) for s in stores[1:] for n, own in ours.items())


def _join_inside(pieces: list[QuantizedTensor], dim: int, shape: tuple[int, ...]) -> QuantizedTensor:
    """Pieces joined along the columns, or along a middle dim (rows of each expert), where all are whole blocks. Planes
    are m-major, so columns of the weight are columns of each plane."""
    first, layout = pieces[0], pieces[0].LAYOUT
    columns = dim == first.dim() - 1
    planes = {}
    for name, plane in first.store.planes.items():
        if name in (layout.shared_along_rows if columns else layout.shared):
            planes[name] = plane.clone()
            continue
        each = [piece.store.planes[name] for piece in pieces]
        each = each if columns else [one.reshape(prod(shape[:dim]), -1, plane.shape[-1]) for one in each]
        joined = torch.cat(each, 1)
        planes[name] = joined if columns else joined.reshape(-1, plane.shape[-1])
    return first.with_planes(planes, shape, matrix=(first.store.matrix[0] if columns else prod(shape[:-1]), shape[-1]))


# ---------------------------------------------------------------------------------------------------------- new tensors
def new(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """new_empty, new_zeros: a plain tensor; for torch.distributed one of the class, if the recipe can hold the size.

    Zeros dequantize to exact zeros: all rows hold codes of 0. Planes that all rows share are copies of the tensor's.
    """
    if not callers.makes_shards():
        return like_plain(func, args, kwargs)
    make: Any = torch.zeros if func is torch.ops.aten.new_zeros.default else torch.empty
    tensor, size = args[0], tuple(args[1])
    options = {"device": kwargs.get("device") or tensor.device, "pin_memory": bool(kwargs.get("pin_memory"))}
    matrix = matrix_for(tensor, size)
    dtype = kwargs.get("dtype") or tensor.dtype
    if matrix is None or dtype != tensor.dtype:
        plain: Tensor = make(size, dtype=dtype, **options)
        return plain
    facts = tensor.LAYOUT.planes(*matrix)
    planes = {name: make(facts[name].shape, dtype=facts[name].dtype, **options) for name in tensor.store.planes}
    for name, plane in planes.items() if make is torch.zeros else ():
        if name in tensor.LAYOUT.zeros:
            tensor.LAYOUT.fill_with_zeros(name, plane)
    for name, plane in planes.items():
        # FSDP2 makes a rank's empty shard like this and copies nothing into it, so it must get what all shards share.
        if name in tensor.LAYOUT.shared and plane.shape == tensor.store.planes[name].shape:
            plane.copy_(tensor.store.planes[name])
    halo = Halo(0, matrix[0] - prod(size) // matrix[1])
    new: QuantizedTensor = type(tensor)(
        planes, size, dtype, matrix=matrix, orientations=tensor.store.declared, halo=halo
    )
    new.weight_name, new.padding = tensor.weight_name, NEW
    new.store.writes.trains, new.own_products, new.fused = tensor.store.writes.trains, tensor.own_products, tensor.fused
    return new


def empty_like(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """empty_like: of the class, on the device asked for; a plain tensor for another dtype, and for torch.nn.init.

    It is also plain if strides must be preserved: torch then needs room for intermediate results of an operator
    (hinge_embedding_loss), which codes would round.
    """
    if callers.initializes() or kwargs.get("memory_format") is torch.preserve_format:
        return like_plain(func, args, kwargs)
    tensor: QuantizedTensor = args[0]
    dtype = kwargs.get("dtype") or tensor.dtype
    device = kwargs.get("device") or tensor.device
    pin = bool(kwargs.get("pin_memory"))
    if dtype != tensor.dtype:
        return torch.empty(tensor.shape, dtype=dtype, device=device, pin_memory=pin)
    facts, planes = tensor.LAYOUT.planes(*tensor.store.matrix), {}
    for name in tensor.store.planes:
        # What all rows share (a history of amaxes) decides later scales, so it is never left uninitialized.
        make = torch.zeros if name in tensor.LAYOUT.shared else torch.empty
        planes[name] = make(facts[name].shape, dtype=facts[name].dtype, device=device, pin_memory=pin)
    return tensor.with_planes(planes)

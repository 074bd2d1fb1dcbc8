"""Dispatch handlers of all recipes: views, copies and products.

The table HANDLERS maps operators to handlers, which take (func, args, kwargs). Views are exact or refused
(views.py): writes to a dequantized copy of a view would be lost. Other operators without a handler fall back to a
dequantized copy, which strict() refuses.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from layoutc.ints.cuts import Halo
from layoutc.runtime import callers, strict
from layoutc.runtime.dispatch import broadcasts, merges, truncated, update_warnings
from layoutc.runtime.dispatch.views import InexactView, dim_of
from layoutc.runtime.errors import LayoutError, UnsupportedOperator
from layoutc.runtime.products import linear as linear_products
from layoutc.runtime.quantize import weights
from layoutc.runtime.sharding import registry, shards
from layoutc.runtime.storage import initial_values, pending_writes
from layoutc.runtime.storage.planes import ScatteredPlanes
from layoutc.runtime.weight import operators, staging
from layoutc.runtime.weight.padding import Padding
from layoutc.runtime.weight.tensor import QuantizedTensor, written

aten = torch.ops.aten
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


# -------------------------------------------------------------------------------------------------------------- aliases
def view(func: Any, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """view, _unsafe_view: any shape with as many elements, since their order does not change; for a transposed tensor,
    any leading dims. [] is one element."""
    tensor, size = args[0], list(args[1])
    if tensor.transposed and tuple(size[-2:]) != tuple(tensor.shape[-2:]):
        raise InexactView(func, tensor, "is transposed; a view of other last dims would not be contiguous")
    numel = tensor.numel()
    if size.count(-1) == 1 and (stated := -prod(size)):
        size[size.index(-1)] = numel // stated
    if prod(size) != numel or min(size, default=0) < 0:
        raise RuntimeError(f"{func}: shape {list(args[1])} is invalid for {tensor.label()} of {numel} elements")
    return tensor.alias(size)  # type: ignore[no-any-return]


def unsqueeze(func: Any, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """unsqueeze: a dim of size 1; of a transposed tensor, a leading one."""
    tensor, dim = args[0], args[1]
    shape = list(tensor.shape)
    shape.insert(dim_of(dim, len(shape) + 1), 1)
    return view(func, (tensor, shape), kwargs)


def squeeze(func: Any, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """squeeze: drops dims of size 1, all of them or the given ones."""
    tensor = args[0]
    named = args[1:] and ([args[1]] if isinstance(args[1], int) else args[1])
    dims = {dim_of(dim, tensor.dim()) for dim in named} if named else set(range(tensor.dim()))
    return view(func, (tensor, [n for d, n in enumerate(tensor.shape) if not (n == 1 and d in dims)]), kwargs)


def transpose(func: Any, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """t, transpose: swaps the last two dims, as a view."""
    tensor: QuantizedTensor = args[0]
    rank = tensor.dim()
    if rank == 2 and len(args) == 1 and tensor.shape[not tensor.transposed] == tensor.store.matrix[1]:
        return tensor.alias(reversed(tensor.shape), transposed=not tensor.transposed)  # the case of every linear layer
    dims = args[1:3] or (0, min(1, rank - 1))  # t of a vector is that vector
    first, second = sorted(dim_of(dim, rank) for dim in dims)
    if first == second:
        return tensor.alias()
    columns = tensor.shape[-1 - tensor.transposed]
    if (first, second) != (rank - 2, rank - 1) or columns != tensor.store.matrix[1]:
        raise InexactView(func, tensor, f"can only swap its last two dims, not {tuple(dims)}")
    shape = (*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2])
    return tensor.alias(shape, transposed=not tensor.transposed)


def permute(func: Any, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """permute (also T, mT): the identity, or the last two dims swapped."""
    tensor = args[0]
    order, rank = [dim_of(dim, tensor.dim()) for dim in args[1]], tensor.dim()
    if sorted(order) != list(range(rank)):
        raise RuntimeError(f"{func}: {tuple(args[1])} is not an order of the {rank} dims of {tensor.label()}")
    if order == list(range(rank)):
        return tensor.alias()  # type: ignore[no-any-return]
    if order[:-2] != list(range(rank - 2)):
        raise InexactView(func, tensor, f"can only swap its last two dims, not {tuple(order)}")
    return transpose(func, (tensor, -2, -1), kwargs)


def as_strided(func: Any, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """as_strided: only to the tensor's own size and strides with offset 0, which FSDP2 calls once."""
    tensor, size, stride = args[0], args[1], args[2]
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    if (tuple(size), tuple(stride), offset or 0) != (tuple(tensor.shape), tuple(tensor.stride()), 0):
        raise UnsupportedOperator(
            f"{func}: {tensor.label()} only has strides {tuple(tensor.stride())} at offset 0, "
            f"not size {tuple(size)}, strides {tuple(stride)}, offset {offset or 0}"
        )
    return tensor.alias()  # type: ignore[no-any-return]


def expand(func: Any, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """expand: only to the tensor's own shape."""
    tensor, size = args[0], args[1]
    wanted = [own if extent == -1 else extent for own, extent in zip(tensor.shape, size, strict=False)]
    if len(size) != tensor.dim() or wanted != list(tensor.shape):
        raise InexactView(func, tensor, f"can't be expanded to {tuple(size)}")
    return tensor.alias()  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------------------------------- copies
def clone(func: Any, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """clone: every plane copied, compact, scales and amax included."""
    tensor: QuantizedTensor = args[0]
    merges.note_read(args[:1])
    return tensor.compact_copy()


def to_copy(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """_to_copy: to another device moves every plane and keeps the class; to another dtype dequantizes.

    While a module is converted (`module.to(dtype)`), another dtype keeps the bytes, which then dequantize to it.
    """
    tensor: QuantizedTensor = args[0]
    dtype, device = kwargs.get("dtype") or tensor.dtype, kwargs.get("device") or tensor.device
    if dtype != tensor.dtype:
        if not (dtype.is_floating_point and callers.converts_a_module()):
            strict.count_dequantize(f"{func} to {dtype}", tensor.label())
            values = tensor.dequantize(dtype if dtype.is_floating_point else None)
            update_warnings.note_values(tensor, values)
            return values.to(device, dtype)
        if device == (tensor := tensor.alias(dtype=dtype)).device:
            return tensor
    options = {"device": device, "non_blocking": kwargs.get("non_blocking", False)}
    planes = tensor.map_planes(lambda plane: aten._to_copy(plane, **options))
    if kwargs.get("pin_memory"):
        planes = {name: plane.pin_memory() for name, plane in planes.items()}
    moved = tensor.with_planes(planes)
    if not registry.remember_copy(moved, tensor):
        initial_values.carry(moved.store, tensor.store)
    initial_values.carry_base(moved.store, tensor.store)
    return moved


def pin_memory(func: Any, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """_pin_memory: pins every plane."""
    tensor: QuantizedTensor = args[0]
    pinned = tensor.with_planes(tensor.map_planes(lambda plane: plane.pin_memory()))
    initial_values.carry(pinned.store, tensor.store)
    return pinned


def record_stream(func: Any, args: Args, kwargs: Kwargs) -> None:
    """record_stream on every plane, scales and amax included; changes nothing."""
    for plane in args[0].store.planes.values():
        plane.record_stream(args[1])


def equal(func: Any, args: Args, kwargs: Kwargs) -> bool:
    """equal: the same recipe, shape and bytes; for a plain tensor, the same values."""
    a, b = args[0], args[1]
    if type(a) is not type(b) or a.store.planes.keys() != b.store.planes.keys():
        plain = [x.dequantize() if isinstance(x, QuantizedTensor) else x for x in (a, b)]
        return bool(torch.equal(plain[0], plain[1].to(plain[0].dtype)))
    same = (tuple(a.shape), a.transposed, _phase(a)) == (tuple(b.shape), b.transposed, _phase(b))
    pairs = ([x.entries(name).contiguous().flatten().view(torch.uint8) for x in (a, b)] for name in a.store.planes)
    return same and all(torch.equal(*pair) for pair in pairs)


def _phase(tensor: QuantizedTensor) -> tuple[int, int, int]:
    """(rows, columns, offset in a block): equal for tensors of one recipe whose planes correspond entry by entry."""
    return tensor.store.rows, tensor.store.matrix[1], tensor.store.halo.before


def is_set_to(func: Any, args: Args, kwargs: Kwargs) -> bool:
    """is_set_to: the same memory under the same shape and strides; false for a plain tensor."""
    a, b = args
    if (
        type(a) is not type(b)
        or (a.shape, a.stride()) != (b.shape, b.stride())
        or a.store.planes.keys() != b.store.planes.keys()
    ):
        return False
    return all(plane.is_set_to(b.store.planes[name]) for name, plane in a.store.planes.items())


def zero_(func: Any, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """zero_: quantizes zeros; for a part, zeroes every byte that it does not share. Exact zeros either way."""
    tensor: QuantizedTensor = args[0]
    truncated.check_elements(tensor.label())
    tensor.check_writable()
    before = initial_values.around(tensor.store)
    row_sharding = None if tensor.is_meta else shards.row_sharding(tensor)
    is_cut = row_sharding is not None and row_sharding.splits_blocks(tensor.LAYOUT)
    if is_cut or (tensor.store.halo.rows and not tensor.is_meta):
        weights.requantize_(tensor, torch.zeros(tensor.shape, device=tensor.device))
    elif not tensor.store.common and not tensor.transposed and not tensor.is_meta:
        zeros = torch.zeros(tensor.shape, device=tensor.device)
        matrix = zeros.view(tensor.store.matrix)
        shared = operators.shared_amax(type(tensor), matrix) if tensor.LAYOUT.shares_amax else None
        weights.quantize(type(tensor), zeros, out=tensor, amax=shared, restart=True)
    else:
        for name, plane in tensor.store.planes.items():
            if name not in tensor.store.common:
                tensor.LAYOUT.fill_with_zeros(name, plane)
        written([tensor])
    initial_values.zeroed(tensor.store, before)
    return tensor


def like_plain(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """zeros_like, ones_like, full_like, rand_like, randn_like, new_*: plain for users, of the class for stagers."""
    tensor = args[0]
    options = {key: value for key, value in kwargs.items() if value is not None and key != "memory_format"}
    options.setdefault("dtype", tensor.dtype)
    options.setdefault("device", tensor.device)
    options.pop("layout", None)
    if func is aten.zeros_like.default and (room := staging.room_for(tensor, options["device"])) is not None:
        return room
    return func(torch.empty(tensor.shape, device="meta", dtype=tensor.dtype), *args[1:], **options)  # type: ignore[no-any-return]


LIKE = (
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.rand_like.default, aten.randn_like.default),
)


def copy_(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """copy_ in all directions. Checks everything before it writes the first byte; returns the destination.

    Same recipe: copies planes, byte for byte. A piece whose scales also cover other rows, and would change them, waits
    for those rows (`pending_writes`). Plain into quantized: quantizes. Quantized into plain: dequantizes. Into another
    recipe: dequantizes to fp32 and quantizes. Raises LayoutError for another shape.
    """
    target, source = args[0], args[1]
    if not isinstance(target, QuantizedTensor):
        as_sent = (
            source.sent is not None or not target.is_floating_point()
        )  # the other ranks have the values in its own dtype
        if callers.initializes() and (values := source.initial_values(target.dtype)) is not None:
            return target.copy_(values)  # type: ignore[no-any-return]
        return target.copy_(source.dequantize(None if as_sent else target.dtype))  # type: ignore[no-any-return]
    if tuple(target.shape) != tuple(source.shape):
        raise LayoutError(f"{func}: {target.label()} can't take a tensor of shape {tuple(source.shape)}")
    target.refuse_gathered()
    source = broadcasts.arrived(target, source)
    if isinstance(source, QuantizedTensor):
        if source.store is target.store and source.transposed == target.transposed:  # as load_state_dict(state_dict())
            return target
        same = source.LAYOUT.layout_id == target.LAYOUT.layout_id
        if same and isinstance(target.store.planes, ScatteredPlanes):
            return _copy_runs(func, target, source, target.store.planes.runs())
        padded = target.padding.first_rows_of
        new = padded() if padded is not None and target.store.writes.count == 0 else None
        if same and new is not None and (source.store.halo.rows or target.store.halo.rows):
            return _take_over(target, new, source)
        if same and source.store.halo[:2] != target.store.halo[:2]:
            _check_same_cut(func, target)
        if same and (_phase(source), source.transposed) == (_phase(target), target.transposed):
            return _copy_planes(target, source)
        strict.count_dequantize(f"{func} from {source.LAYOUT.name} to {target.LAYOUT.name}", target.label())
        source = source.dequantize(torch.float32)
    if target.transposed:
        raise UnsupportedOperator(f"{func}: {target.label()} is transposed; copy into the weight itself")
    update_warnings.note_average(target)
    merges.write(target, source.to(target.device))
    return target


def _copy_runs(func: Any, target: QuantizedTensor, source: QuantizedTensor, runs: Any) -> QuantizedTensor:
    """copy_ into rows that are not adjacent: one run of adjacent rows after the other."""
    source = clone(aten.clone.default, (source,), {}) if isinstance(source.store.planes, ScatteredPlanes) else source
    matrix = view(func, (source, (-1, target.shape[-1])), {})
    for run, rows in zip(runs, matrix.split(runs[0].shape[0]), strict=True):  # type: ignore[no-untyped-call]
        copy_(func, (run, rows), {})
    return target


def _check_same_cut(func: Any, target: QuantizedTensor) -> None:
    """Raises LayoutError for a target shard that cuts blocks and a source with other cuts, before any rank waits.

    The source's bytes don't fit. Requantizing is collective, and ranks whose shards end with blocks would not join.
    """
    row_sharding = shards.row_sharding(target)
    if row_sharding is not None and row_sharding.splits_blocks(target.LAYOUT):
        raise LayoutError(
            f"{func}: {target.label()} is a shard whose cuts fall inside blocks, and the source has other cuts; "
            "copy the same rows of the whole quantized weight, or plain values on all ranks"
        )


def _copy_planes(target: QuantizedTensor, source: QuantizedTensor) -> QuantizedTensor:
    target.check_writable()
    into, given = target.store, source.store
    missing = [name for name in into.planes if name not in given.planes]
    if missing:
        raise LayoutError(f"copy_: {source.label()} lacks {', '.join(missing)}, which the target holds")
    pairs = {name: (target.entries(name), source.entries(name)) for name in into.planes}
    for name, (ours, theirs) in pairs.items():
        if ours.shape != theirs.shape:
            raise LayoutError(
                f"copy_: {name} is {tuple(ours.shape)} in the target, {tuple(theirs.shape)} in the source"
            )
    if into.common and into.part is None and any(not torch.equal(*pairs[name]) for name in into.common):
        raise LayoutError(
            f"copy_: {target.label()} is a part of a weight and shares its {', '.join(sorted(into.common))} with "
            "the rest, but the source has different ones; copy into the whole weight"
        )
    if needs := pending_writes.needs_of(into, given):
        write = partial(_write_planes, target, source)
        for piece in pending_writes.hold(into, given, needs, write, target.label()):
            piece.write()
        return target
    _write_planes(target, source)
    return target


def _write_planes(target: QuantizedTensor, source: QuantizedTensor) -> None:
    before = initial_values.around(target.store)
    for name in target.store.planes:
        target.entries(name).copy_(source.entries(name))
    written([target])
    initial_values.carry(target.store, source.store, before)


def _take_over(target: QuantizedTensor, new: QuantizedTensor, source: QuantizedTensor) -> QuantizedTensor:
    """Gives a new tensor and its first rows copies of the planes of a source that begins or ends inside a block.

    FSDP2 copies a shard into a new tensor of the padded size, and cuts the shard's rows out of that again (see
    Padding). The new tensor can't know where in a block its rows begin, nor that the weight ends inside one.
    """
    pin = not new.is_meta and all(plane.is_pinned() for plane in new.store.planes.values())
    planes = source.map_planes(lambda plane: plane.to(new.device, copy=True, memory_format=torch.contiguous_format))
    planes = {name: plane.pin_memory() for name, plane in planes.items()} if pin else planes
    for tensor in (target, new):
        tensor.store.planes.clear()
        tensor.store.planes.update(planes)
        tensor.store.matrix, tensor.store.halo = source.store.matrix, Halo(*source.store.halo[:2])
    new.padding = Padding(rows=target.shape[0])
    written([target])
    initial_values.carry(target.store, source.store)
    return target


# ------------------------------------------------------------------------------------------------------------- products
def product(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """linear, mm, bmm, addmm, baddbmm, mv, matmul, grouped_mm: dequantizes to the activation's dtype and multiplies.

    The contracted axis decides the orientation: k reads rowwise values, m columnwise ones. mm and addmm are in low
    precision if the mode says so. Only inference mode dispatches linear as a whole.
    """
    if not kwargs and (made := linear_products.matrix_product(func, args)) is not None:
        return made
    first = 1 if func in WITH_BIAS else 0
    dtype = next((a.dtype for a in args if isinstance(a, Tensor) and not isinstance(a, QuantizedTensor)), None)
    plain = [
        _operand(a, i == first or func is aten.linear.default, dtype) if isinstance(a, QuantizedTensor) else a
        for i, a in enumerate(args)
    ]
    return func(*plain, **kwargs)  # type: ignore[no-any-return]


WITH_BIAS = (aten.addmm.default, aten.baddbmm.default, aten.addmv.default)
PRODUCTS = (
    *(aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default),
    aten._grouped_mm.default,
    *WITH_BIAS,
)


def _operand(tensor: QuantizedTensor, is_left: bool, dtype: torch.dtype | None) -> Tensor:
    """Left operands contract their last dim, and so do weights of linear; right operands the one before it."""
    contracts_k = is_left != tensor.transposed
    return tensor.values_of("rowwise" if contracts_k else "columnwise", dtype or tensor.dtype)

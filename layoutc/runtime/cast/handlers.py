"""Dispatch handlers of CastOnGather, the same for every recipe. A handler takes (func, args, kwargs).

The class's docstring says which operators see the values, and which the quantized weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from layoutc.ints.sizes import cdiv
from layoutc.runtime import callers
from layoutc.runtime.cast.copied_views import CopiedView
from layoutc.runtime.cast.shared_amax import Agreed
from layoutc.runtime.cast.tensor import CastOnGather, View, rebuild_cast
from layoutc.runtime.dispatch import cuts_and_joins, einsum, table
from layoutc.runtime.dispatch import handlers as dispatch
from layoutc.runtime.dispatch.fallback import outputs_of
from layoutc.runtime.dispatch.handlers import Args, Kwargs
from layoutc.runtime.dispatch.written_by_ranks import WRITES, refuse_flat_parameters
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.product_mode import Settings, read_as
from layoutc.runtime.products import autograd, experts
from layoutc.runtime.sharding import meshes, registry, shards
from layoutc.runtime.torch_private import c10d_functional, in_backward, schema_of, tree_leaves, tree_map
from layoutc.runtime.weight.tensor import QuantizedTensor

aten = torch.ops.aten
c10d = torch.ops.c10d


def _detach(func: Any, args: Args, kwargs: Kwargs) -> CastOnGather:
    """An alias outside the model, unless it becomes a parameter or represents one in a traced graph."""
    alias: CastOnGather = args[0].alias()
    keeps = callers.keeps_the_weight()
    alias._detached = alias._detached or not keeps
    if keeps and alias._copied is not None:  # a parameter is no copy
        alias.own_products = alias._copied.products
    return alias


def _view(func: Any, args: Args, kwargs: Kwargs) -> CastOnGather | list[CastOnGather]:
    """A view of the values. It records how it was made, so that a model can view the quantized weight."""
    tensor, *rest = args
    shown = func(tensor._plain, *rest, **kwargs)
    if isinstance(shown, Tensor):
        return tensor.alias(View(func, tuple(rest)), shown)  # type: ignore[no-any-return]
    pieces = [tensor.alias(View(func, tuple(rest), index), piece) for index, piece in enumerate(shown)]
    if func in _CUTS and (group := callers.group_of_parts()) is not None:
        _cut_for_ranks(tensor, pieces, group)
    return pieces


def _refuse_gathers_of_values(tensor: CastOnGather) -> None:
    """Raises LayoutError if a model gathers a DTensor of plain values: layers would multiply them unquantized."""
    if callers.redistributes():
        raise LayoutError(
            f"redistribute: {tensor.label()}, would be gathered as plain values, which layers would multiply: call "
            f'fully_shard(model); or, for SimpleFSDP, layoutc.quantize_(model, "{tensor.LAYOUT.name}") in place of '
            "cast_on_gather_; for the plain values, call full_tensor() or weight.detach().redistribute(...)"
        )


def _cut_for_ranks(tensor: CastOnGather, pieces: list[CastOnGather], group: dist.ProcessGroup) -> None:
    """Has the parts that DTensor cuts for ranks share the amax of the whole weight, where a scale depends on it.

    Raises LayoutError if tensor parallelism cuts blocks, on all ranks: each of them sees the same parts. Others may cut
    them to move values; such a part is refused when it is quantized.
    """
    name, shape = tensor.weight_name or "a weight", tensor.shape
    for dim, (size, each) in enumerate(zip(shape, pieces[0].shape, strict=True)):
        if not 0 < each < size:
            continue
        peers, refusal = tensor.peers, tensor.refusal
        try:
            shards.check_parts(tensor.LAYOUT, shape, dim, cdiv(size, each), name)
            if meshes.shares_amax(tensor.LAYOUT, shape, dim, name):
                peers = (*(peers or ()), group.group_name)
        except LayoutError as error:
            if callers.parallelizes():
                raise
            refusal = str(error)
        for piece in pieces:
            piece.peers, piece.refusal = peers, refusal


def _transpose(func: Any, args: Args, kwargs: Kwargs) -> CastOnGather:
    """t, transpose, permute."""
    tensor, *rest = args
    shown, rank = func(tensor._plain, *rest), tensor.dim()
    order = list(range(rank))
    if func is aten.permute.default:
        order = [dim % rank for dim in rest[0]]
    elif rank > 1:
        first, second = (dim % rank for dim in rest or (0, 1))
        order[first], order[second] = order[second], order[first]
    transposed = rank > 1 and order[-2:] == [rank - 1, rank - 2]
    return tensor.alias(View(func, tuple(rest)), shown, transposed=transposed)  # type: ignore[no-any-return]


def _new(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """new_zeros, new_empty: plain. For torch.distributed, of the class, except for another dtype or a vector.

    FSDP2 makes a shard's tensor by new_zeros. For short shards, it does so again at the first use and after a load. The
    new tensor shares the agreed amax; otherwise ranks would no longer agree.
    """
    tensor = args[0]
    made: Tensor = func(tensor._plain, *args[1:], **kwargs)
    if not callers.makes_shards() or made.dtype != tensor.dtype or (made.dim() < 2 and made.numel()):
        return made
    new: CastOnGather = tensor._fresh(made)
    new._agreed = tensor._agreed
    return new


def _empty_like(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """empty_like: of the class; plain for another dtype or a vector, and for torch.nn.init."""
    tensor = args[0]
    made: Tensor = func(tensor._plain, *args[1:], **kwargs)
    is_plain = made.dtype != tensor.dtype or (made.dim() < 2 and made.numel()) or callers.initializes()
    return made if is_plain else tensor._fresh(made)


def _copied(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """clone, _to_copy, _pin_memory: of the class in any floating-point dtype; in another dtype, a plain tensor.

    A copy of a view has its own values, but no blocks. A copy in another dtype has rounded values; in a model it is the
    dequantized weight in that dtype.
    """
    tensor: CastOnGather = args[0]
    made: Tensor = func(tensor._plain, *args[1:], **kwargs)
    if not made.is_floating_point():
        return made
    moved = tensor._fresh(made)
    converts = made.dtype != tensor.dtype and not callers.converts_a_module()
    if converts:
        _refuse_gathers_of_values(tensor)
    is_view = bool(tensor._views) or (tensor._copied is not None and not isinstance(tensor, nn.Parameter))
    if (converts or is_view) and _is_in_a_model(tensor):
        moved._copied = CopiedView(tensor, moved)
        moved.own_products = Settings("dequantize", "layer") if converts else moved.own_products
        return moved
    if made.dtype == tensor.dtype and made.numel() == tensor.store["values"].numel():
        moved._agreed = Agreed.restored(tensor._agreed.snapshot(tensor), moved)
    if registry.remember_copy(moved, tensor):
        moved._agreed = tensor._agreed
        moved._source = tensor if tensor._source is None else tensor._source
    return moved


def _is_in_a_model(tensor: CastOnGather) -> bool:
    """True for an unsharded weight and its views, except those that are cut for ranks."""
    return not tensor.is_detached and registry.find(tensor) is None and not callers.is_called_from("torch.distributed")


def _product(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """Matrix products (mm to grouped_mm): with values quantized along the contracted axis."""
    first = 1 if func in dispatch.WITH_BIAS else 0
    operands = []
    for position, operand in enumerate(args):
        if isinstance(operand, CastOnGather):
            is_left = position == first or func is aten.linear.default
            if operand.is_converted:  # like a gathered weight: both passes multiply the same values
                operands.append(_values(func, (operand,), {}))
                continue
            wanted = "rowwise" if is_left != operand.is_transposed else "columnwise"
            operand = operand.in_use((read_as(operand, wanted),))
        operands.append(operand)
    return dispatch.product(func, tuple(operands), kwargs)


def _in_low_precision(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Low-precision products of a linear layer or of experts: they get the weight quantized."""
    return _LOW_PRECISION[func](func, (args[0], args[1].quantize(), *args[2:]), kwargs)


def _values(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """The values that a model multiplies with, for a product of values."""
    quantized = args[0].in_use()
    return quantized.dequantize() if isinstance(quantized, QuantizedTensor) else quantized


def other(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Operators without a handler: on the quantized weight if a model uses it, else on the values."""
    if func._can_decompose():
        decomposed = func.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
    if func is aten.cat.default:
        refuse_flat_parameters(args[0])
    if func.namespace == c10d_functional.name and schema_of(func).name.endswith(_GATHERS):
        for tensor in tree_leaves(args[0]):
            if isinstance(tensor, CastOnGather):
                _refuse_gathers_of_values(tensor)
    if func is aten.copy_.default and isinstance(args[1], CastOnGather) and not isinstance(args[0], CastOnGather):
        args[1].check_saved()
    targets = _written(func, args, kwargs)
    everything = bool(targets) or _reads_values(func, args, kwargs)
    in_formula = in_backward() and callers.is_backward_of_a_model()

    def seen(value: Any) -> Any:
        if not isinstance(value, CastOnGather):
            return value
        return value._plain if everything or (value.is_detached and not in_formula) else value.in_use()

    result = func(*tree_map(seen, args), **tree_map(seen, kwargs))
    if not (func is aten.copy_.default and _moves(*args[:2])):
        for agreed in {id(target._agreed): target._agreed for target in targets}.values():
            agreed.writes += 1
    back = {id(target._plain): target for target in targets}
    return tree_map(lambda value: back.get(id(value), value), result)


def _moves(target: Any, source: Any) -> bool:
    """True if a copy_ moves values into a tensor made to hold them, as FSDP2 does with shards."""
    both_cast = isinstance(target, CastOnGather) and isinstance(source, CastOnGather)
    return both_cast and target._agreed is source._agreed and target.store is not source.store


def _written(func: Any, args: Args, kwargs: Kwargs) -> list[CastOnGather]:
    """The tensors that an operator writes. Schemas of collectives don't state them."""
    if func in WRITES or func in (c10d.broadcast_.default, c10d.scatter_.default):
        return [tensor for tensor in tree_leaves(args[0]) if isinstance(tensor, CastOnGather)]
    if not schema_of(func).is_mutable:
        return []
    return [tensor for tensor in outputs_of(func, args, kwargs) if isinstance(tensor, CastOnGather)]


def _reads_values(func: Any, args: Args, kwargs: Kwargs) -> bool:
    """True for an operator that is never a model's use of the weight, whichever alias it is called on."""
    if func in _COPIES or "c10d" in func.namespace:
        return True
    if func is aten.cat.default and callers.is_called_from(_VECTORS):
        return True
    casts = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, CastOnGather)]
    if all(registry.find(tensor) is not None for tensor in casts):  # a model uses gathered weights, never shards
        return True
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    if in_backward() and callers.is_backward_of_a_model():
        return False
    name = schema_of(func).name.removeprefix("aten::")
    if name == "cat":
        return all(tensor.dim() == 1 for tensor in casts)
    return torch.Tag.pointwise in func.tags or name.startswith(("_foreach_", "_fused_")) or name in _REDUCTIONS


_COPIES = (
    aten.copy_.default,
    aten.view.dtype,
    aten.equal.default,
    aten.is_pinned.default,
    aten.record_stream.default,
    aten._local_scalar_dense.default,
)
_GATHERS = ("all_gather_into_tensor", "all_gather_into_tensor_coalesced")
_VECTORS = "torch.nn.utils.convert_parameters"  # flat copies that callers write back into parameters
_CUTS = (aten.split.Tensor, aten.split_with_sizes.default)
_LOW_PRECISION = experts.HANDLERS
_REDUCTIONS = (
    *("all", "amax", "amin", "aminmax", "any", "argmax", "argmin", "count_nonzero", "linalg_vector_norm", "max"),
    *("mean", "median", "min", "norm", "prod", "std", "sum", "var"),
)
_AS = {  # by the operator's handler of a quantized weight
    dispatch.view: _view,
    cuts_and_joins.new: _new,
    cuts_and_joins.empty_like: _empty_like,
    dispatch.clone: _copied,
    dispatch.to_copy: _copied,
    dispatch.pin_memory: _copied,
    dispatch.like_plain: dispatch.like_plain,
    dispatch.product: _product,
}
HANDLERS: dict[Any, Callable[..., Any]] = {
    **{func: _view for func in table.HANDLERS if getattr(func, "is_view", False)},
    **{func: _AS[handler] for func, handler in table.HANDLERS.items() if handler in _AS},
    aten.alias.default: lambda func, args, kwargs: args[0].alias(),
    aten.detach.default: _detach,
    **dict.fromkeys((aten.t.default, aten.transpose.int, aten.permute.default), _transpose),
    **dict.fromkeys(_LOW_PRECISION, _in_low_precision),
    **dict.fromkeys(einsum.HANDLERS, _values),
    None: other,
}


def register_cast(cls: type[CastOnGather]) -> type[CastOnGather]:
    """Decorator for generated classes: sets the recipe's layout, and makes them known to
    torch.load(weights_only=True)."""
    cls.LAYOUT, cls.HANDLERS = cls.QUANTIZED.LAYOUT, HANDLERS
    if cls.LAYOUT.products is not None:
        cls.__torch_function__ = classmethod(autograd.torch_function)
    torch.serialization.add_safe_globals([cls, rebuild_cast, (rebuild_cast, "layoutc.runtime.casting.rebuild")])
    return cls

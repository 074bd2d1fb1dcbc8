"""CastOnGather: a weight that stays in high precision and is quantized each time it is gathered or multiplied.

Optimizers, initializers and checkpoints see its values. A model sees the quantized weight: FSDP2 gathers planes that
are quantized for this pass only. Products without FSDP2 use the quantized values too, so one process computes the same
as many. In a model, a view of the values means the same view of the quantized weight.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from layoutc.ints.cuts import NO_HALO
from layoutc.runtime import callers, product_mode, strict
from layoutc.runtime.cast import gather_group, into_row
from layoutc.runtime.cast.copied_views import CopiedView, Values
from layoutc.runtime.cast.shared_amax import Agreed
from layoutc.runtime.dispatch.views import InexactView
from layoutc.runtime.errors import LayoutError, ValuesAlone
from layoutc.runtime.facts import Layout
from layoutc.runtime.fsdp2 import all_gather
from layoutc.runtime.product_mode import Settings
from layoutc.runtime.quantize.block_edges import with_halos
from layoutc.runtime.quantize.weights import as_matrix
from layoutc.runtime.sharding import registry, shards
from layoutc.runtime.sharding.shards import RowSharding
from layoutc.runtime.torch_private import no_torch_function, passed_over_by_compilers, saving_hooks, traced
from layoutc.runtime.weight import flattening, operators
from layoutc.runtime.weight.plane_tensor import deep_copied
from layoutc.runtime.weight.reported_memory import ReportedMemory
from layoutc.runtime.weight.tensor import QuantizedTensor, in_inference_mode

_set_data: Callable[[Tensor, Tensor], None] = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class View(NamedTuple):
    """An operator that made a view, and its arguments after the tensor."""

    func: Any
    args: tuple[Any, ...]
    output: int | None = None  # which of its outputs, if the operator returns a list


class CastOnGather(ReportedMemory, torch.Tensor):
    """The plain values of a weight, or a view of them. `QUANTIZED` is the class that they are quantized to.

    Which operators see the values, and which the quantized weight:

    - Products see the quantized weight, in the orientation that they contract, and of any alias or view.
    - Operators that write, copy, convert or send see the values, and so does every operator on a shard that FSDP2
      holds. In a model, a copy of a view means the view.
    - Other operators see the values of a detached alias (`.data`, `.detach()`) and of its views, in any grad mode.
    - On the parameter itself and its views, all operators see the values in an optimizer's step, and pointwise
      operators and reductions under no_grad, as averages need. All others, and those in a model's backward, see the
      quantized weight, which is counted as an implicit dequantize.
    """

    QUANTIZED: ClassVar[type[QuantizedTensor]]
    LAYOUT: ClassVar[Layout]
    HANDLERS: ClassVar[Mapping[Any, Callable[..., Any]]]
    INTO_ROW = into_row.IntoRow  # quantizes such weights into a rank's row

    store: Values  # {"values": all of them}, a dict that aliases and views share
    _plain: Tensor  # the values of this view
    _views: tuple[View, ...]  # the views from all values to these
    transposed: bool
    _detached: bool  # an alias outside the model, or a view of one
    weight_name: str | None
    _agreed: Agreed  # shared by aliases, views, and tensors that new_zeros makes for shards
    peers: tuple[str, ...] | None = None  # as of a QuantizedTensor
    refusal: str | None = None  # of a part that can't be quantized by itself: why
    own_products: Settings | None  # as of a QuantizedTensor
    _source: CastOnGather | None  # the shard, of a copy that FSDP2 gathers from
    _copied: CopiedView | None  # of a copy of a view of a weight

    @staticmethod
    def __new__(cls, values: Tensor, *, requires_grad: bool = False, **others: Any) -> Self:
        """Wraps values without copying. Raises ValueError for a recipe that weights can't have.

        Packages that recreate a parameter (accelerate's init_empty_weights) pass its copy as values, and the attributes
        of the old one; the new one keeps its name and its per-weight mode.
        """
        cls.QUANTIZED.LAYOUT.check_weights()
        plain = values._plain if others and isinstance(values, CastOnGather) else values
        made = cls._wrap(Values(values=plain), plain, requires_grad=requires_grad)
        made.weight_name, made.own_products = others.get("weight_name"), others.get("own_products")
        if others.get("_is_param"):  # which makes it an nn.Parameter
            made._is_param = True
        return made

    @classmethod
    def _wrap(cls, planes: Values, values: Tensor, *, requires_grad: bool = False, strides: Any = None) -> Self:
        self: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride() if strides is None else strides,
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
            requires_grad=requires_grad,
        )
        self.store, self._plain = planes, values
        self._views, self.transposed, self._detached, self.weight_name = (), False, False, None
        self._agreed, self._source, self.own_products, self._copied = Agreed(), None, None, None
        return self

    def alias(self, view: View | None = None, values: Tensor | None = None, *, transposed: bool = False) -> Self:
        """The same values, or those of a view."""
        other = self._wrap(self.store, self._plain if values is None else values)
        other._views = self._views if view is None else (*self._views, view)
        other.transposed, other._detached = self.transposed != transposed, self.is_detached
        other.weight_name, other._agreed, other._source = self.weight_name, self._agreed, self._source
        other.own_products, other._copied = self.own_products, self._copied
        other.peers, other.refusal = self.peers, self.refusal
        return other

    def _fresh(self, values: Tensor) -> Self:
        """Other values with the same metadata."""
        other = type(self)(values)
        other.weight_name, other._detached, other.own_products = self.weight_name, self.is_detached, self.own_products
        other._agreed.fused, other.peers, other.refusal = self._agreed.fused, self.peers, self.refusal
        return other

    # ------------------------------------------------------------------------------------------------------- what it is
    @property
    def plain(self) -> Tensor:
        """The values as a plain tensor that shares memory with this one, so that a write to it changes the weight."""
        whole, shown = self.store["values"].detach(), self._plain
        # A view of all values: a view that was made below autograd would have its own version counter.
        return whole.as_strided(shown.shape, shown.stride(), shown.storage_offset())

    @property
    def is_detached(self) -> bool:
        """True for `.data`, `.detach()`, and views and copies of those; never for a parameter."""
        return self._detached and not isinstance(self, nn.Parameter)

    @property
    def orientations(self) -> tuple[str, ...]:
        """All of the recipe's: each can be made from the values."""
        return self.LAYOUT.orientations

    def quantize(self, orientations: Sequence[str] | None = None) -> QuantizedTensor:
        """The weight that a model multiplies with: the current values quantized, or this view of that.

        orientations: those to quantize; default: all. For a shard that FSDP2 holds, the result is its rows of the whole
        quantized weight; that is collective if shards share an amax that was not precomputed.
        Raises ValueError for shapes that the recipe refuses, UnsupportedOperator for a view that cuts a block.
        """
        chosen = self.LAYOUT.orientations if orientations is None else tuple(orientations)
        if self.store.is_apart and self._agreed.writes and traced(self._plain):
            raise LayoutError(
                f"{self.label()} is a view that a compiled function was given, has written and multiplies: give it the "
                "weight, and view that in the function"
            )
        with torch.no_grad():
            if registry.find(self) is not None:
                return self._quantized(self._plain, chosen)
            if (copied := self._copied_view()) is not None:
                whole = copied.quantize(chosen).alias(dtype=self.dtype)
                whole.own_products = self.own_products
                return self._viewed(whole)  # type: ignore[return-value]
            return self._viewed(self._quantized(self.store["values"], chosen))  # type: ignore[return-value]

    def in_use(self, orientations: Sequence[str] | None = None) -> Tensor:
        """What a model multiplies with: quantize(), or this view of its values if codes have no such view.

        Raises ImplicitDequantize under strict() for the latter.
        """
        if not torch.is_grad_enabled() and callers.steps():
            return self._plain  # a step writes what it computes from them
        try:
            return self.quantize(orientations)
        except InexactView:
            first = self.LAYOUT.orientations[:1]
            copied = self._copied_view()
            whole: Tensor = self._quantized(self.store["values"], first) if copied is None else copied.in_use(first)
            if isinstance(whole, QuantizedTensor):
                strict.count_dequantize(str(self._views[-1].func), self.label())
                whole = whole.dequantize()
            return self._viewed(whole.to(self.dtype).contiguous())

    @property
    def is_transposed(self) -> bool:
        """Whether rows of the quantized weight are its columns."""
        copied = self._copied_view() if self._copied is not None else None
        return self.transposed != (copied is not None and copied.transposed)

    @property
    def is_converted(self) -> bool:
        """Whether it is a copy of a weight in another dtype."""
        copied = self._copied_view() if self._copied is not None else None
        return copied is not None and copied.dtype != self.dtype

    def _copied_view(self) -> CastOnGather | None:
        """The view that this is a copy of, if any; a parameter is an independent weight."""
        return None if self._copied is None or isinstance(self, nn.Parameter) else self._copied.view(self)

    def _viewed(self, whole: Tensor) -> Tensor:
        """The view of `whole` that this tensor is of all values."""
        for func, args, index in self._views:
            whole = func(whole, *args) if index is None else func(whole, *args)[index]
        return whole

    def _quantized(self, values: Tensor, orientations: tuple[str, ...]) -> QuantizedTensor:
        """Quantizes values, with the amax that the weight's shards share."""
        row_sharding, matrix = shards.row_sharding(self), self._matrix_of(values)
        if self.refusal is not None and registry.find(self) is None:
            raise LayoutError(self.refusal)
        amax, extra = self._agreed.decide(self, matrix, values.shape)
        (matrix,) = with_halos([self.LAYOUT], [matrix], [row_sharding])
        planes = operators.quantize(self.QUANTIZED, matrix, amax, orientations) | extra
        return self.quantized(planes, matrix, orientations, row_sharding, values)

    def quantized(
        self,
        planes: dict[str, Tensor],
        matrix: Tensor,
        orientations: tuple[str, ...],
        row_sharding: RowSharding | None,
        values: Tensor | None = None,
    ) -> QuantizedTensor:
        """A quantized matrix's planes as a tensor. values: those of the matrix without its halo; default: all."""
        values, halo = self.store["values"] if values is None else values, NO_HALO
        if row_sharding is not None:
            halo = row_sharding.cuts.halo(row_sharding.rank, self.LAYOUT.block_rows)
        m, k = matrix.shape
        made = self.QUANTIZED(planes, values.shape, values.dtype, matrix=(m, k), orientations=orientations, halo=halo)
        made.weight_name, made.own_products = self.weight_name, self.own_products
        return made

    def as_matrix(self) -> Tensor:
        """The values as (m, k). Raises ValueError for shapes that the recipe does not take."""
        return self._matrix_of(self._plain)

    def _matrix_of(self, values: Tensor) -> Tensor:
        shape = tuple(values.shape)
        if values.numel() and registry.find(self) is None:  # a shard may have any number of rows
            self.LAYOUT.check_shape(shape, self.weight_name or "weight")
        return as_matrix(values, (prod(shape[:-1]), shape[-1]))

    def label(self) -> str:
        return f"{self.weight_name or 'a weight'} of shape {tuple(self.shape)}, cast to {self.LAYOUT.name}"

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Recipe, shape and dtype; never reads values."""
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}{grad})"

    # ------------------------------------------------------------------------------------------------ FSDP2 all-gather
    @registry.pre_hook
    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Any]:
        """Quantizes the shard for the pass, and sends what the recipe's tensor sends."""
        all_gather.decide(self)
        return gather_group.send(self, mesh)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole quantized weight, or its values, made as by the recipe's tensor."""
        recipe: Any = self.QUANTIZED
        return recipe.fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, out=out)  # type: ignore[no-any-return]

    # -------------------------------------------------------------------------------------- what torch asks of wrappers
    @property
    def data(self) -> Self:
        """An alias that autograd does not follow. Assigning replaces the values, their dtype and shape."""
        with torch.no_grad():
            alias = self.alias()
        alias._detached = True
        return alias

    @data.setter
    def data(self, value: Tensor) -> None:
        new = value.alias() if isinstance(value, CastOnGather) else self._fresh(value.detach())
        _set_data(self, new)
        self.store, self._plain, self._agreed = new.store, new._plain, new._agreed
        self._views, self.transposed, self._copied = new._views, new.transposed, new._copied

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        """The names of the tensor of all values and, for a view, of its own; and the views from one to the other.

        A graph can write to what it is given, and not to a view of that.
        """
        products, part = (self.own_products, product_mode.setting(self)), (self.peers, self.refusal)  # see flattening
        _, views = self._held
        names = ["_whole", "_plain"] if views else ["_whole"]
        return names, (views, self.transposed, self.is_detached, self.weight_name, part, *products)

    @property
    def _whole(self) -> Tensor:
        return self._held[0]

    @property
    def _held(self) -> tuple[Tensor, tuple[View, ...]]:
        """All values, and the views from there. Shards stand for themselves: FSDP2 holds them as views of memory that
        it pads."""
        sharding = registry.find(self) if self._views else None
        shard: Any = None if sharding is None else sharding.local()
        if shard is None or shard.store is not self.store or self._views[: len(shard._views)] != shard._views:
            return self.store["values"], self._views
        return shard._plain, self._views[len(shard._views) :]

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: tuple[Any, ...], outer_size: Iterable[int], outer_stride: Any
    ) -> Self:
        """Inverse of __tensor_flatten__."""
        views, transposed, detached, name, part, products, _ = context
        values = inner.get("_plain", inner["_whole"])
        # A graph's new values of a view have other strides than the view if those leave gaps.
        self = cls._wrap(Values(values=inner["_whole"]), values, strides=outer_stride if views else None)
        self.store.is_apart = bool(views)
        self._views, self.transposed, self._detached, self.weight_name = views, transposed, detached, name
        self.own_products, (self.peers, self.refusal) = products, part
        return self

    def _stable_hash_for_caching(self) -> str:
        """As flattening.digest, with the recipe: flattened tensors may be equal where graphs differ."""
        return flattening.digest(f"cast to {self.QUANTIZED.KEY}", self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles a parameter as a part of its module, and others as plain values, so torch alone loads state dicts."""
        if (key := flattening.for_cache(self)) is not None:
            return key
        self.check_saved()
        values = self._plain
        if values.numel() * values.element_size() != values.untyped_storage().nbytes():
            values = values.clone()
        if isinstance(self, nn.Parameter):
            return rebuild_cast, (type(self), values, self.weight_name, self.requires_grad, self._agreed.snapshot(self))
        return values.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with values of its own. Attributes that users have set on the tensor are deep-copied too."""

        def make() -> CastOnGather:
            other = self._fresh(self._plain.clone())
            other._agreed = Agreed.restored(copy.deepcopy(self._agreed.snapshot(self), memo), other)
            return other

        return deep_copied(self, memo, make)  # type: ignore[no-any-return]

    def check_saved(self) -> None:
        """Raises ValuesAlone where a hook of saved tensors copies the values of a view that a model multiplies with:
        gradients are off there, and the view has one."""
        if self._views and self.requires_grad and not torch.is_grad_enabled() and saving_hooks(True) is not None:
            raise ValuesAlone(self.label())

    def share_memory_(self) -> Self:
        """Moves the values to shared memory."""
        self._plain.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def is_shared(self) -> bool:
        """True when the values are in shared memory."""
        return self._plain.is_shared()  # type: ignore[no-untyped-call, no-any-return]

    __torch_function__ = no_torch_function

    @classmethod
    @passed_over_by_compilers
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One dict lookup. The handler under None serves all other operators."""
        handler = cls.HANDLERS.get(func) or cls.HANDLERS[None]
        if torch.is_inference_mode_enabled():
            return in_inference_mode(handler, func, args, kwargs or {})
        return handler(func, args, kwargs or {})


def rebuild_cast(
    cls: type[CastOnGather], values: Tensor, name: str | None, requires_grad: bool, agreed: Any
) -> nn.Parameter:
    """Rebuilds a parameter for pickle and torch.load."""
    tensor = cls(values)
    tensor.weight_name, tensor._agreed = name, Agreed.restored(agreed, tensor)
    return nn.Parameter(tensor, requires_grad)


rebuild_cast.__module__ = "layoutc.pickled"


def find_cast(param: Tensor) -> CastOnGather | None:
    """The CastOnGather that a parameter is, holds as a DTensor's shard, or was gathered from; else None."""
    local = getattr(param, "_local_tensor", param)
    if isinstance(local, QuantizedTensor) and local.store.home is not None:
        local = local.store.home()
    return local if isinstance(local, CastOnGather) else None

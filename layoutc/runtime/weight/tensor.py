"""QuantizedTensor: what the generated tensor classes have in common.

A quantized tensor is a wrapper without storage of its own. It holds *planes*: plain tensors, compact and m-major, in
one dict that all aliases share. The planes of a view over leading dims are views of the base's planes, so a write
through one is seen through the other. Nothing derived is stored: each call of `buffers()` lays the planes out as the
spec says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from layoutc.ints.cuts import NO_HALO, Halo
from layoutc.ints.sizes import cdiv
from layoutc.runtime.errors import LayoutError, MissingOrientation, made_of_one_tensor
from layoutc.runtime.facts import Group, Layout, contiguous_strides
from layoutc.runtime.product_mode import Settings, read_as
from layoutc.runtime.sharding import registry
from layoutc.runtime.torch_private import no_torch_function, without_torch_function
from layoutc.runtime.weight import (
    flattening,
    gathered_in_graphs,
    initial_values,
    operators,
    stored_form,
)
from layoutc.runtime.weight.deep_copy import deep_copied
from layoutc.runtime.weight.flattening import whole_and_window
from layoutc.runtime.weight.padding import NOT_PADDED, Padding
from layoutc.runtime.weight.pending_writes import Part, Writes, check_readable, chunk_protocol, forget
from layoutc.runtime.weight.planes import CutPlanes, Home
from layoutc.runtime.weight.recipe_methods import RecipeMethods
from layoutc.runtime.weight.reported_memory import ReportedMemory

Handler = Callable[..., Any]
_set_data: Callable[[Tensor, Tensor], None] = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class QuantizedTensor(RecipeMethods, ReportedMemory, torch.Tensor):
    """A weight of m rows (leading dims flattened) by k columns, held as planes.

    To autograd and FSDP2, and when printed, it has its outer shape and the floating-point dtype that it dequantizes to.
    The outer shape may be any view of (m, k) in row-major order, or such a view with its last two dims transposed.
    """

    LAYOUT: ClassVar[Layout]
    HANDLERS: ClassVar[Mapping[Any, Handler]]
    KEY: ClassVar[str]  # the recipe's key in `operators`
    QUANTIZED: ClassVar[type[QuantizedTensor]]  # the class that it is gathered as: itself

    _planes: MutableMapping[str, Tensor]
    _matrix: tuple[int, int]
    _orientations: tuple[str, ...]
    _transposed: bool
    _name: str | None
    _home: Home | None  # of a gathered weight: where this rank's shard is
    _writes: Writes  # shared by aliases and pieces: version counters don't see writes below autograd
    _part: Part | None  # of a piece: where it lies in the tensor that it was cut from
    _common: frozenset[str]  # planes that a part of a weight shares with the rest of the weight
    _halo: Halo  # rows of the planes that are not the tensor's own
    _padding: Padding  # which call of FSDP2 or DTensor it comes from, where they pad shards
    _sent: QuantizedTensor | None  # the whole weight, if that was broadcast as values, and this is it or a part of it
    _products: Settings | None  # how it is multiplied by its own choice; None: as is set for all weights
    _fused: Group | None  # of a weight that is quantized under one amax with others
    _peers: tuple[str, ...] | None  # names of the groups whose shards share its amax; (): not known; None: it is whole
    _steady: Any  # of a shard: `fsdp2.steady.Steady`, what its gathers have in common
    _packed: Any  # of a shard: `fsdp2.packed.Packed`, its place among those that it travels with
    _readings: dict[tuple[str, Any], Any]  # by orientation: what its last products have left for the next ones
    _flat: flattening.Flat | None  # as it was flattened last
    _stacked: Mapping[str, Tensor] = MappingProxyType({})  # of gathered shards: planes that each rank has its own of

    @staticmethod
    def __new__(
        cls,
        planes: MutableMapping[str, Tensor],
        shape: Iterable[int] = (),
        dtype: torch.dtype = torch.float32,
        *,
        matrix: tuple[int, int] | None = None,
        orientations: tuple[str, ...] | None = None,
        transposed: bool = False,
        requires_grad: bool = False,
        halo: Halo = NO_HALO,
        **others: Any,
    ) -> Self:
        """Wraps planes without copying them. matrix: their (m, k) with the halo; default: that of `shape`.
        Raises TypeError for one tensor in place of planes, and attributes of another tensor, as accelerate gives them.
        """
        if others or isinstance(planes, Tensor):
            raise made_of_one_tensor(cls)
        shape = tuple(shape)
        matrix = matrix or (prod(shape[:-1]), shape[-1])
        strides = None  # contiguous
        if transposed:  # the last two dims of a contiguous tensor, swapped
            strides = list(contiguous_strides((*shape[:-2], shape[-1], shape[-2])))
            strides[-2:] = strides[-1], strides[-2]
        first = getattr(planes, "handle", None)  # in a traced graph, looking at a plane would record an operator
        self: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            shape,
            strides=strides,
            dtype=dtype,
            device=(next(iter(planes.values())) if first is None else first).device,
            requires_grad=requires_grad,
        )
        self._planes = planes
        self._matrix = matrix
        self._orientations = orientations or cls.LAYOUT.orientations
        self._transposed = transposed
        self._name = self._home = None
        self._writes, self._part = Writes(planes=planes), None
        self._common, self._peers, self._products, self._packed = frozenset(), None, None, None
        self._halo, self._padding, self._sent, self._steady, self._readings = halo, NOT_PADDED, None, None, {}
        self._flat = self._fused = None
        return self

    # -------------------------------------------------------------------------------------------- making others like it
    def _alias(
        self,
        shape: Iterable[int] | None = None,
        *,
        transposed: bool | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """A tensor that shares this one's dict of planes, under another outer shape or dtype."""
        other = type(self)(
            self._planes,
            self.shape if shape is None else shape,
            dtype or self.dtype,
            matrix=self._matrix,
            orientations=self._orientations,
            transposed=self._transposed if transposed is None else transposed,
            halo=self._halo,
        )
        other._name, other._home, other._writes, other._part = self._name, self._home, self._writes, self._part
        other._common, other._peers, other._padding, other._sent = self._common, self._peers, self._padding, self._sent
        other._products, other._fused = self._products, self._fused
        return other

    def _with_planes(
        self,
        planes: MutableMapping[str, Tensor],
        shape: Iterable[int] | None = None,
        *,
        matrix: tuple[int, int] | None = None,
        dtype: torch.dtype | None = None,
        halo: Halo | None = None,
    ) -> Self:
        """A tensor with other planes and the same metadata."""
        other = type(self)(
            planes,
            self.shape if shape is None else shape,
            dtype or self.dtype,
            matrix=matrix or self._matrix,
            orientations=self._orientations,
            transposed=self._transposed,
            halo=self._halo if halo is None else halo,
        )
        other._name, other._padding, other._sent = self._name, self._padding.of_copy(), self._sent
        other._peers = () if self._common else self._peers  # a copy of a part shares its amax with unknown shards
        other._writes.trains, other._products, other._fused = self._writes.trains, self._products, self._fused
        return other

    def _map(self, function: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """A new dict with `function` applied to every plane."""
        check_readable(self)
        return {name: function(plane) for name, plane in self._planes.items()}

    # ------------------------------------------------------------------------------------------------------- what it is
    @property
    def orientations(self) -> tuple[str, ...]:
        """The orientations that its planes give without loss, rowwise first."""
        if len(self._planes) == len(self.LAYOUT.stored):
            return self._orientations
        sources = self.LAYOUT.sources
        return tuple(o for o in self._orientations if all(plane in self._planes for plane in sources[o]))

    @property
    def _rows(self) -> int:
        """Its own rows, without the halo."""
        return self._matrix[0] - self._halo.rows

    def _entries(self, name: str) -> Tensor:
        """The entries of a plane that cover the tensor's own rows, as a view."""
        gathered_in_graphs.check_not_resharded(self)
        rows, plane = self.LAYOUT.stored[name].rows_per_value, self._planes[name]
        if rows is None or not self._halo.rows:
            return plane
        return plane[self._halo.before // rows : cdiv(self._matrix[0] - self._halo.after, rows)]

    def _plane(self, name: str) -> Tensor:
        """A stored plane by name. Raises MissingOrientation."""
        if (plane := self._planes.get(name)) is not None:
            return plane
        raise MissingOrientation(f"{self._label()} holds {', '.join(self._planes)}, not {name}")

    def planes(self) -> dict[str, Tensor]:
        """The stored planes by name, in the recipe's order: plain, compact tensors; the tensors themselves, not copies.

        Their shapes and dtypes are `LAYOUT.planes(m, k)`. While FSDP2 has a weight gathered, some are its shard's.
        """
        return {name: self._planes[name] for name in self.LAYOUT.stored if name in self._planes}

    def buffers(self, *, swizzled: bool = False) -> dict[str, Tensor]:
        """The tensors that a GEMM reads, by name: padded, repeated and transposed as the spec says, in a fixed order.

        Their shapes and dtypes are `LAYOUT.buffers(m, k)`. A buffer that equals a stored plane is that plane; the
        others are laid out anew on each call. swizzled: scales and zero points are flat, in the order of the spec's
        `gemm`. Raises LayoutError for a shard that is cut inside a block, ValueError for `swizzled` if the spec has no
        swizzle.
        """
        if self._halo.rows or self._matrix[0] % self.LAYOUT.multiple_m:
            raise LayoutError(f"{self._label()} is cut inside a block, so it has no buffers; gather the weight first")
        if (handle := gathered_in_graphs.handle(self._planes)) is not None:
            return gathered_in_graphs.lay_out(
                type(self), handle, whole_and_window(self)[1], self.orientations, swizzled
            )
        check_readable(self)
        return operators.lay_out(type(self), self._planes, *self._matrix, self.orientations, swizzled)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor of the outer shape, from rowwise if it is held, else from columnwise.

        dtype: default: the outer dtype. Values are computed in fp32 and rounded once. Raises TypeError for a dtype that
        is not floating point, MissingOrientation for a tensor without a complete orientation.
        """
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"{self._label()} dequantizes to floating-point dtypes, not {dtype}")
        orientations = self.orientations
        if self._shard() is not None:  # a gathered weight has the same values in both passes
            orientations = self.LAYOUT.orientations[:1]
        if not orientations:
            raise MissingOrientation(f"{self._label()} holds no orientation: {', '.join(self._planes) or 'no planes'}")
        return self._dequantize(orientations[0], dtype or self.dtype)

    def _dequantize(self, orientation: str, dtype: torch.dtype) -> Tensor:
        """The values of an orientation, as `read_as` takes it, in the outer shape.

        If a gathered weight does not hold the orientation in this pass, all ranks gather it: in backward, recomputed
        activations need what forward had. Raises MissingOrientation if there is no shard to gather it from.
        """
        orientation = read_as(self, orientation)
        if (handle := gathered_in_graphs.handle(self._planes)) is not None:
            matrix = gathered_in_graphs.dequantize(type(self), handle, whole_and_window(self)[1], orientation, dtype)
        else:
            check_readable(self)
            planes = self._planes if orientation in self.orientations else self._fetch(orientation)
            matrix = operators.dequantize(type(self), planes, *self._matrix, orientation, dtype)
        if self._halo.rows:
            matrix = matrix[self._halo.before :][: self._rows]
        if not self._transposed:
            return matrix if matrix.shape == self.shape else matrix.view(self.shape)
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2])
        return matrix.view(shape).transpose(-2, -1)

    def _shard(self) -> QuantizedTensor | None:
        """This rank's shard of a gathered weight, where FSDP2 holds it."""
        shard = self._home() if self._home is not None else None
        return shard if shard is not None and registry.find(shard) is not None else None

    def _fetch(self, orientation: str) -> dict[str, Tensor]:
        shard = self._shard()
        if self._home is None or shard is None or orientation not in shard.orientations:
            raise MissingOrientation(
                f"{self._label()} holds {', '.join(self.orientations) or 'nothing'}, not {orientation}, which has "
                f"codes of its own in {self.LAYOUT.name}"
            )
        planes = self._home.fetch(orientation, self.device)
        return self._planes.cut(planes, *self._planes.window) if isinstance(self._planes, CutPlanes) else planes

    def _to_gather(self, orientations: tuple[str, ...]) -> QuantizedTensor:
        return self

    def _label(self) -> str:
        return f"{self._name or 'a weight'} of shape {tuple(self.shape)} in {self.LAYOUT.name}"

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Shape, orientations and bytes. Never reads values, so it is safe on freed and meta tensors."""
        nbytes = sum(plane.numel() * plane.element_size() for plane in self._planes.values())
        holds = "+".join(self.orientations) or "nothing"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"holds={holds}, bytes={nbytes}{grad})"
        )

    @property
    def data(self) -> Self:
        """An alias that autograd does not follow.

        Assigning replaces the tensor's contents and dtype. It takes over the planes of a tensor of the same recipe, and
        quantizes plain values. Raises ValueError for plain values of another shape, LayoutError for another recipe.
        """
        with torch.no_grad():
            return self._alias()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, QuantizedTensor):
            if tuple(value.shape) != tuple(self.shape):
                raise ValueError(f"{self._label()} can't take plain values of shape {tuple(value.shape)}")
            value = cast(QuantizedTensor, self.HANDLERS[torch.Tensor.data](self, value))
        elif value.LAYOUT.layout_id != self.LAYOUT.layout_id:
            raise LayoutError(f"{self._label()} can't take the planes of a tensor in {value.LAYOUT.name}")
        _set_data(self, value)  # shape, dtype and device of the wrapper
        self._planes, self._matrix, self._halo = value._planes, value._matrix, value._halo
        self._orientations, self._transposed = value._orientations, value._transposed
        value._writes.trains |= self._writes.trains
        self._writes, self._flat = value._writes, None

    # -------------------------------------------------------------------------------------- what torch asks of wrappers
    __tensor_flatten__ = flattening.flatten

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: flattening.Context, outer_size: Iterable[int], outer_stride: Any
    ) -> Self:
        """Inverse of __tensor_flatten__. Raises ValueError for another layout id."""
        return flattening.unflatten(cls, inner, context, outer_size)  # type: ignore[return-value]

    _stable_hash_for_caching = flattening.stable_hash

    def __getattr__(self, name: str) -> Any:
        if name in ("__create_chunk_list__", "__get_tensor_shard__") and (method := chunk_protocol(self, name)):
            return method
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickled as `stored_form` writes it: plain tensors and plain metadata."""
        if (key := flattening.for_cache(self)) is not None:
            return key
        return stored_form.restore_tensor, (stored_form.state_of(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with compact planes of its own. Attributes that users have set on the tensor are deep-copied too."""
        return deep_copied(self, memo, self._compact_copy)  # type: ignore[no-any-return]

    def _compact_copy(self) -> Self:
        """Compact copies of all planes, with the initial values."""
        other = self._with_planes(self._map(lambda plane: plane.clone(memory_format=torch.contiguous_format)))
        initial_values.carry(other, self)
        initial_values.carry_base(other, self)
        return other

    def share_memory_(self) -> Self:
        """Moves every plane to shared memory; returns the tensor."""
        self._map(lambda plane: plane.share_memory_())  # type: ignore[no-untyped-call]
        return self

    def is_shared(self) -> bool:
        """True when every plane is in shared memory."""
        return all(plane.is_shared() for plane in self._planes.values())  # type: ignore[no-untyped-call]

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """One dict lookup. The handler under None is for all operators without one of their own."""
        handler = cls.HANDLERS.get(func) or cls.HANDLERS[None]
        with without_torch_function():  # a handler reads shapes and dtypes, each of which would be a call otherwise
            if torch.is_inference_mode_enabled():
                return in_inference_mode(handler, func, args, kwargs or {})
            return handler(func, args, kwargs or {})


def in_inference_mode(handler: Handler, func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a handler in inference mode. A view of a tensor from outside of it stays ordinary: its version is
    tracked."""
    if not func.is_view or args[0].is_inference():
        return handler(func, args, kwargs)
    with torch.inference_mode(False), torch.no_grad():
        return handler(func, args, kwargs)


def written(tensors: Sequence[QuantizedTensor]) -> None:
    """Records that the planes of tensors have been written, for whoever derived something from the old bytes."""
    for tensor in tensors:
        tensor._writes.count += 1
        initial_values.rewritten(tensor)
        if tensor._part is None and tensor._writes.waiting:
            forget(tensor)
    torch.autograd.graph.increment_version(tensors)


def register(cls: type[QuantizedTensor]) -> type[QuantizedTensor]:
    """Decorator for generated classes: makes them known to torch.load(weights_only=True) and to the operators."""
    stored_form.register(cls)
    cls.KEY, cls.QUANTIZED = operators.register(cls), cls
    flattening.add_inner(cls, cls.LAYOUT.stored)
    if (hook := vars(cls).get("fsdp_pre_all_gather")) is not None:
        cls.fsdp_pre_all_gather = registry.PreHook(hook)  # type: ignore[attr-defined]
    return cls

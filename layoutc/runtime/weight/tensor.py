"""QuantizedTensor, the base of generated tensor classes: values, buffers, and what torch asks of wrappers.

Nothing derived is stored: each call of `buffers()` lays the planes out as the spec says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from layoutc.runtime.errors import LayoutError, MissingOrientation
from layoutc.runtime.product_mode import read_as
from layoutc.runtime.sharding import registry
from layoutc.runtime.storage import initial_values
from layoutc.runtime.storage.pending_writes import forget
from layoutc.runtime.storage.planes import CutPlanes
from layoutc.runtime.torch_private import (
    local_tensor,
    no_torch_function,
    passed_over_by_compilers,
    without_torch_function,
)
from layoutc.runtime.weight import flattening, gathered_in_graphs, operators, staging, stored_form
from layoutc.runtime.weight.plane_tensor import Handler, PlaneTensor, deep_copied

_set_data: Callable[[Tensor, Tensor], None] = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class QuantizedTensor(PlaneTensor):
    """A weight of m rows (leading dims flattened) by k columns in a recipe, whose values operators read and write."""

    QUANTIZED: ClassVar[type[QuantizedTensor]]  # the class of the gathered weight: itself

    def buffers(self, *, swizzled: bool = False) -> dict[str, Tensor]:
        """The tensors that a GEMM reads, by name: padded, repeated and transposed as the spec says, in a fixed order.

        Their shapes and dtypes are `LAYOUT.buffers(m, k)`. A buffer that equals a stored plane is that plane; the
        others are laid out anew on each call. swizzled: scales and zero points are flat, in the order of the spec's
        `gemm`. Raises LayoutError for a shard cut inside a block, ValueError for `swizzled` if there is no swizzle.
        """
        self.check_whole()
        return self.laid_out(self.orientations, swizzled)

    def check_whole(self) -> None:
        """Raises LayoutError for a tensor without buffers: a shard cut inside a block, or one that can't be read."""
        store = self.store
        if store.halo.rows or store.matrix[0] % self.LAYOUT.multiple_m:
            raise LayoutError(f"{self.label()} is cut inside a block, so it has no buffers; gather the weight first")
        if store.handle is None:
            self.check_readable()

    def laid_out(self, orientations: tuple[str, ...], swizzled: bool) -> dict[str, Tensor]:
        """The buffers of these orientations, after `check_whole`."""
        store = self.store
        if (handle := store.handle) is not None:
            return gathered_in_graphs.lay_out(type(self), handle, store.window, orientations, swizzled)
        return operators.lay_out(type(self), store.planes, *store.matrix, orientations, swizzled)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor of the outer shape, from rowwise if it is held, else from columnwise.

        dtype: default: the outer dtype. Values are computed in fp32 and rounded once. Raises TypeError for a dtype that
        is not floating point, MissingOrientation for a tensor without a complete orientation.
        """
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"{self.label()} dequantizes to floating-point dtypes, not {dtype}")
        orientations = self.orientations
        if self.shard() is not None:  # a gathered weight has the same values in both passes
            orientations = self.LAYOUT.orientations
        if not orientations:
            raise MissingOrientation(
                f"{self.label()} holds no orientation: {', '.join(self.store.planes) or 'no planes'}"
            )
        return self.values_of(orientations[0], dtype or self.dtype)

    def values_of(self, orientation: str, dtype: torch.dtype) -> Tensor:
        """The values of an orientation, as `read_as` takes it, in the outer shape.

        If a gathered weight does not hold the orientation in this pass, all ranks gather it: in backward, recomputed
        activations need what forward had. Raises MissingOrientation if there is no shard to gather it from.
        """
        orientation, store = read_as(self, orientation), self.store
        if (handle := store.handle) is not None:
            matrix = gathered_in_graphs.dequantize(type(self), handle, store.window, orientation, dtype)
        else:
            self.check_readable()
            matrix = operators.dequantize(type(self), self.held(orientation), *store.matrix, orientation, dtype)
        if store.halo.rows:
            matrix = matrix[store.halo.before :][: store.rows]
        if not self.transposed:
            return matrix if matrix.shape == self.shape else matrix.view(self.shape)
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2])
        return matrix.view(shape).transpose(-2, -1)

    def held(self, orientation: str) -> Mapping[str, Tensor]:
        """Planes that give an orientation: its own, or, if this pass does not hold it, planes that all ranks gather.

        Raises MissingOrientation if there is no shard to gather it from.
        """
        store, planes = self.store, self.store.planes
        if orientation in store.orientations:
            return planes
        shard = self.shard()
        if store.home is None or shard is None or orientation not in shard.orientations:
            raise MissingOrientation(
                f"{self.label()} holds {', '.join(self.orientations) or 'nothing'}, not {orientation}, which has "
                f"codes of its own in {self.LAYOUT.name}"
            )
        whole = store.home.fetch(orientation, self.device)
        return planes.cut(whole, *planes.window) if isinstance(planes, CutPlanes) else whole

    def initial_values(self, dtype: torch.dtype, at_least: bool = False) -> Tensor | None:
        """The values that it was quantized from, as a new plain tensor; None if neither they nor a master are kept.

        dtype: the result's; with `at_least`, or the wider one that they are kept in.
        """
        if (stored := initial_values.own(self.store, initial_values.finest(self.store))) is None:
            return None
        dtype = torch.promote_types(dtype, stored.values.dtype) if at_least else dtype
        shape = tuple(self.shape)
        straight = (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape
        result = stored.values.to(dtype, copy=True).reshape(straight)
        result = result.transpose(-2, -1) if self.transposed else result
        return result if stored.is_whole else torch.where(result.isnan(), self.dequantize(dtype), result)

    @property
    def data(self) -> Self:
        """An alias that autograd does not follow.

        Assigning replaces the tensor's contents and dtype. It takes over the planes of a tensor of the same recipe, and
        quantizes plain values. Raises ValueError for plain values of another shape, LayoutError for another recipe.
        """
        with torch.no_grad():
            return self.alias()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, QuantizedTensor):
            if tuple(value.shape) != tuple(self.shape):
                raise ValueError(f"{self.label()} can't take plain values of shape {tuple(value.shape)}")
            value = cast(QuantizedTensor, self.HANDLERS[torch.Tensor.data](self, value))
        elif value.LAYOUT.layout_id != self.LAYOUT.layout_id:
            raise LayoutError(f"{self.label()} can't take the planes of a tensor in {value.LAYOUT.name}")
        _set_data(self, value)  # shape, dtype and device of the wrapper
        value.store.writes.trains |= self.store.writes.trains
        value.store.writes.master = self.store.writes.master
        self.store, self.transposed, self.flat = value.store, value.transposed, None

    # -------------------------------------------------------------------------------------- what torch asks of wrappers
    __tensor_flatten__ = flattening.flatten

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: flattening.Context, outer_size: Iterable[int], outer_stride: Any
    ) -> Self:
        """Inverse of __tensor_flatten__. Raises ValueError for another layout id."""
        return flattening.unflatten(cls, inner, context, outer_size)  # type: ignore[return-value]

    def _stable_hash_for_caching(self) -> str:
        return flattening.digest(self.KEY, self)

    # Properties, as a class with __getattr__ has no attribute that is None to torch.compile: torch 2.11 to 2.14.
    __create_chunk_list__ = property(staging.chunk_list)
    __get_tensor_shard__ = property(staging.chunk_of)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickled as `stored_form` writes it: plain tensors and plain metadata."""
        if (key := flattening.for_cache(self)) is not None:
            return key
        return stored_form.restore_tensor, (stored_form.state_of(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with its own, compact planes. Attributes that users have set on the tensor are deep-copied too."""
        return deep_copied(self, memo, self.compact_copy)  # type: ignore[no-any-return]

    def share_memory_(self) -> Self:
        """Moves every plane to shared memory; returns the tensor."""
        self.map_planes(lambda plane: plane.share_memory_())  # type: ignore[no-untyped-call]
        return self

    def is_shared(self) -> bool:
        """True when every plane is in shared memory."""
        return all(plane.is_shared() for plane in self.store.planes.values())  # type: ignore[no-untyped-call]

    __torch_function__ = no_torch_function

    @classmethod
    @passed_over_by_compilers
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One dict lookup. The handler under None serves all other operators."""
        handler = cls.HANDLERS.get(func) or cls.HANDLERS[None]
        with without_torch_function():  # a handler reads shapes and dtypes, each of which would be a call otherwise
            if torch.is_inference_mode_enabled():
                return in_inference_mode(handler, func, args, kwargs or {})
            return handler(func, args, kwargs or {})


def recipe_of(weight: Tensor) -> type[QuantizedTensor] | None:
    """The class that a weight, or its shard, is quantized as, now or on gather; None for a plain one."""
    return getattr(local_tensor(weight), "QUANTIZED", None)


def in_inference_mode(handler: Handler, func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a handler in inference mode. Views of ordinary tensors keep versions."""
    if not func.is_view or args[0].is_inference():
        return handler(func, args, kwargs)
    with torch.inference_mode(False), torch.no_grad():
        return handler(func, args, kwargs)


def written(tensors: Sequence[QuantizedTensor]) -> None:
    """Records that planes were written, for caches of what was computed from the old bytes."""
    for tensor in tensors:
        store = tensor.store
        store.writes.count += 1
        initial_values.rewritten(store)
        if store.part is None and store.writes.waiting:
            forget(store)
    torch.autograd.graph.increment_version(tensors)


def register(cls: type[QuantizedTensor]) -> type[QuantizedTensor]:
    """Decorator for generated classes: makes them known to torch.load(weights_only=True) and to the operators."""
    stored_form.register(cls)
    cls.KEY, cls.QUANTIZED = operators.register(cls), cls
    flattening.add_inner(cls, cls.LAYOUT.stored)
    if (hook := vars(cls).get("fsdp_pre_all_gather")) is not None:
        registry.pre_hook(hook)
    return cls

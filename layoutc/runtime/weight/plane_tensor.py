"""PlaneTensor: a torch tensor over a PlaneStore.

It is a wrapper without its own storage. All aliases share one store, whose *planes* are plain tensors, compact and
m-major. The planes of a view over leading dims are views of the base's, so a write through one changes both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from math import prod
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from layoutc.ints.cuts import NO_HALO, Halo
from layoutc.runtime.errors import LayoutError, MissingOrientation, UnsupportedOperator, made_of_one_tensor
from layoutc.runtime.facts import Group, contiguous_strides
from layoutc.runtime.product_mode import Settings
from layoutc.runtime.sharding import registry
from layoutc.runtime.storage import initial_values, pending_writes
from layoutc.runtime.storage.planes import ScatteredPlanes
from layoutc.runtime.storage.store import PlaneStore, Stack
from layoutc.runtime.weight.padding import NOT_PADDED, Padding
from layoutc.runtime.weight.recipe_methods import RecipeMethods
from layoutc.runtime.weight.reported_memory import ReportedMemory

Handler = Callable[..., Any]


class PlaneTensor(RecipeMethods, ReportedMemory, torch.Tensor):
    """A weight of m rows (leading dims flattened) by k columns, held as planes.

    To autograd and FSDP2, and when printed, it has its outer shape and the floating-point dtype that it dequantizes to.
    The outer shape may be any view of (m, k) in row-major order, or such a view with its last two dims transposed.
    """

    HANDLERS: ClassVar[Mapping[Any, Handler]]

    store: PlaneStore  # shared with its aliases
    transposed: bool
    weight_name: str | None
    padding: Padding  # the step of FSDP2 or DTensor that made it, if they pad shards
    sent: Any  # the whole weight, if it was broadcast as values and this is a part of it
    own_products: Settings | None  # its per-weight mode; None: the global one
    fused: Group | None  # the weights that share its amax
    peers: tuple[str, ...] | None  # names of the groups whose shards share its amax; (): not known; None: it is whole
    readings: dict[tuple[str, Any], Any]  # by orientation: what its products reuse
    flat: Any  # `flattening.Flat`, of the last call
    stacked: Mapping[str, Tensor] = MappingProxyType({})  # of gathered shards: planes that differ between ranks

    @staticmethod
    def __new__(
        cls,
        planes: MutableMapping[str, Tensor] | PlaneStore,
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
        """Wraps planes without copying them, or a store. matrix: their (m, k) with the halo; default: that of `shape`.
        Raises TypeError for a tensor instead of planes, or another tensor's attributes, as accelerate passes them.
        """
        if others or isinstance(planes, Tensor):
            raise made_of_one_tensor(cls)
        shape = tuple(shape)
        if isinstance(planes, PlaneStore):
            store = planes
        else:
            matrix = matrix or (prod(shape[:-1]), shape[-1])
            store = PlaneStore(cls.LAYOUT, planes, matrix, orientations or cls.LAYOUT.orientations, halo)
            if cls.LAYOUT.amax_of_matrices:
                store.stack = Stack.of(shape, transposed)
        strides = None  # contiguous
        if transposed:  # the last two dims of a contiguous tensor, swapped
            strides = list(contiguous_strides((*shape[:-2], shape[-1], shape[-2])))
            strides[-2:] = strides[-1], strides[-2]
        self: Self = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device=store.device, requires_grad=requires_grad
        )
        self.store, self.transposed, self.padding, self.readings = store, transposed, NOT_PADDED, {}
        self.weight_name = self.sent = self.fused = self.peers = self.flat = None
        self.own_products = None
        return self

    # -------------------------------------------------------------------------------------------- making others like it
    def alias(
        self, shape: Iterable[int] | None = None, *, transposed: bool | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """A tensor over the same store, under another outer shape or dtype."""
        other = type(self)(
            self.store,
            self.shape if shape is None else shape,
            dtype or self.dtype,
            transposed=self.transposed if transposed is None else transposed,
        )
        other.weight_name, other.peers, other.padding = self.weight_name, self.peers, self.padding
        other.sent, other.own_products, other.fused = self.sent, self.own_products, self.fused
        return other

    def with_planes(
        self,
        planes: MutableMapping[str, Tensor],
        shape: Iterable[int] | None = None,
        *,
        matrix: tuple[int, int] | None = None,
        dtype: torch.dtype | None = None,
        halo: Halo | None = None,
    ) -> Self:
        """A tensor over a store of other planes, with the same metadata."""
        own = self.store
        other = type(self)(
            planes,
            self.shape if shape is None else shape,
            dtype or self.dtype,
            matrix=matrix or own.matrix,
            orientations=own.declared,
            transposed=self.transposed,
            halo=own.halo if halo is None else halo,
        )
        other.weight_name, other.padding, other.sent = self.weight_name, self.padding.of_copy(), self.sent
        other.peers = () if own.common else self.peers  # a copy of a part shares its amax with unknown shards
        other.store.writes.trains, other.own_products, other.fused = own.writes.trains, self.own_products, self.fused
        if matrix is None:
            other.store.stack = own.stack
        return other

    def map_planes(self, function: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """A new dict with `function` applied to every plane. Raises as check_readable."""
        self.check_readable()
        return {name: function(plane) for name, plane in self.store.planes.items()}

    def compact_copy(self) -> Self:
        """Compact copies of all planes, with the initial values."""
        other = self.with_planes(self.map_planes(lambda plane: plane.clone(memory_format=torch.contiguous_format)))
        initial_values.carry(other.store, self.store)
        initial_values.carry_base(other.store, self.store)
        return other

    # ------------------------------------------------------------------------------------------------------- what it is
    @property
    def orientations(self) -> tuple[str, ...]:
        """The orientations that its planes give without loss, rowwise first."""
        return self.store.orientations

    def planes(self) -> dict[str, Tensor]:
        """The stored planes by name, in the recipe's order: plain, compact tensors; the tensors themselves, not copies.

        Their shapes and dtypes are `LAYOUT.planes(m, k)`. While FSDP2 holds a gathered weight, some are its shard's.
        """
        planes = self.store.planes
        return {name: planes[name] for name in self.LAYOUT.stored if name in planes}

    def plane(self, name: str) -> Tensor:
        """A stored plane by name. Raises MissingOrientation."""
        if (plane := self.store.planes.get(name)) is not None:
            return plane
        raise MissingOrientation(f"{self.label()} holds {', '.join(self.store.planes)}, not {name}")

    def entries(self, name: str) -> Tensor:
        """The entries of a plane that cover the tensor's own rows, as a view. Raises as check_not_freed."""
        self.check_not_freed()
        return self.store.entries(name)

    def shard(self) -> PlaneTensor | None:
        """This rank's shard of a gathered weight, if FSDP2 holds it."""
        shard: PlaneTensor | None = self.store.home() if self.store.home is not None else None
        return shard if shard is not None and registry.find(shard) is not None else None

    def label(self) -> str:
        """Its name in messages."""
        return f"{self.weight_name or 'a weight'} of shape {tuple(self.shape)} in {self.LAYOUT.name}"

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Shape, orientations and bytes. Never reads values, so it is safe on freed and meta tensors."""
        nbytes = sum(plane.numel() * plane.element_size() for plane in self.store.planes.values())
        holds = "+".join(self.orientations) or "nothing"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"holds={holds}, bytes={nbytes}{grad})"
        )

    # -------------------------------------------------------------------------------------------------- what it refuses
    def check_not_freed(self) -> None:
        """Raises LayoutError if FSDP2 has freed a gathered weight's planes."""
        if self.store.home is not None and self.store.is_freed:
            raise LayoutError(
                f"{self.label()} was gathered, and FSDP2 has resharded it since; read it in the forward of its "
                "fully_shard module, between unshard() and reshard(), or read the sharded parameter"
            )

    def check_readable(self) -> None:
        """Raises LayoutError for a tensor that can't be read: FSDP2 has freed it, or only a part of it was loaded."""
        self.check_not_freed()
        if self.store.writes.waiting:
            pending_writes.check_whole(self.store, self.label())

    def check_writable(self) -> None:
        """Raises UnsupportedOperator for scattered rows, LayoutError for a gathered weight: writes would be lost."""
        if isinstance(self.store.planes, ScatteredPlanes):
            raise UnsupportedOperator(
                f"{self.label()} consists of rows that are not adjacent: it can be read but not written; write into "
                "the weight that it was cut from"
            )
        self.refuse_gathered()

    def refuse_gathered(self) -> None:
        """Raises LayoutError for a gathered weight, which lives only as long as the pass: a write would be lost."""
        if self.store.handle is not None:
            raise LayoutError(
                f"{self.label()} is gathered for each pass, so a compiled graph can't write into it. Write into the "
                "sharded parameter, or outside the graph"
            )
        if self.shard() is not None:
            raise LayoutError(
                f"{self.label()} is gathered, and the next gather would overwrite this write. Write into the sharded "
                "parameter, on all ranks: before forward, or after reshard()"
            )


def deep_copied(tensor: Tensor, memo: dict[int, Any], make: Callable[[], Any]) -> Any:
    """What `__deepcopy__(memo)` of a quantized or a cast-on-gather weight returns.

    make: a copy of the tensor with its own memory, under no_grad. A parameter's copy is a parameter. Its gradient and
    the attributes that users have set on it are deep-copied too.
    """
    if id(tensor) in memo:
        return memo[id(tensor)]
    with torch.no_grad():
        other = make()
    other = nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other
    other.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = other
    for name, value in tensor.__dict__.items():
        if name not in other.__dict__:
            setattr(other, name, copy.deepcopy(value, memo))
    if tensor.grad is not None:
        other.grad = copy.deepcopy(tensor.grad, memo)
    return other

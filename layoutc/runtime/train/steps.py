"""What MasterWeights caches between steps: for each parameter, and for all that are requantized together.

Looking up parameters and shardings, and converting gradients one by one, takes longer than the optimizer's step.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import is_
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Group
from layoutc.runtime.quantize import prepared, weights
from layoutc.runtime.quantize.prepared import Requantization
from layoutc.runtime.sharding import meshes, shards
from layoutc.runtime.sharding.shards import RowSharding
from layoutc.runtime.storage import initial_values
from layoutc.runtime.streams import capturing
from layoutc.runtime.torch_private import foreach_copy_, local_tensor, spec_of, version_of
from layoutc.runtime.train import inner_optimizer
from layoutc.runtime.weight.tensor import QuantizedTensor

_CHUNK = 1 << 24  # elements of gradients that are allocated together


def local_of(tensor: Tensor) -> Tensor:
    """A parameter's shard, or the whole parameter, below autograd."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def rounded(master: Any) -> Tensor:
    """What a weight is written from: its master's shard; for a master in planes, the first plane, which rounds it."""
    local = local_of(master)
    if not isinstance(local, QuantizedTensor):
        return local
    return next(iter(local.store.planes.values())).view(local.shape)


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether both are of the same objects."""
    return len(one) == len(other) and all(map(is_, one, other))


class Entry:
    """A parameter with its master."""

    __slots__ = (
        *("_held", "_local", "_place", "_rows", "_seen", "_shown", "_shown_master"),
        *("__weakref__", "master", "param", "spec", "stamp", "steps_shard"),
    )

    def __init__(self, param: Tensor, master: Tensor, inner: torch.optim.Optimizer, stamp: Any) -> None:
        self.param, self.master, self.stamp = param, master, stamp
        self.steps_shard = inner_optimizer.steps_shard(inner, master)
        self._local: Tensor | None = None  # of a parameter that is not a DTensor
        self._rows: tuple[RowSharding | None] | None = None
        self._place: tuple[int, int] | None = None
        self.spec: Any = None  # of gradients that are sharded like the master
        self._shown: dict[str, Any] | None = None  # the inner optimizer's state as users see it, with the master
        self._seen: tuple[Any, ...] = ()  # its contents then,
        self._held: tuple[Any, ...] = ()  # and those of the inner optimizer's state
        self._shown_master: Tensor | None = None
        if isinstance(local := local_tensor(param), QuantizedTensor):
            local.store.writes.master = weakref.ref(self)

    def values(self) -> Tensor | None:
        """The master's values, while the weight has the bytes that were made from it."""
        return self._master_values if self.trains and self.holds_master else None

    @property
    def _master_values(self) -> Tensor:
        local = local_of(self.master)
        return local.dequantize() if isinstance(local, QuantizedTensor) else local

    @property
    def written(self) -> Tensor | None:
        """The values of a plain parameter; of those that were not written, the master's, which is finer."""
        local = self.local
        if isinstance(local, QuantizedTensor):
            return None
        values: Tensor = getattr(local, "plain", local)
        return torch.where(values == rounded(self.master).to(values.dtype), self._master_values, values)

    @property
    def holds_master(self) -> bool:
        """Whether the parameter has the bytes of its stamp, also in another tensor, as after module.to, which sets
        .data: version counters start at 0, and writes of this package also change the rest of the stamp."""
        before, now = self.stamp, stamp(self.param)
        return before == now or (type(now[1]) is tuple and before[0] is now[0] and not any(now[1]))

    @property
    def trains(self) -> bool:
        """False for a parameter that is its own master."""
        return self.master is not self.param

    @property
    def stepped(self) -> Tensor:
        """What the inner optimizer steps: the master, or its shard."""
        master: Any = self.master
        return local_tensor(master) if self.steps_shard else master

    @property
    def local(self) -> Tensor:
        """The parameter's shard."""
        param = self.param
        if isinstance(param, DTensor):
            return local_tensor(param)
        if not isinstance(param, QuantizedTensor):
            return param.detach()
        alias: Any = self._local
        if (
            alias is None
            or alias.store.planes is not param.store.planes
            or alias.store.writes is not param.store.writes
        ):
            alias = self._local = param.detach()
        return alias  # type: ignore[no-any-return]

    @property
    def row_sharding(self) -> RowSharding | None:
        """How a quantized parameter's rows are sharded, as `row_sharding_of` says it."""
        if self._rows is None:
            self._rows = (shards.row_sharding_of(self.param, cast(Any, self.local)),)
        return self._rows[0]

    @property
    def place(self) -> tuple[int, int]:
        """The shard's first row and column, as `place_of` says it."""
        if self._place is None:
            self._place = meshes.place_of(self.param)
        return self._place

    def show(self, state: dict[str, Any] | None, states: dict[Tensor, Any]) -> None:
        """Puts the inner optimizer's state, if any, and the master into `states`, as the parameter's."""
        if state is None and not self.trains:
            self.hide()
            return
        state = state or {}
        held, shown = (*state, *state.values()), states.get(self.param)
        if shown is not None and shown is self._shown and same(held, self._held):
            return
        if shown is None:
            shown = states[self.param] = {}
        if self.trains and self._shown_master is None:
            self._shown_master = self.master.detach()
        shown.clear()
        shown.update({"master": self._shown_master} if self.trains else {})
        shown.update(inner_optimizer.shown_state(self.master, self.stepped, state))
        self._shown, self._held, self._seen = shown, held, (*shown, *shown.values())

    def hide(self) -> None:
        """Nothing is shown."""
        self._shown, self._seen = None, ()

    def edited(self, states: dict[Tensor, Any]) -> dict[str, Any] | None:
        """The parameter's state in `states` if it is not what was shown there; without the master that was."""
        shown = states.get(self.param)
        if shown is self._shown and (shown is None or same((*shown, *shown.values()), self._seen)):
            return None
        if not shown and not self._seen:
            return None
        return {name: value for name, value in (shown or {}).items() if value is not self._shown_master}


def stamp(param: Tensor) -> Any:
    """A value that changes whenever the parameter is written or gets other bytes."""
    local = local_tensor(param)
    if isinstance(local, QuantizedTensor):
        planes = local.store.planes
        if type(planes) is not dict or any(map(Tensor.is_inference, planes.values())):
            return initial_values.mark(local.store)
        return local.store.writes.content, tuple([version_of(plane) for plane in planes.values()])
    return id(local), version_of(local), version_of(param)


# ----------------------------------------------------------------------------------------------------------- gradients
class Gradients:
    """The gradients of masters during a step: those of parameters, in fp32."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []  # those whose gradients are copied into `_views`
        self._views: list[Tensor] = []
        self._shown: list[Tensor] = []  # the views as gradients of masters: DTensors if those are
        self._storages: list[tuple[Any, int]] = []  # of the views, with the bytes that they have during a step

    def give(self, entries: Iterable[Entry]) -> None:
        """Sets the gradients of stepped tensors."""
        narrow: list[Entry] = []
        values: list[Tensor] = []
        for entry in entries:
            stepped = entry.stepped
            if stepped is entry.param:
                continue
            grad: Any = entry.param.grad
            if grad is None:
                stepped.grad = None
            elif not _is_cut_as_master(grad, entry):
                stepped.grad = _cut_as_master(grad, entry)
            elif grad.dtype == torch.float32 or not entry.trains:
                stepped.grad = local_tensor(grad) if entry.steps_shard else grad
            else:
                narrow.append(entry)
                values.append(local_tensor(grad))
        if not narrow:
            return
        if not same(narrow, self._entries):
            self._prepare(narrow, values)
        for storage, nbytes in self._storages:
            storage.resize_(nbytes)
        foreach_copy_(self._views, values)
        for entry, gradient in zip(narrow, self._shown, strict=True):
            entry.stepped.grad = gradient

    def take(self, entries: Iterable[Entry]) -> None:
        """Removes the gradients and frees their memory."""
        for entry in entries:
            if entry.stepped is not entry.param:
                entry.stepped.grad = None
        for storage, _ in self._storages:
            storage.resize_(0)

    def _prepare(self, entries: list[Entry], values: Sequence[Tensor]) -> None:
        """Makes fp32 gradients without memory; small ones will share an allocation."""
        chunks: dict[tuple[torch.device, int], list[int]] = defaultdict(list)
        filled: dict[torch.device, int] = defaultdict(int)
        for index, one in enumerate(values):
            chunks[one.device, filled[one.device] // _CHUNK].append(index)
            filled[one.device] += one.numel()
        views: dict[int, Tensor] = {}
        self._storages = []
        for (device, _), members in chunks.items():
            sizes = [-(-values[index].numel() // 4) * 4 for index in members]  # aligned to 16 bytes
            flat = torch.empty(sum(sizes), device=device)
            storage = flat.untyped_storage()
            self._storages.append((storage, storage.nbytes()))
            for index, piece in zip(members, torch.split_with_sizes(flat, sizes), strict=True):
                views[index] = piece[: values[index].numel()].view(values[index].shape)
        self._entries, self._views = entries, [views[index] for index in range(len(values))]
        self._shown = [meshes.with_local(entry.stepped, view) for entry, view in zip(entries, self._views, strict=True)]


def gradient_of(entry: Entry) -> Tensor:
    """A parameter's gradient, or its shard, sharded like the master; not converted if it was already."""
    grad: Any = entry.param.grad
    return local_tensor(grad if _is_cut_as_master(grad, entry) else _cut_as_master(grad, entry))


def _is_cut_as_master(grad: Any, entry: Entry) -> bool:
    """True if a gradient, or its shard, is a plain tensor sharded like the master."""
    master: Any = entry.master
    if isinstance(grad, DTensor) != isinstance(master, DTensor):
        return False
    if isinstance(grad, DTensor) and spec_of(grad) is not entry.spec:
        ours = spec_of(master)
        # Equal, not identical: DTensor's cached sharding rules give a master the mesh of the first such weight of the
        # process, which may be another model's.
        if spec_of(grad).placements != ours.placements or spec_of(grad).mesh != ours.mesh:
            return False
        entry.spec = spec_of(grad)
    local = local_tensor(grad)
    return type(local) is Tensor and local.is_contiguous() and local.shape == local_tensor(master).shape


def _cut_as_master(grad: Any, entry: Entry) -> Tensor:
    """A gradient in fp32, sharded like the stepped tensor; if the parameter is its own master, in its dtype."""
    master: Any = entry.master
    if entry.steps_shard:
        grad = local_tensor(grad.redistribute(master.device_mesh, master.placements))
    return grad.to(torch.float32) if entry.trains else grad  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------------------- write back
class Batch:
    """Quantized parameters whose shards share amaxes over the same process groups."""

    def __init__(self, groups: list[dist.ProcessGroup]) -> None:
        self.groups = groups
        self.entries: list[Entry] = []
        self.row_shardings: list[RowSharding | None] = []
        self.prepared: Requantization | None = None
        self._amaxes: Tensor | None = None  # if a launch that steps masters raises them
        self._of: dict[Entry, Tensor] = {}  # the same by entry

    def amaxes_of(self, stepped: Collection[Entry]) -> Mapping[Entry, Tensor]:
        """Where a launch that steps masters is to raise their amaxes, from zeros: (1,) int32, fp32 bits. {}: nowhere,
        because one of the weights that share an amax needs another way."""
        sharing = [*self._of] or [entry for entry in self.entries if cast(Any, entry.local).LAYOUT.shares_amax]
        # A rank with no rows of a weight raises nothing, and the reduction is in other memory.
        if not all(entry in stepped or (self.groups and not entry.local.numel()) for entry in sharing):
            sharing = []
        if not self._of and sharing and _can_be_raised([entry.local for entry in sharing]):
            self._amaxes = torch.zeros(len(sharing), dtype=torch.int32, device=sharing[0].local.device)
            self._of, self.prepared = dict(zip(sharing, torch.split(self._amaxes, 1), strict=True)), None
        elif self._of and not sharing:
            self._amaxes, self._of, self.prepared = None, {}, None
        return self._of

    def requantize(self) -> None:
        """Requantizes all of them from their masters."""
        pairs: list[Any] = [(entry.local, rounded(entry.master)) for entry in self.entries]
        if self.prepared is None or not self.prepared.holds(pairs):
            self.prepared = prepared.prepared(pairs, self.groups, self.row_shardings, self._amaxes)
        if self.prepared is None:
            weights.requantize_batch_(pairs, self.groups, self.row_shardings, self._amaxes)
        else:
            self.prepared(pairs)


def _can_be_raised(locals_: Sequence[Any]) -> bool:
    """Whether each weight has one amax, and all are on one device."""
    one = all(x.LAYOUT.amax_columns is None and not x.LAYOUT.amax_of_matrices for x in locals_)
    return one and all(x.device == locals_[0].device for x in locals_)


class WriteBack:
    """How parameters that a step has moved are rewritten from their masters."""

    def __init__(self, moved: list[Entry], every: Iterable[Entry] = ()) -> None:
        """every: of these, weights that share an amax with moved ones are rewritten, too. Raises LayoutError
        if they are on other devices, or sharded over other ranks."""
        self._moved = moved
        fused = {group for entry in moved if (group := getattr(entry.local, "fused", None)) is not None}
        there = {id(entry) for entry in moved}
        with_them = [entry for entry in (every if fused else ()) if getattr(entry.local, "fused", None) in fused]
        self.rewritten = [*moved, *(entry for entry in with_them if id(entry) not in there)]
        self._rounded: list[Entry] = []
        batches: dict[Any, Batch] = {}
        batch_of: dict[Group, Any] = {}
        for entry in self.rewritten:
            local = entry.local
            if not entry.trains:
                continue
            if not isinstance(local, QuantizedTensor):
                self._rounded.append(entry)
                continue
            groups = meshes.amax_groups(local.LAYOUT, entry.param, local.weight_name or "a weight")
            # For collectives, ranks need equally many batches; without them, one process may have several cards.
            key = tuple(map(id, groups)) or local.device
            if local.fused is not None and batch_of.setdefault(local.fused, key) != key:
                raise LayoutError(
                    f"{local.fused[1]} share one amax, but {local.weight_name} is on another device than others of "
                    "them, or sharded over other ranks: shard them alike, or leave share_amax= out"
                )
            batch = batches.setdefault(key, Batch(groups))
            batch.entries.append(entry)
            batch.row_shardings.append(entry.row_sharding)
        self._batches = list(batches.values())

    def holds(self, moved: list[Entry]) -> bool:
        """True if it was made for these parameters and they have not changed."""
        return same(moved, self._moved) and not any(isinstance(entry.local, QuantizedTensor) for entry in self._rounded)

    @property
    def captured(self) -> list[Requantization]:
        """What a CUDA graph reads that is being captured."""
        every = [batch.prepared for batch in self._batches if batch.prepared is not None]
        return [one for one in every if capturing(one.device)]

    def amaxes_of(self, stepped: Collection[Entry]) -> dict[Entry, Tensor]:
        """As `Batch.amaxes_of`, of all batches."""
        return {entry: amax for batch in self._batches for entry, amax in batch.amaxes_of(stepped).items()}

    def __call__(self) -> None:
        """Rewrites all of them: rounded, or requantized with one amax reduction for all that share process groups."""
        for entry in self._rounded:
            entry.local.copy_(rounded(entry.master))
        for batch in self._batches:
            batch.requantize()

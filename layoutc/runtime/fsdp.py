"""The FSDP2 shim: the one file that reads private parts of torch.distributed.fsdp, for torch 2.11 to 2.13.

FSDP2's extension hooks are told the mesh and nothing else that a layout needs: which pass gathers, whether the weight
stays gathered for backward, how many rows the padded shard has, how large the whole weight is. All of it is on the
FSDPParam that holds the shard, which is found once through FSDP2's module registry and remembered.

The hooks take one argument (mesh). FSDP2's five-argument form asserts, on short ranks only, that every plane has the
padded shard's shape; packed codes and scales never have, and the other ranks would hang in the collective.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from layoutc.runtime.errors import LayoutError, MissingOrientation
from layoutc.runtime.facts import PassName
from layoutc.runtime.pieces import GatheredPlanes
from layoutc.runtime.tensor import QuantizedTensor


@dataclass
class Sharding:
    """Where FSDP2 keeps a shard: weak references to the local tensor, its FSDPParam and FSDPParamGroup."""

    local: weakref.ref[QuantizedTensor]
    param: Any
    group: Any
    keeps: bool | None = None  # stays gathered after forward; decided at the first gather


@dataclass
class Gathering:
    """What the pre-all-gather hook tells the post-all-gather hook. Equal on all ranks but for `alone`."""

    which: PassName
    world: int
    rows: int  # matrix rows of a padded shard
    shape: tuple[int, ...]  # of the whole weight
    shared: dict[str, Tensor] = field(default_factory=dict)
    alone: tuple[Tensor, ...] = ()  # what does not travel in a group of one rank
    slots: tuple[int, ...] = ()  # bytes of each slot, where the passes' planes differ in bytes
    sent: tuple[tuple[int, ...], ...] = ()  # shapes of the planes in the slots

    @property
    def matrix(self) -> tuple[int, int]:
        """(m, k) of the whole weight."""
        return prod(self.shape[:-1]), self.shape[-1]


_shardings: dict[int, Sharding] = {}  # by the id of the dict of planes, which a shard and all its aliases share
_copies: Any = WeakTensorKeyDictionary()
_simulated: ContextVar[tuple[PassName, tuple[int, ...], int] | None] = ContextVar("layoutc_simulated", default=None)


def find(shard: QuantizedTensor) -> Sharding | None:
    """Where FSDP2 keeps this tensor, or the one that it is an alias of, as a shard; None where it does not."""
    shard = _copies.get(shard, shard)
    known = _look_up(shard)
    if known is None and dist.is_available() and dist.is_initialized():
        _scan()
        known = _look_up(shard)
    return known


def _look_up(shard: QuantizedTensor) -> Sharding | None:
    known = _shardings.get(id(shard._planes))
    local = known.local() if known else None
    return known if local is not None and local._planes is shard._planes else None


def _scan() -> None:
    from torch.distributed._composable_state import _module_state_mapping

    for reference in list(_module_state_mapping.values()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch 2.11: one group at most
            groups = [group] if (group := getattr(state, "_fsdp_param_group", None)) else []
        for group in groups:
            for param in group.fsdp_params:
                local = getattr(param.sharded_param, "_local_tensor", None)
                if isinstance(local, QuantizedTensor) and _look_up(local) is None:
                    _shardings[id(local._planes)] = Sharding(weakref.ref(local), weakref.ref(param), weakref.ref(group))


def remember_copy(copy: QuantizedTensor, shard: QuantizedTensor) -> None:
    """CPU offload gathers from a copy of the shard on the device; the copy then answers for the shard."""
    if copy.device != shard.device and find(shard) is not None:
        _copies[copy] = _copies.get(shard, shard)


def amax_group(shard: QuantizedTensor) -> tuple[dist.ProcessGroup | None, int]:
    """The process group over which FSDP2 shards this tensor, or None; and a number that stands for the parameter."""
    known = find(shard) if shard.LAYOUT.shares_amax else None
    param = known.param() if known else None
    if param is None:
        return None, 0
    name = f"{getattr(param, '_param_fqn', None) or shard._name} {tuple(param._orig_size)}"
    return getattr(param.mesh_info, "shard_process_group", None), zlib.crc32(name.encode()) & 0x7FFFFFFF


def parameter_name(shard: QuantizedTensor) -> str | None:
    """The parameter's fully qualified name, where FSDP2 or quantize_ knows it."""
    known = find(shard)
    param = known.param() if known else None
    return getattr(param, "_param_fqn", None) or shard._name


# -------------------------------------------------------------------------------------------------- what the hooks call
def begin(shard: QuantizedTensor, mesh: DeviceMesh) -> Gathering:
    """Which planes the pass needs, and the padded shard's rows. Raises on all ranks alike, before any collective."""
    world = mesh.size()
    if (simulated := _simulated.get()) is not None:
        which, shape, rows = simulated
    elif (known := find(shard)) is None:
        which, rows = "forward", shard._matrix[0]
        shape = (shard.shape[0] * world, *shard.shape[1:])
    else:
        param, group = known.param(), known.group()
        if param.fsdp_placement.dim != 0:
            raise LayoutError(
                f"{parameter_name(shard)}: {shard.LAYOUT.name} shards dim 0 alone, not dim {param.fsdp_placement.dim}: "
                "planes of other dims do not concatenate in rank order"
            )
        shape = tuple(param._orig_size)
        rows = prod(param.padded_sharded_param_size[:-1])
        which = _pass(known, group)
    missing = [name for name in shard.LAYOUT.travels[which] if name not in shard._planes]
    if missing:
        raise MissingOrientation(f"{shard._label()} lacks {', '.join(missing)}, which the {which} pass gathers")
    # Copies: a weight that is still gathered when the shard is requantized keeps the scale of the codes that it holds.
    layout = shard.LAYOUT
    needed = {name for orientation in layout.serves[which] for name in layout.sources[orientation]} & layout.shared
    shared = {name: plane.clone() for name, plane in shard._planes.items() if name in needed}
    return Gathering(which, world, rows, shape, shared, slots=layout.slots(which, rows, shard._matrix[1]))


def _pass(known: Sharding, group: Any) -> PassName:
    """The pass that gathers now. A weight that stays gathered after forward gets what both passes need, from the start.

    FSDP2 allocates a parameter's gather outputs once, so the choice between the two modes holds for the shard's life.
    """
    if known.keeps is None:
        known.keeps = not group._reshard_after_forward
    if known.keeps:
        return "both"
    return "backward" if group._training_state.name == "PRE_BACKWARD" else "forward"


def wire(plane: Tensor, rows: int) -> Tensor:
    """A plane as it travels: bytes, `rows` rows, zeros after the rows of a short shard.

    A view where nothing is short.
    """
    if plane.shape[0] != rows:
        full = plane.new_zeros(rows, *plane.shape[1:])
        full[: plane.shape[0]] = plane
        plane = full
    # Flat before it becomes bytes: a dim of one entry may have any stride and still be contiguous.
    return plane if plane.dtype == torch.uint8 and plane.is_contiguous() else _as_bytes(plane)


def _as_bytes(plane: Tensor) -> Tensor:
    return plane.reshape(-1).view(torch.uint8).view(plane.shape[0], plane.shape[1] * plane.element_size())


def send(planes: tuple[Tensor, ...], gathering: Gathering) -> tuple[tuple[Tensor, ...], Gathering]:
    """What the pre-all-gather hook returns.

    In a group of one rank FSDP2 hands back the first tensor alone, so the others, which need no gather there, go along
    as metadata.
    """
    if gathering.slots:
        gathering.sent = tuple(tuple(plane.shape) for plane in planes)
        planes = _fill(planes, gathering.slots)
    if gathering.world == 1:
        gathering.alone = planes[1:]
        return planes[:1], gathering
    return planes, gathering


def receive(outputs: Sequence[Tensor], gathering: Gathering) -> tuple[Tensor, ...]:
    """All planes that travelled, in order: bytes, all ranks' padded rows."""
    planes = (*outputs, *gathering.alone)
    if not gathering.slots:
        return planes
    return tuple(
        plane.view(gathering.world, -1)[:, : prod(shape)].reshape(gathering.world * shape[0], *shape[1:])
        for plane, shape in zip(planes, gathering.sent, strict=False)
    )


def _fill(planes: tuple[Tensor, ...], slots: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Planes in slots of fixed bytes, zeros after each."""
    filled = []
    for slot, nbytes in enumerate(slots):
        buffer = planes[0].new_zeros(nbytes)
        if slot < len(planes):
            buffer[: planes[slot].numel()] = planes[slot].reshape(-1)
        filled.append(buffer)
    return tuple(filled)


def finish(
    shard: QuantizedTensor, planes: dict[str, Tensor], gathering: Gathering, dtype: torch.dtype, out: Tensor | None
) -> tuple[QuantizedTensor, tuple[Tensor, ...]] | None:
    """What the post-all-gather hook returns: a new tensor, or, with `out`, nothing: all planes of that object replaced.

    No inner tensors: all planes are gather outputs, which FSDP2 frees by itself. Aliases of `out` share its dict of
    planes, so those that autograd saved in forward see what backward gathered.
    """
    if out is None:
        home, matrix = weakref.ref(shard), gathering.matrix
        if shard.LAYOUT.passes_differ and gathering.which != "both":
            planes = GatheredPlanes(planes, home, matrix)
        tensor = type(shard)(planes, gathering.shape, dtype, matrix=matrix, orientations=shard._orientations)
        tensor._name, tensor._home = shard._name, home
        return tensor, ()
    target: Any = getattr(out, "_local_tensor", out)
    target._planes.clear()
    target._planes.update(planes)
    return None


def fetch(shard: QuantizedTensor, orientation: str, matrix: tuple[int, int], device: torch.device) -> dict[str, Tensor]:
    """The planes of one orientation of the whole weight, by a gather of its own, on all ranks of the shard's group.

    Not overlapped with anything, and kept only as long as the caller does: for what a pass does not gather as a rule.
    """
    known = find(shard)
    param = known.param() if known else None
    if param is None:
        raise MissingOrientation(f"{shard._label()}: FSDP2 does not hold this shard any more")
    group: dist.ProcessGroup = param.mesh_info.shard_process_group
    layout, padded = shard.LAYOUT, prod(param.padded_sharded_param_size[:-1])
    sizes, whole = layout.planes(padded, matrix[1]), layout.planes(*matrix)
    planes = {}
    for name in layout.sources[orientation]:
        plane = shard._planes[name].to(device)
        if name not in layout.shared:
            sent = wire(plane, sizes[name].shape[0])
            received = sent.new_empty(group.size() * sent.shape[0], *sent.shape[1:])
            dist.all_gather_into_tensor(received, sent, group=group)
            plane = received[: whole[name].shape[0]].view(whole[name].dtype)
        planes[name] = plane
    return planes


@contextmanager
def simulate(which: PassName, shape: Sequence[int], rows: int) -> Iterator[None]:
    """For hooks called without FSDP2: the pass, the whole weight's shape, the rows of a padded shard."""
    token = _simulated.set((which, tuple(shape), rows))
    try:
        yield
    finally:
        _simulated.reset(token)

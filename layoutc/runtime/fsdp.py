"""The FSDP2 shim: with registry.py, what reads private parts of torch.distributed.fsdp, for torch 2.11 to 2.14.

FSDP2's extension hooks are told the mesh and nothing else that a layout needs: which pass gathers, whether the weight
stays gathered for backward, how many rows the padded shard has, how large the whole weight is. All of it is on the
FSDPParam that holds the shard, which is found once through FSDP2's module registry and remembered.

The hooks take one argument (mesh). FSDP2's five-argument form asserts, on short ranks only, that every plane has the
padded shard's shape; packed codes and scales never have, and the other ranks would hang in the collective.
"""

from __future__ import annotations

import sys
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard as Placement
from torch.utils.weak import WeakTensorKeyDictionary

from layoutc.runtime import initial, meshes
from layoutc.runtime.casting import CastOnGather
from layoutc.runtime.errors import LayoutError, MissingOrientation
from layoutc.runtime.facts import PassName
from layoutc.runtime.halo import Place, gather_bytes
from layoutc.runtime.partial import check_whole
from layoutc.runtime.pieces import GatheredPlanes
from layoutc.runtime.registry import parameters as _parameters
from layoutc.runtime.registry import refuse
from layoutc.runtime.sharding import Cuts
from layoutc.runtime.tensor import QuantizedTensor
from layoutc.runtime.transport import Gathering, Route, arrived, route, to_be_freed, wire

Shard = QuantizedTensor | CastOnGather


@dataclass
class Gathered:
    """What the gathers of one FSDPParam have in common, for as long as it lives, whatever shard it holds."""

    keeps: bool | None = None  # stays gathered after forward; decided at the first gather
    joined: dict[str, Tensor] = field(default_factory=dict)  # planes of the gathered weight that are no gather outputs
    routes: dict[PassName, Route] = field(default_factory=dict)


@dataclass
class Sharding:
    """Where FSDP2 keeps a shard: weak references to the local tensor, its FSDPParam and FSDPParamGroup."""

    local: weakref.ref[Shard]
    param: Any
    group: Any
    placement: Any  # Shard(dim)

    @property
    def gathered(self) -> Gathered:
        """Of its FSDPParam, which must be there."""
        return _gathered.setdefault(self.param(), Gathered())


# By the id of the dict of planes, which a shard and all its aliases share; until the shard is gone.
_shardings: dict[int, Sharding] = {}
_gathered: weakref.WeakKeyDictionary[Any, Gathered] = weakref.WeakKeyDictionary()  # by FSDPParam
_copies: Any = WeakTensorKeyDictionary()
_simulated: ContextVar[tuple[PassName, tuple[int, ...], int] | None] = ContextVar("layoutc_simulated", default=None)


def find(shard: Shard) -> Sharding | None:
    """Where FSDP2 keeps this tensor, or the one that it is an alias of, as a shard; None where it does not."""
    shard = _copies.get(shard, shard) if _copies else shard
    known = _look_up(shard)
    if known is None and dist.is_available() and dist.is_initialized():
        _scan()
        known = _look_up(shard)
    return known


def _look_up(shard: Shard) -> Sharding | None:
    known = _shardings.get(id(shard._planes))
    local = known.local() if known else None
    return known if local is not None and local._planes is shard._planes else None


def _scan() -> None:
    for param, group in _parameters():
        local = getattr(param.sharded_param, "_local_tensor", None)
        if isinstance(local, Shard) and _look_up(local) is None:
            number = id(local._planes)
            forget = partial(_forget, number)
            known = Sharding(weakref.ref(local, forget), weakref.ref(param), weakref.ref(group), param.fsdp_placement)
            _shardings[number] = known


def _forget(number: int, local: weakref.ref[Shard]) -> None:
    """Called when a shard is gone. Another may have its number by now."""
    if (known := _shardings.get(number)) is not None and known.local is local:
        del _shardings[number]


def remember_copy(copy: Shard, shard: Shard) -> bool:
    """CPU offload gathers from a copy of the shard on the device; the copy then answers for the shard."""
    is_held = copy.device != shard.device and find(shard) is not None
    if is_held:
        stand_in(copy, shard)
    return is_held


def stand_in(copy: Shard, shard: Shard) -> None:
    """From now on `copy`, made of what the shard holds, answers for the shard."""
    _copies[copy] = _copies.get(shard, shard)


def amax_groups(shard: Shard) -> tuple[list[dist.ProcessGroup], int]:
    """The process groups over which shards of this tensor share an amax, FSDP2's and those of tensor parallelism; and a
    number that stands for the parameter."""
    if not shard.LAYOUT.shares_amax:
        return [], 0
    known = find(shard)
    param = known.param() if known else None
    if param is None:
        return meshes.resolve(shard._peers or ()), tag(shard)
    return meshes.amax_groups(shard.LAYOUT, param.sharded_param), tag(shard)


def tag(shard: Shard) -> int:
    """A number that stands for the parameter that this tensor is a shard of, alike on all ranks."""
    known = find(shard)
    param = known.param() if known else None
    shape = () if param is None else tuple(param.sharded_param.shape)
    return zlib.crc32(f"{parameter_name(shard)} {shape}".encode()) & 0x7FFFFFFF


def place(shard: Shard) -> Place | None:
    """Where this tensor lies among the shards of a weight that FSDP2 holds; None where it does not."""
    known = find(shard)
    param: Any = known.param() if known else None
    group = getattr(param.mesh_info, "shard_process_group", None) if param is not None else None
    if known is None or group is None or known.placement.dim != 0:
        return None
    cuts = Cuts(prod(param._orig_size[:-1]), prod(param.padded_sharded_param_size[:-1]), group.size())
    return Place(group, group.rank(), cuts)


def check_other_dim(shard: Shard) -> None:
    """Raises LayoutError, on all ranks alike, for a shard of another dim than 0 whose cuts fall inside blocks."""
    known, layout = find(shard), shard.LAYOUT
    if known is None or (dim := known.placement.dim) == 0:
        return
    shape = known.param()._orig_size
    is_last = dim == len(shape) - 1
    size, multiple = (
        (shard.shape[dim], layout.column_multiple) if is_last else (prod(shard.shape[dim:-1]), layout.block_rows)
    )
    if size % multiple:
        raise LayoutError(
            f"{parameter_name(shard)}: shape {tuple(shape)} in {layout.name} is cut on dim {dim} every {size} "
            f"{'columns' if is_last else 'rows'}, but a cut must fall at a multiple of {multiple}"
        )


def holds(parameter: Tensor) -> bool:
    """True for a parameter that fully_shard has made, quantized or not."""
    return any(param.sharded_param is parameter for param, _ in _parameters())


def trains_instead(name: str, shape: tuple[int, ...]) -> bool:
    """True where fully_shard has made a parameter of a weight of this name and shape, and that has a gradient."""
    return any(
        getattr(getattr(param.sharded_param, "_local_tensor", None), "_name", None) == name
        and tuple(param._orig_size) == shape
        and param.sharded_param.grad is not None
        for param, _ in _parameters()
    )


def sharded_parameters() -> dict[int, Tensor]:
    """By the id of each parameter that fully_shard has gathered: the sharded parameter that it was made of."""
    found = {}
    for param, _ in _parameters():
        if (gathered := getattr(param, "_unsharded_param", None)) is not None:
            found[id(gathered)] = param.sharded_param
    return found


def parameter_name(shard: Shard) -> str | None:
    """The parameter's fully qualified name, where FSDP2 or quantize_ knows it."""
    known = find(shard)
    param = known.param() if known else None
    return getattr(param, "_param_fqn", None) or shard._name


# -------------------------------------------------------------------------------------------------- what the hooks call
def begin(shard: QuantizedTensor, mesh: DeviceMesh) -> Gathering:
    """How the planes travel that the pass needs. Raises on all ranks alike, before any collective."""
    layout, known = shard.LAYOUT, None
    if (simulated := _simulated.get()) is not None:
        which, shape, rows = simulated
        found = route(layout, which, mesh.size(), shape, rows, shard._matrix[1], 0)
    elif (known := find(shard)) is None:
        refuse(f"_module_state_mapping does not lead to {parameter_name(shard) or 'a weight'}, which FSDP2 gathers")
    else:
        found = _route(known, shard)
    missing = [name for name in layout.travels[found.which] if name not in shard._planes]
    if missing:
        raise MissingOrientation(
            f"{parameter_name(shard) or 'a weight'} of shape {found.shape} in {layout.name} lacks "
            f"{', '.join(missing)}, which the {found.which} pass gathers; quantize it with all orientations"
        )
    if shard._writes.waiting:
        check_whole(shard)
    if known is not None and shard._writes.initial is not None and not known.param().sharded_param.requires_grad:
        initial.free(shard)  # frozen since
    gathering = Gathering(found)
    if layout.shared:
        # Copies: a weight that is still gathered when the shard is requantized keeps the scale of its codes.
        needed = {name for orientation in layout.serves[found.which] for name in layout.sources[orientation]}
        gathering.shared = {n: plane.clone() for n, plane in shard._planes.items() if n in needed & layout.shared}
    if known is not None:
        gathering.joined = known.gathered.joined
        if known.placement.dim:
            _let_rows_travel(known, shard)
    return gathering


def _route(known: Sharding, shard: QuantizedTensor, which: PassName | None = None) -> Route:
    """How planes travel in a pass, by default the one that gathers now. Raises LayoutError where FSDP2 has no room."""
    param, group = known.param(), known.group()
    if getattr(group, "_use_post_forward_mesh", False):
        raise LayoutError(
            f"{parameter_name(shard)}: FSDP2 can't reshard a {shard.LAYOUT.name} weight to a smaller mesh after "
            "forward, since it has several planes; pass reshard_after_forward=True or False, not a number of ranks"
        )
    which = which or _pass(known, group)
    if which not in (routes := known.gathered.routes):
        (*padded, k), world = param.padded_sharded_param_size, param.mesh_info.shard_process_group.size()
        dim, shape = known.placement.dim, tuple(param._orig_size)
        routes[which] = route(shard.LAYOUT, which, world, shape, prod(padded), k, dim)
    return routes[which]


_COPY_OUT = "foreach_all_gather_copy_out"  # of torch.distributed.fsdp, which reads the dim of each placement


class _CutAsRows(Placement):
    """Shard(dim) as FSDP2 reads it: with dim 0 where it puts together what it has gathered, else as it is.

    For other dims than 0 it would put the outputs together by itself, as if each were a plane of the shard's own shape
    and of one byte an element. As rows they are left in rank order, and the post hook puts them together.
    """

    @property
    def dim(self) -> int:  # type: ignore[override]
        """The dim that is cut."""
        return 0 if sys._getframe(1).f_code.co_name == _COPY_OUT else super().dim


def _let_rows_travel(known: Sharding, shard: QuantizedTensor) -> None:
    """Lets FSDP2 gather the bytes of a shard of another dim than 0 in rank order.

    Raises LayoutError for recipes with planes that the ranks would share in other ways than the hooks know, and where
    FSDP2 is not as expected.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    layout = shard.LAYOUT
    if not hasattr(_fsdp_collectives, _COPY_OUT):
        raise LayoutError(
            f"{parameter_name(shard)}: torch {torch.__version__} has no {_COPY_OUT}, with which shards of dim "
            f"{known.placement.dim} are gathered; shard dim 0"
        )
    if layout.shared_along_rows - layout.shared or layout.amax_columns is not None:
        raise LayoutError(
            f"{parameter_name(shard)}: {layout.name} can't be sharded on dim {known.placement.dim}, since some scale "
            "covers whole rows or columns of the weight; shard dim 0"
        )
    if not isinstance(known.placement, _CutAsRows):
        known.placement = known.param().fsdp_placement = _CutAsRows(known.placement.dim)


def passing(shard: Shard) -> PassName:
    """The pass that gathers now."""
    if (simulated := _simulated.get()) is not None:
        return simulated[0]
    known = find(shard)
    return _pass(known, known.group()) if known else "forward"


def simulated() -> bool:
    """True within `simulate`."""
    return _simulated.get() is not None


def _pass(known: Sharding, group: Any) -> PassName:
    """The pass that gathers now. A weight that stays gathered after forward gets what both passes need, from the start.

    FSDP2 allocates a parameter's gather outputs once, so the choice between the two modes holds for the shard's life.
    """
    if known.gathered.keeps is None:
        known.gathered.keeps = not group._reshard_after_forward
    if known.gathered.keeps:
        return "both"
    return "backward" if group._training_state.name == "PRE_BACKWARD" else "forward"


def finish(
    shard: Shard, planes: dict[str, Tensor], gathering: Gathering, dtype: torch.dtype, out: Tensor | None
) -> tuple[QuantizedTensor, tuple[Tensor, ...]] | None:
    """What the post-all-gather hook returns: a new tensor, or, with `out`, nothing: all planes of that object replaced.

    Inner tensors are planes that had to be joined; the others are gather outputs, which FSDP2 frees by itself. Aliases
    of `out` share its dict of planes, so those that autograd saved in forward see what backward gathered.
    """
    if out is None:
        cls = shard.QUANTIZED if isinstance(shard, CastOnGather) else type(shard)
        route, home, known = gathering.route, weakref.ref(shard), find(shard)
        if shard.LAYOUT.passes_differ and route.which != "both":
            planes = GatheredPlanes(planes, home, route.matrix)
        tensor = cls(planes, route.shape, dtype, matrix=route.matrix, orientations=shard._orientations)
        tensor._name, tensor._home = shard._name, home
        both: tuple[PassName, ...] = ("forward", "backward")
        passes = [_route(known, tensor, one) for one in both] if known and route.which != "both" else [route]
        return tensor, to_be_freed(gathering, passes, tensor.device)
    target: Any = getattr(out, "_local_tensor", out)
    target._planes.clear()
    target._planes.update(planes)
    return None


def fetch(shard: Shard, orientation: str, device: torch.device) -> dict[str, Tensor]:
    """The planes of one orientation of the whole weight, by a gather of its own, on all ranks of the shard's group.

    Not overlapped with anything, and kept only as long as the caller does: for what a pass does not gather as a rule.
    """
    known = find(shard)
    param = known.param() if known else None
    if known is None or param is None:
        raise MissingOrientation(f"{shard._label()}: FSDP2 does not hold this shard any more")
    group: dist.ProcessGroup = param.mesh_info.shard_process_group
    held = shard.quantize((orientation,)) if isinstance(shard, CastOnGather) else shard
    gathering = Gathering(_route(known, held, "both"))
    planes = {}
    for name in held.LAYOUT.sources[orientation]:
        if name in held.LAYOUT.shared:
            planes[name] = held._planes[name].to(device)
        else:
            planes[name] = arrived(gathering, name, gather_bytes(wire(held, gathering, name).to(device), group))
    return planes


@contextmanager
def simulate(which: PassName, shape: Sequence[int], rows: int) -> Iterator[None]:
    """For hooks called without FSDP2: the pass, the whole weight's shape, the rows of a padded shard."""
    token = _simulated.set((which, tuple(shape), rows))
    try:
        yield
    finally:
        _simulated.reset(token)

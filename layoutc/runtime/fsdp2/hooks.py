"""What the generated FSDP2 all-gather hooks call: how the planes of a shard travel in a pass, and what is made of them.

The hooks take one argument (mesh). FSDP2's five-argument form asserts, on short ranks only, that every plane has the
padded shard's shape; packed codes and scales never have, and the other ranks would hang in the collective.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from layoutc.runtime.errors import LayoutError, MissingOrientation
from layoutc.runtime.facts import PassName
from layoutc.runtime.fsdp2.wire import Gathering, Route, arrived, route, to_be_freed, wire
from layoutc.runtime.quantize.block_edges import gather_bytes
from layoutc.runtime.sharding.registry import Shard, Sharding, find, parameter_name, refuse
from layoutc.runtime.weight import initial_values
from layoutc.runtime.weight.pending_writes import check_whole
from layoutc.runtime.weight.planes import GatheredPlanes, Home
from layoutc.runtime.weight.tensor import QuantizedTensor


class Gatherable(Shard, Protocol):
    """What the hooks need of a shard."""

    QUANTIZED: ClassVar[type[QuantizedTensor]]

    @property
    def _orientations(self) -> tuple[str, ...]: ...
    def _to_gather(self, orientations: tuple[str, ...]) -> QuantizedTensor: ...


@dataclass
class Gathered:
    """What the gathers of one FSDPParam have in common, for as long as it lives, whatever shard it holds."""

    keeps: bool | None = None  # stays gathered after forward; decided at the first gather
    joined: dict[str, Tensor] = field(default_factory=dict)  # planes of the gathered weight that are no gather outputs
    routes: dict[PassName, Route] = field(default_factory=dict)


_gathered: weakref.WeakKeyDictionary[Any, Gathered] = weakref.WeakKeyDictionary()  # by FSDPParam, which outlives shards
_simulated: ContextVar[tuple[PassName, tuple[int, ...], int] | None] = ContextVar("layoutc_simulated", default=None)


def gathered_of(known: Sharding) -> Gathered:
    """What all gathers of the parameter share, whatever shard it holds."""
    param = known.param()
    found = _gathered.get(param)
    if found is None:
        found = _gathered[param] = Gathered()
    return found


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
    if known is not None and shard._writes.initial is not None and not known.parameter.requires_grad:
        initial_values.free(shard)  # frozen since
    gathering = Gathering(found)
    if layout.shared:
        # Copies: a weight that is still gathered when the shard is requantized keeps the scale of its codes.
        needed = {name for orientation in layout.serves[found.which] for name in layout.sources[orientation]}
        gathering.shared = {n: plane.clone() for n, plane in shard._planes.items() if n in needed & layout.shared}
    if known is not None:
        gathering.joined = gathered_of(known).joined
        if known.dim:
            _check_rows_travel(shard, known.dim)
            known.gather_as_rows()
    return gathering


def _route(known: Sharding, shard: QuantizedTensor, which: PassName | None = None) -> Route:
    """How planes travel in a pass, by default the one that gathers now. Raises LayoutError where FSDP2 has no room."""
    if known.reshards_to_fewer_ranks:
        raise LayoutError(
            f"{parameter_name(shard)}: FSDP2 can't reshard a {shard.LAYOUT.name} weight to a smaller mesh after "
            "forward, since it has several planes; pass reshard_after_forward=True or False, not a number of ranks"
        )
    which = which or _pass(known)
    if which not in (routes := gathered_of(known).routes):
        assert known.process_group is not None
        (*padded, k), world = known.padded_shape, known.process_group.size()
        routes[which] = route(shard.LAYOUT, which, world, known.shape, prod(padded), k, known.dim)
    return routes[which]


def _check_rows_travel(shard: QuantizedTensor, dim: int) -> None:
    """Raises LayoutError for recipes with planes that the ranks would share in other ways than the hooks know."""
    layout = shard.LAYOUT
    if layout.shared_along_rows - layout.shared or layout.amax_columns is not None:
        raise LayoutError(
            f"{parameter_name(shard)}: {layout.name} can't be sharded on dim {dim}, since some scale covers whole rows "
            "or columns of the weight; shard dim 0"
        )


def passing(shard: Shard) -> PassName:
    """The pass that gathers now."""
    if (simulated := _simulated.get()) is not None:
        return simulated[0]
    known = find(shard)
    return _pass(known) if known else "forward"


def simulated() -> bool:
    """True within `simulate`."""
    return _simulated.get() is not None


def _pass(known: Sharding) -> PassName:
    """The pass that gathers now. A weight that stays gathered after forward gets what both passes need, from the start.

    FSDP2 allocates a parameter's gather outputs once, so the choice between the two modes holds for the shard's life.
    """
    gathered = gathered_of(known)
    if gathered.keeps is None:
        gathered.keeps = not known.frees_after_forward
    if gathered.keeps:
        return "both"
    return "backward" if known.gathers_for_backward else "forward"


def finish(
    shard: Gatherable, planes: dict[str, Tensor], gathering: Gathering, dtype: torch.dtype, out: Tensor | None
) -> tuple[QuantizedTensor, tuple[Tensor, ...]] | None:
    """What the post-all-gather hook returns: a new tensor, or, with `out`, nothing: all planes of that object replaced.

    Inner tensors are planes that had to be joined; the others are gather outputs, which FSDP2 frees by itself. Aliases
    of `out` share its dict of planes, so those that autograd saved in forward see what backward gathered.
    """
    if out is None:
        cls, route, home, known = shard.QUANTIZED, gathering.route, Home(weakref.ref(shard), fetch), find(shard)
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


def fetch(shard: Gatherable, orientation: str, device: torch.device) -> dict[str, Tensor]:
    """The planes of one orientation of the whole weight, by a gather of its own, on all ranks of the shard's group.

    Not overlapped with anything, and kept only as long as the caller does: for what a pass does not gather as a rule.
    """
    known = find(shard)
    if known is None or known.is_gone or (group := known.process_group) is None:
        raise MissingOrientation(f"{shard._label()}: FSDP2 does not hold this shard any more")
    held = shard._to_gather((orientation,))
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

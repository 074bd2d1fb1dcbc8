"""The runtime side of the generated FSDP2 all-gather hooks: before a gather, after it, and outside both.

The pre-hook takes one argument (mesh). FSDP2's five-argument form asserts, on short ranks only, that every tensor has
the padded shard's shape. Packed codes and scales never do, and the other ranks would hang in the collective.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from layoutc.runtime import product_mode
from layoutc.runtime.errors import LayoutError, MissingOrientation
from layoutc.runtime.facts import PassName
from layoutc.runtime.fsdp2 import on_gather
from layoutc.runtime.fsdp2.wire import Gathering, Route, arrived, copies, outgoing, route_for, to_be_freed
from layoutc.runtime.quantize.block_edges import gather_bytes
from layoutc.runtime.sharding import cards
from layoutc.runtime.sharding.registry import Shard, Sharding, find, parameter_name, refuse
from layoutc.runtime.storage.pending_writes import check_whole
from layoutc.runtime.storage.planes import GatheredPlanes, Home
from layoutc.runtime.weight.tensor import QuantizedTensor


class Gatherable(Shard, Protocol):
    """What the hooks need of a shard: a quantized weight, or one that is cast on gather."""

    QUANTIZED: ClassVar[type[QuantizedTensor]]

    @property
    def orientations(self) -> tuple[str, ...]: ...


@dataclass
class Gathered:
    """State that all gathers of one FSDPParam share for as long as it lives, whichever shard it holds."""

    stays_gathered: bool | None = None  # after forward; decided at the first gather
    joined: dict[str, Tensor] = field(default_factory=dict)  # planes that are copied together after a gather
    values: Tensor | None = None  # of the whole weight, (m, k), if gathers leave values; FSDP2 frees and allocates them
    # The gather whose planes were dequantized last. Some were made on FSDP2's copy stream, which would reuse their
    # memory once they are freed, while another stream still reads them.
    read: Gathering | None = None
    routes: dict[tuple[PassName, bool], Route] = field(default_factory=dict)  # by pass, and whether values are left

    def codes_in(self, for_backward: bool) -> PassName:
        """The pass that gathers codes now: "both" for a weight that stays gathered after forward."""
        return "both" if self.stays_gathered else "backward" if for_backward else "forward"

    def let_go(self) -> None:
        """Releases the memory of gathers once the model is gone; an optimizer may keep its shards."""
        self.values = self.read = None
        self.joined.clear()


_gathered: weakref.WeakKeyDictionary[Any, Gathered] = weakref.WeakKeyDictionary()  # by FSDPParam, which outlives shards
_simulated: ContextVar[tuple[PassName, tuple[int, ...], int] | None] = ContextVar("layoutc_simulated", default=None)


def gathered_of(param: Any) -> Gathered:
    """The state that all gathers of an FSDPParam share."""
    gathered = _gathered.get(param)
    if gathered is None:
        gathered = _gathered[param] = Gathered()
        weakref.finalize(param, gathered.let_go).atexit = False
    return gathered


def holds_values() -> bool:
    """True while FSDP2 holds any weight gathered as values; cheaper than asking which."""
    return any(one.values is not None and one.values.untyped_storage().size() for one in list(_gathered.values()))


# -------------------------------------------------------------------------------------------------- what the hooks call
def begin(shard: QuantizedTensor, mesh: DeviceMesh) -> Gathering:
    """Prepares the gather of the pass that begins. Raises as gathering_of, and UnsupportedTorch."""
    if (simulated := _simulated.get()) is not None:
        which, shape, rows = simulated
        return gathering_of(
            shard, None, route_for(shard.LAYOUT, which, mesh.size(), shape, rows, shard.store.matrix[1], 0)
        )
    if (sharding := find(shard)) is None:
        refuse(f"_module_state_mapping does not lead to {parameter_name(shard) or 'a weight'}, which FSDP2 gathers")
    return gathering_of(shard, sharding, route_of(sharding, shard))


def gathering_of(shard: QuantizedTensor, sharding: Sharding | None, route: Route) -> Gathering:
    """Which planes travel, and how. sharding: None in `simulate`.

    All errors are raised here, on all ranks and before any collective: MissingOrientation for planes that the shard
    lacks, LayoutError for what FSDP2 can't do with the layout.
    """
    layout = shard.LAYOUT
    missing = [name for name in layout.travels[route.which] if name not in shard.store.planes]
    if missing:
        raise MissingOrientation(
            f"{parameter_name(shard) or 'a weight'} of shape {route.shape} in {layout.name} lacks "
            f"{', '.join(missing)}, which the {route.which} pass gathers; quantize it with all orientations"
        )
    if shard.store.writes.waiting:
        check_whole(shard.store, shard.label())
    gathering = Gathering(route)
    if layout.shared:
        # Gathered codes must keep their scale if the shard is requantized before they are read.
        stays = sharding is None or not (sharding.frees_after_pass or on_gather.is_awaited(sharding.param()))
        planes = {name: shard.store.planes[name] for name in layout.shared_in[route.which]}
        gathering.shared = copies(planes) if stays else planes
    if sharding is not None:
        gathering.joined = gathered_of(sharding.param()).joined
        if sharding.dim:
            _check_rows_travel(shard, sharding.dim)
            sharding.gather_as_rows()
    return gathering


def route_of(sharding: Sharding, shard: Shard, which: PassName | None = None) -> Route:
    """The route in a pass, by default the one that gathers now. Raises LayoutError for
    reshard_after_forward=<number>."""
    if sharding.reshards_to_fewer_ranks:
        raise LayoutError(
            f"{parameter_name(shard)}: FSDP2 can't reshard a {shard.LAYOUT.name} weight to a smaller mesh after "
            "forward, since it has several planes; pass reshard_after_forward=True or False, not a number of ranks"
        )
    key = which or pass_of(sharding), on_gather.is_awaited(sharding.param())
    if key not in (routes := gathered_of(sharding.param()).routes):
        (*padded, k), world = sharding.padded_shape, 1  # of `replicate`
        if (group := sharding.process_group) is not None:
            cards.warn_if_elsewhere(parameter_name(shard) or "a weight", shard.device)
            cards.check_together(group, shard.device, str(product_mode.in_effect(shard.own_products)))
            world = group.size()
        sizes = world, sharding.shape, prod(padded), k, sharding.dim
        routes[key] = route_for(shard.LAYOUT, key[0], *sizes, always=key[1])
    return routes[key]


def _check_rows_travel(shard: QuantizedTensor, dim: int) -> None:
    """Raises LayoutError for recipes whose planes can't be cut on a dim other than the first."""
    layout = shard.LAYOUT
    if layout.shared_along_rows - layout.shared or layout.amax_columns is not None:
        raise LayoutError(
            f"{parameter_name(shard)}: {layout.name} can't be sharded on dim {dim}, because its scales cover whole "
            "rows or columns of the weight; shard dim 0"
        )


def passing(shard: Shard) -> PassName:
    """The pass that gathers now."""
    if (simulated := _simulated.get()) is not None:
        return simulated[0]
    sharding = find(shard)
    return pass_of(sharding) if sharding else "forward"


def pass_of(sharding: Sharding) -> PassName:
    """The pass that gathers now; "forward" for a weight whose gathers leave values, which both passes share.

    FSDP2 allocates a parameter's gather outputs once, so whether it stays gathered is decided at the first gather.
    """
    if on_gather.is_awaited(sharding.param()):
        return "forward"
    gathered = gathered_of(sharding.param())
    if gathered.stays_gathered is None:
        gathered.stays_gathered = not sharding.frees_after_forward
    return gathered.codes_in(sharding.gathers_for_backward)


def finish(
    shard: Gatherable, planes: dict[str, Tensor], gathering: Gathering, dtype: torch.dtype, out: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """What the post-all-gather hook returns: a new tensor and the inner tensors to free; None if `out` was given.

    out: an earlier gather's tensor, whose planes are all replaced. Its aliases share its dict of planes, so those that
    autograd saved in forward see what backward gathers. Inner tensors are planes that were copied together; FSDP2
    frees its outputs anyway. Values of a weight that is dequantized on gather are among the inner tensors.
    """
    sharding = find(shard)
    if sharding is not None and on_gather.is_awaited(sharding.param()):
        state, device = gathered_of(sharding.param()), next(iter(planes.values())).device
        state.read = gathering
        values = None if out is not None else new_values(sharding, gathering.route, dtype, device)
        assert state.values is not None
        on_gather.arrive(sharding, on_gather.Arrival(shard.QUANTIZED, planes, state.values))
        return None if values is None else (values, (values, *to_be_freed(gathering, [gathering.route], device)))
    if out is not None:
        deliver(shard, planes, out)
        return None
    cls, route, home = shard.QUANTIZED, gathering.route, Home(weakref.ref(shard), fetch)
    if shard.LAYOUT.passes_differ and route.which != "both":
        planes = GatheredPlanes(planes, home, route.matrix)
    tensor = cls(planes, route.shape, dtype, matrix=route.matrix, orientations=shard.orientations)
    tensor.weight_name, tensor.store.home, tensor.own_products = shard.weight_name, home, shard.own_products
    both: tuple[PassName, ...] = ("forward", "backward")
    passes = [route_of(sharding, tensor, one) for one in both] if sharding and route.which != "both" else [route]
    return tensor, to_be_freed(gathering, passes, tensor.device)


def new_values(sharding: Sharding, route: Route, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialized tensor for the values that gathers leave: ordinary memory, even if inference gathers first."""
    with torch.inference_mode(False):
        values = torch.empty(route.shape, dtype=dtype, device=device)
        gathered_of(sharding.param()).values = values.view(route.matrix)
    return values


def deliver(shard: Gatherable, planes: Mapping[str, Tensor], out: Tensor | None) -> None:
    """Gives the gathered planes to an earlier gather's tensor."""
    target: Any = out._local_tensor if isinstance(out, DTensor) else out
    target.store.planes.clear()
    target.store.planes.update(planes)
    target.own_products = shard.own_products  # it may have changed


def fetch(shard: Gatherable, orientation: str, device: torch.device) -> dict[str, Tensor]:
    """Gathers the planes of one orientation of the whole weight, outside of FSDP2's gathers.

    Collective over the shard's group, and not overlapped, so only for what a pass rarely needs. The planes are freed
    when the caller drops them. Raises MissingOrientation if FSDP2 no longer holds the shard.
    """
    sharding = find(shard)
    if sharding is None or sharding.is_gone or (group := sharding.process_group) is None:
        raise MissingOrientation(
            f"{shard.label()}: FSDP2 no longer holds this shard, so {orientation} can't be gathered; keep a reference "
            "to the model"
        )
    own: Any = shard
    quantized: QuantizedTensor = own if isinstance(own, QuantizedTensor) else own.quantize((orientation,))
    gathering = Gathering(route_of(sharding, quantized, "both"))
    planes = {}
    for name in quantized.LAYOUT.sources[orientation]:
        if name in quantized.LAYOUT.shared:
            planes[name] = quantized.store.planes[name].to(device)
        else:
            sent = outgoing(quantized, gathering, name).to(device)
            planes[name] = arrived(gathering, name, gather_bytes(sent, group))
    return planes


@contextmanager
def simulate(which: PassName, shape: Sequence[int], rows: int) -> Iterator[None]:
    """Inside, hooks may be called without FSDP2. shape: of the whole weight. rows: matrix rows of a padded shard."""
    token = _simulated.set((which, tuple(shape), rows))
    try:
        yield
    finally:
        _simulated.reset(token)

"""What a gather sends in which pass, and the state that all gathers of an FSDPParam share."""

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
from torch.distributed.tensor import DTensor

from layoutc.runtime import product_mode
from layoutc.runtime.errors import LayoutError, MissingOrientation
from layoutc.runtime.facts import PassName
from layoutc.runtime.fsdp2 import on_gather
from layoutc.runtime.fsdp2.wire import Gathering, Route, route_for
from layoutc.runtime.sharding import cards
from layoutc.runtime.sharding.registry import Shard, Sharding, find, parameter_name
from layoutc.runtime.storage.pending_writes import check_whole
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
simulated: ContextVar[tuple[PassName, tuple[int, ...], int] | None] = ContextVar("layoutc_simulated", default=None)


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
        gathering.shared = {name: plane.clone() for name, plane in planes.items()} if stays else planes
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
    if (pretended := simulated.get()) is not None:
        return pretended[0]
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


@contextmanager
def simulate(which: PassName, shape: Sequence[int], rows: int) -> Iterator[None]:
    """Inside, hooks may be called without FSDP2. shape: of the whole weight. rows: matrix rows of a padded shard."""
    token = simulated.set((which, tuple(shape), rows))
    try:
        yield
    finally:
        simulated.reset(token)

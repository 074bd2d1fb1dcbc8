"""What the generated all-gather hooks call: sends the planes of a pass, and builds a weight from the gathered ones.

The pre-hook takes one argument (mesh). FSDP2's five-argument form asserts, on short ranks only, that every tensor has
the padded shard's shape. Packed codes and scales never do, and the other ranks would hang in the collective.

Every gather that FSDP2 makes through hooks takes these two steps; `gather_plan` sends the same bytes for a group.
`LAYOUT.travels` says which planes a pass sends. FSDP2 calls hooks that a user has edited in each gather.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from layoutc.runtime.errors import MissingOrientation
from layoutc.runtime.facts import PassName
from layoutc.runtime.fsdp2 import hooks, on_gather, wire
from layoutc.runtime.quantize.block_edges import gather_bytes
from layoutc.runtime.sharding import gathered
from layoutc.runtime.sharding.registry import find, parameter_name, refuse
from layoutc.runtime.storage.planes import GatheredPlanes, Home
from layoutc.runtime.torch_private import say_changed
from layoutc.runtime.weight.tensor import QuantizedTensor

Sent = tuple[tuple[Tensor, ...], wire.Gathering]


def decide(shard: Any) -> None:
    """Decides whether gathers of a shard's group leave values or codes, if that is not decided yet.

    Raises LayoutError if gathered values were written into, since this gather would undo the write.
    """
    if (sharding := find(shard)) is None or not sharding.is_of(shard):
        return
    if gathered.decide(sharding):
        try:
            from layoutc.runtime.fsdp2 import steady_group
        except ImportError as error:
            say_changed(str(error), "gathers and reductions")
        else:
            steady_group.carry(sharding)
    on_gather.check_unwritten(shard, hooks.gathered_of(sharding.param()).values)


def send(shard: QuantizedTensor, mesh: DeviceMesh) -> Sent:
    """Returns what fsdp_pre_all_gather returns: the planes of the pass as bytes, padded with zeros if the shard is
    short, and metadata with the planes that all shards share. Sizes are equal on all ranks.

    Raises as decide and hooks.gathering_of, and UnsupportedTorch.
    """
    decide(shard)
    if (simulated := hooks.simulated.get()) is not None:
        which, shape, rows = simulated
        sharding, route = None, wire.route_for(shard.LAYOUT, which, mesh.size(), shape, rows, shard.store.matrix[1], 0)
    elif (sharding := find(shard)) is None:
        refuse(f"_module_state_mapping does not lead to {parameter_name(shard) or 'a weight'}, which FSDP2 gathers")
    else:
        route = hooks.route_of(sharding, shard)
    gathering = hooks.gathering_of(shard, sharding, route)
    names = shard.LAYOUT.travels[route.which]
    return wire.send(tuple([wire.outgoing(shard, gathering, name) for name in names]), gathering)


def receive(
    shard: hooks.Gatherable, outputs: Sequence[Tensor], metadata: wire.Gathering, dtype: torch.dtype, out: Tensor | None
) -> Any:
    """Returns what fsdp_post_all_gather returns: the whole weight without padding, and the inner tensors that FSDP2
    frees: planes that were copied together, and the values of a weight that is dequantized on gather, which is plain.
    FSDP2 frees its outputs anyway. Returns None if `out` was given.

    Planes are views of the gather's outputs; those whose blocks are split by a cut are copies.

    out: an earlier gather's tensor, whose planes are all replaced. Its aliases share its dict of planes, so those that
    autograd saved in forward see what backward gathers.
    """
    names, every = shard.LAYOUT.travels[metadata.route.which], (*outputs, *metadata.alone)
    received = zip(names, every, strict=False)  # slots that only the other pass fills come last
    planes = {name: wire.arrived(metadata, name, one) for name, one in received} | metadata.shared
    sharding = find(shard)
    if sharding is not None and on_gather.is_awaited(sharding.param()):
        state, device = hooks.gathered_of(sharding.param()), next(iter(planes.values())).device
        state.read = metadata
        values = None if out is not None else hooks.new_values(sharding, metadata.route, dtype, device)
        assert state.values is not None
        on_gather.arrive(sharding, on_gather.Arrival(shard.QUANTIZED, planes, state.values))
        return None if values is None else (values, (values, *wire.to_be_freed(metadata, [metadata.route], device)))
    if out is not None:
        hooks.deliver(shard, planes, out)
        return None
    cls, route, home = shard.QUANTIZED, metadata.route, Home(weakref.ref(shard), fetch)
    if shard.LAYOUT.passes_differ and route.which != "both":
        planes = GatheredPlanes(planes, home, route.matrix)
    tensor = cls(planes, route.shape, dtype, matrix=route.matrix, orientations=shard.orientations)
    tensor.weight_name, tensor.store.home, tensor.own_products = shard.weight_name, home, shard.own_products
    both: tuple[PassName, ...] = ("forward", "backward")
    passes = [hooks.route_of(sharding, tensor, one) for one in both] if sharding and route.which != "both" else [route]
    return tensor, wire.to_be_freed(metadata, passes, tensor.device)


def fetch(shard: hooks.Gatherable, orientation: str, device: torch.device) -> dict[str, Tensor]:
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
    gathering = wire.Gathering(hooks.route_of(sharding, quantized, "both"))
    planes = {}
    for name in quantized.LAYOUT.sources[orientation]:
        if name in quantized.LAYOUT.shared:
            planes[name] = quantized.store.planes[name].to(device)
        else:
            sent = wire.outgoing(quantized, gathering, name).to(device)
            planes[name] = wire.arrived(gathering, name, gather_bytes(sent, group))
    return planes

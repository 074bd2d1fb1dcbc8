"""What the generated all-gather hooks call: sends the planes of a pass, and builds a weight from the gathered ones.

Every gather that FSDP2 makes through hooks takes these two steps; `gather_plan` sends the same bytes for a group.
`LAYOUT.travels` says which planes a pass sends. FSDP2 calls hooks that a user has edited in each gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from layoutc.runtime.fsdp2 import hooks, on_gather, wire
from layoutc.runtime.sharding import gathered
from layoutc.runtime.sharding.registry import find
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

    Raises as decide and hooks.begin.
    """
    decide(shard)
    gathering = hooks.begin(shard, mesh)
    names = shard.LAYOUT.travels[gathering.route.which]
    return wire.send(tuple([wire.outgoing(shard, gathering, name) for name in names]), gathering)


def receive(
    shard: hooks.Gatherable, outputs: Sequence[Tensor], metadata: wire.Gathering, dtype: torch.dtype, out: Tensor | None
) -> Any:
    """Returns what fsdp_post_all_gather returns: the whole weight without padding, and the inner tensors that FSDP2
    frees. Returns None with `out`, which gets the planes.

    Planes are views of the gather's outputs; those whose blocks are split by a cut are copies. A weight that is
    dequantized on gather is a plain tensor of values.
    """
    names, every = shard.LAYOUT.travels[metadata.route.which], (*outputs, *metadata.alone)
    received = zip(names, every, strict=False)  # slots that only the other pass fills come last
    planes = {name: wire.arrived(metadata, name, one) for name, one in received}
    return hooks.finish(shard, planes | metadata.shared, metadata, dtype, out)

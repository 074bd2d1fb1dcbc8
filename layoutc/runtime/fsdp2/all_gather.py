"""What the generated all-gather hooks call: sends the planes of a pass, and makes a weight of those that arrive.

Every gather that FSDP2 makes through hooks takes these two steps. `LAYOUT.travels` says which planes a pass sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from layoutc.runtime.fsdp2 import hooks, packed, steady, wire
from layoutc.runtime.weight.tensor import QuantizedTensor

Sent = packed.Sent


def send(shard: QuantizedTensor, mesh: DeviceMesh) -> Sent:
    """What fsdp_pre_all_gather returns: the planes of the pass as bytes, padded with zeros if the shard is short, and
    metadata, which has the planes that all shards share. Sizes are equal on all ranks.

    Raises as hooks.begin.
    """
    if (sent := packed.send(shard, mesh) or steady.again(shard)) is not None:
        return sent
    gathering = hooks.begin(shard, mesh)
    names = shard.LAYOUT.travels[gathering.which]
    return steady.sent(shard, tuple([wire.outgoing(shard, gathering, name) for name in names]), gathering)


def receive(
    shard: hooks.Gatherable,
    outputs: Sequence[Tensor],
    metadata: wire.Gathering | packed.Packed,
    dtype: torch.dtype,
    out: Tensor | None,
) -> Any:
    """What fsdp_post_all_gather returns: the whole weight, without padding, and the inner tensors that FSDP2 frees;
    None with `out`, which gets the planes.

    Planes are views of the gather's outputs, unless a cut splits their blocks; those are copied. A weight that is
    dequantized on gather is a plain tensor, and gets values; its planes may have travelled with those of others.
    """
    if isinstance(metadata, packed.Packed):
        return packed.arrive(shard, outputs, metadata, dtype, out)
    if steady.arrived(shard, out, metadata, outputs):
        return None
    names = shard.LAYOUT.travels[metadata.which]
    received = zip(names, wire.receive(outputs, metadata), strict=False)  # slots of the other pass alone come last
    planes = {name: wire.arrived(metadata, name, one) for name, one in received}
    return hooks.finish(shard, planes | metadata.shared, metadata, dtype, out)

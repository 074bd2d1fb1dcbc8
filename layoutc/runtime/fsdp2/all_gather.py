"""What the generated all-gather hooks call: sends the planes of a pass, and makes a weight of those that arrive.

Every gather that FSDP2 makes through hooks takes these two steps, and `gather_plan` sends the same bytes for a group.
`LAYOUT.travels` says which planes a pass sends. A group with hooks that do anything else, because somebody has edited
or replaced them, is left to FSDP2, which calls them in each gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from layoutc.runtime.fsdp2 import hooks, on_gather, wire
from layoutc.runtime.sharding import gathered, values_or_codes
from layoutc.runtime.sharding.registry import Sharding, find
from layoutc.runtime.torch_private import say_changed, say_left
from layoutc.runtime.weight.tensor import QuantizedTensor

Sent = tuple[tuple[Tensor, ...], wire.Gathering]


def decide(shard: Any) -> None:
    """Decides whether gathers of a shard's group leave values or codes, where that is open.

    Raises LayoutError for gathered values that somebody has written into, which this gather would undo.
    """
    sharding = None if hooks.simulated() else find(shard)
    if sharding is None or not sharding.is_of(shard):
        return
    if values_or_codes.decide(sharding):
        _carry(sharding)
    on_gather.check_unwritten(shard, hooks.gathered_of(sharding).values)


def send(shard: QuantizedTensor, mesh: DeviceMesh) -> Sent:
    """What fsdp_pre_all_gather returns: the planes of the pass as bytes, padded with zeros if the shard is short, and
    metadata, which has the planes that all shards share. Sizes are equal on all ranks.

    Raises as decide and hooks.begin.
    """
    decide(shard)
    gathering = hooks.begin(shard, mesh)
    names = shard.LAYOUT.travels[gathering.which]
    return wire.send(tuple([wire.outgoing(shard, gathering, name) for name in names]), gathering)


def receive(
    shard: hooks.Gatherable,
    outputs: Sequence[Tensor],
    metadata: wire.Gathering,
    dtype: torch.dtype,
    out: Tensor | None,
) -> Any:
    """What fsdp_post_all_gather returns: the whole weight, without padding, and the inner tensors that FSDP2 frees;
    None with `out`, which gets the planes.

    Planes are views of the gather's outputs, unless a cut splits their blocks; those are copied. A weight that is
    dequantized on gather is a plain tensor, and gets values.
    """
    names = shard.LAYOUT.travels[metadata.which]
    received = zip(names, wire.receive(outputs, metadata), strict=False)  # slots of the other pass alone come last
    planes = {name: wire.arrived(metadata, name, one) for name, one in received}
    return hooks.finish(shard, planes | metadata.shared, metadata, dtype, out)


def _carry(sharding: Sharding) -> None:
    """Has a weight's group gather in fewer steps than FSDP2 takes."""
    try:
        from layoutc.runtime.fsdp2 import steady_group
    except ImportError as error:
        say_changed(str(error), "gathers and reductions")
        return
    weights = values_or_codes.weights_of(sharding)
    for one in weights:
        if not _as_generated(recipe := gathered.shard_of(one).QUANTIZED):
            name = f"{recipe.__module__}.{recipe.__qualname__}"
            say_left(gathered.name_of(one), f"the hooks of {name} are not those that `layoutc build` writes")
            return
    decisions = [decision for one in weights if (decision := gathered.decision_of(one)) is not None]
    steady_group.carry(sharding.group(), weights, decisions)


def _as_generated(recipe: Any) -> bool:
    """Whether a class's hooks are those that layoutc generates: one call of `send`, and one of `receive`."""
    hooks_of = {"send": recipe.fsdp_pre_all_gather, "receive": recipe.fsdp_post_all_gather}
    for name, hook in hooks_of.items():
        code = getattr(hook, "__code__", None)  # whose constants are a docstring, or None in its place
        if code is None or code.co_names != ("all_gather", name) or len(code.co_consts) > 1:
            return False
    return True

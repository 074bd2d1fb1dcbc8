"""What FSDP2 keeps of weights that it has gathered. With `registry`, the only module that reads its private names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from layoutc.runtime.sharding.registry import Sharding


def shard_of(param: Any) -> Any:
    """The local tensor of an FSDPParam's shard."""
    return param.sharded_param._local_tensor


def gathered_of(param: Any) -> Tensor | None:
    """The tensor that an FSDPParam gathers into, a rank's part of it if it is a DTensor; None before the first gather.

    FSDP2 makes it in the first gather, and keeps it.
    """
    made = getattr(param, "_unsharded_param", None)
    found: Tensor | None = getattr(made, "_local_tensor", made)
    return found


def leaves_values(param: Any, chosen: bool) -> bool:
    """True for an FSDPParam whose gathers leave values: as the first one did, whichever shard it holds since.

    chosen: what the first one will do.
    """
    held = gathered_of(param)
    return chosen if held is None else not hasattr(held, "QUANTIZED")


def free_outputs(params: Iterable[Any]) -> None:
    """Frees the bytes that have arrived, as FSDP2 would after the pass; it allocates them anew for the next gather."""
    for param in params:
        for output in param.all_gather_outputs:
            storage = output.untyped_storage()
            if storage.size():
                storage.resize_(0)


def is_gathered(sharding: Sharding) -> bool:
    """True while FSDP2 holds the whole weight."""
    state: Any = sharding.param().sharded_state  # type: ignore[union-attr]
    return state is not type(state).SHARDED


def forget(sharding: Sharding) -> None:
    """Has FSDP2 make the gathered weight anew, as another class of tensor, in the next gather.

    What is gathered with it may travel otherwise then, so all of the group's quantized weights are allocated anew.
    """
    param: Any = sharding.param()
    if hasattr(param, "_unsharded_param"):
        del param._unsharded_param
    for other in sharding.params_of_group():
        if hasattr(shard := shard_of(other), "QUANTIZED"):
            shard._packed = None
            other.all_gather_outputs = []


def is_offloaded(param: Any) -> bool:
    """True for an FSDPParam whose shard lies in the host's memory, and is copied to the device for each gather."""
    return bool(param.offload_to_cpu)

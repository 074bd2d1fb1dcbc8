"""What gathers of a weight leave: codes or values, decided once; and what FSDP2 keeps of weights that it has gathered,
which `torch_private.fsdp2` reads."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from layoutc.runtime.errors import LayoutError
from layoutc.runtime.product_mode import Settings
from layoutc.runtime.sharding import registry
from layoutc.runtime.sharding.registry import Sharding
from layoutc.runtime.torch_private.fsdp2 import FOR_INFERENCE as FOR_INFERENCE
from layoutc.runtime.torch_private.fsdp2 import (
    drop_gathered,
    drop_outputs,
    gathered_parameter,
    is_held,
    is_in_a_graph,
)
from layoutc.runtime.torch_private.fsdp2 import dtype_of as dtype_of
from layoutc.runtime.torch_private.fsdp2 import free_outputs as free_outputs
from layoutc.runtime.torch_private.fsdp2 import gathered_of as gathered_of
from layoutc.runtime.torch_private.fsdp2 import is_offloaded as is_offloaded
from layoutc.runtime.torch_private.fsdp2 import name_of as name_of
from layoutc.runtime.torch_private.fsdp2 import outputs_of as outputs_of
from layoutc.runtime.torch_private.fsdp2 import plain_shard_of as plain_shard_of
from layoutc.runtime.torch_private.fsdp2 import shard_of as shard_of
from layoutc.runtime.torch_private.fsdp2 import trains as trains
from layoutc.runtime.torch_private.fsdp2 import why_elsewhere as why_elsewhere
from layoutc.runtime.torch_private.fsdp2 import why_not_plain as why_not_plain

RESHARD = "call reshard() on the model's FSDP modules first"


class Decision(NamedTuple):
    """What gathers of an FSDPParam leave, whichever shard it holds; and the mode of all weights at that time."""

    values: bool  # not codes
    mode: Settings


_decided: weakref.WeakKeyDictionary[Any, Decision] = weakref.WeakKeyDictionary()  # by FSDPParam, until `forget`


def decide(param: Any, decision: Decision) -> None:
    """From now on the gathers of an FSDPParam leave that."""
    _decided[param] = decision


def decision_of(param: Any) -> Decision | None:
    """None before the first gather begins."""
    return _decided.get(param)


def check_given_back(sharding: Sharding, params: Sequence[Any], what: str) -> None:
    """Raises LayoutError, on all ranks alike, if backward has yet to read what was gathered of FSDPParams that are to
    be gathered otherwise, or has left gradients there that no step has taken. Collective: graphs live as long as
    somebody holds them, and weights may have gradients on some ranks alone.

    sharding: of one of them. what: has changed.
    """
    held = [made for param in params if (made := gathered_parameter(param)) is not None]
    adds_up = any(made.grad is not None for made in held)
    in_a_graph = any(map(is_in_a_graph, held)) and getattr(sharding.group(), "_awaits_backward", True)
    adds_up, in_a_graph = _anywhere([adds_up, in_a_graph], sharding)
    if adds_up:
        raise LayoutError(
            f"{sharding.name}: {what} while gradients are being accumulated, which FSDP2 keeps with what is gathered "
            "now; change it after the optimizer's step"
        )
    if in_a_graph:
        raise LayoutError(
            f"{sharding.name}: {what} between a forward pass and its backward, for which weights are gathered "
            "otherwise; put it around whole steps, or run what lies in between under the same mode"
        )


def _anywhere(holds: Sequence[bool], sharding: Sharding) -> list[bool]:
    """Each: true on some rank of those that a weight is sharded over."""
    group = sharding.process_group
    if group is None or group.size() == 1:
        return list(holds)
    said = torch.tensor(holds, dtype=torch.int32, device=sharding.parameter.device)
    dist.all_reduce(said, dist.ReduceOp.MAX, group)
    return [bool(one) for one in said.tolist()]


def weights_of_values() -> dict[int, Tensor]:
    """The id of each parameter that has the values of a quantized weight, as gathers leave them -> the weight's shards.

    For as long as FSDP2 holds a module's weights gathered, its parameters are those.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    left = [param for param, _ in registry.parameters() if hasattr(shard_of(param), "QUANTIZED")]
    of_values = [param for param in left if (made := decision_of(param)) is not None and made.values]
    held = [(gathered_parameter(param), param) for param in of_values]
    return {id(made): param.sharded_param for made, param in held if made is not None}


def allocate(values: Tensor) -> None:
    """Gives the tensor that a gather leaves values in its memory, as FSDP2 would before the post-all-gather hook."""
    storage, nbytes = values.untyped_storage(), values.nbytes
    if storage.size() != nbytes:
        storage.resize_(nbytes)


def check_resharded(sharding: Sharding, name: str) -> None:
    """Raises LayoutError while FSDP2 holds the whole weight, or gathers it. name: of the weight."""
    if is_held(sharding):
        raise LayoutError(f"{name} is gathered now: {RESHARD}")


def forget(sharding: Sharding) -> None:
    """Has FSDP2 make the gathered weight anew, as another class of tensor, in the next gather.

    What is gathered with it may travel otherwise then, so all of the group's quantized weights are allocated anew.
    """
    param: Any = sharding.param()
    _decided.pop(param, None)
    drop_gathered(param)
    for other in sharding.params_of_group():
        if hasattr(shard_of(other), "QUANTIZED"):
            drop_outputs(other)
    if (forget_plans := getattr(sharding.group(), "forget_plans", None)) is not None:
        forget_plans()

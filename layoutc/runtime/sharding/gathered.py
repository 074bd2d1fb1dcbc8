"""What FSDP2 keeps of weights that it has gathered. Only `registry`, and
`steady_group` and `torch_private`, read its private names too."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from layoutc.runtime.errors import LayoutError
from layoutc.runtime.product_mode import Settings
from layoutc.runtime.sharding import registry
from layoutc.runtime.sharding.registry import Sharding

RESHARD = "call reshard() on the model's FSDP modules first"


def shard_of(param: Any) -> Any:
    """The local tensor of an FSDPParam's shard."""
    return param.sharded_param._local_tensor


def trains(param: Any) -> bool:
    """True for an FSDPParam whose shard has gradients."""
    return bool(param.sharded_param.requires_grad)


def gathered_of(param: Any) -> Tensor | None:
    """The tensor that an FSDPParam gathers into, a rank's part of it if it is a DTensor; None before the first gather.

    FSDP2 makes it in the first gather, and keeps it.
    """
    made: Tensor | None = getattr(param, "_unsharded_param", None)
    return made._local_tensor if isinstance(made, DTensor) else made


def dtype_of(param: Any) -> torch.dtype | None:
    """The dtype that an FSDPParam is gathered in: the policy's, or that of its shard; None before the first forward."""
    own: torch.dtype | None = getattr(param, "orig_dtype", None)
    return own if own is None or (of_policy := param.param_dtype) is None else of_policy


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
    held = [made for param in params if (made := getattr(param, "_unsharded_param", None)) is not None]
    adds_up = any(made.grad is not None for made in held)
    in_a_graph = any(made._use_count() > 1 for made in held)  # the other is Python's own
    in_a_graph = in_a_graph and getattr(sharding.group(), "_awaits_backward", True)
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
    held = [(gathered_of(param), param) for param in left if (made := decision_of(param)) is not None and made.values]
    return {id(param._unsharded_param): param.sharded_param for made, param in held if made is not None}


def name_of(param: Any) -> str:
    """The fully qualified name of an FSDPParam's parameter, if FSDP2 knows it."""
    return getattr(param, "_param_fqn", None) or "a parameter"


FOR_INFERENCE = "inference mode gathered it first"


def why_elsewhere(param: Any) -> str:
    """Why an FSDPParam's shard is not sent as it lies, "" if it is."""
    if is_offloaded(param):
        return "it is offloaded to the CPU"
    return f"it is sharded on dim {param.fsdp_placement.dim}" if param.fsdp_placement.dim else ""


def why_not_plain(param: Any) -> str:
    """Why an FSDPParam is not gathered as it is: cut on its first dim, into ordinary memory; "" if it is."""
    if hasattr(shard_of(param), "fsdp_pre_all_gather") or len(param.all_gather_outputs) != 1:
        return "it has all-gather hooks of its own"
    return why_elsewhere(param) or (FOR_INFERENCE if param.all_gather_outputs[0].is_inference() else "")


def plain_shard_of(param: Any) -> Tensor:
    """What a plain FSDPParam sends, before it is cast: (numel,), padded to what all ranks send."""
    return param._sharded_param_data  # type: ignore[no-any-return]


def outputs_of(param: Any) -> list[Tensor]:
    """What the tensors of an FSDPParam are gathered into: (ranks * numel,), whose storages FSDP2 frees and
    allocates."""
    return param.all_gather_outputs  # type: ignore[no-any-return]


def allocate(values: Tensor) -> None:
    """Gives the tensor that a gather leaves values in its memory, as FSDP2 would before the post-all-gather hook."""
    storage, nbytes = values.untyped_storage(), values.nbytes
    if storage.size() != nbytes:
        storage.resize_(nbytes)


def free_outputs(params: Iterable[Any]) -> None:
    """Frees the bytes that have arrived, as FSDP2 would after the pass; it allocates them anew for the next gather."""
    for param in params:
        for output in param.all_gather_outputs:
            storage = output.untyped_storage()
            if storage.size():
                storage.resize_(0)


def check_resharded(sharding: Sharding, name: str) -> None:
    """Raises LayoutError while FSDP2 holds the whole weight, or gathers it. name: of the weight."""
    state: Any = sharding.param().sharded_state  # type: ignore[union-attr]
    group: Any = sharding.group()
    if state is not type(state).SHARDED or group._all_gather_result is not None:
        raise LayoutError(f"{name} is gathered now: {RESHARD}")


def forget(sharding: Sharding) -> None:
    """Has FSDP2 make the gathered weight anew, as another class of tensor, in the next gather.

    What is gathered with it may travel otherwise then, so all of the group's quantized weights are allocated anew.
    """
    param: Any = sharding.param()
    _decided.pop(param, None)
    if hasattr(param, "_unsharded_param"):
        del param._unsharded_param
    for other in sharding.params_of_group():
        if hasattr(shard_of(other), "QUANTIZED"):
            other.all_gather_outputs = []
    if (forget_plans := getattr(sharding.group(), "forget_plans", None)) is not None:
        forget_plans()


def is_offloaded(param: Any) -> bool:
    """True for an FSDPParam whose shard lies in the host's memory, and is copied to the device for each gather."""
    return bool(param.offload_to_cpu)

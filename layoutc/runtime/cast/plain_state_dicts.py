"""State dicts of weights that are cast on gather hold plain values, which load into an ordinary model, and back."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from layoutc.runtime.cast.tensor import CastOnGather, find_cast
from layoutc.runtime.sharding.meshes import with_local
from layoutc.runtime.weight.tensor import QuantizedTensor


def keep_plain(module: nn.Module) -> None:
    """From now on `module` gives the values of its weight to state dicts, and takes plain ones."""
    module.register_state_dict_post_hook(give_plain)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(take_plain)  # type: ignore[no-untyped-call]


def give_plain(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """The weight's values, sharded as it is, in its memory: loading in place is loading into the weight."""
    weight = state.get(f"{prefix}weight")
    tensor = find_cast(weight) if isinstance(weight, Tensor) and not isinstance(weight, nn.Parameter) else None
    if tensor is not None:
        state[f"{prefix}weight"] = with_local(weight, tensor.plain)


def take_plain(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Plain values as a tensor of the class, so that a weight which is assigned stays what it was.

    What is loaded has nothing to do with the values before, so a history of amaxes starts anew.
    """
    tensor = find_cast(weight) if (weight := getattr(module, "weight", None)) is not None else None
    value = state.get(f"{prefix}weight")
    if tensor is None or not isinstance(value, Tensor):
        return
    tensor._agreed.forget()
    local = getattr(value, "_local_tensor", value)
    if not isinstance(local, CastOnGather | QuantizedTensor) and local.is_floating_point():
        state[f"{prefix}weight"] = with_local(value, tensor._fresh(local.detach()))


# Hooks are pickled with their module, by name.
give_plain.__module__ = take_plain.__module__ = "layoutc.pickled"

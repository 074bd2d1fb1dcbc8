"""State dicts of cast-on-gather weights: they hold plain values, as those of an ordinary model do."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from layoutc.runtime.cast.tensor import CastOnGather, find_cast
from layoutc.runtime.sharding.meshes import with_local
from layoutc.runtime.torch_private import local_tensor
from layoutc.runtime.weight.tensor import QuantizedTensor


def give_plain(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A state_dict hook: inserts the weights' values, sharded and sharing memory, so that in-place loads work."""
    for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
        weight = state.get(f"{prefix}{name}")
        tensor = find_cast(weight) if isinstance(weight, Tensor) and not isinstance(weight, nn.Parameter) else None
        if tensor is not None:
            state[f"{prefix}{name}"] = with_local(weight, tensor.plain)


def take_plain(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A load_state_dict hook: wraps plain values in the class, so that assigned weights keep it.

    The loaded values are unrelated to the old ones, so a history of amaxes starts anew.
    """
    for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
        tensor, value = find_cast(weight), state.get(f"{prefix}{name}")
        if tensor is None or not isinstance(value, Tensor):
            continue
        tensor._agreed.forget()
        local = local_tensor(value)
        if not isinstance(local, CastOnGather | QuantizedTensor) and local.is_floating_point():
            state[f"{prefix}{name}"] = with_local(value, tensor._fresh(local.detach()))


# Pickled modules name their hooks.
give_plain.__module__ = take_plain.__module__ = "layoutc.pickled"

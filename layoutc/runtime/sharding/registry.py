"""The registry of shards that FSDP2 holds: each is found once, in FSDP2's registry of modules, and cached."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Layout
from layoutc.runtime.product_mode import Settings
from layoutc.runtime.torch_private.fsdp2 import Sharding as Sharding
from layoutc.runtime.torch_private.fsdp2 import gathered_parameter, name_of, shard_of, whole_shape
from layoutc.runtime.torch_private.fsdp2 import parameters as parameters
from layoutc.runtime.torch_private.fsdp2 import refuse as refuse


class Shard(Protocol):
    """A wrapper of ours that FSDP2 may hold as a shard, quantized or cast on gather."""

    LAYOUT: ClassVar[Layout]
    weight_name: str | None
    peers: tuple[str, ...] | None
    own_products: Settings | None

    @property
    def shape(self) -> torch.Size: ...  # of this rank's part of the weight
    @property
    def device(self) -> torch.device: ...
    @property
    def store(self) -> Any: ...  # one object that a shard and all its aliases share
    def label(self) -> str: ...


_shardings: dict[int, Sharding] = {}  # by the id of the shard's planes, until the shard is gone
_copies: Any = WeakTensorKeyDictionary()


def find(shard: Shard) -> Sharding | None:
    """The Sharding of a shard or its alias; None if FSDP2 does not hold it."""
    shard = _copies.get(shard, shard) if _copies else shard
    sharding = _look_up(shard)
    if sharding is None and dist.is_initialized():
        _scan()
        sharding = _look_up(shard)
    return sharding


def _look_up(shard: Shard) -> Sharding | None:
    sharding = _shardings.get(id(shard.store))
    local = sharding.local() if sharding else None
    return sharding if local is not None and local.store is shard.store else None


def _scan() -> None:
    for param, group in parameters():
        local: Any = shard_of(param)
        if getattr(local, "store", None) is not None and _look_up(local) is None:
            number = id(local.store)
            forget = partial(_forget, number)
            _shardings[number] = Sharding(weakref.ref(local, forget), weakref.ref(param), weakref.ref(group))


def _forget(number: int, local: weakref.ref[Any]) -> None:
    """Called when a shard is gone. Another one may already have its id."""
    if (sharding := _shardings.get(number)) is not None and sharding.local is local:
        del _shardings[number]


def remember_copy(copy: Shard, shard: Shard) -> bool:
    """Registers a copy of a shard on another device, from which CPU offload gathers; False if it is not a copy."""
    is_copy_of_shard = copy.device != shard.device and find(shard) is not None
    if is_copy_of_shard:
        stand_in(copy, shard)
    return is_copy_of_shard


def stand_in(copy: Shard, shard: Shard) -> None:
    """Makes `find` return the shard's Sharding for `copy`, too."""
    _copies[copy] = _copies.get(shard, shard)


def parameter_name(shard: Shard) -> str | None:
    """The parameter's fully qualified name, if FSDP2 or quantize_ knows it."""
    sharding = find(shard)
    return (sharding.name if sharding else None) or shard.weight_name


# -------------------------------------------------------------------------------------------------- of all parameters
def holds(parameter: Tensor) -> bool:
    """True for a parameter that fully_shard made, quantized or not."""
    return any(param.sharded_param is parameter for param, _ in parameters())


def trains_instead(name: str, shape: tuple[int, ...]) -> bool:
    """True if fully_shard made a parameter from a weight of this name and shape, and that parameter has a gradient."""
    return any(
        getattr(shard_of(param), "weight_name", None) == name
        and whole_shape(param) == shape
        and param.sharded_param.grad is not None
        for param, _ in parameters()
    )


def sharded_parameters() -> dict[int, Tensor]:
    """The id of each parameter that is gathered now -> the sharded parameter that it was gathered from."""
    sharded = {}
    for param, _ in parameters():
        if (gathered := gathered_parameter(param)) is not None:
            sharded[id(gathered)] = param.sharded_param
    return sharded


def check_shards(params: Iterable[Tensor], owner: str) -> None:
    """Raises LayoutError for an optimizer of gathered parameters, which would train nothing. owner: its name."""
    found = ((gathered_parameter(param), param) for param, _ in parameters())
    names = {
        id(made): getattr(shard_of(param), "weight_name", None) or name_of(param)  # FSDP2 knows it from its first pass
        for made, param in found
        if made is not None
    }
    for param in params:
        if id(param) in names:
            raise LayoutError(
                f"{owner} has {names[id(param)]} of shape {tuple(param.shape)} as FSDP2 gathered it, but its shards "
                f"receive the gradients: call reshard() on the model's FSDP modules, and give {owner} the parameters "
                "that they have then"
            )


def check_replaced(params: Iterable[Tensor], owner: str) -> None:
    """Raises LayoutError for an optimizer of parameters that fully_shard replaced, if the new ones have gradients."""
    params = list(params)
    if any(param.grad is not None for param in params):
        return
    for param in params:
        name = getattr(param, "weight_name", None)
        if name is not None and trains_instead(name, tuple(param.shape)):
            raise LayoutError(
                f"{owner} has {name} of shape {tuple(param.shape)} from before fully_shard, which replaced it: create "
                f"{owner} after fully_shard"
            )


_SIGNATURE = inspect.signature(lambda self, mesh: None)


def pre_hook(hook: Any) -> Any:
    """A decorator for fsdp_pre_all_gather that caches its signature, which FSDP2 inspects in each of its own gathers:
    computing it takes a third of the hook's time."""
    hook.__signature__ = _SIGNATURE
    return hook

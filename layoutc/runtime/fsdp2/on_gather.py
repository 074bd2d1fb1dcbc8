"""Weights that travel as codes and are dequantized after the gather: FSDP2 then holds plain values, as of any weight.

After a group's gather, FSDP2 calls the post-all-gather hooks of its parameters one after another. The last one's hook
dequantizes them all, in one launch for each recipe, and frees the gathered planes.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layoutc.runtime.errors import LayoutError
from layoutc.runtime.kernels.launch_plan import LaunchPlan
from layoutc.runtime.parts import Parts
from layoutc.runtime.sharding import gathered
from layoutc.runtime.sharding.registry import Sharding, find
from layoutc.runtime.torch_private import reset_version, version_of
from layoutc.runtime.torch_private.fsdp2 import free_outputs, shard_of
from layoutc.runtime.weight.tensor import QuantizedTensor


class Arrival(NamedTuple):
    """A weight whose planes have arrived."""

    recipe: type[QuantizedTensor]
    planes: Mapping[str, Tensor]
    values: Tensor  # (m, k), to be written
    parts: Parts | None = None  # of split planes, where `planes` has those of the first part


_arrived: weakref.WeakKeyDictionary[Any, list[Arrival]] = weakref.WeakKeyDictionary()  # by FSDPParamGroup


def check_unwritten(shard: Any, values: Tensor | None) -> None:
    """Raises LayoutError if the values of the last gather were written into: this gather would lose the write."""
    if values is not None and version_of(values):  # gathers keep it at 0
        reset_version(values)
        raise LayoutError(
            f"{shard.label()} was written while it was gathered, and the next gather undoes that; write into the "
            "sharded parameter, on all ranks: before forward, or after reshard()"
        )


def arrive(sharding: Sharding, arrival: Arrival) -> None:
    """Records a weight that has arrived; the last one of its group dequantizes all of them."""
    param, awaited = sharding.param(), [one for one in sharding.params_of_group() if is_awaited(one)]
    arrivals = _arrived.setdefault(sharding.group(), [])
    if param is awaited[0]:
        arrivals.clear()  # of a failed gather
    arrivals.append(arrival)
    if param is not awaited[-1]:
        return
    del _arrived[sharding.group()]
    if len(arrivals) != len(awaited):
        raise LayoutError(
            f"{sharding.name}: {len(arrivals)} of {len(awaited)} weights that FSDP2 gathers together have arrived. "
            'layoutc.dequantize("layer") gathers codes, which needs no order'
        )
    dequantize_all(arrivals)
    free_outputs(awaited)


def is_awaited(param: Any) -> bool:
    """True for a parameter whose gather leaves values."""
    if (decision := gathered.decision_of(param)) is not None:
        return decision.values
    shard = shard_of(param)
    if not hasattr(shard, "QUANTIZED") or (sharding := find(shard)) is None:
        return False
    weights = gathered.weights_of(sharding)
    return gathered.are_left(weights)[weights.index(param)]


@torch.no_grad()
def dequantize_all(arrivals: Sequence[Arrival]) -> LaunchPlan | None:
    """Writes the values of weights, in one launch for those of a recipe and a dtype; see `dequantize_into`."""
    kinds: dict[Any, list[Arrival]] = defaultdict(list)
    for one in arrivals:
        kinds[one.recipe, one.values.dtype, one.values.device].append(one)
    plans: list[LaunchPlan] = []
    for (recipe, *_), members in kinds.items():
        planes, values, parts = [list(one) for one in list(zip(*members, strict=True))[1:]]
        if (plan := recipe.dequantize_into(planes, recipe.LAYOUT.orientations[0], values, parts)) is not None:
            plans.append(plan)
    return plans[0].joined(plans) if plans and len(plans) == len(kinds) else None

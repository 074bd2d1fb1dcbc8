"""Decides, per FSDP2 group, whether gathers leave bf16 weights or quantized planes: by the per-weight mode, else by the
global one, if values cost nothing.

A group's weights are decided together, at the group's first gather, from facts that are equal on all ranks; and again
in a forward gather that finds another global mode.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from layoutc.ints.cuts import Cuts
from layoutc.ints.gathers import fits_pack, leaves_values, values_cost_nothing
from layoutc.runtime import product_mode
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.product_mode import Settings, gathers_values
from layoutc.runtime.sharding import registry
from layoutc.runtime.sharding.registry import Sharding, find
from layoutc.runtime.torch_private import fsdp2

RESHARD = "call reshard() on the model's FSDP modules first"


class Decision(NamedTuple):
    """What gathers of an FSDPParam leave, whichever shard it holds; and the mode of all weights at that time."""

    values: bool  # not codes
    mode: Settings


_decided: weakref.WeakKeyDictionary[Any, Decision] = weakref.WeakKeyDictionary()  # by FSDPParam, until `forget`


def decision_of(param: Any) -> Decision | None:
    """None before the first gather begins."""
    return _decided.get(param)


def weights_of(sharding: Sharding) -> list[Any]:
    """The FSDPParams of a weight's group that are quantized or cast on gather."""
    return [one for one in sharding.params_of_group() if hasattr(fsdp2.shard_of(one), "QUANTIZED")]


def decide(sharding: Sharding) -> bool:
    """Decides for a weight's group, in the first gather and in each forward gather that finds another global mode.
    FSDP2 then recreates gathered tensors of the other kind. Returns True if something was to be decided.

    Raises LayoutError if backward of an earlier forward pass would still read these; see `check_given_back`.
    """
    decision, mode = decision_of(sharding.param()), product_mode.current()
    if decision is not None and (decision.mode == mode or sharding.gathers_for_backward):
        return False
    weights = weights_of(sharding)
    decisions = [(one, Decision(values, mode)) for one, values in zip(weights, are_left(weights), strict=True)]
    changed = [(one, now) for one, now in decisions if decision_of(one) != now]
    made_anew = [one for one, now in changed if (before := decision_of(one)) and before.values != now.values]
    if made_anew:
        check_given_back(sharding, made_anew, f"what is set for all weights changed to {mode}")
    for one in made_anew:
        own = find(fsdp2.shard_of(one))
        assert own is not None
        forget(own)
    for one, now in changed:
        _decided[one] = now
    return bool(changed)


def are_left(weights: Sequence[Any], own: Sequence[Settings | None] | None = None) -> list[bool]:
    """For each weight of a group: true if its first gather leaves values.

    weights: all FSDPParams of the group that are quantized or cast on gather. own: their settings; default: current.
    """
    chosen = [fsdp2.shard_of(one).own_products for one in weights] if own is None else own
    return leaves_values(list(map(gathers_values, chosen)), map(_costs_nothing, weights))


def _costs_nothing(param: Any) -> bool:
    shard: Any = fsdp2.shard_of(param)
    dtype, sharding = fsdp2.dtype_of(param), find(shard)
    if dtype is None or sharding is None or sharding.reshards_to_fewer_ranks:
        return False
    differ, stays = shard.LAYOUT.passes_differ, not sharding.frees_after_forward
    return values_cost_nothing(True, dtype.itemsize, differ, stays) and fits(param, sharding, shard)


def fits(param: Any, sharding: Sharding, shard: Any) -> bool:
    """True if a weight can be dequantized from the received rows: each rank sends whole blocks of rows, in planes of
    multiples of 16 bytes, of a shard on the device."""
    group, layout = sharding.process_group, shard.LAYOUT
    if group is None or group.size() == 1 or sharding.dim or fsdp2.is_offloaded(param):
        return False
    (*padded, k), rows = sharding.padded_shape, prod(sharding.shape[:-1])
    cuts = Cuts(rows, prod(padded), group.size())
    sent = layout.sent("forward", cuts, k).items()
    return fits_pack([(layout.stored[name].rows_per_value or 1, facts.nbytes) for name, facts in sent], cuts)


def check_given_back(sharding: Sharding, params: Sequence[Any], what: str) -> None:
    """Raises LayoutError, on all ranks, if backward has yet to read gathered tensors that must be recreated, or has
    left gradients there that no step has taken. Collective: graphs live as long as something holds them, and weights
    may have gradients on some ranks only.

    sharding: of one of them. what: has changed.
    """
    held = [made for param in params if (made := fsdp2.gathered_parameter(param)) is not None]
    adds_up = any(made.grad is not None for made in held)
    in_a_graph = any(map(fsdp2.is_in_a_graph, held)) and getattr(sharding.group(), "_awaits_backward", True)
    adds_up, in_a_graph = _anywhere([adds_up, in_a_graph], sharding)
    if adds_up:
        raise LayoutError(
            f"{sharding.name}: {what} while gradients are being accumulated, which FSDP2 keeps with what is gathered "
            "now; change it after the optimizer's step"
        )
    if in_a_graph:
        raise LayoutError(
            f"{sharding.name}: {what} between a forward pass and its backward, which gather weights differently. "
            "Set it around whole steps, or run both passes under the same mode"
        )


def _anywhere(holds: Sequence[bool], sharding: Sharding) -> list[bool]:
    """For each: true on some rank of the weight's group."""
    group = sharding.process_group
    if group is None or group.size() == 1:
        return list(holds)
    said = torch.tensor(holds, dtype=torch.int32, device=sharding.parameter.device)
    dist.all_reduce(said, dist.ReduceOp.MAX, group)
    return [bool(one) for one in said.tolist()]


def weights_of_values() -> dict[int, Tensor]:
    """The id of each parameter with a quantized weight's gathered values -> the weight's shard.

    While FSDP2 holds a module's weights gathered, these are its parameters.
    """
    if not dist.is_initialized():
        return {}
    left = [param for param, _ in registry.parameters() if hasattr(fsdp2.shard_of(param), "QUANTIZED")]
    of_values = [param for param in left if (made := decision_of(param)) is not None and made.values]
    held = [(fsdp2.gathered_parameter(param), param) for param in of_values]
    return {id(made): param.sharded_param for made, param in held if made is not None}


def check_resharded(sharding: Sharding, name: str) -> None:
    """Raises LayoutError while FSDP2 holds the whole weight, or gathers it. name: of the weight."""
    if fsdp2.is_held(sharding):
        raise LayoutError(f"{name} is gathered now: {RESHARD}")


def forget(sharding: Sharding) -> None:
    """Makes FSDP2 recreate the gathered weight, as another class of tensor, in the next gather.

    Other weights of the group may then travel differently, so all of its quantized weights are reallocated.
    """
    param: Any = sharding.param()
    _decided.pop(param, None)
    fsdp2.drop_gathered(param)
    for other in sharding.params_of_group():
        if hasattr(fsdp2.shard_of(other), "QUANTIZED"):
            fsdp2.drop_outputs(other)
    if (forget_plans := getattr(sharding.group(), "forget_plans", None)) is not None:
        forget_plans()

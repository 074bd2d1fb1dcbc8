"""Whether the gathers of a weight leave values or codes: by its own choice, or by that of all weights, where values
cost nothing.

What FSDP2 gathers together is decided together, when the first of it is gathered, by what is equal on all ranks; and
anew in a gather for forward that finds another mode of all weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from layoutc.ints.cuts import Cuts
from layoutc.ints.gathers import fits_pack, leaves_values, values_cost_nothing
from layoutc.runtime import product_mode
from layoutc.runtime.product_mode import Settings, gathers_values
from layoutc.runtime.sharding import gathered
from layoutc.runtime.sharding.registry import Sharding, find


def weights_of(sharding: Sharding) -> list[Any]:
    """The FSDPParams of what is quantized, or cast, of all that is gathered with a weight."""
    return [one for one in sharding.params_of_group() if hasattr(gathered.shard_of(one), "QUANTIZED")]


def decide(sharding: Sharding) -> bool:
    """Decides for all weights that are gathered with one, in the first gather, and in each for a forward pass that
    finds another mode of all weights than the last one did. FSDP2 makes anew what it has gathered otherwise before.
    True if it was open.

    Raises LayoutError where backward of an earlier forward pass would still read that; see `gathered.check_given_back`.
    """
    decision, mode = gathered.decision_of(sharding.param()), product_mode.current()
    if decision is not None and (decision.mode == mode or sharding.gathers_for_backward):
        return False
    weights = weights_of(sharding)
    decisions = [(one, gathered.Decision(values, mode)) for one, values in zip(weights, are_left(weights), strict=True)]
    changed = [(one, now) for one, now in decisions if gathered.decision_of(one) != now]
    made_anew = [one for one, now in changed if (before := gathered.decision_of(one)) and before.values != now.values]
    if made_anew:
        gathered.check_given_back(sharding, made_anew, f"what is set for all weights changed to {mode}")
    for one in made_anew:
        own = find(gathered.shard_of(one))
        assert own is not None
        gathered.forget(own)
    for one, now in changed:
        gathered.decide(one, now)
    return bool(changed)


def are_left(weights: Sequence[Any], own: Sequence[Settings | None] | None = None) -> list[bool]:
    """For each weight of a group: true if its first gather leaves values.

    weights: FSDPParams, all those of the group that are quantized or cast on gather. own: their own settings; default:
    those that they have.
    """
    chosen = [gathered.shard_of(one).own_products for one in weights] if own is None else own
    return leaves_values(list(map(gathers_values, chosen)), map(_costs_nothing, weights))


def _costs_nothing(param: Any) -> bool:
    shard: Any = gathered.shard_of(param)
    dtype, sharding = gathered.dtype_of(param), find(shard)
    if dtype is None or sharding is None or sharding.reshards_to_fewer_ranks:
        return False
    differ, stays = shard.LAYOUT.passes_differ, not sharding.frees_after_forward
    return values_cost_nothing(True, dtype.itemsize, differ, stays) and fits(param, sharding, shard)


def fits(param: Any, sharding: Sharding, shard: Any) -> bool:
    """True if a weight can be dequantized where it arrives: each rank sends whole blocks of rows, and planes of
    multiples of 16 bytes, of a shard on the device."""
    group, layout = sharding.process_group, shard.LAYOUT
    if group is None or group.size() == 1 or sharding.dim or gathered.is_offloaded(param):
        return False
    (*padded, k), rows = sharding.padded_shape, prod(sharding.shape[:-1])
    cuts = Cuts(rows, prod(padded), group.size())
    sent = layout.sent("forward", cuts, k).items()
    return fits_pack([(layout.stored[name].rows_per_value or 1, facts.nbytes) for name, facts in sent], cuts)

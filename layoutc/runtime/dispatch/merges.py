"""Undoing merges: restores the bytes that a weight had before something was added to it.

Subtracting from a quantized sum gives other codes. So a weight's bytes before a merge are kept while something is
merged. An adapter's layer says when: writes from its method `merge` keep them, and writes from its method `unmerge`
restore them, whatever the layer computes. All of PEFT's layers have these methods. Other writes into a merged weight
drop the kept bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from layoutc.runtime import callers
from layoutc.runtime.dispatch import update_warnings
from layoutc.runtime.quantize import weights
from layoutc.runtime.storage import initial_values
from layoutc.runtime.storage.store import Writes
from layoutc.runtime.weight.tensor import QuantizedTensor, written


class Base(NamedTuple):
    """A weight before merges. weight: a copy; None once restored. owner: the layer that merges; None for `merge_`."""

    weight: QuantizedTensor | None
    owner: weakref.ref[Any] | None = None


def keep(target: QuantizedTensor, owner: Any = None) -> Base:
    """The weight before the owner's merges, if there are any; else a copy of the weight."""
    kept = initial_values.base(target.store)
    if kept is not None and kept.weight is not None and (kept.owner() if kept.owner else None) is owner:
        return kept  # type: ignore[no-any-return]
    copy = target.compact_copy()
    copy.store.writes.base = None
    return Base(copy)


def hold(target: QuantizedTensor, base: Base, owner: Any = None) -> None:
    """Keeps `base` of a weight that was just written, while the owner lives."""
    if owner is not None:
        base = base._replace(owner=weakref.ref(owner, partial(_drop, weakref.ref(target.store.writes))))
    initial_values.set_base(target.store, base)


def _drop(writes: weakref.ref[Writes], owner: weakref.ref[Any]) -> None:
    """Drops what a deleted layer kept: its merge is permanent."""
    if (there := writes()) is not None and there.base is not None and there.base[0].owner is owner:
        there.base = None


def give_back(target: QuantizedTensor) -> bool:
    """Restores a weight from before merges; False if it is not kept."""
    if (base := initial_values.base(target.store)) is None:
        return False
    if base.weight is not None:
        for name, plane in target.store.planes.items():
            plane.copy_(base.weight.store.planes[name])  # with the halo of a shard that is cut in a block
        written([target])
        initial_values.carry(target.store, base.weight.store)
        initial_values.set_base(target.store, Base(None))
    return True


def write(target: QuantizedTensor, values: Tensor) -> None:
    """Quantizes plain values into a weight. A merge keeps the weight's bytes, and an unmerge brings them back."""
    method, owner = callers.merging()
    if method == "unmerge" and give_back(target):
        return
    base = _before(target, owner) if method == "merge" else None
    before = update_warnings.values_before(target)
    weights.requantize_(target, values)
    update_warnings.check_written(target, before, values)
    if base is not None:
        hold(target, base, owner)


def assigned(target: QuantizedTensor, values: Tensor) -> QuantizedTensor:
    """Quantizes plain values that are assigned to a weight's data, as `write`."""
    method, owner = callers.merging()
    base = initial_values.base(target.store)
    if method == "unmerge" and base is not None:
        weight: Any = target if base.weight is None else base.weight
        found: QuantizedTensor = weight.to(values.device).alias(dtype=values.dtype)
        initial_values.set_base(found.store, Base(None))
        return found
    base = _before(target, owner) if method == "merge" else None
    new = weights.replacement(target, values)
    update_warnings.check_written(new, update_warnings.values_before(target), values)
    if base is not None:
        hold(new, base, owner)
    return new


def note_read(values: Sequence[Any]) -> None:
    """Warns, once, of an adapter's layer whose `merge` computes new values of a shard instead of writing into it."""
    of_layer = callers.merging()
    if of_layer[0] != "merge":
        return
    params = of_layer[1].parameters()
    shards = [local for one in params if isinstance(local := getattr(one, "_local_tensor", None), QuantizedTensor)]
    for value in values:
        if isinstance(value, QuantizedTensor) and any(value.store.planes is one.store.planes for one in shards):
            update_warnings.warn_once(
                "assigned",
                f"{type(of_layer[1]).__module__} computes merged values of {value.label()}, which is a shard. "
                "Where it assigns them to .data, as DoRA, IA3 and safe_merge=True do, torch drops them, and nothing is "
                "merged: use LoRA with safe_merge=False, or merge where weights are whole",
            )


def _before(target: QuantizedTensor, owner: Any) -> Base | None:
    """What a layer keeps of a weight before it merges; None for a part of a weight, which has no bytes of its own."""
    if target.store.part is not None or target.is_meta:
        return None
    update_warnings.warn_once(
        "merge",
        f"{type(owner).__module__} merges adapters into quantized weights ({target.label()} first): their codes are "
        "those of each sum, quantized again, and lack what is less than half a step between codes. Unmerging brings "
        "back the base's bytes",
    )
    return keep(target, owner)

"""The amax that decides the scales of a weight: shared over its shards, and picked from a history."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Layout
from layoutc.runtime.kernels import batches, launch
from layoutc.runtime.weight import operators
from layoutc.runtime.weight.tensor import QuantizedTensor

Groups = Sequence[dist.ProcessGroup]


def reduce_max(values: Tensor, group: dist.ProcessGroup | Groups | None, tag: int | None = None) -> Tensor:
    """The largest of each entry over a group, or over several, one for each mesh dim; NaN wins. fp32 magnitudes.

    Reduced as int32: magnitudes order as their bits do, with NaN above inf, while a floating-point MAX may drop NaN.
    `tag` says what is reduced: raises LayoutError, on all ranks alike, where ranks reduce different things at once.
    """
    given = [group] if isinstance(group, dist.ProcessGroup) else group or ()
    groups = [one for one in given if one.size() > 1]
    if not groups:
        return values
    bits = values.contiguous().view(torch.int32)
    packed = bits.reshape(-1)
    if tag is not None:
        packed = torch.cat([packed, packed.new_tensor([tag, -tag])])
    # CPU-offloaded shards are reduced where the group's backend can.
    device = torch.device("cuda") if dist.get_backend(groups[0]) == "nccl" else packed.device
    packed = packed.to(device, copy=True)
    for one in groups:
        dist.all_reduce(packed, dist.ReduceOp.MAX, group=one)
    if tag is not None and packed[-2:].tolist() != [tag, -tag]:
        raise LayoutError("ranks quantize different weights at the same time: write sharded weights in the same order")
    return packed[: bits.numel()].to(values.device).view(torch.float32).view_as(values)


def check_same(tag: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises LayoutError on all ranks of a group where they do not write the same weight."""
    reduce_max(torch.zeros(1, device=device), [group], tag)


def agree_on_amax(
    cls: type[QuantizedTensor],
    matrix: Tensor,
    amax: Tensor | None,
    group: dist.ProcessGroup | Groups | None,
    tag: int | None,
) -> Tensor | None:
    """The amax that shards share, given or found; None for recipes that share none."""
    if not cls.LAYOUT.shares_amax:
        return None
    if amax is None:
        return reduce_max(operators.shared_amax(cls, matrix), group, tag)
    return _checked(cls.LAYOUT, amax, matrix)


def _checked(layout: Layout, amax: Tensor, matrix: Tensor) -> Tensor:
    """A caller's amax, in the shape that the recipe shares. Raises ValueError."""
    shape = layout.amax_shape(matrix.shape[1])
    if amax.numel() != prod(shape) or not amax.is_floating_point():
        raise ValueError(
            f"{layout.name}: amax must be floating point of shape {shape}, not {amax.dtype} of shape "
            f"{tuple(amax.shape)}"
        )
    amax = amax.detach()
    if amax.dtype == torch.float32 and amax.shape == shape and amax.device == matrix.device:
        return amax
    return amax.to(matrix.device, torch.float32).reshape(shape)


def with_history(
    layout: Layout, current: Tensor | None, before: Tensor | None
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The amax that decides the scale, (..., 1), and the `amax` plane to store, if the recipe has one; None: no amax.

    With a history the scale follows earlier amaxes, and the current one is put in front; an empty one starts with it.
    """
    if current is None or not layout.history:
        return current, {"amax": current} if current is not None and "amax" in layout.stored else {}
    if before is None:
        before = current.new_zeros(layout.history)
    return _pick(layout, current, before), {"amax": torch.cat([current, before[..., :-1]], -1)}


def with_histories(
    layout: Layout, outs: Sequence[QuantizedTensor], currents: Sequence[Tensor | None], restart: bool
) -> tuple[list[Tensor | None], list[dict[str, Tensor]]]:
    """_with_history for each of the tensors, in as many launches as for one."""
    if not layout.history:
        keeps = "amax" in layout.stored
        return list(currents), [{"amax": one} if keeps and one is not None else {} for one in currents]
    befores = [None if restart else out._planes.get("amax") for out in outs]
    current, before = ([one for one in some if one is not None] for some in (currents, befores))
    if len(outs) == len(current) == len(before) > 1:
        shared, extra = with_history(layout, torch.stack(current), torch.stack(before))
        return list(() if shared is None else shared.unbind()), [{"amax": row} for row in extra["amax"].unbind()]
    found = [with_history(layout, *pair) for pair in zip(currents, befores, strict=True)]
    return [one for one, _ in found], [extra for _, extra in found]


def _pick(layout: Layout, current: Tensor, before: Tensor) -> Tensor:
    """Which amax decides, of the current one (..., 1) and those before it (..., history), latest first."""
    earlier = before.amax(-1, keepdim=True) if layout.pick == "max" else before[..., :1]
    return torch.where(earlier == 0, current, earlier)


def amax_of_scales(tensor: QuantizedTensor) -> Tensor | None:
    """The shared amax that its scales were made from, (1,) fp32, from what the tensor stores; None where it stores
    none."""
    stored = tensor._planes.get("amax")
    if stored is None or not tensor.LAYOUT.history:
        return stored
    return _pick(tensor.LAYOUT, stored[:1], torch.cat([stored[1:], stored.new_zeros(1)]))


def shared_amaxes(
    weights: Sequence[tuple[type[QuantizedTensor], Tensor]],
) -> tuple[Tensor, list[tuple[int, ...]]]:
    """What shards of many weights must agree on: the `_shared_amax` of each, flat, one after another; and its shapes.

    weights: classes of recipes that share an amax, and (m, k) matrices on one device. Of a recipe, nothing matters but
    the columns that an amax is for, so that kernels serve several recipes in one launch.
    """
    shapes = [cls.LAYOUT.amax_shape(x.shape[1]) for cls, x in weights]
    places = list(accumulate(map(prod, shapes), initial=0))
    packed = torch.zeros(places.pop(), dtype=torch.int32, device=weights[0][1].device)
    kinds: dict[tuple[int | None, type, bool], list[tuple[int, type[QuantizedTensor], Tensor]]] = defaultdict(list)
    for place, (cls, x) in zip(places, weights, strict=True):
        kinds[cls.LAYOUT.amax_columns, type(x), x.numel() == 0].append((place, cls, x))
    for (block_k, *_), members in kinds.items():
        if launch.usable(members[0][2]):
            batches.raise_amaxes(packed, [place for place, _, _ in members], [x for _, _, x in members], block_k)
            continue
        for place, cls, x in members:
            found = operators.shared_amax(cls, x).reshape(-1).view(torch.int32)
            packed[place : place + found.numel()] = found
    return packed.view(torch.float32), shapes

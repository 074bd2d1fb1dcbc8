"""The amax of a weight's scales: the maximum over its shards, or one from a history."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Group, Layout
from layoutc.runtime.kernels import launch
from layoutc.runtime.kernels.amaxes import raise_amaxes
from layoutc.runtime.torch_private import foreach_copy_, foreach_maximum
from layoutc.runtime.weight import operators
from layoutc.runtime.weight.tensor import QuantizedTensor

Groups = Sequence[dist.ProcessGroup]


def reduce_max(values: Tensor, group: dist.ProcessGroup | Groups | None, tag: str | None = None) -> Tensor:
    """The maximum of each entry over the ranks of a group, or of several groups; NaN counts as the largest. Collective.

    values: fp32 magnitudes of any shape. They are reduced as int32, because a floating-point MAX may drop NaN: the bits
    of magnitudes have the magnitudes' order, with NaN above inf. tag: says what is reduced. Raises
    LayoutError, on all ranks, if ranks pass different ones.
    """
    groups = [group] if isinstance(group, dist.ProcessGroup) else group or ()
    groups = [one for one in groups if one.size() > 1]
    if not groups:
        return values
    bits = values.contiguous().view(torch.int32)
    packed = bits.reshape(-1)
    if tag is not None:
        number = zlib.crc32(tag.encode()) & 0x7FFFFFFF
        packed = torch.cat([packed, packed.new_tensor([number, -number])])
    # Shards that are offloaded to the CPU are reduced on a device that the group's backend supports.
    device = torch.device("cuda") if dist.get_backend(groups[0]) == "nccl" else packed.device
    packed = packed.to(device, copy=True)
    for one in groups:
        dist.all_reduce(packed, dist.ReduceOp.MAX, group=one)
    if tag is not None and packed[-2:].tolist() != [number, -number]:
        tags: list[Any] = [None] * groups[0].size()
        dist.all_gather_object(tags, tag, groups[0])
        raise LayoutError(
            f"ranks quantize different weights at the same time ({', '.join(dict.fromkeys(tags))}): all ranks must "
            "write sharded weights in the same order"
        )
    return packed[: bits.numel()].to(values.device).view(torch.float32).view_as(values)


def join(amaxes: Sequence[Tensor], groups: Sequence[Group | None]) -> None:
    """Raises the fp32 amaxes of weights that share one to the largest of their group, in place. NaN counts as the
    largest. groups: of each weight; None for a single one."""
    together = defaultdict[Group, list[Tensor]](list)
    for amax, group in zip(amaxes, groups, strict=True):
        if group is not None:
            together[group].append(amax.view(torch.int32))  # as reduce_max
    if not (several := [members for members in together.values() if len(members) > 1]):
        return
    most = [members[0] for members in several]
    for at in range(1, max(map(len, several))):
        # A group without further members repeats its last one.
        most = foreach_maximum(most, [members[min(at, len(members) - 1)] for members in several])
    foreach_copy_(
        [one for members in several for one in members],
        [one for one, members in zip(most, several, strict=True) for _ in members],
    )


def check_same(tag: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises LayoutError, on all ranks of a group, if they write different weights. Collective."""
    reduce_max(torch.zeros(1, device=device), [group], tag)


def agree_on_amax(
    cls: type[QuantizedTensor],
    matrix: Tensor,
    amax: Tensor | None,
    group: dist.ProcessGroup | Groups | None,
    tag: str | None,
    orientations: tuple[str, ...] | None = None,
    *,
    matrices: int = 1,
) -> Tensor | None:
    """The amax that all shards of a weight use, of `Layout.amax_shape`; None for recipes and orientations whose scales
    need none. Where matrices have amaxes of their own, (m, 1): that of each row's.

    matrix: this rank's (m, k) values. amax: the caller's; if None, the maximum over the group's ranks. orientations:
    default: all. matrices: as `Layout.amaxes_of` counts them. Raises as reduce_max, and ValueError for an amax of
    another shape or dtype.
    """
    layout = cls.LAYOUT
    takes = layout.takes_amax(orientations or layout.orientations) or "amax" in layout.stored
    if not layout.shares_amax or (amax is None and not takes):
        return None
    if layout.amax_of_matrices:
        if amax is None:
            return for_rows(reduce_max(amax_of_each(matrix, matrices), group, tag), matrix)
        return for_rows(_checked(layout, amax, matrix, matrices).expand(matrices), matrix)
    if amax is None:
        return reduce_max(operators.shared_amax(cls, matrix), group, tag)
    return _checked(layout, amax, matrix)


def amax_of_each(matrix: Tensor, matrices: int) -> Tensor:
    """(m, k) values of a stack -> the amax of each of its matrices, (matrices,) fp32."""
    each = matrix.reshape(matrices, -1).abs() if matrices else matrix.new_zeros(0, 1)
    return each.amax(1).float() if each.shape[1] else each.new_zeros(matrices, dtype=torch.float32)


def for_rows(amaxes: Tensor, matrix: Tensor) -> Tensor:
    """The amax of each matrix of a stack of (m, k) values -> that of each row's, (m, 1)."""
    return amaxes.repeat_interleave(len(matrix) // max(1, len(amaxes))).view(-1, 1)


def _checked(layout: Layout, amax: Tensor, matrix: Tensor, matrices: int = 1) -> Tensor:
    """A caller's amax in fp32 on the matrix's device: one for all, or one for each of `matrices`. Raises ValueError."""
    shape = layout.amax_shape(matrix.shape[1])
    shape = (matrices,) if layout.amax_of_matrices and amax.numel() != 1 else shape
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
    """The amax that the scale follows from, (..., 1) fp32, and the `amax` plane to store, if the recipe has one.

    current: the amax of the values to quantize; None if the recipe shares none. before: the stored plane, (...,
    history), latest first; None if there is none yet. With a history the scale follows from earlier amaxes, and the
    current one is stored in front of them. While the history is empty, the scale follows from the current one.
    """
    if current is None:
        return None, {}
    if not layout.history:
        return current, {"amax": operators.stored_amax(layout, current)} if "amax" in layout.stored else {}
    if before is None:
        before = current.new_zeros(layout.history)
    return _pick(layout, current, before), {"amax": torch.cat([current, before[..., :-1]], -1)}


def with_histories(
    layout: Layout, outs: Sequence[QuantizedTensor], currents: Sequence[Tensor | None], restart: bool
) -> tuple[list[Tensor | None], list[dict[str, Tensor]]]:
    """with_history for each of several tensors, in as many launches as for one. restart: ignore what they store."""
    if not layout.history:
        stores = "amax" in layout.stored
        kept = [operators.stored_amax(layout, one) if stores and one is not None else None for one in currents]
        return list(currents), [{} if one is None else {"amax": one} for one in kept]
    befores = [None if restart else out.store.planes.get("amax") for out in outs]
    current, before = ([one for one in some if one is not None] for some in (currents, befores))
    if len(outs) == len(current) == len(before) > 1:
        shared, extra = with_history(layout, torch.stack(current), torch.stack(before))
        return list(() if shared is None else shared.unbind()), [{"amax": row} for row in extra["amax"].unbind()]
    pairs = [with_history(layout, *pair) for pair in zip(currents, befores, strict=True)]
    return [one for one, _ in pairs], [extra for _, extra in pairs]


def _pick(layout: Layout, current: Tensor, before: Tensor) -> Tensor:
    """The amax that the scale follows from: of earlier ones (..., history), latest first, or the current one (..., 1).

    A zero means that an amax is not known yet.
    """
    earlier = before.amax(-1, keepdim=True) if layout.pick == "max" else before[..., :1]
    return torch.where(earlier == 0, current, earlier)


def amax_of_scales(tensor: QuantizedTensor) -> Tensor | None:
    """The shared amax of a tensor's scales, (1,) fp32; None if the tensor does not store it."""
    stored = None if tensor.LAYOUT.level is not None else tensor.store.planes.get("amax")
    if stored is None or not tensor.LAYOUT.history:
        return stored
    return _pick(tensor.LAYOUT, stored[:1], torch.cat([stored[1:], stored.new_zeros(1)]))


def shared_amaxes(weights: Sequence[tuple[type[QuantizedTensor], Tensor]]) -> tuple[Tensor, list[tuple[int, ...]]]:
    """The `_shared_amax` of each of many weights, fp32, flattened and concatenated; and the shape of each.

    weights: classes of recipes that share an amax, with (m, k) matrices. Only the columns that an amax covers matter,
    so one launch serves several recipes. The result is on the device of the first matrix; those on others are measured
    there, one by one.
    """
    shapes = [cls.LAYOUT.amax_shape(x.shape[1]) for cls, x in weights]
    offsets = list(accumulate(map(prod, shapes), initial=0))
    device = weights[0][1].device
    packed = torch.zeros(offsets.pop(), dtype=torch.int32, device=device)
    kinds: dict[tuple[Any, ...], list[tuple[int, type[QuantizedTensor], Tensor]]] = defaultdict(list)
    for offset, (cls, x) in zip(offsets, weights, strict=True):
        kinds[cls.LAYOUT.amax_columns, x.device, type(x), x.numel() == 0].append((offset, cls, x))
    for (block_k, *_), members in kinds.items():
        if launch.usable(members[0][2]) and members[0][2].device == device:
            raise_amaxes(packed, [offset for offset, _, _ in members], [x for _, _, x in members], block_k)
            continue
        for offset, cls, x in members:
            amax = operators.shared_amax(cls, x).reshape(-1).view(torch.int32)
            packed[offset : offset + amax.numel()] = amax
    return packed.view(torch.float32), shapes

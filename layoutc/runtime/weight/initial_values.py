"""Initial values: what a weight was quantized from, stored until the optimizer has made its master of them.

A master that starts as the dequantized weight starts on the grid of the codes, and at a small learning rate needs many
steps before the first code changes. So plain values that are written into a weight that trains are stored beside its
bytes, unchanged, in their own dtype, on its device. A shard stores those of its own rows. They belong to the bytes that
they were quantized to: writing other bytes drops them, and a copy of the bytes gets a copy of them. `MasterWeights`
takes them and frees them. They are in no file, no graph and not in `planes()`.

This module also tells bytes apart: `mark` stays equal for as long as a weight holds the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from layoutc.ints.rects import Rect
from layoutc.runtime.weight import operators, staging
from layoutc.runtime.weight.pending_writes import covers_of
from layoutc.runtime.weight.planes import ScatteredPlanes

if TYPE_CHECKING:
    from layoutc.runtime.weight.tensor import QuantizedTensor


class Seal(NamedTuple):
    """Planes and the version counters that they had when the values were stored: writes since then change those."""

    planes: Mapping[str, Tensor]
    versions: tuple[int, ...]


class InitialValues(NamedTuple):
    """The values that a tensor was quantized from: a plain tensor of (its own rows, k) in memory of its own."""

    values: Tensor
    is_whole: bool  # False if only parts were written: the rest is NaN, and stands for what the weight dequantizes to
    seals: tuple[Seal, ...]


# --------------------------------------------------------------------------------------------------- which bytes it has
def mark(tensor: QuantizedTensor) -> tuple[Any, ...]:
    """A value that stays equal for as long as a tensor holds the same bytes, also through FSDP2's copies of a shard."""
    return tensor._writes.content, _versions(_base(tensor))


def rewritten(tensor: QuantizedTensor) -> None:
    """Records that a tensor, or the tensor that it was cut from, has new bytes: their initial values are unknown."""
    tensor._writes.content, tensor._writes.initial, tensor._writes.base = object(), None, None


def _base(tensor: QuantizedTensor) -> Mapping[str, Tensor]:
    """A tensor's planes, or those that it is cut from at each use."""
    planes: Mapping[str, Tensor] = getattr(tensor._planes, "base", tensor._planes)
    return planes


def _versions(planes: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Version counters: they also count writes from outside of this package, which don't call `rewritten`."""
    if getattr(planes, "handle", None) is not None:
        return ()
    return tuple(0 if plane.is_inference() else plane._version for plane in planes.values())


# --------------------------------------------------------------------------------------------------- what it was before
def base(tensor: QuantizedTensor) -> Any:
    """What is kept of a weight from before a merge; None if its bytes were written since."""
    kept = tensor._writes.base
    return kept[0] if kept is not None and kept[1] == mark(tensor) else None


def set_base(tensor: QuantizedTensor, kept: Any) -> None:
    """Keeps something for as long as a weight holds the bytes that it holds now."""
    tensor._writes.base = kept, mark(tensor)


def carry_base(copy: QuantizedTensor, source: QuantizedTensor) -> None:
    """Keeps for a new copy what is kept for a weight, on its device."""
    if not staging.copies_state() and (kept := base(source)) is not None:
        weight = kept.weight.to(copy.device) if kept.weight is not None else None
        set_base(copy, kept._replace(weight=weight))


# ------------------------------------------------------------------------------------------------ what it was made from
def lookup(tensor: QuantizedTensor) -> InitialValues | None:
    """What is stored for this tensor, or for the one that it was cut from; None if its bytes were written since."""
    stored, own = tensor._writes.initial, _base(tensor)
    if stored is None:
        return None
    # Views made below autograd have version counters of their own, which start at 0.
    is_other = all(own is not seal.planes for seal in stored.seals) and any(_versions(own))
    if is_other or any(_versions(seal.planes) != seal.versions for seal in stored.seals):
        tensor._writes.initial = None
    return tensor._writes.initial


def store(tensor: QuantizedTensor, values: Tensor, before: InitialValues | None = None, is_whole: bool = True) -> None:
    """Stores a copy of the values that a tensor has just been quantized from, if it trains.

    values: as many elements as the tensor has. before: for a piece, what `lookup` returned before the write, which
    stays for the rest of the tensor; without it the rest has no initial values.
    """
    writes = tensor._writes
    if not writes.trains or values.is_meta or torch.is_inference_mode_enabled() or operators.traced(values):
        return
    matrix = values.detach().reshape(tensor._rows, tensor._matrix[1])
    if _is_all(tensor):
        seals = tuple(Seal(planes, _versions(planes)) for planes in (writes.planes, tensor._planes))
        writes.initial = InitialValues(matrix.clone(memory_format=torch.contiguous_format), is_whole, seals)
    else:
        writes.initial = _with_part(tensor, matrix, before, is_whole)


def _with_part(tensor: QuantizedTensor, matrix: Tensor, before: InitialValues | None, is_whole: bool) -> InitialValues:
    assert tensor._part is not None
    if before is None:
        size = tensor._part.last - tensor._part.first, tensor._part.columns
        whole = tensor._writes.planes
        rest = torch.full(size, nan, dtype=matrix.dtype, device=matrix.device)
        before = InitialValues(rest, False, (Seal(whole, _versions(whole)),))
    values = before.values.to(torch.promote_types(before.values.dtype, matrix.dtype))
    window = _window(tensor, values)
    assert window is not None
    window.copy_(matrix)
    return InitialValues(values, before.is_whole and is_whole, before.seals)


def zeroed(tensor: QuantizedTensor, before: InitialValues | None) -> None:
    """Records that a tensor has just been zeroed. No values are stored, since it dequantizes to exact zeros."""
    free(tensor)
    if before is not None and not _is_all(tensor):
        store(tensor, before.values.new_zeros(tensor._rows, tensor._matrix[1]), before)


def carry(copy: QuantizedTensor, source: QuantizedTensor, before: InitialValues | None = None) -> None:
    """Records that a tensor has just been given another one's bytes, and so has the same mark and initial values.

    before: as for `store`. Copies made for checkpoints get no initial values.
    """
    part = _own(source)
    if _is_all(copy) and _is_all(source):
        copy._writes.content = source._writes.content
    if part is not None and not staging.copies_state():
        store(copy, part.values.to(copy.device), before, part.is_whole)


def values(tensor: QuantizedTensor, dtype: torch.dtype) -> Tensor | None:
    """The initial values as a new plain tensor of the tensor's shape, in a dtype; None if none are stored."""
    if (part := _own(tensor)) is None:
        return None
    shape = tuple(tensor.shape)
    straight = (*shape[:-2], shape[-1], shape[-2]) if tensor._transposed else shape
    result = part.values.to(dtype, copy=True).reshape(straight)
    result = result.transpose(-2, -1) if tensor._transposed else result
    return result if part.is_whole else torch.where(result.isnan(), tensor.dequantize(dtype), result)


def complete_matrix(tensor: QuantizedTensor) -> Tensor | None:
    """The initial values of a tensor's own rows, (rows, k), in the dtype they are stored in; None if any is missing."""
    part = _own(tensor)
    return part.values if part is not None and part.is_whole else None


def free(tensor: QuantizedTensor) -> None:
    """Drops a tensor's initial values."""
    tensor._writes.initial = None


def _own(tensor: QuantizedTensor) -> InitialValues | None:
    """The initial values of this tensor's own rows, (rows, k): a view if the rows are adjacent."""
    if (stored := lookup(tensor)) is None:
        return None
    planes = tensor._planes
    pieces: Any = planes.runs() if isinstance(planes, ScatteredPlanes) else [tensor]
    windows = [_window(piece, stored.values) for piece in pieces]
    present = [window for window in windows if window is not None]
    if len(present) < len(windows):
        return None
    return stored._replace(values=present[0] if len(present) == 1 else torch.cat(present))


def _window(tensor: QuantizedTensor, whole: Tensor) -> Tensor | None:
    """This piece's part of the values of the tensor that it was cut from; None if it lies outside of them."""
    rect = _rect(tensor)
    fits = rect.r1 <= whole.shape[0] and rect.c1 <= whole.shape[1]
    return whole[rect.r0 : rect.r1, rect.c0 : rect.c1] if fits else None


def _rect(tensor: QuantizedTensor) -> Rect:
    """A tensor's own rows and columns, counted in the tensor that it was cut from."""
    if (part := tensor._part) is None:
        return Rect(0, tensor._rows, 0, tensor._matrix[1])
    rect = covers_of(tensor, part)
    return rect.moved(-part.first, 0)


def _is_all(tensor: QuantizedTensor) -> bool:
    """True for a tensor that is not a piece of a larger one."""
    if isinstance(tensor._planes, ScatteredPlanes):
        return False
    part = tensor._part
    return part is None or _rect(tensor) == Rect(0, part.last - part.first, 0, part.columns)

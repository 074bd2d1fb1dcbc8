"""Initial values: what a weight was quantized from, kept until the optimizer has made its master of them.

A master that starts as the dequantized weight starts on the grid of the codes, and at a small learning rate needs many
steps before the first code changes. So plain values that are written into a weight that trains are kept beside its
bytes: as they came, in their own dtype, on its device. A shard keeps those of its own rows. They belong to the bytes
that they were quantized to: whoever writes other bytes drops them, and a copy of the bytes takes a copy of them along.
`MasterWeights` takes them, and then they are gone. No file, graph or `planes()` has them.

This module also tells bytes apart: `mark` stays the same for as long as a weight holds the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from layoutc.runtime.weight import operators, staging
from layoutc.runtime.weight.pending_writes import Rect, covers_of
from layoutc.runtime.weight.planes import ScatteredPlanes

if TYPE_CHECKING:
    from layoutc.runtime.weight.tensor import QuantizedTensor


class Seal(NamedTuple):
    """Planes, and the version counters that they had when values were kept."""

    planes: Mapping[str, Tensor]
    versions: tuple[int, ...]


class Initial(NamedTuple):
    """What a tensor was quantized from: (its own rows, k), plain, in memory of its own."""

    values: Tensor
    is_whole: bool  # False where parts alone were written: NaN stands for the rest, which is what it dequantizes to
    seals: tuple[Seal, ...]


# --------------------------------------------------------------------------------------------------- which bytes it has
def mark(tensor: QuantizedTensor) -> tuple[Any, ...]:
    """Equal for as long as a tensor holds the same bytes, and for what FSDP2 makes of a shard when it copies it."""
    return tensor._writes.content, _versions(_base(tensor))


def rewritten(tensor: QuantizedTensor) -> None:
    """Says that bytes of a tensor, or of what it is a piece of, have been written: nothing is known of them."""
    tensor._writes.content, tensor._writes.initial = object(), None


def _base(tensor: QuantizedTensor) -> Mapping[str, Tensor]:
    """The planes that a tensor has, or is cut from at each use."""
    planes: Mapping[str, Tensor] = getattr(tensor._planes, "base", tensor._planes)
    return planes


def _versions(planes: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Version counters: of all writes outside of this package, which `rewritten` is not told of."""
    if getattr(planes, "handle", None) is not None:
        return ()
    return tuple(0 if plane.is_inference() else plane._version for plane in planes.values())


# ------------------------------------------------------------------------------------------------ what it was made from
def held(tensor: QuantizedTensor) -> Initial | None:
    """What is kept of the tensor that this one is, or is a piece of; None where its bytes have been written since."""
    kept, own = tensor._writes.initial, _base(tensor)
    if kept is None:
        return None
    # Views that are made below autograd have counters of their own, which begin at 0.
    is_other = all(own is not seal.planes for seal in kept.seals) and any(_versions(own))
    if is_other or any(_versions(seal.planes) != seal.versions for seal in kept.seals):
        tensor._writes.initial = None
    return tensor._writes.initial


def keep(tensor: QuantizedTensor, values: Tensor, before: Initial | None = None, is_whole: bool = True) -> None:
    """Keeps a copy of values, of as many elements as the tensor, that it has just been quantized from, if it trains.

    before: of a piece, what was `held` until then, which stays for the rest; without it the rest has none.
    """
    writes = tensor._writes
    if not writes.trains or values.is_meta or torch.is_inference_mode_enabled() or operators.traced(values):
        return
    matrix = values.detach().reshape(tensor._rows, tensor._matrix[1])
    if _is_all(tensor):
        seals = tuple(Seal(planes, _versions(planes)) for planes in (writes.planes, tensor._planes))
        writes.initial = Initial(matrix.clone(memory_format=torch.contiguous_format), is_whole, seals)
    else:
        writes.initial = _with_part(tensor, matrix, before, is_whole)


def _with_part(tensor: QuantizedTensor, matrix: Tensor, before: Initial | None, is_whole: bool) -> Initial:
    assert tensor._part is not None
    if before is None:
        size = tensor._part.last - tensor._part.first, tensor._part.columns
        whole = tensor._writes.planes
        rest = torch.full(size, nan, dtype=matrix.dtype, device=matrix.device)
        before = Initial(rest, False, (Seal(whole, _versions(whole)),))
    values = before.values.to(torch.promote_types(before.values.dtype, matrix.dtype))
    window = _window(tensor, values)
    assert window is not None
    window.copy_(matrix)
    return Initial(values, before.is_whole and is_whole, before.seals)


def zeroed(tensor: QuantizedTensor, before: Initial | None) -> None:
    """Says that a tensor has just been made zero, which needs nothing to be kept: it dequantizes to exact zeros."""
    free(tensor)
    if before is not None and not _is_all(tensor):
        keep(tensor, before.values.new_zeros(tensor._rows, tensor._matrix[1]), before)


def carry(copy: QuantizedTensor, source: QuantizedTensor, before: Initial | None = None) -> None:
    """Says that a tensor has just been given the bytes of another one: it has the same marks and initial values.

    before: as for `keep`. Copies that checkpoints are made of take none along.
    """
    part = _own(source)
    if _is_all(copy) and _is_all(source):
        copy._writes.content = source._writes.content
    if part is not None and not staging.copies_state():
        keep(copy, part.values.to(copy.device), before, part.is_whole)


def values(tensor: QuantizedTensor, dtype: torch.dtype) -> Tensor | None:
    """A new plain tensor of the tensor's shape with its initial values, in a dtype; None where none are kept."""
    if (part := _own(tensor)) is None:
        return None
    shape = tuple(tensor.shape)
    straight = (*shape[:-2], shape[-1], shape[-2]) if tensor._transposed else shape
    found = part.values.to(dtype, copy=True).reshape(straight)
    found = found.transpose(-2, -1) if tensor._transposed else found
    return found if part.is_whole else torch.where(found.isnan(), tensor.dequantize(dtype), found)


def own(tensor: QuantizedTensor) -> Tensor | None:
    """All initial values of a tensor's own rows, (rows, k), as they are kept; None where some are not."""
    part = _own(tensor)
    return part.values if part is not None and part.is_whole else None


def free(tensor: QuantizedTensor) -> None:
    """Drops what is kept of a tensor."""
    tensor._writes.initial = None


def _own(tensor: QuantizedTensor) -> Initial | None:
    """The part of what is held that is this tensor's own, (rows, k), as a view where its rows are adjacent."""
    if (kept := held(tensor)) is None:
        return None
    planes = tensor._planes
    pieces: Any = planes.runs() if isinstance(planes, ScatteredPlanes) else [tensor]
    found = [_window(piece, kept.values) for piece in pieces]
    windows = [window for window in found if window is not None]
    if len(windows) < len(found):
        return None
    return kept._replace(values=windows[0] if len(windows) == 1 else torch.cat(windows))


def _window(tensor: QuantizedTensor, whole: Tensor) -> Tensor | None:
    """The part of the values of the tensor that this one is a piece of; None where they do not reach so far."""
    rect = _rect(tensor)
    fits = rect.r1 <= whole.shape[0] and rect.c1 <= whole.shape[1]
    return whole[rect.r0 : rect.r1, rect.c0 : rect.c1] if fits else None


def _rect(tensor: QuantizedTensor) -> Rect:
    """A tensor's own rows and columns, of those of the tensor that it is a piece of."""
    if (part := tensor._part) is None:
        return Rect(0, tensor._rows, 0, tensor._matrix[1])
    rect = covers_of(tensor, part)
    return rect._replace(r0=rect.r0 - part.first, r1=rect.r1 - part.first)


def _is_all(tensor: QuantizedTensor) -> bool:
    """True for a tensor that is no piece of a larger one."""
    if isinstance(tensor._planes, ScatteredPlanes):
        return False
    part = tensor._part
    return part is None or _rect(tensor) == Rect(0, part.last - part.first, 0, part.columns)

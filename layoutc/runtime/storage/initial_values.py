"""Initial values: the values that a weight was quantized from, kept until the optimizer makes its master from them.

A master made from the dequantized weight starts on the grid of the codes, and at a small learning rate needs many steps
before the first code changes. So a weight that trains keeps plain values that are written into it, unchanged, in their
own dtype, on its device. A shard keeps those of its own rows. They belong to the bytes that they were quantized to:
writing other bytes drops them, and a copy of the bytes gets a copy of them. `MasterWeights` takes and frees them. No
file, no graph and no `planes()` has them.

This module also tells bytes apart: `mark` stays equal for as long as a weight holds the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Any

import torch
from torch import Tensor

from layoutc.ints.rects import Rect
from layoutc.runtime import callers
from layoutc.runtime.storage.pending_writes import covers_of
from layoutc.runtime.storage.planes import ScatteredPlanes
from layoutc.runtime.storage.store import InitialValues, PlaneStore, Seal
from layoutc.runtime.torch_private import traced, version_of


# ------------------------------------------------------------------------------------------------ identity of the bytes
def mark(store: PlaneStore) -> tuple[Any, ...]:
    """A value that stays equal for as long as a tensor holds the same bytes, also through FSDP2's copies of a shard."""
    return store.writes.content, _versions(store.base)


def rewritten(store: PlaneStore) -> None:
    """Records that a tensor, or the one that it was cut from, has new bytes: their initial values are unknown."""
    store.writes.content, store.writes.initial, store.writes.base = object(), None, None


def _versions(planes: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Version counters, which also count writes from outside this package, without `rewritten`."""
    if getattr(planes, "handle", None) is not None:
        return ()
    return tuple(0 if plane.is_inference() else version_of(plane) for plane in planes.values())


# -------------------------------------------------------------------------------------------------- bytes before merges
def base(store: PlaneStore) -> Any:
    """What is kept of a weight from before a merge; None if its bytes were written since."""
    kept = store.writes.base
    return kept[0] if kept is not None and kept[1] == mark(store) else None


def set_base(store: PlaneStore, kept: Any) -> None:
    """Keeps something until the weight's bytes change."""
    store.writes.base = kept, mark(store)


def carry_base(copy: PlaneStore, source: PlaneStore) -> None:
    """Gives a copy what is kept for the weight, on the copy's device."""
    if not callers.copies_state() and (kept := base(source)) is not None:
        weight = kept.weight.to(copy.device) if kept.weight is not None else None
        set_base(copy, kept._replace(weight=weight))


# ------------------------------------------------------------------------------------------------------- initial values
def lookup(store: PlaneStore) -> InitialValues | None:
    """What is stored for a tensor, or for the one that it was cut from; None if its bytes were written since."""
    stored, planes = store.writes.initial, store.base
    if stored is None:
        return None
    # Views made below autograd have their own version counters, which start at 0.
    is_other = all(planes is not seal.planes for seal in stored.seals) and any(_versions(planes))
    if is_other or any(_versions(seal.planes) != seal.versions for seal in stored.seals):
        store.writes.initial = None
    return store.writes.initial


def finest(store: PlaneStore) -> InitialValues | None:
    """As `lookup`; without stored values, those of the weight's master, not copied, if it holds the bytes of these."""
    if (stored := lookup(store)) is not None or store.writes.master is None:
        return stored
    values = master.values() if (master := store.writes.master()) is not None else None
    return None if values is None else InitialValues(values.flatten(0, -2), True, ())


def around(store: PlaneStore) -> InitialValues | None:
    """For a piece that is about to be written: `finest` of the tensor that it was cut from."""
    return None if _is_all(store) else finest(store)


def keep(store: PlaneStore, values: Tensor, before: InitialValues | None = None, is_whole: bool = True) -> None:
    """Stores a copy of the values that a tensor has just been quantized from, if it trains.

    values: as many elements as the tensor has. before: for a piece, what `around` returned before the write, which
    stays for the rest of the tensor; without it the rest has no initial values.
    """
    writes = store.writes
    if not writes.trains or values.is_meta or torch.is_inference_mode_enabled() or traced(values):
        return
    matrix = values.detach().reshape(store.rows, store.matrix[1])
    if _is_all(store):
        seals = tuple(Seal(planes, _versions(planes)) for planes in (writes.planes, store.planes))
        writes.initial = InitialValues(matrix.clone(memory_format=torch.contiguous_format), is_whole, seals)
    else:
        writes.initial = _with_part(store, matrix, before, is_whole)


def _with_part(store: PlaneStore, matrix: Tensor, before: InitialValues | None, is_whole: bool) -> InitialValues:
    assert store.part is not None
    if before is None or not before.seals:
        size = store.part.last - store.part.first, store.part.columns
        whole = store.writes.planes
        unknown = torch.full(size, nan, dtype=matrix.dtype, device=matrix.device)
        rest = unknown if before is None else before.values.clone()
        before = InitialValues(rest, before is not None, (Seal(whole, _versions(whole)),))
    values = before.values.to(torch.promote_types(before.values.dtype, matrix.dtype))
    window = _window(store, values)
    assert window is not None
    window.copy_(matrix)
    return InitialValues(values, before.is_whole and is_whole, before.seals)


def zeroed(store: PlaneStore, before: InitialValues | None) -> None:
    """Records that a tensor has just been zeroed. No values are stored, since it dequantizes to exact zeros."""
    free(store)
    if before is not None and not _is_all(store):
        keep(store, before.values.new_zeros(store.rows, store.matrix[1]), before)


def carry(copy: PlaneStore, source: PlaneStore, before: InitialValues | None = None) -> None:
    """Records that a tensor has just been given another one's bytes, and so has the same mark and initial values.

    before: as for `keep`. Copies made for checkpoints get no initial values.
    """
    part = own(source, lookup(source))
    if _is_all(copy) and _is_all(source):
        copy.writes.content = source.writes.content
    if part is not None and not callers.copies_state():
        keep(copy, part.values.to(copy.device), before, part.is_whole)


def complete_matrix(store: PlaneStore) -> Tensor | None:
    """The initial values of a tensor's own rows, (rows, k), in the dtype they are stored in; None if any is missing."""
    part = own(store, lookup(store))
    return part.values if part is not None and part.is_whole else None


def free(store: PlaneStore) -> None:
    """Drops a tensor's initial values."""
    store.writes.initial = None


def own(store: PlaneStore, stored: InitialValues | None) -> InitialValues | None:
    """Of what `lookup` or `finest` found, this tensor's own rows, (rows, k): a view if the rows are adjacent."""
    if stored is None:
        return None
    planes = store.planes
    pieces = [run.store for run in planes.runs()] if isinstance(planes, ScatteredPlanes) else [store]
    windows = [_window(piece, stored.values) for piece in pieces]
    present = [window for window in windows if window is not None]
    if len(present) < len(windows):
        return None
    return stored._replace(values=present[0] if len(present) == 1 else torch.cat(present))


def _window(store: PlaneStore, whole: Tensor) -> Tensor | None:
    """This piece's part of the values of the tensor that it was cut from; None if it is outside of them."""
    rect = _rect(store)
    fits = rect.r1 <= whole.shape[0] and rect.c1 <= whole.shape[1]
    return whole[rect.r0 : rect.r1, rect.c0 : rect.c1] if fits else None


def _rect(store: PlaneStore) -> Rect:
    """A tensor's own rows and columns, counted in the tensor that it was cut from."""
    if (part := store.part) is None:
        return Rect(0, store.rows, 0, store.matrix[1])
    rect = covers_of(store, part)
    return rect.moved(-part.first, 0)


def _is_all(store: PlaneStore) -> bool:
    """True for a tensor that is not a piece of a larger one."""
    if isinstance(store.planes, ScatteredPlanes):
        return False
    part = store.part
    return part is None or _rect(store) == Rect(0, part.last - part.first, 0, part.columns)

"""Pending writes: pieces of quantized bytes that wait for the rows they share scales with.

A checkpoint may be loaded with other cuts than it was saved with, so it is written piece by piece. A piece whose scale
also covers other rows can't be written alone: those rows would change their values. Such pieces wait until all that
share a scale have arrived, and are then written together. Until then the weight keeps its old
bytes, and reading it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from layoutc.ints.rects import Rect
from layoutc.ints.sizes import cdiv, up
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.storage.store import Part, Piece, PlaneStore


def check_whole(store: PlaneStore, label: str) -> None:
    """Raises LayoutError for a tensor that was loaded in part, without the rows that share scales with that part."""
    if not (pieces := store.writes.waiting):
        return
    rows = ", ".join(f"{p.covers.r0} to {p.covers.r1}" for p in pieces[:4]) + (", ..." if len(pieces) > 4 else "")
    lacking = [piece for piece in pieces if _lacks(piece, pieces)]
    need = max((need for piece in lacking for need in piece.needs), key=lambda rect: rect.area)
    raise LayoutError(
        f"{label}: bytes were copied into rows {rows}, whose scales also cover rows {need.r0} to {need.r1}: "
        "copy all of those, from the same quantized weight, or write the whole weight. It holds what it held before"
    )


def needs_of(target: PlaneStore, source: PlaneStore) -> tuple[Rect, ...]:
    """The rectangles that must be written together with a piece: its scales also cover them, and would change them.

    () if the piece can be written alone. Target and source have the same own rows, at the same offset in a block.
    """
    if (part := target.part) is None:
        return ()
    own, needs = covers_of(target, part), []
    for name in target.planes:
        rows, columns, *_ = target.layout.stored[name]
        into, plane = target.entries(name), source.entries(name)
        r0, r1 = (part.first, part.last) if rows is None else (own.r0 // rows * rows, up(own.r1, rows))
        r0, r1 = max(r0, part.first), min(r1, part.last)
        wide = columns is None and (own.c0, own.c1) != (0, part.columns)
        c0, c1 = (0, part.columns) if wide else (own.c0, own.c1)
        if wide or (rows is None and (r0, r1) != (own.r0, own.r1)):
            if not _same(into, plane):
                needs.append(Rect(r0, r1, c0, c1))
            continue
        if r0 < own.r0 and not _same(into[:1], plane[:1]):
            needs.append(Rect(r0, own.r0, c0, c1))
        if r1 > own.r1 and not _same(into[-1:], plane[-1:]):
            needs.append(Rect(own.r1, r1, c0, c1))
    return tuple(needs)


def _same(a: Tensor, b: Tensor) -> bool:
    """True for equal bytes."""
    ours, theirs = (t.contiguous().flatten().view(torch.uint8) for t in (a, b.to(a.device)))
    return torch.equal(ours, theirs)


def covers_of(target: PlaneStore, part: Part) -> Rect:
    """A piece's own rows and columns, in the planes of the tensor that it was cut from."""
    (m, k), halo = target.matrix, target.halo
    return Rect(part.row + halo.before, part.row + m - halo.after, part.column, part.column + k)


def hold(
    target: PlaneStore, source: PlaneStore, needs: tuple[Rect, ...], write: Callable[[], None], label: str
) -> list[Piece]:
    """Adds a piece to the waiting ones. Returns all of them, to be written, once nothing is missing; until then, none.

    Raises LayoutError if the piece and another one that waits have different values for a scale that they share.
    """
    part, waiting = target.part, target.writes.waiting
    assert part is not None
    covers = covers_of(target, part)
    new = Piece(target, source, covers, needs, write)
    waiting[:] = [old for old in waiting if not old.covers.meet(covers).area]  # pieces that are written again
    for old in waiting:
        _check_agree(old, new, label)
    waiting.append(new)
    if any(_lacks(piece, waiting) for piece in waiting):
        return []
    ready = list(waiting)
    waiting.clear()
    return ready


def _lacks(piece: Piece, waiting: Sequence[Piece]) -> bool:
    """Whether the waiting pieces, which are disjoint, lack some of what a piece needs."""
    there = (need.meet(other.covers).area for other in waiting for need in piece.needs)
    return sum(there) < sum(need.area for need in piece.needs)


def forget(store: PlaneStore) -> None:
    """Drops the pieces that wait for a tensor, since all of it has been written.

    Pieces beyond its rows stay: they belong to a longer tensor, of which this one is the first rows.
    """
    last, waiting = store.matrix[0] - store.halo.after, store.writes.waiting
    waiting[:] = [piece for piece in waiting if piece.covers.r0 >= last]


def _check_agree(a: Piece, b: Piece, label: str) -> None:
    """Raises LayoutError if two pieces of one tensor have different values for the scales that they share."""
    for name, (rows, columns, *_) in a.target.layout.stored.items():
        if name not in a.target.planes or (rows == 1 and columns is not None):
            continue
        ours, theirs = _shared(a, name, b.covers), _shared(b, name, a.covers)
        if ours is not None and theirs is not None and not _same(ours, theirs):
            raise LayoutError(
                f"copy_: {label} takes pieces of weights that were not quantized together: {name} of rows "
                f"{a.covers.r0} to {a.covers.r1} and of rows {b.covers.r0} to {b.covers.r1} differ"
            )


def _shared(piece: Piece, name: str, other: Rect) -> Tensor | None:
    """The entries of a piece's plane that also cover elements of another rectangle; None if there are none."""
    rows, columns, *_ = piece.target.layout.stored[name]
    entries, own = piece.source.entries(name), piece.covers
    if rows is not None:
        first = own.r0 // rows
        low, high = max(first, other.r0 // rows), min(cdiv(own.r1, rows), cdiv(other.r1, rows))
        entries = entries[low - first : max(high, low) - first]
    if columns is not None:
        begin, end = max(own.c0, other.c0), min(own.c1, other.c1)
        if begin >= end:
            return None
        low, high = int((begin - own.c0) // columns), int(-(-(end - own.c0) // columns))  # the last block may be short
        entries = entries[..., low:high]
    return entries if entries.numel() else None

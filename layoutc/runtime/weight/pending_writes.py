"""Pending writes: pieces of quantized bytes that wait for the rows they share scales with.

A checkpoint may load on other cuts than it was saved with, so it is written piece by piece. A piece whose scale also
covers rows outside of it can't be written by itself: those rows would get other values. Such pieces wait until
everything that shares a scale with them has arrived, and are then written together. Until then the weight keeps its old
bytes, and reading it raises.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from layoutc.ints.cuts import Halo
from layoutc.ints.rects import Rect
from layoutc.ints.sizes import cdiv, up
from layoutc.runtime.errors import LayoutError, UnsupportedOperator
from layoutc.runtime.weight import gathered_in_graphs
from layoutc.runtime.weight.padding import NOT_PADDED
from layoutc.runtime.weight.planes import ScatteredPlanes

if TYPE_CHECKING:
    from layoutc.runtime.weight.initial_values import InitialValues
    from layoutc.runtime.weight.tensor import QuantizedTensor


class Part(NamedTuple):
    """Where a piece's planes begin in those of the tensor that it was cut from, and which rows are that tensor's
    own."""

    row: int
    column: int
    first: int
    last: int
    columns: int


@dataclass(eq=False)  # by identity: tensors compare element by element
class Piece:
    """Bytes that wait to be written into `target`: the elements that they cover, the elements that must be there before
    they can be written, and how many of those are missing."""

    target: QuantizedTensor
    source: QuantizedTensor
    covers: Rect
    needs: tuple[Rect, ...]
    missing: int

    def needed_of(self, other: Rect) -> int:
        """How many elements of a rectangle this piece needs, counted once for each need."""
        return sum(need.meet(other).area for need in self.needs)


@dataclass
class Writes:
    """The record of writes that a tensor, its aliases and its pieces share: their number, the pieces that wait, and the
    values that the bytes were quantized from."""

    count: int = 0
    waiting: list[Piece] = field(default_factory=list)
    planes: Mapping[str, Tensor] = field(default_factory=dict)  # of the tensor that the others are views of
    content: object = field(default_factory=object)  # an identity of the bytes: copies share it, other bytes don't
    trains: bool = False  # plain values that are written are kept, for a master to start from
    stepped: bool = False  # by an optimizer itself, which was warned of
    initial: InitialValues | None = None
    base: tuple[Any, tuple[Any, ...]] | None = None  # what it was before a merge (`dispatch.merges.Base`), and its mark
    sent: QuantizedTensor | None = None  # the tensor, where a rank has broadcast its values

    def __deepcopy__(self, memo: dict[int, Any]) -> Writes:
        """For checkpoints that are staged attribute by attribute; they leave initial values out."""
        return Writes(self.count, copy.deepcopy(self.waiting, memo), content=self.content, trains=self.trains)


def part_of(tensor: QuantizedTensor, row: int, column: int) -> Part:
    """The Part of a piece that begins at a row and a column of a tensor's planes."""
    if (part := tensor._part) is not None:
        return part._replace(row=part.row + row, column=part.column + column)
    (m, k), halo = tensor._matrix, tensor._halo
    return Part(row, column, halo.before, m - halo.after, k)


def check_whole(tensor: QuantizedTensor) -> None:
    """Raises LayoutError for a tensor that was loaded in part, without the rows that share scales with that part."""
    if not tensor._writes.waiting:
        return
    pieces = tensor._writes.waiting
    rows = ", ".join(f"{p.covers.r0} to {p.covers.r1}" for p in pieces[:4]) + (", ..." if len(pieces) > 4 else "")
    need = max((need for piece in pieces if piece.missing for need in piece.needs), key=lambda rect: rect.area)
    raise LayoutError(
        f"{tensor._label()}: bytes were copied into rows {rows}, whose scales also cover rows {need.r0} to {need.r1}: "
        "copy all of those, from the same quantized weight, or write the whole weight. It holds what it held before"
    )


def needs_of(target: QuantizedTensor, source: QuantizedTensor) -> tuple[Rect, ...]:
    """The rectangles that must be written together with a piece: its scales also cover them, and would change them.

    () if the piece can be written by itself. Target and source have the same own rows, at the same offset in a block.
    """
    if (part := target._part) is None:
        return ()
    own, needs = covers_of(target, part), []
    for name in target._planes:
        rows, columns = target.LAYOUT.stored[name]
        into, plane = target._entries(name), source._entries(name)
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


def covers_of(target: QuantizedTensor, part: Part) -> Rect:
    """A piece's own rows and columns, in the planes of the tensor that it was cut from."""
    (m, k), halo = target._matrix, target._halo
    return Rect(part.row + halo.before, part.row + m - halo.after, part.column, part.column + k)


def hold(target: QuantizedTensor, source: QuantizedTensor, needs: tuple[Rect, ...]) -> list[Piece]:
    """Adds a piece to those that wait. Returns all of them, to be written, once nothing is missing; until then, none.

    Raises LayoutError if the piece and another one that waits have different values for a scale that they share.
    """
    part, waiting = target._part, target._writes.waiting
    assert part is not None
    covers = covers_of(target, part)
    new = Piece(target, source, covers, needs, 0)
    new.missing = sum(need.area for need in needs) - new.needed_of(covers)
    for old in [old for old in waiting if old.covers.meet(covers).area]:  # written a second time
        waiting.remove(old)
        for other in waiting:
            other.missing += other.needed_of(old.covers)
    for old in waiting:
        _check_agree(old, new)
    for old in waiting:
        old.missing -= old.needed_of(covers)
        new.missing -= new.needed_of(old.covers)
    waiting.append(new)
    if any(piece.missing for piece in waiting):
        return []
    ready = list(waiting)
    waiting.clear()
    return ready


def forget(tensor: QuantizedTensor) -> None:
    """Drops the pieces that wait for a tensor, since all of it has been written.

    Pieces beyond its rows stay: they belong to a longer tensor, of which this one is the first rows.
    """
    last, waiting = tensor._matrix[0] - tensor._halo.after, tensor._writes.waiting
    waiting[:] = [piece for piece in waiting if piece.covers.r0 >= last]


def _check_agree(a: Piece, b: Piece) -> None:
    """Raises LayoutError if two pieces of one tensor have different values for the scales that they share."""
    for name, (rows, columns) in a.target.LAYOUT.stored.items():
        if name not in a.target._planes or (rows == 1 and columns is not None):
            continue
        ours, theirs = _shared(a, name, b.covers), _shared(b, name, a.covers)
        if ours is not None and theirs is not None and not _same(ours, theirs):
            raise LayoutError(
                f"copy_: {a.target._label()} takes pieces of weights that were not quantized together: {name} of rows "
                f"{a.covers.r0} to {a.covers.r1} and of rows {b.covers.r0} to {b.covers.r1} differ"
            )


def _shared(piece: Piece, name: str, other: Rect) -> Tensor | None:
    """The entries of a piece's plane that also cover elements of another rectangle; None if there are none."""
    rows, columns = piece.target.LAYOUT.stored[name]
    entries, own = piece.source._entries(name), piece.covers
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


# ------------------------------------------------------------------------------------- a shard without rows, in a load
def chunk_protocol(tensor: QuantizedTensor, name: str) -> Any:
    """The chunk protocol of torch.distributed.checkpoint, for a shard without rows of a recipe with shared planes.

    Such a shard still holds the planes that all rows share (an amax), but a tensor without elements is not loaded. So
    it asks for the weight's first row and keeps the shared planes of that. None for any other tensor: DCP reads those
    itself.
    """
    if not tensor.LAYOUT.shared or tensor.dim() < 2 or tensor.shape[0] or 0 in tensor.shape[1:]:
        return None
    size = torch.Size((1, *tensor.shape[1:]))

    def chunks() -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)]

    def shard(index: Any) -> QuantizedTensor:
        if index.offset is not None and any(index.offset):  # a save writes the shard itself
            return tensor
        first: Any = tensor.new_zeros(size)
        first._planes.update({name: tensor._planes[name] for name in tensor.LAYOUT.shared & tensor._planes.keys()})
        first._halo, first._padding, first._writes = Halo(0, first._halo.after), NOT_PADDED, tensor._writes
        return first  # type: ignore[no-any-return]

    return {"__create_chunk_list__": chunks, "__get_tensor_shard__": shard}[name]


def check_readable(tensor: QuantizedTensor) -> None:
    """Raises LayoutError for a tensor that can't be read: FSDP2 has freed it, or only a part of it was loaded."""
    gathered_in_graphs.check_not_resharded(tensor)
    if tensor._writes.waiting:
        check_whole(tensor)


def check_writable(tensor: QuantizedTensor) -> None:
    """Raises UnsupportedOperator for rows that no view of the planes covers, since a write to them would be lost."""
    if isinstance(tensor._planes, ScatteredPlanes):
        raise UnsupportedOperator(
            f"{tensor._label()} consists of rows that are not adjacent: it can be read but not written; write into the "
            "weight that it was cut from"
        )

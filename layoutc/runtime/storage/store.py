"""PlaneStore: the planes of a weight or a part of it, the part's position, and the record of writes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layoutc.ints.cuts import NO_HALO, Halo
from layoutc.ints.rects import Rect
from layoutc.ints.sizes import cdiv
from layoutc.runtime.errors import UnsupportedOperator
from layoutc.runtime.facts import Layout
from layoutc.runtime.storage.planes import CutPlanes, Home
from layoutc.runtime.torch_private import traced


class Part(NamedTuple):
    """Where a piece's planes begin in those of the tensor that it is cut from, and that tensor's own rows."""

    row: int
    column: int
    first: int
    last: int
    columns: int


class Stack(NamedTuple):
    """How many rows the matrices of a stack have, and at which row of one a tensor begins."""

    each: int
    first: int = 0

    @classmethod
    def of(cls, shape: tuple[int, ...], transposed: bool) -> Stack:
        """Of a tensor of this outer shape that begins with a whole matrix."""
        return cls(shape[-1 if transposed else -2] if len(shape) > 1 else 1)


@dataclass(eq=False)  # by identity: tensors compare element by element
class Piece:
    """Bytes that wait for `write` into `target`: the elements that they cover, and those that must arrive first."""

    target: PlaneStore
    source: PlaneStore
    covers: Rect
    needs: tuple[Rect, ...]
    write: Callable[[], None]


class Seal(NamedTuple):
    """Planes and their version counters when the values were stored; later writes change the counters."""

    planes: Mapping[str, Tensor]
    versions: tuple[int, ...]


class InitialValues(NamedTuple):
    """The values that a tensor was quantized from: a plain tensor of (its own rows, k) in its own memory."""

    values: Tensor
    is_whole: bool  # False if only parts were written: the rest is NaN, which means the dequantized value
    seals: tuple[Seal, ...]


@dataclass
class Writes:
    """The record of writes that a tensor, its aliases and its pieces share: their number, the pieces that wait, and the
    values that the bytes were quantized from."""

    count: int = 0
    waiting: list[Piece] = field(default_factory=list)
    planes: Mapping[str, Tensor] = field(default_factory=dict)  # of the tensor that the others are views of
    content: object = field(default_factory=object)  # an identity of the bytes: copies share it, other bytes don't
    read: object = None  # the content from which an operator last computed values, one for each element
    trains: bool = False  # written plain values are kept, for a master
    master: weakref.ref[Any] | None = None  # whose `values()` gives the master's, while the bytes are made from them
    stepped: bool = False  # by an optimizer itself, after a warning
    initial: InitialValues | None = None
    base: tuple[Any, tuple[Any, ...]] | None = None  # what it was before a merge (`dispatch.merges.Base`), and its mark
    sent: Any = None  # the tensor, if this rank has broadcast its values

    def __deepcopy__(self, memo: dict[int, Any]) -> Writes:
        """For checkpoints that are staged attribute by attribute; they leave initial values out."""
        return Writes(self.count, copy.deepcopy(self.waiting, memo), content=self.content, trains=self.trains)


class PlaneStore:
    """What a quantized tensor and its aliases share. Views of some rows or columns have their own stores, whose planes
    are views of these, and the same record of writes.

    planes: compact, m-major, by name. matrix: their (m, k), with the halo. declared: the orientations that it was made
    with. halo: rows of the planes that are not its own.
    """

    def __init__(
        self,
        layout: Layout,
        planes: MutableMapping[str, Tensor],
        matrix: tuple[int, int],
        declared: tuple[str, ...],
        halo: Halo = NO_HALO,
    ) -> None:
        self.layout, self.planes, self.matrix, self.declared, self.halo = layout, planes, matrix, declared, halo
        self.writes = Writes(planes=planes)  # version counters don't see writes below autograd
        self.home: Home | None = None  # of a gathered weight: its shard
        self.part: Part | None = None  # of a piece: its position in the tensor that it was cut from
        self.stack: Stack | None = None  # of a recipe that has an amax for each matrix, whatever the shape of a view
        self.common: frozenset[str] = frozenset()  # planes that a part of a weight shares with the rest of it

    @property
    def device(self) -> torch.device:
        """The device of its planes."""
        first = getattr(self.planes, "handle", None)  # in a traced graph, reading a plane would record an operator
        return (next(iter(self.planes.values())) if first is None else first).device

    @property
    def rows(self) -> int:
        """Its own rows, without the halo."""
        return self.matrix[0] - self.halo.rows

    @property
    def amaxes(self) -> int:
        """How many amaxes its own rows have: one, or one for each matrix of a stack. A piece inside a matrix has one of
        its own. Raises UnsupportedOperator for one that ends inside a matrix, and has rows of others."""
        if self.stack is None or self.stack.first + self.rows <= self.stack.each:
            return 1
        each = self.stack.each
        if self.stack.first or self.rows % each:
            raise UnsupportedOperator(
                f"{self.rows} rows of a stack in {self.layout.name}, which has an amax for each matrix of {each} rows, "
                "begin or end inside a matrix: write whole matrices, or rows of one"
            )
        return self.rows // each

    @property
    def orientations(self) -> tuple[str, ...]:
        """The orientations that its planes give without loss, rowwise first."""
        if len(self.planes) == len(self.layout.stored):
            return self.declared
        sources = self.layout.sources
        return tuple(o for o in self.declared if all(plane in self.planes for plane in sources[o]))

    def entries(self, name: str) -> Tensor:
        """The entries of a plane that cover its own rows, as a view."""
        rows, plane = self.layout.stored[name].rows_per_value, self.planes[name]
        if rows is None or not self.halo.rows:
            return plane
        return plane[self.halo.before // rows : cdiv(self.matrix[0] - self.halo.after, rows)]

    @property
    def base(self) -> Mapping[str, Tensor]:
        """Its planes, or those that they are cut from at each use."""
        planes: Mapping[str, Tensor] = getattr(self.planes, "base", self.planes)
        return planes

    @property
    def handle(self) -> Tensor | None:
        """The handle of a weight whose planes each pass replaces, while calls are traced; else None."""
        own: Tensor | None = getattr(self.planes, "handle", None)
        return own if own is not None and traced(own) else None

    @property
    def whole(self) -> tuple[int, int]:
        """(m, k) of the weight that it was cut from, or is."""
        return self.planes.matrix if isinstance(self.planes, CutPlanes) else self.matrix

    @property
    def window(self) -> Rect:
        """The rows and columns of that weight that it covers."""
        planes, (m, k) = self.planes, self.matrix
        return planes.window if isinstance(planes, CutPlanes) else Rect(0, m, 0, k)

    @property
    def is_freed(self) -> bool:
        """True if FSDP2 has freed a gathered weight's planes: reading freed memory would crash the process."""
        planes = self.base if self.home is not None else {}
        if not planes or traced(next(iter(planes.values()))):
            return False
        return any(plane.numel() and not plane.untyped_storage().nbytes() for plane in planes.values())

    def part_at(self, row: int, column: int) -> Part:
        """The Part of a piece that begins at a row and a column of its planes."""
        if self.part is not None:
            return self.part._replace(row=self.part.row + row, column=self.part.column + column)
        return Part(row, column, self.halo.before, self.matrix[0] - self.halo.after, self.matrix[1])

    def cut_from(self, other: PlaneStore, part: Part | None, common: Iterable[str]) -> None:
        """Makes it a view of a part of `other`: they share the record of writes, and the planes named in `common`."""
        self.home, self.writes, self.part = other.home, other.writes, part
        if other.stack is not None and part is not None:
            each, first = other.stack
            before = first - (0 if other.part is None else other.part.row)
            self.stack = Stack(each, (before + part.row) % each if each else 0)
        self.common = other.common.union(common)

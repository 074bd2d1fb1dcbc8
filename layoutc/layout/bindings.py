"""How files of other programs hold a recipe's planes: permutations of values, as integers."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import gcd
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from layoutc.spec.notation import AS_STORED, MATRICES, FileLayout, parse_file_layout, parse_form

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from layoutc.layout.records import Record
    from layoutc.spec.bindings import FileBinding, FileCodes, FileTensor, PlaneKey


NONE: Mapping[str, tuple[float, ...]] = MappingProxyType({})


@dataclass(frozen=True)
class BoundPlane:
    """The tensor of a file that holds one plane.

    `bits` is the size of what is permuted: the codes of a packed plane; or its entries, where codes that share a byte
    in the plane share it in the file too. spread: codes that the file packs have a byte each in the plane.
    """

    plane: str
    name: str
    dtype: str
    layout: FileLayout | None  # None: a single value without dims
    bits: int
    low_first: bool
    plane_low_first: bool
    over: float | None  # the file has this over each value
    by: float | None  # the file has each value over this
    spread: bool = False
    of_matrices: bool = False  # the file has one value for all rows of a matrix
    codes: FileCodes | None = None  # the file has codes of the values
    code_values: tuple[float, ...] = ()  # those of the codes, where files are written

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of names in the layout, in what is permuted."""
        return dict(self.layout.sizes) if self.layout else {}


@dataclass(frozen=True)
class Binding:
    """How files of one program hold all planes of a source."""

    name: str
    summary: str
    planes: tuple[BoundPlane, ...]
    shape: tuple[str, str] | None  # a tensor with the weight's two sizes: its name and dtype
    groups: tuple[str, str, int] | None  # one with the group of each column: its name and dtype, columns of a group
    codebook: tuple[str, str, tuple[float, ...]] | None  # one with the value of each code: its name, dtype and these
    text: tuple[str, str, tuple[str, ...]] | None  # one with JSON: its name, the JSON, keys of any value
    ignored: tuple[str, ...]
    parts: tuple[tuple[str, tuple[str, ...]], ...]
    config: str  # JSON
    recognized: tuple[str, ...]
    plain: str
    fused: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class RecordBinding:
    """How one container holds a weight: a tensor of its own type, whose bytes are the weight's rowwise records."""

    name: str
    summary: str
    container: str
    type: str
    number: int
    buffer: str
    elements: int  # of a record
    nbytes: int


class Stored(NamedTuple):
    """A plane as bindings see it: its name, the bits of a value, and those of a code that has a byte of its own.
    of_matrices: files have one value for each matrix, or part of one, and all of its rows have that."""

    name: str
    bits: int
    code_bits: int = 0
    of_matrices: bool = False


def bindings(
    files: dict[str, FileBinding],
    planes: Mapping[PlaneKey, Stored],
    low_first: bool,
    columns: int | None,
    values: tuple[float, ...],
    codebooks: Mapping[str, tuple[float, ...]],
) -> tuple[Binding, ...]:
    """The bindings of a checked spec, for these planes.

    low_first: how their codes fill bytes. columns: of a block. values: of the elements' codes, if they have a codebook.
    codebooks: the values of every format's codes.
    """
    return tuple(
        Binding(
            name=name,
            summary=stated.summary.rstrip("."),
            planes=tuple(bound(planes[kind], stated.tensors[kind], low_first, codebooks) for kind in planes),
            shape=(stated.tensors["shape"].name, stated.tensors["shape"].dtype) if "shape" in stated.tensors else None,
            groups=_groups(stated.tensors.get("groups"), columns),
            codebook=_codebook(stated.tensors.get("codebook"), values),
            text=_text(stated.tensors.get("text")),
            ignored=stated.ignore,
            parts=tuple(stated.parts.items()),
            config=json.dumps(stated.config),
            recognized=stated.recognize,
            plain=stated.plain or "",
            fused=stated.fused,
        )
        for name, stated in files.items()
        if stated.record is None
    )


def record_bindings(files: dict[str, FileBinding], records: Sequence[Record]) -> tuple[RecordBinding, ...]:
    """The bindings of a checked spec that hold weights as records of the rowwise orientation."""
    return tuple(
        RecordBinding(
            name=name,
            summary=stated.summary.rstrip("."),
            container=stated.record.container,
            type=stated.record.type,
            number=stated.record.number,
            buffer=record.name,
            elements=record.size,
            nbytes=record.nbytes,
        )
        for name, stated in files.items()
        for record in records
        if stated.record is not None and record.orientation == "rowwise"
    )


def _groups(stated: FileTensor | None, columns: int | None) -> tuple[str, str, int] | None:
    return None if stated is None or columns is None else (stated.name, stated.dtype, columns)


def _codebook(stated: FileTensor | None, values: tuple[float, ...]) -> tuple[str, str, tuple[float, ...]] | None:
    return None if stated is None else (stated.name, stated.dtype, values)


def _text(stated: FileTensor | None) -> tuple[str, str, tuple[str, ...]] | None:
    return None if stated is None else (stated.name, json.dumps(stated.value), stated.any)


def bound(
    plane: Stored, stated: FileTensor, low_first: bool, codebooks: Mapping[str, tuple[float, ...]] = NONE
) -> BoundPlane:
    over, by = parse_form(stated.form) if stated.form else (None, None)
    in_file = low_first if stated.pack is None else stated.pack == "low-first"
    if stated.layout == "scalar":
        made = BoundPlane(plane.name, stated.name, stated.dtype, None, max(8, plane.bits), True, True, over, by)
        return replace(made, of_matrices=plane.of_matrices)
    layout = parse_file_layout(stated.layout, dict(stated.sizes)) if stated.layout else AS_STORED
    if (codes := stated.codes) is not None:
        made = BoundPlane(plane.name, stated.name, stated.dtype, layout, 8, True, True, None, None, codes=codes)
        return replace(made, code_values=codebooks[codes.values]) if codes.values else made
    if plane.code_bits:
        low = stated.pack != "high-first"
        return BoundPlane(plane.name, stated.name, stated.dtype, layout, plane.code_bits, low, True, over, by, True)
    if plane.bits < 8 and not shares_bytes(layout, in_file == low_first, plane.bits):
        return BoundPlane(plane.name, stated.name, stated.dtype, layout, plane.bits, in_file, low_first, over, by)
    last = layout.order[-1]
    sizes = {n: size * plane.bits // 8 if n == last and plane.bits < 8 else size for n, size in layout.sizes}
    entries = replace(layout, sizes=tuple(sorted(sizes.items())))
    made = BoundPlane(plane.name, stated.name, stated.dtype, entries, max(8, plane.bits), True, True, over, by)
    return replace(made, of_matrices=plane.of_matrices)


def shares_bytes(layout: FileLayout, same_order: bool, bits: int) -> bool:
    """True if codes that share a byte in the plane do so in the file: bytes can be moved as they are."""
    last, codes = layout.order[-1], 8 // gcd(bits, 8)
    return same_order and last == layout.columns[-1] and dict(layout.sizes).get(last, 0) % codes == 0


def dims(layout: FileLayout, rows: int, columns: int, matrices: int) -> dict[str, int]:
    """The size of each name of a layout, for (rows, columns) values. Raises ValueError if they don't split so."""
    sizes = dict(layout.sizes) | {MATRICES: matrices}
    for names, whole in ((layout.rows, rows), (layout.columns, columns)):
        known = 1
        for name in names:
            known *= sizes.get(name, 1)
        free = next(name for name in names if name not in sizes)
        if whole % known:
            raise ValueError(f"{whole} values do not split into ({' '.join(names)}): they are no multiple of {known}")
        sizes[free] = whole // known
    return sizes


def where(layout: FileLayout, sizes: dict[str, int], index: Sequence[int]) -> tuple[int, ...]:
    """The index, over the names of `order`, of the value at (row, column)."""
    digits = {}
    for names, number in zip((layout.rows, layout.columns), index, strict=True):
        rest = number
        for name in reversed(names):
            rest, digits[name] = divmod(rest, sizes[name])
    return tuple(digits[name] for name in layout.order)

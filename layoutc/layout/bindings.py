"""How other checkpoint formats hold a recipe's planes: permutations of values, as integers."""

from __future__ import annotations

import json
from dataclasses import replace
from math import gcd
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from layoutc.runtime.bindings import facts
from layoutc.runtime.bindings.facts import Binding, BoundPlane, Codes, RecordBinding
from layoutc.spec.notation import AS_STORED, MATRICES, FileLayout, parse_file_layout, parse_form

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from layoutc.layout.records import Record
    from layoutc.spec.bindings import FileBinding, FileTensor, PlaneKey


NONE: Mapping[str, tuple[float, ...]] = MappingProxyType({})


STATED: tuple[PlaneKey, ...] = ("shape", "groups", "codebook", "zeros", "text")  # tensors that hold no plane


class Files(NamedTuple):
    """How one checkpoint format holds all planes of a source, as generated code states it.

    layouts: plane -> the order of its tensor; None: a single value without dims. codebooks: plane -> the codes' format.
    """

    binding: Binding
    layouts: Mapping[str, FileLayout | None]
    codebooks: Mapping[str, str]


class Stored(NamedTuple):
    """A plane as bindings see it: name, bits per value, and bits per code (code_bits) if each code has its own byte.
    of_matrices: files have one value per matrix, or per part of one, which all its rows share."""

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
) -> tuple[Files, ...]:
    """The bindings of a checked spec, for these planes.

    low_first: the order of codes in bytes. columns: of a block. values: the codebook of the elements' codes, if any.
    codebooks: format -> the values of its codes.
    """
    made = list[Files]()
    for name, stated in ((name, stated) for name, stated in files.items() if stated.record is None):
        tensors = {planes[kind].name: stated.tensors[kind] for kind in planes}
        pairs = {one.name: bound(one, tensors[one.name], low_first, codebooks) for one in planes.values()}
        shape, groups, codebook, zeros, text = (stated.tensors.get(kind) for kind in STATED)
        binding = Binding(
            name=name,
            summary=stated.summary.rstrip("."),
            planes={plane: held for plane, (held, _) in pairs.items()},
            config=_as_json(stated.config),
            recognized=stated.recognize,
            plain=stated.plain or "",
            shape=(shape.name, shape.dtype) if shape else None,
            ignored=stated.ignore,
            parts=tuple(stated.parts.items()),
            groups=(groups.name, groups.dtype, columns) if groups and columns is not None else None,
            codebook=(codebook.name, codebook.dtype, values) if codebook else None,
            zeros=(zeros.name, zeros.dtype) if zeros else None,
            text=(text.name, _as_json(text.value), text.any) if text else None,
            fused=stated.fused,
            read_only=stated.read_only,
        )
        written = {plane: one.codes.values for plane, one in tensors.items() if one.codes and one.codes.values}
        made.append(Files(binding, {plane: layout for plane, (_, layout) in pairs.items()}, written))
    return tuple(made)


def _as_json(data: object) -> Any:
    """Data as JSON has it, with lists for tuples, because it is compared with files."""
    return json.loads(json.dumps(data))


def record_bindings(files: dict[str, FileBinding], records: Sequence[Record]) -> tuple[RecordBinding, ...]:
    """The bindings of a checked spec that hold weights as rowwise records."""
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


def bound(
    plane: Stored, stated: FileTensor, low_first: bool, codebooks: Mapping[str, tuple[float, ...]] = NONE
) -> tuple[BoundPlane, FileLayout | None]:
    """The tensor that holds a plane, and its order; None for a single value without dims.

    A packed plane's codes are permuted, or its bytes, if codes that share a byte share it in the file too.
    """
    over, by = parse_form(stated.form) if stated.form else (None, None)
    made = BoundPlane(stated.name, stated.dtype, max(8, plane.bits), over=over, by=by)
    if stated.layout == "scalar":
        return made._replace(scalar=True, of_matrices=plane.of_matrices), None
    layout = parse_file_layout(stated.layout, dict(stated.sizes)) if stated.layout else AS_STORED
    in_file = low_first if stated.pack is None else stated.pack == "low-first"
    if (codes := stated.codes) is not None:
        values = codebooks[codes.values] if codes.values else ()
        meaning = Codes(codes.codebook, codes.scale, codes.block, codes.offset, values)
        made = BoundPlane(stated.name, stated.dtype, 8, codes=meaning)
    elif plane.code_bits:
        made = made._replace(bits=plane.code_bits, low_first=stated.pack != "high-first", spread=True)
    elif plane.bits < 8 and not shares_bytes(layout, in_file == low_first, plane.bits):
        made = made._replace(bits=plane.bits, low_first=in_file, plane_low_first=low_first)
    else:
        last = layout.order[-1]
        sizes = {n: size * plane.bits // 8 if n == last and plane.bits < 8 else size for n, size in layout.sizes}
        layout = replace(layout, sizes=tuple(sorted(sizes.items())))
        made = made._replace(of_matrices=plane.of_matrices)
    names, known = (*layout.rows, *layout.columns), {MATRICES: facts.MATRICES, **dict(layout.sizes)}
    rows, columns = (tuple(known.get(name, facts.REST) for name in group) for group in (layout.rows, layout.columns))
    order = tuple(map(names.index, layout.order))
    counted = tuple(tuple(map(names.index, dim)) for dim in layout.counted)
    return made._replace(rows=rows, columns=columns, order=order, joined=layout.joined, counted=counted), layout


def shares_bytes(layout: FileLayout, same_order: bool, bits: int) -> bool:
    """True if codes that share a byte in the plane also share it in the file, so that whole bytes can be moved."""
    last, codes = layout.order[-1], 8 // gcd(bits, 8)
    return same_order and last == layout.columns[-1] and dict(layout.sizes).get(last, 0) % codes == 0


def dims(layout: FileLayout, rows: int, columns: int, matrices: int) -> dict[str, int]:
    """The size of each name of a layout, for (rows, columns) values. Raises ValueError if these are not divisible."""
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
    """The index of the value at (row, column), over the names of `order`."""
    digits = {}
    for names, number in zip((layout.rows, layout.columns), index, strict=True):
        rest = number
        for name in reversed(names):
            rest, digits[name] = divmod(rest, sizes[name])
    return tuple(digits[name] for name in layout.order)

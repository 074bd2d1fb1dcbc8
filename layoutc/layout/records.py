"""Records: the bits of codes and scales of a run of elements, stored together in one buffer.

A record is a bijection: it stores each bit of each value of its planes once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from layoutc.layout.chain import Shape
from layoutc.layout.planes import Plane, Source
from layoutc.spec.notation import Axis
from layoutc.spec.records import Field, parse_fields

if TYPE_CHECKING:
    from layoutc.spec import schema


@dataclass(frozen=True)
class Slice:
    """Bits of some values of a plane: `bits` bits from bit `low` on, of a record's entries `start` to `stop`."""

    plane: Plane
    start: int
    stop: int
    low: int
    bits: int


@dataclass(frozen=True)
class Run:
    """Where a record stores a slice, in bits from the lowest of its first byte: entry i is at `at + i * step`."""

    slice: Slice
    at: int
    step: int


@dataclass(frozen=True)
class Record:
    """A buffer of records of `size` elements each along an axis: (the other axis, bytes), uint8.

    bundles: stored one after another. Entry i of all slices of a bundle forms a word, with the first slice lowest.
    Words fill bytes alone or together with the words after them, low bits first.
    """

    name: str
    orientation: str
    axis: Axis
    size: int
    planes: tuple[Plane, ...]
    bundles: tuple[tuple[Slice, ...], ...]
    low_first: bool  # how codes are packed in planes

    @property
    def nbytes(self) -> int:
        """Bytes per record."""
        return sum((one[0].stop - one[0].start) * sum(part.bits for part in one) for one in self.bundles) // 8

    def shape(self, m: int, k: int) -> Shape:
        """The buffer's shape for a weight of (m, k)."""
        rows, length = (m, k) if self.axis == "k" else (k, m)
        return (rows, length // self.size * self.nbytes)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The position of each slice, in the order of the fields."""
        found: list[Run] = []
        base = 0
        for bundle in self.bundles:
            step, at = sum(part.bits for part in bundle), base
            for part in bundle:
                found.append(Run(part, at, step))
                at += part.bits
            base += (bundle[0].stop - bundle[0].start) * step
        return tuple(found)

    @property
    def made_by(self) -> tuple[str, ...]:
        """A description of the records."""
        names = ", ".join(plane.kind for plane in self.planes)
        return (f"records of {self.size} elements along {self.axis}: {names} in {self.nbytes} bytes",)


def count_of(plane: Plane, axis: Axis, size: int) -> int:
    """The number of a plane's values in a record."""
    return size // ((plane.per_m if axis == "m" else plane.per_k) or size)


def record_of(stated: schema.Record, name: str, source: Source) -> Record:
    """An orientation's record buffer, along the axis that products contract."""
    axis: Axis = "k" if name == "rowwise" else "m"
    planes = {plane.kind: plane for plane in source.planes}

    def sliced(field: Field) -> Slice:
        plane = planes[field.part]
        start, stop, low, high = field.of(count_of(plane, axis, stated.size), plane.code_bits or plane.bits)
        return Slice(plane, start, stop, low, high - low)

    bundles = tuple(tuple(map(sliced, parse_fields(text))) for text in stated.fields)
    used = {part.plane for bundle in bundles for part in bundle}
    return Record(
        f"{name}_record",
        name,
        axis,
        stated.size,
        tuple(p for p in source.planes if p in used),
        bundles,
        source.quantization.low_first,
    )

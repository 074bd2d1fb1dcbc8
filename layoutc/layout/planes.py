"""The planes that a tensor stores for each quantization of the weight."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm, prod
from typing import Literal

from layoutc.ints.sizes import cdiv
from layoutc.layout.chain import Shape
from layoutc.layout.quantization import Block, Quantization
from layoutc.spec.formats import Format

Kind = Literal["data", "scale", "zero", "super", "offset", "super_zero", "level"]
ORIENTATIONS = ("rowwise", "columnwise")


@dataclass(frozen=True)
class Plane:
    """A stored array of a source: one value per `per_m` rows and `per_k` columns of the weight; None: all of them.

    Its shape is (rows, bytes of a row) for packed codes of less than 8 bits, else (rows, values); (1,) with neither.
    """

    name: str
    kind: Kind
    per_m: int | None
    per_k: int | None
    bits: int
    half: str = ""  # the torch dtype of 16-bit values
    code_bits: int = 0  # bits of a code that has a byte here, and is packed in buffers; 0: `bits`

    @property
    def dtype(self) -> str:
        """The torch dtype of the plane: uint8 for codes of up to 8 bits, else that of the values."""
        return "float32" if self.bits == 32 else self.half or "uint8"

    @property
    def itemsize(self) -> int:
        """Bytes of an entry."""
        return max(1, self.bits // 8)

    @property
    def is_scalar(self) -> bool:
        """True for one value for the whole weight, equal on all shards."""
        return self.per_m is None and self.per_k is None

    def shape(self, m: int, k: int) -> Shape:
        """The plane's shape for a weight of (m, k)."""
        if self.is_scalar:
            return (1,)
        columns = 1 if self.per_k is None else cdiv(k, self.per_k)
        width = columns * self.bits // 8 if self.bits < 8 else columns
        return (1 if self.per_m is None else cdiv(m, self.per_m), width)

    def nbytes(self, m: int, k: int) -> int:
        """The plane's bytes for a weight of (m, k)."""
        return prod(self.shape(m, k)) * self.itemsize

    @property
    def row_multiple(self) -> int:
        """Cuts between weight rows at multiples of this split no value and no byte of the plane.

        Each stored row is whole bytes, so only the rows that share a value matter.
        """
        return self.per_m or 1

    @property
    def column_multiple(self) -> int:
        """Like row_multiple, for cuts between columns: whole values, and whole bytes of packed codes."""
        return (self.per_k or 1) * (codes_per_group(self.bits))


AMAX = Plane("amax", "scale", None, None, 32)


def codes_per_group(bits: int, unit: int = 8) -> int:
    """The codes in the shortest run of whole bytes, or of units of `unit` bits: 2 of 4 bits, 4 of 6, 1 of 8 or more."""
    return lcm(bits, unit) // bits if bits < unit else 1


@dataclass(frozen=True)
class Source:
    """One quantization and its planes, named after the first orientation that uses it.

    super: the scales of scales, one per super-block. offset: the mean that was subtracted from the scales. super_zero:
    the scales of zero points. level: what is stored instead of each matrix's amax, once per row.
    """

    name: str
    quantization: Quantization
    data: Plane
    scale: Plane
    super: Plane | None = None
    offset: Plane | None = None
    zero: Plane | None = None
    super_zero: Plane | None = None
    level: Plane | None = None

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The source's planes, in order."""
        all_ = (self.data, self.scale, self.super, self.offset, self.zero, self.super_zero, self.level)
        return tuple(plane for plane in all_ if plane is not None)

    @property
    def whole(self) -> Block:
        """The rows and columns whose scales depend on each other: a super-block, or a block without super-blocks."""
        level = next(iter(self.quantization.levels.values()), None)
        return level.covers if level is not None else self.quantization.block

    def format_of(self, plane: Plane) -> Format | None:
        """The format of a plane's values; None for the means of scales, which are fp32."""
        q = self.quantization
        levels = {"super": q.scales, "super_zero": q.zeros}
        if (level := levels.get(plane.kind)) is not None:
            return level.quantization.scale
        return {"data": q.element, "scale": q.scale, "zero": q.zero}.get(plane.kind)

    def stored_for(self, kind: Literal["scale", "zero"]) -> tuple[Plane, ...]:
        """The planes of scales, or of zero points, and of their level, in the order of the level's functions."""
        planes = (self.scale, self.super, self.offset) if kind == "scale" else (self.zero, self.super_zero)
        return tuple(plane for plane in planes if plane is not None)


def stream_of(source: Source) -> int:
    """The stream of random bits that rounds a source's elements. Sources have different streams."""
    return ORIENTATIONS.index(source.name)

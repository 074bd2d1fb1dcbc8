"""Sizes of planes and buffers as Python expressions in m and k, and of blocks as text."""

from __future__ import annotations

from math import prod

from layoutc.layout.layout import Buffer, Dim, Layout, Plane, Source, codes_per_group
from layoutc.spec.notation import Swizzle


class Sizes:
    """Prints sizes as Python expressions in m and k. Divisions use cdiv unless accepted shapes make them exact."""

    def __init__(self, layout: Layout) -> None:
        self._multiples = {"m": layout.multiple_m, "k": layout.multiple_k}

    def count(self, axis: str, per: int | None, size: str | None = None) -> str:
        """The number of groups of `per` along an axis; 1 for None. `size` replaces the axis's name."""
        size = size or axis
        if per is None:
            return "1"
        if per == 1:
            return size
        return f"{size} // {per}" if self._multiples[axis] % per == 0 else f"cdiv({size}, {per})"

    def padded(self, dim: Dim) -> str:
        """The size of a buffer's dim."""
        count = self.count(dim.axis, dim.per)
        sure = self._multiples[dim.axis] // dim.per if self._multiples[dim.axis] % dim.per == 0 else 1
        return count if sure % dim.multiple == 0 else f"up({count}, {dim.multiple})"

    def width(self, axis: str, per: int | None, bits: int) -> str:
        """The size of a plane's last dim: bytes if codes are packed, else values."""
        if bits >= 8:
            return self.count(axis, per)
        return in_bytes(axis, bits)

    def plane(self, plane: Plane) -> str:
        """A plane's shape."""
        if plane.is_scalar:
            return "(1,)"
        return f"({self.count('m', plane.per_m)}, {self.width('k', plane.per_k, plane.bits)})"

    def buffer(self, buffer: Buffer) -> str:
        """A buffer's shape; the last dim is in bytes if codes are packed."""
        dims = [self.padded(dim) for dim in buffer.dims]
        if not dims:
            return "(1,)"
        if buffer.swizzle:
            dims = _swizzled(buffer.swizzle, dims, buffer.bits if packs(buffer) else 0, buffer.words or 8)
        elif packs(buffer):
            dims[-1] = in_units(dims[-1], buffer.bits, buffer.words or 8)
        return f"({', '.join(dims)}{',' if len(dims) == 1 else ''})"


def packs(buffer: Buffer) -> bool:
    """True if the last dim counts bytes or words, which several codes may share, instead of values."""
    return bool(buffer.words) or buffer.bits < 8


def _swizzled(swizzle: Swizzle, dims: list[str], bits: int, unit: int) -> list[str]:
    """The dims of a swizzled buffer, from its padded dims. If `bits` is not 0, the last is in units of `unit` bits."""
    sizes, rests = dict(swizzle.sizes), dict[str, str]()
    for dim, (group, size) in enumerate(zip(swizzle.groups, dims, strict=True)):
        rest = next(name for name in group if name not in sizes)
        rests[rest] = _over(size, swizzle.tile(dim))
    made = []
    for place, names in enumerate(swizzle.dims):
        known = prod(sizes[name] for name in names if name in sizes)
        variables = [rests[name] for name in names if name in rests]
        last = bits > 0 and place == len(swizzle.dims) - 1
        whole = last and known * bits % unit == 0
        known = known * bits // unit if whole else known
        text = " * ".join([variables[0], *(f"({one})" for one in variables[1:])]) if variables else str(known)
        text = f"{text} * {known}" if variables and known > 1 else text
        made.append(in_units(text, bits, unit) if last and not whole else text)
    return made


def _over(size: str, divisor: int) -> str:
    return size if divisor == 1 else f"{size} // {divisor}"


def in_bytes(size: str, bits: int) -> str:
    """Bytes of `size` codes of fewer than 8 bits."""
    return in_units(size, bits, 8)


def in_units(size: str, bits: int, unit: int) -> str:
    """The bytes, or words of `unit` bits, that `size` codes of up to 8 bits fill."""
    codes = codes_per_group(bits, unit)
    units = codes * bits // unit
    return _over(size, codes) if units == 1 else f"{size} // {codes} * {units}"


def start_of(name: str, per: int) -> str:
    """The start of a cut, which always falls on a boundary."""
    return name if per == 1 else f"{name} // {per}"


def block_text(source: Source) -> str:
    """The size of a source's blocks, as 16x16 or allx1."""
    block = source.quantization.block
    return f"{block.m or 'all'}x{block.k or 'all'}"

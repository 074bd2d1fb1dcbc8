"""Sizes of planes and buffers as Python expressions in m and k."""

from __future__ import annotations

from layoutc.layout.layout import Buffer, Dim, Layout, Plane, codes_per_group


class Sizes:
    """Sizes as Python expressions in m and k. Divisions are exact if accepted shapes guarantee that, else cdiv."""

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
        """A buffer's shape, with the last dim in bytes if codes are packed."""
        dims = [self.padded(dim) for dim in buffer.dims]
        if not dims:
            return "(1,)"
        if buffer.plane.bits < 8:
            dims[-1] = in_bytes(dims[-1], buffer.plane.bits)
        return f"({', '.join(dims)}{',' if len(dims) == 1 else ''})"


def in_bytes(size: str, bits: int) -> str:
    """Bytes of `size` codes of fewer than 8 bits."""
    codes = codes_per_group(bits)
    nbytes = codes * bits // 8
    return f"{size} // {codes}" if nbytes == 1 else f"{size} // {codes} * {nbytes}"


def start_of(name: str, per: int) -> str:
    """The start of a cut, which always falls on a boundary."""
    return name if per == 1 else f"{name} // {per}"

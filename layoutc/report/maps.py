"""Index maps: which value of a plane is at each byte of a buffer, for `show --picture`. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from layoutc.layout.chain import Chain, Index
from layoutc.layout.layout import Buffer, Layout, is_swizzled, swizzled_formula
from layoutc.plan.plan import Plan


def index_map(plan: Plan, buffer: str, m: int, k: int) -> dict[str, object]:
    """Where every byte of a buffer comes from, as JSON values.

    `bytes` has an entry per byte: the values with bits in it, first bits first, each as [row, column] of its plane;
    None for padding. A plane's value serves `covers` rows and columns of the weight (None: all), so [row, column] is an
    element for codes and a block for scales. A value of several bytes appears in each of them. `swizzled` lists a scale
    buffer's values in the order that a GEMM reads them, if that differs.
    """
    laid_out = find_buffer(plan.layout, buffer)
    chain = laid_out.chain(m, k)
    swizzled = swizzled_map(plan.layout, laid_out, m, k) if is_swizzled(plan.layout, laid_out) else None
    return {
        "buffer": laid_out.name,
        "plane": laid_out.plane.name,
        "kind": laid_out.kind,
        "dtype": laid_out.dtype,
        "shape": list(laid_out.shape(m, k)),
        "bits": laid_out.bits,
        "order": "low-first" if chain.low_first else "high-first",
        "covers": [laid_out.plane.per_m, laid_out.plane.per_k],
        "weight": [m, k],
        "bytes": [
            [None if value is None else list(value) for value in values_in(laid_out, chain, byte)]
            for byte in range(chain.nbytes)
        ],
        "swizzled": None if swizzled is None else [None if value is None else list(value) for value in swizzled],
    }


def find_buffer(layout: Layout, name: str) -> Buffer:
    """Finds a buffer by name. Raises KeyError if there is none."""
    return {buffer.name: buffer for buffer in layout.buffers}[name]


def values_in(buffer: Buffer, chain: Chain, byte: int) -> Iterator[Index | None]:
    """(row, column) in the plane of each value with bits in a byte; None for padding."""
    bits = buffer.bits
    width = chain.shapes[-1][-1] * bits // 8  # bytes of a row; each row is packed separately
    row, offset = divmod(byte, width)
    for code in range(offset * 8 // bits, (offset * 8 + 7) // bits + 1):
        begin, bit = divmod(code * bits, 8)
        value = chain.value_at(row * width + begin, bit)
        yield None if value is None else plane_index(buffer, value)


def plane_index(buffer: Buffer, value: Index) -> Index:
    """(row, column) in the plane; 0 for an axis that every value covers."""
    if len(value) == 2:
        return value
    return (value[0], 0) if buffer.m_dim is not None else (0, value[0])


def swizzled_map(layout: Layout, buffer: Buffer, m: int, k: int) -> Iterator[Index | None]:
    """(row, column) in the plane of each byte of a swizzled scale buffer, in the order that a GEMM reads them."""
    chain = swizzled_formula(layout, buffer).at(m, k)
    for byte in range(0, chain.nbytes, buffer.bits // 8):
        value = chain.value_at(byte, 0)
        yield None if value is None else plane_index(buffer, value)

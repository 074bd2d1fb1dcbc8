"""Which value of a plane stands where in a buffer, byte for byte: what `show --picture` draws. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from layoutc.layout.chain import Chain, Index
from layoutc.layout.layout import Buffer, Layout, is_swizzled, swizzle_chain
from layoutc.plan.plan import Plan


def index_map(plan: Plan, buffer: str, m: int, k: int) -> dict[str, object]:
    """Where every byte of a buffer comes from, as JSON has it.

    `bytes` has an entry for each byte: the values that have bits in it, first bits first, each as [row, column] of its
    plane, None for padding. A value of a plane serves `covers` rows and columns of the weight (None: all), so for codes
    it is the element's own (i, j), and for scales the block's. A value of several bytes stands in each of them.
    `swizzled` lists the values of a scale buffer in the order in which a GEMM wants them, where it wants another.
    """
    found = find_buffer(plan.layout, buffer)
    chain = found.chain(m, k)
    swizzled = swizzled_map(plan.layout, found, m, k) if is_swizzled(plan.layout, found) else None
    return {
        "buffer": found.name,
        "plane": found.plane.name,
        "kind": found.kind,
        "dtype": found.dtype,
        "shape": list(found.shape(m, k)),
        "bits": found.plane.bits,
        "order": "low-first" if chain.low_first else "high-first",
        "covers": [found.plane.per_m, found.plane.per_k],
        "weight": [m, k],
        "bytes": [
            [None if value is None else list(value) for value in values_in(found, chain, byte)]
            for byte in range(chain.nbytes)
        ],
        "swizzled": None if swizzled is None else [None if value is None else list(value) for value in swizzled],
    }


def find_buffer(layout: Layout, name: str) -> Buffer:
    """The buffer of that name; KeyError where there is none."""
    return {buffer.name: buffer for buffer in layout.buffers}[name]


def values_in(buffer: Buffer, chain: Chain, byte: int) -> Iterator[Index | None]:
    """(row, column) in the plane of each value that has bits in a byte; None for padding."""
    bits = buffer.plane.bits
    width = chain.shapes[-1][-1] * bits // 8  # bytes of a row, at which packing starts anew
    row, offset = divmod(byte, width)
    for code in range(offset * 8 // bits, (offset * 8 + 7) // bits + 1):
        begin, bit = divmod(code * bits, 8)
        value = chain.value_at(row * width + begin, bit)
        yield None if value is None else plane_index(buffer, value)


def plane_index(buffer: Buffer, value: Index) -> Index:
    """(row, column) in the plane: an axis that all values cover has none of its own, so it is 0."""
    if len(value) == 2:
        return value
    return (value[0], 0) if buffer.m_dim is not None else (0, value[0])


def swizzled_map(layout: Layout, buffer: Buffer, m: int, k: int) -> Iterator[Index | None]:
    """(row, column) in the plane of each byte of a swizzled scale buffer, in the order in which a GEMM reads them."""
    assert layout.swizzle is not None
    chain = buffer.chain(m, k)
    # The pattern is over (free axis, contraction axis): rows first rowwise, columns first columnwise.
    turned = buffer.axes != (("m", "k") if buffer.orientation == "rowwise" else ("k", "m"))
    shape = buffer.shape(m, k)
    swizzle = swizzle_chain(layout.swizzle, shape[::-1] if turned else shape, buffer.plane.bits)
    size = buffer.plane.bits // 8
    for byte in range(0, swizzle.nbytes, size):
        place = swizzle.value_at(byte, 0)
        assert place is not None
        row, column = place[::-1] if turned else place
        value = chain.value_at((row * shape[1] + column) * size, 0)
        yield None if value is None else plane_index(buffer, value)

"""The positions of values in buffers, by definition: where a value serves `per` steps, entry p is that of p * per.

Independent of layoutc.layout.chain: plain indexing in numpy.
"""

from __future__ import annotations

import numpy as np

from layoutc.conformance.model.codes import Array, pack, unpack
from layoutc.conformance.model.weights import Planes
from layoutc.layout.layout import Buffer, Layout, Record
from layoutc.spec.notation import Swizzle


def plane_values(buffer: Buffer, planes: Planes) -> Array:
    """The plane's values, one per entry: codes are unpacked, scales are as stored."""
    plane = planes[buffer.plane.name]
    return unpack(plane, buffer.bits, buffer.low_first) if buffer.kind == "data" else plane


def lay_out(buffer: Buffer, planes: Planes, m: int, k: int) -> Array:
    """The buffer of an (m, k) weight, including padding."""
    values = plane_values(buffer, planes)
    if not buffer.dims:
        return values
    extent, per_value = {"m": m, "k": k}, {"m": buffer.plane.per_m, "k": buffer.plane.per_k}
    index = {"m": np.zeros(1, int), "k": np.zeros(1, int)}
    sizes = []
    for dim in buffer.dims:
        count = -(-extent[dim.axis] // dim.per)
        index[dim.axis] = np.arange(count) * dim.per // (per_value[dim.axis] or max(extent[dim.axis], 1))
        sizes.append(-(-count // dim.multiple) * dim.multiple)
    values = np.atleast_2d(values)[index["m"][:, None], index["k"][None, :]]
    axes = [dim.axis for dim in buffer.dims]
    values = values.T if axes == ["k", "m"] else values
    values = values.reshape(-1) if len(axes) == 1 else values
    out = np.zeros(sizes, values.dtype)
    out[tuple(slice(0, size) for size in values.shape)] = values
    out = out if buffer.swizzle is None else in_order(buffer.swizzle, out)
    out = pack(out, buffer.bits, buffer.low_first)
    return np.ascontiguousarray(out).view(f"<i{buffer.words // 8}") if buffer.words else out


def in_order(swizzle: Swizzle, entries: Array) -> Array:
    """Entries of padded dims in the order of a buffer's swizzle, indexed by their position along each of its names."""
    sizes, picks = dict(swizzle.sizes), dict(swizzle.picks)
    for group, extent in zip(swizzle.groups, entries.shape, strict=True):
        (rest,) = (name for name in group if name not in sizes)
        sizes[rest] = extent // int(np.prod([sizes[name] for name in group if name != rest]))
    grid = np.meshgrid(*(np.arange(sizes[name]) for name in swizzle.order), indexing="ij", sparse=True)
    at = {name: np.array(picks[name])[n] if name in picks else n for name, n in zip(swizzle.order, grid, strict=True)}
    index = []
    for group in swizzle.groups:
        place = np.zeros(1, int)
        for name in group:
            place = place * sizes[name] + at[name]
        index.append(place)
    shape = [int(np.prod([sizes[name] for name in names])) for names in swizzle.dims]
    return np.broadcast_to(entries[tuple(index)], [sizes[name] for name in swizzle.order]).reshape(shape)


def buffers(layout: Layout, planes: Planes, m: int, k: int) -> dict[str, Array]:
    """All buffers whose planes are given, and the amax."""
    made = {b.name: lay_out(b, planes, m, k) for b in layout.buffers if b.plane.name in planes}
    made |= {one.name: in_records(one, planes, m, k) for one in layout.records if one.planes[0].name in planes}
    return made | ({"amax": planes["amax"]} if "amax" in planes else {})


def in_records(record: Record, planes: Planes, m: int, k: int) -> Array:
    """A buffer of records: finds the origin of each bit of a record, then fills that bit of all records at once."""
    rows, length = (m, k) if record.axis == "k" else (k, m)
    bits_of: dict[str, Array] = {}
    for plane in record.planes:
        values = planes[plane.name]
        if plane.bits < 8:
            values = unpack(values, plane.bits, record.low_first)
        values = values if record.axis == "k" else values.T
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(rows, length // record.size, -1, values.itemsize)
        bits_of[plane.name] = np.unpackbits(raw, axis=-1, bitorder="little")  # (rows, records, entries, bits)
    stream = [
        bits_of[part.plane.name][:, :, part.start + entry, bit]
        for bundle in record.bundles
        for entry in range(bundle[0].stop - bundle[0].start)
        for part in bundle
        for bit in range(part.low, part.low + part.bits)
    ]
    return np.packbits(np.stack(stream, axis=-1), axis=-1, bitorder="little").reshape(rows, -1)


def swizzled_buffers(layout: Layout, planes: Planes, m: int, k: int) -> dict[str, Array]:
    """Like `buffers`, but with flat scales and zero points in the order of the spec's swizzle."""
    made, swizzle = buffers(layout, planes, m, k), layout.swizzle
    for buffer in layout.buffers if swizzle else ():
        if buffer.name not in made or buffer.kind not in ("scale", "zero"):
            continue
        assert swizzle is not None
        free = "m" if buffer.orientation == "rowwise" else "k"
        made[buffer.name] = in_order(swizzle, made[buffer.name] if buffer.axes[0] == free else made[buffer.name].T)
    return made


def logical(plane_or_buffer: str, layout: Layout, m: int, k: int, byte: int) -> tuple[int, int] | str | None:
    """The first (i, j) of the weight that a byte of a plane or buffer belongs to; "padding"; None: unknown."""
    buffer = next((b for b in layout.buffers if b.name == plane_or_buffer), None)
    plane = next((p for p in layout.planes if p.name == plane_or_buffer), buffer.plane if buffer else None)
    if plane is None or plane.is_scalar:
        return None
    itemsize = plane.bits // 8 if plane.bits > 8 else 1
    if plane.name == plane_or_buffer:  # planes and buffers may share names: use the plane's order
        width = plane.shape(m, k)[-1]
        row, column = divmod(byte // itemsize, width)
        column = column * 8 // plane.bits if plane.bits < 8 else column
        return row * (plane.per_m or 1), column * (plane.per_k or 1)
    assert buffer is not None
    chain = buffer.chain(m, k)
    start = byte // itemsize * itemsize
    for bit in range(8):
        try:
            index = chain.value_at(start, bit)
        except ValueError:
            continue
        if index is None:
            return "padding"
        pair = index if len(index) == 2 else (index[0], 0) if plane.per_k is None else (0, index[0])
        return pair[0] * (plane.per_m or 1), pair[1] * (plane.per_k or 1)
    return None

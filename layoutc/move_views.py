"""What the templates print of laying planes out: for each buffer that is no plane, how a tile is moved into it."""

from __future__ import annotations

from math import gcd
from typing import Any

from layoutc.layout import Buffer, Layout, codes_per_group

View = dict[str, Any]


def moves_view(layout: Layout) -> View:
    """Everything that the lay_out kernel's part of the template uses."""
    moved = _moved(layout)
    bits = {buffer.plane.bits for buffer in moved if buffer.kind == "data"}
    tile = _tile(moved)
    return {
        "moves": [{"name": buffer.name, "body": _body(buffer)} for buffer in moved],
        "move_names": tuple(buffer.name for buffer in moved),
        "moved_planes": list(dict.fromkeys(buffer.plane.name for buffer in moved)),
        "move_sizes": "{" + ", ".join(f'"{b.name}": ({_size(b, "m")}, {_size(b, "k")})' for b in moved) + "}",
        "cover": f"{_cover(moved, 'm')}, {_cover(moved, 'k')}",
        "move_tile": ", ".join(map(str, tile)),
        "word": 32 // min(bits, default=32) if bits <= {4, 8} else 1,
    }


def widest(layout: Layout) -> int:
    """The most rows or columns that one entry of a buffer stands for, of the buffers that are moved."""
    return max([1, *(dim.per for buffer in _moved(layout) for dim in buffer.dims)])


def _moved(layout: Layout) -> list[Buffer]:
    return [buffer for buffer in layout.buffers if buffer.dims and not buffer.is_plane]


def _tile(moved: list[Buffer]) -> tuple[int, int, int]:
    """(rows, columns, warps): square, so that both sides of a transpose have runs of whole sectors; long rows where
    scales alone move, which are few and narrow."""
    if all(buffer.kind != "data" for buffer in moved):
        return max([128, *(dim.per for buffer in moved for dim in buffer.dims)]), 2048, 8
    bits = min((buffer.plane.bits for buffer in moved if buffer.kind == "data"), default=8)
    per = [1, *(dim.per for buffer in moved for dim in buffer.dims)]
    side = max(256 if bits == 4 else 128, *per)
    return side, side, 8


def _dim(buffer: Buffer, axis: str) -> int | None:
    return buffer.axes.index(axis) if axis in buffer.axes else None


def _size(buffer: Buffer, axis: str) -> str:
    """Entries of a buffer along an axis, padding included, as Python."""
    index = _dim(buffer, axis)
    if index is None:
        return "1"
    dim = buffer.dims[index]
    count = axis if dim.per == 1 else f"launch.cdiv({axis}, {dim.per})"
    return count if dim.multiple == 1 else f"launch.up({count}, {dim.multiple})"


def _cover(moved: list[Buffer], axis: str) -> str:
    """The steps along an axis that tiles must cover to reach every buffer's padding."""
    found = {axis}
    for buffer in moved:
        index = _dim(buffer, axis)
        if index is not None and buffer.dims[index].multiple > 1:
            per = buffer.dims[index].per
            found.add(f'sizes["{buffer.name}"][{"mk".index(axis)}]' + (f" * {per}" if per > 1 else ""))
    return f"max({', '.join(sorted(found))})" if len(found) > 1 else axis


def _body(buffer: Buffer) -> list[str]:
    return _codes(buffer) if buffer.kind == "data" else _scales(buffer)


def _codes(buffer: Buffer) -> list[str]:
    plane, name, bits = buffer.plane.name, buffer.name, buffer.plane.bits
    group = codes_per_group(bits)
    nbytes = bits // gcd(bits, 8) if group > 1 else 1
    span = 1 << (nbytes - 1).bit_length()
    sizes = f"{name}_k, {name}_m" if buffer.permutes else f"{name}_m, {name}_k"
    form = f"{bits}, {group}, {nbytes}, {span}, {buffer.low_first}, {group * bits >= 32}, {buffer.permutes}"
    move = f"move_codes({plane}, to_{name}, row, column, m, k, {sizes}, {form}, TILE_M, TILE_K)"
    words = {8: "turn_bytes", 4: "turn_nibbles"}.get(bits)
    in_words = words and buffer.permutes and not buffer.pads and (bits == 8 or buffer.low_first)
    if not in_words:
        return [move]
    return [
        "if WORDS:",
        f"    {words}({plane}, to_{name}, row, column, m, k, TILE_M, TILE_K)",
        "else:",
        f"    {move}",
    ]


def _scales(buffer: Buffer) -> list[str]:
    plane, name = buffer.plane, buffer.name
    per = {axis: buffer.dims[index].per if (index := _dim(buffer, axis)) is not None else None for axis in "mk"}
    strides = {"m": f"{name}_k", "k": "1"}
    if buffer.permutes:
        strides = {"m": "1", "k": f"{name}_m"}
    pers = ", ".join(str(per[axis] or f"TILE_{axis.upper()}") for axis in "mk")
    blocks = f"{plane.per_m or 'TILE_M'}, {plane.per_k or 'TILE_K'}"
    columns = f"tl.cdiv(k, {plane.per_k})" if plane.per_k else "1"
    return [
        f"move_scales({plane.name}, to_{name}, row, column, m, k, {name}_m, {name}_k, "
        f"{strides['m']}, {strides['k']}, {columns}, {pers}, {blocks}, TILE_M, TILE_K)"
    ]

"""What the templates print of laying out: how a tile of planes, or of a weight, gets into a buffer that is no plane."""

from __future__ import annotations

from math import gcd
from typing import Any

from layoutc.layout.layout import Buffer, Layout, Source, codes_per_group, is_swizzled

View = dict[str, Any]


def moves_view(layout: Layout) -> View:
    """Everything that the lay_out kernel's part of the template uses."""
    moved = _moved(layout)
    bits = {buffer.plane.bits for buffer in moved if buffer.kind == "data"}
    cover = [_cover(moved, axis) for axis in "mk"]
    planes = list(dict.fromkeys(buffer.plane.name for buffer in moved))
    padded = cover != ["m", "k"]
    return {
        "moves": [{"name": buffer.name, "body": _body(buffer, layout)} for buffer in moved],
        "move_names": tuple(buffer.name for buffer in moved),
        "moved_planes": planes,
        "moved_names": [*planes, *(f"to_{buffer.name}" for buffer in moved)],
        "padded": padded,
        "cover_m": cover[0],
        "cover_k": cover[1],
        "cover_call": "*_cover(m, k)" if padded else "m, k",
        "move_tile": ", ".join(map(str, _tile(moved))),
        "word": 32 // min(bits, default=32) if bits <= {4, 8} else 1,
        "place": _place_view(layout),
        "swizzled_names": tuple(b.name for b in moved if is_swizzled(layout, b)),
        "swizzled_planes": [_swizzled_plane(b) for b in layout.buffers if is_swizzled(layout, b) and b not in moved],
    }


def _swizzled_plane(buffer: Buffer) -> View:
    """A plane that a GEMM reads in another order, and what the reference's function for that is given."""
    which = f'"{buffer.orientation}"' + (', "zero"' if buffer.kind == "zero" else "")
    return {"name": buffer.name, "which": which}


def is_fused(layout: Layout) -> bool:
    """True where quantizing can write the buffers of a GEMM at once: codes transposed in words, scales of blocks.

    Not where a block tries several scales: what that takes in registers leaves none to transpose with.
    """
    moved = _moved(layout)
    fits = all(_in_words(b) if b.kind == "data" else b.plane.per_m and b.plane.per_k for b in moved)
    turned = [buffer.plane.name for buffer in moved if buffer.kind == "data"]
    plain = all(s.zero is None and not s.quantization.definition.candidates for s in layout.sources)
    whole = all((s.quantization.block.m is None) == (s.quantization.block.k is None) for s in layout.sources)
    return bool(moved) and fits and plain and whole and len(set(turned)) == len(turned)


def source_moves(source: Source, layout: Layout) -> View:
    """Of a source's planes: `turned`, the buffer that its codes are transposed into, and `spread`, what is done to its
    scales for each buffer that they are moved to."""
    moved = [buffer for buffer in _moved(layout) if buffer.plane in source.planes] if is_fused(layout) else []
    turned = [buffer.name for buffer in moved if buffer.kind == "data"]
    spread = [{"name": b.name, "body": _scales(b, layout, "spread_scales(scale")} for b in moved if b.kind != "data"]
    return {"turned": turned[0] if turned else None, "spread": spread, "to": [f"to_{buffer.name}" for buffer in moved]}


def widest(layout: Layout) -> int:
    """The most rows or columns that one entry of a buffer stands for, of the buffers that are moved."""
    return max([1, *(dim.per for buffer in _moved(layout) for dim in buffer.dims)])


def has_moves(layout: Layout) -> bool:
    """True where some buffer is no plane."""
    return bool(_moved(layout))


def turns(layout: Layout) -> bool:
    """True where codes of a buffer are transposed."""
    return any(buffer.kind == "data" for buffer in _moved(layout))


def _moved(layout: Layout) -> list[Buffer]:
    return [buffer for buffer in layout.buffers if buffer.dims and not buffer.is_plane]


def _in_words(buffer: Buffer) -> bool:
    """True for codes that are transposed in words of 32 bits."""
    bits = buffer.plane.bits
    return buffer.permutes and not buffer.pads and (bits == 8 or (bits == 4 and buffer.low_first))


def _tile(moved: list[Buffer]) -> tuple[int, int, int]:
    """(rows, columns, warps): square, so that both sides of a transpose have runs of whole sectors; long rows where
    scales alone move, which are few and narrow."""
    widest_move = max([1, *(dim.per for buffer in moved for dim in buffer.dims)])
    if all(buffer.kind != "data" for buffer in moved):
        return max(128, widest_move), 512, 4
    bits = min((buffer.plane.bits for buffer in moved if buffer.kind == "data"), default=8)
    rows, columns = {4: (128, 256), 8: (256, 128)}.get(bits, (128, 128))
    return max(rows, widest_move), max(columns, widest_move), 8


def _dim(buffer: Buffer, axis: str) -> int | None:
    return buffer.axes.index(axis) if axis in buffer.axes else None


def _size(buffer: Buffer, axis: str, module: str = "") -> str:
    """Entries of a buffer along an axis, padding included: in Triton, or as a module on the host has it."""
    index = _dim(buffer, axis)
    if index is None:
        return "1"
    dim = buffer.dims[index]
    count = axis if dim.per == 1 else f"{module or 'tl.'}cdiv({axis}, {dim.per})"
    return count if dim.multiple == 1 else f"{module + 'up' if module else 'round_up'}({count}, {dim.multiple})"


def _cover(moved: list[Buffer], axis: str) -> str:
    """The steps along an axis that tiles must cover to reach every buffer's padding."""
    found = {axis}
    for buffer in moved:
        index = _dim(buffer, axis)
        if index is not None and buffer.dims[index].multiple > 1:
            per = buffer.dims[index].per
            found.add(_size(buffer, axis, "launch.") + (f" * {per}" if per > 1 else ""))
    return f"max({', '.join(sorted(found))})" if len(found) > 1 else axis


def _body(buffer: Buffer, layout: Layout) -> list[str]:
    if buffer.kind == "data":
        return _codes(buffer)
    return _scales(buffer, layout, f"move_scales({buffer.plane.name}", ", TILE_M, TILE_K")


def _codes(buffer: Buffer) -> list[str]:
    plane, name, bits = buffer.plane.name, buffer.name, buffer.plane.bits
    group = codes_per_group(bits)
    nbytes = bits // gcd(bits, 8) if group > 1 else 1
    span = 1 << (nbytes - 1).bit_length()
    axes = "km" if buffer.permutes else "mk"
    sizes = ", ".join(_size(buffer, axis) for axis in axes)
    form = f"{bits}, {group}, {nbytes}, {span}, {buffer.low_first}, {group * bits >= 32}, {buffer.permutes}"
    move = f"move_codes({plane}, to_{name}, row, column, m, k, {sizes}, {form}, TILE_M, TILE_K)"
    if not _in_words(buffer):
        return [move]
    words = {8: "turn_bytes", 4: "turn_nibbles"}[bits]
    return [
        "if WORDS:",
        f"    {words}({plane}, to_{name}, row, column, m, k, TILE_M, TILE_K, HARDWARE)",
        "else:",
        f"    {move}",
    ]


def _scales(buffer: Buffer, layout: Layout, call: str, rest: str = "") -> list[str]:
    """`call`: the function's name and its first arguments; `rest`: its last ones."""
    plane, name = buffer.plane, buffer.name
    dims = [buffer.dims[index] if (index := _dim(buffer, axis)) is not None else None for axis in "mk"]
    pers = ", ".join(str(dim.per if dim else 0) for dim in dims)
    pads = ", ".join(str(dim.multiple if dim else 1) for dim in dims)
    place = "PLACE" if is_swizzled(layout, buffer) else "None"
    order = f"{buffer.permutes}, {place}, {buffer.orientation == 'rowwise'}"
    blocks = f"{plane.per_m or 0}, {plane.per_k or 0}"
    return [f"{call}, to_{name}, row, column, m, k, {pers}, {blocks}, {pads}, {order}{rest})"]


def _place_view(layout: Layout) -> View | None:
    """Where a GEMM reads a scale: positions along the axes of the swizzle's tiles, and the place that they make up."""
    swizzle = layout.swizzle
    if swizzle is None:
        return None
    sizes, lines, counts = dict(swizzle.sizes), [], {}
    for axis, group in zip(("free", "contracted"), swizzle.groups, strict=True):
        below = 1
        for name in reversed(group):
            size = sizes.get(name)
            at = f"{axis} // {below}" if below > 1 else axis
            lines.append(f"at_{name} = {at} % {size}" if size else f"at_{name} = {at}")
            counts[name] = str(size) if size else f"({axis}_count // {below})"
            below *= size or 1
    place = f"at_{swizzle.order[0]}"
    for name in swizzle.order[1:]:
        place = f"({place}) * {counts[name]} + at_{name}"
    pattern = " ".join(f"({' '.join(group)})" for group in swizzle.groups) + f" -> {' '.join(swizzle.order)}"
    return {"lines": lines, "place": place, "pattern": pattern}

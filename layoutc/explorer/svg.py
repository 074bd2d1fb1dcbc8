"""A still picture of a layout, for papers: the weight's first elements and cuts, and a buffer in memory order.

The same SVG text on every machine, without scripts or embedded fonts. Nothing is told by color alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from layoutc.explorer.data import plane_formula
from layoutc.ints.cuts import Cuts
from layoutc.layout.chain import Chain, Index
from layoutc.layout.formula import Formula
from layoutc.layout.layout import Buffer, Layout, is_swizzled, swizzled_formula
from layoutc.plan.plan import Plan
from layoutc.report.maps import find_buffer, plane_index

ROWS, COLUMNS, CELL = 32, 32, 12  # elements of the weight, and their size
VALUES, LINES = 16, 32  # of the buffer's picture: values per line, and lines
WIDE, HIGH = 34, 14  # size of a buffer's value
LEFT, TOP, GAP = 44, 44, 74

_STYLE = (
    "text{font:10px Arial,'Liberation Sans','DejaVu Sans',sans-serif;fill:#444;text-anchor:middle}"
    ".h{font-size:12px;fill:#000;text-anchor:start}"
    ".e{text-anchor:end}.v{font-size:9px;fill:#000}.g{stroke:#ddd;stroke-width:.6}.b{stroke:#1f5fbf;stroke-width:1.4}"
    ".r{fill:#6b4fb3;fill-opacity:.12}.c,.i{stroke:#6b4fb3;stroke-width:2}.i{stroke:#c0262d;stroke-dasharray:6 3}"
    ".m{stroke:#ccc;stroke-width:.6}.p{fill:#eee}.w{fill:#fff}.k,.o{fill:#f0b451;fill-opacity:.5}.o{fill-opacity:.2}"
)


def picture(plan: Plan, m: int, k: int, world: int, name: str | None = None) -> str:
    """The picture of an (m, k) weight over `world` ranks, with the buffer `name`, or the most instructive one.

    `problems` of layoutc.report.describe must find none for the weight. Raises KeyError for an unknown buffer.
    """
    layout = plan.layout
    buffer = find_buffer(layout, name) if name else _most_telling(layout)
    height = TOP + max(ROWS * CELL, LINES * HIGH) + 40
    width = LEFT + COLUMNS * CELL + GAP + VALUES * WIDE + 12
    title = f"{layout.name}: {layout.summary}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-labelledby="t d">',
        f'<title id="t">{escape(title)}</title>',
        f'<desc id="d">{escape(_words(plan, buffer, m, k, world))}</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect class="w" width="{width}" height="{height}"/>',
        *_weight(plan, buffer, m, k, world),
        *_memory(layout, buffer, m, k, LEFT + COLUMNS * CELL + GAP),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _most_telling(layout: Layout) -> Buffer:
    """A swizzled buffer, else a repeated one, else the first."""
    swizzled = [buffer for buffer in layout.buffers if is_swizzled(layout, buffer)]
    repeated = [buffer for buffer in layout.buffers if max(buffer.repeats, default=1) > 1]
    return (swizzled or repeated or list(layout.buffers))[0]


def _words(plan: Plan, buffer: Buffer, m: int, k: int, world: int) -> str:
    made = ", ".join(buffer.made_by) or "as stored"
    swizzle = plan.layout.swizzle
    order = f", swizzled {swizzle.pattern}" if swizzle and is_swizzled(plan.layout, buffer) else ""
    cuts = Cuts.of(m, world)
    inside = cuts.inside(plan.block_rows)
    return (
        f"A weight of {m} x {k}, {cuts.per_rank} rows on each of {world} ranks; {inside} cuts inside blocks of "
        f"{plan.block_rows} rows. {buffer.name}: {buffer.plane.name}, {made}{order}. Layout id {plan.layout_id}."
    )


# ---------------------------------------------------------------------------------------------------------- the weight
def _weight(plan: Plan, buffer: Buffer, m: int, k: int, world: int) -> Iterator[str]:
    rows, columns = min(m, ROWS), min(k, COLUMNS)
    right, bottom = LEFT + columns * CELL, TOP + rows * CELL
    layout = plan.layout
    yield _text(LEFT, TOP - 26, f"{layout.name}, {m} x {k}, {world} rank{'' if world == 1 else 's'}", "h")
    cuts = Cuts.of(m, world)
    for rank in range(world):
        first, last = (min(row, rows) for row in cuts.bounds(rank))
        if first < last:
            if rank % 2:
                yield _rect(LEFT, TOP + first * CELL, columns * CELL, (last - first) * CELL, "r")
            yield _text(LEFT - 18, TOP + (first + last) * CELL / 2 + 3, f"rank {rank}", turned=-90)
    yield _path("g", *(f"M{LEFT} {TOP + row * CELL}H{right}" for row in range(rows + 1)))
    yield _path("g", *(f"M{LEFT + column * CELL} {TOP}V{bottom}" for column in range(columns + 1)))
    scales = plane_formula(layout, layout.source(buffer.orientation).scale)
    block_rows = [row for row in range(rows) if row == 0 or scales.index(row, 0) != scales.index(row - 1, 0)]
    block_columns = [c for c in range(columns) if c == 0 or scales.index(0, c) != scales.index(0, c - 1)]
    yield _path("b", *(f"M{LEFT} {TOP + row * CELL}H{right}" for row in block_rows))
    yield _path("b", *(f"M{LEFT + column * CELL} {TOP}V{bottom}" for column in block_columns))
    for rank in range(world):
        last = cuts.bounds(rank)[1]
        if last < min(rows, m) and last > cuts.bounds(rank)[0]:
            kind = "i" if cuts.halo(rank, plan.block_rows).after else "c"
            yield _path(kind, f"M{LEFT - 12} {TOP + last * CELL}H{right}")
    for row in range(0, rows, 8):
        yield _text(LEFT - 4, TOP + row * CELL + 10, str(row), "e")
    for column in range(0, columns, 8):
        yield _text(LEFT + column * CELL + CELL / 2, TOP - 5, str(column))
    note = "blocks blue; a dashed cut is inside of a block" if plan.block_rows > 1 else "blocks blue; a line is a cut"
    yield _text(LEFT, bottom + 16, f"first {rows} rows, {columns} columns; {note}", "h")


# -------------------------------------------------------------------------------------------------------------- memory
def _memory(layout: Layout, buffer: Buffer, m: int, k: int, left: int) -> Iterator[str]:
    formula: Formula = swizzled_formula(layout, buffer) if is_swizzled(layout, buffer) else buffer.formula
    chain = formula.at(m, k)
    count = min(chain.nbytes * 8 // chain.bits, VALUES * LINES)
    order = ", as the GEMM reads it" if is_swizzled(layout, buffer) else ""
    yield _text(left, TOP - 26, f"{buffer.name}{order}", "h")
    for number in range(count):
        line, at = divmod(number, VALUES)
        x, y = left + at * WIDE, TOP + line * HIGH
        byte, bit = divmod(number * chain.bits, 8)
        if at == 0:
            yield _text(left - 4, y + 10, str(byte), "e")
        value = _value(buffer, chain, byte, bit)
        if value is None:
            yield _rect(x, y, WIDE, HIGH, "m p")
            continue
        yield _rect(x, y, WIDE, HIGH, "m k" if sum(value) % 2 else "m o")
        yield _text(x + WIDE / 2, y + 10, f"{value[0]},{value[1]}", "v")
    what = "element" if buffer.kind == "data" else "block"
    end = TOP + -(-count // VALUES) * HIGH
    yield _text(left, end + 16, f"byte offsets; each cell names the row,column of its {what}; grey is padding", "h")


def _value(buffer: Buffer, chain: Chain, byte: int, bit: int) -> Index | None:
    value = chain.value_at(byte, bit)
    return None if value is None else plane_index(buffer, value)


def _text(x: float, y: float, words: str, kind: str = "", turned: int = 0) -> str:
    turn = f' transform="rotate({turned} {x:g} {y:g})"' if turned else ""
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:g}" y="{y:g}"{turn}>{escape(words)}</text>'


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'


def _path(kind: str, *moves: str) -> str:
    return f'<path class="{kind}" fill="none" d="{"".join(moves)}"/>'

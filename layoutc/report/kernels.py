"""The text of `layoutc show --kernels`: each kernel's planes, buffers, conversions and tiles, or why it is missing."""

from __future__ import annotations

from layoutc.layout.layout import ORIENTATIONS
from layoutc.plan.conversions import Codec, decoding, encoding
from layoutc.plan.kernels import Kernels, NoKernels, SourceKernel, plan_kernels
from layoutc.plan.moves import CodeMove, SwizzleMove
from layoutc.plan.plan import Plan
from layoutc.plan.tiles import Tile
from layoutc.report.tables import Table
from layoutc.spec.formats import Format

_CAPABILITY = {90: "compute capability 8.9 and later", 100: "compute capability 10"}
_AMAX = {
    "block": "the tile itself",
    "columns": "an amax of each block of columns, over all rows",
    "rows": "a pass over whole rows, in the same launch",
    "tensor": "the amax of the whole weight",
}


def kernel_tables(plan: Plan) -> list[Table]:
    """The kernels of a recipe, or why the reference serves it everywhere."""
    kernels = plan_kernels(plan.layout)
    if isinstance(kernels, NoKernels):
        reason = (("kernels", f"none: {kernels.reason}"), ("in their place", "the reference, on every device"))
        return [Table(f"{plan.layout.name}: no kernels", (), reason)]
    return [_overview(kernels), _sources(kernels), *_moves(kernels), _tiles(kernels)]


def _overview(kernels: Kernels) -> Table:
    quantize = kernels.quantize
    planes = "x to planes: " + ", ".join(p.name for s in kernels.sources for p in s.source.planes)
    if isinstance(quantize, NoKernels):
        rows = [("quantize", f"{planes}; by the reference, on every device: {quantize.reason}")]
    else:
        rows = [("quantize", planes)]
        fused = ", ".join(name for s in kernels.sources for name in (move.buffer.name for move in s.moves))
        how = f"in the same launch: {fused}" if quantize.fused else f"in a second launch, since {quantize.not_fused}"
        alone = _planes_alone(kernels) if kernels.lay_out is not None and not quantize.fused else ()
        how += f"; in none for {', '.join(alone)}, whose buffers are planes" if alone else ""
        rows.append(("to buffers", how))
        batch = "one launch for up to 256" if quantize.batched else f"a launch each, since {quantize.not_batched}"
        batch += f"; orientations in launches of their own, since {quantize.apart}" if quantize.apart else ""
        rows.append(("many weights", batch))
    rows.append(("dequantize", f"{', '.join(name for name, _ in kernels.dequantize_tiles)} to fp32, bf16 or fp16"))
    lay_out = kernels.lay_out
    if isinstance(lay_out, NoKernels):
        rows.append(("lay out", f"by the reference, on every device: {lay_out.reason}"))
    else:
        made = ", ".join(move.buffer.name for move in lay_out.moves) if lay_out else ""
        rows.append(("lay out", f"one launch: {made}" if made else "nothing: every buffer is a plane"))
    return Table(f"{kernels.layout.name}: kernels", (), tuple(rows))


def _planes_alone(kernels: Kernels) -> tuple[str, ...]:
    """Orientations whose buffers are all unchanged planes."""
    made = {buffer.orientation for buffer in kernels.layout.buffers if buffer.dims and not buffer.is_plane}
    made |= {record.orientation for record in kernels.layout.records}
    return tuple(name for name in kernels.layout.orientations if name not in made)


def _sources(kernels: Kernels) -> Table:
    rows: list[tuple[str, ...]] = []
    for source in kernels.sources:
        q = source.source.quantization
        rows.append((source.source.name, "scale from", _AMAX[source.amax_from], ""))
        rows += [("", "blocks", _cut(source), "")] if source.units else []
        rows += [("", *one) for one in _conversions("element", q.element, q.element_rounding)]
        rows += [("", "values", f"multiplied by {q.transform}, in the same launch", "")] if q.transform else []
        rows += [] if q.scale.is_f32 else [("", *one) for one in _conversions("scale", q.scale, q.rounding)]
        rows += [("", *one) for one in _conversions("zero", q.zero, "nearest")] if q.zero else []
        if source.source.level is not None:
            rows.append(("", "level", "of the amax of each matrix, for each of its rows", ""))
        for kind, level in q.levels.items():
            inner, what = level.quantization, f"scale of {kind}s"
            size = f"{level.covers.m or 'all'} x {level.covers.k or 'all'}"
            how = f"of {size}, by {inner.rule}" + (", less their mean" if level.centered else "")
            rows.append(("", f"super-blocks of {kind}s", how, ""))
            made = () if inner.scale.is_f32 else _conversions(what, inner.scale, inner.rounding)
            rows += [("", *one) for one in made]
        rows.append(("", "stored", _stored(source), ""))
    heads = ("source", "what", "how", "on cards that convert")
    return Table("Codes: how they are made, read and stored", heads, tuple(rows))


def _cut(source: SourceKernel) -> str:
    """The units that blocks are cut into; an axis that blocks span is not cut."""
    assert source.units is not None
    block = source.source.quantization.block
    sizes = [str(size or "all") for size in source.units.sizes]
    counts = " x ".join(map(str, source.units.counts))
    return f"{block.m or 'all'} x {block.k or 'all'}: {counts} units of {' x '.join(sizes)}"


def _conversions(what: str, fmt: Format, rounding: str) -> list[tuple[str, str, str]]:
    made, read = encoding(fmt, rounding), decoding(fmt)
    assert read is not None  # recipes without one have no kernels
    return [(f"{what} to {fmt.name}", *_ways(made)), (f"{fmt.name} to {what}", *_ways(read))]


def _ways(codec: Codec) -> tuple[str, str]:
    if codec.hardware is None:
        return codec.software.function, "the same"
    return codec.software.function, f"{codec.hardware.function} ({_CAPABILITY[codec.level]})"


def _stored(source: SourceKernel) -> str:
    bits = source.source.data.bits
    if source.nibbles is not None and not source.source.quantization.stochastic:
        return "eight codes of 4 bits at a time, by the card's conversions"
    return "a byte each" if bits == 8 else f"groups of {bits}-bit codes that fill whole bytes"


def _moves(kernels: Kernels) -> list[Table]:
    if kernels.lay_out is None or isinstance(kernels.lay_out, NoKernels):
        return []
    rows = []
    for move in kernels.lay_out.moves:
        done = ["transposed"] if move.buffer.permutes else []
        if isinstance(move, SwizzleMove):
            done = ["value by value, from where the pattern says"]
        elif isinstance(move, CodeMove):
            words = f"in words of 32 bits where m and k are multiples of {kernels.lay_out.word}"
            done += [words] if move.in_words else []
        else:
            done += [f"an entry for each {move.per_m or 'all'} x {move.per_k or 'all'}"]
            done += ["in the GEMM's order where asked for"] if move.swizzled else []
        pads = f"{move.pad_m} x {move.pad_k}" if move.buffer.pads else "none"
        rows.append((move.buffer.name, move.buffer.plane.name, ", ".join(done), pads))
    tile = kernels.lay_out.tile
    title = f"Laid out by tiles of {tile.rows} x {tile.columns}, {tile.warps} warps: {tile.reason}"
    return [Table(title, ("buffer", "from", "how", "padded to"), tuple(rows))]


def _tiles(kernels: Kernels) -> Table:
    def row(what: str, tile: Tile) -> tuple[str, ...]:
        cap = str(tile.registers or "")
        return (what, f"{tile.rows} x {tile.columns}", str(tile.pieces), str(tile.warps), cap, tile.reason)

    names = [source.source.name for source in kernels.sources]
    dtypes = {2: "bf16, fp16", 4: "fp32"}
    rows = []
    quantize = kernels.quantize
    chosen = () if isinstance(quantize, NoKernels) else ((quantize.tiles, "planes"), (quantize.buffer_tiles, "buffers"))
    for tiles, into in chosen:
        for size, written, tile in tiles:
            which = "+".join(name for name, one in zip(names, written, strict=True) if one)
            rows.append(row(f"{dtypes[size]} to {into}: {which}", tile))
    rows += [row(f"dequantize {name}", tile) for name, tile in kernels.dequantize_tiles if name in ORIENTATIONS]
    heads = ("work", "tile", "pieces", "warps", "registers", "why")
    return Table("Tiles of a program: rows x columns, 16-byte pieces of a row in a thread", heads, tuple(rows))

"""Describes what a plan means for a weight of a given size: shapes, bytes, cuts, gathers, derivations.

Pure functions that return plain values, which show.py prints. All figures are computed from the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from math import ceil, lcm, prod

from layoutc.diagnostics.diagnostic import Diagnostic
from layoutc.ints.cuts import Cuts
from layoutc.ints.nearest import nearest_multiple, nearest_rows, nearest_worlds
from layoutc.ints.sizes import cdiv, up
from layoutc.layout.chain import Shape
from layoutc.layout.layout import Buffer, Layout, Plane, Record
from layoutc.plan.kernels import gap, missing
from layoutc.plan.plan import Derivation, Gather, Plan
from layoutc.plan.wire import bytes_per_rank, own_bytes

HIGH_PRECISION = 2  # bytes of a bf16 element, the baseline of gathers
EXCHANGED = 4  # bytes of an fp32 value that ranks exchange about split blocks
USUAL = 4096  # rows and columns of the default weight


@dataclass(frozen=True)
class PlaneFacts:
    """A weight's stored plane. `covers`: the rows and columns that one value serves; None: all of them."""

    name: str
    kind: str
    dtype: str
    bits: int
    shape: Shape
    nbytes: int
    covers: tuple[int | None, int | None]
    sharded: bool


@dataclass(frozen=True)
class BufferFacts:
    """A buffer that a GEMM reads. `made_by`: the steps from its plane. `carries_m`: the dim that rows are in.

    `swizzle`: the buffer's swizzle with sizes, if any; its rows are in tiles then, not in one dim.
    """

    name: str
    orientation: str
    kind: str
    dtype: str
    bits: int
    shape: Shape
    nbytes: int
    padding_bytes: int
    carries_m: int | None
    plane: str
    made_by: tuple[str, ...]
    swizzle: str | None = None


@dataclass(frozen=True)
class PassFacts:
    """What one pass gathers. The ratio compares it with gathering the same weight in bf16.

    `filling`: bytes of padding per rank, since FSDP2 sizes a slot once, for the larger of the passes that use it.
    `doubled`: bytes beyond the share of a rank's rows, since several ranks send the scales of a split block.
    """

    name: str
    planes: tuple[str, ...]
    bytes_per_rank: int
    filling: int
    doubled: int
    bytes_per_element: Fraction
    ratio_to_bf16: Fraction
    large_weight: Fraction
    serves: tuple[str, ...]
    derived: tuple[str, ...]


@dataclass(frozen=True)
class CutBlocks:
    """Cuts that fall inside blocks of `rows` rows: how many, on how many ranks, and their cost per step.

    In an optimizer step, each rank contributes `exchange_bytes_per_rank` to one all-gather: for its first and last
    block, each column's minimum and maximum ("extremes"), or all "values", in fp32.
    """

    rows: int
    cuts: int
    ranks: int
    exchanged: str
    exchange_bytes_per_rank: int


@dataclass(frozen=True)
class Alignment:
    """Which cuts split no block, where FSDP2 cuts the rows, and what that costs.

    `free_rows`, `free_worlds`: if FSDP2's cuts split blocks, the nearest row counts for this world size, and the
    nearest world sizes for these rows, that split none. `shards_have_buffers`: without a gather.
    """

    rows: int
    reason: str
    columns: int
    world: int
    rows_per_rank: int
    ranks_with_rows: int
    cut_blocks: CutBlocks | None
    shards_have_buffers: bool
    free_rows: tuple[int, ...]
    free_worlds: tuple[int, ...]


@dataclass(frozen=True)
class View:
    """Operators that are exact on stored bytes, and when."""

    operators: str
    condition: str


@dataclass(frozen=True)
class Description:
    """Everything about one recipe and one (m, k) weight that is sharded over `world` ranks.

    `no_kernels`: why the recipe has none and uses the reference on every device; None if it has kernels. `lacking`:
    which of quantize, dequantize and lay out have no kernel, and why. `not_weights`: why weights can't have the recipe;
    "" if they can. `values`: what each orientation does to values besides scaling them.
    """

    name: str
    summary: str
    layout_id: str
    m: int
    k: int
    accepts: tuple[int, int]
    no_kernels: str | None
    lacking: tuple[tuple[str, str], ...]
    not_weights: str
    values: tuple[tuple[str, str], ...]
    planes: tuple[PlaneFacts, ...]
    buffers: tuple[BufferFacts, ...]
    swizzle: str | None
    alignment: Alignment
    passes: tuple[PassFacts, ...]
    derivations: tuple[Derivation, ...]
    views: tuple[View, ...]


def problems(plan: Plan, m: int, k: int, path: str) -> list[Diagnostic]:
    """Why the recipe can't hold an (m, k) weight, with the nearest sizes that it can."""
    layout = plan.layout
    diagnostics = []
    for axis, size, multiple in (("m", m, layout.multiple_m), ("k", k, layout.multiple_k)):
        if size % multiple:
            near = " or ".join(map(str, nearest_multiple(size, multiple))) or "no size near it"
            what = {"m": "rows", "k": "columns"}[axis]
            message = f"{layout.name} takes {what} in multiples of {multiple}, not {size}"
            diagnostics.append(Diagnostic("LC401", message, path, help=f"{axis} can be {near}"))
    return diagnostics


def usual_shape(plan: Plan, world: int) -> tuple[int, int]:
    """A shape near 4096 x 4096 that the recipe accepts, with equal shards of whole blocks."""
    layout = plan.layout
    rows = lcm(layout.multiple_m, plan.shard_rows * world)
    return up(USUAL, rows), up(USUAL, lcm(layout.multiple_k, plan.column_multiple))


def describe(plan: Plan, m: int, k: int, world: int) -> Description:
    """The facts of an (m, k) weight for which `problems` is empty."""
    layout = plan.layout
    return Description(
        name=layout.name,
        summary=layout.summary,
        layout_id=plan.layout_id,
        m=m,
        k=k,
        accepts=(layout.multiple_m, layout.multiple_k),
        no_kernels=gap(plan.layout),
        lacking=missing(plan.layout),
        not_weights=plan.not_weights,
        values=tuple(_values(layout)),
        planes=tuple(_plane(layout, plane, m, k) for plane in layout.planes),
        buffers=(
            *(_buffer(buffer, m, k) for buffer in layout.buffers),
            *(_record(record, m, k) for record in layout.records),
            *_read_as_stored(layout, m, k),
        ),
        swizzle=layout.swizzle.stated if layout.swizzle else None,
        alignment=alignment(plan, m, k, world),
        passes=passes(plan, m, k, world),
        derivations=tuple(plan.derivations),
        views=tuple(View(rule.operators, rule.condition) for rule in plan.dispatch),
    )


def _values(layout: Layout) -> Iterator[tuple[str, str]]:
    """What each orientation does to values, if it does more than scale and round to nearest."""
    for name in layout.orientations:
        quantization = layout.source(name).quantization
        done = [f"multiplied by {quantization.transform}"] if quantization.transform else []
        done += ["rounded by random bits"] if quantization.stochastic else []
        if done:
            yield name, ", ".join(done)


def alignment(plan: Plan, m: int, k: int, world: int) -> Alignment:
    """Where FSDP2 cuts the rows of an (m, k) weight, and what that costs."""
    per_rank, accepted = cdiv(m, world), plan.layout.multiple_m
    free = Cuts.of(m, world).aligned(plan.shard_rows)
    return Alignment(
        rows=plan.shard_rows,
        reason=plan.shard_reason,
        columns=plan.column_multiple,
        world=world,
        rows_per_rank=per_rank,
        ranks_with_rows=cdiv(m, per_rank),
        cut_blocks=_cut_blocks(plan, m, k, world),
        shards_have_buffers=Cuts.of(m, world).aligned(lcm(plan.shard_rows, accepted)),
        free_rows=() if free else nearest_rows(m, world, plan.shard_rows, accepted),
        free_worlds=() if free else nearest_worlds(m, world, plan.shard_rows),
    )


def _cut_blocks(plan: Plan, m: int, k: int, world: int) -> CutBlocks | None:
    block = plan.block_rows
    if Cuts.of(m, world).aligned(block):
        return None
    values = 2 if plan.extremes else block  # per column of a block
    return CutBlocks(
        rows=block,
        cuts=Cuts.of(m, world).inside(block),
        ranks=Cuts.of(m, world).ranks_inside(block),
        exchanged="extremes" if plan.extremes else "values",
        exchange_bytes_per_rank=2 * values * k * EXCHANGED,
    )


def as_data(value: object) -> object:
    """A description as JSON values: mappings, lists, numbers, text."""
    if is_dataclass(value):
        return {field.name: as_data(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple | list):
        return [as_data(item) for item in value]
    if isinstance(value, dict):
        return {key: as_data(item) for key, item in value.items()}
    return float(value) if isinstance(value, Fraction) else value


def _plane(layout: Layout, plane: Plane, m: int, k: int) -> PlaneFacts:
    shape, covers = plane.shape(m, k), (plane.per_m, plane.per_k)
    if layout.history and not any(plane in source.planes for source in layout.sources):
        shape = (layout.history,)  # the weight's amax, not a source's plane: one value per step of the history
    nbytes = prod(shape) * plane.itemsize
    sharded = plane.per_m is not None
    return PlaneFacts(plane.name, plane.kind, plane.dtype, plane.bits, shape, nbytes, covers, sharded)


def _buffer(buffer: Buffer, m: int, k: int) -> BufferFacts:
    chain = buffer.chain(m, k)
    return BufferFacts(
        name=buffer.name,
        orientation=buffer.orientation,
        kind=buffer.kind,
        dtype=buffer.dtype,
        bits=buffer.bits,
        shape=buffer.shape(m, k),
        nbytes=chain.nbytes,
        padding_bytes=padding_bytes(buffer, m, k),
        carries_m=None if buffer.swizzle else buffer.m_dim,
        plane=buffer.plane.name,
        made_by=buffer.made_by,
        swizzle=buffer.swizzle.stated if buffer.swizzle else None,
    )


def _record(record: Record, m: int, k: int) -> BufferFacts:
    rows, length = shape = record.shape(m, k)
    what = (record.name, record.orientation, "record", "uint8", 8, shape, rows * length, 0)
    return BufferFacts(*what, 0 if record.axis == "k" else None, record.planes[0].name, record.made_by)


def _read_as_stored(layout: Layout, m: int, k: int) -> Iterator[BufferFacts]:
    """Planes that a GEMM reads directly, since no orientation lays them out."""
    laid_out = {buffer.plane for buffer in layout.buffers}
    for plane in layout.planes:
        if plane not in laid_out:
            at = _plane(layout, plane, m, k)
            yield BufferFacts(at.name, "", at.kind, at.dtype, at.bits, at.shape, at.nbytes, 0, None, at.name, ())


def padding_bytes(buffer: Buffer, m: int, k: int) -> int:
    """Bytes of padding in a buffer."""
    filled = prod(cdiv(m if dim.axis == "m" else k, dim.per) for dim in buffer.dims)
    return buffer.chain(m, k).nbytes - filled * buffer.bits // 8


def passes(plan: Plan, m: int, k: int, world: int) -> tuple[PassFacts, ...]:
    """What forward, backward and both gather of an (m, k) weight."""
    return tuple(_pass(plan, gather, m, k, world) for gather in (plan.forward, plan.backward, plan.both))


def _pass(plan: Plan, gather: Gather, m: int, k: int, world: int) -> PassFacts:
    layout = plan.layout
    own = own_bytes(gather, Cuts.of(m, world), k)
    cut = not Cuts.of(m, world).aligned(plan.block_rows)
    per_rank = bytes_per_rank(plan, gather, m, k, world)
    share = sum(Fraction(plane.nbytes(1, k) * cdiv(m, world), plane.per_m or m) for plane in gather.planes)
    per_element = Fraction(per_rank * world, m * k)
    derived = [
        f"{buffer.name}: {', '.join(buffer.made_by)}"
        for buffer in layout.buffers
        if buffer.orientation in gather.serves and buffer.made_by
    ]
    return PassFacts(
        name=gather.name,
        planes=tuple(plane.name for plane in gather.planes),
        bytes_per_rank=per_rank,
        filling=per_rank - own,
        doubled=ceil(own - share) if cut else 0,
        bytes_per_element=per_element,
        ratio_to_bf16=per_element / HIGH_PRECISION,
        large_weight=gather.bytes_per_element,
        serves=gather.serves,
        derived=tuple(derived),
    )

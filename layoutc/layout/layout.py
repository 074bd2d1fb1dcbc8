"""The layout of a recipe: pure integers and index maps. No torch, no I/O.

A *source* is one quantization of the weight: a code per element, a scale per block. A *plane* is a tensor that is
stored for a source: compact, m-major, with each value once. A *buffer* is a tensor that a GEMM reads: a plane's values
laid out as the spec says, by a chain of steps (layoutc.layout.chain).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from layoutc.ints.sizes import cdiv, up
from layoutc.layout.bindings import Files, Stored, bindings, record_bindings
from layoutc.layout.chain import Chain, Pad, Permute, Repeat, Shape, Split, Step
from layoutc.layout.formula import Formula, FormulaStep, RepeatUpTo, Size, of_plane
from layoutc.layout.planes import AMAX, ORIENTATIONS, Kind, Plane, Source, codes_per_group, stream_of
from layoutc.layout.quantization import Block, Level, Quantization, Transform
from layoutc.layout.records import Record, record_of
from layoutc.layout.sources import quantization_of, source_of_quantization, stated_buffer
from layoutc.layout.swizzles import swizzle_chain, swizzle_steps
from layoutc.runtime.bindings.facts import RecordBinding
from layoutc.spec import formats
from layoutc.spec.notation import Axis, Swizzle, parse_buffer_swizzle, parse_layout, parse_swizzle

if TYPE_CHECKING:
    from layoutc.spec import schema
    from layoutc.spec.bindings import PlaneKey
    from layoutc.spec.schema import Use


# ------------------------------------------------------------------------------------------------------------- buffers
@dataclass(frozen=True)
class Dim:
    """A dim of a buffer: one entry per `per` rows or columns, padded to a multiple."""

    axis: Axis
    per: int
    multiple: int

    def size(self, m: int, k: int) -> int:
        """The dim's size, padding included."""
        return up(cdiv(m if self.axis == "m" else k, self.per), self.multiple)


@dataclass(frozen=True)
class Buffer:
    """A buffer: a plane's values, laid out as the spec says. No dims: the plane's single value."""

    name: str
    kind: Kind
    orientation: str
    plane: Plane
    dims: tuple[Dim, ...]
    low_first: bool
    swizzle: Swizzle | None = None  # of the padded dims
    words: int = 0  # bits of a word that the last dim counts; 0: it counts bytes of codes, or values

    @property
    def bits(self) -> int:
        """The bits of a value. Narrow zero points have a byte each in planes, but are packed in buffers."""
        return self.plane.code_bits or self.plane.bits

    @property
    def repacks(self) -> bool:
        """True if the bits of a value differ from the plane's."""
        return self.bits != self.plane.bits

    @property
    def dtype(self) -> str:
        """The plane's dtype, unless the last dim counts words."""
        return f"int{self.words}" if self.words else self.plane.dtype

    def shape(self, m: int, k: int) -> Shape:
        """The shape for a weight of (m, k); the last dim counts bytes if codes are packed, or words."""
        if not self.dims:
            return (1,)
        padded = tuple(dim.size(m, k) for dim in self.dims)
        *lead, last = swizzle_chain(self.swizzle, padded).shapes[-1] if self.swizzle else padded
        bits = self.bits
        return (*lead, last * bits // (self.words or 8) if self.words or bits < 8 else last)

    @property
    def multiples(self) -> tuple[int, ...]:
        """The multiple that each dim's size must be, so that swizzles can split it and it fills bytes or words."""
        run = codes_per_group(self.bits, self.words or 8)
        return self.swizzle.multiples(run) if self.swizzle else (*[1] * (len(self.dims) - 1), run)

    @cached_property
    def formula(self) -> Formula:
        """From the plane's values, as an array of (rows, columns) or of the buffer's single axis, to bytes."""
        steps: list[FormulaStep] = []
        if self.permutes:
            steps.append(Permute(tuple(("m", "k").index(axis) for axis in self.axes)))
        for d, dim in enumerate(self.dims):
            if (times := self.repeats[d]) > 1:
                steps.append(RepeatUpTo(d, times, Size(dim.axis, dim.per)))
        if self.pads:
            steps.append(Pad(tuple(dim.multiple for dim in self.dims)))
        if self.swizzle:
            steps += swizzle_steps(self.swizzle)
        whole = of_plane(self.plane.per_m, self.plane.per_k, self.plane.bits, self.low_first)
        start = whole.start if len(self.dims) == 2 else tuple(size for size in whole.start if size.axis in self.axes)
        return Formula(start or (Size(),), tuple(steps), self.bits, self.low_first)

    @cached_property
    def made_by(self) -> tuple[str, ...]:
        """Descriptions of the steps from the plane to the buffer; () if the buffer is the unchanged plane."""
        words = ["transposed"] if self.permutes else []
        for dim, times in zip(self.dims, self.repeats, strict=True):
            words += [f"repeated {times}x along {dim.axis}"] if times > 1 else []
        if codes_per_group(self.bits) > 1 and (self.permutes or self.repacks) and not self.swizzle:
            words.append(f"packed along {self.axes[-1]}")
        if self.pads:
            words.append(f"zero-padded to multiples of {' x '.join(str(dim.multiple) for dim in self.dims)}")
        words += [f"swizzled {self.swizzle.pattern}"] if self.swizzle else []
        words += [f"in words of {self.words} bits"] if self.words else []
        return tuple(words)

    def chain(self, m: int, k: int) -> Chain:
        """The chain from the plane's values to bytes."""
        return self.formula.at(m, k)

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the dims, in order."""
        return tuple(dim.axis for dim in self.dims)

    @property
    def m_dim(self) -> int | None:
        """The dim along m, if there is one."""
        return self.axes.index("m") if "m" in self.axes else None

    @cached_property
    def permutes(self) -> bool:
        """True if k comes before m."""
        return self.axes == ("k", "m")

    @cached_property
    def repeats(self) -> tuple[int, ...]:
        """How many times in a row each dim stores a value of the plane."""
        per = {"m": self.plane.per_m, "k": self.plane.per_k}
        return tuple((per[dim.axis] or dim.per) // dim.per for dim in self.dims)

    @cached_property
    def pads(self) -> bool:
        """True if some dim has a padding multiple."""
        return any(dim.multiple > 1 for dim in self.dims)

    @property
    def is_plane(self) -> bool:
        """True if the buffer equals the plane byte for byte, for every shape."""
        plain = not (self.permutes or self.pads or self.swizzle or self.words or self.repacks)
        return plain and all(times == 1 for times in self.repeats)


@dataclass(frozen=True)
class OtherOperands:
    """The other operands of low-precision products: the recipes of activations and of output gradients.

    dequantized: the products that stay in high precision.
    """

    activation: str
    gradient: str
    dequantized: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """A resolved recipe: every size is an integer or a function of (m, k), and every default is filled in."""

    name: str
    summary: str
    multiple_m: int
    multiple_k: int
    sources: tuple[Source, ...]
    source_of: tuple[tuple[str, str], ...]  # orientation -> source name
    buffers: tuple[Buffer, ...]
    tensor_amax: bool
    history: int
    pick: str
    swizzle: Swizzle | None
    others: OtherOperands | None  # None: the spec states no low-precision products
    files: tuple[Files, ...] = field(hash=False)  # how other checkpoint formats hold the first source
    containers: tuple[RecordBinding, ...]  # containers that hold the recipe's records
    records: tuple[Record, ...] = ()  # buffers that store codes and scales in records
    use: Use = "weight"  # what the recipe stores
    reduce: str = ""  # the recipe of its gradients on the wire

    @property
    def orientations(self) -> tuple[str, ...]:
        """The recipe's orientations, rowwise first."""
        return tuple(orientation for orientation, _ in self.source_of)

    @property
    def amax_of_matrices(self) -> bool:
        """True if each matrix of a stack has its own amax, whose stored level is repeated for each row."""
        return any(source.level is not None for source in self.sources)

    @property
    def stochastic(self) -> bool:
        """True if some orientation's elements are rounded stochastically."""
        return any(source.quantization.stochastic for source in self.sources)

    @property
    def transforms(self) -> dict[str, Transform]:
        """Orientation -> the transform of its values, for those that have one."""
        found = {name: self.source(name).quantization.transform for name in self.orientations}
        return {name: transform for name, transform in found.items() if transform is not None}

    @property
    def planes(self) -> tuple[Plane, ...]:
        """All planes that a tensor stores, in order; the amax is last."""
        stored = tuple(plane for source in self.sources for plane in source.planes)
        if not (self.tensor_amax or self.history):
            return stored
        return (*stored, AMAX)

    def source(self, orientation: str) -> Source:
        """The source from which an orientation's buffers are made."""
        name = dict(self.source_of)[orientation]
        return next(source for source in self.sources if source.name == name)


def resolve(spec: schema.Spec) -> Layout:
    """A checked spec -> its layout. The spec is known to be valid, so nothing is decided or rejected here."""
    all_formats = dict(formats.BUILTIN)
    all_formats.update({name: formats.make(name, entry.model_dump()) for name, entry in spec.formats.items()})
    sources: list[Source] = []
    source_of: list[tuple[str, str]] = []
    buffers: list[Buffer] = []
    records: list[Record] = []
    of_matrices = spec.tensor is not None and spec.tensor.per == "matrix"
    for name in ORIENTATIONS:
        orientation: schema.Orientation | None = getattr(spec.orientations, name)
        if orientation is None:
            continue
        quantization = quantization_of(spec, orientation, name, all_formats)
        source = next((s for s in sources if s.quantization == quantization), None)
        if source is None:
            source = source_of_quantization(name, quantization, of_matrices)
            sources.append(source)
        source_of.append((name, source.name))
        if orientation.record is not None:
            records.append(record_of(orientation.record, name, source))
        for plane in source.planes:
            kind = plane.kind
            buffer = stated_buffer(orientation, plane)
            terms = parse_layout(buffer.layout)
            pads = buffer.pad or (1,) * len(terms)
            dims = tuple(Dim(term.axis, term.divisor, pad) for term, pad in zip(terms, pads, strict=True))
            own = parse_buffer_swizzle(buffer.swizzle, buffer.sizes, len(dims)) if buffer.swizzle else None
            made = Buffer(f"{name}_{kind}", kind, name, plane, dims, quantization.low_first, own, buffer.words or 0)
            buffers.append(made)
    gemm = spec.gemm
    swizzle = gemm.scale if gemm else None
    others = None
    if gemm and gemm.activation:
        others = OtherOperands(gemm.activation, gemm.gradient or gemm.activation, gemm.dequantize)
    return Layout(
        name=spec.name,
        summary=spec.summary,
        use=spec.use,
        reduce=spec.reduce or "",
        multiple_m=spec.shape.m,
        multiple_k=spec.shape.k,
        sources=tuple(sources),
        source_of=tuple(source_of),
        buffers=tuple(buffers),
        tensor_amax=spec.tensor is not None and not of_matrices,
        history=spec.scale.history.length if spec.scale.history else 0,
        pick=spec.scale.history.pick if spec.scale.history else "",
        swizzle=parse_swizzle(swizzle.swizzle, dict(swizzle.sizes)) if swizzle else None,
        others=others,
        files=bindings(
            spec.files,
            _held_by_files(sources[0], spec.tensor),
            sources[0].quantization.low_first,
            sources[0].quantization.block.k,
            sources[0].quantization.element.values,
            {name: fmt.values for name, fmt in all_formats.items()},
        ),
        containers=record_bindings(spec.files, records),
        records=tuple(records),
    )


def _held_by_files(source: Source, tensor: schema.TensorLevel | None) -> dict[PlaneKey, Stored]:
    """The planes that other checkpoint formats hold: a source's, and the whole weight's amax."""
    by_kind = {plane.kind: plane for plane in source.planes}
    planes: dict[PlaneKey, Stored] = {}
    for kind in ("data", "scale", "zero"):
        if kind in by_kind:
            planes[kind] = Stored(by_kind[kind].name, by_kind[kind].bits, by_kind[kind].code_bits)
    if tensor:
        held = source.level or AMAX
        planes["amax"] = Stored(held.name, held.bits, of_matrices=source.level is not None)
    return planes


def is_swizzled(layout: Layout, buffer: Buffer) -> bool:
    """True for buffers that a GEMM reads swizzled: scales, and zero points, which are laid out like scales."""
    return layout.swizzle is not None and buffer.kind in ("scale", "zero") and len(buffer.dims) == 2


def swizzled_formula(layout: Layout, buffer: Buffer) -> Formula:
    """From a plane's values to the bytes of a swizzled buffer that a GEMM reads.

    The pattern is over (free axis, contraction axis): rowwise, rows are first; columnwise, columns.
    """
    assert layout.swizzle is not None
    transposed = buffer.axes != (("m", "k") if buffer.orientation == "rowwise" else ("k", "m"))
    return buffer.formula.then(*swizzle_steps(layout.swizzle, transposed))


__all__ = [
    "AMAX",
    "ORIENTATIONS",
    "Block",
    "Buffer",
    "Chain",
    "Dim",
    "Layout",
    "Level",
    "OtherOperands",
    "Pad",
    "Permute",
    "Plane",
    "Quantization",
    "Record",
    "Repeat",
    "Source",
    "Split",
    "Step",
    "Transform",
    "cdiv",
    "codes_per_group",
    "is_swizzled",
    "resolve",
    "stream_of",
    "swizzle_chain",
    "swizzled_formula",
    "up",
]

"""Codecs: tests the value of each code and the code of each number, through planes as users see them."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from layoutc.conformance.material import as_planes, expect_same, expect_same_all, generator, input_max
from layoutc.conformance.model.codes import F32, Array, codes_of, pack
from layoutc.conformance.model.rules import FLT_MAX, from_stored
from layoutc.conformance.model.weights import Planes, planes_of
from layoutc.conformance.registry import TALLY, Failure, check
from layoutc.conformance.subject import Subject
from layoutc.ints.sizes import cdiv, up
from layoutc.layout.layout import Source
from layoutc.spec.formats import Format

MOST = 400_000  # elements of one weight


@cache
def around(fmt: Format) -> tuple[float, ...]:
    """All finite values of a format, all midpoints between neighbors, and the adjacent fp32 numbers."""
    values = np.array(sorted(set(map(float, codes_of(fmt).finite.values()))))
    if len(values) > 1000:  # a 16-bit format: the ends, both sides of 0, and a few in between
        middle = len(values) // 2
        parts = values[:20], values[middle - 40 : middle + 40], values[middle + 41 :: 997], values[-20:]
        values = np.concatenate(parts)
    points = np.concatenate([values, (values[:-1] + values[1:]) / 2, 2 * values[[-1, 0]]])
    near = np.clip(points, -float(FLT_MAX), float(FLT_MAX)).astype(F32)
    with np.errstate(over="ignore"):
        beside = np.stack([np.nextafter(near, F32(-np.inf)), near, np.nextafter(near, F32(np.inf))], axis=1)
    return (*beside.reshape(-1).tolist(), 0.0, -0.0, 1e-45, -1e-45, float(FLT_MAX), -float(FLT_MAX))


@cache
def search_disagrees(fmt: Format, rounding: str, seed: int) -> tuple[float, int, int] | None:
    """Where the model's numpy rounding differs from a search over all codes: (x, actual, expected); else None."""
    inputs = [*around(fmt), float("inf"), float("-inf"), float("nan")]
    rng = np.random.default_rng(seed)
    inputs += [float(F32(v)) for v in rng.standard_normal(200) * np.exp2(rng.integers(-20, 20, 200).astype(float))]
    if not codes_of(fmt).has_sign_bit and not fmt.integer:
        inputs = [abs(x) for x in inputs]
    if rounding == "stochastic":
        bits = rng.integers(0, 2**32, len(inputs), np.uint64)
        bits[::3], bits[1::7] = 2**32 - 1, 0
        by_chance = codes_of(fmt).encode_by_chance(np.array(inputs, F32), bits)
        for x, word, code in zip(inputs, bits, by_chance, strict=True):
            if int(code) != (expected := codes_of(fmt).search_by_chance(x, int(word))):
                return x, int(code), expected
        return None
    codes = codes_of(fmt).encode(np.array(inputs, F32), rounding)
    for x, code in zip(inputs, codes, strict=True):
        if int(code) != (expected := codes_of(fmt).search(x, rounding)):
            return x, int(code), expected
    return None


def _formats(subject: Subject) -> set[tuple[Format, str]]:
    quantizations = [source.quantization for source in subject.layout.sources]
    quantizations += [level.quantization for q in quantizations for level in q.levels.values()]
    scales = {(q.scale, q.rounding) for q in quantizations if not (q.scale.is_f32 or q.scales)}
    return scales | {(q.element, q.element_rounding) for q in quantizations}


@check(
    "rounding", "the independent model rounds like a plain search over all codes in exact fractions", compares="facts"
)
def rounding(subject: Subject) -> None:
    """Checks ties, saturation, NaN and infinities by definition; other checks rely on it."""
    for fmt, how in _formats(subject):
        TALLY.facts += 1
        if (difference := search_disagrees(fmt, how, subject.seed)) is not None:
            x, code, expected = difference
            raise Failure(f"{fmt.name}, rounded {how}: {x!r} gives 0x{code:02x}, not 0x{expected:02x}")


# ------------------------------------------------------------------------------------------------------------ decoding
@check("decode", "every element code under every scale code dequantizes to the value that the formats define")
def decode(subject: Subject) -> None:
    """Decodes all codes of all planes, including NaN and infinities."""
    layout = subject.layout
    for source in layout.sources:
        m, k = _matrix_of(subject, source, 4096)
        for turn in range(3):
            planes = _all_codes(subject, m, k, turn)
            tensors = as_planes(subject, planes)
            for orientation in (o for o, name in layout.source_of if name == source.name):
                actual = subject.reference.dequantize_reference(tensors, m, k, orientation)
                expected = subject.model.values(planes, orientation, m, k)
                expect_same(subject, f"{orientation} values", actual, expected, shape=(m, k))


def _all_codes(subject: Subject, m: int, k: int, turn: int) -> Planes:
    """Planes with all codes, with different scales in each turn."""
    rng, planes = generator(subject, "codes", turn), {}
    for source in subject.layout.sources:
        q = source.quantization
        codes = (np.arange(m * k).reshape(m, k) * (1 + 2 * turn) % 2**q.element.bits).astype(np.uint8)
        planes[source.data.name] = pack(codes, source.data.bits, q.low_first)
        for plane in planes_of(source)[1:]:
            shape = plane.shape(m, k)
            if plane.bits == 32:
                values = np.exp2(rng.uniform(-30, 30, shape)).astype(F32)
                values.flat[0] = (values.flat[0], 1.0, np.nan)[turn]
            elif plane.bits == 16:
                values = rng.integers(0, 2**16, shape, np.uint16)
            else:
                values = ((np.arange(np.prod(shape)).reshape(shape) + 85 * turn) % 2 ** (plane.code_bits or 8)).astype(
                    np.uint8
                )
            planes[plane.name] = values
    if subject.layout.tensor_amax or subject.layout.history:
        planes["amax"] = np.full(max(subject.layout.history, 1), (1.0, 3.7, 1e-12)[turn], F32)
    return planes


def _matrix_of(subject: Subject, source: Source, elements: int) -> tuple[int, int]:
    """The shape of a matrix with many blocks of a source, at least one, and about `elements` elements."""
    (um, uk), block = subject.units, source.quantization.block
    columns = up(min(max(2 * (block.k or 64), 64), max(64, block.k or 1)), uk)
    rows = up(max(cdiv(elements, columns), min(block.m or 1, 256)), um)
    return rows, columns


# ------------------------------------------------------------------------------------------------------------ encoding
@check("encode", "elements at, next to and between all codes round as the spec says; codes are kept")
def encode(subject: Subject) -> None:
    """Each block has an anchor that fixes its scale, and probes around the thresholds of rounding."""
    for source in subject.layout.sources:
        probes = np.array(around(source.quantization.element), F32)
        rng = generator(subject, "probes", source.name)
        probes = np.concatenate([probes, (rng.standard_normal(500) * probes.max() / 3).astype(F32)])
        for anchor, amax in _anchors(subject, source):
            _encode_with(subject, source, probes, anchor, amax)


def _anchors(subject: Subject, source: Source) -> list[tuple[float, float]]:
    """(block amax, weight amax) pairs whose multiplier is a power of two, so that probes scale exactly.

    Returns the two that reach the most codes, or the largest element if none gives a power of two.
    """
    q = source.quantization
    largest = float(codes_of(q.element).largest)
    scale_max = float(FLT_MAX) if q.scale.is_f32 else float(codes_of(q.scale).largest)
    wide = [largest * scale_max * 2.0**e for e in (0, -1, -2)] if scale_max < 1e30 else []
    exact: list[tuple[float, float, float]] = []
    for exponent in range(-6, 7):
        anchor = float(F32(largest * 2.0**exponent))
        for amax in (anchor, *wide):
            multiplier, _ = _affine(subject, source, anchor, amax)
            if np.frexp(multiplier)[0] == 0.5:
                reach = float(anchor * multiplier) / largest
                exact.append((-min(reach, 1.0), anchor, amax))
    exact.sort(key=lambda item: (item[0], item[1] != largest))
    return [(anchor, amax) for _, anchor, amax in exact[:2]] or [(largest, (wide or [largest])[0])]


def _affine(subject: Subject, source: Source, anchor: float, amax: float) -> tuple[Array, Array | float]:
    """(multiplier, zero point) of a block whose extremes are the anchor and its negative."""
    block = np.array([[anchor, -anchor]], F32)
    shared = np.array([amax], F32) if subject.facts.shares_amax else None
    names = subject.model.scales(source, block, float(FLT_MAX), shared)
    q = source.quantization
    offset = 0.0 if q.zero is None else from_stored(q.zero, q.zeros, names["zero"]).reshape(-1)[0]
    multiplier = names["multiplier"] if "multiplier" in names else F32(1) / names["divisor"]
    return np.asarray(multiplier).reshape(-1)[0], offset


def _encode_with(subject: Subject, source: Source, probes: Array, anchor: float, amax: float) -> None:
    q = source.quantization
    bm, bk = q.block.m, q.block.k
    multiplier, zero = _affine(subject, source, anchor, amax)
    with np.errstate(all="ignore"):
        by_meaning = {"value": F32(zero), "minimum": -F32(zero)}
        added = by_meaning.get(q.definition.zero_is)
        x = (probes - F32(zero)) / multiplier if added is None else probes / multiplier + added
    x = x[np.isfinite(x)]
    is_shared = source.scale.per_m is None
    reads_block = bm is not None or bk is not None or not subject.facts.shares_amax
    if reads_block and not is_shared:
        x = x[np.abs(x) <= anchor]  # a larger one would become the block's amax
    m, k = _matrix_of(subject, source, 2 * len(x))
    weight = np.zeros((m, k), F32)
    anchors = np.zeros((m, k), bool)
    if not is_shared and (bm or m) * (bk or k) > 2:
        anchors[:: bm or m, :: bk or k] = True
    weight[anchors] = anchor
    if q.zero is not None and anchors.any():
        opposite = np.roll(anchors, 1, axis=1 if (bk or k) > 1 else 0)
        weight[opposite] = -anchor
        anchors |= opposite
    free = np.flatnonzero(~anchors.reshape(-1))
    weight.reshape(-1)[free] = np.resize(x, len(free))
    _quantizes_as_the_model(subject, source, weight, np.array([amax], F32), anchor=anchor)


def _quantizes_as_the_model(
    subject: Subject, source: Source, x: Array, amax: Array, dtype: torch.dtype = torch.float32, **details: object
) -> None:
    """Quantizes with a shared amax, and compares one source's planes with the model's."""
    m, k = x.shape
    shared = _shared(subject, amax, k)
    tensor_amax = torch.from_numpy(shared.copy()) if shared is not None else None
    orientations = tuple(o for o, name in subject.layout.source_of if name == source.name)
    tensor = torch.from_numpy(x).to(dtype)
    actual = subject.reference.quantize_reference(tensor, amax=tensor_amax, orientations=orientations, **subject.seeded)
    expected = subject.model.quantize_source(source, x, input_max(dtype), shared)
    actual = {name: plane for name, plane in actual.items() if name in expected}
    expect_same_all(subject, actual, expected, (m, k), **details)


def _shared(subject: Subject, amax: Array, k: int) -> Array | None:
    """A shared amax in the recipe's shape for it; None if it shares none."""
    if not subject.facts.shares_amax:
        return None
    columns = subject.plan.amax_columns
    return np.resize(amax, (1, cdiv(k, columns))) if columns else amax


@check("scales", "amaxes at, next to and between all scale codes give the scale of the rule and its rounding")
def scales(subject: Subject) -> None:
    """Each block has one nonzero element, whose magnitude runs over the scales."""
    for source in subject.layout.sources:
        q = source.quantization
        largest = float(codes_of(q.element).largest)
        amaxes = np.concatenate([scale_amaxes(source), np.array([0.0, FLT_MAX], F32)])
        tensor_amax = np.array([largest * float(codes_of(q.scale).largest) if not q.scale.is_f32 else 1.0], F32)
        tensor_amax = np.minimum(np.where(np.isfinite(tensor_amax), tensor_amax, F32(1)), F32(1e30))
        if source.scale.per_m is None:
            m, k = subject.units
            x = np.full((m, k), largest, F32)
            for amax in amaxes[:: max(1, len(amaxes) // 200)]:
                _quantizes_as_the_model(subject, source, x, np.array([amax], F32), weight_amax=float(amax))
            continue
        _quantizes_as_the_model(subject, source, with_amaxes(subject, source, amaxes, MOST), tensor_amax)


def scale_amaxes(source: Source) -> Array:
    """Block amaxes at, next to and between all codes of a source's scale, if the weight's amax does not affect them."""
    q = source.quantization
    largest = float(codes_of(q.element).largest)
    if q.scale.is_f32:
        points = [float(p) for p in np.exp2(np.linspace(-140, 120, 131))]
    else:
        points = [abs(p) for p in around(q.scale)]
    with np.errstate(over="ignore"):
        amaxes = np.array([p * largest for p in points] + [p * largest * 1.0000002 for p in points], F32)
    found: Array = amaxes[np.isfinite(amaxes)]
    return found


def with_amaxes(subject: Subject, source: Source, amaxes: Array, most: int) -> Array:
    """A weight whose blocks have one nonzero element each, with successive amaxes. Has up to about `most` elements."""
    block, (um, uk) = source.quantization.block, subject.units
    bm, bk = block.m or 1, block.k or uk
    count = max(8, min(len(amaxes), most // (bm * bk)))
    chosen = amaxes[:: cdiv(len(amaxes), count)]
    k = up(8 * bk if block.k else bk, uk)
    m = up(cdiv(len(chosen), cdiv(k, bk)) * bm, um)
    x = np.zeros((m, k), F32)
    places = x[::bm, ::bk]
    places[...] = np.resize(chosen, places.shape)
    return x


@check("all-bf16", "all 65,536 bf16 inputs quantize as the model says, NaN and infinities included")
def all_bf16(subject: Subject) -> None:
    """Quantizes them in numeric order, so that a block's numbers are close to each other."""
    um, uk = subject.units
    m, k = up(256, um), up(256, uk)
    x = np.zeros((m, k), F32)
    x[:256, :256] = (np.arange(2**16, dtype=np.uint32) << 16).view(F32).reshape(256, 256)
    for source in subject.layout.sources:
        for amax in (1.0, 1e30):
            _quantizes_as_the_model(subject, source, x, np.array([amax], F32), torch.bfloat16, weight_amax=amax)

"""A spec's arithmetic, independently: quantization and dequantization in numpy fp32, with codes by definition.

It shares only the spec, the text of the rules and the layout's integers with the generated references.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from layoutc.conformance.model.codes import F32, Array, codes_of, pack, unpack
from layoutc.conformance.model.hadamard import growth, transformed
from layoutc.conformance.model.philox import element_bits
from layoutc.conformance.model.rules import (
    FLT_MAX,
    Evaluator,
    Stored,
    block_reduce,
    block_sum,
    from_stored,
    programs,
    spread,
    steps_of,
)
from layoutc.layout.layout import Layout, Plane, Quantization, Source

Planes = dict[str, Array]


def planes_of(source: Source) -> tuple[Plane, ...]:
    """All planes of a source, data first."""
    values = (getattr(source, field.name) for field in fields(source))
    return tuple(value for value in values if isinstance(value, Plane))


# ------------------------------------------------------------------------------------------------------ the whole spec
def as_kinds(q: Quantization, names: dict[str, Any]) -> dict[str, Array]:
    """A rule's results, by the kinds of planes that hold them."""
    held = dict(names)
    for kind, level in (("scale", q.scales), ("zero", q.zeros)):
        if level is not None:
            stored = Stored(*names[kind])
            held[kind] = stored.codes
            held["super" if kind == "scale" else "super_zero"] = stored.scale
            held["offset"] = stored.offset if kind == "scale" else held.get("offset")
    return held


@dataclass(frozen=True)
class Model:
    """A recipe's quantization and dequantization, from its spec."""

    layout: Layout
    seed: int = 0  # of random bits

    def quantize(
        self, x: Array, input_max: float = float(FLT_MAX), amax: Array | None = None, matrices: int = 1
    ) -> Planes:
        """(m, k) fp32 -> all planes as stored. amax: the shards' one, if not x's. matrices: how many x stacks."""
        planes: Planes = {}
        if self.layout.amax_of_matrices and amax is None and x.size:
            each = np.abs(x).reshape(matrices, -1).max(1)
            amax = np.repeat(each, len(x) // matrices)[:, None]
        for source in self.layout.sources:
            planes |= self.quantize_source(source, x, input_max, amax)
        if self.layout.tensor_amax or self.layout.history:
            stored = np.zeros(max(self.layout.history, 1), F32)
            stored[0] = (np.max(np.abs(x), initial=F32(0)) if amax is None else amax).reshape(-1)[0]
            q = self.layout.sources[0].quantization
            if "tensor" in programs()[q.rule]:
                stored = self.computed(q, {"tensor_amax": stored}, "tensor")["tensor_level"]
            planes["amax"] = stored
        return planes

    def quantize_source(self, source: Source, x: Array, input_max: float, amax: Array | None) -> Planes:
        """The planes of one source."""
        q, (m, k) = source.quantization, x.shape
        bm, bk = q.block.m or max(m, 1), q.block.k or k
        if q.transform is not None:
            largest = np.max(np.abs(x), initial=F32(0)) if amax is None else np.asarray(amax, F32)
            amax = np.asarray(largest * growth(q.transform), F32)
            x = transformed(q.transform, x)
        if q.root:
            x = np.sqrt(np.where(x < 0, F32(0), x)) + F32(0)  # removes the sign of zeros
        names = self.scales(source, x, input_max, amax)
        with np.errstate(all="ignore"):
            divides = "divisor" in names
            by = spread(names["divisor" if divides else "multiplier"], bm, bk, m, k)
            zero = F32(0) if q.zero is None else spread(from_stored(q.zero, q.zeros, names["zero"]), bm, bk, m, k)
            meaning = programs()[q.rule].get("zero-is")
            x = x - zero if meaning == "value" else x + zero if meaning == "minimum" else x
            scaled = x / by if divides else x * by
            if q.zero is not None and meaning is None:
                scaled = scaled + zero
        codes = self.codes(source, scaled)
        planes = {source.data.name: pack(codes, source.data.bits, q.low_first)}
        held = as_kinds(q, names)
        if source.level is not None:
            held["level"] = np.broadcast_to(names["tensor_level"].reshape(-1, 1), (m, 1))
        for plane in planes_of(source)[1:]:
            planes[plane.name] = np.asarray(held[plane.kind]).reshape(plane.shape(m, k))
        return planes

    def codes(self, source: Source, scaled: Array) -> Array:
        """The codes of scaled values: the nearest, or chosen by random bits."""
        q, (m, k) = source.quantization, scaled.shape
        if not q.stochastic:
            return codes_of(q.element).encode(scaled, "nearest")
        bits = element_bits(self.seed, m, k, ("rowwise", "columnwise").index(source.name))
        return codes_of(q.element).encode_by_chance(scaled, bits)

    def scales(self, source: Source, x: Array, input_max: float, amax: Array | None) -> dict[str, Array]:
        """All that the rule computes for each block, by name."""
        q, (m, k) = source.quantization, x.shape
        bm, bk = q.block.m or max(m, 1), q.block.k or k
        shared = amax is not None and q.block.m is None
        names = {
            "amax": np.asarray(amax, F32).reshape(1, -1) if shared else block_reduce(np.maximum, np.abs(x), bm, bk),
            "lowest": block_reduce(np.minimum, x, bm, bk),
            "highest": block_reduce(np.maximum, x, bm, bk),
            "tensor_amax": np.max(np.abs(x)).reshape(1) if amax is None else np.atleast_1d(np.asarray(amax, F32)),
        }
        tried = programs()[q.rule].get("candidates")
        if "tensor" in programs()[q.rule]:
            names = self.computed(q, names, "tensor")
        if tried is None:
            return self.computed(q, names, "steps", input_max)
        ((candidate, values),) = tried.items()
        candidates = (Evaluator(q, names, input_max).value(str(value)) for value in values)
        computed = [self.computed(q, names | {candidate: value}, "steps", input_max) for value in candidates]
        errors = [self.error(source, x, one) for one in computed]
        best = np.zeros(errors[0].shape, int)
        for number, error in enumerate(errors):
            best = np.where(error < np.choose(best, errors), number, best)
        kept = {name: np.choose(best, [one[name] for one in computed]) for name in ("scale", "multiplier")}
        return kept | {"candidate": best}

    def kept(self, source: Source, x: Array) -> Array:
        """For a rule that tries several scales: the index of the candidate that each block keeps."""
        return self.scales(source, x, float(FLT_MAX), None)["candidate"]

    def error(self, source: Source, x: Array, names: dict[str, Array]) -> Array:
        """The error of a candidate's elements, summed over each block."""
        q, (m, k) = source.quantization, x.shape
        bm, bk = q.block.m or max(m, 1), q.block.k or k
        scale, multiplier = (spread(names[name], bm, bk, m, k) for name in ("scale", "multiplier"))
        with np.errstate(all="ignore"):
            element = codes_of(q.element).decode(codes_of(q.element).encode(x * multiplier, "nearest"))
        inputs = {"x": x, "element": element, "scale": scale, "tensor_amax": names["tensor_amax"]}
        with np.errstate(all="ignore"):
            return block_sum(self.computed(q, inputs, "error")["error"], bm, bk, source.name == "rowwise")

    def computed(
        self, q: Quantization, names: dict[str, Array], part: str, input_max: float = float(FLT_MAX)
    ) -> dict[str, Array]:
        """Adds the values that a part of the rule's program computes, in order, to `names`."""
        names = dict(names)
        evaluator = Evaluator(q, names, input_max)
        for name, expression in steps_of(q, part):
            names[name] = evaluator.value(expression)
        return names

    def values(self, planes: Planes, orientation: str, m: int, k: int) -> Array:
        """Dequantizes the planes of an orientation: (m, k) fp32."""
        source = self.layout.source(orientation)
        q = source.quantization
        held: dict[str, Array] = {plane.kind: planes[plane.name] for plane in planes_of(source)[1:]}
        names: dict[str, Any] = {**held}
        if q.scales is not None:
            names["scale"] = Stored(held["scale"], held["super"], held.get("offset"))
        if q.zeros is not None:
            names["zero"] = Stored(held["zero"], held["super_zero"], None)
        if source.level is not None:
            names["tensor_level"] = held["level"]
        if "amax" in planes:
            level = "tensor_level" if "tensor" in programs()[q.rule] else "tensor_amax"
            names[level] = planes["amax"] * (growth(q.transform) if q.transform else F32(1))
        factor = Evaluator(q, names).value(programs()[q.rule]["decode"])
        codes = unpack(planes[source.data.name], source.data.bits, q.low_first)
        bm, bk = q.block.m or max(m, 1), q.block.k or k
        elements = codes_of(q.element).decode(codes)
        with np.errstate(all="ignore"):
            zero = F32(0) if q.zero is None else spread(from_stored(q.zero, q.zeros, names["zero"]), bm, bk, m, k)
            meaning = programs()[q.rule].get("zero-is")
            if q.zero is not None and meaning is None:
                elements = elements - zero
            values: Array = elements * spread(factor, bm, bk, m, k)
            values = values + zero if meaning == "value" else values - zero if meaning == "minimum" else values
            values = values * values if q.root else values
        return values if q.transform is None else transformed(q.transform, values, inverse=True)

"""Recipes that nobody ships: random specs are compiled, and the references must equal a numpy reading of the same spec.

The numpy side is the conformance suite's model: it evaluates the rules' expressions as they stand in rules.yaml, with
codes by definition; bytes are placed by chains. It shares no text with the generated code.
"""

from __future__ import annotations

import itertools
import sys
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st
from numpy_models import F32, SPECS, same_values, write
from swizzles import swizzles

from layoutc.build.pipeline import compile_spec
from layoutc.conformance.material import array
from layoutc.conformance.model.placing import plane_values
from layoutc.conformance.model.weights import Model, planes_of
from layoutc.layout.layout import resolve
from layoutc.runtime.facts import Layout
from layoutc.runtime.weight.returned_buffers import by_reference
from layoutc.spec.checks.read import read_spec
from layoutc.spec.formats import BUILTIN, thresholds
from layoutc.spec.schema import Spec

M, K = 24, 40
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)  # explaining a failure would take minutes
SIZES = [1, 2, 3, 4, 8, 16, "all"]
RULES = [
    *({"format": "e8m0", "rule": "power-of-two", "round": rounding} for rounding in ("up", "down", "nearest")),
    {"format": "e8m0", "rule": "amax-over-max", "power-of-two": True},
    {"format": "f32", "rule": "amax-over-max"},
    {"format": "f32", "rule": "amax-over-max", "margin": 3, "overflow": "input-max"},
    {"format": "f32", "rule": "amax-over-max", "epsilon": 0.25},
    {"format": "f32", "rule": "amax-over-max", "power-of-two": True, "margin": -2, "epsilon": 1.0e-3},
    *({"format": "e4m3", "rule": "two-level", "round": rounding} for rounding in ("nearest", "up", "down")),
    {"format": "e4m3", "rule": "four-over-six"},
    {"format": "e4m3", "rule": "four-over-six", "bound": 100.5, "squared": True},
    {"format": "e5m2", "rule": "two-level"},
    {"format": "ue5m3", "rule": "two-level"},
    {"format": "e8m0_b100", "rule": "power-of-two", "round": "up"},
    {"format": "f32", "rule": "scale-first"},
    {"format": "f32", "rule": "scale-first", "epsilon": 0.25, "multiply": True},
    {"format": "e4m3", "rule": "scale-first", "of-zeros": 0.125},
    {"format": "bf16", "rule": "scale-first", "of-zeros": 0.0078125},
    {"format": "f16", "rule": "scale-first", "multiply": True},
    {"format": "f16", "rule": "two-level"},
    {"format": "e8m0", "rule": "scale-first", "round": "up"},
]
FORMATS = {
    "ue5m3": {"sign": 0, "exponent": 5, "mantissa": 3, "bias": 15, "nan": [0xFF]},
    "e8m0_b100": {"sign": 0, "exponent": 8, "mantissa": 0, "bias": 100, "subnormals": False, "nan": [0xFE, 0xFF]},
    "e4m3_b11": {"sign": 1, "exponent": 4, "mantissa": 3, "bias": 11, "inf": [0x7E], "nan": [0x7F]},
    "e1m4": {"sign": 1, "exponent": 1, "mantissa": 4, "bias": 0},
    "e3m0": {"sign": 1, "exponent": 3, "mantissa": 0, "bias": 3},
}
BYTES = ("e4m3", "e5m2", "e4m3_b11")


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """A sound spec with random formats, packing, rule, blocks, stored granularity, axis orders and padding."""
    scale = draw(st.sampled_from(RULES))
    element = draw(st.sampled_from([*BYTES, "e2m1", "e3m2", "e2m3", "e1m4", "e3m0"]))

    def orientation(block: dict[str, Any]) -> dict[str, Any]:
        axes = draw(st.permutations(["m", "k"]))
        data: dict[str, Any] = {"layout": " ".join(axes)}
        if draw(st.booleans()):
            data["pad"] = [draw(st.sampled_from([1, 5, 32])), draw(st.sampled_from([8, 16, 32]))]
        if draw(st.integers(0, 2)) == 0:
            data |= draw(swizzles(2, True))
        terms = []
        for axis in draw(st.permutations([axis for axis in "mk" if block[axis] != "all"])):
            divisor = draw(st.sampled_from([d for d in range(1, block[axis] + 1) if block[axis] % d == 0]))
            terms.append(axis if divisor == 1 else f"{axis}/{divisor}")
        stored: dict[str, Any] = {"layout": " ".join(terms) or "scalar"}
        if terms and draw(st.booleans()):
            stored["pad"] = [draw(st.sampled_from([1, 4, 7, 16])) for _ in terms]
        if terms and draw(st.integers(0, 3)) == 0:
            stored |= {"pad": [16] * len(terms)} | draw(swizzles(len(terms), False))
        return {"block": dict(block), "data": data, "scale": stored}

    block = {axis: draw(st.sampled_from(SIZES)) for axis in "mk"}
    other = block if draw(st.booleans()) else {axis: draw(st.sampled_from(SIZES)) for axis in "mk"}
    text: dict[str, Any] = {
        "layoutc": 1,
        "name": "made_up",
        "summary": "made up by a test",
        "shape": {"m": 8, "k": 8},
        "formats": {name: FORMATS[name] for name in {element, scale["format"]} & FORMATS.keys()},
        "element": {"format": element},
        "scale": scale,
        "orientations": {"rowwise": orientation(block), "columnwise": orientation(other)},
    }
    if element not in BYTES:
        text["element"]["pack"] = draw(st.sampled_from(["low-first", "high-first"]))
    if scale["rule"] in ("two-level", "four-over-six"):
        text["tensor"] = {"amax": "f32"}
    if not text["formats"]:
        del text["formats"]
    spec, _ = read_spec(yaml.safe_dump(text, sort_keys=False, width=200), "made_up.yaml")
    assume(spec is not None)
    assert spec is not None
    return spec


def load(spec: Spec) -> tuple[ModuleType, Layout]:
    """The generated reference of a spec and its LAYOUT, run from text, in a package of that moment."""
    files, package = compile_spec(spec, "0" * 64), ModuleType("made_up")
    package.__path__ = []
    modules = {"made_up": package}
    with mock.patch.dict(sys.modules, modules):
        for name in ("reference", "files", "layout"):
            if (text := files.get(f"{name}.py")) is not None:
                modules[name] = sys.modules[f"made_up.{name}"] = module = ModuleType(f"made_up.{name}")
                module.__package__ = "made_up"
                exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    return modules["reference"], modules["layout"].LAYOUT


def weight(seed: int, special: float | None) -> torch.Tensor:
    """Values of many magnitudes, a block of zeros, and perhaps one special value."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((M, K)) * np.exp2(rng.uniform(-6, 6, (M, K)))).astype(F32)
    x[:8, :8] = 0
    if special is not None:
        x[rng.integers(M), rng.integers(K)] = special
    return torch.from_numpy(x)


@pytest.mark.parametrize("rounding", ["up", "down", "nearest"])
def test_e8m0_scales_are_rounded_as_the_spec_says(rounding: str) -> None:
    """The generated table of thresholds is that of the rounding asked for."""
    text = (SPECS / "mxfp8.yaml").read_text(encoding="utf-8").replace("round: up", f"round: {rounding}")
    spec, found = read_spec(text, "mxfp8.yaml")
    assert spec is not None, found
    reference, _ = load(spec)
    assert thresholds(BUILTIN["e8m0"], rounding) == reference.encode_scale.keywords["thresholds"]
    ratios = np.array([1.0, 1.25, 1.5, 1.75, 3.0, 3.5], F32)
    codes = {
        "up": [127, 128, 128, 128, 129, 129],
        "down": [127, 127, 127, 127, 128, 128],
        "nearest": [127, 127, 128, 128, 128, 129],
    }
    assert reference.encode_scale(torch.from_numpy(ratios)).tolist() == codes[rounding]


def test_a_scale_format_with_infinity_decodes_by_its_table() -> None:
    """e5m2 scales that round up are read by a table, whose code 0x7C is infinity."""
    text = (SPECS / "nvfp4.yaml").read_text(encoding="utf-8")
    text = text.replace("{format: e4m3, rule: two-level}", "{format: e5m2, rule: two-level, round: up}")
    spec, found = read_spec(text, "nvfp4.yaml")
    assert spec is not None, found
    reference, _ = load(spec)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    assert same_values(reference.decode_scale(codes).numpy(), codes.view(torch.float8_e5m2).float().numpy())


NAN_SCALES = """\
layoutc: 1
name: made_up
summary: made up by a test
shape: {m: 8, k: 8}
element: {format: e4m3}
scale: {format: f32, rule: scale-first}
orientations:
  rowwise: {block: {m: 1, k: 1}, data: {layout: m k}, scale: {layout: m k}}
  columnwise: {block: {m: 2, k: 1}, data: {layout: m k}, scale: {layout: m k}}
"""


TINY_SCALES = {
    "under none": ("e8m0_b130, rule: power-of-two", "e8m0_b130: {exponent: 8, bias: 130, nan: [254, 255]}"),
    "under scales": (
        "micro, rule: shared-exponent, super: {format: e8m0, rule: shared-exponent, block: {m: 2, k: 4}}",
        "micro: {exponent: 1, bias: 1}",
    ),
    "under scales that may be 0": (
        "e8m0, rule: power-of-two, super: {format: f32, rule: scale-first, of-max: true, block: {m: 2, k: 4}}",
        None,
    ),
}


@pytest.mark.parametrize("scales", TINY_SCALES)
def test_zeros_stay_zeros_where_the_inverse_of_a_scale_overflows(scales: str) -> None:
    """The smallest scale is below 2^-127; the multiplier is then the largest fp32 number, and not infinite."""
    scale, own = TINY_SCALES[scales]
    text = NAN_SCALES.replace("f32, rule: scale-first", scale).replace("{m: 1, k: 1}", "{m: 2, k: 2}")
    text = text.replace("{m: 8, k: 8}", "{m: 8, k: 16}").replace("{m: 2, k: 1}", "{m: 2, k: 2}")
    text = text.replace("scale: {layout: m k}", "scale: {layout: m/2 k/2}")
    if own is not None:
        text += f"formats:\n  {own.replace('{', '{sign: 0, mantissa: 0, subnormals: false, ')}\n"
    spec, found = read_spec(text, "made_up.yaml")
    assert spec is not None, found
    reference, _ = load(spec)
    x = torch.zeros(8, 16)
    x[4, 4] = 1.75
    values = reference.dequantize_reference(reference.quantize_reference(x), 8, 16, "rowwise")
    assert torch.equal(values, x)


@pytest.mark.thorough
@example(read_spec(NAN_SCALES, "made_up.yaml")[0], 0, np.nan)
@given(specs(), st.integers(0, 2**16), st.sampled_from([None, None, 0.0, np.nan, np.inf, 2.0**-149, 1e30]))
@settings(max_examples=50, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
def test_a_compiled_reference_does_what_the_spec_says(spec: Spec, seed: int, special: float | None) -> None:
    layout, x = resolve(spec), weight(seed, special)
    reference, facts = load(spec)
    planes = reference.quantize_reference(x)
    if layout.tensor_amax:
        planes["amax"] = x.abs().amax().reshape(1)
    assert {name: tuple(plane.shape) for name, plane in planes.items()} == {
        p.name: p.shape(M, K) for p in layout.planes
    }
    assert {name: tuple(fact) for name, fact in facts.planes(M, K).items()} == {
        name: (tuple(plane.shape), plane.dtype) for name, plane in planes.items()
    }
    laid_out = by_reference(facts, reference, planes, (M, K), layout.orientations)
    stated = facts.buffers(M, K)
    assert list(laid_out) == list(stated)
    model = Model(layout)
    expected = model.quantize(x.numpy())
    assert set(planes) == set(expected)
    for source in layout.sources:
        for plane in planes_of(source):
            stored = array(planes[plane.name])
            same = same_values if stored.dtype == F32 else np.array_equal
            assert same(stored, expected[plane.name]), plane.name
        for orientation in (o for o, name in layout.source_of if name == source.name):
            values = model.values(expected, orientation, M, K)
            assert same_values(reference.dequantize_reference(planes, M, K, orientation).numpy(), values)
            for buffer in (b for b in layout.buffers if b.orientation == orientation):
                actual, chain = laid_out[buffer.name], buffer.chain(M, K)
                assert (tuple(actual.shape), actual.dtype) == tuple(stated[buffer.name])
                written = write(plane_values(buffer, expected).reshape(chain.start), chain)
                found = actual.contiguous().view(torch.uint8).numpy().ravel()
                if actual.dtype == torch.float32:  # no rule says which NaN a scale becomes
                    assert same_values(found.view(F32), written.view(F32)), buffer.name
                else:
                    assert np.array_equal(found, written), buffer.name


@pytest.mark.thorough
@given(specs())
@settings(max_examples=60, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
def test_is_plane_is_true_just_where_no_shape_moves_a_byte(spec: Spec) -> None:
    """Tried at shapes that fit no padding multiple, so that padding shows."""
    layout = resolve(spec)
    for buffer in layout.buffers:
        still = True
        for m, k in itertools.product((8, 24), (40, 16)):
            chain = buffer.chain(m, k)
            slots = enumerate(itertools.product(*map(range, chain.start)))
            same = all(chain.positions(index) == (divmod(slot * chain.bits, 8),) for slot, index in slots)
            still &= same and chain.nbytes == buffer.plane.nbytes(m, k)
        assert not buffer.is_plane or still, buffer.name
        if not still:
            ordered = buffer.swizzle is not None or buffer.words
            assert ordered or buffer.permutes or buffer.pads or any(times > 1 for times in buffer.repeats)

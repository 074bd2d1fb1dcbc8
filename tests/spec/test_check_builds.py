"""What `layoutc check` passes, `layoutc build` compiles: formats of 1 to 8 bits and any bias, under every rule.

Each drawn spec is refused in words, or its code is written, imported, run on a small weight, and gives the bytes and
values of the independent model.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, event, given, note, settings
from hypothesis import strategies as st
from places import ROOT

from layoutc.build import pipeline
from layoutc.conformance.material import array
from layoutc.conformance.model.codes import codes_of
from layoutc.conformance.model.weights import Model, planes_of
from layoutc.diagnostics.diagnostic import has_errors
from layoutc.layout.layout import resolve
from layoutc.plan.kernels import gap

COUNT = int(os.environ.get("LAYOUTC_RANDOM_SPECS", "8")) * 8
M, K = 16, 24
SIZES = [1, 2, 3, 4, 8, 16, 24, "all"]
ROUNDING = ("nearest", "up", "down")
F32_MAX = float(np.finfo(np.float32).max)
NUMBERS = itertools.count(1)
RULES: list[dict[str, Any]] = [
    {"rule": "amax-over-max"},
    {"rule": "amax-over-max", "power-of-two": True, "nan-scale": True, "margin": -126, "epsilon": 1.0e-30},
    {"rule": "amax-over-max", "nan-scale": True, "margin": 126, "overflow": "input-max"},
    {"rule": "amax-over-max", "nan-scale": True, "history": {"length": 3, "pick": "max"}},
    {"rule": "power-of-two"},
    {"rule": "shared-exponent"},
    {"rule": "two-level"},
    {"rule": "four-over-six"},
    {"rule": "four-over-six", "bound": 3.0e38, "squared": True},
    {"rule": "four-over-six", "bound": 2.0e-38},
    {"rule": "scale-first"},
    {"rule": "scale-first", "of-zeros": 1.0e-3, "epsilon": 1.0e-30},
    {"rule": "scale-first", "multiply": True, "of-zeros": 2.0},
    {"rule": "min-max", "zero": "int8"},
    {"rule": "min-max", "zero": "own_z"},
]


@st.composite
def floats(draw: st.DrawFn, sign: int, bits: int) -> dict[str, Any]:
    """A floating-point format; of odd biases and special codes as well."""
    exponent = draw(st.integers(1, max(1, bits - sign)))
    mantissa = max(0, bits - sign - exponent)
    codes = 2 ** (exponent + mantissa)
    middle = 2 ** (exponent - 1) - 1
    bias = draw(st.sampled_from([middle, middle, 0, 1, draw(st.integers(-126, 253))]))
    fmt: dict[str, Any] = {"sign": sign, "exponent": exponent, "mantissa": mantissa, "bias": bias}
    nan, inf = draw(st.sampled_from([(0, 0), (1, 0), (0, 1), (1, 1), (3, 1)]))
    top = [code for code in range(codes - nan - inf, codes) if code >= 0]
    fmt |= {"inf": top[:inf]} if inf else {}
    fmt |= {"nan": top[inf:]} if nan else {}
    fmt |= {"nan": [codes]} if sign and not nan and draw(st.integers(0, 3)) == 0 else {}
    return fmt if draw(st.integers(0, 3)) else fmt | {"subnormals": False}


@st.composite
def integers(draw: st.DrawFn) -> dict[str, Any]:
    bits = draw(st.integers(2, 8))
    half = 1 << (bits - 1)
    offset = draw(st.sampled_from([None, None, half, half - 1, 0, 1, 2 * half - 2, draw(st.integers(-1, 2 * half))]))
    return {
        "integer": bits,
        "fraction": draw(st.sampled_from([0, 0, 6, 8])),
        "symmetric": draw(st.booleans()),
    } | ({} if offset is None else {"offset": offset})


@st.composite
def codebooks(draw: st.DrawFn) -> dict[str, Any]:
    """Of any values and any order, most with a zero and both signs, some with a NaN."""
    number = st.floats(-64, 64, width=16)
    values: list[Any] = draw(st.lists(number, min_size=1, max_size=draw(st.sampled_from([3, 8, 16, 40])), unique=True))
    values = [*{*values, *draw(st.sampled_from([(0.0, -1.0, 2.0), (0.0, -1.0, 2.0), (0.0,), ()]))}]
    values = [0.0 if value == 0 else value for value in values]
    values = [*dict.fromkeys(values), *draw(st.sampled_from([[], [], ["nan"]]))]
    return {"values": draw(st.permutations(values))} | draw(st.sampled_from([{}, {"ties": "even"}, {"ties": "down"}]))


@st.composite
def texts(draw: st.DrawFn) -> str:
    """A spec as YAML, of which about half are sound."""
    rule = dict(draw(st.sampled_from(RULES)))
    own_element = draw(st.one_of(floats(1, draw(st.integers(2, 8))), integers(), codebooks()))
    own_scale = draw(floats(draw(st.integers(0, 1)), 8))
    element = draw(st.sampled_from(["own_e", "own_e", "own_e", "e2m1", "int4", "e4m3"]))
    scale = draw(st.sampled_from(["own_s", "e8m0", "e4m3", "f32", "f16", "bf16"]))
    formats = {"own_e": own_element, "own_s": own_scale, "own_z": {"integer": 8, "fraction": draw(st.integers(0, 8))}}
    formats["own_z"] |= draw(st.sampled_from([{}, {}, {"offset": 0}, {"offset": -1}, {"offset": 128}]))
    used = {element, scale, rule.get("zero")}

    def orientation() -> dict[str, Any]:
        block = {axis: "all" if "history" in rule else draw(st.sampled_from(SIZES)) for axis in "mk"}
        terms = [f"{axis}/{size}" for axis, size in block.items() if size != "all"]
        return {
            "block": block,
            "data": {"layout": draw(st.sampled_from(["m k", "k m"]))},
            "scale": {"layout": " ".join(terms) or "scalar"},
        }

    spec: dict[str, Any] = {
        "layoutc": 1,
        "name": "made_up",
        "summary": "made up by a test",
        "shape": {"m": 8, "k": 8},
        "formats": {name: fmt for name, fmt in formats.items() if name in used},
        "element": {"format": element, "pack": draw(st.sampled_from(["low-first", "high-first"]))},
        "scale": {
            "format": scale,
            **rule,
            **({} if scale in ("f32", "f16", "bf16") else {"round": draw(st.sampled_from(ROUNDING))}),
        },
        "orientations": {"rowwise": orientation()},
    }
    if draw(st.booleans()):
        spec["orientations"]["columnwise"] = orientation()
    if rule["rule"] in ("two-level", "four-over-six"):
        spec["tensor"] = {"amax": "f32"}
    return yaml.safe_dump(spec, sort_keys=False, width=200)


def loaded(texts: dict[str, str]) -> ModuleType:
    """The package of a spec, imported from files."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / f"checked_{next(NUMBERS)}"
        package.mkdir()
        for name, text in texts.items():
            (package / name).write_text(text, encoding="utf-8")
        sys.path.insert(0, folder)
        try:
            importlib.invalidate_caches()
            return importlib.import_module(package.name)
        finally:
            sys.path.remove(folder)


def weight(seed: int) -> torch.Tensor:
    """Values of many magnitudes, zeros, and the ends of fp32."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((M, K)) * np.exp2(rng.uniform(-140, 120, (M, 1)))).astype(np.float32)
    x[:8, :8] = 0
    places = rng.permutation(M * K)[: rng.integers(0, 7)]
    ends = np.array([np.nan, np.inf, -np.inf, F32_MAX, -F32_MAX, 1e-45, -0.0], np.float32)
    x.reshape(-1)[places] = ends[: len(places)][:: rng.choice((1, -1))]
    return torch.from_numpy(x)


def same(a: Any, b: Any) -> bool:
    """Equal bytes, but for the payloads of NaNs."""
    a, b = (array(one) if isinstance(one, torch.Tensor) else np.asarray(one) for one in (a, b))
    if a.dtype != np.float32:
        return a.shape == b.shape and bool((a == b).all())
    nan = np.isnan(a)
    return a.shape == b.shape and bool((nan == np.isnan(b)).all() and (a[~nan].view("u4") == b[~nan].view("u4")).all())


def try_spec(text: str, seed: int) -> bool:
    """Checks, compiles, imports and runs a spec; False where it is refused in words."""
    found = pipeline.check(text.encode(), "made_up.yaml")
    assert not [item for item in found if item.code == "LC907"], found
    spec, files, _ = pipeline.read(text.encode(), "made_up.yaml")
    if has_errors(found) or spec is None:
        return False
    layout, package = resolve(spec), loaded(files)
    for x in (weight(seed), torch.zeros(M, K), torch.ones(M, K)):
        amax = x.abs().amax().reshape(1)
        planes = package.quantize_reference(x)
        if layout.tensor_amax or layout.history:
            planes["amax"] = amax
        model = Model(layout)
        expected = model.quantize(x.numpy(), F32_MAX)
        for source in layout.sources:
            for plane in planes_of(source):
                assert same(planes[plane.name], expected[plane.name]), (plane.name, planes[plane.name], expected)
        if layout.history:
            continue
        for orientation in layout.orientations:
            values = package.dequantize_reference(planes, M, K, orientation)
            assert same(values, model.values(expected, orientation, M, K)), orientation
    return True


TINY = {
    "int2": {"integer": 2},
    "int2_symmetric": {"integer": 2, "symmetric": True},
    "e1m0": {"sign": 1, "exponent": 1, "mantissa": 0, "bias": 0},
    "e1m0_high": {"sign": 1, "exponent": 1, "mantissa": 0, "bias": -126},
    "e1m1": {"sign": 1, "exponent": 1, "mantissa": 1, "bias": 1},
    "e1m1_nan": {"sign": 1, "exponent": 1, "mantissa": 1, "bias": 1, "nan": [3]},
    "e2m0_inf": {"sign": 1, "exponent": 2, "mantissa": 0, "bias": 1, "inf": [3]},
    "int3": {"integer": 3},
    "int7": {"integer": 7, "fraction": 3},
    "int4_offset": {"integer": 4, "offset": 8},
    "int3_odd_offset": {"integer": 3, "offset": 3},
    "three_values": {"values": [-1, 0, 1]},
    "codebook": {"values": [0.5, 0, -2, 7, "nan", -0.1, 3], "ties": "even"},
    "e2m1_one_zero": {"sign": 1, "exponent": 2, "mantissa": 1, "bias": 1, "nan": [8]},
}
SCALES = [
    "{format: e8m0, rule: power-of-two}",
    "{format: e8m0, rule: shared-exponent, round: down}",
    "{format: f32, rule: amax-over-max, nan-scale: true}",
    "{format: e4m3, rule: two-level}",
    "{format: e4m3, rule: four-over-six}",
    "{format: f32, rule: min-max, zero: int8}",
    "{format: f16, rule: min-max, zero: int8}",
    "{format: bf16, rule: scale-first}",
]


@pytest.mark.sample(8)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", TINY)
def test_the_smallest_formats(name: str, scale: str) -> None:
    """Refused are only zero points of floats, and four-over-six of one magnitude; all else compiles and runs.

    And two levels of a format whose range is that of fp32.
    """
    fmt = TINY[name]
    level = "tensor: {amax: f32}\n" if "two-level" in scale or "four" in scale else ""
    text = f"""\
layoutc: 1
name: made_up
summary: made up by a test
shape: {{m: 8, k: 8}}
formats: {yaml.safe_dump({name: fmt}, default_flow_style=True, width=200)}
element: {{format: {name}}}
scale: {scale}
{level}orientations:
  rowwise: {{block: {{m: 1, k: 8}}, data: {{layout: m k}}, scale: {{layout: m k/8}}}}
  columnwise: {{block: {{m: 8, k: 1}}, data: {{layout: k m}}, scale: {{layout: k m/8}}}}
"""
    one_magnitude = name.startswith(("int2", "e1m0", "three"))
    refused = ("min-max" in scale and "integer" not in fmt) or ("four" in scale and one_magnitude)
    refused |= name == "e1m0_high" and "two-level" in scale  # whose product of ranges overflows fp32
    assert try_spec(text, 3) is not refused


@pytest.mark.parametrize("values", [[0.5, 0, -2, 7, "nan", -0.1, 3], ["nan", 3, 0, "nan", -1, 0, 1]], ids=str)
def test_values_after_nan_are_written(values: list[float | str]) -> None:
    """And of two of 0 the first alone, by the model as well as by the reference."""
    listed = yaml.safe_dump({"codebook": {"values": values, "ties": "even"}}, default_flow_style=True, width=200)
    text = f"""\
layoutc: 1
name: made_up
summary: made up by a test
shape: {{m: 1, k: 8}}
formats: {listed}
element: {{format: codebook}}
scale: {{format: f32, rule: scale-first}}
orientations:
  rowwise: {{block: {{m: 1, k: 8}}, data: {{layout: m k}}, scale: {{layout: m k/8}}}}
"""
    assert try_spec(text, 3)
    spec, _, _ = pipeline.read(text.encode(), "made_up.yaml")
    assert spec is not None
    codes = codes_of(resolve(spec).sources[0].quantization.element)
    numbers = {float(value): at for at, value in reversed(list(enumerate(values))) if value != "nan"}
    x = np.array(list(numbers), np.float32)
    assert codes.encode(x, "nearest").tolist() == list(numbers.values())
    assert [codes.search(float(one), "nearest") for one in x] == list(numbers.values())


def test_what_can_not_be_printed_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of `check` and of `build`, with the place in the compiler; nothing is written, and there is no traceback."""
    from click.testing import CliRunner

    from layoutc.cli.app import main
    from layoutc.emit import emit

    spec = ROOT / "specs" / "mxfp8.yaml"
    monkeypatch.setattr(emit, "recipe_text", lambda plan, sha256, has_kernels: 1 // 0)
    for command in (["check"], ["build", "--out", str(tmp_path / "out")]):
        result = CliRunner().invoke(main, [*command, str(spec)])
        assert result.exit_code == 1
        assert (
            "LC907] layoutc can't write the code of this spec: ZeroDivisionError at test_check_builds" in result.output
        )
    monkeypatch.undo()
    monkeypatch.setattr(emit, "_render", lambda template, view: "def (")
    result = CliRunner().invoke(main, ["check", str(spec)])
    assert (result.exit_code, "LC907] layoutc can't write the code of this spec: SyntaxError" in result.output) == (
        1,
        True,
    )
    assert not (tmp_path / "out").exists()


@given(texts(), st.integers(0, 2**16))
@settings(
    max_examples=COUNT,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
def test_what_check_passes_builds_and_does_what_the_spec_says(text: str, seed: int) -> None:
    note(text)
    event("passed" if try_spec(text, seed) else "refused")


def test_exponents_with_an_infinity_are_no_exponents_alone() -> None:
    """Kernels read exponents by shifting bits, which knows no infinity: such a scale has the reference alone."""
    text = """\
layoutc: 1
name: made_up
summary: made up by a test
formats:
  own_s: {sign: 0, exponent: 8, mantissa: 0, bias: 127, subnormals: false, inf: [0xfe], nan: [0xff]}
element: {format: e4m3}
scale: {format: own_s, rule: power-of-two, round: up}
orientations:
  rowwise: {block: {m: 8, k: 8}, data: {layout: m k}, scale: {layout: m/8 k/8}}
"""
    assert try_spec(text, 5)
    spec, texts, _ = pipeline.read(text.encode(), "made_up.yaml")
    assert spec is not None
    assert "kernels.py" not in texts
    assert gap(pipeline.plan_for(spec).layout) == "no function of the kernels decodes own_s"
    reference = loaded(texts).reference
    assert reference.decode_scale(torch.tensor([0xFD, 0xFE], dtype=torch.uint8)).tolist() == [2.0**126, float("inf")]
    same_but_inf = text.replace("inf: [0xfe], ", "")
    assert "kernels.py" in pipeline.read(same_but_inf.encode(), "made_up.yaml")[1]

"""Specs that nobody wrote, drawn from the language: each is refused with a diagnostic or passes the conformance suite.

The suite's model decides what is right: it reads rules and formats by definition, and shares no text with it.
LAYOUTC_RANDOM_SPECS sets how many are tried; the first that Hypothesis draws is the simplest.
"""

from __future__ import annotations

import copy
import os
import tempfile
from math import lcm
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from consistent import settle, simplify
from hypothesis import HealthCheck, Phase, event, given, note, settings
from hypothesis import strategies as st
from swizzles import swizzles

from layoutc.conformance.report import line
from layoutc.conformance.runner import run_checks
from layoutc.conformance.subject import BadSpec, compile_subject
from layoutc.diagnostics.diagnostic import Diagnostic
from layoutc.spec.checks.read import read_spec
from layoutc.spec.rules import RULES

COUNT = int(os.environ.get("LAYOUTC_RANDOM_SPECS", "2"))
SIZES = [1, 1, 2, 3, 4, 5, 8, 16, 32, 128, "all"]
ROUNDING = ("nearest", "up", "down")
torch.set_num_threads(1)

SCALES: list[dict[str, Any]] = [
    *({"format": "e8m0", "rule": "power-of-two", "round": rounding} for rounding in ROUNDING),
    *({"format": "e8m0", "rule": "shared-exponent", "round": rounding} for rounding in ROUNDING),
    {"format": "e8m0", "rule": "amax-over-max", "power-of-two": True},
    {"format": "f32", "rule": "amax-over-max"},
    {"format": "f32", "rule": "amax-over-max", "margin": 3, "overflow": "input-max"},
    {"format": "f32", "rule": "amax-over-max", "power-of-two": True, "margin": -2, "epsilon": 1.0e-3},
    {"format": "f32", "rule": "amax-over-max", "history": {"length": 4, "pick": "most-recent"}},
    {"format": "f32", "rule": "min-max", "zero": "int8"},
    *({"format": "e4m3", "rule": "two-level", "round": rounding} for rounding in ROUNDING),
    {"format": "e5m2", "rule": "two-level"},
    {"format": "ue5m3", "rule": "two-level"},
    {"format": "e4m3", "rule": "four-over-six"},
    {"format": "e4m3", "rule": "four-over-six", "bound": 448, "squared": True, "round": "up"},
    {"format": "e8m0_b130", "rule": "power-of-two", "round": "up"},
    {"format": "f32", "rule": "scale-first"},
    {"format": "f32", "rule": "scale-first", "epsilon": 1.0e-4, "multiply": True},
    {"format": "e4m3", "rule": "scale-first", "of-zeros": 0.125},
    {"format": "bf16", "rule": "scale-first", "of-zeros": 0.0078125},
    {"format": "f16", "rule": "scale-first", "multiply": True},
    {"format": "f16", "rule": "two-level"},
    {"format": "f16", "rule": "min-max", "zero": "int8"},
    {"format": "bf16", "rule": "min-max", "zero": "int8"},
    {"format": "f16", "rule": "min-max", "zero": "u8"},
    {"format": "f16", "rule": "min-max", "zero": "u4"},
    {"format": "bf16", "rule": "min-max", "zero": "u4_less_1"},
    {"format": "f32", "rule": "min-max", "zero": "f16"},
    {"format": "f16", "rule": "scale-and-bias", "zero": "f16"},
    {"format": "bf16", "rule": "scale-and-bias", "zero": "bf16"},
    {"format": "e4m3", "rule": "scale-and-bias", "zero": "i8_offset"},
    *({"format": "e8m0", "rule": "scale-first", "round": rounding} for rounding in ROUNDING),
    {"format": "ue5m3", "rule": "scale-first", "multiply": True},
]
# Scales under scales; blocks of super-blocks are drawn with those of orientations.
LEVELS: list[dict[str, Any]] = [
    {"format": "int8", "rule": "scale-first", "super": {"format": "f32", "rule": "scale-first"}},
    {"format": "e4m3", "rule": "scale-first", "multiply": True, "super": {"format": "bf16", "rule": "scale-first"}},
    {
        "format": "dynamic8",
        "rule": "scale-first",
        "unrounded": True,
        "super": {"format": "f32", "rule": "scale-first", "of-max": True, "multiply": True, "offset": "mean"},
    },
    {
        "format": "u6",
        "rule": "scale-and-minimum",
        "zero": "u6",
        "super": {"format": "f16", "rule": "scale-first", "of-max": True},
    },
    {"format": "micro", "rule": "shared-exponent", "super": {"format": "e8m0", "rule": "shared-exponent"}},
    {"format": "i4", "rule": "min-max", "zero": "int8", "super": {"format": "f16", "rule": "scale-first"}},
    {
        "format": "int8",
        "rule": "scale-and-bias",
        "zero": "bf16",
        "super": {"format": "f16", "rule": "scale-first", "offset": "mean"},
    },
    {"format": "e8m0", "rule": "power-of-two", "super": {"format": "f32", "rule": "amax-over-max", "nan-scale": True}},
]
TWO_LEVEL = {scale["rule"] for scale in SCALES if RULES[scale["rule"]].needs_tensor_amax}
OWN: dict[str, dict[str, Any]] = {
    "ue5m3": {"sign": 0, "exponent": 5, "mantissa": 3, "bias": 15, "nan": [0xFF]},
    "e8m0_b130": {"sign": 0, "exponent": 8, "mantissa": 0, "bias": 130, "subnormals": False, "nan": [0xFE, 0xFF]},
    "e4m3_b11": {"sign": 1, "exponent": 4, "mantissa": 3, "bias": 11, "inf": [0x7E], "nan": [0x7F]},
    "e1m4": {"sign": 1, "exponent": 1, "mantissa": 4, "bias": 0},
    "e3m0": {"sign": 1, "exponent": 3, "mantissa": 0, "bias": 3},
    "i4": {"integer": 4},
    "i6": {"integer": 6, "symmetric": True},
    "normal4": {"values": [-1, -0.7, -0.53, -0.4, -0.3, -0.2, -0.1, 0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1]},
    "i2_of_3": {"values": [0, 1, -1]},
    "c5": {"values": [0, 0.1, 9, "nan", -4, 3, -0.3, 1, 2, -1, -2, 5, -7, 0.6, -0.6, 1.5, 2.5], "ties": "even"},
    "c40": {"values": [0, *(sign * 1.19**step for step in range(20) for sign in (1, -1))][:40]},
    "c200": {
        "values": [0, *(sign * step / 100 for step in range(100, 0, -1) for sign in (-1, 1))][:200],
        "ties": "even",
    },
    "u6": {"integer": 6, "offset": 0},
    "micro": {"sign": 0, "exponent": 1, "mantissa": 0, "bias": 1, "subnormals": False},
    "i4_offset": {"integer": 4, "offset": 8},
    "i5_odd_offset": {"integer": 5, "offset": 13},
    "i8_offset": {"integer": 8, "offset": 128, "symmetric": True},
    "u4": {"integer": 4, "offset": 0},
    "u4_less_1": {"integer": 4, "offset": -1},
    "u8": {"integer": 8, "offset": 0},
    "e3m2_one_zero": {"sign": 1, "exponent": 3, "mantissa": 2, "bias": 4, "nan": [0x20]},
    "i8_64ths": {"integer": 8, "fraction": 6, "symmetric": True},
}
ELEMENTS = ["e4m3", "e5m2", "e2m1", "e3m2", "e2m3", "int8", "e4m3fnuz", "e5m2fnuz"]
ELEMENTS += [name for name in OWN if not name.startswith(("ue", "e8", "micro", "u4_less"))]
INTEGERS = [name for name in ELEMENTS if "integer" in OWN.get(name, {})]
BYTES = ("e4m3", "e5m2", "int8", "e4m3_b11", "i8_64ths", "e4m3fnuz", "e5m2fnuz", "u8", "i8_offset", "c200")
NARROW = {"micro", "u6", "i4", "u4", "u4_less_1"}  # scales and zero points that buffers pack
SWIZZLE = {"swizzle": "(rt a b) (ct c) -> rt ct b a c", "a": 4, "b": 32, "c": 4}


class Plain(yaml.SafeDumper):
    """Writes what stands twice twice: specs have no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        """Always."""
        return True


@st.composite
def elements(draw: st.DrawFn, integers: bool = False) -> dict[str, Any]:
    """A format, packed where it is smaller than a byte. integers: most of them, for rules that shift integers."""
    name = draw(st.sampled_from(INTEGERS if integers and draw(st.integers(0, 9)) else ELEMENTS))
    rounded = {"round": "stochastic"} if draw(st.integers(0, 4)) == 0 else {}
    packed = {} if name in BYTES else {"pack": draw(st.sampled_from(["low-first", "high-first"]))}
    return {"format": name} | packed | rounded


@st.composite
def orientations(draw: st.DrawFn, swizzled: bool, zeros: bool = False) -> dict[str, Any]:
    """A block, with random axis orders, stored granularity and padding."""
    block = {axis: draw(st.sampled_from(SIZES)) for axis in "mk"}
    data: dict[str, Any] = {"layout": " ".join(draw(st.permutations(["m", "k"])))}
    if draw(st.booleans()):
        data["pad"] = [draw(st.sampled_from([1, 5, 32])), draw(st.sampled_from([8, 16, 32]))]
    terms = []
    for axis in draw(st.permutations([axis for axis in "mk" if block[axis] != "all"])):
        divisor = draw(st.sampled_from([d for d in range(1, block[axis] + 1) if block[axis] % d == 0]))
        terms.append(axis if divisor == 1 else f"{axis}/{divisor}")
    if draw(st.integers(0, 3)) == 0:
        data |= draw(swizzles(2, True))
    scale: dict[str, Any] = {"layout": " ".join(terms) or "scalar"}
    if terms and swizzled:
        scale["pad"] = [128, 4][: len(terms)]
    elif terms and draw(st.booleans()):
        scale["pad"] = [draw(st.sampled_from([1, 4, 7, 16])) for _ in terms]
    zero: dict[str, Any] = {}
    if zeros and terms and draw(st.booleans()):
        zero = {"layout": " ".join(terms), "pad": [32] * len(terms)}
        zero |= draw(swizzles(len(terms), True)) if draw(st.booleans()) else {}
        zero = {"zero": zero}
    if terms and not swizzled and draw(st.integers(0, 4)) == 0:
        scale |= {"pad": [32] * len(terms)} | draw(swizzles(len(terms), draw(st.booleans())))
    turned: dict[str, Any] = {}
    if draw(st.integers(0, 3)) == 0:
        turned["transform"] = {"hadamard": draw(st.sampled_from([2, 4, 8, 32])), "signs": draw(st.integers(0, 3))}
    return {"block": block, "data": data, "scale": scale} | zero | turned


def levelled(draw: st.DrawFn, scale: dict[str, Any], block: dict[str, Any]) -> dict[str, Any]:
    """A scale with a super-block of a few blocks."""
    if "super" not in scale:
        return scale
    covers = {
        axis: size if size == "all" else size * draw(st.sampled_from([1, 2, 4, 8])) for axis, size in block.items()
    }
    if covers["k"] != "all" and draw(st.integers(0, 5)) == 0:
        covers["k"] = "all"
    return scale | {"super": scale["super"] | {"block": covers}}


def recorded(draw: st.DrawFn, spec: dict[str, Any], orientation: dict[str, Any]) -> None:
    """Gives the rowwise orientation records of some blocks, with the parts in any order; shapes are multiples."""
    scale, block = spec["scale"], orientation["block"]
    covers = scale.get("super", {}).get("block", block)
    if block["m"] != 1 or covers["m"] != 1 or "all" in (block["k"], covers["k"]):
        return
    size = covers["k"] * draw(st.sampled_from([1, 2, 8]))
    parts = ["scale"] + (["zero"] if "zero" in scale else []) + (["super"] if "super" in scale else [])
    parts += ["offset"] if "offset" in scale.get("super", {}) else []
    parts += ["super_zero"] if "super" in scale and scale.get("zero") not in (None, "bf16", "f16") else []
    half = size // 2
    data = "data" if size % 2 or draw(st.booleans()) else f"data 0:{half} | data {half}:{size}"
    orientation["record"] = {"size": size, "fields": draw(st.permutations([*parts, data]))}
    shape = spec.get("shape", {})
    spec["shape"] = {"m": shape.get("m", 1), "k": lcm(size * draw(st.sampled_from([1, 32])), shape.get("k", 1))}


@st.composite
def texts(draw: st.DrawFn) -> str:
    """A spec as YAML. Most are sound; of one in ten, what does not go together is left as it was drawn."""
    sound = draw(st.integers(0, 9)) > 0
    scale = draw(st.sampled_from(LEVELS if draw(st.integers(0, 3)) == 0 else SCALES))
    element = draw(elements("zero" in scale))
    swizzled = draw(st.integers(0, 4)) == 0 and not (sound and NARROW & {scale["format"], scale.get("zero")})
    rowwise = draw(orientations(swizzled, "zero" in scale))
    scale = copy.deepcopy(levelled(draw, scale, rowwise["block"]))
    spec: dict[str, Any] = {
        "layoutc": 1,
        "name": "made_up",
        "summary": "made up by a test",
        "element": element,
        "scale": scale,
        "orientations": {"rowwise": rowwise},
    }
    if "history" in scale:
        rowwise |= {"block": {"m": "all", "k": "all"}, "scale": {"layout": "scalar"}}
    if draw(st.integers(0, 3)):
        columnwise = draw(orientations(swizzled, "zero" in scale))
        if draw(st.booleans()):
            columnwise |= {key: copy.deepcopy(rowwise[key]) for key in ("block", "scale")}
            columnwise.pop("zero", None)
        elif "super" in scale:
            columnwise["quantize"] = {"scale": copy.deepcopy(levelled(draw, scale, columnwise["block"]))}
        if draw(st.integers(0, 4)) == 0:
            columnwise["quantize"] = {"element": draw(elements())}
            if draw(st.booleans()):
                columnwise["quantize"]["scale"] = copy.deepcopy(draw(st.sampled_from(SCALES)))
        spec["orientations"]["columnwise"] = columnwise
    if draw(st.integers(0, 3)):
        spec["shape"] = {axis: draw(st.sampled_from([2, 4, 8, 32, 128])) for axis in "mk"}
    if sound:
        settle(spec, OWN, NARROW, swizzled)
    if draw(st.integers(0, 3)) == 0:
        recorded(draw, spec, rowwise)
    if sound:
        spec = simplify(spec, lambda tried: findings(written(tried, swizzled)))
    return written(spec, swizzled)


def findings(text: str) -> tuple[Diagnostic, ...]:
    """What the checks have to say."""
    return tuple(read_spec(text, "made_up.yaml")[1])


def written(spec: dict[str, Any], swizzled: bool) -> str:
    """A spec as YAML, with the formats, the second level and the GEMM's order that its parts need."""
    spec = dict(spec)
    both = [spec, spec["orientations"].get("columnwise", {}).get("quantize", {})]
    used = {part[key]["format"] for part in both for key in ("element", "scale") if key in part}
    used |= {part["scale"]["super"]["format"] for part in both if "super" in part.get("scale", {})}
    used |= {part["scale"]["zero"] for part in both if "zero" in part.get("scale", {})}
    if used & OWN.keys():
        spec["formats"] = {name: OWN[name] for name in OWN if name in used}
    if any(part.get("scale", {}).get("rule") in TWO_LEVEL for part in both):
        spec["tensor"] = {"amax": "f32"}
    if swizzled:
        spec["gemm"] = {"scale": SWIZZLE}
    return yaml.dump(spec, Dumper=Plain, sort_keys=False, width=200)


@pytest.mark.thorough
@given(texts(), st.integers(0, 2**16))
@settings(
    max_examples=COUNT,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # an example takes seconds: shrinking would take minutes
    suppress_health_check=list(HealthCheck),
)
def test_a_random_spec_is_refused_or_passes_the_conformance_suite(text: str, seed: int) -> None:
    note(text)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made_up.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            subject = compile_subject(path, seed=seed)
        except BadSpec as bad:
            event("refused: " + " ".join(sorted({one.code for one in bad.diagnostics})))
            return
        try:
            outcomes = list(run_checks(subject, lambda check: not check.needs_processes))
        finally:
            subject.close()
    event("passed")
    failed = "\n".join(line(outcome) for outcome in outcomes if outcome.status == "fail")
    assert not failed, f"{failed}\n{text}"
    assert sum(outcome.status == "pass" for outcome in outcomes) >= 25

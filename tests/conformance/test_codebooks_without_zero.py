"""A codebook without a 0: zeros stay zeros where blocks of zeros get the scale 0, and any other spec is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from layoutc.conformance.model.codes import codes_of
from layoutc.conformance.registry import all_checks
from layoutc.conformance.runner import run_check
from layoutc.conformance.subject import compile_subject
from layoutc.spec.checks.read import read_spec
from layoutc.spec.formats import BUILTIN, Format
from layoutc.spec.rules import RULES

VALUES = "[-7, -4, -2.5, -1, 0.5, 2, 3, 6]"
LEVEL = "super: {format: f32, rule: scale-first, of-max: true, block: {m: 1, k: 16}}"
CHECKS = {check.name: check for check in all_checks()}


def spec_of(scale: str, values: str = VALUES, tensor: str = "") -> str:
    rule = scale.partition("rule: ")[2].split(",")[0].rstrip("}")
    tensor = "tensor: {amax: f32}" if RULES[rule].needs_tensor_amax else "{}"
    return f"""layoutc: 1
name: no_zero
summary: a codebook without a 0, of a test
formats: {{odd: {{values: {values}}}}}
shape: {{m: 8, k: 16}}
element: {{format: odd}}
scale: {scale}
{tensor if tensor != "{}" else "# one level"}
orientations:
  rowwise:
    block: {{m: 1, k: 8}}
    data: {{layout: m k}}
    scale: {{layout: m k/8}}
"""


def test_codes_beyond_the_list_are_none_that_rounding_gives() -> None:
    """They mean 0, which the list does not have."""
    assert [*codes_of(Format("odd", values=(-2.0, -1.0, 1.0))).finite] == [0, 1, 2]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "scale",
    [
        "{format: f16, rule: scale-first}",
        "{format: f32, rule: scale-first, unrounded: true}",
        "{format: bf16, rule: scale-first, multiply: true}",
        "{format: e4m3, rule: two-level}",
        "{format: e4m3, rule: two-level-divided}",
        "{format: e4m3, rule: scale-first, " + LEVEL + "}",
    ],
)
def test_zeros_stay_zeros(scale: str, tmp_path: Path) -> None:
    path = tmp_path / "no_zero.yaml"
    path.write_text(spec_of(scale), encoding="utf-8")
    subject = compile_subject(path)
    try:
        outcomes = [
            run_check(subject, CHECKS[name]) for name in ("quantize", "dequantize", "writes", "new-tensors", "experts")
        ]
    finally:
        subject.close()
    assert {outcome.status for outcome in outcomes} == {"pass"}, outcomes


@pytest.mark.parametrize(
    ("scale", "fix"),
    [
        ("{format: f32, rule: amax-over-max, nan-scale: true}", "{format: f32, rule: scale-first}"),
        ("{format: e8m0, rule: power-of-two, round: up}", "{format: f32, rule: scale-first}"),
        ("{format: e8m0, rule: shared-exponent}", "{format: f32, rule: scale-first}"),
        ("{format: f16, rule: scale-first, of-zeros: 1.0}", "{format: f16, rule: scale-first}"),
        ("{format: f32, rule: scale-first, epsilon: 1.0e-4}", "{format: f32, rule: scale-first}"),
        ("{format: e4m3, rule: two-level-multiplied}", "{format: e4m3, rule: scale-first}"),
        ("{format: e4m3, rule: two-level-divided, of-zeros: 0.125}", "{format: e4m3, rule: two-level-divided}"),
    ],
)
def test_others_are_refused_with_fixes_that_work(scale: str, fix: str) -> None:
    spec, found = read_spec(spec_of(scale), "no_zero.yaml")
    assert spec is None
    (refused,) = (one for one in found if one.code == "LC307")
    assert refused.message == "zeros would be read back as 0.5 times a scale: odd has no 0"
    assert refused.help is not None
    typed = fix if "scale: {" in refused.help else fix.removeprefix("{").partition(", ")[2].removesuffix("}")
    assert typed in refused.help or "delete `" in refused.help
    for repaired in (spec_of(fix), spec_of(scale, VALUES.replace("]", ", 0]"))):
        assert read_spec(repaired, "no_zero.yaml")[0] is not None, read_spec(repaired, "no_zero.yaml")[1]


def test_every_rule_says_what_zeros_are_scaled_by() -> None:
    """A rule that says that blocks of zeros get the scale 0 names parameters of its own; others never do."""
    said = {name: rule.zero_scale for name, rule in RULES.items() if rule.zero_scale is not None}
    assert said.keys() == {"scale-first", "two-level", "two-level-divided", "four-over-six"}
    for name, unless in said.items():
        assert set(unless) <= RULES[name].parameters.keys()
    assert {name for name, fmt in BUILTIN.items() if fmt.values and 0 not in fmt.values} == set()

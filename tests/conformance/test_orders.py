"""What specs/README.md states and no picture shows: orders, histories, codes of NaN, when there are no kernels."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from places import ROOT

from layoutc.build import pipeline
from layoutc.conformance.registry import all_checks
from layoutc.conformance.runner import run_check
from layoutc.conformance.subject import Edit, compile_subject
from layoutc.plan.kernels import gap

CHECKS = {check.name: check for check in all_checks()}
torch.set_num_threads(1)


def replaced(file: str, old: str, new: str) -> Edit:
    """A fault in a generated file."""

    def apply(package: Path) -> None:
        text = (package / file).read_text(encoding="utf-8")
        assert old in text, f"{file} has no {old}"
        (package / file).write_text(text.replace(old, new), encoding="utf-8")

    return apply


def of_zeros(ordered: str) -> Edit:
    """A fault in the order of zero points `b[n]`."""
    order = f'(lambda b, o, kind: _made[2](b, o, kind) if kind == "scale" else (lambda n: {ordered})(f"{{o}}_zero"))'
    return replaced(
        "reference.py", "swizzle, unswizzle, gemm_scale = ", f"gemm_scale = {order}\nswizzle, unswizzle, _ = _made = "
    )


ZEROS_AS_STORED, ZEROS_UNTURNED = of_zeros("b[n]"), of_zeros("swizzle(b[n])")
UNSTATED = replaced("layout.py", '"rowwise_scale", "rowwise_zero", ', '"rowwise_scale", ')


@pytest.mark.parametrize("fault", [None, ZEROS_AS_STORED, ZEROS_UNTURNED, UNSTATED])
def test_zero_points_are_swizzled_as_scales_are_and_the_suite_sees_it(fault: Edit | None) -> None:
    subject = compile_subject(ROOT / "tests" / "conformance" / "int4_zero_swizzled.yaml", edit=fault)
    try:
        outcome = run_check(subject, CHECKS["swizzle"])
        if fault is None:
            q = subject.package.quantize(torch.randn(16, 32))
            plain, flat = q.buffers(), q.buffers(swizzled=True)
            assert subject.facts.swizzled == ("rowwise_scale", "rowwise_zero", "columnwise_scale", "columnwise_zero")
            assert {name for name in flat if flat[name].shape != plain[name].shape} == set(subject.facts.swizzled)
    finally:
        subject.close()
    assert outcome.status == ("pass" if fault is None else "fail")


APART = """\
layoutc: 1
name: apart
summary: four-over-six, quantized apart for columnwise
shape: {m: 16, k: 16}
element: {format: e2m1}
scale: {format: e4m3, rule: four-over-six}
tensor: {amax: f32}
orientations:
  rowwise: {block: {m: 8, k: 16}, data: {layout: m k}, scale: {layout: m/8 k/16}}
  columnwise: {block: {m: 16, k: 8}, data: {layout: k m}, scale: {layout: k/8 m/16}}
"""
ORDERS = {
    "k first": ("nvfp4_4over6", None),
    "m first, where columnwise follows from rowwise": ("nvfp4_4over6", ('"k")', '"m")')),
    "each its own": ("apart", None),
    "k first, where columnwise is apart": ("apart", ('"m")', '"k")')),
    "m first, where rowwise is apart": ("apart", ('"k")', '"m")')),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ORDERS)
def test_errors_of_a_block_are_added_up_in_the_stated_order(name: str, tmp_path: Path) -> None:
    """In blocks that can hardly choose, another order keeps another scale; the suite's model takes the stated one."""
    recipe, fault = ORDERS[name]
    path = ROOT / "specs" / f"{recipe}.yaml"
    if recipe == "apart":
        path = tmp_path / "apart.yaml"
        path.write_text(APART, encoding="utf-8")
    subject = compile_subject(path, edit=replaced("reference.py", *fault) if fault else None)
    try:
        outcome = run_check(subject, CHECKS["quantize"])
    finally:
        subject.close()
    assert outcome.status == ("fail" if fault else "pass"), outcome
    assert not fault or outcome.details["kind"] == "near ties"


def test_what_becomes_of_a_history() -> None:
    """Of the amaxes, latest first: as specs/README.md says of `out`, of `amax`, and of both kinds of copy_."""
    from layoutc.recipes import fp8_delayed

    ones = torch.ones(8, 16)

    def held(q: torch.Tensor) -> list[float]:
        amaxes = [value for value in fp8_delayed.Tensor.planes(q)["amax"].tolist() if value]
        assert not any(fp8_delayed.Tensor.planes(q)["amax"][len(amaxes) :])
        return amaxes

    def scale(q: torch.Tensor) -> float:
        return float(fp8_delayed.Tensor.planes(q)["rowwise_scale"])

    q = fp8_delayed.quantize(ones)
    assert (held(q), scale(q)) == ([1.0], float(torch.tensor(1.0) / (448 / torch.tensor(1.0))))
    before = scale(q)
    fp8_delayed.quantize(ones * 2, out=q)
    assert (held(q), scale(q)) == ([2.0, 1.0], before), "the scale is that of the history, without the new amax"
    fp8_delayed.quantize(ones * 4, out=q, amax=torch.tensor([7.0]))
    assert held(q) == [7.0, 2.0, 1.0]
    q.copy_(ones * 8)
    assert held(q) == [8.0], "plain values: a new history"
    other = fp8_delayed.quantize(ones * 16, out=fp8_delayed.quantize(ones))
    q.copy_(other)
    assert (held(q), scale(q)) == ([16.0, 1.0], scale(other))


@pytest.mark.parametrize(
    ("name", "nan"), [("fp8_block", 0x7F), ("fp8_e5m2_current", 0x7D), ("nvfp4", 0x7), ("mxint8", 0x7F)]
)
def test_the_code_of_a_nan(name: str, nan: int) -> None:
    """The first NaN without a sign; without one, the largest positive number, under a scale that is NaN."""
    reference = importlib.import_module(f"layoutc.recipes.{name}.reference")
    codes = reference.encode(torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf")]))
    assert codes[:2].tolist() == [nan, nan]
    largest = reference.decode(reference.encode(torch.tensor([3.0e38, -3.0e38])))
    assert torch.equal(reference.decode(codes[2:]), largest)


NO_KERNELS = {
    "in 256 x 128 lanes": ({"m": 160, "k": 80}, "{format: e4m3}", "{format: e8m0, rule: power-of-two}"),
    "up to 16384 elements": ({"m": 256, "k": 128}, "{format: e4m3}", "{format: e8m0, rule: power-of-two}"),
    "which would take": ({"m": 1, "k": 131072}, "{format: e4m3}", "{format: e8m0, rule: power-of-two}"),
    "no function of the kernels decodes": ({"m": 1, "k": 8}, "{format: biased}", "{format: f32, rule: amax-over-max}"),
}


@pytest.mark.parametrize("reason", NO_KERNELS)
def test_layouts_without_kernels(reason: str) -> None:
    block, element, scale = NO_KERNELS[reason]
    layout = " ".join(f"{axis}/{size}" for axis, size in block.items() if size != "all")
    own = "  biased: {sign: 1, exponent: 4, mantissa: 3, bias: 0, nan: [0x7f]}"
    text = f"""\
layoutc: 1
name: made_up
summary: made up by a test
shape: {{k: 2}}
{f"formats:{chr(10)}{own}{chr(10)}" if "biased" in element else ""}element: {element}
scale: {scale}
orientations:
  rowwise: {{block: {{m: {block["m"]}, k: {block["k"]}}}, data: {{layout: m k}}, scale: {{layout: {layout}}}}}
"""
    spec, texts, found = pipeline.read(text.encode(), "made_up.yaml")
    assert spec is not None, found
    assert reason in str(gap(pipeline.plan_for(spec).layout))
    assert "kernels.py" not in texts

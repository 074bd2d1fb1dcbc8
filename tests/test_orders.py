"""Orders that a spec states and a picture does not show: of zero points for a GEMM, and of the errors of a block."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from layoutc.conformance.registry import all_checks
from layoutc.conformance.runner import run_check
from layoutc.conformance.subject import Edit, compile_subject

ROOT = Path(__file__).parent.parent
CHECKS = {check.name: check for check in all_checks()}
torch.set_num_threads(1)


def replaced(file: str, old: str, new: str) -> Edit:
    """A fault in a generated file."""

    def apply(package: Path) -> None:
        text = (package / file).read_text(encoding="utf-8")
        assert old in text, f"{file} has no {old}"
        (package / file).write_text(text.replace(old, new), encoding="utf-8")

    return apply


ZEROS_AS_STORED = replaced("tensor.py", 'if f"{orientation}_zero" in buffers:', "if False:")
ZEROS_UNTURNED = replaced(
    "reference.py", 'orientation == "columnwise"', 'orientation == "columnwise" and kind == "scale"'
)
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

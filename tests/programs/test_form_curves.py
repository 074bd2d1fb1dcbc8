"""The program that compares losses of forms of AdamW's state and of gradients on the wire: short runs of it."""

from __future__ import annotations

from importlib.util import find_spec

import form_curves
import pytest
import torch

from layoutc.bench.demo import Config, corpus

CONFIG = Config((), 30, dim=32, layers=1, context=32, batch=4, lr=1e-2)


@pytest.mark.thorough
def test_moments_of_8_bits_learn_as_those_in_fp32_do() -> None:
    """Twenty steps from the same weights: losses fall as those of fp32 do, within 1%, and follow from the seed."""
    torch.set_num_threads(1)
    text = corpus()[: 1 << 16]
    plain = form_curves.losses(CONFIG, form_curves.FORMS["fp32"], None, 20, 0, text)
    assert plain[-1] < 0.8 * plain[0]
    for form, bound in (("8bit", 0.01), ("8bit, bf16 masters", 0.02)):
        found = form_curves.losses(CONFIG, form_curves.FORMS[form], None, 20, 0, text)
        assert abs(form_curves.last(found) / form_curves.last(plain) - 1) < bound
        assert found != plain
    first, again = (form_curves.losses(CONFIG, form_curves.FORMS["8bit"], None, 3, 1, text) for _ in range(2))
    assert first == again


def test_a_form_beyond_its_bound_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The program's exit status, and its line; a mean of the last tenth; bases run as well."""
    asked = list[str]()

    def run(_arguments: object, _seed: int, name: str) -> list[list[float]]:
        asked.append(name)
        return [[9.0] * 9 + [1.006 if name in ("4bit", "grad_fp8", "8bit") else 1.0]]

    monkeypatch.setattr(form_curves, "started", run)
    assert form_curves.main(["--seeds", "2", "--forms", "4bit"]) == 0
    assert form_curves.main(["--seeds", "2", "--forms", "grad_fp8;grad_int4"]) == 1
    assert asked[4:] == ["fp32 wire", "fp32 wire", "grad_fp8", "grad_fp8", "grad_int4", "grad_int4"]
    told = capsys.readouterr().out
    assert "grad_fp8             1.0060  +0.60%  bound 0.5%, BEYOND  by seeds +0.60 +0.60" in told
    assert "grad_int4            1.0000  +0.00%  bound 1.5%  by seeds +0.00 +0.00" in told


@pytest.mark.thorough
def test_a_run_over_the_wire() -> None:
    """Two ranks over gloo, in processes for both runs; random bits of codes change what fp32 sums give."""
    short = ["--steps", "3", "--dim", "32", "--layers", "1"]
    plain, codes = form_curves.started(short, 0, "fp32 wire", "grad_int4")
    assert len(plain) == len(codes) == 3
    assert plain[0] == codes[0]
    assert plain[1:] != codes[1:]


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers, whose model it is")
def test_a_run_with_experts() -> None:
    """In a process for both runs: losses of codes are others, and near."""
    short = ["--steps", "2", "--dim", "64", "--layers", "1"]
    plain, codes = form_curves.started(short, 0, "experts", "experts fp8_rowwise")
    assert len(plain) == len(codes) == 2
    assert plain != codes
    assert codes == pytest.approx(plain, rel=0.05)

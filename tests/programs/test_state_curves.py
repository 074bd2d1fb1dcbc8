"""The program that compares losses of the forms of AdamW's state: a short run of it."""

from __future__ import annotations

import pytest
import state_curves
import torch

from layoutc.bench.demo import Config, corpus

CONFIG = Config((), 30, dim=32, layers=1, context=32, batch=4, lr=1e-2)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_moments_of_8_bits_learn_as_those_in_fp32_do() -> None:
    """Twenty steps from the same weights: losses fall as those of fp32 do, within 1%, and follow from the seed."""
    text = corpus()[: 1 << 16]
    plain = state_curves.losses(CONFIG, "fp32", None, 20, 0, text)
    assert plain[-1] < 0.8 * plain[0]
    for form, bound in (("8bit", 0.01), ("8bit, bf16 masters", 0.02)):
        found = state_curves.losses(CONFIG, form, None, 20, 0, text)
        assert abs(state_curves.last([found]) / state_curves.last([plain]) - 1) < bound
        assert found != plain
    first, again = (state_curves.losses(CONFIG, "8bit", None, 3, 1, text) for _ in range(2))
    assert first == again


def test_a_form_beyond_its_bound_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The program's exit status, and its line; a mean of the last tenth."""
    monkeypatch.setattr(state_curves, "losses", lambda config, form, *_: [9.0] * 9 + [1.0 if form == "fp32" else 1.006])
    assert state_curves.main(["--seeds", "2", "--forms", "4bit"]) == 0
    assert state_curves.main(["--seeds", "2", "--forms", "8bit"]) == 1
    assert "8bit                 1.0060  +0.60%, bound 0.5%, BEYOND" in capsys.readouterr().out

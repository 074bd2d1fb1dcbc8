"""Kernels in the place of references on a CPU, by Triton's interpreter."""

from __future__ import annotations

import pytest
from torch import Tensor

from layoutc.runtime.kernels import launch, plans


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the rest of a test; skips it where there is no interpreter."""
    triton = pytest.importorskip("triton", reason="needs triton, which kernels are written in")
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1")
    monkeypatch.setattr(plans, "cache", plans.Plans(2048))
    monkeypatch.setattr(launch, "usable", lambda x, dtype=None: type(x) is Tensor and x.numel() > 0)

"""The card's conversions against integer arithmetic on the card itself, which is how launch.hardware finds a level."""

from __future__ import annotations

import warnings

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton, which kernels are written in")
import triton.language as tl  # noqa: E402

from layoutc.runtime.kernels import conversion_checks, launch  # noqa: E402
from layoutc.runtime.triton import codes  # noqa: E402
from layoutc.runtime.triton.codes import cast_to_codes, to_exponents, to_small_codes  # noqa: E402
from layoutc.runtime.triton.conversions import to_e4m3, to_e5m2  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
LEVEL = launch.level_of(CAPABILITY)
CARD = torch.device("cuda", 0)


@triton.jit
def cast_to_e4m3(x):
    return to_e4m3(x, 90)


@triton.jit
def cast_to_e5m2(x):
    return to_e5m2(x, 90)


@triton.jit
def e4m3(x):
    return to_small_codes(x, 0, 3, 7, 7, 448.0, 126, 0x7F)


@triton.jit
def e5m2(x):
    return to_small_codes(x, 0, 2, 15, 7, 57344.0, 123, 0x7D)


@triton.jit
def with_nan_of_its_own(x):
    return cast_to_codes(x, tl.float8e5, 0x7F, 0x7F)


@triton.jit
def up(x):
    return to_exponents(tl.abs(x), 127, 254, 0xFF, "up")


@triton.jit
def nearest(x):
    return to_exponents(tl.abs(x), 127, 254, 0xFF, "nearest")


@triton.jit
def root_by_steps(x):
    return codes.bits_of(codes.root_inside(x))


@triton.jit
def root_of_card(x):
    return codes.bits_of(tl.sqrt_rn(x))


@triton.jit
def inverse_by_steps(x):
    return codes.bits_of(codes.inverse_inside(x))


@triton.jit
def inverse_of_card(x):
    return codes.bits_of(tl.div_rn(codes.like(x, 1.0), x))


@triton.jit
def any_root(x):
    return codes.bits_of(codes.root(x))


@triton.jit
def any_inverse(x):
    return codes.bits_of(codes.rdiv(1.0, x))


def test_roots_and_inverses_without_branches_are_rounded_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mantissa, in binades of even and of odd exponents, from 2^-100 to 2^100."""
    mantissas = torch.arange(1 << 23, dtype=torch.int32, device=CARD)
    compared = [("root", root_by_steps, root_of_card), ("inverse", inverse_by_steps, inverse_of_card)]
    for exponent in (-100, -99, -27, 0, 1, 63, 98, 99):
        values = (mantissas | ((exponent + 127) << 23)).view(torch.float32)
        monkeypatch.setattr(conversion_checks, "patterns", lambda _, values=values: values)
        assert conversion_checks.differing(CARD, compared) == []


def test_roots_and_inverses_of_all_sizes_are_rounded_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mantissa: of subnormal numbers, of the least and the largest normal ones, infinity, and NaN."""
    mantissas = torch.arange(1 << 23, dtype=torch.int32, device=CARD)
    compared = [("root", any_root, root_of_card), ("inverse", any_inverse, inverse_of_card)]
    for exponent in (-127, -126, -101, -100, 0, 1, 125, 126, 127, 128):
        values = (mantissas | ((exponent + 127) << 23)).view(torch.float32)
        monkeypatch.setattr(conversion_checks, "patterns", lambda _, values=values: values)
        assert conversion_checks.differing(CARD, compared) == []


@pytest.mark.skipif(LEVEL < 90, reason="needs compute capability 8.9")
def test_fp8_conversions_give_the_bytes_of_arithmetic() -> None:
    """Half a million values, twice: what a first launch compiles, a second finds."""
    compared = [("e4m3", cast_to_e4m3, e4m3), ("e5m2", cast_to_e5m2, e5m2)]
    assert conversion_checks.differing(CARD, compared) == []
    assert conversion_checks.differing(CARD, compared) == []


@pytest.mark.skipif(LEVEL < 90, reason="needs compute capability 8.9")
def test_a_conversion_that_differs_is_found() -> None:
    """Another NaN, another rounding, another format: by name, and only those."""
    given = [("nan", with_nan_of_its_own, e5m2), ("same", e4m3, e4m3), ("up", nearest, up), ("format", e5m2, e4m3)]
    assert conversion_checks.differing(CARD, given) == ["nan", "up", "format"]


@pytest.mark.skipif(LEVEL >= 100, reason="the card has these conversions")
def test_conversions_that_the_card_has_not_are_refused_by_its_assembler() -> None:
    """And not launched."""
    assert conversion_checks.differing(CARD, conversion_checks.COMPARISONS) == [
        "e2m1x2",
        "e2m3x2",
        "e3m2x2",
        "ue8m0x2",
    ]


def test_the_card_has_the_level_of_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning: the card's conversions are as they should be."""
    monkeypatch.setattr(launch, "_levels", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launch.hardware(CARD) == LEVEL


@pytest.mark.skipif(LEVEL < 90, reason="needs compute capability 8.9")
def test_a_capture_launches_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a card of capability 10, first asked within a capture."""
    monkeypatch.setattr(launch, "_levels", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    x = torch.ones(8, device=CARD)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        level = launch.hardware(CARD)
        x += 1
    graph.replay()
    assert level == 90
    assert x.tolist() == [2.0] * 8
    assert launch._levels == {}

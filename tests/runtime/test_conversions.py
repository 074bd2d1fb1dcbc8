"""The card's own conversions: formats have them by their numbers, and a card that gives other bytes does without.

No card is needed: a comparison takes any two Triton functions, and the interpreter runs those that are arithmetic.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from layoutc.build.pipeline import plan_for
from layoutc.emit.emit import emit
from layoutc.spec.checks.read import read_spec

triton = pytest.importorskip("triton", reason="needs triton, which kernels are written in")
import triton.language as tl  # noqa: E402
from triton.runtime.errors import PTXASError  # noqa: E402

from layoutc.runtime.kernels import conversion_checks, launch  # noqa: E402
from layoutc.runtime.triton import conversions as triton_comparisons  # noqa: E402
from layoutc.runtime.triton.codes import to_codes, to_exponents, to_small_codes  # noqa: E402
from layoutc.runtime.triton.nibbles import _merged  # noqa: E402
from layoutc.runtime.triton.tiles import pack  # noqa: E402

CPU = torch.device("cpu")
CARD = torch.device("cuda", 0)
interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")


@triton.jit
def right(x):
    """As the comparison's own, by other arithmetic."""
    return to_codes(x, 1, 1, True, 3, 7, 7, "nearest")


@triton.jit
def rounds_down(x):
    return to_codes(x, 1, 1, True, 3, 7, 7, "down")


@triton.jit
def ties_away(x):
    size = tl.abs(x)
    tie = (size == 0.25) | (size == 1.25) | (size == 2.5)  # those that go down
    return right(x) + tie.to(tl.int32)


@triton.jit
def loses_the_sign_of_zero(x):
    return tl.where(x == 0, 0, right(x))


@triton.jit
def keeps_the_sign_of_nan(x):
    return tl.where((x != x) & (x.to(tl.int32, bitcast=True) < 0), 15, right(x))


@triton.jit
def nan_is_zero(x):
    return tl.where(x != x, 0, right(x))


@triton.jit
def flushes_subnormals(x):
    return right(tl.where(tl.abs(x) < 1.0, x * 0.0, x))


@triton.jit
def swaps_nibbles(x):
    return pack(pack(right(x), 4, 2, False), 8, 4, True).to(tl.int32)


@triton.jit
def swaps_bytes(x):
    return pack(pack(right(x), 4, 2, True), 8, 4, False).to(tl.int32)


@triton.jit
def merged_kernel(even, odd, out, MANTISSA: tl.constexpr, LOW_FIRST: tl.constexpr):
    at = tl.arange(0, 64)
    tl.store(out + at, _merged(tl.load(even + at), tl.load(odd + at), MANTISSA, LOW_FIRST))


@triton.jit
def nearest_power(x):
    return to_exponents(tl.abs(x), 127, 254, 0xFF, "nearest")


@triton.jit
def flushes_small_scales(x):
    size = tl.abs(x)
    return to_exponents(tl.where(size < 1.1754943508222875e-38, 0.0, size), 127, 254, 0xFF, "up")


@triton.jit
def infinity_is_nan(x):
    codes = to_exponents(tl.abs(x), 127, 254, 0xFF, "up")
    return tl.where(tl.abs(x) == float("inf"), 0xFF, codes)


@triton.jit
def short_of_range(x):
    return to_small_codes(x, 0, 2, 3, 5, 24.0, 31, 31)


def test_patterns_are_every_bf16_value_and_what_lies_around() -> None:
    """Signs, infinities, every NaN, both zeros; each once."""
    found = conversion_checks.patterns(CPU)
    bits = found.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    assert found.shape == (1 << 19,)
    assert len(bits.unique()) == len(bits)
    assert set(((bits[bits & 0xFFFF == 0]) >> 16).tolist()) == set(range(1 << 16))
    for tie in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 26.0, 0.0625, 7.25, 2.0**-127):
        at = int(torch.tensor(tie).view(torch.int32))
        assert {at - 2, at - 1, at, at + 1, at + 2} <= set(bits.tolist())
    assert found.numel() % (conversion_checks.TILE[0] * conversion_checks.TILE[1]) == 0


@pytest.fixture
def one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all patterns: the interpreter takes its time for every program."""
    monkeypatch.setattr(conversion_checks, "TILE", (64, 8192))


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("one_tile")
def test_the_same_codes_by_other_arithmetic_do_not_differ() -> None:
    """The oracle of every comparison, against integer arithmetic for any format."""
    for name, _, expect in triton_comparisons.COMPARISONS:
        assert conversion_checks.differing(CPU, [(name, expect, expect)]) == []
    assert conversion_checks.differing(CPU, [("e2m1", right, triton_comparisons._e2m1)]) == []


@pytest.mark.sample(5)
@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("one_tile")
@pytest.mark.parametrize(
    ("wrong", "expect"),
    [
        (rounds_down, triton_comparisons._e2m1),
        (ties_away, triton_comparisons._e2m1),
        (loses_the_sign_of_zero, triton_comparisons._e2m1),
        (keeps_the_sign_of_nan, triton_comparisons._e2m1),
        (nan_is_zero, triton_comparisons._e2m1),
        (flushes_subnormals, triton_comparisons._e2m1),
        (swaps_nibbles, triton_comparisons._words),
        (swaps_bytes, triton_comparisons._words),
        (nearest_power, triton_comparisons._e8m0),
        (flushes_small_scales, triton_comparisons._e8m0),
        (infinity_is_nan, triton_comparisons._e8m0),
        (short_of_range, triton_comparisons._e3m2),
    ],
    ids=lambda function: getattr(function, "__name__", str(function)),
)
def test_a_wrong_conversion_is_found(wrong: Any, expect: Any) -> None:
    """By its format's name, once, beside those that are right."""
    given = [("good", expect, expect), ("bad", expect, expect), ("bad", wrong, expect), ("bad", wrong, expect)]
    assert conversion_checks.differing(CPU, given) == ["bad"]


def test_a_conversion_that_the_assembler_refuses_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is older than the card."""

    class Refused:
        def __getitem__(self, grid: Any) -> Any:
            raise PTXASError("Instruction 'cvt with .e2m1x2' not supported on .target 'sm_100'")

    monkeypatch.setattr(conversion_checks, "count_kernel", Refused())
    assert conversion_checks.differing(CPU, triton_comparisons.COMPARISONS) == [
        "e2m1x2",
        "e2m3x2",
        "e3m2x2",
        "ue8m0x2",
    ]


# --------------------------------------------------------------------------------------------------------------- levels
@pytest.mark.parametrize(
    ("capability", "level"),
    [((7, 5), 0), ((8, 0), 0), ((8, 6), 0), ((8, 9), 90), ((9, 0), 90), ((10, 0), 100), ((10, 3), 100), ((12, 0), 90)],
)
def test_levels_of_capabilities(capability: tuple[int, int], level: int) -> None:
    assert launch.level_of(capability) == level


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A card of compute capability 10.0 that launches nothing: what it is asked for, and what it answers."""
    state: dict[str, Any] = {"capability": (10, 0), "capturing": False, "differing": [], "asked": 0}

    def differing(device: torch.device, comparisons: Any) -> list[str]:
        assert comparisons is triton_comparisons.COMPARISONS
        state["asked"] += 1
        return list(state["differing"])

    monkeypatch.setattr(launch, "_levels", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: state["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Made-up B200")
    monkeypatch.setattr(launch, "capturing", lambda device: state["capturing"])
    monkeypatch.setattr(conversion_checks, "differing", differing)
    return state


def test_a_card_that_gives_the_right_bytes_is_asked_once(card: dict[str, Any]) -> None:
    """Each card by itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [launch.hardware(CARD) for _ in range(3)] == [100] * 3
        assert card["asked"] == 1
        assert launch.hardware(torch.device("cuda", 1)) == 100
    assert card["asked"] == 2


def test_a_card_that_gives_others_does_without_and_says_so_once(card: dict[str, Any]) -> None:
    card["differing"] = ["e2m1x2", "ue8m0x2"]
    with pytest.warns(RuntimeWarning, match="Made-up B200: the card's conversions e2m1x2, ue8m0x2 give wrong bytes"):
        assert launch.hardware(CARD) == 90
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launch.hardware(CARD) == 90
    assert card["asked"] == 1


def test_under_capture_nothing_is_asked_and_nothing_remembered(card: dict[str, Any]) -> None:
    """A capture can't wait for results."""
    card["capturing"] = True
    assert launch.hardware(CARD) == 90
    assert card["asked"] == 0
    card["capturing"] = False
    assert launch.hardware(CARD) == 100


@pytest.mark.parametrize(("capability", "level"), [((8, 0), 0), ((9, 0), 90), ((12, 0), 90)])
def test_other_cards_are_asked_nothing(card: dict[str, Any], capability: tuple[int, int], level: int) -> None:
    card["capability"] = capability
    assert launch.hardware(CARD) == level
    assert launch.hardware(CPU) == 0
    assert card["asked"] == 0


# -------------------------------------------------------------------------------------------------------------- formats
def emitted(element: str, scale: str, formats: str = "") -> str:
    """kernels.py of a recipe with these formats."""
    text = (
        f"layoutc: 1\nname: made_up\nsummary: made up\nshape: {{k: 32}}\n{formats}"
        f"element: {{format: {element}}}\nscale: {{{scale}}}\norientations:\n"
        "  rowwise:\n    block: {m: 1, k: 32}\n    data: {layout: m k}\n    scale: {layout: m k/32}\n"
    )
    spec, found = read_spec(text, "made_up.yaml")
    assert spec is not None, found
    return emit(plan_for(spec), "0" * 64)["kernels.py"]


UP = "format: e8m0, rule: power-of-two, round: up"


@pytest.mark.parametrize("name", ["e2m1", "mine"])
def test_what_is_e2m1_converts_whatever_its_name(name: str) -> None:
    formats = "formats:\n  mine: {sign: 1, exponent: 2, mantissa: 1, bias: 1}\n" if name == "mine" else ""
    text = emitted(name, UP, formats)
    assert "lt.store_fp4(" in text
    assert "CARD_CONVERTS=True" in text
    assert "lt.up_to_e8m0" in text


@pytest.mark.parametrize(
    "numbers",
    [
        "sign: 1, exponent: 2, mantissa: 1, bias: 2",
        "sign: 1, exponent: 1, mantissa: 2, bias: 1",
        "sign: 1, exponent: 2, mantissa: 1, bias: 1, nan: [0x07]",
    ],
)
def test_what_is_not_e2m1_does_not(numbers: str) -> None:
    text = emitted("mine", UP, f"formats:\n  mine: {{{numbers}}}\n")
    assert "CARD_CONVERTS=True" not in text
    assert "convert_to" not in text
    assert "to_e2m1" not in text


@pytest.mark.parametrize("rounding", ["down", "nearest"])
def test_scales_that_are_not_rounded_up_do_not(rounding: str) -> None:
    assert "up_to_e8m0" not in emitted("e4m3", f"format: e8m0, rule: power-of-two, round: {rounding}")


def test_a_scale_of_another_bias_does_not() -> None:
    formats = "formats:\n  mine: {sign: 0, exponent: 8, mantissa: 0, bias: 128, subnormals: false, nan: [0xff]}\n"
    assert "up_to_e8m0" not in emitted("e4m3", "format: mine, rule: power-of-two, round: up", formats)


@pytest.mark.parametrize("name", ["e2m3", "e3m2"])
def test_elements_of_6_bits_convert_one_at_a_time(name: str) -> None:
    assert f"return lt.convert_to_{name}(x)" in emitted(name, UP)


@interpreted
@pytest.mark.parametrize(("mantissa", "low_first"), [(0, True), (1, True), (1, False), (2, False)])
def test_bytes_that_a_card_converts_become_nibbles(mantissa: int, low_first: bool) -> None:
    """E4M3 has the sign and the upper bits of a code of four bits."""
    even, odd = (torch.randint(0, 16, (64, 4), generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    held = [((one & 8) << 4 | (one & 7) << (3 - mantissa)).to(torch.uint8).view(torch.int32) for one in (even, odd)]
    out = torch.empty(64, 1, dtype=torch.int32)
    merged_kernel[(1,)](*held, out, mantissa, low_first)
    low, high = (even, odd) if low_first else (odd, even)
    assert torch.equal(out.view(torch.uint8), (low | high << 4).to(torch.uint8))

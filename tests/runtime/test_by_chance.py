"""Elements that are rounded by random bits: the bits, the rule, where seeds come from, and who may not have them.

The oracle here is written in whole numbers of Python, from specs/README.md, and shares nothing with the runtime.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import unshipped
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_models import recipe, reference
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import layoutc
from layoutc.conformance.model.philox import philox as model_philox
from layoutc.runtime import numerics, random_bits
from layoutc.runtime.quantize.weights import requantize_many_
from layoutc.spec.formats import BUILTIN, Format, make

# Random123's known answers for philox4x32-10: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SPEC = """
layoutc: 1
name: {name}
summary: gradients that are rounded by random bits
shape: {{m: 16, k: 16}}
element: {{format: {element}, round: stochastic}}
scale: {{{scale}}}
{tensor}
orientations:
  rowwise:
    block: {{m: 1, k: 16}}
    data: {{layout: m k}}
    scale: {{layout: m k/16}}
  columnwise:
    block: {{m: 16, k: 1}}
    data: {{layout: k m}}
    scale: {{layout: k m/16}}
"""
MADE = {
    "by_chance_e2m1": ("e2m1", "format: e4m3, rule: two-level", "tensor: {amax: f32}"),
    "by_chance_e4m3": ("e4m3", "format: e8m0, rule: power-of-two, round: up", ""),
    "by_chance_int8": ("int8", "format: f32, rule: min-max, zero: int8", ""),
}


def package(name: str) -> Any:
    element, scale, tensor = MADE[name]
    unshipped.add(name, SPEC.format(name=name, element=element, scale=scale, tensor=tensor).strip() + "\n")
    return recipe(name)


# --------------------------------------------------------------------------------------------------------- the oracle
def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox 4x32-10 in Python's whole numbers, as the paper has it."""
    a, b, c, d = counter
    low, high = key
    for number in range(10):
        if number:
            low, high = (low + 0x9E3779B9) % 2**32, (high + 0xBB67AE85) % 2**32
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (second // 2**32) ^ b ^ low, second % 2**32, (first // 2**32) ^ d ^ high, first % 2**32
    return a, b, c, d


def bits_of(seed: int, i: int, j: int, stream: int) -> int:
    """The random bits of element (i, j)."""
    return philox((j // 4, i, stream, 0), (seed % 2**32, seed // 2**32 % 2**32))[j % 4]


def code_of(fmt: Format, x: float, bits: int) -> int:
    """The code of a finite value by the rule of specs/README.md."""
    negative = str(x).startswith("-")
    sign = 1 << (fmt.bits - 1)
    if fmt.integer:
        most = (
            -fmt.lowest
            if negative
            else 2**fmt.bits - 1 - fmt.offset
            if fmt.offset is not None
            else 2 ** (fmt.bits - 1) - 1
        )
        values = [Fraction(step, 2**fmt.fraction) for step in range(most + 1)]
    else:
        values = [Fraction(magnitude) for magnitude in fmt.magnitudes]
    size = min(Fraction(abs(x)), values[-1])
    at = next((n for n, (low, high) in enumerate(pairwise(values)) if low <= size < high), len(values) - 1)
    if at + 1 < len(values):
        share = (size - values[at]) * 2**32 // (values[at + 1] - values[at])
        at += bits + share >= 2**32
    if fmt.integer:
        return ((-at if negative else at) + (fmt.offset or 0)) % 2**fmt.bits
    return at | (sign if negative else 0)


# ------------------------------------------------------------------------------------------------------------- the bits
@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    """The runtime's, the conformance suite's and this file's."""
    words = random_bits.counted_words([torch.tensor(word) for word in counter], *(torch.tensor(word) for word in key))
    assert tuple(int(word) for word in words) == expected
    assert tuple(int(word) for word in model_philox(tuple(map(np.asarray, counter)), key)) == expected
    assert philox(counter, key) == expected


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
@pytest.mark.parametrize("stream", [0, 1])
def test_bits_follow_from_seed_row_column_and_stream(seed: int, stream: int) -> None:
    m, k = 5, 11
    found = random_bits.random_bits(torch.tensor([seed]), m, k, stream)
    assert found.tolist() == [[bits_of(seed, i, j, stream) for j in range(k)] for i in range(m)]


def test_bits_are_those_of_tritons_generator() -> None:
    """Row 0 of stream 0 is tl.randint4x; the tile functions give the same, also for tiles that begin inside of four."""
    triton = pytest.importorskip("triton", reason="needs triton, which kernels are written in")
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1")
    from kernels_of_bits import bits_kernel, randint_kernel

    seed = torch.tensor([0x0123456789ABCDEF])
    whole = random_bits.random_bits(seed, 40, 300, 1)
    four = torch.empty(4, 16, dtype=torch.int64)
    randint_kernel[(1,)](seed, four)
    assert torch.equal(four.t().reshape(1, 64), random_bits.random_bits(seed, 1, 64, 0))
    for row, column, tile, cover in [
        (0, 0, (8, 32), 0),
        (16, 256, (8, 32), 0),
        (4, 30, (4, 16), 10),
        (3, 7, (2, 2), 0),
    ]:
        out = torch.empty(tile, dtype=torch.int64)
        bits_kernel[(1,)](seed, out, row, column, *tile, cover, 1)
        assert torch.equal(
            out, random_bits.random_bits(seed, 64, 512, 1)[row : row + tile[0], column : column + tile[1]]
        )
    assert int(whole.max()) < 2**32
    assert int(whole.min()) >= 0


# ------------------------------------------------------------------------------------------------------------- the rule
OWN = {
    "e1m4": {"sign": 1, "exponent": 1, "mantissa": 4, "bias": 0},
    "e3m0": {"sign": 1, "exponent": 3, "mantissa": 0, "bias": 3},
    "e4m3_b140": {"sign": 1, "exponent": 4, "mantissa": 3, "bias": 140, "nan": [0x7F]},
    "i6": {"integer": 6, "symmetric": True},
    "i8_64ths": {"integer": 8, "fraction": 6},
}
FORMATS = {name: BUILTIN[name] for name in ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "int8", "int4")}
FORMATS |= {name: make(name, entry) for name, entry in OWN.items()}


def encoded(fmt: Format, x: Tensor, bits: Tensor) -> Tensor:
    """By the runtime, as generated references call it."""
    nan = fmt.nan_code
    if fmt.integer:
        return numerics.to_integer_codes_by_chance(x, bits, fmt.integer, fmt.lowest, fmt.fraction, nan)
    return numerics.to_codes_by_chance(x, bits, fmt.magnitudes, fmt.bits - 1, nan)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", FORMATS)
@given(st.data())
@settings(max_examples=15, deadline=None)
def test_codes_are_those_of_the_rule(name: str, data: st.DataObject) -> None:
    """At and between codes, beside them, past the largest, subnormal; with the bits for which a code just changes."""
    fmt = FORMATS[name]
    magnitude = st.sampled_from(fmt.magnitudes[:200])
    near = st.builds(lambda a, b, part: a + (b - a) * part, magnitude, magnitude, st.sampled_from([0.25, 0.5, 0.9]))
    any_value = st.floats(width=32, allow_nan=False, allow_infinity=False)
    x = [float(np.float32(value)) for value in data.draw(st.lists(st.one_of(magnitude, near, any_value), min_size=1))]
    x += [-value for value in x]
    bits = [data.draw(st.integers(0, 2**32 - 1)) for _ in x]
    expected = [code_of(fmt, value, word) for value, word in zip(x, bits, strict=True)]
    assert encoded(fmt, torch.tensor(x), torch.tensor(bits)).tolist() == expected


@pytest.mark.parametrize("name", FORMATS)
def test_exact_values_never_change_and_others_saturate(name: str) -> None:
    fmt = FORMATS[name]
    codes = torch.arange(2**fmt.bits, dtype=torch.uint8)
    kept = [code for code in codes.tolist() if abs(fmt.value(code)) <= fmt.max or (fmt.integer and not fmt.symmetric)]
    kept = [code for code in kept if not (fmt.integer and fmt.symmetric and fmt.value(code) < -fmt.max)]
    values = torch.tensor([fmt.value(code) for code in kept])
    for word in (0, 2**31, 2**32 - 1):
        assert encoded(fmt, values, torch.full(values.shape, word)).tolist() == kept
        past = torch.tensor([fmt.max * 1.5, float("inf"), -float("inf"), float("nan")])
        top = [code_of(fmt, float(np.finfo(np.float32).max), 0), code_of(fmt, -float(np.finfo(np.float32).max), 0)]
        found = encoded(fmt, past, torch.full((4,), word)).tolist()
        assert found == [top[0], top[0], top[1], fmt.nan_code]


def test_as_many_bits_round_away_as_the_distance_says() -> None:
    """Of 2^32 words of bits, 2^32 times the share: one less rounds towards zero."""
    fmt = FORMATS["e2m1"]
    for x, share in ((2.25, 2**30), (5.999999, int((Fraction(float(np.float32(5.999999))) - 4) * 2**31)), (1e-9, 8)):
        value = torch.tensor([x, x, -x, -x])
        bits = torch.tensor([2**32 - share, 2**32 - share - 1] * 2)
        low = code_of(fmt, float(np.float32(x)), 0)
        assert encoded(fmt, value, bits).tolist() == [low + 1, low, (low + 1) | 8, low | 8]


OFFSETS = {"u4": {"integer": 4, "offset": 0}, "i8_offset": {"integer": 8, "offset": 131}}


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", [*FORMATS, *OFFSETS])
def test_tiles_of_kernels_have_the_codes_of_the_rule(name: str) -> None:
    """Each Triton function, by the interpreter: every code's value and those between, both signs, and NaN."""
    triton = pytest.importorskip("triton", reason="needs triton, which kernels are written in")
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1")
    from kernels_of_bits import codes_kernel

    from layoutc.runtime.triton.codes import TWOS_COMPLEMENT

    fmt = FORMATS[name] if name in FORMATS else make(name, OFFSETS[name])
    count, generator = 1024, np.random.default_rng(7)
    tops = np.array(fmt.magnitudes, dtype=np.float32)
    low, high = tops[:-1], tops[1:]
    size = np.concatenate([tops, low + (high - low) * np.float32(0.3), [tops[-1] * 1.5, tops[1] * 2.0**-31, np.inf]])
    x = torch.from_numpy(np.resize(np.concatenate([size, -size, [np.nan]]), count).astype(np.float32))
    bits = torch.from_numpy(generator.integers(0, 2**32, count))
    out = torch.empty(count, dtype=torch.int32)
    if fmt.integer:
        offset = TWOS_COMPLEMENT.value if fmt.offset is None else fmt.offset
        arguments = (fmt.integer, fmt.lowest, fmt.fraction, fmt.nan_code, offset)
    else:
        arguments = (fmt.mantissa, fmt.bias, fmt.bits - 1 if fmt.sign else -1, fmt.last, fmt.nan_code)
    codes_kernel[(1,)](x, bits, out, count, arguments, bool(fmt.integer))
    finite = float(np.finfo(np.float32).max)
    words = zip(x.clamp(-finite, finite).tolist(), bits.tolist(), strict=True)
    assert out.tolist() == [fmt.nan_code if one != one else code_of(fmt, one, word) for one, word in words]


# ------------------------------------------------------------------------------------------------------- whole matrices
@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("seed", [3, -5])
def test_planes_are_those_of_the_oracle(name: str, seed: int) -> None:
    """Codes of both orientations, whose bits differ; scales are those of the recipe that rounds to nearest."""
    made = package(name)
    m, k = 16, 32
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(1)) * 3
    planes = made.quantize(x, seed=seed).planes()
    fmt, of = FORMATS[MADE[name][0]], reference(name)
    for stream, orientation in enumerate(("rowwise", "columnwise")):
        blocks = numerics.to_blocks(x, *((1, 16), (16, 1))[stream])
        measured = numerics.block_range(blocks) if fmt.integer else (numerics.block_amax(blocks),)
        extra = (planes["amax"],) if "amax" in planes else ()
        scale, *zero, multiplier = of.scales(*measured, *extra)
        scaled = blocks * multiplier[:, None, :, None]
        if zero:
            scaled = scaled + of.decode_zero(zero[0])[:, None, :, None]
        values = numerics.from_blocks(scaled, m, k).tolist()
        expected = [[code_of(fmt, values[i][j], bits_of(seed, i, j, stream)) for j in range(k)] for i in range(m)]
        codes = planes[f"{orientation}_data"]
        codes = numerics.unpack(codes, fmt.bits, low_first=True) if fmt.bits < 8 else codes
        assert codes.tolist() == expected
        assert torch.equal(planes[f"{orientation}_scale"], scale)


def test_the_mean_of_many_is_the_value() -> None:
    """To nearest, values between codes are off by as much in every step; by random bits, the mean is not."""
    made, x = package("by_chance_e2m1"), torch.randn(16, 64, generator=torch.Generator().manual_seed(2))
    values = torch.stack([made.quantize(x, seed=seed).dequantize() for seed in range(200)])
    low, high = values.amin(0), values.amax(0)
    kept = x.clamp(low, high)  # a block's largest element may be past the largest code times the block's scale
    assert ((kept - x).abs() <= x.abs().amax() / 16).all()
    assert ((values.mean(0) - kept).abs() < 5 * (high - low) / (2 * 200**0.5) + 1e-6).all()


# ---------------------------------------------------------------------------------------------------------------- seeds
def test_seeds_are_numbers_or_tensors_or_torchs() -> None:
    made, x = package("by_chance_e2m1"), torch.randn(32, 32)
    asked = made.quantize_buffers(x, seed=5)
    for name, buffer in made.quantize(x, seed=torch.tensor([[5]])).buffers().items():
        assert torch.equal(buffer, asked[name])
    torch.manual_seed(11)
    first, second = made.quantize(x), made.quantize(x)
    assert not torch.equal(first, second)
    torch.manual_seed(11)
    assert torch.equal(made.quantize(x), first)
    torch.manual_seed(11)
    drawn = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64)
    assert torch.equal(made.quantize(x, seed=drawn), first)
    out = made.quantize(x, seed=5, out=made.quantize(torch.zeros(32, 32)))
    assert torch.equal(out, made.quantize(x, seed=5))


@pytest.mark.parametrize(
    ("seed", "error", "words"),
    [
        (2**63, ValueError, "64 bits with a sign"),
        (torch.ones(1), ValueError, "an int64 tensor of one element, not torch.float32"),
        (torch.ones(2, dtype=torch.int64), ValueError, r"of one element, not torch.int64 of shape \(2,\)"),
        (1.0, TypeError, "not float"),
        (True, TypeError, "not bool"),
    ],
)
def test_what_is_no_seed_is_refused(seed: Any, error: type[Exception], words: str) -> None:
    made = package("by_chance_e2m1")
    for quantize in (made.quantize, made.quantize_buffers):
        with pytest.raises(error, match=words):
            quantize(torch.ones(16, 16), seed=seed)


def test_a_recipe_that_rounds_to_nearest_takes_no_seed() -> None:
    nearest = recipe("nvfp4_1d")
    for quantize in (nearest.quantize, nearest.quantize_buffers):
        with pytest.raises(ValueError, match="nvfp4_1d takes no seed: it rounds elements to nearest"):
            quantize(torch.ones(16, 16), seed=1)


def test_recomputed_activations_are_rounded_as_before() -> None:
    """Activation checkpointing restores torch's generator, from which seeds are drawn."""
    made = package("by_chance_e2m1")
    seen: list[Tensor] = []

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            seen.append(made.quantize(x).dequantize())
            return seen[-1].clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    x = torch.randn(16, 16, requires_grad=True)
    out: Any = checkpoint(lambda x: Rounded.apply(x).sin(), x, use_reentrant=False)
    torch.randn(3)
    out.sum().backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])


@pytest.mark.thorough
def test_compiled_code_gives_the_bytes_of_eager_code() -> None:
    """With a seed, and with torch's: the operator that draws is the same."""
    made = package("by_chance_e2m1")

    def given_seed(x: Tensor, seed: Tensor) -> Tensor:
        return made.quantize_buffers(x, seed=seed)["rowwise_data"]

    def drawn(x: Tensor) -> tuple[Tensor, Tensor]:
        return made.quantize_buffers(x)["rowwise_data"], made.quantize_buffers(x)["rowwise_data"]

    x, seed = torch.randn(32, 64), torch.tensor([9])
    compiled = torch.compile(given_seed, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, seed), given_seed(x, seed))
    assert torch.equal(compiled(x, seed + 1), given_seed(x, seed + 1))
    twice = torch.compile(drawn, fullgraph=True, backend="aot_eager")
    torch.manual_seed(4)
    expected = drawn(x)
    torch.manual_seed(4)
    found = twice(x)
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(*found)


# -------------------------------------------------------------------------------------------------------------- weights
REFUSED = "is for activations and gradients, not for weights: it rounds elements by random bits"


def test_weights_can_not_have_it() -> None:
    """Refused at once: before anything is converted, quantized or stepped."""
    made = package("by_chance_e2m1")
    model = nn.Linear(32, 32)
    weight = model.weight
    with pytest.raises(ValueError, match=REFUSED):
        layoutc.quantize_(model, made)
    with pytest.raises(ValueError, match=REFUSED):
        layoutc.cast_on_gather_(model, made)
    with pytest.raises(ValueError, match=REFUSED), layoutc.quantized_init(made):
        pytest.fail("the module would have been built in vain")
    with pytest.raises(ValueError, match=REFUSED):
        made.CastTensor(torch.ones(32, 32))
    assert model.weight is weight
    quantized = nn.Parameter(made.quantize(torch.ones(32, 32)))
    with pytest.raises(ValueError, match=REFUSED):
        layoutc.MasterWeights(torch.optim.SGD, [quantized], lr=1.0)
    with pytest.raises(ValueError, match=REFUSED):
        requantize_many_([(quantized.data, torch.ones(32, 32))], [torch.ones(1)])

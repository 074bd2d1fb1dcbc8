"""Formats that people exchange, in the same bytes: recipes of tests/unshipped beside the packages that define them.

Where a package is not installed, or does not run without a card, its published definition stands here in numpy.
"""

from __future__ import annotations

import bisect
import importlib
import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
import unshipped
from kernel_compiler import EVERY, FUSED, SOME, compiled, some
from numpy_models import F32, Array, recipe, reference
from places import EXCHANGED
from test_kernels import compare

from layoutc.conformance.material import array

# One of each construct that kernels have code for: codebooks short and long, NaN as -0, zero points, orders of codes.
COMPILED = (
    unshipped.exchanged()
    if EVERY
    else ["fp8_divided128", "fp8_fnuz", "hqq", "nf4_frozen", "posit8", "q4_1", "super_rows", "tinygemm"]
)
SHAPES = [(128, 128), (256, 384), (200, 144)]


def weights(m: int, k: int, seed: int) -> Array:
    """Weights as models have them, of many magnitudes, with a block of zeros and an outlier."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((m, k)) * np.exp2(rng.uniform(-8, 0, (m, 1)))).astype(F32)
    x[: m // 2, :128] *= 0.02
    x[m - 3, k - 5] = 30
    return x


def planes(name: str, x: Array) -> dict[str, Array]:
    """What a recipe of tests/unshipped makes of values."""
    unshipped.add_if_known(name)
    made = reference(name).quantize_reference(torch.from_numpy(x))
    return {plane: array(value) for plane, value in made.items()}


@pytest.mark.parametrize("shape", SHAPES)
def test_deepseek_v3(shape: tuple[int, int]) -> None:
    """weight_scale_inv of its inference code: s = amax / 448 of 128 x 128, y = x / s, and y * s back."""
    m, k = shape
    x = weights(m, k, 1)
    made = planes("fp8_divided128", x)
    for i in range(0, m, 128):
        for j in range(0, k, 128):
            block = x[i : i + 128, j : j + 128]
            scale = np.abs(block).max() / F32(448)
            codes = (block / scale).astype(ml_dtypes.float8_e4m3fn)
            assert made["rowwise_scale"][i // 128, j // 128] == scale
            assert np.array_equal(made["rowwise_data"][i : i + 128, j : j + 128], codes.view(np.uint8))


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_per_channel_of_compressed_tensors(shape: tuple[int, int]) -> None:
    """Dynamic or static, a scale for each row; the scale of a row of zeros is fp32's epsilon."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    x = weights(*shape, 2)
    x[5] = 0
    made = planes("fp8_divided_rows", x)
    values = torch.from_numpy(x)
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="channel")
    scale, zero = calculate_qparams(values.amin(1, keepdim=True), values.amax(1, keepdim=True), args)
    codes = quantize(values, scale, zero, args, dtype=torch.float8_e4m3fn)
    assert np.array_equal(made["rowwise_scale"].view(np.uint32), scale.numpy().view(np.uint32))
    assert np.array_equal(made["rowwise_data"], codes.view(torch.uint8).numpy())


@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_per_channel_under_bf16_scales_of_compressed_tensors(shape: tuple[int, int]) -> None:
    """Of fp32 weights: of bf16 ones it also rounds the quotients to bf16."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    x = weights(*shape, 3)
    x[5] = 0
    made = planes("fp8_channel_bf16", x)
    values = torch.from_numpy(x)
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="channel", scale_dtype=torch.bfloat16)
    scale, zero = calculate_qparams(values.amin(1, keepdim=True), values.amax(1, keepdim=True), args)
    codes = quantize(values, scale.float(), zero, args, dtype=torch.float8_e4m3fn)
    assert np.array_equal(made["rowwise_scale"], array(scale.to(torch.bfloat16)))
    assert np.array_equal(made["rowwise_data"], codes.view(torch.uint8).numpy())


@pytest.mark.parametrize("shape", SHAPES)
def test_integers_under_f16_scales(shape: tuple[int, int]) -> None:
    """By numpy's own binary16, whose subnormals are exact."""
    m, k = shape
    x = weights(m, k, 4)
    x[:32, :64] *= 1e-4  # scales that are subnormal
    made = planes("q8_f16", x)
    for i in range(0, m, 32):
        for j in range(0, k, 32):
            block = x[i : i + 32, j : j + 32]
            scale = (np.abs(block).max() / F32(127)).astype(np.float16)
            inverse = F32(1) if scale == 0 else F32(1) / scale.astype(F32)
            codes = np.clip(np.rint(block * inverse), -127, 127).astype(np.int8)
            assert made["rowwise_scale"][i // 32, j // 32] == scale.view(np.uint16)
            assert np.array_equal(made["rowwise_data"][i : i + 32, j : j + 32], codes.view(np.uint8))


@pytest.mark.parametrize("shape", [(32, 64), (96, 320)])
def test_pack_quantized_of_compressed_tensors(shape: tuple[int, int]) -> None:
    """Kimi-K2's: words of 32 bits of codes + 8, lowest first; bf16 scales of groups of 32, amax / 7.5."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    from compressed_tensors.compressors import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    (m, k), args = shape, QuantizationArgs(num_bits=4, symmetric=True, group_size=32, scale_dtype=torch.bfloat16)
    x = weights(m, k, 5)
    x[3, :32] = 0
    made = planes("int4_offset_group32", x)
    values = torch.from_numpy(x)
    groups = values.view(m, k // 32, 32)
    scale, zero = calculate_qparams(groups.amin(2), groups.amax(2), args)
    codes = quantize(values, scale.float(), zero, args, dtype=torch.int8)
    assert np.array_equal(made["rowwise_scale"], array(scale.to(torch.bfloat16)))
    assert np.array_equal(made["rowwise_data"], pack_to_int32(codes, 4).numpy().view(np.uint8))


@pytest.mark.parametrize("shape", SHAPES)
def test_floats_with_one_zero(shape: tuple[int, int]) -> None:
    """By ml_dtypes: -0 and what rounds to it become 0, and 0x80 is NaN."""
    m, k = shape
    x = weights(m, k, 6)
    x[0, :3] = -0.0, -1e-30, np.nan
    made = planes("fp8_fnuz", x)
    for i in range(0, m, 128):
        for j in range(0, k, 128):
            block = x[i : i + 128, j : j + 128]
            scale = np.abs(block).max() / F32(240)
            codes = (block / scale).astype(ml_dtypes.float8_e4m3fnuz)
            assert np.array_equal(made["rowwise_scale"][i // 128, j // 128], scale, equal_nan=True)
            assert np.array_equal(made["rowwise_data"][i : i + 128, j : j + 128], codes.view(np.uint8))


@pytest.mark.parametrize("shape", [(64, 64), (128, 320)])
def test_nf4_of_bitsandbytes(shape: tuple[int, int]) -> None:
    """Without double quantization: blocks of 64 elements of a row, whose rows are whole blocks."""
    functional = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    x = weights(*shape, 7)
    made = planes("nf4_plain", x)
    packed, state = functional.quantize_4bit(torch.from_numpy(x), blocksize=64, quant_type="nf4")
    assert np.array_equal(made["rowwise_data"].ravel(), packed.numpy().ravel())
    assert np.array_equal(made["rowwise_scale"].ravel(), state.absmax.numpy())
    values = reference("nf4_plain").dequantize_reference({k: torch.from_numpy(v) for k, v in made.items()}, *shape)
    assert torch.equal(values, functional.dequantize_4bit(packed, state))


def posit(code: int) -> Fraction | None:
    """The value of an 8-bit posit with two exponent bits, by the standard of 2022: regime, exponent, fraction."""
    if code in (0, 0x80):
        return Fraction(0) if code == 0 else None
    negative, body = code >= 0x80, format(-code & 0x7F if code >= 0x80 else code, "07b")
    run = len(body) - len(body.lstrip(body[0]))
    regime = run - 1 if body[0] == "1" else -run
    rest = body[run + 1 :]
    exponent = int((rest[:2] + "00")[:2], 2)
    size = (1 + Fraction(int(rest[2:] or "0", 2), 1 << len(rest[2:]))) * Fraction(2) ** (4 * regime + exponent)
    return -size if negative else size


def test_posits_by_their_definition() -> None:
    """Values of all codes, and the nearest posit of values between them, by fractions; ties to the even code."""
    unshipped.add_if_known("posit8")
    values = [posit(code) for code in range(256)]
    decoded = reference("posit8").decode(torch.arange(256, dtype=torch.uint8)).tolist()
    assert all(math.isnan(d) if v is None else Fraction(d) == v for v, d in zip(values, decoded, strict=True))
    ordered = sorted((v, code) for code, v in enumerate(values) if v is not None)
    middles = [float((low + high) / 2) for (low, _), (high, _) in itertools.pairwise(ordered)]
    rng = np.random.default_rng(8)
    inputs = np.array([*middles, *np.nextafter(np.array(middles, F32), F32(9)), *rng.standard_normal(300) * 9], F32)
    codes = reference("posit8").encode(torch.from_numpy(inputs)).tolist()
    for x, code in zip(inputs.tolist(), codes, strict=True):
        exact = Fraction(x)
        above = bisect.bisect_left(ordered, (exact, 0))
        neighbours = ordered[max(above - 1, 0) : above + 1]
        assert code == min(neighbours, key=lambda pair: (abs(pair[0] - exact), pair[1] % 2))[1], x


# -------------------------------------------------------------------------------------------------------------- kernels
@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", unshipped.exchanged())
def test_kernels_equal_the_reference(name: str) -> None:
    """Of less than a block, of blocks that the matrix cuts off, and of whole tiles; also what is not finite."""
    pytest.importorskip("triton", reason="needs triton, which kernels are written in")
    unshipped.add_if_known(name)
    layout = recipe(name).LAYOUT
    for seed, (m, k) in enumerate([(64, 192), (200, 320), (8, 2048)]):
        m, k = (-(-size // multiple) * multiple for size, multiple in ((m, layout.multiple_m), (k, layout.multiple_k)))
        x = weights(m, k, seed)
        if seed == 1:
            x[1, 1], x[2, 40], x[3, 7], x[:, 9], x[8:12] = np.nan, np.inf, -1e-42, -0.0, 0
        compare(name, torch.from_numpy(x).to((torch.float32, torch.bfloat16)[seed % 2]), layout.orientations)
        compare(name, torch.from_numpy(x), layout.orientations[-1:])


LONG = """layoutc: 1
name: {name}
summary: a codebook of {count} values in no order
formats:
  book: {{values: {values}}}
shape: {{m: 8, k: 8}}
element: {{format: book}}
scale: {{format: f32, rule: scale-first, epsilon: 0.0001}}
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


@pytest.mark.sample(2)
@pytest.mark.parametrize("count", [16, 17, 40, 200, 256])
def test_long_codebooks_have_kernels(count: int) -> None:
    """Codes of 5, 6 and 8 bits, packed and not, of two orientations, whose values stand in no order."""
    pytest.importorskip("triton", reason="needs triton, which kernels are written in")
    values = (np.random.default_rng(count).permutation(count) - count // 3) / 8
    name = f"book_of_{count}"
    unshipped.add(name, LONG.format(name=name, count=count, values=values.tolist()))
    ordered = np.sort(values)
    steps = np.sort(np.concatenate([(ordered[1:] + ordered[:-1]) / 2, ordered, ordered + 1 / 64, [-99, 99]]))
    nearest = [min(range(count), key=lambda code: (abs(values[code] - x), values[code])) for x in steps]
    assert reference(name).encode(torch.from_numpy(steps.astype(F32))).tolist() == nearest
    for seed, (m, k) in enumerate([(64, 192), (200, 328)]):
        x = weights(m, k, seed)
        x[1, 1], x[2, 40], x[3, 7], x[:, 9], x[8:12] = np.nan, np.inf, -1e-42, -0.0, 0
        compare(name, torch.from_numpy(x), ("rowwise", "columnwise"))


# Instructions that spill registers: a division of fp32 holds more of them than a product.
SPILLS = {
    ("fp8_divided128", "quantize_buffers all bf16"): 2,
    ("fp8_fnuz", "quantize_buffers all bf16"): 4,
    ("q4_1", "quantize rowwise+columnwise bf16"): 2,  # with Triton 3.6, none with 3.7
}
# Instructions an element that a codebook of 256 values may take: up to 84 with Triton 3.7, 87.2 with 3.8.
LONG_BUDGETS = {("posit8", "quantize all bf16"): 88, ("posit8", "dequantize rowwise bf16"): 8}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 100] if EVERY else [90])
def test_kernels_compile(capability: int) -> None:
    """For Hopper, without a card; for Blackwell as well with LAYOUTC_ALL_KERNELS=1."""
    pytest.importorskip("triton", reason="needs triton, which kernels are written in")
    unshipped.add_all(EXCHANGED)

    def patterns(name: str) -> tuple[str, ...]:
        kernels = importlib.import_module(f"layoutc.recipes.{name}.kernels").KERNELS
        return FUSED if kernels.buffer_sizes is not None else SOME

    names = [one for name in COMPILED for one in some(name, patterns(name))]
    found = compiled(capability, *names, count=[*LONG_BUDGETS])
    taken = {(one["recipe"], one["kernel"]): one.get("per_element") for one in found}
    assert {name: taken[name] for name, most in LONG_BUDGETS.items() if taken[name] > most} == {}
    assert {one["recipe"] for one in found} == set(COMPILED)
    spills = {(one["recipe"], one["kernel"]): one["spills"] for one in found if one["stack"]}
    assert {name: count for name, count in spills.items() if count > SPILLS.get(name, 0)} == {}

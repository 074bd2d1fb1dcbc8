"""torchao as a second opinion, on the inputs for which its arithmetic and layoutc's are provably the same.

torchao divides where layoutc multiplies by an fp32 reciprocal, and takes log2 where layoutc reads bits, so last bits
may differ. Each test says on which inputs they can't, and why.
"""

from __future__ import annotations

import math
import warnings
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_models import recipe, reference

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated
        from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
        from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
except ImportError as error:
    pytest.skip(
        f"torchao is not the one that these tests were written for, or not installed: {error}", allow_module_level=True
    )

SEED = st.integers(0, 2**16)
SHAPE = st.sampled_from([(32, 32), (96, 160), (64, 352)])


def torchao_mx(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """torchao's MX codes and scales, blocks of 32 along the last dim, scales rounded up."""
    scale, data = to_mx(x.contiguous(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    return data.view(torch.uint8), scale.view(torch.uint8)


def bf16_weight(shape: tuple[int, int], seed: int, spread: float) -> torch.Tensor:
    """Random signs and exponents within 2 ** +-spread, in bf16, with zeros here and there."""
    rng = np.random.default_rng(seed)
    magnitude = rng.uniform(1, 2, shape) * np.exp2(rng.uniform(-spread, spread, shape))
    x = magnitude * rng.choice([-1.0, 1.0], shape) * (rng.uniform(size=shape) > 0.05)
    return torch.from_numpy(x.astype(np.float32)).bfloat16()


def assert_mx_equal(x: torch.Tensor) -> None:
    """Both orientations against torchao, columnwise on the transposed input."""
    planes = recipe("mxfp8").quantize(x).planes()
    data, scale = torchao_mx(x)
    assert torch.equal(planes["rowwise_scale"], scale)
    assert torch.equal(planes["rowwise_data"], data)
    data, scale = torchao_mx(x.t())
    assert torch.equal(planes["columnwise_scale"], scale.t())
    assert torch.equal(planes["columnwise_data"], data.t())


# ---------------------------------------------------------------------------------------------------------------- mxfp8
@given(shape=SHAPE, seed=SEED, spread=st.sampled_from([0.0, 2.0, 20.0, 100.0]))
@settings(max_examples=25, deadline=None)
def test_mxfp8_of_bf16_weights_is_torchaos_byte_for_byte(shape: tuple[int, int], seed: int, spread: float) -> None:
    """Statement 6. A bf16 amax has 8 bits, so amax / 448 is a power of two or at least 1/256 away from one.

    Neither the reciprocal's last bit nor log2's can then change what rounding up gives.
    """
    assert_mx_equal(bf16_weight(shape, seed, spread))


@given(shape=SHAPE, seed=SEED)
@settings(max_examples=20, deadline=None)
def test_mxfp8_of_fp32_weights_is_torchaos_away_from_powers_of_two(shape: tuple[int, int], seed: int) -> None:
    """Statement 6 in fp32: blocks whose amax / 448 is 2^-14 or more off a power of two: log2 keeps them apart."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02
    planes, (data, scale) = recipe("mxfp8").quantize(x).planes(), torchao_mx(x)
    fraction = torch.frexp(x.reshape(shape[0], -1, 32).abs().amax(-1).double() / 448)[0]
    safe = (fraction - 0.5).abs() > 2**-14
    assert safe.float().mean() > 0.9
    assert torch.equal(planes["rowwise_scale"][safe], scale[safe])
    assert torch.equal(planes["rowwise_data"].reshape(*safe.shape, 32)[safe], data.reshape(*safe.shape, 32)[safe])


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan, 3.3e38, 448.0, 449.0, 1.0])
def test_mxfp8_of_special_values_is_torchaos(special: float) -> None:
    """A NaN spoils its block alone, inf saturates it: scale codes 0xFF and 0xFE."""
    x = bf16_weight((64, 64), 1, 2.0)
    x[7, 40] = special
    assert_mx_equal(x)


def test_mxfp8_of_zeros_is_torchaos() -> None:
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    x[32:, 32:] = 1
    assert_mx_equal(x)


def test_mxfp8_under_the_smallest_scale_is_not_torchaos() -> None:
    """Known difference: for scale code 0 torchao multiplies by 1 and loses the block, where 2^127 is due."""
    x = torch.full((32, 32), 2.0**-120, dtype=torch.bfloat16)
    planes, (data, scale) = recipe("mxfp8").quantize(x).planes(), torchao_mx(x)
    assert torch.equal(planes["rowwise_scale"], scale)
    assert (scale == 0).all()
    assert (data == 0).all()
    assert torch.equal(recipe("mxfp8").quantize(x).dequantize(), x)


# --------------------------------------------------------------------------------------------------- other MX elements
def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes, one to a byte -> little-endian groups of them, by Python's integers."""
    group = {4: 2, 6: 4}[bits]
    rows = []
    for row in codes.tolist():
        words = [
            sum(code << bits * place for place, code in enumerate(row[start : start + group]))
            for start in range(0, len(row), group)
        ]
        rows.append(list(b"".join(word.to_bytes(group * bits // 8, "little") for word in words)))
    return torch.tensor(rows, dtype=torch.uint8)


MX_ELEMENTS: list[tuple[str, Any, int]] = [
    ("mxfp6_e3m2", DTYPE_FP6_E3M2, 6),
    ("mxfp6_e2m3", DTYPE_FP6_E2M3, 6),
    ("mxfp4", torch.float4_e2m1fn_x2, 4),
]


@pytest.mark.parametrize(("name", "element", "bits"), MX_ELEMENTS, ids=[name for name, _, _ in MX_ELEMENTS])
@given(shape=SHAPE, seed=SEED, spread=st.sampled_from([0.0, 2.0, 20.0, 100.0]))
@settings(max_examples=10, deadline=None)
def test_six_and_four_bit_mx_is_torchaos_byte_for_byte(
    name: str, element: Any, bits: int, shape: tuple[int, int], seed: int, spread: float
) -> None:
    """The largest elements 28, 7.5 and 6 have at most 4 bits, so a bf16 amax over one is a power of two or far off.

    torchao packs codes of 4 bits, and leaves those of 6 one to a byte.
    """
    x = bf16_weight(shape, seed, spread)
    tensor = recipe(name).quantize(x)
    for orientation, weight in (("rowwise", x), ("columnwise", x.t())):
        scale, data = to_mx(weight.contiguous(), element, 32, ScaleCalculationMode.RCEIL)
        scale = scale.view(torch.uint8)
        assert torch.equal(tensor.planes()[f"{orientation}_scale"], scale if orientation == "rowwise" else scale.t())
        assert torch.equal(tensor.buffers()[f"{orientation}_data"], data if bits == 4 else packed(data, bits))


@given(shape=st.sampled_from([(32, 32), (32, 96)]), seed=SEED, spread=st.sampled_from([0.0, 2.0, 20.0]))
@settings(max_examples=10, deadline=None)
def test_mxint8_is_the_ocp_definition_in_integers(shape: tuple[int, int], seed: int, spread: float) -> None:
    """OCP MX v1.0, 6.3: the exponent of the block's amax, and elements in steps of 2^-6, rounded to even, clamped."""
    x = bf16_weight(shape, seed, spread)
    planes = recipe("mxint8").quantize(x).planes()
    for start, column in np.ndindex(shape[0], shape[1] // 32):
        block = [Fraction(value) for value in x[start, column * 32 : column * 32 + 32].tolist()]
        amax = max(abs(value) for value in block)
        exponent = math.frexp(amax)[1] - 1 if amax else -127
        codes = [max(-127, min(127, round(value / Fraction(2) ** exponent * 64))) for value in block]
        assert planes["rowwise_scale"][start, column].item() == exponent + 127
        assert planes["rowwise_data"][start, column * 32 : column * 32 + 32].view(torch.int8).tolist() == codes


# ---------------------------------------------------------------------------------------------------------------- nvfp4
@given(exponent=st.integers(-20, 20), seed=SEED, shape=st.sampled_from([(16, 16), (48, 80), (64, 176)]))
@settings(max_examples=25, deadline=None)
def test_nvfp4_is_torchaos_when_the_tensor_scale_is_a_power_of_two(
    exponent: int, seed: int, shape: tuple[int, int]
) -> None:
    """Statement 11, cross-checked where orders of operations can't be told apart.

    The weight's amax is 2688 * 2^n, so 2688 / amax is exact in either order. Block amaxes are bf16, so amax / 6 is an
    e4m3 tie exactly, when fp32(1/6) gives the tie as well, or far from one. Every row of a 16x16 block holds its
    amax, since torchao's blocks are 1x16; and all scales are 2^-6 or more, to which torchao raises them.
    """
    rng = np.random.default_rng(seed)
    rows, columns = shape[0] // 16, shape[1] // 16
    unit = 2.0**exponent
    amax = torch.from_numpy(np.exp2(rng.uniform(-3, np.log2(2688), (rows, columns)))).bfloat16().double()
    amax[rng.integers(rows), rng.integers(columns)] = 2688
    spread_amax = amax.repeat_interleave(16, 0).repeat_interleave(16, 1)
    x = (torch.from_numpy(rng.uniform(-1, 1, shape)) * spread_amax).bfloat16().double()
    place = torch.from_numpy(rng.integers(0, 16, (shape[0], columns))) + torch.arange(columns) * 16
    x.scatter_(1, place, spread_amax.gather(1, place) * torch.from_numpy(rng.choice([-1.0, 1.0], tuple(place.shape))))
    weight = (x * unit).bfloat16()
    assert torch.equal(weight.double(), x * unit)

    scale, data = nvfp4_quantize(weight, 16, per_tensor_amax_to_scale(weight.abs().max()))
    tensor = recipe("nvfp4").quantize(weight)
    buffers = tensor.buffers()
    assert torch.equal(
        buffers["rowwise_scale"][: shape[0], :columns], scale.reshape(shape[0], columns).view(torch.uint8)
    )
    assert torch.equal(tensor.planes()["rowwise_data"], data.reshape(shape[0], shape[1] // 2))


# ------------------------------------------------------------------------------------------------------------------ fp8
def torchao_scale(amax: torch.Tensor, **options: Any) -> torch.Tensor:
    """torchao's multiplier for an amax."""
    multiplier = amax_to_scale(amax, torch.float8_e4m3fn, **options)
    assert multiplier.dtype == torch.float32
    return multiplier


def bit_patterns(seed: int, low: float, high: float, count: int) -> torch.Tensor:
    """fp32 values with random bits between two magnitudes."""
    start, end = (int(np.float32(value).view(np.uint32)) for value in (low, high))
    return torch.from_numpy(np.random.default_rng(seed).integers(start, end, count).astype(np.uint32).view(np.float32))


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed"])
def test_fp8_multipliers_are_torchaos_for_every_amax_that_it_does_not_raise(name: str) -> None:
    """torchao divides in fp64 and rounds to fp32. 53 bits are more than 2 * 24 + 1, so that is the fp32 quotient.

    Amaxes below 1e-12, which torchao raises, and 0, inf and NaN are left out.
    """
    amax = bit_patterns(0, 1e-12, 3.4e38, 1_000_000)
    assert torch.equal(reference(name).scales(amax)[1], torchao_scale(amax))


@given(seed=SEED, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), power=st.integers(-20, 10))
@settings(max_examples=20, deadline=None)
def test_fp8_current_is_torchaos_byte_for_byte(seed: int, dtype: torch.dtype, power: int) -> None:
    x = (torch.randn(24, 40, generator=torch.Generator().manual_seed(seed)) * 2.0**power).to(dtype)
    multiplier = torchao_scale(x.abs().max())
    planes = recipe("fp8_current").quantize(x).planes()
    assert torch.equal(
        planes["rowwise_data"], to_fp8_saturated(x.float() * multiplier, torch.float8_e4m3fn).view(torch.uint8)
    )
    assert torch.equal(planes["rowwise_scale"], multiplier.reciprocal().reshape(1))


@given(seed=SEED, shape=st.sampled_from([(128, 128), (130, 257), (256, 384)]))
@settings(max_examples=8, deadline=None)
def test_fp8_block_is_torchaos_power_of_two_scaling_block_by_block(seed: int, shape: tuple[int, int]) -> None:
    """torchao's quotient is the fp32 quotient, as above, and both then clear its mantissa."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02
    planes = recipe("fp8_block").quantize(x).planes()
    for i, j in np.ndindex(*planes["rowwise_scale"].shape):
        block = (slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128))
        multiplier = torchao_scale(x[block].abs().max(), round_scales_to_power_of_2=True)
        expected = to_fp8_saturated(x[block] * multiplier, torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(planes["rowwise_data"][block], expected)
        assert planes["rowwise_scale"][i, j] == 1 / multiplier

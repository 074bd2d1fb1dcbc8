"""Parity with Transformer Engine in layout and arithmetic, one statement a test; docstrings give its number.

Statement 15 is in test_four_over_six.py. Deliberate differences: NaN always reaches the scale, padding is zero, a scale
is stored once and repeated in buffers.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy_models import FLT_MAX, RECIPES, as_fp32, e4m3, e8m0_up, pack_nibbles, recipe, reference, unpack_nibbles

from layoutc.runtime import numerics

BLOCKED = {"mxfp8": (96, 160), "nvfp4": (48, 80), "fp8_block": (130, 257)}
F32_MAX = float(FLT_MAX)
SUBNORMAL = 2.0**-149


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """A weight of ordinary values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def shape_of(name: str) -> tuple[int, int]:
    """A shape that shows orientation and padding."""
    return BLOCKED.get(name, (5, 7))


def codes(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Data of a buffer as one code an entry."""
    return torch.from_numpy(unpack_nibbles(tensor.numpy())) if name == "nvfp4" else tensor


# --------------------------------------------------------------------------------------------------------------- layout
def test_e2m1_element_2i_is_the_low_nibble_of_byte_i() -> None:
    """Statement 2."""
    x = torch.zeros(16, 16)
    x[0, :4] = torch.tensor([0.5, 6.0, -1.0, 2.0])
    row = recipe("nvfp4").quantize(x).buffers()["rowwise_data"][0]
    assert row[:2].tolist() == [0x71, 0x4A]
    column = recipe("nvfp4").quantize(x.t().contiguous()).buffers()["columnwise_data"][0]
    assert column[:2].tolist() == [0x71, 0x4A], "columnwise, the byte packs two rows"


@pytest.mark.parametrize("name", RECIPES)
def test_columnwise_data_is_transposed_in_all_recipes_but_mxfp8(name: str) -> None:
    """Statement 3."""
    m, k = shape_of(name)
    shape = recipe(name).quantize(normal(m, k)).buffers()["columnwise_data"].shape
    expected = {"mxfp8": (m, k), "nvfp4": (k, m // 2)}
    assert tuple(shape) == expected.get(name, (k, m))


@pytest.mark.parametrize("name", ["nvfp4", "fp8_block", "fp8_current", "fp8_delayed"])
def test_columnwise_is_the_transpose_of_rowwise(name: str) -> None:
    """Statement 9, and the same for every recipe with square blocks."""
    m, k = shape_of(name)
    buffers = recipe(name).quantize(normal(m, k)).buffers()
    assert torch.equal(codes(name, buffers["columnwise_data"]), codes(name, buffers["rowwise_data"]).t())
    transposed = recipe(name).quantize(normal(m, k).t().contiguous()).buffers()
    for kind in ("data", "scale"):
        assert torch.equal(buffers[f"columnwise_{kind}"], transposed[f"rowwise_{kind}"])
        assert torch.equal(buffers[f"rowwise_{kind}"], transposed[f"columnwise_{kind}"])


def test_mxfp8_columnwise_is_quantized_for_itself() -> None:
    """Statement 3: same shape as rowwise, other values; equal to the transpose of the transposed weight's rowwise."""
    x = normal(96, 160)
    planes = recipe("mxfp8").quantize(x).planes()
    assert not torch.equal(planes["columnwise_data"], planes["rowwise_data"])
    transposed = recipe("mxfp8").quantize(x.t().contiguous()).planes()
    assert torch.equal(planes["columnwise_data"], transposed["rowwise_data"].t())
    assert torch.equal(planes["columnwise_scale"], transposed["rowwise_scale"].t())


def test_nvfp4_scales_stand_in_buffers_once_for_each_row_of_their_block() -> None:
    """Statement 12: so that buffers of 16x16 and of 1x16 blocks have one shape. What is stored has each once."""
    tensor = recipe("nvfp4").quantize(normal(48, 80))
    scale = tensor.planes()["rowwise_scale"]
    assert scale.shape == (3, 5)
    buffers = tensor.buffers()
    assert torch.equal(buffers["rowwise_scale"][:48, :5], scale.repeat_interleave(16, 0))
    assert torch.equal(buffers["columnwise_scale"][:80, :3], scale.t().repeat_interleave(16, 0))


def test_nvfp4_has_one_amax_for_both_orientations() -> None:
    """Statement 14: without a transform, rows and columns have the same largest magnitude."""
    x = normal(48, 80)
    amax = recipe("nvfp4").quantize(x).buffers()["amax"]
    assert amax.item() == x.abs().max().item()
    assert torch.equal(recipe("nvfp4").quantize(x.t().contiguous()).buffers()["amax"], amax)
    assert torch.equal(recipe("nvfp4").quantize(x, orientations=("columnwise",)).buffers()["amax"], amax)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("orientation", ["rowwise", "columnwise"])
def test_swizzled_scales_lie_in_128x4_tiles_over_free_and_contraction_axis(name: str, orientation: str) -> None:
    """Statement 17: for each operand, and back again."""
    tensor = recipe(name).quantize(normal(160, 352))
    buffer = tensor.buffers()[f"{orientation}_scale"]
    transposed = name == "mxfp8" and orientation == "columnwise"  # the buffer has the contraction axis first
    matrix = (buffer.t() if transposed else buffer).numpy()
    rows, columns = matrix.shape
    i, j = np.indices(matrix.shape)
    where = ((i // 128) * (columns // 4) + j // 4) * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4
    expected = np.zeros(rows * columns, np.uint8)
    expected[where] = matrix
    swizzled = reference(name).gemm_scale(tensor.buffers(), orientation)
    np.testing.assert_array_equal(swizzled.numpy(), expected)
    np.testing.assert_array_equal(reference(name).unswizzle(swizzled, rows, columns).numpy(), matrix)


@pytest.mark.parametrize(
    ("name", "shape"), [("mxfp8", (40, 64)), ("mxfp8", (2, 8, 64)), ("nvfp4", (16, 24)), ("nvfp4", (3, 8, 32))]
)
def test_dims_that_break_the_rule_raise_with_the_shape(name: str, shape: tuple[int, ...]) -> None:
    """Statement 18."""
    text = ", ".join(map(str, shape))
    with pytest.raises(ValueError, match=rf"not shape \({text}\)"):
        recipe(name).quantize(torch.zeros(shape))


# ---------------------------------------------------------------------------------------------------------- e8m0 scales
AMAX_CODES = [
    (0.0, 0),
    (SUBNORMAL, 0),
    (448 * 2.0**-127, 0),
    (449 * 2.0**-127, 1),
    (1.0, 119),
    (6.0, 121),
    (447.99, 127),
    (448.0, 127),
    (449.0, 128),
    (3.3e38, 247),
    (F32_MAX, 247),
    (np.inf, 0xFE),
    (np.nan, 0xFF),
]


@pytest.mark.parametrize(("amax", "code"), AMAX_CODES)
def test_e8m0_codes_round_the_amax_over_448_up(amax: float, code: int) -> None:
    """Statement 4, through a block that holds the amax."""
    x = torch.zeros(32, 32)
    x[3, 5] = amax
    planes = recipe("mxfp8").quantize(x).planes()
    assert planes["rowwise_scale"][3, 0] == code
    assert planes["columnwise_scale"][0, 5] == code


def test_e8m0_codes_equal_the_bit_field_form_around_every_power_of_two() -> None:
    """Statement 4, for a thousand amaxes around each exponent's edge, and for millions at random."""
    edges = (np.arange(0, 0x7F800000, 0x00400000, dtype=np.int64)[:, None] + np.arange(-400, 401)).ravel()
    rng = np.random.default_rng(0)
    bits = np.concatenate([np.clip(edges, 0, 0x7F800000), rng.integers(0, 0x7F800001, 1_000_000)])
    quotient = bits.astype(np.uint32).view(np.float32)
    encoded = reference("mxfp8").encode_scale(torch.from_numpy(quotient)).numpy()
    np.testing.assert_array_equal(encoded, e8m0_up(quotient))


def test_e8m0_code_0_decodes_to_the_smallest_power_and_255_to_nan() -> None:
    """Statement 5: and the multiplier under code 254 is 2^-127, a subnormal."""
    decode = reference("mxfp8").decode_scale
    assert decode(torch.tensor([0, 1, 127, 254], dtype=torch.uint8)).tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert decode(torch.tensor([255], dtype=torch.uint8)).isnan().all()
    for amax, code, multiplier in ((np.inf, 254, 2.0**-127), (0.0, 0, 2.0**127), (448.0, 127, 1.0)):
        scale, factor = reference("mxfp8").scales(torch.tensor([amax]))
        assert (scale.item(), factor.item()) == (code, multiplier)


# ----------------------------------------------------------------------------------------------------------- fp8 scales
@pytest.mark.parametrize(
    ("amax", "multiplier"),
    [
        (0.0, 1.0),
        (np.inf, 1.0),
        (np.nan, 1.0),
        (448.0, 1.0),
        (1.0, 448.0),
        (3.0, float(np.float32(448) / np.float32(3))),
        (SUBNORMAL, F32_MAX),
    ],
)
def test_fp8_scale_from_amax_follows_the_ordered_rules(amax: float, multiplier: float) -> None:
    """Statement 7, per tensor: amax 0, inf and NaN give 1; a quotient that overflows gives the largest fp32 value."""
    for name in ("fp8_current", "fp8_delayed"):
        scale, factor = reference(name).scales(torch.tensor([amax]))
        assert factor.item() == multiplier
        assert scale.item() == float(np.float32(1) / np.float32(multiplier))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_block_scale_that_overflows_follows_the_largest_value_of_the_inputs_dtype(dtype: torch.dtype) -> None:
    """Statement 7, for blocks: rounded down to a power of two after that."""
    largest = torch.finfo(dtype).max
    scale, factor = reference("fp8_block").scales(torch.tensor([[SUBNORMAL, 0.0, np.inf, np.nan, 1.0]]), largest)
    overflowed = float(np.ldexp(np.float32(0.5), np.frexp(np.float32(largest))[1]))
    assert factor.tolist() == [[overflowed, 1.0, 1.0, 1.0, 256.0]]
    assert scale.tolist() == [[1 / overflowed, 1.0, 1.0, 1.0, 1 / 256]]


def test_power_of_two_scales_round_the_multiplier_down() -> None:
    """Statement 8: the mantissa is cleared, so that the largest element still fits."""
    amax = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 100 + 1e-3
    scale, factor = reference("fp8_block").scales(amax, F32_MAX)
    exact = 448 / amax.double()
    assert (factor.double() <= exact * (1 + 2**-24)).all()
    assert (factor.double() * 2 > exact * (1 - 2**-24)).all()
    assert (torch.frexp(factor)[0] == 0.5).all()
    assert torch.equal(scale, 1 / factor)
    assert (amax * factor <= 448).all()


# --------------------------------------------------------------------------------------------------------- nvfp4 scales
def test_nvfp4_multiplies_the_tensor_scale_by_a_sixth_first() -> None:
    """Statement 11: amaxes beside ties of the e4m3 scale, where each order of the three factors gives other codes."""
    rng = np.random.default_rng(1)
    sixth = np.float32(1) / np.float32(6)
    others = dict.fromkeys(("last", "divided"), 0)
    for tensor_amax in rng.uniform(1, 2, 40).astype(np.float32).reshape(40, 1):
        s_enc = np.float32(448 * 6) / tensor_amax
        ties = ((np.arange(8, 14) + 0.5) * 32 / (s_enc * sixth)).astype(np.float32)  # between codes from 256 to 448
        amax = (ties.view(np.uint32)[:, None] + np.arange(-3, 4)).astype(np.uint32).view(np.float32).ravel()
        scale = reference("nvfp4").scales(torch.from_numpy(amax), torch.from_numpy(tensor_amax))[0].numpy()
        np.testing.assert_array_equal(scale, e4m3(amax * (s_enc * sixth)))
        others["last"] += int((scale != e4m3(amax * s_enc * sixth)).sum())
        others["divided"] += int((scale != e4m3(amax / np.float32(6) * s_enc)).sum())
    assert all(others.values()), "else the test could not tell the orders apart"


@pytest.mark.parametrize(
    ("block", "tensor", "code", "multiplier"),
    [
        (0.0, 0.0, 0x00, F32_MAX),  # nothing but zeros: the tensor's scale is 1, the block's 0
        (0.0, 1.0, 0x00, F32_MAX),
        (1.0, 1.0, 0x7E, 6.0),  # the largest block has scale 448
        (6.0, np.inf, 0x38, 1.0),  # an infinite weight: blocks scale as under a tensor scale of 1
        (np.inf, np.inf, 0x7E, 1 / 448),
        (SUBNORMAL, SUBNORMAL, 0x00, F32_MAX),  # too small for any scale
    ],
)
def test_nvfp4_scales_at_the_corners(block: float, tensor: float, code: int, multiplier: float) -> None:
    """Statement 11: amax 0, infinite, subnormal, and the largest block."""
    scale, factor = reference("nvfp4").scales(torch.tensor([[block]]), torch.tensor([tensor]))
    assert scale.item() == code
    assert factor.item() == np.float32(multiplier)


# ---------------------------------------------------------------------------------------------- zeros, NaN and infinity
@pytest.mark.parametrize("name", RECIPES)
def test_a_weight_of_zeros_has_zero_codes_and_dequantizes_to_zeros(name: str) -> None:
    """Statement 13: scales are 0 in mxfp8 and nvfp4, 1 in the recipes with fp32 scales."""
    m, k = shape_of(name)
    tensor = recipe(name).quantize(torch.zeros(m, k))
    for key, plane in tensor.planes().items():
        expected = 1.0 if key.endswith("scale") and plane.dtype == torch.float32 else 0
        assert (plane == expected).all(), key
    assert torch.equal(tensor.dequantize(), torch.zeros(m, k))


def test_a_block_of_zeros_beside_others_has_zero_codes() -> None:
    """Statement 13, block by block."""
    for name, (bm, bk), scale in (("nvfp4", (16, 16), 0), ("mxfp8", (32, 32), 0), ("fp8_block", (128, 128), 1.0)):
        x = normal(2 * bm, 2 * bk)
        x[:bm, :bk] = 0
        planes = recipe(name).quantize(x).planes()
        data = codes(name, planes["rowwise_data"])
        assert (data[:bm, :bk] == 0).all()
        assert planes["rowwise_scale"][0, 0] == scale
        assert (data[bm:, bk:] != 0).any()


@pytest.mark.parametrize("name", RECIPES)
def test_a_nan_is_never_lost(name: str) -> None:
    """Deliberate: amax propagates NaN, so that the NaN shows in the values, whatever the element format can hold."""
    m, k = shape_of(name)
    for value in (np.nan, -np.nan):
        x = normal(m, k)
        x[1, 2] = value
        tensor = recipe(name).quantize(x)
        for orientation in ("rowwise", "columnwise"):
            back = recipe(name).quantize(x, orientations=(orientation,)).dequantize()
            assert back[1, 2].isnan(), orientation
        scale = tensor.planes()["rowwise_scale"].flatten()[0 if name != "mxfp8" else k // 32]
        assert scale.item() == {"mxfp8": 0xFF, "nvfp4": 0x7F}.get(name, 1.0)


@pytest.mark.parametrize("name", RECIPES)
def test_a_nan_stays_in_its_block_unless_the_scale_is_the_weights(name: str) -> None:
    """One NaN spoils its own block alone; in nvfp4, whose blocks are relative to the weight's amax, all of them."""
    if name == "nvfp4":
        m, k, bm, bk = 32, 32, 32, 32
    else:
        m, k = shape_of(name)
        bm, bk = {"mxfp8": (1, 32), "fp8_block": (1, 1)}.get(name, (1, 1))
    x = normal(m, k)
    x[0, 0] = np.nan
    nan = recipe(name).quantize(x).dequantize().isnan()
    assert nan[:bm, :bk].all()
    assert nan.sum() == bm * bk


@pytest.mark.parametrize("name", RECIPES)
def test_infinity_saturates_its_code(name: str) -> None:
    """It comes back as the largest element times its scale: finite per tensor and in fp8 blocks, infinite in mxfp8.

    nvfp4's values follow the weight's amax, so one infinite weight leaves no other finite.
    """
    m, k = shape_of(name)
    x = normal(m, k)
    x[0, 1], x[1, 0] = np.inf, -np.inf
    tensor = recipe(name).quantize(x)
    data = codes(name, tensor.planes()["rowwise_data"])
    top = 0x7 if name == "nvfp4" else 0x7E
    assert data[0, 1] == top
    assert data[1, 0] == top | (0x8 if name == "nvfp4" else 0x80)
    lost = (~tensor.dequantize().isfinite()).sum()
    assert lost == {"mxfp8": 2, "nvfp4": m * k}.get(name, 0)


@pytest.mark.parametrize("name", RECIPES)
def test_weights_near_the_end_of_fp32_come_back(name: str) -> None:
    """2^127, but for nvfp4, where the e4m3 scale times the amax, formed first, must not overflow: 2^118."""
    m, k = shape_of(name)
    x = torch.full((m, k), 2.0 ** (118 if name == "nvfp4" else 127))
    back = recipe(name).quantize(x).dequantize()
    assert (back / x - 1).abs().max() < 1e-6


def test_amax_of_an_empty_tensor_is_zero() -> None:
    assert numerics.tensor_amax(torch.empty(0, 4)).tolist() == [0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_quantize_as_their_fp32_values_do(dtype: torch.dtype) -> None:
    """No step rounds in the input's own dtype."""
    for name in RECIPES:
        x = normal(*shape_of(name)).to(dtype)
        narrow, wide = recipe(name).quantize(x).planes(), recipe(name).quantize(x.float()).planes()
        assert all(torch.equal(narrow[key], wide[key]) for key in wide)
        assert np.array_equal(
            as_fp32(recipe(name).quantize(x).dequantize(torch.float32)),
            as_fp32(recipe(name).quantize(x.float()).dequantize()),
        )


def test_packing_in_numpy_undoes_itself() -> None:
    """The helper that these tests unpack with."""
    nibbles = np.arange(16, dtype=np.uint8).reshape(2, 8)
    assert np.array_equal(unpack_nibbles(pack_nibbles(nibbles)), nibbles)

"""References against independent numpy models, byte for byte, over weights, shapes and dtypes that hypothesis picks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_models import FLT_MAX, MODELS, RECIPES, Array, as_fp32, recipe, reference, same_values

from layoutc.runtime import numerics

SHAPES = {
    "mxfp8": [(32, 32), (96, 160), (160, 96), (64, 352)],
    "nvfp4": [(16, 16), (48, 80), (80, 48), (144, 112)],
    "fp8_block": [(1, 1), (48, 80), (160, 96), (130, 257), (128, 128)],
    "fp8_current": [(1, 1), (5, 7), (48, 80)],
    "fp8_delayed": [(1, 1), (5, 7), (48, 80)],
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [np.inf, -np.inf, np.nan, float(FLT_MAX), -float(FLT_MAX), 2.0**-149, -0.0, 2.0**-126, 448.0, -6.0]
KINDS = ("normal", "heavy", "powers", "subnormal", "zero", "ties", "constant", "huge", "bits")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def values(kind: str, shape: tuple[int, int], rng: np.random.Generator) -> Array:
    """fp32 values of one kind."""
    sign = rng.choice(np.array([-1, 1], np.float32), shape)
    match kind:
        case "normal":
            magnitude = np.abs(rng.standard_normal(shape)) * 0.02
        case "heavy":
            magnitude = np.exp(np.clip(rng.standard_normal(shape) * 15, -85, 85))
        case "powers":
            magnitude = np.exp2(rng.integers(-149, 128, shape))
        case "subnormal":
            return rng.integers(0, 2**23, shape, dtype=np.uint32).view(np.float32) * sign
        case "zero":
            magnitude = np.zeros(shape)
        case "ties":  # many quotients fall between two codes
            magnitude = rng.integers(1, 64, shape) * np.exp2(rng.integers(-4, 3, shape))
        case "constant":
            magnitude = np.full(shape, np.exp2(rng.uniform(-20, 20)))
        case "huge":
            magnitude = rng.uniform(0.5, 1, shape) * float(FLT_MAX)
        case _:
            bits = rng.integers(0, 0x7F800000, shape, dtype=np.uint32)
            return bits.view(np.float32) * sign
    return magnitude.astype(np.float32) * sign


@dataclass(frozen=True)
class Weight:
    """What a weight is made from, small enough to print."""

    shape: tuple[int, int]
    dtype: torch.dtype
    kinds: tuple[str, ...]
    specials: tuple[float, ...]
    seed: int

    def make(self) -> torch.Tensor:
        """Cells of 16 x 16 of the kinds, with the special values at random places."""
        rng = np.random.default_rng(self.seed)
        choice = rng.integers(0, len(self.kinds), tuple(-(-size // 16) for size in self.shape))
        cells = choice.repeat(16, 0).repeat(16, 1)[: self.shape[0], : self.shape[1]]
        x = np.choose(cells, [values(kind, self.shape, rng) for kind in self.kinds])
        for special in self.specials:
            x[rng.integers(0, self.shape[0]), rng.integers(0, self.shape[1])] = special
        return torch.from_numpy(x.astype(np.float32)).to(self.dtype)


@st.composite
def weights(draw: st.DrawFn) -> tuple[str, Weight]:
    """A recipe and a weight that it takes."""
    name = draw(st.sampled_from(RECIPES))
    specials = st.lists(st.sampled_from(SPECIAL), max_size=4) if draw(st.booleans()) else st.just([])
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    shape, dtype = draw(st.sampled_from(SHAPES[name])), draw(st.sampled_from(DTYPES))
    return name, Weight(shape, dtype, tuple(kinds), tuple(draw(specials)), draw(st.integers(0, 2**16)))


def model_planes(name: str, x: torch.Tensor) -> dict[str, Array]:
    """The model's planes of a weight."""
    with np.errstate(all="ignore"):
        return MODELS[name].quantize(as_fp32(x), torch.finfo(x.dtype).max)


def assert_same_bytes(actual: dict[str, torch.Tensor], expected: dict[str, Array]) -> None:
    """Equal planes; fp32 ones up to the payload of NaN."""
    assert actual.keys() == expected.keys()
    for name, plane in actual.items():
        assert plane.shape == expected[name].shape, name
        if plane.dtype == torch.float32:
            assert same_values(plane.numpy(), expected[name]), name
        else:
            np.testing.assert_array_equal(plane.numpy(), expected[name], err_msg=name)


def with_amax(name: str, planes: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The planes that dequantize reads: the reference leaves the amax to its caller."""
    return planes | ({"amax": numerics.tensor_amax(x.float())} if name == "nvfp4" else {})


@given(weights())
@settings(max_examples=50, deadline=None)
def test_quantize_reference_equals_the_model_byte_for_byte(case: tuple[str, Weight]) -> None:
    name, weight = case
    x = weight.make()
    actual = with_amax(name, reference(name).quantize_reference(x), x)
    assert_same_bytes(actual, model_planes(name, x))


@given(weights())
@settings(max_examples=35, deadline=None)
def test_dequantize_reference_equals_the_model_bit_for_bit(case: tuple[str, Weight]) -> None:
    """Statement 16: each stated formula in fp32, and the same after a cast to bf16."""
    name, weight = case
    x = weight.make()
    planes = model_planes(name, x)
    for orientation in ("rowwise", "columnwise"):
        with np.errstate(all="ignore"):
            expected = MODELS[name].dequantize(planes, orientation)
        stored = {key: torch.from_numpy(plane) for key, plane in planes.items()}
        actual = reference(name).dequantize_reference(stored, *weight.shape, orientation)
        assert same_values(actual.numpy(), expected)
        narrow = torch.from_numpy(expected).bfloat16().float().numpy()
        assert same_values(actual.bfloat16().float().numpy(), narrow)


@given(weights())
@settings(max_examples=25, deadline=None)
def test_quantize_and_dequantize_of_the_tensor_are_those_of_the_model(case: tuple[str, Weight]) -> None:
    """Through the class: planes, and values from either orientation alone, in the input's dtype."""
    name, weight = case
    x = weight.make()
    quantized, planes = recipe(name).quantize(x), model_planes(name, x)
    assert_same_bytes({key: plane for key, plane in quantized.planes().items() if key in planes}, planes)
    for orientation in ("rowwise", "columnwise"):
        alone = recipe(name).quantize(x, orientations=(orientation,))
        with np.errstate(all="ignore"):
            expected = torch.from_numpy(MODELS[name].dequantize(planes, orientation)).to(x.dtype)
        assert alone.dequantize().dtype == x.dtype
        assert same_values(alone.dequantize().float().numpy(), expected.float().numpy())


@given(weights())
@settings(max_examples=25, deadline=None)
def test_an_amax_that_is_given_is_the_one_that_counts(case: tuple[str, Weight]) -> None:
    """Quantizing a shard with the whole weight's amax gives the whole weight's rows."""
    name, weight = case
    x, module = weight.make(), recipe(name)
    cut = x.shape[0] // 2 // module.LAYOUT.shard_rows * module.LAYOUT.shard_rows
    if not cut or (x.shape[0] - cut) % module.LAYOUT.multiple_m:
        return
    amax = x.abs().amax().float().reshape(1) if module.LAYOUT.shares_amax else None
    whole = reference(name).quantize_reference(x)
    shards = [reference(name).quantize_reference(part, amax=amax) for part in (x[:cut], x[cut:])]
    for key, plane in whole.items():
        joined = shards[0][key] if plane.dim() == 1 else torch.cat([shard[key] for shard in shards])
        assert_same_bytes({key: joined}, {key: plane.numpy()})


@pytest.mark.parametrize("name", RECIPES)
def test_one_special_value_in_an_ordinary_weight(name: str) -> None:
    x = torch.randn(256, 160, generator=torch.Generator().manual_seed(5))
    for special in SPECIAL:
        x[37, 41] = special
        assert_same_bytes(with_amax(name, reference(name).quantize_reference(x), x), model_planes(name, x))


@pytest.mark.parametrize("name", RECIPES)
def test_every_bf16_input_quantizes_as_in_the_model(name: str) -> None:
    """All finite patterns in one weight, in an order that mixes magnitudes and in one that keeps them together."""
    bits = torch.arange(2**16, dtype=torch.int32)
    x = bits[(bits & 0x7F80) != 0x7F80].to(torch.int16).view(torch.bfloat16)
    x = x[: x.numel() // 1024 * 1024].reshape(-1, 1024)
    x = x[: x.shape[0] // 32 * 32]
    shuffled = x.flatten()[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(2))].reshape(x.shape)
    for weight in (x, shuffled, x * 2**-100):
        assert_same_bytes(
            with_amax(name, reference(name).quantize_reference(weight), weight), model_planes(name, weight)
        )


def test_delayed_scaling_follows_earlier_amaxes_and_puts_the_new_one_in_front() -> None:
    """An empty history starts with the weight's own amax; later the history's largest decides, without the newest."""
    module, amaxes = recipe("fp8_delayed"), [2.0, 8.0, 4.0, 1.0]
    weights = [torch.full((4, 4), amax) for amax in amaxes]
    tensor = module.quantize(weights[0])
    deciding = 2.0
    for step, x in enumerate(weights):
        if step:
            deciding = max(amaxes[:step])
            assert module.quantize(x, out=tensor) is tensor
        planes = tensor.planes()
        assert planes["rowwise_scale"].item() == float(np.float32(1) / np.float32(448 / deciding))
        assert planes["amax"][: step + 2].tolist() == [*reversed(amaxes[: step + 1]), 0.0]
        expected = module.quantize(x, amax=torch.tensor([deciding])).planes()["rowwise_data"]
        assert torch.equal(planes["rowwise_data"], expected)
    assert planes["amax"].shape == (1024,)


@pytest.mark.parametrize("name", ["mxfp8", "fp8_block"])
def test_recipes_whose_scales_stay_in_their_block_take_no_amax(name: str) -> None:
    with pytest.raises(ValueError, match="takes no amax"):
        recipe(name).quantize(torch.zeros(32, 32), amax=torch.ones(1))


@pytest.mark.parametrize("name", RECIPES)
def test_other_dtypes_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name} quantizes float32, bfloat16 and float16, not torch.float64"):
        recipe(name).quantize(torch.zeros(32, 32, dtype=torch.float64))


def test_a_nan_under_a_given_amax_stays_in_its_block() -> None:
    """As in a shard whose NaN the other shards did not have when the amax was taken."""
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    amax = x.abs().amax().reshape(1)
    clean = recipe("nvfp4").quantize(x, amax=amax).dequantize()
    x[17, 20] = float("nan")
    back = recipe("nvfp4").quantize(x, amax=amax).dequantize()
    spoilt = torch.zeros(32, 48, dtype=torch.bool)
    spoilt[16:32, 16:32] = True
    assert torch.equal(back.isnan(), spoilt)
    assert torch.equal(back[~spoilt], clean[~spoilt])

"""Golden shapes: the buffers that Transformer Engine allocates, as LAYOUT states them and as tensors have them."""

from __future__ import annotations

from math import prod

import pytest
import torch
from numpy_models import RECIPES, recipe

Shape = tuple[int, int]

# (m, k) -> row scale, column scale of each block format, padding included.
GOLDEN: dict[Shape, dict[str, tuple[Shape, Shape]]] = {
    (256, 1024): {"mxfp8": ((256, 32), (8, 1024)), "nvfp4": ((256, 64), (1024, 16)), "fp8_block": ((2, 8), (8, 4))},
    (96, 256): {"mxfp8": ((128, 8), (4, 256)), "nvfp4": ((128, 16), (256, 8)), "fp8_block": ((1, 4), (2, 4))},
    (160, 96): {"mxfp8": ((256, 4), (8, 128)), "nvfp4": ((256, 8), (128, 12)), "fp8_block": ((2, 4), (1, 4))},
    (384, 160): {"mxfp8": ((384, 8), (12, 256)), "nvfp4": ((384, 12), (256, 24)), "fp8_block": ((3, 4), (2, 4))},
    (192, 256): {"mxfp8": ((256, 8), (8, 256)), "nvfp4": ((256, 16), (256, 12)), "fp8_block": ((2, 4), (2, 4))},
    (48, 80): {"nvfp4": ((128, 8), (128, 4)), "fp8_block": ((1, 4), (1, 4))},
    (2048, 4096): {
        "mxfp8": ((2048, 128), (64, 4096)),
        "nvfp4": ((2048, 256), (4096, 128)),
        "fp8_block": ((16, 32), (32, 16)),
    },
}
CASES = [
    (name, shape)
    for shape in GOLDEN
    for name in RECIPES
    if name in GOLDEN[shape] or name in ("fp8_current", "fp8_delayed")
]
SCALE_DTYPE = {"mxfp8": torch.uint8, "nvfp4": torch.uint8}


def expected(name: str, m: int, k: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Every buffer of a recipe, in order: name -> shape and dtype."""
    row, column = GOLDEN[m, k].get(name, ((1,), (1,)))
    data = {"mxfp8": ((m, k), (m, k)), "nvfp4": ((m, k // 2), (k, m // 2))}.get(name, ((m, k), (k, m)))
    scale_dtype = SCALE_DTYPE.get(name, torch.float32)
    buffers: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "rowwise_data": (data[0], torch.uint8),
        "rowwise_scale": (row, scale_dtype),
        "columnwise_data": (data[1], torch.uint8),
        "columnwise_scale": (column, scale_dtype),
    }
    if name == "nvfp4":
        buffers["amax"] = ((1,), torch.float32)
    if name == "fp8_delayed":
        buffers["amax"] = ((1024,), torch.float32)
    return buffers


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_stated_buffers_are_those_of_the_table(name: str, shape: Shape) -> None:
    """Statement 1: shapes and dtypes equal the table's formulas, in both orientations."""
    stated = recipe(name).LAYOUT.buffers(*shape)
    assert {key: tuple(facts) for key, facts in stated.items()} == expected(name, *shape)
    assert list(stated) == list(expected(name, *shape))


@pytest.mark.parametrize(("name", "shape"), [case for case in CASES if prod(case[1]) < 2**20])
def test_actual_buffers_are_those_of_the_table(name: str, shape: Shape) -> None:
    """Statement 1, for the tensors that `buffers()` returns."""
    actual = recipe(name).quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0))).buffers()
    assert {key: (tuple(t.shape), t.dtype) for key, t in actual.items()} == expected(name, *shape)
    assert list(actual) == list(expected(name, *shape))
    assert all(tensor.is_contiguous() for tensor in actual.values())


@pytest.mark.parametrize("name", RECIPES)
def test_a_large_weight_on_meta_has_the_shapes_of_the_table(name: str) -> None:
    weight = torch.empty(2048, 4096, device="meta", dtype=torch.bfloat16)
    actual = recipe(name).quantize(weight).buffers()
    assert {key: (tuple(t.shape), t.dtype) for key, t in actual.items()} == expected(name, 2048, 4096)


def test_48x80_is_no_mxfp8_shape() -> None:
    """Statement 18: dims that break the rule of 32 are refused, with the shape in the message."""
    with pytest.raises(
        ValueError, match=r"mxfp8 takes rows in multiples of 32 .* of 32, not shape \(48, 80\).* \(64, 96\)"
    ):
        recipe("mxfp8").quantize(torch.zeros(48, 80))


@pytest.mark.parametrize(
    ("name", "shape"), [("nvfp4", (24, 80)), ("nvfp4", (48, 72)), ("mxfp8", (32, 48)), ("mxfp8", (16, 64))]
)
def test_shapes_that_break_the_rules_are_refused_with_their_numbers(name: str, shape: Shape) -> None:
    """Statement 18, for rows and columns apart."""
    with pytest.raises(ValueError, match=rf"{name} takes .*\({shape[0]}, {shape[1]}\)"):
        recipe(name).quantize(torch.zeros(shape))


def test_the_next_shape_that_fits_does_fit() -> None:
    """Statement 18: the message's suggestion is accepted."""
    layout = recipe("nvfp4").LAYOUT
    with pytest.raises(ValueError, match=r"the next that fits is \(32, 48\)"):
        layout.check_shape((17, 33))
    assert layout.check_shape((32, 48)) == (32, 48)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("lead", [(3, 64), (2, 3, 32)])
def test_weights_of_more_dims_have_the_buffers_of_their_matrix_and_keep_their_shape(
    name: str, lead: tuple[int, ...]
) -> None:
    weight = torch.randn(*lead, 160, generator=torch.Generator().manual_seed(0))
    quantized = recipe(name).quantize(weight)
    flat = recipe(name).quantize(weight.reshape(-1, 160))
    assert quantized.shape == weight.shape
    assert quantized.dequantize().shape == weight.shape
    for key, buffer in quantized.buffers().items():
        assert torch.equal(buffer, flat.buffers()[key]), key
    stated = recipe(name).LAYOUT.buffers(prod(lead), 160)
    assert {key: (tuple(t.shape), t.dtype) for key, t in quantized.buffers().items()} == {
        k: tuple(v) for k, v in stated.items()
    }


@pytest.mark.parametrize("name", RECIPES)
def test_a_vector_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"weights of 2 dims or more, not shape \(64,\)"):
        recipe(name).quantize(torch.zeros(64))


@pytest.mark.parametrize("name", RECIPES)
def test_padding_is_zero_so_that_buffers_compare_with_plain_equality(name: str) -> None:
    """Two weights that differ in nothing have equal buffers, padding included, and padding holds zeros."""
    m, k = 96, 160
    weight = torch.randn(m, k, generator=torch.Generator().manual_seed(3)) + 8.0  # every scale is far from zero
    tensor = recipe(name).quantize(weight)
    stored = {key: int(plane.count_nonzero()) for key, plane in tensor.planes().items()}
    assert all(torch.equal(a, b) for a, b in zip(tensor.buffers().values(), tensor.buffers().values(), strict=True))
    times = {"nvfp4": 16}.get(name, 1)
    source = "columnwise" if name == "mxfp8" else "rowwise"
    buffers = tensor.buffers()
    assert int(buffers["rowwise_scale"].count_nonzero()) == stored["rowwise_scale"] * times
    assert int(buffers["columnwise_scale"].count_nonzero()) == stored[f"{source}_scale"] * times

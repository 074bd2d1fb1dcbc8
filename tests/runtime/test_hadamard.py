"""Transformed values: the butterfly by its definition, its inverse, whole matrices, products in which it cancels."""

from __future__ import annotations

from typing import Any

import numpy as np
import product_modes
import pytest
import torch
import unshipped
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_models import recipe, reference
from torch import Tensor, nn

import layoutc
from layoutc.runtime import numerics
from layoutc.runtime.weight import operators

SIZES = (2, 4, 8, 16, 32)
F32 = np.float32
SIGNS = 0xD7E8  # Transformer Engine's
AWKWARD = """
layoutc: 1
name: turned_both_ways
summary: transforms along both axes, in blocks that are no powers of two
shape: {m: 8, k: 32}
element: {format: e4m3}
scale: {format: f32, rule: amax-over-max}
orientations:
  rowwise:
    transform: {hadamard: 32, signs: 0x80000001}
    block: {m: 1, k: 96}
    data: {layout: m k}
    scale: {layout: m k/96}
  columnwise:
    quantize:
      element: {format: int8, round: stochastic}
      scale: {format: f32, rule: min-max, zero: int8}
    transform: {hadamard: 8, signs: 0x5A}
    block: {m: 24, k: 3}
    data: {layout: k m}
    scale: {layout: k/3 m/24}
"""


def scale_of(size: int) -> float:
    return float(F32(1 / np.sqrt(size)))


def turned(group: list[Any], signs: int, *, inverse: bool = False) -> list[Any]:
    """A group by the definition in specs/README.md: one fp32 operation after the other."""
    size = len(group)
    factors = [F32(-1) if signs >> i & 1 else F32(1) for i in range(size)]
    values = [F32(v) for v in group]
    with np.errstate(all="ignore"):
        if not inverse:
            values = [v * s for v, s in zip(values, factors, strict=True)]
        apart = 1
        while apart < size:
            sums = list(values)
            for i in range(size):
                if (i // apart) % 2 == 0:
                    sums[i], sums[i + apart] = values[i] + values[i + apart], values[i] - values[i + apart]
            values, apart = sums, 2 * apart
        values = [v * F32(scale_of(size)) for v in values]
        if inverse:
            values = [v * s for v, s in zip(values, factors, strict=True)]
    return values


def by_definition(x: Tensor, axis: int, size: int, signs: int, *, inverse: bool = False) -> Tensor:
    lines = (x if axis else x.t()).tolist()
    made = [
        [value for at in range(0, len(line), size) for value in turned(line[at : at + size], signs, inverse=inverse)]
        for line in lines
    ]
    found = torch.from_numpy(np.array(made, F32))
    return found if axis else found.t()


def bits(x: Tensor) -> Tensor:
    """With one NaN, and with the signs of zeros."""
    return x.masked_fill(x.isnan(), float("nan")).contiguous().view(torch.int32)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("size", SIZES)
@given(st.data())
@settings(max_examples=10, deadline=None)
def test_the_butterfly_is_that_of_the_definition(size: int, axis: int, data: st.DataObject) -> None:
    """Bit by bit, with zeros of both signs, huge and tiny values, infinities and NaN; the inverse too."""
    signs = data.draw(st.integers(0, 2**size - 1))
    value = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.5, -3.0, 3e38]))
    values = data.draw(st.lists(value, min_size=2 * size, max_size=2 * size))
    x = torch.tensor(values).view(2, size) if axis else torch.tensor(values).view(size, 2)
    arguments = axis, size, signs
    assert torch.equal(bits(numerics.hadamard(x, *arguments, scale_of(size))), bits(by_definition(x, *arguments)))
    found = numerics.unhadamard(x, *arguments, scale_of(size))
    assert torch.equal(bits(found), bits(by_definition(x, *arguments, inverse=True)))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("size", SIZES)
def test_the_inverse_gives_the_values_back(size: int, axis: int) -> None:
    """To the bit where no sum rounds: then the matrix is its own inverse, times size * scale^2."""
    x = torch.randint(-64, 64, (2 * size, 3 * size), generator=torch.Generator().manual_seed(size)).float()
    scale = scale_of(size)
    found = numerics.unhadamard(numerics.hadamard(x, axis, size, 0x2B, scale), axis, size, 0x2B, scale)
    if size in (4, 16):
        assert torch.equal(found, x)
    assert torch.allclose(found, x, rtol=1e-6, atol=1e-5)


def test_the_matrix_is_sylvesters() -> None:
    """Entry (i, j) is 1 or -1, as i and j have an even or an odd number of bits in common."""
    found = numerics.hadamard(torch.eye(16), 1, 16, SIGNS, 0.25)
    for i in range(16):
        sign = -1 if SIGNS >> i & 1 else 1
        assert found[i].tolist() == [sign * 0.25 * (-1) ** (i & j).bit_count() for j in range(16)]


@pytest.mark.parametrize("name", ["nvfp4_activation", "nvfp4_gradient"])
def test_planes_are_those_of_transformed_values(name: str) -> None:
    """Rowwise as they are; columnwise, the planes of the recipe without a transform, of what the definition gives."""
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(3))
    x[5] *= 40
    seed = {"seed": 9} if name == "nvfp4_gradient" else {}
    made = recipe(name).quantize(x, **seed)
    plain = reference("nvfp4_1d")
    values, amax = by_definition(x, 0, 16, SIGNS).contiguous(), x.abs().max().reshape(1)
    scale, multiplier = plain.scales(numerics.block_amax(numerics.to_blocks(values, 16, 1)), amax * 4)
    assert torch.equal(made.planes()["columnwise_scale"], scale)
    scaled = values * multiplier.repeat_interleave(16, 0)
    own = reference(name)
    words = (own.random_bits(torch.tensor([9]), 32, 48, 1),) if seed else ()
    codes = own.encode(scaled, *words)
    assert torch.equal(made.planes()["columnwise_data"], numerics.pack(codes, 4, low_first=True))
    rowwise = plain.quantize_reference(x, orientations=("rowwise",))
    assert torch.equal(made.planes()["rowwise_scale"], rowwise["rowwise_scale"])
    assert torch.equal(made.planes()["amax"], amax)
    back = own.decode(codes) * (plain.decode_scale(scale) * (amax * 4) * plain.INVERSE_RANGE).repeat_interleave(16, 0)
    found = made.LAYOUT and own.dequantize_reference(made.planes(), 32, 48, "columnwise")
    assert torch.equal(bits(found), bits(by_definition(back, 0, 16, SIGNS, inverse=True)))


def test_no_transformed_value_saturates() -> None:
    """The largest sum that there is: a group that has the matrix's own signs, all of the amax."""
    x = torch.tensor([-1.0 if SIGNS >> i & 1 else 1.0 for i in range(16)])[:, None].repeat(1, 16) * 3
    made = recipe("nvfp4_activation").quantize(x, orientations=("columnwise",))
    assert torch.equal(made.dequantize(), x)
    assert int(made.planes()["columnwise_scale"][0, 0]) == 0x7E  # 448, the largest scale


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_of_awkward_transforms(dtype: torch.dtype) -> None:
    """Both axes, blocks of units, random bits, ragged tiles: the bytes of the reference, special values among them."""
    triton = pytest.importorskip("triton", reason="needs triton, which kernels are written in")
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1")
    from test_kernels import compare, weight

    unshipped.add("turned_both_ways", AWKWARD.strip() + "\n")
    for shape in ((8, 32), (56, 160)):
        compare("turned_both_ways", weight(*shape, 1).to(dtype), ("rowwise", "columnwise"))
    compare("turned_both_ways", torch.randn(32, 96).to(dtype), ("columnwise",))


def test_pieces_that_cut_what_is_mixed_have_the_values_of_the_whole() -> None:
    """A piece of rows keeps the rest of its blocks, which the inverse needs."""
    x = torch.randn(64, 32)
    whole = recipe("nvfp4_activation").quantize(x, orientations=("columnwise",))
    for start, stop in ((3, 20), (16, 33), (0, 7), (47, 64)):
        assert torch.equal(whole[start:stop].dequantize(), whole.dequantize()[start:stop])
    assert torch.equal(whole[:, 16:].dequantize(), whole.dequantize()[:, 16:])


def test_weights_can_not_have_it() -> None:
    model = nn.Linear(32, 32)
    for convert in (layoutc.quantize_, layoutc.cast_on_gather_):
        with pytest.raises(ValueError, match="not for weights: it transforms values, which only another operand"):
            convert(model, "nvfp4_activation")


# ------------------------------------------------------------------------------------------------------------- products
def test_transforms_cancel_in_the_gradient_of_the_weight() -> None:
    """What a kernel multiplies, codes and scales as they are, gives the product of the values."""
    tokens, m, k = 64, 32, 48
    g, x = torch.randn(tokens, m), torch.randn(tokens, k)
    sides = []
    for name, values, seed in (("nvfp4_gradient", g, {"seed": 1}), ("nvfp4_activation", x, {})):
        planes, of = recipe(name).quantize(values, **seed).planes(), reference(name)
        codes = of.decode(numerics.unpack(planes["columnwise_data"], 4, low_first=True))
        operand = recipe(name).LAYOUT.operands["columnwise"]
        scale = of.decode_scale(planes["columnwise_scale"]).repeat_interleave(16, 0)
        sides.append(codes.double() * scale.double() * planes["amax"].double() * operand.tensor_scale)
        sides.append(of.dequantize_reference(planes, *values.shape, "columnwise").double())
    stored_g, value_g, stored_x, value_x = sides
    expected = value_g.t() @ value_x
    assert torch.allclose(stored_g.t() @ stored_x, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert not torch.allclose(stored_g, value_g, atol=0.1)


def test_the_mean_of_gradients_is_that_of_exact_gradients() -> None:
    """Gradients of weights over many backward passes, whose activations are always the same codes."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 16, bias=False)
    layoutc.quantize_(layer, "nvfp4")
    x, g = torch.randn(32, 32), torch.randn(32, 16)
    activation = recipe("nvfp4_activation").quantize(x)
    kept = operators.dequantize(type(activation), activation.planes(), 32, 32, "columnwise", torch.float32)
    found = []
    with product_modes.products("reference"):
        for _ in range(300):
            layer.weight.grad = None
            layer(x).backward(g)
            found.append(layer.weight.grad)
    made = torch.stack(found)
    assert len({one.sum().item() for one in found}) > 250
    spread = made.std(0) / 300**0.5
    assert ((made.mean(0) - g.t() @ kept).abs() < 5 * spread + 0.02 * made.std()).all()


def test_training_repeats_itself_from_a_seed() -> None:
    """Each step draws; torch.manual_seed gives the same losses to the bit."""

    def losses() -> list[float]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        layoutc.quantize_(model, "nvfp4")
        optimizer = layoutc.MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
        x, y = torch.randn(32, 32), torch.randn(32, 16)
        found = []
        with product_modes.products("reference"):
            for _ in range(5):
                loss = (model(x) - y).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        return found

    first = losses()
    assert first == losses()
    assert first[-1] < first[0]

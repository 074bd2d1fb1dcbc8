"""Scales in which weights are handed on: small floats, levels of levels, NVFP4 and MX of other programs, orders of
E8M0; beside the packages that define them, or their published definition in fractions and in numpy.
"""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy_models import F32, Array, recipe, reference
from test_exchanged_numbers import FORMATS, both, made, nearest, same, weights

from layoutc.runtime.numerics import unpack

# --------------------------------------------------------------------------------------------------------------- scales
SMALL = """shape: {{k: 16}}
element: {{format: e2m1}}
scale: {{format: {scale}, rule: scale-first}}
orientations:
  rowwise:
    block: {{m: 1, k: 16}}
    data: {{layout: m k}}
    scale: {{layout: m k/16}}
"""
UE5M3 = [Fraction(i, 8) * Fraction(2) ** -14 for i in range(8)]
UE5M3 += [(1 + Fraction(i, 8)) * Fraction(2) ** (e - 15) for e, i in itertools.product(range(1, 32), range(8))][:-1]


def e2m1(x: Array) -> Array:
    return np.asarray(np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn))


@pytest.mark.parametrize("scale", ["e4m3", "ue5m3"])
def test_small_floats_as_the_only_level(scale: str) -> None:
    """UE4M3 by ml_dtypes, UE5M3 in fractions: amax / 6 to the nearest scale, and elements over the scale as stored."""
    x = weights(8, 64, 7, extremes=False)
    x[2:4] *= F32(2.0**-12)
    x[5] *= F32(2.0**14)
    planes, values = both(made(SMALL.format(scale=scale), *([scale] if scale in FORMATS else [])), x)
    groups = x.reshape(8, 4, 16)
    whole = np.abs(groups).max(2) / F32(6)
    if scale == "e4m3":
        stored = np.minimum(whole, F32(448)).astype(ml_dtypes.float8_e4m3fn)
        codes, factor = stored.view(np.uint8), stored.astype(F32)
    else:
        codes = np.array([[nearest(UE5M3, Fraction(one)) for one in row] for row in whole.tolist()], np.uint8)
        factor = np.array([float(one) for one in UE5M3], F32)[codes]
    assert np.array_equal(planes["rowwise_scale"].numpy(), codes)
    assert (codes == 0).any()
    assert codes.max() == 0x7E or scale != "e4m3"
    elements = e2m1(groups / np.where(factor == 0, F32(1), factor)[..., None])
    ours = unpack(planes["rowwise_data"], 4, True).numpy()
    assert np.array_equal(ours, elements.view(np.uint8).reshape(8, 64))
    assert same(values, (elements.astype(F32) * factor[..., None]).reshape(8, 64))


LEVELS = """shape: {{k: 32}}
element: {{format: {element}}}
scale: {{format: {scale}, rule: scale-first, super: {super}}}
orientations:
  rowwise:
    block: {{m: 1, k: 16}}
    data: {{layout: m k}}
    scale: {{layout: m k/16}}
"""


@pytest.mark.parametrize("element", ["int4", "e2m1"])
def test_a_second_level_for_each_row(element: str) -> None:
    """VS-Quant (arXiv 2102.04503): 4-bit scales of 16 under one number a row; and E2M1 under E4M3 likewise."""
    vs = element == "int4"
    above = f"{{format: f32, rule: scale-first, {'of-max: true, ' if vs else ''}block: {{m: 1, k: all}}}}"
    body = LEVELS.format(element=element, scale="uint4" if vs else "e4m3", super=above)
    x = weights(8, 64, 8, extremes=False)
    x[5], x[6] = 0, x[6] * F32(2.0**100)
    planes, values = both(made(body, *(["uint4"] if vs else [])), x)
    groups = x.reshape(8, 4, 16)
    whole = np.abs(groups).max(2) / F32(7 if vs else 6)
    level = whole.max(1, keepdims=True) / F32(15 if vs else 448)
    over = whole / np.where(level == 0, F32(1), level)
    stored = np.rint(over).clip(0, 15).astype(np.uint8) if vs else np.minimum(over, 448).astype(ml_dtypes.float8_e4m3fn)
    factor = stored.astype(F32) * level
    scaled = groups / np.where(factor == 0, F32(1), factor)[..., None]
    codes = np.rint(scaled).clip(-7, 7).astype(np.int8) if vs else e2m1(scaled)
    assert same(planes["rowwise_super"].numpy(), level)
    assert np.array_equal(planes["rowwise_scale"].numpy(), stored.view(np.uint8))
    ours = unpack(planes["rowwise_data"], 4, True).numpy()
    assert np.array_equal(ours, codes.view(np.uint8).reshape(8, 64) & 15)
    assert np.array_equal(values, (codes.astype(F32) * factor[..., None]).reshape(8, 64))


@pytest.mark.parametrize("shape", [(24, 64), (40, 192)])
def test_nvfp4_of_compressed_tensors(shape: tuple[int, int]) -> None:
    """Of fp32 weights: its level, scales and codes, and the values that it reads; a -0 loses its sign there."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    x, scheme = torch.from_numpy(weights(*shape, 11, extremes=False) + 0), preset_name_to_scheme("NVFP4A16", ["Linear"])
    compressor: Any = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    groups, level = x.view(shape[0], -1, 16), generate_gparam(x.min(), x.max())
    scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), scheme.weights, level)
    given = {"weight": x.clone(), "weight_scale": scale, "weight_global_scale": level}
    theirs = compressor.compress(given, scheme)
    planes, values = both("nvfp4_compressed_tensors", x.numpy())
    assert torch.equal(planes["amax"].reshape(1), level.reshape(1))
    assert torch.equal(planes["rowwise_scale"], theirs["weight_scale"].view(torch.uint8))
    assert torch.equal(planes["rowwise_data"], theirs["weight_packed"])
    read = compressor.decompress(theirs, scheme)["weight"]
    assert torch.equal(torch.from_numpy(values).to(read.dtype), read)


def test_nvfp4_of_modelopt() -> None:
    """Its NVFP4QTensor, by numpy: amax / 2688; scales of at least 2^-9, or 1 for zeros; x over the product of both."""
    x = weights(24, 64, 12, extremes=False)
    x[5] *= F32(2.0**-12)
    planes, values = both("nvfp4_modelopt", x)
    groups, level = x.reshape(24, 4, 16), np.abs(x).max() / F32(2688)
    whole = np.abs(groups).max(2) / (F32(6) * level)
    whole = np.where(whole == 0, F32(1), whole).clip(F32(2.0**-9), F32(448))
    stored = whole.astype(ml_dtypes.float8_e4m3fn)
    assert (stored.view(np.uint8) == 1).any()
    factor = (stored.astype(F32) * level)[..., None]
    elements = e2m1(groups / factor)
    assert same(planes["amax"].reshape(1).numpy(), level.reshape(1))
    assert np.array_equal(planes["rowwise_scale"].numpy(), stored.view(np.uint8))
    assert np.array_equal(unpack(planes["rowwise_data"], 4, True).numpy(), elements.view(np.uint8).reshape(24, 64))
    assert np.array_equal(values, (elements.astype(F32) * factor).reshape(24, 64))


PRESETS = {"mxfp4": ("MXFP4A16", "mxfp4-pack-quantized"), "mxfp8": ("MXFP8A16", "mxfp8-quantized")}


@pytest.mark.parametrize("name", PRESETS)
def test_mx_of_compressed_tensors(name: str) -> None:
    """Its codes where both have the same scale, which is ours or for MXFP4 also the next one below; and all its values.

    Its rule for scales rounds the amax to a power of two before it divides; a -0 loses its sign there.
    """
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    preset, form = PRESETS[name]
    x, scheme = torch.from_numpy(weights(32, 128, 13, extremes=False) + 0), preset_name_to_scheme(preset, ["Linear"])
    compressor: Any = BaseCompressor.get_value_from_registry(form)
    groups = x.view(32, -1, 32)
    scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), scheme.weights)
    theirs = compressor.compress({"weight": x.clone(), "weight_scale": scale}, scheme)
    given = {"rowwise_data": theirs["weight_packed" if name == "mxfp4" else "weight"].view(torch.uint8)}
    given["rowwise_scale"] = theirs["weight_scale"]
    planes, _ = both(name, x.numpy())
    lower = planes["rowwise_scale"].int() - given["rowwise_scale"].int()
    assert set(lower.unique().tolist()) == ({0, 1} if name == "mxfp4" else {0})
    spread = (lower == 0).repeat_interleave(planes["rowwise_data"].shape[1] // 4, 1)
    assert spread.float().mean() > 0.8
    assert torch.equal(planes["rowwise_data"][spread], given["rowwise_data"][spread])
    read = compressor.decompress(theirs, scheme)["weight"]
    assert torch.equal(reference(name).dequantize_reference(given, 32, 128).to(read.dtype), read)


# ----------------------------------------------------------------------------------------------------- orders of scales
E8M0 = """element: {{format: e4m3}}
scale: {{format: e8m0, rule: power-of-two, round: up}}
orientations:
  rowwise:
    block: {{m: 1, k: {block}}}
    data: {{layout: m k}}
    scale: {{layout: m k/{block}, {order}}}
{gemm}"""


@pytest.mark.parametrize("shape", [(12, 1024), (7, 640)])
def test_packed_scales_of_deepgemm(shape: tuple[int, int]) -> None:
    """Its torch reference in tests/test_layout.py: four exponents along k in an int32, columns of whole 16 bytes."""
    order, (m, k) = "pad: [4, 4], swizzle: m (g c) -> g (m c), c: 4, words: 32", shape
    name = made(E8M0.format(block=128, order=order, gemm=""))
    planes = reference(name).quantize_reference(torch.from_numpy(weights(m, k, 9)))
    exponents = planes["rowwise_scale"].numpy()
    words = np.zeros((-(-k // 512), -(-m // 4) * 4), np.uint32)
    for row, column in np.ndindex(*exponents.shape):
        words[column // 4, row] |= np.uint32(int(exponents[row, column]) << 8 * (column % 4))
    assert np.array_equal(
        reference(name).lay_out(planes, m, k, ("rowwise",))["rowwise_scale"].numpy(), words.view(np.int32)
    )


def test_shuffled_scales_of_aiter() -> None:
    """Its e8m0_shuffle: tiles of 32 x 8 bytes in rows of 256; place by place, where each scale goes."""
    gemm = "gemm:\n  scale: {swizzle: (rt a b) (ct c d) -> rt ct d b c a, a: 2, b: 16, c: 2, d: 4}\n"
    name, (m, k) = made(E8M0.format(block=32, order="pad: [256, 8]", gemm=gemm)), (40, 320)
    q = recipe(name).quantize(torch.from_numpy(weights(m, k, 10)))
    exponents, found = q.planes()["rowwise_scale"].numpy(), q.buffers(swizzled=True)["rowwise_scale"].numpy().ravel()
    expected = np.zeros(256 * 16, np.uint8)
    for row, column in np.ndindex(*exponents.shape):
        tile = row // 32 * 2 + column // 8
        expected[tile * 256 + column % 4 * 64 + row % 16 * 4 + column % 8 // 4 * 2 + row % 32 // 16] = exponents[
            row, column
        ]
    assert np.array_equal(found, expected)

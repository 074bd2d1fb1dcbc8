"""Orders of codes and zero points in which weights are handed on: buffers of recipes of tests/unshipped beside the
packages that define them. Where a package does not install, its published packing stands here in numpy.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import unshipped
from numpy_models import F32, Array, recipe, reference
from places import EXCHANGED
from test_exchanged_formats import weights

from layoutc.conformance.material import array
from layoutc.runtime.numerics import pack, unpack

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def quantized(name: str, x: Array) -> tuple[dict[str, Array], dict[str, Array]]:
    """Planes and buffers of values."""
    unshipped.add_if_known(name)
    q = recipe(name).quantize(torch.from_numpy(x))
    return ({one: array(value) for one, value in tensors.items()} for tensors in (q.planes(), q.buffers()))


def codes_of(planes: dict[str, Array], low_first: bool = True) -> Array:
    """The codes of a plane of 4 bits, (m, k)."""
    return unpack(torch.from_numpy(planes["rowwise_data"]), 4, low_first).numpy()


def values_of(name: str, planes: dict[str, Array], shape: tuple[int, int]) -> Array:
    tensors = {one: torch.from_numpy(value) for one, value in planes.items()}
    for one, value in tensors.items():
        if value.dtype == torch.uint16:
            tensors[one] = value.view(recipe(name).LAYOUT.dtypes[one])
    values: Array = reference(name).dequantize_reference(tensors, *shape).numpy()
    return values


def in_words(codes: Array, order: tuple[int, ...] = tuple(range(8))) -> Array:
    """Eight codes of the last dim in each int32: code order[i] of them in bits 4 i to 4 i + 3."""
    groups = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, 8)
    words = sum(groups[..., column] << np.uint32(4 * place) for place, column in enumerate(order))
    return np.asarray(words, np.uint32).view(np.int32)


@pytest.mark.parametrize("shape", [(64, 256), (136, 384)])
def test_awq(shape: tuple[int, int]) -> None:
    """WQLinear_GEMM of AutoAWQ: qweight (in, out / 8), qzeros (in / 128, out / 8), scales; (code - zero) * scale."""
    planes, buffers = quantized("awq", weights(*shape, 11))
    codes, zeros = codes_of(planes), planes["rowwise_zero"]
    assert len(np.unique(zeros)) > 3
    assert np.array_equal(buffers["rowwise_data"], in_words(codes.T, AWQ_ORDER))
    assert np.array_equal(buffers["rowwise_zero"], in_words(zeros.T, AWQ_ORDER))
    assert np.array_equal(buffers["rowwise_scale"], planes["rowwise_scale"].T)
    scale = planes["rowwise_scale"].view(np.float16).astype(F32)
    spread = [np.repeat(one, 128, axis=1) for one in (zeros.astype(F32), scale)]
    assert np.array_equal(values_of("awq", planes, shape), (codes.astype(F32) - spread[0]) * spread[1])


@pytest.mark.parametrize("shape", [(64, 256), (136, 384)])
def test_gptq(shape: tuple[int, int]) -> None:
    """AutoGPTQ's qweight (in / 8, out), qzeros (in / 128, out / 8) of zeros - 1, scales; (code - zero) * scale."""
    planes, buffers = quantized("gptq", weights(*shape, 12))
    codes, stored = codes_of(planes), planes["rowwise_zero"]
    words = np.zeros((shape[1] // 8, shape[0]), np.uint32)
    for row in range(shape[1]):
        words[row // 8] |= codes.T[row].astype(np.uint32) << np.uint32(4 * (row % 8))
    assert np.array_equal(buffers["rowwise_data"], words.view(np.int32))
    assert np.array_equal(buffers["rowwise_zero"], in_words(stored.T))
    scale = planes["rowwise_scale"].view(np.float16).astype(F32)
    spread = [np.repeat(one, 128, axis=1) for one in (stored.astype(F32) + 1, scale)]
    assert np.array_equal(values_of("gptq", planes, shape), (codes.astype(F32) - spread[0]) * spread[1])


@pytest.mark.parametrize("shape", [(64, 256), (66, 128)])
def test_hqq(shape: tuple[int, int]) -> None:
    """BitPack.pack_4bit_u8 of groups of 64: the first half of all rows in the high bits; (code - zero) * scale."""
    planes, buffers = quantized("hqq", weights(*shape, 13))
    codes = codes_of(planes, low_first=False)
    groups = codes.reshape(-1, 64)
    step = len(groups) // 2
    assert np.array_equal(buffers["rowwise_data"].reshape(step, 64), (groups[:step] << 4) | groups[step:])
    scale, zero = (planes[f"rowwise_{kind}"].view(np.float16).astype(F32) for kind in ("scale", "zero"))
    assert np.any(zero != np.rint(zero))
    values = (groups.astype(F32) - zero.reshape(-1, 1)) * scale.reshape(-1, 1)
    assert np.array_equal(values_of("hqq", planes, shape), values.reshape(shape))


@pytest.mark.parametrize("shape", [(32, 64), (96, 320)])
def test_q4_1_of_gguf(shape: tuple[int, int]) -> None:
    """Its scales and minima; its codes in its bytes; its values. It rounds codes by scales that are not yet F16."""
    quants = pytest.importorskip("gguf.quants", reason="needs gguf")
    from gguf import GGMLQuantizationType

    x = weights(*shape, 14)
    records = quants.quantize(x, GGMLQuantizationType.Q4_1).reshape(-1, 20)
    scale, minimum = (records[:, at : at + 2].copy().view(np.uint16) for at in (0, 2))
    planes, _ = quantized("q4_1", x)
    assert np.array_equal(planes["rowwise_scale"].reshape(-1, 1), scale)
    both = np.array([x.reshape(-1, 32).min(1) < 0, x.reshape(-1, 32).max(1) > 0]).all(0)
    assert both.mean() > 0.9
    assert np.array_equal(planes["rowwise_zero"].reshape(-1, 1)[both], minimum[both])
    bytes_ = records[:, 4:]
    codes = np.concatenate([bytes_ & 15, bytes_ >> 4], axis=1).reshape(shape)
    packed = pack(torch.from_numpy(codes), 4, low_first=True).numpy()
    given = planes | {"rowwise_data": packed, "rowwise_scale": scale.reshape(shape[0], -1)}
    given["rowwise_zero"] = minimum.reshape(shape[0], -1)
    tensors = {one: torch.from_numpy(value) for one, value in given.items()}
    laid_out = reference("q4_1").lay_out(tensors, *shape, ("rowwise",))
    assert np.array_equal(laid_out["rowwise_data"].numpy().reshape(-1, 16), bytes_)
    values = quants.dequantize(records.reshape(shape[0], -1), GGMLQuantizationType.Q4_1)
    assert np.array_equal(values_of("q4_1", given, shape), values.reshape(shape))


@pytest.mark.parametrize("shape", [(32, 64), (96, 320)])
def test_pack_quantized_of_compressed_tensors(shape: tuple[int, int]) -> None:
    """Its own words of the codes of Kimi-K2's recipe, int32 (m, k / 8)."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    from compressed_tensors.compressors import pack_to_int32

    planes, buffers = quantized("int4_offset_group32", weights(*shape, 15))
    codes = torch.from_numpy(codes_of(planes).astype(np.int8) - 8)
    assert np.array_equal(buffers["rowwise_data"], pack_to_int32(codes, 4).numpy())


def test_tiles_of_tinygemm() -> None:
    """matrix_to_m16n8k16_Bint4_layout of PyTorch's int4mm.cu, lane by lane, for eight tiles of k at a time."""
    shape = m, k = 32, 384
    planes, buffers = quantized("tinygemm", weights(*shape, 16))
    codes, tiles = codes_of(planes).astype(np.int64), 8
    words = np.zeros((m // 8, k // (tiles * 16), 32, tiles // 2), np.int64)
    for n_tile, outer, lane, pair in np.ndindex(*words.shape):
        v = []
        for member in (0, 1):
            first = (outer * tiles + 2 * pair + member) * 16 + lane % 4 * 2
            v += [codes[n_tile * 8 + lane // 4, first + step] for step in (0, 1, 8, 9)]
        packed = (v[7] << 28) | (v[5] << 24) | (v[3] << 20) | (v[1] << 16) | (v[6] << 12) | (v[4] << 8) | (v[2] << 4)
        words[n_tile, outer, lane, pair] = packed | v[0]
    assert np.array_equal(buffers["rowwise_data"], words.astype(np.uint32).view(np.int32))


def test_scales_and_values_of_tinygemm() -> None:
    """By torchao: bf16 scales, and the bf16 values of code 8; values are (code - 8) * scale + value."""
    utils = pytest.importorskip("torchao.quantization.utils", reason="needs torchao")
    shape = 64, 256
    x = weights(*shape, 17)
    x[5, ::2] += 0.5  # all groups have both signs
    planes, _ = quantized("tinygemm", x)
    scale, value = (planes[f"rowwise_{kind}"] for kind in ("scale", "zero"))
    made = utils.get_groupwise_affine_qparams(torch.from_numpy(x), 4, 32, dtype=torch.bfloat16)
    assert np.array_equal(scale, array(made[0]))
    spread = [
        np.repeat(torch.from_numpy(one).view(torch.bfloat16).float().numpy(), 32, axis=1) for one in (scale, value)
    ]
    codes = codes_of(planes).astype(F32) - 8
    assert np.array_equal(values_of("tinygemm", planes, shape), codes * spread[0] + spread[1])


def test_tiles_of_marlin() -> None:
    """Marlin's permutations of codes and scales, as its Python packs them."""
    shape = m, k = 128, 256
    planes, buffers = quantized("marlin", weights(*shape, 18))
    perm: list[int] = []
    for i in range(32):
        one = []
        for block in (0, 1):
            for row in (2 * (i % 4), 2 * (i % 4) + 1, 2 * (i % 4 + 4), 2 * (i % 4 + 4) + 1):
                one.append(16 * row + i // 4 + 8 * block)
        for j in range(4):
            perm += [at + 256 * j for at in one]
    order = np.array(perm).reshape(-1, 8)[:, list(AWQ_ORDER)].ravel()
    tiles = codes_of(planes).T.reshape(k // 16, 16, m // 16, 16).transpose(0, 2, 1, 3).reshape(k // 16, m * 16)
    assert np.array_equal(buffers["rowwise_data"], in_words(tiles.reshape(-1, 1024)[:, order].reshape(tiles.shape)))
    of_scales = [i + 8 * j for i in range(8) for j in range(8)]
    scales = planes["rowwise_scale"].T
    assert np.array_equal(buffers["rowwise_scale"], scales.reshape(-1, 64)[:, of_scales].reshape(scales.shape))


def test_shuffled_weights_of_aiter() -> None:
    """AITER's shuffle_weight: `x.view(-1, n / 16, 16, k / 32, 2, 16).permute(0, 1, 3, 4, 2, 5)`."""
    text = (EXCHANGED / "fp8_divided128.yaml").read_text(encoding="utf-8").split("  columnwise:")[0]
    swizzle = "swizzle: (mt n) (kt h c) -> mt (kt h n c), n: 16, h: 2, c: 16"
    text = text.replace("layout: m k}", f"layout: m k, {swizzle}}}", 1)
    text = text.replace("summary:", "shape: {m: 16, k: 32}\nsummary:", 1)
    name = unshipped.name_of(text)
    unshipped.add(name, text.replace("fp8_divided128", name))
    m, k = 64, 128
    q = recipe(name).quantize(torch.from_numpy(weights(m, k, 19)))
    x = q.planes()["rowwise_data"]
    expected = x.view(-1, m // 16, 16, k // 32, 2, 16).permute(0, 1, 3, 4, 2, 5).reshape(m // 16, -1)
    assert torch.equal(q.buffers()["rowwise_data"], expected)

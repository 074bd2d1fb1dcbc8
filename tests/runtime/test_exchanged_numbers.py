"""Numbers in which weights are handed on: elements under exponents that they share, and codebooks; beside the packages
that define them, or their published definition in fractions and in numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import unshipped
from numpy_models import F32, Array, recipe, reference

from layoutc.runtime.numerics import unpack

MX = """shape: {{k: {block}}}
element: {{format: {element}}}
scale: {{format: e8m0, rule: shared-exponent}}
orientations:
  rowwise:
    block: {{m: 1, k: {block}}}
    data: {{layout: m k}}
    scale: {{layout: m k/{block}}}
"""
MICRO = """shape: {{k: 16}}
element: {{format: {element}}}
scale: {{format: micro, rule: shared-exponent, super: {{format: e8m0, rule: shared-exponent, block: {{m: 1, k: 16}}}}}}
orientations:
  rowwise:
    block: {{m: 1, k: 2}}
    data: {{layout: m k}}
    scale: {{layout: m k/2}}
"""
FORMATS = {
    "msfp4": "{sign: 1, exponent: 1, mantissa: 2, bias: 1}",  # a sign and 3 bits of magnitude, in steps of 1/4
    "mxint4": "{integer: 4, fraction: 2, symmetric: true}",
    "e3m0": "{sign: 1, exponent: 3, mantissa: 0, bias: 3}",
    "e7m0": "{sign: 1, exponent: 7, mantissa: 0, bias: 63}",
    "mx9": "{sign: 1, exponent: 1, mantissa: 6, bias: 1}",
    "mx6": "{sign: 1, exponent: 1, mantissa: 3, bias: 1}",
    "micro": "{sign: 0, exponent: 1, mantissa: 0, bias: 1, subnormals: false}",
    "ue5m3": "{sign: 0, exponent: 5, mantissa: 3, bias: 15, nan: [0xff]}",
    "uint4": "{integer: 4, offset: 0}",
}


def made(body: str, *formats: str) -> str:
    """The name of a recipe of these lines."""
    known = "".join(f"  {name}: {FORMATS[name]}\n" for name in formats)
    text = "summary: one of the table\n" + (f"formats:\n{known}" if known else "") + body
    name = unshipped.name_of(text)
    unshipped.add(name, f"layoutc: 1\nname: {name}\n{text}")
    return name


def weights(m: int, k: int, seed: int, *, extremes: bool = True) -> Array:
    """Of many magnitudes, with zeros; a row of subnormals and one of the largest numbers, as far as asked for."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((m, k)) * np.exp2(rng.uniform(-12, 4, (m, k)))).astype(F32)
    x[0, : k // 2], x[1, ::3] = 0, -0.0
    if extremes:
        x[2] = rng.integers(-9, 10, k) * F32(2.0**-149)
        x[3] *= F32(2.0**120) / np.abs(x[3]).max()
        x[4] *= F32(2.0**-126)
    return x


def both(name: str, x: Array) -> tuple[dict[str, torch.Tensor], Array]:
    """Planes of values, and the values that they stand for."""
    q = recipe(name).quantize(torch.from_numpy(x))
    return q.planes(), q.dequantize(torch.float32).numpy()


def same(a: Array, b: Array) -> bool:
    return bool(np.array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32)))


def fits(value: Fraction, negative: bool) -> F32:
    """An exact value as fp32, which it must be; a zero has the sign of its element."""
    found = F32(float(value))
    assert Fraction(float(found)) == value
    return F32(-0.0) if value == 0 and negative else found


def exponent_of(value: Fraction) -> int:
    """floor(log2(value)), of a value above 0."""
    power = value.numerator.bit_length() - value.denominator.bit_length()
    return power if Fraction(2) ** power <= value else power - 1


def nearest(magnitudes: Sequence[Fraction], value: Fraction) -> int:
    """Which of these is nearest, the even one of two that are as near; the last one beyond them."""
    return min(range(len(magnitudes)), key=lambda code: (abs(magnitudes[code] - abs(value)), code % 2))


# ----------------------------------------------------------------------------------------------------- shared exponents
QUARTERS = [Fraction(i, 4) for i in range(8)]
POWERS = [Fraction(0), *(Fraction(2) ** (i - 3) for i in range(1, 8))]
WIDE = [Fraction(0), *(Fraction(2) ** (i - 63) for i in range(1, 128))]
E2M1 = [Fraction(i, 2) for i in (0, 1, 2, 3, 4, 6, 8, 12)]
# Element -> block, bits, magnitudes by code, whether codes below zero are two's complement.
SHARED: dict[str, tuple[int, int, list[Fraction], bool]] = {
    "e2m1": (32, 4, E2M1, False),  # gpt-oss
    "msfp4": (16, 4, QUARTERS, False),  # MSFP12: Rouhani et al., NeurIPS 2020
    "mxint4": (32, 4, QUARTERS, True),  # as OCP MX v1.0 defines MXINT8, with 4 bits
    "e3m0": (32, 4, POWERS, False),
    "e7m0": (32, 8, WIDE, False),
}


@pytest.mark.parametrize("element", SHARED)
def test_elements_under_a_shared_exponent(element: str) -> None:
    """OCP MX v1.0, 6.3, in fractions: the exponent of the amax less the format's own, from -127; ties to even."""
    block, bits, magnitudes, complement = SHARED[element]
    name = made(MX.format(block=block, element=element), *([element] if element in FORMATS else []))
    x = weights(8, 64, 1)
    if element == "e7m0":
        x[3] *= F32(2.0**-60)
    planes, values = both(name, x)
    codes, scales = unpack(planes["rowwise_data"], bits, True).numpy().view(np.uint8), planes["rowwise_scale"].numpy()
    own = exponent_of(magnitudes[-1])
    for row, g in np.ndindex(*scales.shape):
        inside = x[row, g * block : (g + 1) * block].tolist()
        amax = max(abs(Fraction(one)) for one in inside)
        power = max(exponent_of(amax) - own, -127) if amax else -127
        assert scales[row, g] == power + 127
        for at, one in enumerate(inside, g * block):
            code, negative = nearest(magnitudes, Fraction(one) / Fraction(2) ** power), math.copysign(1, one) < 0
            value = (-1 if negative else 1) * magnitudes[code] * Fraction(2) ** power
            stored = (-code if negative else code) % (1 << bits) if complement else code + (negative << (bits - 1))
            assert codes[row, at] == stored
            assert values[row, at].view(np.uint32) == fits(value, negative and not complement).view(np.uint32)


def test_mxfp4_of_gpt_oss_is_torchao_s_in_bytes_and_transformers_in_values() -> None:
    """Codes and scales by torchao, but for scale 2^-127, by which it does not divide; values by transformers."""
    torchao: Any = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="needs torchao")
    mxfp4: Any = pytest.importorskip("transformers.integrations.mxfp4", reason="needs transformers")
    name, x = made(MX.format(block=32, element="e2m1")), torch.from_numpy(weights(24, 128, 2))
    planes = reference(name).quantize_reference(x)
    scale, data = torchao.to_mx(x, torch.float4_e2m1fn_x2, 32, torchao.ScaleCalculationMode.FLOOR)
    assert torch.equal(planes["rowwise_scale"], scale.view(torch.uint8))
    above = (planes["rowwise_scale"] > 0).repeat_interleave(16, 1)
    assert 0.7 < above.float().mean() < 1
    assert torch.equal(planes["rowwise_data"][above], data.view(torch.uint8)[above])
    rng = np.random.default_rng(3)
    blocks = torch.from_numpy(rng.integers(0, 256, (2, 16, 4, 16), np.uint8))
    scales = torch.from_numpy(rng.integers(2, 252, (2, 16, 4), np.uint8))
    given = {"rowwise_data": blocks.reshape(32, 64), "rowwise_scale": scales.reshape(32, 4)}
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    ours = reference(name).dequantize_reference(given, 32, 128).bfloat16()
    assert torch.equal(ours.view(2, 16, 128).transpose(1, 2), theirs)


@pytest.mark.parametrize(("element", "bits"), [("mx9", 8), ("mx6", 5)])
def test_micro_exponents(element: str, bits: int) -> None:
    """arXiv 2302.08007: an exponent for 16, one bit for 2 that halves their step, a sign and 7 or 4 bits."""
    x = weights(8, 64, 4)
    planes, values = both(made(MICRO.format(element=element), element, "micro"), x)
    codes = unpack(planes["rowwise_data"], bits, True).numpy().view(np.uint8)
    scales, levels = planes["rowwise_scale"].numpy(), planes["rowwise_super"].numpy()
    magnitudes = [Fraction(i, 1 << (bits - 2)) for i in range(1 << (bits - 1))]
    for row, g in np.ndindex(*levels.shape):
        inside = [Fraction(one) for one in x[row, 16 * g : 16 * g + 16].tolist()]
        amax = max(map(abs, inside))
        power = max(exponent_of(amax), -127) if amax else -127
        assert levels[row, g] == power + 127
        for pair in range(8):
            largest = max(map(abs, inside[2 * pair : 2 * pair + 2]))
            halved = largest < Fraction(2) ** power
            assert scales[row, 8 * g + pair] == (not halved)
            for at in (2 * pair, 2 * pair + 1):
                step = Fraction(2) ** (power - halved)
                code, negative = nearest(magnitudes, inside[at] / step), bool(np.signbit(x[row, 16 * g + at]))
                assert codes[row, 16 * g + at] == code + (negative << (bits - 1))
                value = fits((-1 if negative else 1) * magnitudes[code] * step, negative)
                assert values[row, 16 * g + at].view(np.uint32) == value.view(np.uint32)


# ------------------------------------------------------------------------------------------------------------ codebooks
BOOK = """formats: {{book: {{values: {values}}}}}
shape: {{m: {rows}, k: 64}}
element: {{format: book, pack: {pack}}}
scale: {{format: f32, rule: scale-first, multiply: true}}
orientations:
  rowwise:
    block: {{m: 1, k: 64}}
    data: {{layout: m k{swizzle}}}
    scale: {{layout: m k/64}}
"""
AF4 = [1.0, 0.72424863, 0.55496234, 0.42563882, 0.31675666, 0.21961274, 0.12934483, 0.04273164, 0.0]
AF4 += [-0.04934812, -0.14982478, -0.25607552, -0.3736951, -0.51243739, -0.69441008, -1.0]
ANY4 = [-1.0, -0.83, -0.61, -0.44, -0.3, -0.19, -0.1, -0.03, 0.0, 0.04, 0.11, 0.2, 0.32, 0.47, 0.66, 0.9]


def in_book(values: Sequence[float], scaled: Array) -> Array:
    """The code of the value that is nearest; in fp32, where the midpoint belongs to the lower of both."""
    order = np.argsort(values)
    ordered = np.array(values, F32)[order]
    return np.asarray(order[np.searchsorted((ordered[1:] + ordered[:-1]) / F32(2), scaled)], np.uint8)


@pytest.mark.parametrize(("values", "pack"), [(AF4, "high-first"), (ANY4, "low-first")], ids=["af4", "any4"])
def test_codebooks(values: list[float], pack: str) -> None:
    """AF4 (arXiv 2306.06965) as bitsandbytes numbers codes; any4 (arXiv 2507.04610) with one codebook, no offsets.

    any4 learns its values: these are some of both signs whose least and greatest differ in magnitude.
    """
    name, x = made(BOOK.format(values=values, pack=pack, rows=1, swizzle="")), weights(8, 128, 5, extremes=False)
    x[2] *= F32(2.0**-140)
    planes, decoded = both(name, x)
    groups = x.reshape(8, 2, 64)
    half = F32((F32(max(values)) - F32(min(values))) / F32(2))
    scale = np.abs(groups).max(2) / half
    with np.errstate(over="ignore"):
        inverse = np.minimum(F32(1) / np.where(scale == 0, F32(1), scale), np.finfo(F32).max)
    codes = in_book(values, (groups * inverse[..., None]).reshape(8, 128))
    assert same(planes["rowwise_scale"].numpy(), scale)
    assert np.array_equal(unpack(planes["rowwise_data"], 4, pack == "low-first").numpy(), codes)
    assert same(decoded, (np.array(values, F32)[codes].reshape(8, 2, 64) * scale[..., None]).reshape(8, 128))


def test_af4_of_bitsandbytes_has_these_values() -> None:
    functional: Any = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    assert torch.equal(functional.get_4bit_type("af4", device="cpu", blocksize=64), torch.tensor(AF4))


def test_three_values_of_bitnet() -> None:
    """Under a scale that is given, since its mean can't be stated; four distant rows in a byte by transformers."""
    bitnet: Any = pytest.importorskip("transformers.integrations.bitnet", reason="needs transformers")
    swizzle = ", swizzle: (h r) k -> r (k h), h: 4"
    name = made(BOOK.format(values=[-1, 0, 1], pack="low-first", rows=4, swizzle=swizzle))
    three = torch.from_numpy(np.random.default_rng(6).integers(-1, 2, (24, 64)).astype(F32))
    planes = reference(name).quantize_reference(three * 0.375)
    assert torch.equal(
        reference(name).lay_out(planes, 24, 64, ("rowwise",))["rowwise_data"], bitnet.pack_weights(three.clone())
    )
    planes["rowwise_scale"][:] = torch.rand(24, 1)
    assert torch.equal(reference(name).dequantize_reference(planes, 24, 64), three * planes["rowwise_scale"])

"""Powers of two that kernels find by exponents alone: those that a division, correctly rounded, leads to."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton, whose language kernels are written in")
import torch
import triton
import triton.language as tl
from quantized_cases import same_bits

from layoutc.runtime import triton as lt

F32_MAX = float(np.finfo(np.float32).max)
N = 1 << 14


@triton.jit
def power_kernel(x, power, inverse, VALUE: tl.constexpr, overflow, N: tl.constexpr):
    """Of each of N values: the power of two, and 1 over it."""
    at = tl.arange(0, N)
    found = lt.floor_power_of_two_over(VALUE, tl.load(x + at), overflow)
    tl.store(power + at, found)
    tl.store(inverse + at, lt.over_power_of_two(found))


def amaxes(value: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Of every exponent: the mantissas around that of `value`, the ends, and some others; subnormal ones; 0."""
    generator = np.random.default_rng(0)
    mantissa = int(np.float32(value).view(np.int32)) & 0x7FFFFF
    near = {0, 1, 0x7FFFFF, *(min(max(mantissa + step, 0), 0x7FFFFF) for step in (-2, -1, 0, 1, 2))}
    drawn = generator.integers(0, 1 << 23, N // 255 - len(near))
    bits = (np.arange(255)[:, None] << 23) + np.concatenate([sorted(near), drawn])[None, :]
    return np.resize(bits.astype(np.int32).ravel(), N).view(np.float32)


@pytest.mark.parametrize("overflow", [F32_MAX, 65504.0])
@pytest.mark.parametrize("value", [4.0, 6.0, 7.5, 127.0, 448.0, 57344.0, 28.0, float(np.nextafter(np.float32(8), 0))])
def test_a_power_of_two_is_that_of_the_quotient(value: float, overflow: float) -> None:
    x = amaxes(value)
    power, inverse = torch.empty(N), torch.empty(N)
    power_kernel[(1,)](torch.from_numpy(x), power, inverse, value, overflow, N)
    with np.errstate(divide="ignore", over="ignore"):
        quotient = np.float32(value) / x
    quotient = np.where(np.isinf(quotient), np.float32(overflow), quotient)
    expected = (quotient.view(np.int32) & 0x7F800000).view(np.float32)
    assert same_bits(power, torch.from_numpy(expected))
    assert same_bits(inverse, torch.from_numpy(np.float32(1) / expected))

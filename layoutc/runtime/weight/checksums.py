"""CRC-32 of tensors, as zlib computes it, by several threads: a checkpoint should not wait for one."""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, reduce

import torch
from torch import Tensor

CHUNK = 2**24  # bytes that a thread takes at once
THREADS = min(8, os.cpu_count() or 1)
_POLYNOMIAL = 0xEDB88320  # of CRC-32, reflected: the highest bit is the coefficient of x^0
_ONE, _X8 = 1 << 31, 1 << 23


def crc32(tensor: Tensor) -> int:
    """CRC-32 of a plain tensor's bytes in row-major order."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    if data.numel() <= CHUNK:
        return _crc32(data)
    chunks = data.split(CHUNK)  # type: ignore[no-untyped-call]
    with ThreadPoolExecutor(THREADS) as pool:  # of this call alone: threads do not survive a fork
        found = list(pool.map(_crc32, chunks))
    return reduce(lambda so_far, one: combine(so_far, *one), zip(found, map(len, chunks), strict=True), 0)


def combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of bytes, given that of their first part, and that of the rest, which has `length` bytes."""
    return _times(_power(length), first) ^ second


def _crc32(data: Tensor) -> int:
    return zlib.crc32(memoryview(data.numpy())) if data.numel() else 0  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _power(length: int) -> int:
    """x to the power of 8 * length, modulo the polynomial."""
    found, square = _ONE, _X8
    while length:
        if length & 1:
            found = _times(found, square)
        square, length = _times(square, square), length >> 1
    return found


def _times(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo that of CRC-32."""
    found = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            found ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return found

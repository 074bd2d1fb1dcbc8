"""CRC-32 of tensors, as zlib computes it, on several threads: one thread would hold up a checkpoint."""

from __future__ import annotations

import ctypes
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, reduce

import torch
from torch import Tensor

CHUNK = 2**24  # bytes that a thread takes at a time
THREADS = min(8, os.cpu_count() or 1)
_POLYNOMIAL = 0xEDB88320  # of CRC-32, reflected: the highest bit is the coefficient of x^0
_ONE, _X8 = 1 << 31, 1 << 23


def crc32(tensor: Tensor) -> int:
    """CRC-32 of a plain tensor's bytes in row-major order."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    if data.numel() <= CHUNK:
        return _crc32(data)
    chunks = data.split(CHUNK)  # type: ignore[no-untyped-call]
    with ThreadPoolExecutor(THREADS) as pool:  # made for each call, since threads do not survive a fork
        checksums = list(pool.map(_crc32, chunks))
    return reduce(lambda so_far, one: combine(so_far, *one), zip(checksums, map(len, chunks), strict=True), 0)


def combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of two parts joined: `first` is that of the first part, `second` that of the next `length` bytes."""
    return _times(_power(length), first) ^ second


def _crc32(data: Tensor) -> int:
    # Not of data.numpy(), after which FSDP2 can't free the storage of a gathered weight.
    return zlib.crc32((ctypes.c_ubyte * data.numel()).from_address(data.data_ptr())) if data.numel() else 0


@lru_cache(maxsize=64)
def _power(length: int) -> int:
    """x to the power of 8 * length, modulo the polynomial."""
    power, square = _ONE, _X8
    while length:
        if length & 1:
            power = _times(power, square)
        square, length = _times(square, square), length >> 1
    return power


def _times(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product

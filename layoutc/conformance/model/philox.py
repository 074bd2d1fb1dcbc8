"""An independent implementation of the random bits: Philox 4x32-10, from its paper (Salmon et al., SC 2011)."""

from __future__ import annotations

import numpy as np

from layoutc.conformance.model.codes import Array

_U64 = np.uint64
_HALF = _U64(32)
_LOW = _U64(0xFFFFFFFF)


def philox(counter: tuple[Array, Array, Array, Array], key: tuple[int, int]) -> tuple[Array, ...]:
    """Four 32-bit words from a four-word counter and a two-word key, elementwise."""
    l0, r0, l1, r1 = (np.asarray(word, _U64) for word in counter)
    k0, k1 = key
    for _ in range(10):
        first, second = l0 * _U64(0xD2511F53), l1 * _U64(0xCD9E8D57)
        l0, r0 = (second >> _HALF) ^ r0 ^ _U64(k0), second & _LOW
        l1, r1 = (first >> _HALF) ^ r1 ^ _U64(k1), first & _LOW
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return l0, r0, l1, r1


def element_bits(seed: int, m: int, k: int, stream: int) -> Array:
    """32 random bits for each element of an (m, k) matrix, uint64: (i, j) has word j % 4 of (j // 4, i, stream, 0)."""
    i, j = np.indices((m, k))
    words = philox((j // 4, i, np.full_like(i, stream), np.zeros_like(i)), (seed % 2**32, (seed >> 32) % 2**32))
    bits: Array = np.choose(j % 4, words)
    return bits

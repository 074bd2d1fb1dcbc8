"""Activations that several weights read, quantized once: q, k and v; gate and up."""

from __future__ import annotations

import weakref
from typing import NamedTuple

from torch import Tensor

from layoutc.runtime.weight import operators

Buffers = dict[str, Tensor]
Key = tuple[object, ...]


class _Entry(NamedTuple):
    x: weakref.ref[Tensor]
    version: int
    quantized: dict[Key, Buffers]


_last: _Entry | None = None  # one is enough: those weights follow one another


def get(x: Tensor, key: Key) -> Buffers | None:
    """What was quantized from x under a key, if x is the last activation and nothing has been written into it."""
    entry = _last
    if entry is None or operators.traced(x) or x.is_inference() or entry.x() is not x or entry.version != x._version:
        return None
    return entry.quantized.get(key)


def keep(x: Tensor, key: Key, quantized: Buffers) -> None:
    """Remembers what was quantized from x, until x is freed or another activation comes."""
    global _last
    if operators.traced(x) or x.is_inference():
        return
    entry = _last
    if entry is None or entry.x() is not x or entry.version != x._version:
        entry = _last = _Entry(weakref.ref(x, _forget), x._version, {})
    entry.quantized[key] = quantized


def _forget(reference: weakref.ref[Tensor]) -> None:
    global _last
    if _last is not None and _last.x is reference:
        _last = None

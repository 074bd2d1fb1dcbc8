"""Activations that several weights read, quantized once: q, k and v; gate and up."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import Tensor

from layoutc.runtime.captures import capturing
from layoutc.runtime.streams import stream_of
from layoutc.runtime.torch_private import traced, version_of


class _Entry(NamedTuple):
    x: weakref.ref[Tensor]
    version: int
    stream: int  # what was written on one stream is not there on another
    quantized: dict[object, Any]


_last: _Entry | None = None  # one is enough: those weights follow one another


def of(x: Tensor) -> dict[object, Any]:
    """What was quantized from x so far, by key, and where to keep more of it: until x is freed, something is written
    into it, or another activation comes. Where nothing can be shared, a dict that nobody else sees."""
    global _last
    if not _can_share(x):
        return {}
    entry, stream = _last, stream_of(x.device)
    if entry is None or entry.x() is not x or entry.version != version_of(x) or entry.stream != stream:
        entry = _last = _Entry(weakref.ref(x, _forget), version_of(x), stream, {})
    return entry.quantized


def version(x: Tensor) -> int:
    """A number that writes into x change; tensors of inference mode have none."""
    return -1 if x.is_inference() else version_of(x)


def _can_share(x: Tensor) -> bool:
    """False in traced graphs, where the compiler finds equal calls; for tensors without versions; and while a CUDA
    graph is captured, which must hold all that makes its values."""
    if traced(x) or x.is_inference():
        return False
    return not capturing(x.device)


def _forget(reference: weakref.ref[Tensor]) -> None:
    global _last
    if _last is not None and _last.x is reference:
        _last = None

"""Quantizes activations once for several weights that read them, such as q, k and v, or gate and up."""

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
    stream: int  # other streams may not see what was written on this one
    quantized: dict[object, Any]


_last: _Entry | None = None  # one entry is enough: weights that share an input run back to back


def of(x: Tensor) -> dict[object, Any]:
    """The cache of what was quantized from x, by key; callers add to it. It lasts until x is freed or modified, or
    another activation comes. Where nothing can be shared, returns a new dict."""
    global _last
    # In traced graphs the compiler merges equal calls; a captured graph must contain all that computes its values.
    if traced(x) or x.is_inference() or capturing(x.device):
        return {}
    entry, stream = _last, stream_of(x.device)
    if entry is None or entry.x() is not x or entry.version != version_of(x) or entry.stream != stream:
        entry = _last = _Entry(weakref.ref(x, _forget), version_of(x), stream, {})
    return entry.quantized


def version(x: Tensor) -> int:
    """The version counter of x, which writes increment; -1 for inference tensors, which have none."""
    return -1 if x.is_inference() else version_of(x)


def _forget(reference: weakref.ref[Tensor]) -> None:
    global _last
    if _last is not None and _last.x is reference:
        _last = None

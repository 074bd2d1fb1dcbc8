"""What products reuse: a weight as an operand of scaled_mm, and activations that several weights read."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from layoutc.runtime.operands import scaled_mm
from layoutc.runtime.streams import capturing, stream_of
from layoutc.runtime.torch_private import storage_key, traced, version_of
from layoutc.runtime.weight import gathered_in_graphs, operators
from layoutc.runtime.weight.tensor import QuantizedTensor

Buffers = Mapping[str, Tensor]


class _KeptSide(NamedTuple):
    """An operand that consists of views of a weight's planes."""

    planes: Mapping[str, Tensor]  # all planes at the time
    side: scaled_mm.Side


def kept_side(weight: QuantizedTensor, orientation: str) -> scaled_mm.Side | None:
    """The operand that a previous product kept for the weight; None if planes were replaced or freed since."""
    kept: _KeptSide | None = weight.readings.get((orientation, "operand"))
    planes = weight.store.planes
    if kept is None or not isinstance(planes, dict) or weight.store.writes.waiting or len(planes) != len(kept.planes):
        return None
    for name, plane in kept.planes.items():
        if planes.get(name) is not plane or not plane.untyped_storage().nbytes():
            return None
    return kept.side


def keep_side(weight: QuantizedTensor, orientation: str, side: scaled_mm.Side) -> None:
    """Keeps an operand for later products if it consists of views, which follow writes into the planes."""
    planes = weight.store.planes
    is_stored = f"{orientation}_data" in weight.LAYOUT.as_stored  # else codes were laid out for this product alone
    if not is_stored or not isinstance(planes, dict) or traced(side.codes):
        return
    own = {storage_key(plane) for plane in planes.values()}
    if all(storage_key(one) in own for one in (side.codes, *side.scales)):
        weight.readings[orientation, "operand"] = _KeptSide(dict(planes), side)


def weight_buffers(weight: QuantizedTensor, orientation: str) -> Buffers:
    """The buffers that a GEMM reads of a whole weight; gathers the orientation if this pass does not hold it."""
    swizzled = bool(weight.LAYOUT.swizzled)
    if (handle := weight.store.handle) is not None:
        return gathered_in_graphs.lay_out(type(weight), handle, weight.store.window, (orientation,), swizzled)
    weight.check_readable()
    planes = weight.store.planes if orientation in weight.orientations else weight.held(orientation)
    return operators.lay_out(type(weight), planes, *weight.store.matrix, (orientation,), swizzled, typed=True)


class _Entry(NamedTuple):
    x: weakref.ref[Tensor]
    version: int
    stream: int  # other streams may not see what was written on this one
    quantized: dict[object, Any]


_last: _Entry | None = None  # one entry is enough: weights that share an input run back to back


def of_input(x: Tensor) -> dict[object, Any]:
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

"""A quantized weight as an operand of scaled_mm: views of its planes, or buffers laid out for one product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from layoutc.runtime.operands import scaled_mm
from layoutc.runtime.torch_private import storage_key, traced
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

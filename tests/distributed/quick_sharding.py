"""DTensor's propagation of shardings, without working out again for each shape what does not depend on shapes.

An optimizer's step makes ten decisions for each shape of a master, of a tenth of a second together, and each parameter
and each value of a state dict is detached or copied. They all come to the same: operands of one sharding give a result
of that sharding. Here the first is torch's own for each operator, mesh and placement, and is repeated for operands of
other shapes where it was that. Values pass through torch's own code. LAYOUTC_PLAIN_SHARDING=1 leaves it as it is.
"""

from __future__ import annotations

import dataclasses
from functools import wraps
from typing import Any


def quicken() -> None:
    """Patches what of it this torch has; the rest stays slow."""
    import torch
    from torch.distributed.tensor import _sharding_prop

    propagator = getattr(_sharding_prop, "ShardingPropagator", None)
    original = getattr(propagator, "propagate_op_sharding_non_cached", None)
    if original is None:
        return
    aten = torch.ops.aten
    elementwise = {aten.zeros_like.default, aten.sqrt.default, aten.div.Tensor, aten.mul_.Tensor, aten.add_.Tensor}
    elementwise |= {aten.addcdiv_.default, aten.addcmul_.default, aten.lerp_.Scalar}
    elementwise |= {aten.detach.default, aten.copy_.default}
    known: dict[Any, Any] = {}

    @wraps(original)
    def propagate(self: Any, op_schema: Any) -> Any:
        key, operand = kind_of(op_schema) if op_schema.op in elementwise else (None, None)
        if key is None:
            return original(self, op_schema)
        if key not in known:
            found = original(self, op_schema)
            known[key] = found if stays(found, operand) else None
            return found
        if known[key] is None:
            return original(self, op_schema)
        kept = known[key]
        meta = operand.tensor_meta._replace(dtype=kept.output_spec.tensor_meta.dtype)
        return dataclasses.replace(kept, output_spec=operand.shallow_copy_with_tensor_meta(meta))

    propagator.propagate_op_sharding_non_cached = propagate


def kind_of(op_schema: Any) -> tuple[Any, Any]:
    """All of a call but its shape and its numbers, and an operand; None of a call whose operands are not all alike."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    given = [*op_schema.args_schema, *op_schema.kwargs_schema.values()]
    operands = [one for one in given if isinstance(one, DTensorSpec)]
    metas = {(one.mesh, one.placements, tuple(one.tensor_meta.shape), one.tensor_meta.stride) for one in operands}
    if len(metas) != 1 or any(placement.is_partial() for placement in operands[0].placements):
        return None, None
    shape, size = operands[0].tensor_meta.shape, 1
    for length, stride in zip(reversed(shape), reversed(operands[0].tensor_meta.stride), strict=True):
        if type(length) is not int or stride != size:  # traced, or not contiguous
            return None, None
        size *= length
    rest = [one.tensor_meta.dtype if isinstance(one, DTensorSpec) else number_or_itself(one) for one in given]
    named = tuple(op_schema.kwargs_schema)
    return (op_schema.op, operands[0].mesh, operands[0].placements, len(shape), named, *rest), operands[0]


def number_or_itself(value: Any) -> Any:
    """Numbers decide nothing about a sharding."""
    return type(value) if type(value) in (int, float) else repr(value)


def stays(found: Any, operand: Any) -> bool:
    """Whether a decision is that nothing moves, and that the result is where its operands are."""
    spec = found.output_spec
    return (
        getattr(spec, "placements", None) == operand.placements
        and spec.mesh == operand.mesh
        and not found.needs_redistribute
        and found.redistribute_schema is None
        and spec.tensor_meta.shape == operand.tensor_meta.shape
        and spec.tensor_meta.stride == operand.tensor_meta.stride
    )

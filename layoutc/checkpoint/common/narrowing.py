"""Values in a dtype that holds less: what is finite stays finite, or nothing is made of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from layoutc.runtime.errors import LayoutError


def check_finite(name: str, made: Tensor, before: Callable[[], Tensor]) -> Tensor:
    """`made`, the values of a tensor in a narrower dtype. Raises LayoutError if one of them that was finite before is
    infinite by now: with their number, the largest, and dtypes that hold it.

    before: the same values in a wider dtype; called only where not all of `made` are finite.
    """
    if not made.is_floating_point() or bool(made.isfinite().all()):
        return made
    values = before()
    lost = values.isfinite() & ~made.isfinite()
    if not lost.any():
        return made
    largest, dtype = float(values[lost].abs().max()), str(made.dtype).removeprefix("torch.")
    wider = [one for one in ("bfloat16", "float32") if torch.finfo(getattr(torch, one)).max >= largest]
    raise LayoutError(
        f"{name}: {int(lost.sum()):,} finite values would be infinite in {dtype}, whose largest is "
        f"{torch.finfo(made.dtype).max:g}; the largest of them is {largest:g}"
        + (f", which {' and '.join(wider)} can hold" if wider else "")
    )

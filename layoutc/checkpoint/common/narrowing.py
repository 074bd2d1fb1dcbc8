"""Conversion to narrower dtypes: raises if finite values would overflow, and reports rounding."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from layoutc.runtime.errors import LayoutError, few, printable
from layoutc.runtime.weight.tensor import QuantizedTensor

AT_A_TIME = 1 << 22  # values to compare at a time
SHOWN = 2
# Dtype -> the source dtypes whose finite values may overflow in it.
REACH = {
    torch.float16: (torch.bfloat16, torch.float32, torch.float64),
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}


def check_finite(name: str, made: Tensor, before: Callable[[], Tensor]) -> Tensor:
    """Returns `made`, a tensor's values in a narrower dtype. Raises LayoutError if finite values became infinite; the
    message has their number, the largest one, and dtypes that can hold it.

    before: returns the same values in a wider dtype; called only if some of `made` are not finite.
    """
    if not made.is_floating_point() or bool(made.isfinite().all()):
        return made
    values = before().to(made.device)
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


def check_holds(name: str, values: Tensor, into: torch.dtype) -> None:
    """Raises LayoutError like `check_finite` if finite values, plain or dequantized, overflow in a narrower dtype."""
    if isinstance(values, QuantizedTensor):
        if into is torch.float16:  # other dtypes hold the range of all codes
            check_finite(name, values.dequantize(into), partial(values.dequantize, torch.float32))
    elif values.dtype in REACH.get(into, ()):
        check_finite(name, values.to(into), values.double)


def rounds(name: str, values: Tensor, into: torch.dtype) -> bool:
    """True if a narrower dtype rounds any value. Raises LayoutError like `check_finite`."""
    there = values.to(into)
    check_finite(name, there, partial(values.to, torch.float32))
    flat, made, found = values.reshape(-1), there.reshape(-1), False
    for first in range(0, len(flat), AT_A_TIME):
        part, close = (one[first : first + AT_A_TIME] for one in (flat, made))
        found = found or bool(((close.to(part.dtype) != part) & ~part.isnan()).any())
    return found


def warn_of(before: str, names: Sequence[str], after: str) -> None:
    """Warns once if there are names: lists the first few, and the number of the others."""
    if names:
        warnings.warn(f"{before}{printable(few(names, SHOWN))}{after}", stacklevel=4)

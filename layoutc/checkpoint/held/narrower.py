"""Files with a narrower dtype than a plane's: which of them the plane can hold, and which values fit in them."""

from __future__ import annotations

import torch
from torch import Tensor

from layoutc.checkpoint.held.stored import Stored
from layoutc.runtime.bindings.facts import BoundPlane
from layoutc.runtime.facts import Facts

# fp32 holds every value of these dtypes. Bytes in place of fp32 are bare exponents (`scale_fmt: ue8m0`).
INTO_F32 = {"F16": torch.float16, "BF16": torch.bfloat16, "F8_E8M0": torch.float8_e8m0fnu, "U8": torch.float8_e8m0fnu}

STORAGES = ("BF16", "F16", "F32", "F64")  # dtypes of bitsandbytes' codes under FSDP1, which needs uniform dtypes


def is_narrower(bound: BoundPlane, dtype: str) -> bool:
    """True if the fp32 plane holds every value that a file's tensor of this narrower dtype can have."""
    exact = bound.codes is None and bound.over is None and bound.by is None
    return exact and bound.dtype == "F32" and dtype in INTO_F32


def is_storage(bound: BoundPlane, stored: Stored) -> bool:
    """True for byte codes in one column that the file declares as a wider float dtype."""
    column = len(stored.shape) == 2 and stored.shape[1] == 1
    return bound.dtype == "U8" and bound.bits <= 8 and bound.codes is None and column and stored.dtype in STORAGES


def as_stored(bound: BoundPlane, plane: Facts, dtype: str | None) -> tuple[BoundPlane, Facts]:
    """A plane's binding and facts in files of this dtype; None: the binding's dtype."""
    if bound.codes is not None:  # one byte per encoded value
        return bound, plane._replace(dtype=torch.uint8)
    if dtype is None or not is_narrower(bound, dtype):
        return bound, plane
    into = INTO_F32[dtype]
    return bound._replace(dtype=dtype, bits=8 * into.itemsize), plane._replace(dtype=into)


def fits(values: Tensor, dtype: torch.dtype) -> bool:
    """True if a dtype holds these fp32 values bit for bit, except for NaN payloads."""
    there = values.to(dtype).to(values.dtype)
    return bool(((there == values) & (there.signbit() == values.signbit()) | there.isnan() & values.isnan()).all())

"""Files whose dtype is narrower than a plane's: which of them the plane holds, and which of its values they hold."""

from __future__ import annotations

import torch
from torch import Tensor

from layoutc.checkpoint.held.stored import Stored
from layoutc.runtime.bindings.facts import BoundPlane
from layoutc.runtime.facts import Facts

# fp32 holds every value of these. Bytes in place of fp32 are exponents alone, as `scale_fmt: ue8m0` has them.
INTO_F32 = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.float8_e8m0fnu,
}

STORAGES = ("BF16", "F16", "F32", "F64")  # of bitsandbytes' codes, for FSDP1, which shards tensors of one dtype alone


def is_narrower(bound: BoundPlane, dtype: str) -> bool:
    """True if a plane of fp32 holds every value that a file's tensor of this dtype may have."""
    exact = bound.codes is None and bound.over is None and bound.by is None
    return exact and bound.dtype == "F32" and dtype in INTO_F32


def is_storage(bound: BoundPlane, stored: Stored) -> bool:
    """True for codes in one column of bytes, in a tensor that calls them numbers of a wider dtype."""
    column = len(stored.shape) == 2 and stored.shape[1] == 1
    return bound.dtype == "U8" and bound.bits <= 8 and bound.codes is None and column and stored.dtype in STORAGES


def as_stored(bound: BoundPlane, plane: Facts, dtype: str | None) -> tuple[BoundPlane, Facts]:
    """A plane as files of this dtype have it, None for the binding's: what is read, and what is written there."""
    if bound.codes is not None:  # a byte for each value that they have a code of
        return bound, plane._replace(dtype=torch.uint8)
    if dtype is None or not is_narrower(bound, dtype):
        return bound, plane
    into = INTO_F32[dtype]
    return bound._replace(dtype=dtype, bits=8 * into.itemsize), plane._replace(dtype=into)


def fits(values: Tensor, dtype: torch.dtype) -> bool:
    """True if a dtype holds these values of fp32, each to the bit but for what a NaN has beside being one."""
    there = values.to(dtype).to(values.dtype)
    return bool(((there == values) & (there.signbit() == values.signbit()) | there.isnan() & values.isnan()).all())

"""A tensor in a file: the position of its bytes, and its torch dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
# Adds dtypes that only newer versions of safetensors support.
OF_OTHERS = DTYPES | {"F8_E8M0": torch.float8_e8m0fnu, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64}
NAMES = {dtype: name for name, dtype in OF_OTHERS.items()}


class Stored(NamedTuple):
    """A tensor as a file's header describes it, in bytes `begin` to `end` of the file. header: the header's dtype and
    shape, if the bytes are read as another dtype."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    header: tuple[str, tuple[int, ...]] | None = None


class Stack(NamedTuple):
    """A plain stack of matrices in files that hold these one by one, or in parts of equal rows. parts: in the order of
    the stack's rows, all of one dtype."""

    parts: tuple[Stored, ...]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """The parts' dtype, as safetensors names it."""
        return self.parts[0].dtype

    def read(self, index: tuple[slice, ...], fetch: Read) -> Tensor:
        """A slice of the stack."""
        matrices, rows, columns = (range(size)[part] for part, size in zip(index, self.shape, strict=True))
        of_each = len(self.parts) // self.shape[0]
        each = self.shape[1] // of_each
        out = torch.empty(len(matrices), len(rows), len(columns), dtype=DTYPES[self.dtype], device="cpu")
        for matrix, into in zip(matrices, out, strict=True):
            for number, part in enumerate(self.parts[matrix * of_each : (matrix + 1) * of_each]):
                first, last = max(rows.start, number * each), min(rows.stop, (number + 1) * each)
                if first < last:
                    box = slice(first - number * each, last - number * each), index[2]
                    into[first - rows.start : last - rows.start].copy_(fetch(part, box))
        return out


Read = Callable[[Stored, tuple[slice, ...]], Tensor]  # reads slices of a tensor; () reads all of it

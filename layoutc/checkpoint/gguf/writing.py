"""Writes a GGUF file: key-values copied from another file, then the planned tensors, one after another."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from layoutc.checkpoint.common.folders import partly, sync
from layoutc.checkpoint.common.whole_weights import whole_planes
from layoutc.checkpoint.gguf.container import MAGIC, Header
from layoutc.checkpoint.gguf.kinds import Kind
from layoutc.checkpoint.gguf.values import CHUNK, Rotated, Share, orientation_of
from layoutc.checkpoint.untrusted.files import open_file, read_at
from layoutc.runtime.bindings.gguf_types import TYPES
from layoutc.runtime.errors import DamagedError, LayoutError
from layoutc.runtime.weight.tensor import QuantizedTensor

COPIED = 1 << 24  # bytes of another file to copy at a time


class Planned(NamedTuple):
    """A tensor that a file will hold. shape: outermost dim first."""

    name: str
    number: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The tensor's bytes, without padding."""
        kind = TYPES[self.number]
        return prod(self.shape) // kind.elements * kind.nbytes


class OpenGguf:
    """A file that is written under a temporary name, and renamed into place when all planned tensors are written.

    Raises OSError if writing fails, DamagedError if the source changed, LayoutError for a size other than planned."""

    def __init__(self, path: Path, source: Header, planned: Sequence[Planned]) -> None:
        self._path, self._planned, self._alignment = path, list(planned), source.alignment
        self._partly = partly(path)
        self._file: BinaryIO = open(self._partly, "xb")  # noqa: SIM115 - closed by `finish` or `abandon`
        try:
            self._begin(source)
        except BaseException:
            self.abandon()
            raise

    def _begin(self, source: Header) -> None:
        with open_file(source.path) as file:
            keys = b"".join(read_at(file, begin, end - begin) for begin, end in source.keys.values())
        if len(keys) != sum(end - begin for begin, end in source.keys.values()):
            raise DamagedError(f"{source.path} was truncated while it was read; something else writes into it")
        counts = struct.pack("<IQQ", source.version, len(self._planned), len(source.keys))
        self._file.write(MAGIC + counts + keys + b"".join(self._entries()))
        self._pad()

    def _entries(self) -> Iterator[bytes]:
        offset = 0
        for name, number, shape in self._planned:
            raw = name.encode()
            yield struct.pack("<Q", len(raw)) + raw + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
            yield struct.pack("<IQ", number, offset)
            nbytes = Planned(name, number, shape).nbytes
            offset += nbytes + -nbytes % self._alignment

    def _pad(self) -> None:
        self._file.write(bytes(-self._file.tell() % self._alignment))

    def put(self, name: str, pieces: Iterator[Tensor]) -> None:
        """Writes the next tensor, in contiguous pieces on the CPU."""
        planned, begin = self._planned.pop(0), self._file.tell()
        for piece in pieces:
            self._file.write(piece.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if planned.name != name or self._file.tell() - begin != planned.nbytes:
            raise LayoutError(f"{name} has {self._file.tell() - begin} bytes, not those of {planned} as planned")
        self._pad()

    def finish(self) -> None:
        """Syncs the file and renames it into place. Raises FileExistsError if the name is taken by now."""
        if self._planned:
            raise LayoutError(f"{self._planned[0].name} was planned, and not made")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        check_new(self._path)
        os.replace(self._partly, self._path)
        sync(self._path.parent)

    def abandon(self) -> None:
        """Removes the file unless it has been renamed into place."""
        self._file.close()
        self._partly.unlink(missing_ok=True)


def check_new(path: Path) -> None:
    """Raises FileExistsError if the path exists."""
    if os.path.lexists(path):
        raise FileExistsError(f"{path} exists: export into a new file")


def records_of(kind: Kind, whole: Tensor, order: Rotated | Share | None) -> Iterator[Tensor]:
    """The records of a whole weight, or of a share, a few rows at a time, in the file's row order. Made from planes, or
    from plain values, which are quantized as a gather does. Each record belongs to one row."""
    cls, binding = kind
    orientation, k, first = orientation_of(binding), whole.shape[-1], next(iter(cls.LAYOUT.sources))
    quantized = isinstance(whole, QuantizedTensor) or cls.LAYOUT.stochastic  # random bits depend on positions
    planes = whole_planes(cls, whole) if quantized else {}
    values = None if quantized else whole.reshape(-1, k)
    m = prod(whole.shape[:-1]) // (order.parts if isinstance(order, Share) else 1)
    each = max(1, CHUNK // max(1, k // binding.elements * binding.nbytes))
    for start in range(0, m, each):
        rows = _in_model(range(start, min(start + each, m)), order)
        made = planes if values is None else whole_planes(cls, values[rows])
        held = {name: made[name][rows] if planes else made[name] for name in cls.LAYOUT.sources[first]}
        part = {name: plane.cpu() for name, plane in held.items()}
        yield cls.REFERENCE.lay_out(part, min(each, m - start), k, (orientation,))[binding.buffer]


def plain_values_of(values: Tensor, dtype: torch.dtype, order: Rotated | Share | None) -> Iterator[Tensor]:
    """The values of a whole tensor, or of a share, in a dtype, a few rows at a time, in the file's row order."""
    values = values.reshape(-1, values.shape[-1]) if isinstance(order, Share) else values
    m = len(values) // (order.parts if isinstance(order, Share) else 1)
    each = max(1, CHUNK // max(1, prod(values.shape[1:])))
    for first in range(0, m, each):
        yield values[_in_model(range(first, min(first + each, m)), order)].to("cpu", dtype)


def _in_model(rows: range, order: Rotated | Share | None) -> slice | Tensor:
    """The rows of a model that these rows of a file hold."""
    if order is None:
        return slice(rows.start, rows.stop)
    return order.in_model(torch.arange(rows.start, rows.stop, device="cpu"))


def copied(raw: Tensor) -> Iterator[Tensor]:
    """The bytes of a mapped file, COPIED at a time."""
    for first in range(0, len(raw), COPIED):
        yield raw[first : first + COPIED]

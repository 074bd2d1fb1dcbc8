"""Reads values from a GGUF file: slices of plain tensors, planes from records, and dequantized other types."""

from __future__ import annotations

import mmap
import warnings
from math import prod
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from layoutc.checkpoint.gguf.container import Header, Held
from layoutc.checkpoint.held.stored import OF_OTHERS, Read, Stored
from layoutc.checkpoint.untrusted.files import open_file
from layoutc.runtime.bindings.facts import RecordBinding
from layoutc.runtime.bindings.gguf_types import PLAIN, TYPES
from layoutc.runtime.errors import DamagedError, LayoutError
from layoutc.runtime.facts import Facts
from layoutc.runtime.weight.tensor import QuantizedTensor

CHUNK = 1 << 22  # bytes of records to read or make at a time; unpacking their bits needs some thirty times as much
BYTES = "U8"


def library() -> ModuleType:
    """The module gguf.quants. Raises ImportError if it is not installed."""
    try:
        import gguf.quants
    except ImportError as error:
        raise ImportError(
            "the package gguf, which decodes other types of GGUF, is not installed: pip install gguf"
        ) from error
    return gguf.quants


def check_known(held: Held) -> None:
    """Raises LayoutError if the package gguf can't dequantize a tensor's type, ImportError without the package."""
    quants, one = library(), torch.zeros(1, TYPES[held.number].nbytes, dtype=torch.uint8, device="cpu")
    import gguf

    try:
        quants.dequantize(one.numpy(), gguf.GGMLQuantizationType(held.number))
    except (ValueError, NotImplementedError) as error:
        raise LayoutError(
            f"{held.name} is {held.type} in the file, which the installed gguf can't dequantize: pip install -U gguf"
        ) from error


class Rotated(NamedTuple):
    """The order of rows in rotary heads: files interleave the two dims of each pair; models have all first dims of a
    head before all second ones."""

    rows: int
    heads: int

    def in_file(self, rows: Tensor) -> Tensor:
        """The rows of a file that hold these rows of a model."""
        each = self.rows // self.heads
        head, within = rows // each, rows % each
        return head * each + within % (each // 2) * 2 + within // (each // 2)

    def in_model(self, rows: Tensor) -> Tensor:
        """The inverse of `in_file`."""
        each = self.rows // self.heads
        head, within = rows // each, rows % each
        return head * each + within % 2 * (each // 2) + within // 2


class Share(NamedTuple):
    """The rows of one of the tensors that make up a weight of experts: part `number` of `parts` of each matrix."""

    parts: int
    number: int
    each: int  # rows of a part of a matrix

    def in_model(self, rows: Tensor) -> Tensor:
        """The rows of a model that these rows of a file hold, counted over all matrices."""
        return (rows // self.each * self.parts + self.number) * self.each + rows % self.each


class Source(NamedTuple):
    """The tensors of a file that a parameter holds. rotated: their row order; None: the parameter's. beside: tensors of
    the same shape whose rows follow those of `held` in each matrix of the parameter."""

    held: Held
    rotated: Rotated | None
    beside: tuple[Held, ...] = ()

    @property
    def parts(self) -> tuple[Held, ...]:
        """The tensors, in the order of rows."""
        return (self.held, *self.beside)

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        shape = self.held.shape
        return (*shape[:-2], shape[-2] * len(self.parts), shape[-1]) if self.beside else shape

    @property
    def types(self) -> list[str]:
        """The distinct types of the tensors, sorted."""
        return sorted({one.type for one in self.parts})

    @property
    def plain(self) -> str:
        """The dtype of plain values, F32 if the tensors' dtypes differ; "" if any tensor is not plain."""
        if not all(one in PLAIN for one in self.types):
            return ""
        return PLAIN[self.held.type] if len(self.types) == 1 else "F32"

    def stored(self, path: Path) -> Stored:
        """The source as a tensor to read in slices: of plain or dequantized values."""
        held = self.held
        return Stored(path, held.name, self.plain or "F32", self.shape, held.begin, held.end)

    def records(self, path: Path) -> Stored:
        """The source's records as rows of bytes."""
        held, rows = self.held, prod(self.held.shape[:-1])
        nbytes = (held.end - held.begin) // rows
        return Stored(path, held.name, BYTES, (rows * len(self.parts), nbytes), held.begin, held.end)


class Mapped:
    """Files that are memory-mapped at first use. Reads only the requested slices."""

    def __init__(self, header: Header, sources: dict[str, Source]) -> None:
        self.path, self._files, self._ends = header.path, header.files, [0 for _ in header.files]
        for held in header.tensors.values():
            self._ends[held.part] = max(self._ends[held.part], held.end)
        self.sources = sources  # tensor name -> source
        self._bytes = dict[int, Tensor]()
        self._last: tuple[object, dict[str, Tensor]] | None = None

    def bytes_of(self, held: Held) -> Tensor:
        """All bytes of a tensor, in file order."""
        if held.part not in self._bytes:
            path = self._files[held.part]
            with open_file(path) as file, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of read-only memory; nothing writes to it
                whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                if len(whole) < self._ends[held.part]:
                    raise DamagedError(f"{path} was truncated while it was read; something else writes into it")
                self._bytes[held.part] = torch.frombuffer(whole, dtype=torch.uint8)
        return self._bytes[held.part][held.begin : held.end]

    def read(self, stored: Stored, index: tuple[slice, ...]) -> Tensor:
        """A slice of a tensor on the CPU, with rows in the model's order; the caller must copy and drop it."""
        source = self.sources[stored.name]
        return self._joined(source, stored, index) if source.beside else self._one(source, stored, index)

    def _one(self, source: Source, stored: Stored, index: tuple[slice, ...]) -> Tensor:
        """A slice of one tensor."""
        raw, kind = self.bytes_of(source.held), source.held.type
        if stored.dtype != BYTES and kind not in PLAIN:
            return self._dequantized(source, raw, stored.shape, index)
        dtype = OF_OTHERS[stored.dtype if stored.dtype == BYTES else PLAIN[kind]]
        return _rows(source, raw.view(dtype).view(stored.shape), index)

    def _joined(self, source: Source, stored: Stored, index: tuple[slice, ...]) -> Tensor:
        """A slice of concatenated tensors, read in runs of rows from one matrix of one tensor each."""
        lead, columns = stored.shape[:-1], index[-1] if index else slice(None)
        rows, each = torch.arange(prod(lead), device="cpu").view(lead)[index[:-1]], source.held.shape[-2]
        blocks, counts = torch.unique_consecutive(rows.flatten() // each, return_counts=True)
        pieces, at = [torch.empty(0, stored.shape[-1], dtype=OF_OTHERS[stored.dtype], device="cpu")[:, columns]], 0
        for block, count in zip(blocks.tolist(), counts.tolist(), strict=True):
            matrix, number = divmod(block, len(source.parts))
            part, first = source.parts[number], matrix * each + int(rows.flatten()[at]) % each
            whole = stored._replace(shape=(prod(part.shape[:-1]), stored.shape[-1]))
            piece = self._one(Source(part, None), whole, (slice(first, first + count), columns))
            pieces.append(piece.to(pieces[0].dtype))
            at += count
        return torch.cat(pieces).view(*rows.shape, -1)

    def _dequantized(self, source: Source, raw: Tensor, shape: tuple[int, ...], index: tuple[slice, ...]) -> Tensor:
        """The dequantized values of other types, fp32, computed a few rows at a time."""
        import gguf

        kind, quants = gguf.GGMLQuantizationType(source.held.number), library()
        inner, rest = prod(shape[1:-1]), index[1:]
        rows = _rows(source, raw.view(shape[0], -1), index[:1])
        each, pieces = max(1, CHUNK // max(1, prod(shape[1:]))), list[Tensor]()
        for first in range(0, len(rows), each):
            part = rows[first : first + each].clone(memory_format=torch.contiguous_format)
            values = torch.from_numpy(quants.dequantize(part.view(len(part) * inner, -1).numpy(), kind))
            pieces.append(values.view(len(part), *shape[1:])[(slice(None), *rest)].clone())
        return torch.cat(pieces) if pieces else torch.empty((0, *shape[1:]), device="cpu")[(slice(None), *rest)]

    def planes(
        self, cls: type[QuantizedTensor], binding: RecordBinding, part: tuple[Stored, range, range]
    ) -> dict[str, Tensor]:
        """The planes of whole records; caches the last result. part: tensor, rows, and columns in records."""
        if self._last is not None and self._last[0] == (cls, part):
            return self._last[1]
        self._last = None  # frees memory before the next allocation
        stored, rows, records = part
        k, orientation = len(records) * binding.elements, orientation_of(binding)
        facts = cls.LAYOUT.planes(len(rows), k)
        planes = {
            name: torch.empty(facts[name].shape, dtype=facts[name].dtype, device="cpu")
            for name in cls.LAYOUT.sources[orientation]
        }
        each = max(1, CHUNK // max(1, len(records) * binding.nbytes))
        for first in range(0, len(rows), each):
            last = min(first + each, len(rows))
            index = (
                slice(rows.start + first, rows.start + last),
                slice(records.start * binding.nbytes, records.stop * binding.nbytes),
            )
            raw = self.read(stored, index).contiguous()
            for name, plane in cls.REFERENCE.read_record(raw, last - first, k, orientation).items():
                planes[name][first:last].copy_(plane)
        self._last = (cls, part), planes
        return planes


def orientation_of(binding: RecordBinding) -> str:
    """The orientation of a container's records."""
    return binding.buffer.rpartition("_")[0]


def _rows(source: Source, values: Tensor, index: tuple[slice, ...]) -> Tensor:
    """The entries at `index` of a tensor whose first dim is rows, put in the model's order."""
    if source.rotated is None or not index:
        whole, rows = values, torch.arange(len(values), device="cpu")
        if source.rotated is not None:
            whole = values[source.rotated.in_file(rows)]
        return whole[index]
    rows = source.rotated.in_file(torch.arange(len(values), device="cpu")[index[0]])
    return values[:, *index[1:]][rows] if index[1:] else values[rows]


class RecordSource(NamedTuple):
    """A plane of a weight that a file stores as records."""

    name: str
    cls: type[QuantizedTensor]
    binding: RecordBinding
    stored: Stored
    facts: Facts
    file: Mapped

    @property
    def shape(self) -> tuple[int, ...]:
        """The plane's shape."""
        return self.facts.shape

    def read(self, index: tuple[slice, ...], fetch: Read) -> Tensor:
        """The plane's entries at `index`, in its dtype. Ignores `fetch`: all planes of a record are read together."""
        rows, entries = (range(size)[one] for size, one in zip(self.shape, index, strict=True))
        each = self.facts.shape[1] * self.binding.nbytes // self.stored.shape[1]  # entries of a record
        records = range(entries.start // each, -(-entries.stop // each))
        plane = self.file.planes(self.cls, self.binding, (self.stored, rows, records))[self.name]
        return plane[:, entries.start - records.start * each : entries.stop - records.start * each]

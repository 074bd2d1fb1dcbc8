"""Reads a shard's values from a folder: plain ones, or dequantized from the whole blocks that the shard touches."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from layoutc.checkpoint.common.regions import box_of, entries_of, rows_of, whole_blocks
from layoutc.checkpoint.held.sources import PlaneSource
from layoutc.checkpoint.held.stored import Read, Stack, Stored
from layoutc.checkpoint.safetensors.planning import Entry, Step
from layoutc.ints.rects import Rect
from layoutc.runtime.torch_private import local_tensor
from layoutc.runtime.weight.tensor import QuantizedTensor

DEQUANTIZED = 1 << 22  # values to dequantize at a time


def values_of(step: Step, fetch: Read) -> Tensor:
    """The values of this rank's part, in its local shape."""
    _, param, source = step
    local = local_tensor(param).detach()
    if not isinstance(source, Entry):
        return read(source, box_of(param).slices, fetch)
    dtype = torch.float32 if isinstance(local, QuantizedTensor) else local.dtype
    return dequantized(param, local, source, fetch, dtype)


def read(source: Stored | Stack | PlaneSource, index: tuple[slice, ...], fetch: Read) -> Tensor:
    """Reads plain values, or a plane's entries from layoutc's files or from another format."""
    return fetch(source, index) if isinstance(source, Stored) else source.read(index, fetch)


def dequantized(param: Tensor, local: Tensor, source: Entry, fetch: Read, dtype: torch.dtype) -> Tensor:
    """The values of this rank's part, in its local shape, dequantized from the whole blocks that the part touches."""
    out, at = torch.empty(local.shape, dtype=dtype, device=local.device), 0
    for part, run in _by_parts(source, rows_of(source.shape, box_of(param))):
        for rows in _some_at_a_time([run], source.cls.LAYOUT.block_rows):
            own = _values(part, rows, fetch, dtype, local.device)
            out.view(-1, local.shape[-1])[at : at + len(own)].copy_(own)
            at += len(own)
    return out


def _values(source: Entry, rows: Rect, fetch: Read, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values of a rectangle, dequantized from whole blocks."""
    cls, layout, (m, k) = source.cls, source.cls.LAYOUT, (prod(source.shape[:-1]), source.shape[-1])
    blocks, planes = whole_blocks(rows, layout.block_rows, layout.column_multiple, m, k), {}
    for name, file in source.planes.items():
        piece = read(file, entries_of(layout.stored[name], file.shape, blocks, k), fetch)
        planes[name] = piece.to(device).contiguous().view(layout.dtypes[name])
    matrix = blocks.shape
    values = cls(planes, matrix, dtype, matrix=matrix, orientations=source.orientations).dequantize(dtype)
    return values[rows.r0 - blocks.r0 :, rows.c0 - blocks.c0 :][: rows.r1 - rows.r0, : rows.c1 - rows.c0]


def _by_parts(source: Entry, runs: list[Rect]) -> Iterator[tuple[Entry, Rect]]:
    """Splits runs of rows by entry; yields each entry with a run counted from the entry's first row."""
    parts = source.apart or (source,)
    each = prod(source.shape[:-1]) // len(parts)
    for rows in runs:
        for number, part in enumerate(parts):
            first, last = max(rows.r0 - number * each, 0), min(rows.r1 - number * each, each)
            if first < last:
                yield part, Rect(first, last, rows.c0, rows.c1)


def _some_at_a_time(runs: list[Rect], block_rows: int) -> Iterator[Rect]:
    """Splits runs of rows at block boundaries, since dequantizing needs many times the bytes of its result."""
    for rows in runs:
        each = max(1, DEQUANTIZED // (block_rows * max(1, rows.c1 - rows.c0))) * block_rows
        first = rows.r0
        while first < rows.r1:
            last = min(first // block_rows * block_rows + each, rows.r1)
            yield Rect(first, last, rows.c0, rows.c1)
            first = last

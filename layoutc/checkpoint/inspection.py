"""What is in a checkpoint folder: every entry, how it is stored, what it costs, and whether it can be read here.

No weights are loaded: shapes and places come from `.metadata`, layouts from the few KB before each item's data.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from layoutc.checkpoint import loading, reading
from layoutc.runtime import stored
from layoutc.runtime.errors import DamagedError, LayoutError

VALUE, UNREAD, MIXED = "value", "unread", "mixed"  # kinds that are neither a recipe nor a dtype
BF16 = 2  # bytes


@dataclass(frozen=True)
class LayoutFacts:
    """A layout that pieces of a tensor are stored in, and whether an installed recipe has it."""

    recipe: str
    layout_id: str
    language: int  # version of the spec language
    spec_sha256: str
    installed: bool
    difference: str | None  # from the installed recipe of that name, in words; None where it is installed
    pieces: int  # of those whose headers were read


@dataclass(frozen=True)
class EntryFacts:
    """An entry of a checkpoint.

    kind: the recipe of a quantized tensor; the dtype of a plain one; "value" of what is no tensor; "mixed" where pieces
    of a tensor are stored in different ways, which `layouts` and `plain` list; "unread" where the writer has
    transformed the bytes.
    """

    name: str
    kind: str
    shape: tuple[int, ...] | None  # of the whole tensor; None for a value
    dtype: str | None  # of the values, which a quantized tensor computes in
    layouts: tuple[LayoutFacts, ...]  # () for a plain tensor
    plain: int  # pieces that are plain, of those whose headers were read
    planes: tuple[str, ...]
    orientations: tuple[str, ...]
    pieces: int
    stored_bytes: int
    bytes_per_element: float | None  # None where there is no element
    bf16_bytes: int  # the same with floating point values in bf16, without headers


@dataclass(frozen=True)
class TotalFacts:
    """All entries of a kind together."""

    kind: str
    entries: int
    elements: int
    stored_bytes: int
    bytes_per_element: float | None
    bf16_bytes: int


@dataclass(frozen=True)
class CheckpointFacts:
    """A checkpoint: its entries in the order in which they are stored, and totals, largest first."""

    folder: str
    form: str  # "torch.distributed.checkpoint" or "safetensors"
    thorough: bool  # the header of every piece was read, not of one for each tensor
    entries: tuple[EntryFacts, ...]
    totals: tuple[TotalFacts, ...]
    files: int
    bytes_on_disk: int
    bf16_bytes: int


def inspect(folder: str | os.PathLike[str], thorough: bool = False) -> CheckpointFacts:
    """Facts of a checkpoint folder: one that layoutc or torch.distributed.checkpoint saved, or of safetensors files.

    thorough: reads the header of every piece, not of the largest of each tensor, and so finds tensors whose pieces are
    in different layouts. Loads no weights, and runs nothing that a file says.

    Raises DamagedError where files are not what was written, LayoutError where the folder is no checkpoint, or its save
    did not end.
    """
    path = Path(folder)
    if not (path / reading.METADATA).exists() and next(path.glob("*.safetensors"), None) is not None:
        from layoutc.checkpoint import safetensors_inspection

        form, entries = "safetensors", safetensors_inspection.entries(path)
    else:
        form, entries = "torch.distributed.checkpoint", tuple(_entries(path, thorough))
    sizes = [file.stat().st_size for file in path.iterdir() if file.is_file()]
    return CheckpointFacts(
        str(path),
        form,
        thorough,
        entries,
        _totals(entries),
        len(sizes),
        sum(sizes),
        sum(entry.bf16_bytes for entry in entries),
    )


def entry_of(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype | str,
    headers: Sequence[Mapping[str, Any] | None],
    pieces: int,
    stored_bytes: int,
) -> EntryFacts:
    """The facts of a tensor, from what the headers of its pieces say."""
    layouts = [header for header in headers if header is not None and "layout_id" in header]
    plain = sum(header is not None and "layout_id" not in header for header in headers)
    ids = dict.fromkeys(header["layout_id"] for header in layouts)
    value = str(dtype).removeprefix("torch.")
    kinds = {header["recipe"] for header in layouts} | ({value} if plain else set())
    kind = UNREAD if not kinds else kinds.pop() if len(kinds) == 1 and len(ids) < 2 else MIXED
    elements, known = math.prod(shape), vars(torch).get(value)
    itemsize = known.itemsize if isinstance(known, torch.dtype) else 0
    floating = isinstance(known, torch.dtype) and known.is_floating_point
    return EntryFacts(
        name,
        kind,
        shape,
        value,
        tuple(_layout(one, [header for header in layouts if header["layout_id"] == one]) for one in ids),
        plain,
        tuple(dict.fromkeys(plane for header in layouts for plane in header["planes"])),
        tuple(dict.fromkeys(which for header in layouts for which in header["orientations"])),
        pieces,
        stored_bytes,
        stored_bytes / elements if elements else None,
        elements * (BF16 if floating else itemsize) if floating or itemsize else stored_bytes,
    )


def _layout(layout_id: str, headers: Sequence[Mapping[str, Any]]) -> LayoutFacts:
    header, difference = headers[0], None
    try:
        stored.class_of(header)
    except LayoutError:
        difference = stored._differences(header["recipe"], header)
    return LayoutFacts(
        header["recipe"],
        layout_id,
        header["language"],
        header["spec_sha256"],
        difference is None,
        difference,
        len(headers),
    )


def _totals(entries: Sequence[EntryFacts]) -> tuple[TotalFacts, ...]:
    kinds: dict[str, list[EntryFacts]] = {}
    for entry in entries:
        kinds.setdefault(entry.kind, []).append(entry)
    found = []
    for kind, of_kind in kinds.items():
        elements = sum(math.prod(entry.shape) for entry in of_kind if entry.shape is not None)
        held, in_bf16 = (sum(getattr(entry, what) for entry in of_kind) for what in ("stored_bytes", "bf16_bytes"))
        found.append(TotalFacts(kind, len(of_kind), elements, held, held / elements if elements else None, in_bf16))
    return tuple(sorted(found, key=lambda total: -total.stored_bytes))


# ------------------------------------------------------------------------------------- torch.distributed.checkpoint
def _entries(folder: Path, thorough: bool) -> Iterator[EntryFacts]:
    metadata = reading.read_metadata(folder)
    loading._check_manifest(folder, every_file=True)
    reading.check_files(folder, metadata)
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            length = metadata.storage_data[_index(name)].length
            yield EntryFacts(name, VALUE, None, None, (), 0, (), (), 1, length, None, length)
        else:
            yield _tensor(folder, metadata, name, entry, thorough)


def _tensor(folder: Path, metadata: Metadata, name: str, entry: TensorStorageMetadata, thorough: bool) -> EntryFacts:
    items: dict[MetadataIndex, ChunkStorageMetadata] = {}
    for chunk in entry.chunks:
        items.setdefault(_index(name, chunk.offsets), chunk)  # ranks without rows share one
    infos = {index: metadata.storage_data[index] for index in items}
    largest = sorted(items, key=lambda index: -math.prod(items[index].sizes))
    read = largest if thorough else largest[:1]
    headers = [_header(folder, name, entry, items[index], infos[index]) for index in read]
    held = sum(info.length for info in infos.values())
    return entry_of(name, tuple(entry.size), entry.properties.dtype, headers, len(items), held)


def _header(
    folder: Path, name: str, entry: TensorStorageMetadata, chunk: ChunkStorageMetadata, info: _StorageInfo
) -> Mapping[str, Any] | None:
    """What an item says that it is, which has to be what `.metadata` says."""
    header = reading.header_of(folder, info)
    if header is None:
        return None
    expected = (str(entry.properties.dtype).removeprefix("torch."), tuple(chunk.sizes))
    found = (str(header.get("dtype")).removeprefix("torch."), tuple(header.get("shape", ())))
    if "value" in header or found != expected:
        shape, dtype = (header["value"], "") if "value" in header else (found[1], f" in {found[0]}")
        raise DamagedError(
            f"{reading.where_of(folder, info)} holds {shape}{dtype}, but {reading.METADATA} says that it is "
            f"{expected[1]} in {expected[0]}, of {name}"
        )
    return header


def _index(name: str, offset: torch.Size | None = None) -> MetadataIndex:
    return MetadataIndex(name, offset)  # type: ignore[no-untyped-call]

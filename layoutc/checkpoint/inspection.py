"""inspect: lists a checkpoint's entries, how each is stored, its size, and whether it can be read here.

It loads no weights: shapes and positions come from `.metadata`, layouts from a few KB of header per item.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import metadata as dcp

from layoutc.checkpoint import reading
from layoutc.checkpoint.common.entries import VALUE, EntryFacts, entry_of
from layoutc.checkpoint.manifest import check_manifest
from layoutc.checkpoint.untrusted.metadata import StorageInfo
from layoutc.runtime.errors import DamagedError
from layoutc.runtime.errors import LayoutError as LayoutError


@dataclass(frozen=True)
class TotalFacts:
    """Totals over the entries of one kind."""

    kind: str
    entries: int
    elements: int
    stored_bytes: int
    bytes_per_element: float | None
    bf16_bytes: int


@dataclass(frozen=True)
class CheckpointFacts:
    """A checkpoint's entries in stored order, and the totals of each kind, largest first."""

    folder: str
    form: str  # "torch.distributed.checkpoint", "safetensors" or "gguf"
    thorough: bool  # all pieces' headers were read, not only one per tensor
    entries: tuple[EntryFacts, ...]
    totals: tuple[TotalFacts, ...]
    files: int
    bytes_on_disk: int
    bf16_bytes: int


def inspect(folder: str | os.PathLike[str], thorough: bool = False) -> CheckpointFacts:
    """Describes a checkpoint of layoutc or torch.distributed.checkpoint, a folder of safetensors files, or a GGUF file.

    thorough: read the headers of all pieces, not only of each tensor's largest piece. This finds tensors whose pieces
    have different layouts. Loads no weights, and runs no code from the files.

    Raises DamagedError if files differ from what was written; LayoutError for no checkpoint, or an unfinished one.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> checkpoint.save({"model": model.state_dict()}, "inspected")
        >>> [entry.name for entry in layoutc.inspect("inspected").entries]
        ['model.0.weight']
    """
    path, paths = Path(folder), tuple[Path, ...]()
    if path.is_file():
        from layoutc.checkpoint.gguf import kinds

        form, (entries, paths) = "gguf", kinds.entries(path)
    elif not (path / reading.METADATA).exists() and next(path.glob("*.safetensors"), None) is not None:
        from layoutc.checkpoint.safetensors import inspection

        form, entries = "safetensors", inspection.entries(path)
    else:
        form, entries = "torch.distributed.checkpoint", tuple(_entries(path, thorough))
    sizes = [file.stat().st_size for file in (paths if path.is_file() else path.iterdir()) if file.is_file()]
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


def _totals(entries: Sequence[EntryFacts]) -> tuple[TotalFacts, ...]:
    kinds: dict[str, list[EntryFacts]] = {}
    for entry in entries:
        kinds.setdefault(entry.kind, []).append(entry)
    totals = []
    for kind, of_kind in kinds.items():
        elements = sum(math.prod(entry.shape) for entry in of_kind if entry.shape is not None)
        stored, in_bf16 = (sum(getattr(entry, what) for entry in of_kind) for what in ("stored_bytes", "bf16_bytes"))
        totals.append(
            TotalFacts(kind, len(of_kind), elements, stored, stored / elements if elements else None, in_bf16)
        )
    return tuple(sorted(totals, key=lambda total: -total.stored_bytes))


# ------------------------------------------------------------------------------------- torch.distributed.checkpoint
def _entries(folder: Path, thorough: bool) -> Iterator[EntryFacts]:
    metadata = reading.read_metadata(folder)
    check_manifest(folder)
    reading.check_files(folder, metadata)
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, dcp.BytesStorageMetadata):
            length = metadata.storage_data[dcp.MetadataIndex(name)].length
            yield EntryFacts(name, VALUE, None, None, (), 0, (), (), 1, length, None, length)
        else:
            yield _tensor(folder, metadata, name, entry, thorough)


def _tensor(
    folder: Path, metadata: dcp.Metadata, name: str, entry: dcp.TensorStorageMetadata, thorough: bool
) -> EntryFacts:
    items: dict[dcp.MetadataIndex, dcp.ChunkStorageMetadata] = {}
    for chunk in entry.chunks:
        items.setdefault(dcp.MetadataIndex(name, chunk.offsets), chunk)  # ranks without rows share one
    infos = {index: metadata.storage_data[index] for index in items}
    largest = sorted(items, key=lambda index: -math.prod(items[index].sizes))
    read = largest if thorough else largest[:1]
    headers = [_header(folder, name, entry, items[index], infos[index]) for index in read]
    stored = sum(info.length for info in infos.values())
    return entry_of(name, tuple(entry.size), entry.properties.dtype, headers, len(items), stored)


def _header(
    folder: Path, name: str, entry: dcp.TensorStorageMetadata, chunk: dcp.ChunkStorageMetadata, info: StorageInfo
) -> Mapping[str, Any] | None:
    """An item's header. Raises DamagedError if it contradicts `.metadata`."""
    header = reading.header_of(folder, info)
    if header is None:
        return None
    expected = (str(entry.properties.dtype).removeprefix("torch."), tuple(chunk.sizes))
    actual = (str(header.get("dtype")).removeprefix("torch."), tuple(header.get("shape", ())))
    if "value" in header or actual != expected:
        shape, dtype = (header["value"], "") if "value" in header else (actual[1], f" in {actual[0]}")
        raise DamagedError(
            f"{reading.where_of(folder, info)} holds {shape}{dtype}, but {reading.METADATA} says that it holds "
            f"{expected[1]} in {expected[0]}, of {name}"
        )
    return header

"""The manifest, layoutc.json, written last: the CRC-32 of `.metadata`, and the size of every file that it names."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from layoutc import __version__
from layoutc.checkpoint.common.folders import MANIFEST
from layoutc.checkpoint.reading import METADATA, METADATA_BYTES, bytes_needed
from layoutc.checkpoint.untrusted.files import json_of, read_whole
from layoutc.runtime.errors import DamagedError, LayoutError

FORMAT = 1
_BYTES = 2**26  # the largest manifest that is accepted: a million files


def write_manifest(partial: Path, metadata: Metadata, results: Iterable[WriteResult]) -> None:
    """Writes layoutc.json into a save's folder, after all ranks have written their files and reported `results`.

    Raises LayoutError if anything that `.metadata` names is missing.
    """
    sizes = _written(partial, metadata, {result.index: result.storage_data for result in results})
    metadata_bytes = (partial / METADATA).read_bytes()
    manifest = {
        "format": FORMAT,
        "layoutc": __version__,
        "torch": torch.__version__,
        "metadata": {"bytes": len(metadata_bytes), "crc32": zlib.crc32(metadata_bytes)},
        "files": sizes,
    }
    with (partial / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    check_manifest(partial)


def _written(partial: Path, metadata: Metadata, stored: Mapping[MetadataIndex, Any]) -> dict[str, int]:
    """The size of each file that the metadata names. Raises LayoutError if a file is missing or too short."""
    for name, entry in metadata.state_dict_metadata.items():
        offsets = [chunk.offsets for chunk in entry.chunks] if isinstance(entry, TensorStorageMetadata) else [None]
        for offset in offsets:
            if MetadataIndex(name, offset) not in stored:
                at = "" if offset is None else f" at {tuple(offset)}"
                raise LayoutError(f"the save is not complete: no rank has written {name}{at}")
    needed = bytes_needed(stored.values())
    sizes = {}
    for name, least in sorted(needed.items()):
        file = partial / name
        sizes[name] = file.stat().st_size if file.is_file() else -1
        if sizes[name] < least:
            there = f"has {sizes[name]:,} bytes" if sizes[name] >= 0 else "is not there"
            raise LayoutError(
                f"the save is not complete: {file} {there}, but a rank reported that it wrote {least:,}. The ranks do "
                "not share that folder, or something else has written into it"
            )
    if more := sorted({file.name for file in partial.glob("*.distcp")} - needed.keys()):
        raise LayoutError(
            f"the save is not complete: none of its ranks wrote {partial / more[0]}. Another save into the same "
            "folder is running; save into different folders"
        )
    return sizes


def check_manifest(folder: Path) -> None:
    """Raises DamagedError if `.metadata` or a file's size contradicts layoutc.json, where there is one."""
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return
    manifest = json_of(read_whole(path, _BYTES), f"{path} is not a checkpoint's manifest: its content")
    if (form := manifest.get("format")) != FORMAT:
        if type(form) is int:
            raise LayoutError(f"{path} has format {form}; this version of layoutc reads {FORMAT}")
        raise DamagedError(f"{path} is not a checkpoint's manifest: it has no format")
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(_is_file(*pair) for pair in files.items()):
        raise DamagedError(f"{path} is not a checkpoint's manifest: it does not list files and their sizes")
    metadata = read_whole(folder / METADATA, METADATA_BYTES) if os.path.lexists(folder / METADATA) else b""
    if {"bytes": len(metadata), "crc32": zlib.crc32(metadata)} != manifest.get("metadata"):
        raise DamagedError(f"{folder / METADATA} is not what was saved: its CRC-32 or size differs from {MANIFEST}")
    for name, size in files.items():
        file = folder / name
        if not file.is_file():
            raise DamagedError(f"{file} is missing; copy the whole folder")
        if file.stat().st_size != size:
            raise DamagedError(f"{file} has {file.stat().st_size} bytes, not the {size} that were saved")


def _is_file(name: str, size: object) -> bool:
    return bool(name) and name not in (".", "..") and not {*name} & {"/", "\\", "\0", ":"} and type(size) is int

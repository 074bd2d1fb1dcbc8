"""Reads folders of safetensors files: checks headers and indexes before use, and reads tensors slice by slice."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layoutc.checkpoint.held.stored import OF_OTHERS, Stored
from layoutc.checkpoint.untrusted.files import DIMS, json_of, open_file, read_at, read_whole, sampled, short
from layoutc.runtime.errors import DamagedError
from layoutc.runtime.weight.stored_form import is_facts

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OURS = "layoutc"  # the metadata key for descriptions of quantized weights
HEADER = 100_000_000  # maximum bytes of a header or an index, as in the safetensors library
CHUNK = 1 << 24  # bytes to read at a time for a checksum


class Contents(NamedTuple):
    """A folder's tensors and descriptions of quantized weights, by name, and a digest of headers and of some data."""

    tensors: dict[str, Stored]
    described: dict[str, Mapping[str, Any]]
    digest: str


def library() -> ModuleType:
    """The module safetensors.torch. Raises ImportError if it is not installed."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "safetensors is not installed: pip install 'layoutc[safetensors]', or pip install safetensors"
        ) from error
    return safetensors.torch


def read_folder(folder: Path) -> Contents:
    """Reads the headers of a folder in Hugging Face's structure: one file, or several and an index.

    Raises FileNotFoundError if there is neither, DamagedError if a file or the index is not what was written.
    """
    if (folder / SINGLE).is_file():
        files: dict[str, list[str] | None] = {SINGLE: None}
    elif (folder / INDEX).is_file():
        files = _index(folder / INDEX)
    else:
        if folder.is_file():
            raise FileNotFoundError(f"{folder} is a file, not a folder; load_gguf loads GGUF files")
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) if folder.is_dir() else "no such folder"
        fix = f": copy {INDEX} too, or rename a single file to {SINGLE}" if ".safetensors" in there else ""
        raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX} (it has: {there or 'nothing'}){fix}")
    contents, digest = Contents({}, {}, ""), hashlib.sha256()
    for name, wanted in files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedError(f"{folder / INDEX} names {name}, which is missing; copy the whole folder")
        tensors, metadata, header = read_header(path)
        digest.update(f"{name} {len(header)} ".encode() + header)
        with open_file(path) as file:
            digest.update(sampled(file, 8 + len(header), os.fstat(file.fileno()).st_size))
        if lacking := [one for one in wanted or () if one not in tensors]:
            raise DamagedError(f"{folder / INDEX} says that {path.name} holds {lacking[0]}, but it does not")
        described = _described(path, metadata)
        planes = {f"{weight}.{plane}" for weight, of in described.items() for plane in of["planes"]}
        if lost := sorted(planes - tensors.keys()):
            raise DamagedError(f"{path} describes {lost[0]}, but does not hold it")
        contents.described.update(described)
        # Loaders read whole files: also what an index leaves out, or says to be in another file.
        for one, stored in tensors.items():
            if one in contents.tensors and not _is_equal(contents.tensors[one], stored):
                raise DamagedError(
                    f"{path} and {contents.tensors[one].path.name} hold different tensors {one}. Programs that read "
                    "whole files take the later one, others the one that the index names: remove the wrong one"
                )
        contents.tensors.update(tensors)
    return contents._replace(digest=digest.hexdigest())


def _index(path: Path) -> dict[str, list[str] | None]:
    """Reads an index: file name -> names of the tensors in it."""
    mapping = json_of(read_whole(path, HEADER), f"{path}: the index").get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(file, str) for file in mapping.values()):
        raise DamagedError(f"{path} has no weight_map of names to files")
    files: dict[str, list[str] | None] = {}
    for name, file in mapping.items():
        if Path(file).name != file or file in (".", "..") or {*file} & {"/", "\\", "\0", ":"}:
            raise DamagedError(f"{path} names {short(file)}, which is not a file of the same folder")
        names = files.setdefault(file, [])
        assert names is not None
        names.append(name)
    return files


def read_header(path: Path) -> tuple[dict[str, Stored], Mapping[str, Any], bytes]:
    """(tensors by name, metadata, the header's bytes) of one file.

    Raises DamagedError if the header is invalid, or does not describe a file of this size.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(read_at(file, 0, 8), "little") if size >= 8 else size
        if length > size - 8:
            raise DamagedError(
                f"{path} is truncated or not a safetensors file: it has {size} bytes, and should have a header of "
                f"{length}"
            )
        if length > HEADER:
            raise DamagedError(f"{path} should have a header of {length:,} bytes, but the limit is {HEADER:,}")
        raw = read_at(file, 8, length)
    header = json_of(raw, f"{path}: the header")
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata  # MLX writes null
    if not isinstance(metadata, dict):
        raise DamagedError(f"{path}: the metadata of the header is not a mapping")
    start = 8 + length
    tensors = {name: _stored(path, name, entry, start, size) for name, entry in header.items()}
    end = start
    for tensor in sorted(tensors.values(), key=lambda one: (one.begin, one.end)):
        if tensor.begin != end:
            raise DamagedError(
                f"{path}: {tensor.name} begins at byte {tensor.begin}, but what precedes it ends at {end}"
            )
        end = tensor.end
    if end != size:
        raise DamagedError(f"{path} has {size} bytes, but its header describes {end}")
    return tensors, metadata, raw


def _stored(path: Path, name: str, entry: Any, start: int, size: int) -> Stored:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, begin, end) if len(shape) <= DIMS else (-1,)
    except (TypeError, KeyError, ValueError):
        numbers = (-1,)
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers) or not isinstance(dtype, str):
        raise DamagedError(f"{path}: the header's entry for {name} lacks a valid dtype, shape or data_offsets")
    if start + end > size:
        raise DamagedError(f"{path} is truncated: {name} ends at byte {start + end}, the file at {size}")
    as_dtype = OF_OTHERS.get(dtype)
    if end < begin or (as_dtype is not None and end - begin != prod(shape) * as_dtype.itemsize):
        raise DamagedError(f"{path}: {name} of shape {shape} in {dtype} can't be bytes {begin} to {end}")
    return Stored(path, name, dtype, shape, start + begin, start + end)


def _described(path: Path, metadata: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The quantized weights that a file's metadata describes, in the format of `export_safetensors`."""
    if OURS not in metadata:
        return {}
    text = metadata[OURS]
    weights = json_of(text.encode() if isinstance(text, str) else b"", f"{path}: the metadata of {OURS}")
    for name, entry in weights.items():
        try:
            lacking = [plane for plane in entry["planes"] if not isinstance(entry["crc32"].get(plane), int)]
            fine = not lacking and isinstance(entry["format"], int)
            fine = fine and bool(entry["planes"]) and isinstance(entry["planes"], dict)
            shape = entry["shape"]
            fine = fine and isinstance(shape, list) and 2 <= len(shape) <= DIMS
            fine = fine and all(type(size) is int and 0 <= size < 2**63 for size in shape)
            strings = ("recipe", "layout_id", "spec_sha256", "dtype")
            fine = fine and all(isinstance(entry[key], str) for key in strings)
            fine = fine and is_facts(entry["facts"]) and type(entry["language"]) is int
            fine = fine and all(isinstance(one, str) for one in (*entry["orientations"], *entry["planes"]))
            fine = fine and isinstance(entry["orientations"], list)
        except (TypeError, KeyError, AttributeError):
            fine = False
        if not fine:
            raise DamagedError(f"{path}: the metadata of {name} is not what export_safetensors writes")
    return weights


# ------------------------------------------------------------------------------------------------------------- contents
class Slices:
    """A folder's files, memory-mapped at first use. Reads only the requested slices."""

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}
        self._open = ExitStack()

    def __enter__(self) -> Slices:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._open.close()

    def open(self, path: Path) -> Any:
        """The mapped file. Raises DamagedError if safetensors rejects it."""
        if path not in self._files:
            import safetensors

            try:
                self._files[path] = self._open.enter_context(safetensors.safe_open(path, "pt"))
            except safetensors.SafetensorError as error:
                raise DamagedError(f"{path}: {error}") from error
        return self._files[path]

    def read(self, stored: Stored, index: tuple[slice, ...]) -> Tensor:
        """A slice of a tensor on the CPU: a view of mapped memory, which the caller must copy and drop."""
        file = self.open(stored.path)
        return read_slice(file, stored, index)


def read_slice(file: Any, stored: Stored, index: tuple[slice, ...]) -> Tensor:
    """Reads a slice from an open file. All reads of values go through here."""
    if stored.header is not None:
        whole: Tensor = file.get_tensor(stored.name)
        return whole.reshape(-1).view(torch.uint8).reshape(stored.shape)[index]
    values: Tensor = file.get_slice(stored.name)[index] if index else file.get_tensor(stored.name)
    return values


def bytes_of(stored: Stored) -> Tensor:
    """All bytes of a tensor, uint8, whatever its dtype."""
    with open_file(stored.path) as file:
        return torch.frombuffer(bytearray(read_at(file, stored.begin, stored.end - stored.begin)), dtype=torch.uint8)


def crc32_of(stored: Stored) -> int:
    """The CRC-32 of a tensor's bytes in its file, read CHUNK bytes at a time."""
    checksum = 0
    for piece in _chunks(stored):
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _is_equal(one: Stored, other: Stored) -> bool:
    """True if two files hold the same tensor. Reads CHUNK bytes of each at a time."""
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and all(a == b for a, b in zip(_chunks(one), _chunks(other), strict=True))


def _chunks(stored: Stored) -> Iterator[bytes]:
    left = stored.end - stored.begin
    with open_file(stored.path) as file:
        file.seek(stored.begin)
        while left:
            piece = file.read(min(left, CHUNK))
            if not piece:
                raise DamagedError(f"{stored.path} was truncated while it was read; something else writes into it")
            left -= len(piece)
            yield piece

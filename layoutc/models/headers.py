"""Reads a model from safetensors files: names and shapes from an index and file headers. Reads no weights."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layoutc.models.weights import MOST_SIZE, Model, ModelError, Weight, in_layers, kind_by_name

MOST_JSON = 100_000_000  # bytes of a config, an index, or a header
INDEX, SINGLE, SUFFIX = "model.safetensors.index.json", "model.safetensors", ".safetensors"
FLOATS = {"BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2"}
# Scales of quantized checkpoints, which are not parameters of a model in training.
_SCALES = re.compile(r"(_scale_inv|[._]scales?|_scale_2|[._]zeros|[._]zero_point|input_scale|weight_scale)$")


def content_of(path: Path, most: int = MOST_JSON) -> bytes:
    """A file's content. Raises ModelError if it has more than `most` bytes, or can't be read."""
    try:
        with path.open("rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > most:
                raise ModelError(f"{path} has {size:,} bytes, and the most that is read is {most:,}")
            return file.read(most)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error


def mapping_of(content: bytes, what: str) -> dict[str, Any]:
    """Parses a JSON mapping. Raises ModelError for anything else."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{what} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{what} is a {type(found).__name__}, and should be a mapping")
    return found


def read_index(path: Path) -> Model:
    """The model of an index, whose files are in its folder. Raises ModelError if files are missing or damaged."""
    files = mapping_of(content_of(path), str(path)).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ModelError(f"{path} has no weight_map of names to files; is it a safetensors index?")
    for file in dict.fromkeys(files.values()):
        if Path(file).name != file or file in (".", "..") or "\\" in file:
            raise ModelError(f"{path} names {file!r}, which is not a file of the same folder")
        if not (path.parent / file).is_file():
            raise ModelError(
                f"{path} names {file}, which is not beside it: an index has no shapes, so the headers of its files are "
                "needed (the first bytes will do), or the model's config.json"
            )
    found = {name: entry for file in dict.fromkeys(files.values()) for name, entry in header(path.parent / file)}
    if lacking := [name for name in files if name not in found]:
        raise ModelError(f"{path} says that {files[lacking[0]]} holds {lacking[0]}, but it does not")
    return _model(path, {name: found[name] for name in files})


def read_files(paths: list[Path], source: Path) -> Model:
    """The model of several files. Raises ModelError like `read_index`, and if two files have the same name."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        for name, entry in header(path):
            if name in found:
                raise ModelError(f"{path} has {name}, which another file of {source} has as well")
            found[name] = entry
    return _model(source, found)


def header(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a file's tensor names with their header entries. The file may be cut off after the header."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MOST_JSON):
                raise ModelError(f"{path} is truncated or no safetensors file: its header should have {length:,} bytes")
            content = file.read(length)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    for name, entry in mapping_of(content, f"{path}: the header").items():
        if name != "__metadata__":
            yield name, _checked(path, name, entry)


def _checked(path: Path, name: str, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        raise ModelError(f"{path}: the header does not say what {name[:80]} is")
    shape = entry.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and 0 < size <= MOST_SIZE for size in shape):
        raise ModelError(f"{path}: {name[:80]} has the shape {shape}")
    return entry


def _model(source: Path, found: dict[str, dict[str, Any]]) -> Model:
    left = [name for name, entry in found.items() if entry["dtype"] not in FLOATS or _SCALES.search(name)]
    codes = [name for name in left if found[name]["dtype"] not in FLOATS and not _SCALES.search(name)]
    if codes:
        raise ModelError(
            f"{source} holds {codes[0]} as {found[codes[0]]['dtype']}, which are codes, not elements: the shape of the "
            "weight is not known. Give the model's config.json"
        )
    weights = []
    for name, entry in found.items():
        if name not in left:
            shape = tuple(entry["shape"])
            kind = kind_by_name(name, shape)
            weights.append(Weight(name, shape, kind, float(kind in ("linear", "router"))))
    notes = ["what each weight is for follows from its name and its dims; all tokens pass all linear layers"]
    if left:
        notes.append(f"{len(left)} scales of a checkpoint that is quantized are left out, such as {left[0]}")
    return in_layers(source.parent.name if source.name == INDEX else source.name, str(source), weights, notes)

"""Reads the header of a model in one GGUF file or in several, as llama.cpp's llama-gguf-split writes them.

Source: llama_split_path and llama.cpp's loader. Files are numbered from 1 in names and from 0 in the key split.no. All
have the counts of files and tensors, and the first has the model's keys. Each is a valid GGUF file by itself.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from layoutc.checkpoint.gguf.container import ALIGNMENT, Header, Held, Value, read_header
from layoutc.checkpoint.untrusted.files import short
from layoutc.runtime.errors import DamagedError, LayoutError

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
OWN = (NUMBER, COUNT, TENSORS, ALIGNMENT)  # keys that describe a file, not the model
_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def read_model(path: Path) -> Header:
    """The header of a model: of its only file, or of all its files merged, with the keys of the first, `path`.

    Raises what `read_header` does; LayoutError if `path` is not the first file, or is not named like it;
    FileNotFoundError if a file is missing; DamagedError if files do not belong together.
    """
    first = read_header(path)
    count = first.values.get(COUNT, 1)
    if count in (0, 1):
        return first
    paths = _paths(first, count)
    headers = [first, *(_read(path, one) for one in paths[1:])]
    tensors = dict[str, Held]()
    for part, header in enumerate(headers):
        _check(header, first, part)
        for name, held in header.tensors.items():
            if name in tensors:
                raise DamagedError(
                    f"{header.path} and {paths[tensors[name].part]} both have {short(name)}: they are parts of "
                    "different models"
                )
            tensors[name] = held._replace(part=part)
    stated = first.values.get(TENSORS)
    if stated is not None and stated != len(tensors):
        raise DamagedError(
            f"{path} says that its {count} files have {short(stated)} tensors, but they have {len(tensors)}"
        )
    digest = hashlib.sha256(" ".join(header.digest for header in headers).encode()).hexdigest()
    keys = {key: place for key, place in first.keys.items() if key not in (NUMBER, COUNT, TENSORS)}
    return first._replace(keys=keys, tensors=tensors, digest=digest, files=tuple(paths))


def _paths(first: Header, count: Value) -> list[Path]:
    """The files of a model whose first file this should be. Raises LayoutError."""
    path, number, match = first.path, first.values.get(NUMBER), _NAME.fullmatch(first.path.name)
    if not isinstance(count, int) or not isinstance(number, int) or not 0 <= number < count:
        raise DamagedError(f"{path}: {NUMBER} is {short(number)} of {short(count)} files, which can't be")
    stem = match[1] if match is not None else path.stem
    names = [f"{stem}-{one + 1:05}-of-{count:05}.gguf" for one in range(min(count, 99_999))]
    if number:
        raise LayoutError(f"{path} is file {number + 1} of {count} files of a model: pass the first, as {names[0]}")
    if path.name != names[0]:
        raise LayoutError(
            f"{path} is the first of {count} files of a model, whose others are found by its name: it should be "
            f"{names[0]}, or join them with llama.cpp's llama-gguf-split --merge"
        )
    return [path.with_name(name) for name in names]


def _read(first: Path, path: Path) -> Header:
    try:
        return read_header(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} is missing: {first.name} says that the model has it") from error


def _check(header: Header, first: Header, part: int) -> None:
    """Raises DamagedError if a file is not part `part` of the model."""
    number, count = header.values.get(NUMBER), header.values.get(COUNT)
    if (number, count) != (part, first.values[COUNT]):
        raise DamagedError(
            f"{header.path} says that it is file {short(number)} of {short(count)}, counted from 0, but by its name it "
            f"is file {part} of {first.values[COUNT]}"
        )
    stated = {key: value for key, value in header.values.items() if key not in OWN or key == TENSORS}
    for key, value in stated.items():
        if key in first.values and first.values[key] != value:
            raise DamagedError(
                f"{header.path} and {first.path} are not of one model: {short(key)} is {short(value)} in one, and "
                f"{short(first.values[key])} in the other"
            )

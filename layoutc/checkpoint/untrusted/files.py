"""Opens and reads untrusted files: regular files only, up to a size limit, and JSON that can't exhaust memory."""

from __future__ import annotations

import json
import os
import stat
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from layoutc.runtime.errors import DamagedError

DIMS = 64  # the most dims of a torch tensor
_CONTAINERS = 8  # minimum bytes of JSON per list or mapping; layoutc's files have twice as many


def open_file(path: Path) -> BinaryIO:
    """Opens a regular file for reading, unbuffered.

    Raises FileNotFoundError if there is none; DamagedError if it can't be read or, like a pipe, is no regular file.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        number = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedError(f"{path} can't be read: {error.strerror or error}") from error
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise DamagedError(f"{path} is not a regular file")
    return os.fdopen(number, "rb", buffering=0)


def read_at(file: BinaryIO, offset: int, length: int) -> bytes:
    """Reads `length` bytes from `offset` on, or fewer at the end of the file."""
    file.seek(offset)
    data = bytearray()
    while len(data) < length and (more := file.read(min(length - len(data), 2**26))):
        data += more
    return bytes(data)


def sampled(file: BinaryIO, start: int, size: int) -> bytes:
    """64 bytes at each of at most 65 places of a file's data. They differ between models, even if headers do not."""
    return b"".join(read_at(file, at, min(64, size - at)) for at in range(start, size, max(1, (size - start) // 64)))


def read_whole(path: Path, limit: int) -> bytes:
    """Reads a whole file. Raises DamagedError if it has more than `limit` bytes, or is not a regular file."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise DamagedError(f"{path} has {size:,} bytes, but such a file has at most {limit:,}")
        return read_at(file, 0, size)


def json_of(raw: bytes, about: str) -> dict[str, Any]:
    """Parses JSON bytes whose top level is a mapping.

    Raises DamagedError, whose message begins with `about`, for anything else, for duplicate keys, NaN and infinities,
    and for more nesting or brackets than real files have.
    """

    def refuse(why: str) -> NoReturn:
        raise DamagedError(f"{about} {why}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            names = sorted(name for name, _ in pairs)
            refuse(f"has the key {short(next(a for a, b in pairwise(names) if a == b))} twice")
        return mapping

    if _CONTAINERS * (raw.count(b"[") + raw.count(b"{")) > len(raw) + 1024:
        refuse("is little more than brackets")
    try:
        parsed = json.loads(raw, object_pairs_hook=unique, parse_constant=lambda name: refuse(f"contains {name}"))
    except DamagedError:
        raise
    except RecursionError:
        refuse("is nested too deeply")
    except ValueError as error:
        refuse(f"is not JSON ({error})")
    if not isinstance(parsed, dict):
        refuse(f"is JSON of a {type(parsed).__name__}, not of a mapping")
    return parsed


def short(value: object) -> str:
    """A value from a file, shortened for a message: at most one line, however large or nested it is."""
    if isinstance(value, str | bytes):
        return repr(value[:80]) + ("..." if len(value) > 80 else "")
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, tuple | list) and len(value) <= 8 and all(isinstance(one, str | int | None) for one in value):
        return repr([one[:40] if isinstance(one, str) else one for one in value])
    return f"of type {type(value).__name__}"

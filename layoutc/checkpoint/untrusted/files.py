"""Files that are not trusted: opened where they are files, read up to a limit; JSON that asks for little memory."""

from __future__ import annotations

import json
import os
import stat
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from layoutc.runtime.errors import DamagedError

DIMS = 64  # of a tensor: torch takes no more
_CONTAINERS = 8  # bytes of JSON to each list and mapping in it, at the least: what is written has twice as many


def open_file(path: Path) -> BinaryIO:
    """A file to read, unbuffered. Raises DamagedError for what is there and no file: a pipe would make readers wait.

    FileNotFoundError where there is none; DamagedError where it may not be read.
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
        raise DamagedError(f"{path} is no regular file")
    return os.fdopen(number, "rb", buffering=0)


def read_at(file: BinaryIO, offset: int, length: int) -> bytes:
    """That many bytes, or as many as there are."""
    file.seek(offset)
    found = bytearray()
    while len(found) < length and (more := file.read(min(length - len(found), 2**26))):
        found += more
    return bytes(found)


def read_whole(path: Path, limit: int) -> bytes:
    """All bytes of a file. Raises DamagedError where it has more than `limit`, or is no file."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise DamagedError(f"{path} has {size:,} bytes, and such a file never more than {limit:,}")
        return read_at(file, 0, size)


def json_of(raw: bytes, about: str) -> dict[str, Any]:
    """The mapping that bytes of JSON are. Raises DamagedError, which begins with `about`, for anything else: also for
    names that come twice, numbers that are none, and nesting or lists beyond what any such file has."""

    def refuse(why: str) -> NoReturn:
        raise DamagedError(f"{about} {why}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = sorted(name for name, _ in pairs)
            refuse(f"has {short(next(a for a, b in pairwise(names) if a == b))} twice")
        return found

    if _CONTAINERS * (raw.count(b"[") + raw.count(b"{")) > len(raw) + 1024:
        refuse("is made of little more than brackets")
    try:
        found = json.loads(raw, object_pairs_hook=unique, parse_constant=lambda name: refuse(f"has {name} in it"))
    except DamagedError:
        raise
    except RecursionError:
        refuse("is nested too deeply")
    except ValueError as error:
        refuse(f"is not JSON ({error})")
    if not isinstance(found, dict):
        refuse(f"is JSON of {type(found).__name__}, not of a mapping")
    return found


def short(value: object) -> str:
    """A value of a file in a message: never longer than a line, however large or nested the value is."""
    if isinstance(value, str | bytes):
        return repr(value[:80]) + ("..." if len(value) > 80 else "")
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, tuple | list) and len(value) <= 8 and all(isinstance(one, str | int | None) for one in value):
        return repr([one[:40] if isinstance(one, str) else one for one in value])
    return f"of type {type(value).__name__}"

"""Reads the header of a GGUF file. Checks every size in it against the file's size before use.

Source: the format's definition, docs/gguf.md of ggml, versions 2 and 3. A file is a header (magic, version, counts,
key-values, an entry for each tensor), padding up to the alignment, and tensors, each padded up to the alignment.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

from layoutc.checkpoint.untrusted.files import open_file, read_at, sampled, short
from layoutc.runtime.bindings.gguf_types import TYPES
from layoutc.runtime.errors import DamagedError

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # with the same byte layout
HEADER = 100_000_000  # maximum bytes of a header, as for safetensors; a vocabulary of a million words needs a third
ALIGNMENT = "general.alignment"
MOST_ALIGNED = 1 << 20
NESTED = 4  # maximum depth of nested arrays
MOST_DIMS, MOST_NAME, MOST_KEY = 4, 64, 65_535
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
CHUNK = 1 << 20
# Limits for header items that each cost a Python object or a step. Files of released models have dozens of keys, a
# thousand tensors, a vocabulary of some hundred thousand strings and as many merges, templates of some kilobytes,
# and no nested arrays.
MOST = {
    "keys": 65_536,
    "tensors": 131_072,
    "strings in arrays": 4_000_000,
    "arrays in arrays": 65_536,
    "numbers in short arrays": 1 << 20,
    "bytes of text": 1 << 24,
}
MOST_NUMBERS = 4_096  # the longest array that is kept: per-layer values have one entry per layer
_LENGTH = struct.Struct("<Q")

Value = int | float | str | tuple[int | float, ...]


class Held(NamedTuple):
    """A tensor as the header describes it, in bytes `begin` to `end` of the file, or of file `part` if a model is
    split. shape: outermost dim first."""

    name: str
    number: int
    shape: tuple[int, ...]
    begin: int
    end: int
    part: int = 0

    @property
    def type(self) -> str:
        """The name of the tensor's type."""
        return TYPES[self.number].name


class Header(NamedTuple):
    """A file's header.

    values: numbers, strings and short arrays of numbers by key; other arrays are left out. keys: the (begin, end) bytes
    of each key-value in the file. digest: a hash of the header and of samples of the data. files: all files of the
    model.
    """

    path: Path
    version: int
    alignment: int
    values: Mapping[str, Value]
    keys: Mapping[str, tuple[int, int]]
    tensors: Mapping[str, Held]
    digest: str
    files: tuple[Path, ...]


class _Cursor:
    """The bytes of a header, read on demand, never beyond the file's end or the limit."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.size, self.at, self.bytes = path, size, 0, b""
        self._file, self._taken = file, Counter[str]()

    def need(self, count: int, what: str) -> int:
        """Reads the next `count` bytes; returns their offset. Raises DamagedError if the file has fewer."""
        begin, self.at = self.at, self.at + count
        if self.at > self.size:
            raise DamagedError(
                f"{self.path} is truncated or damaged: {what} should end at byte {self.at}, and the file ends at "
                f"{self.size}"
            )
        if self.at > HEADER:
            raise DamagedError(f"{self.path}: the header has more than {HEADER:,} bytes, the limit")
        if self.at > len(self.bytes):
            more = max(self.at - len(self.bytes), min(CHUNK + len(self.bytes), HEADER - len(self.bytes)))
            self.bytes += read_at(self._file, len(self.bytes), more)
            if self.at > len(self.bytes):
                raise DamagedError(f"{self.path} was truncated while it was read; something else writes into it")
        return begin

    def number(self, code: str, what: str) -> int | float:
        """The next number, by its struct code."""
        begin = self.need(struct.calcsize(f"<{code}"), what)  # first, since it may replace self.bytes
        value: int | float = struct.unpack_from(f"<{code}", self.bytes, begin)[0]
        return value

    def integer(self, code: str, what: str) -> int:
        """The next integer, by its struct code."""
        return int(self.number(code, what))

    def count(self, least: int, what: str) -> int:
        """The next count, of items of at least `least` bytes. Raises DamagedError if the file can't hold them."""
        count = self.integer("Q", what)
        if count * least > self.size - self.at:
            raise DamagedError(
                f"{self.path} is truncated or damaged: {what} is {count:,}, and the {self.size - self.at} bytes that "
                "follow can't hold so many"
            )
        return count

    def take(self, kind: str, count: int, what: str) -> None:
        """Adds `count` items of a kind. Raises DamagedError if the header exceeds the kind's limit."""
        self._taken[kind] += count
        if (found := self._taken[kind]) > MOST[kind]:
            raise DamagedError(
                f"{self.path}: {what} would make it {found:,} {kind} in the header, and the most that are read is "
                f"{MOST[kind]:,}"
            )

    def pass_strings(self, count: int, what: str) -> None:
        """Skips strings. Raises DamagedError if the file has fewer."""
        for _ in range(count):
            if self.at + 8 > len(self.bytes):
                self.number("Q", what)
                self.at -= 8
            end = self.at + 8 + _LENGTH.unpack_from(self.bytes, self.at)[0]
            if end > len(self.bytes):
                self.need(end - self.at, what)
            self.at = end

    def string(self, most: int, what: str) -> str:
        """The next string. Raises DamagedError if it has more than `most` bytes, or is not UTF-8."""
        length = self.count(1, f"the length of {what}")
        if length > most:
            raise DamagedError(f"{self.path}: {what} has {length} bytes; the limit is {most}")
        begin = self.need(length, what)
        try:
            return self.bytes[begin : self.at].decode()
        except UnicodeDecodeError as error:
            raise DamagedError(f"{self.path}: {what} is not UTF-8") from error


def read_header(path: Path) -> Header:
    """The header of a file, with a hash of samples of the data.

    Raises FileNotFoundError; DamagedError if a file is not valid GGUF or not complete: big-endian, of another version,
    truncated, with unknown types, or with tensors that overlap or are not placed as the format defines.
    """
    with open_file(path) as file:
        cursor = _Cursor(path, file, os.fstat(file.fileno()).st_size)
        version = _begin(cursor)
        entries = cursor.count(8 + 4 + 8 + 4 + 8, "the number of tensors")
        cursor.take("tensors", entries, "their number")
        count = cursor.count(8 + 4 + 1, "the number of key-values")
        cursor.take("keys", count, "their number")
        values, keys = dict[str, Value](), dict[str, tuple[int, int]]()
        for _ in range(count):
            begin = cursor.at
            key = cursor.string(MOST_KEY, "a key")
            if key in keys:
                raise DamagedError(f"{path} has the key {short(key)} twice")
            found = _value(cursor, cursor.integer("I", f"the type of {short(key)}"), f"the value of {short(key)}")
            if found is not None:
                values[key] = found
            keys[key] = begin, cursor.at
        alignment = _alignment(path, values)
        described = [_entry(cursor) for _ in range(entries)]
        start = cursor.at + -cursor.at % alignment
        some = sampled(file, start, cursor.size)
        digest = hashlib.sha256(f"{cursor.size} ".encode() + cursor.bytes[: cursor.at] + some).hexdigest()
        tensors = _placed(path, described, start, cursor.size, alignment)
    return Header(path, version, alignment, values, keys, tensors, digest, (path,))


def _begin(cursor: _Cursor) -> int:
    """Reads the magic and the version; returns the version."""
    path = cursor.path
    if cursor.size < 24 or cursor.need(4, "the magic") or cursor.bytes[:4] != MAGIC:
        raise DamagedError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()} and a header")
    version = cursor.integer("I", "the version")
    if version and version & 0xFFFF == 0:
        raise DamagedError(
            f"{path} is a big-endian GGUF file, which layoutc does not read: convert it with gguf-convert-endian, of "
            "the package gguf"
        )
    if version not in VERSIONS:
        raise DamagedError(
            f"{path} has GGUF version {version}; layoutc reads versions {' and '.join(map(str, VERSIONS))}. Rewrite "
            "it with llama.cpp's llama-quantize, type COPY"
        )
    return version


def _value(cursor: _Cursor, kind: int, what: str, depth: int = 0) -> Value | None:
    """The next value; None for a skipped array: of strings, of arrays, or of many numbers."""
    if kind in SCALARS:
        return cursor.number(SCALARS[kind], what)
    if kind == STRING:
        text = cursor.string(MOST["bytes of text"], what)
        cursor.take("bytes of text", len(text), what)
        return text
    if kind != ARRAY:
        raise DamagedError(f"{cursor.path}: {what} is of type {kind}, which GGUF does not define")
    if depth == NESTED:
        raise DamagedError(f"{cursor.path}: {what} has arrays nested more than {NESTED} deep")
    of = cursor.integer("I", f"the type of the array in {what}")
    if of in SCALARS:
        size = struct.calcsize(f"<{SCALARS[of]}")
        count = cursor.count(size, f"the length of {what}")
        begin = cursor.need(count * size, what)
        if count > MOST_NUMBERS:
            return None
        cursor.take("numbers in short arrays", count, what)
        return struct.unpack_from(f"<{count}{SCALARS[of]}", cursor.bytes, begin)
    if of not in (STRING, ARRAY):
        raise DamagedError(f"{cursor.path}: {what} is an array of type {of}, which GGUF does not define")
    count = cursor.count(8 if of == STRING else 12, f"the length of {what}")
    cursor.take("strings in arrays" if of == STRING else "arrays in arrays", count, what)
    if of == STRING:
        cursor.pass_strings(count, what)
    for _ in range(count if of == ARRAY else 0):
        _value(cursor, ARRAY, what, depth + 1)
    return None


def _alignment(path: Path, values: Mapping[str, Value]) -> int:
    alignment = values.get(ALIGNMENT, 32)
    sound = isinstance(alignment, int) and 8 <= alignment <= MOST_ALIGNED and alignment & (alignment - 1) == 0
    if not sound or not isinstance(alignment, int):
        raise DamagedError(
            f"{path}: {ALIGNMENT} is {short(alignment)}, but is a power of two from 8 to {MOST_ALIGNED:,}"
        )
    return alignment


def _entry(cursor: _Cursor) -> Held:
    """The next tensor; `begin` is its offset from the start of the tensors, `end` its number of bytes."""
    name = cursor.string(MOST_NAME, "the name of a tensor")
    about = f"{cursor.path}: {short(name)}"
    dims = cursor.integer("I", f"the dims of {short(name)}")
    if not 1 <= dims <= MOST_DIMS:
        raise DamagedError(f"{about} has {dims} dims; a tensor has 1 to {MOST_DIMS}")
    shape = tuple(cursor.integer("Q", f"the sizes of {short(name)}") for _ in range(dims))[::-1]
    number = cursor.integer("I", f"the type of {short(name)}")
    offset = cursor.integer("Q", f"the offset of {short(name)}")
    if (kind := TYPES.get(number)) is None:
        raise DamagedError(f"{about} is of type {number}, which this version of layoutc does not know")
    if min(shape) < 1 or shape[-1] % kind.elements:
        multiple = f", and rows of {kind.name} are multiples of {kind.elements}" if kind.elements > 1 else ""
        raise DamagedError(f"{about} has shape {list(shape)}{multiple or ', and a size is 1 or more'}")
    nbytes = prod(shape) // kind.elements * kind.nbytes
    if nbytes > cursor.size:
        raise DamagedError(f"{about} of {list(shape)} {kind.name} has {nbytes:,} bytes, the file {cursor.size:,}")
    return Held(name, number, shape, offset, nbytes)


def _placed(path: Path, described: list[Held], start: int, size: int, alignment: int) -> dict[str, Held]:
    """The tensors with their bytes, in file order. Checks that they are contiguous, each padded up to the alignment."""
    tensors, end = dict[str, Held](), start
    for one in sorted(described, key=lambda one: one.begin):
        if one.name in tensors:
            raise DamagedError(f"{path} has the tensor {short(one.name)} twice")
        begin = start + one.begin
        if begin != end:
            raise DamagedError(
                f"{path}: {short(one.name)} begins at byte {begin}, but what precedes it ends at {end}, padded to a "
                f"multiple of {alignment}"
            )
        last = begin + one.end
        if last > size:
            raise DamagedError(f"{path} is truncated: {short(one.name)} ends at byte {last}, the file at {size}")
        tensors[one.name] = one._replace(begin=begin, end=last)
        end = last + -last % alignment
    if tensors and size > end:
        raise DamagedError(f"{path} has {size} bytes, but its header describes {end}")
    return tensors

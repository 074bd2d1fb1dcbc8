"""A strict reader of the zips that torch.save writes: uncompressed records, one after another, with nothing in between.

Each item of a torch.distributed.checkpoint file is such a zip. The directory at its end has every record's name, size
and CRC-32, so the tail alone says what the item holds, and the bytes can be checked against it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from layoutc.runtime.errors import DamagedError

Read = Callable[[int, int], "bytes | memoryview"]  # (offset, length) -> that many bytes of the zip, or fewer at its end

_END = struct.Struct("<4s4H2IH")  # PK56: disks, records twice, directory's size and start, comment
_WIDE_END = struct.Struct("<4sQ2H2I4Q")  # PK66: the same in 64 bits
_LOCATOR = struct.Struct("<4sIQI")  # PK67: where PK66 is
_ENTRY = struct.Struct("<4s6H3I5H2I")  # PK12: a record in the directory
_LOCAL = struct.Struct("<4s5H3I2H")  # PK34: the same, as a header before the record's bytes
_SIZES, _WIDE_SIZES = struct.Struct("<4s3I"), struct.Struct("<4sI2Q")  # PK78: CRC-32 and sizes, after its bytes
_TAIL = _END.size + _LOCATOR.size + _WIDE_END.size
_NAMES = 2**10  # maximum bytes of a record's name and extra field in the directory
_FULL = 0xFFFFFFFF  # marks a value that is in the 64-bit extra field
_SIZES_FOLLOW, _UTF8 = 0x8, 0x800  # the flags that are accepted


class Record(NamedTuple):
    """A record of a zip: its start and end, header included; its size and CRC-32; and the directory's values that its
    header repeats: fields, and 64-bit sizes and offsets."""

    name: str
    start: int
    end: int
    size: int
    crc32: int
    repeated: tuple[int, ...]
    wide: bytes


class Directory(NamedTuple):
    """All records in file order, and the CRC-32 of the directory that lists them."""

    records: tuple[Record, ...]
    crc32: int


def directory(read: Read, length: int, where: str) -> Directory:
    """The directory of a zip of `length` bytes. Reads only the tail of the zip.

    Raises DamagedError if the bytes are not a zip that torch.save wrote.
    """
    start, end, count = _place(bytes(read(max(length - _TAIL, 0), _TAIL)), length, where)
    data = bytes(read(start, end - start))
    if len(data) != end - start:
        raise _damaged(where, "it is truncated")
    records, at, unread_fields = [], 0, set()
    for _ in range(count):
        record, size, unread = _entry(data, at, where)
        records.append(record)
        unread_fields.add(unread)
        at += size
    if at != len(data) or len(unread_fields) > 1:
        raise _damaged(where, "its directory is not as torch.save writes it")
    records.sort(key=lambda record: record.start)
    starts = [record.start for record in records] + [start]
    if starts[0] != 0 or any(a >= b for a, b in pairwise(starts)) or len({r.name for r in records}) != len(records):
        raise _damaged(where, "its records overlap, have gaps between them, or share a name")
    return Directory(tuple(r._replace(end=e) for r, e in zip(records, starts[1:], strict=True)), zlib.crc32(data))


def data_start(read: Read, record: Record, where: str) -> int:
    """The offset of a record's data. Raises DamagedError if the header before it contradicts the directory."""
    head = bytes(read(record.start, _LOCAL.size))
    if len(head) < _LOCAL.size or head[:4] != b"PK\3\4":
        raise _damaged(where, f"{record.name} has no header")
    *repeated, crc32, packed, size, names, extras = _LOCAL.unpack(head)[1:]
    first: int = record.start + _LOCAL.size + names + extras
    if first + record.size > record.end:
        raise _damaged(where, f"{record.name} is longer than the space for it")
    rest = bytes(read(record.start + _LOCAL.size, names + extras))
    later = bool(record.repeated[1] & _SIZES_FOLLOW) and (crc32, packed, size) == (0, 0, 0)
    matches = later or (crc32, packed, size) == (record.crc32, record.size, record.size)
    matches = matches and tuple(repeated) == record.repeated and rest[:names] == record.name.encode()
    wide = record.wide
    if len(wide) >= 16 and later:  # the writer does not know the size yet when it writes the header
        wide = wide[:8] + bytes(8) + wide[16:]
    if not matches or _extra(rest[names:], f"{where}: {record.name}") != wide:
        raise _damaged(where, f"the header of {record.name} is not what the directory says")
    return first


def check(data: memoryview, where: str) -> Directory:
    """Checks every byte of a zip against its directory, at the speed of CRC-32; returns the directory.

    Raises DamagedError that names the record. Ignores the field that says who made the zip, as all readers do.
    """

    def read(offset: int, length: int) -> memoryview:
        return data[offset : offset + length]

    contents = directory(read, len(data), where)
    for record in contents.records:
        first = data_start(read, record, where)
        last = first + record.size
        if zlib.crc32(data[first:last]) != record.crc32:
            raise _damaged(where, f"the bytes of {record.name} are not those that were written (CRC-32 differs)")
        if bytes(data[last : record.end]) != _after(record):
            raise _damaged(where, f"{record.name} is not followed by its sizes and CRC-32")
    return contents


def _after(record: Record) -> bytes:
    """The expected bytes after a record's data: its CRC-32 and sizes, if its flags say so."""
    if not record.repeated[1] & _SIZES_FOLLOW:
        return b""
    kind = _WIDE_SIZES if record.wide else _SIZES
    return kind.pack(b"PK\7\x08", record.crc32, record.size, record.size)


def _place(tail: bytes, length: int, where: str) -> tuple[int, int, int]:
    """The directory's start, end, and number of records."""
    if length < _END.size or len(tail) != min(length, _TAIL) or tail[-_END.size :][:4] != b"PK\5\6":
        raise _damaged(where, "it does not end as a zip does")
    *disks, here, count, size, start, comment = _END.unpack(tail[-_END.size :])[1:]
    end = length - _END.size
    locator = tail[-_END.size - _LOCATOR.size : -_END.size]
    if locator[:4] == b"PK\6\7" and len(tail) == _TAIL:
        _, disk, wide_at, total = _LOCATOR.unpack(locator)
        name, rest, _, needs, *disks64, here64, count64, size64, start64 = _WIDE_END.unpack(tail[: _WIDE_END.size])
        end = length - _TAIL
        narrow = [min(count64, 0xFFFF), min(size64, _FULL), min(start64, _FULL)]
        if (name, rest, needs, disk, wide_at, total) != (b"PK\6\6", _WIDE_END.size - 12, 45, 0, end, 1) or (
            [*disks64, here64, count, size, start] != [0, 0, count64, *narrow] or here != count
        ):
            raise _damaged(where, "its end is not as torch.save writes it")
        count, size, start = count64, size64, start64
    if any(disks) or comment or start + size != end or not 0 < count * _ENTRY.size <= size:
        raise _damaged(where, "its end is not as torch.save writes it")
    return start, end, count


def _entry(directory: bytes, at: int, where: str) -> tuple[Record, int, tuple[int, ...]]:
    """A record from the directory, the size of its entry, and the fields that no reader uses."""
    data = directory[at : at + _ENTRY.size + _NAMES]
    if len(data) < _ENTRY.size or data[:4] != b"PK\1\2":
        raise _damaged(where, "its directory is not as torch.save writes it")
    made, *repeated, crc32, packed, size, names, extras, comment, disk, inner, outer, start = _ENTRY.unpack(
        data[: _ENTRY.size]
    )[1:]
    ends = _ENTRY.size + names + extras
    if names + extras > _NAMES:
        raise _damaged(where, "a record's name is too long")
    try:
        name = data[_ENTRY.size : _ENTRY.size + names].decode()
    except UnicodeDecodeError:
        raise _damaged(where, "a record's name is not text") from None
    wide = left = _extra(data[_ENTRY.size + names : ends], f"{where}: {name!r}")
    fields = []
    for value in (size, packed, start):
        if value == _FULL and len(left) >= 8:
            (value,), left = struct.unpack("<Q", left[:8]), left[8:]
        fields.append(value)
    size, packed, start = fields
    if repeated[1] & ~(_SIZES_FOLLOW | _UTF8) or repeated[2] or packed != size:
        raise _damaged(where, f"{name!r} is compressed or encrypted, which torch.save never writes")
    if ends > len(data) or comment or disk or left or not name:
        raise _damaged(where, "its directory is not as torch.save writes it")
    return Record(name, start, 0, size, crc32, tuple(repeated), wide), ends, (made, repeated[0], inner, outer)


def _extra(data: bytes, where: str) -> bytes:
    """The 64-bit values in a record's extra fields. Accepts no other field but padding."""
    wide = b""
    while data:
        kind, size = data[:2], int.from_bytes(data[2:4], "little")
        value, data = data[4 : 4 + size], data[4 + size :]
        if len(value) != size or (kind != b"\1\0" and (kind != b"FB" or value.strip(b"Z"))):
            raise DamagedError(f"{where} has an extra field that torch.save never writes")
        wide = value if kind == b"\1\0" else wide
    return wide


def _damaged(where: str, what: str) -> DamagedError:
    return DamagedError(f"{where} is not a whole torch.save zip: {what}. Read another copy of the file")

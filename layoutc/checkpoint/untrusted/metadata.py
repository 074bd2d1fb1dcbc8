"""Reads `.metadata` into torch's metadata classes, through stand-ins that a malicious pickle can't misuse."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain, pairwise
from operator import add, gt
from pathlib import PurePosixPath
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from layoutc.checkpoint.untrusted import unpickling
from layoutc.checkpoint.untrusted.files import DIMS, short
from layoutc.runtime.errors import DamagedError

StorageInfo = _StorageInfo  # an item's position in a file: a private torch class that every .metadata contains

_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
# (module, class) -> required fields, optional fields.
_FIELDS: dict[tuple[str, str], tuple[str, str]] = {
    (_METADATA, "Metadata"): ("state_dict_metadata storage_data", "planner_data storage_meta version"),
    (_METADATA, "TensorStorageMetadata"): ("properties size chunks", ""),
    (_METADATA, "BytesStorageMetadata"): ("", ""),
    (_METADATA, "ChunkStorageMetadata"): ("offsets sizes", ""),
    (_METADATA, "TensorProperties"): ("", ""),
    (_METADATA, "MetadataIndex"): ("fqn", "offset index"),
    (_METADATA, "StorageMeta"): ("", "checkpoint_id save_id load_id modules"),
    # crc32: of the item's zip directory; added by layoutc.checkpoint.save
    (_FILES, "_StorageInfo"): ("relative_path offset length", "transform_descriptors crc32"),
    (_FILES, "_StoragePrefix"): ("prefix", ""),
}
_KEYS = {
    name: (frozenset(f"{needed} {more}".split()), frozenset(needed.split()))
    for (_, name), (needed, more) in _FIELDS.items()
}
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)  # indexed by the file's number
_PAIRS = 20  # maximum pairs compared per chunk, for a tensor that is not cut in a grid
_ELEMENT, _REST = 32, 2**20  # maximum bytes per element and of the rest of an item: several times what recipes store


class _StandIn:
    """A stand-in for an object in a file: records its class, and the fields that the file sets."""

    _class = ""

    def __setstate__(self, state: Any) -> None:
        most = 2 * len(_KEYS[self._class][0]) + 2
        if type(state) is not dict or len(state) > most or not all(type(key) is str for key in state):
            raise ValueError(f"a {self._class} has an invalid state")
        vars(self).update(state)


class _Properties(_StandIn):
    state: Any

    def __setstate__(self, state: Any) -> None:
        vars(self)["state"] = state


def metadata_of(data: bytes, where: str) -> dcp.Metadata:
    """Parses the bytes of a `.metadata` file. Raises DamagedError, whose message begins with `where`, on failure."""
    value = unpickling.read(data, _names(), where)
    return _Maker(where).metadata(value)


def _names() -> dict[tuple[str, str], Any]:
    """New stand-ins for each read, since a pickle can modify the objects that it names."""
    names: dict[tuple[str, str], Any] = {
        (module, name): type(name, (_Properties if name == "TensorProperties" else _StandIn,), {"_class": name})
        for module, name in _FIELDS
    }
    names["torch", "Size"] = _size
    names["torch.serialization", "_get_layout"] = lambda name: _LAYOUTS[name if type(name) is str else ""]
    names[_METADATA, "_MEM_FORMAT_ENCODING"] = lambda number: _FORMATS[number if type(number) is int else -9]
    names["collections", "OrderedDict"] = lambda: {}
    for module in ("pathlib", "pathlib._local"):
        for kind in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"):
            names[module, kind] = _path
    return names


def _size(sizes: Any = ()) -> torch.Size:
    """Replaces torch.Size, which would copy lists of any length, any number of times."""
    if type(sizes) not in (tuple, list) or len(sizes) > DIMS:
        raise ValueError(f"a size has more than {DIMS} dims")
    return torch.Size(sizes)


def _path(*parts: Any) -> PurePosixPath:
    """Replaces path classes. Accepts only str parts: a path built from paths could double in length at each step."""
    if not all(type(part) is str for part in parts) or sum(map(len, parts)) > 2**14:
        raise ValueError("a path is not made of text, or too long")
    return PurePosixPath(*parts)


class _Maker:
    """Turns stand-ins into torch's classes. Every error message names the file and the entry."""

    def __init__(self, where: str) -> None:
        self._where = where

    def _fail(self, what: str) -> NoReturn:
        raise DamagedError(f"{self._where} is damaged: {what}")

    def _fields(self, value: Any, name: str, about: str) -> dict[str, Any]:
        """The fields that the file set on an object. Fails if the object's class is not `name`."""
        if not isinstance(value, _StandIn) or type(value)._class != name:
            self._fail(f"{about} is not a {name}")
        fields, (allowed, needed) = vars(value), _KEYS[name]
        if not needed <= fields.keys() <= allowed:
            if unknown := fields.keys() - allowed:
                self._fail(f"{about} has {min(unknown)}, which a {name} of this version of torch lacks")
            self._fail(f"{about} lacks {min(needed - fields.keys())}")
        return fields

    def metadata(self, value: Any) -> dcp.Metadata:
        fields = self._fields(value, "Metadata", "its content")
        entries, stored = fields["state_dict_metadata"], fields["storage_data"]
        if type(entries) is not dict or type(stored) is not dict:
            self._fail("it lacks entries, or the list of stored items")
        made: dict[str, Any] = {}
        for name, entry in entries.items():
            if type(name) is not str or len(name) > 2**16:
                self._fail(f"an entry has the name {short(name)}")
            made[name] = self._entry(entry, name)
        items = {}
        for stored_index, info in stored.items():
            index = self._index(stored_index)
            if index in items:
                self._fail(f"two items are the same piece of {index.fqn}")
            items[index] = self._info(info, index.fqn)
        self._check_places(items)
        self._check_items(made, items)
        version = fields.get("version")
        if version is not None and type(version) is not str:
            self._fail(f"its version is {short(version)}")
        paths, meta = self._planner_data(fields.get("planner_data")), fields.get("storage_meta")
        return dcp.Metadata(made, paths, items, None if meta is None else self._storage_meta(meta), version)

    def _entry(self, value: Any, name: str) -> dcp.TensorStorageMetadata | dcp.BytesStorageMetadata:
        if isinstance(value, _StandIn) and value._class == "BytesStorageMetadata":
            self._fields(value, "BytesStorageMetadata", name)
            return dcp.BytesStorageMetadata()
        fields = self._fields(value, "TensorStorageMetadata", name)
        size = self._shape(fields["size"], name)
        if type(fields["chunks"]) is not list:
            self._fail(f"{name} has no list of chunks")
        chunks = [self._chunk(chunk, size, name) for chunk in fields["chunks"]]
        self._check_cover(size, chunks, name)
        return dcp.TensorStorageMetadata(self._properties(fields["properties"], name), size, chunks)

    def _properties(self, value: Any, name: str) -> dcp.TensorProperties:
        if not isinstance(value, _Properties) or set(vars(value)) != {"state"}:
            self._fail(f"{name} has no properties")
        kinds = (torch.dtype, torch.layout, bool, torch.memory_format, bool)
        state = value.state
        if type(state) is not tuple or [type(one) for one in state] != list(kinds):
            self._fail(f"{name} has invalid properties")
        return dcp.TensorProperties(*state)

    def _shape(self, value: Any, name: str) -> torch.Size:
        if type(value) is not torch.Size or not all(map(_is_size, value)):
            self._fail(f"{name} has an invalid size or offset")
        return value

    def _chunk(self, value: Any, size: torch.Size, name: str) -> dcp.ChunkStorageMetadata:
        fields = self._fields(value, "ChunkStorageMetadata", f"a chunk of {name}")
        offsets, sizes = (self._shape(fields[key], name) for key in ("offsets", "sizes"))
        if len(offsets) != len(size) or len(sizes) != len(size):
            self._fail(f"a chunk of {name} does not have as many dims as the tensor")
        if any(map(gt, map(add, offsets, sizes), size)):
            self._fail(f"a chunk of {name}, {tuple(sizes)} at {tuple(offsets)}, is outside of its size {tuple(size)}")
        return dcp.ChunkStorageMetadata(offsets, sizes)

    def _check_cover(self, size: torch.Size, chunks: list[dcp.ChunkStorageMetadata], name: str) -> None:
        """Checks that every element is in exactly one chunk."""
        full = [chunk for chunk in chunks if math.prod(chunk.sizes)]
        if (covered := sum(math.prod(chunk.sizes) for chunk in full)) != math.prod(size):
            self._fail(f"the chunks of {name} have {covered:,} elements in all, but the tensor has {math.prod(size):,}")
        if len(full) > 1 and not _is_grid(full):
            cuts = [len({chunk.offsets[dim] for chunk in full}) for dim in range(len(size))]
            self._check_apart(full, cuts.index(max(cuts)), name)

    def _check_apart(self, chunks: list[dcp.ChunkStorageMetadata], dim: int, name: str) -> None:
        """Checks that no chunks overlap. Compares only chunks that intersect along `dim`, which has the most cuts."""
        near: list[dcp.ChunkStorageMetadata] = []
        left = _PAIRS * len(chunks) + 10**6
        for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[dim]):
            near = [one for one in near if one.offsets[dim] + one.sizes[dim] > chunk.offsets[dim]]
            left -= len(near)
            if left < 0:
                self._fail(f"{name} is cut into {len(chunks):,} chunks in a way that no save produces")
            for other in near:
                places = zip(chunk.offsets, chunk.sizes, other.offsets, other.sizes, strict=True)
                if all(a < c + d and c < a + b for a, b, c, d in places):
                    self._fail(f"two chunks of {name} overlap, at {tuple(other.offsets)} and {tuple(chunk.offsets)}")
            near.append(chunk)

    def _index(self, value: Any) -> dcp.MetadataIndex:
        fields = self._fields(value, "MetadataIndex", "an item's index")
        fqn, offset, index = fields["fqn"], fields.get("offset"), fields.get("index")
        if type(fqn) is not str or not (index is None or _is_size(index)):
            self._fail("an item's index does not name an entry")
        return dcp.MetadataIndex(fqn, None if offset is None else self._shape(offset, fqn), index)

    def _info(self, value: Any, name: str) -> StorageInfo:
        fields = self._fields(value, "_StorageInfo", f"an item of {name}")
        path, transforms = fields["relative_path"], fields.get("transform_descriptors")
        if type(path) is not str or not path or path in (".", "..") or {*path} & {"/", "\\", "\0", ":"}:
            self._fail(f"an item of {name} lies in {short(path)}, which is not a file of this folder")
        if not _is_size(fields["offset"]) or not _is_size(fields["length"]):
            self._fail(f"an item of {name} has no valid offset and length in its file")
        if transforms is not None and not _texts(transforms):
            self._fail(f"an item of {name} has invalid transforms")
        info: Any = StorageInfo(path, fields["offset"], fields["length"], transforms)
        if (crc32 := fields.get("crc32")) is not None:
            if type(crc32) is not int:
                self._fail(f"an item of {name} has the CRC-32 {short(crc32)}")
            info.crc32 = crc32
        return info  # type: ignore[no-any-return]

    def _check_items(self, entries: dict[str, Any], items: dict[dcp.MetadataIndex, StorageInfo]) -> None:
        """Checks that every chunk has an item, and every item has a chunk."""
        wanted = set()
        for name, entry in entries.items():
            if isinstance(entry, dcp.BytesStorageMetadata):
                wanted.add(dcp.MetadataIndex(name))
            else:
                for chunk in entry.chunks:
                    wanted.add(index := dcp.MetadataIndex(name, chunk.offsets))
                    most = _ELEMENT * math.prod(max(size, 1) for size in chunk.sizes) + _REST
                    if index in items and items[index].length > most:
                        self._fail(f"{name} at {tuple(chunk.offsets)} has more bytes than its elements can need")
        for index in chain(wanted - items.keys(), items.keys() - wanted):
            have = "is stored, but belongs to no entry" if index in items else "is not stored"
            self._fail(f"{index.fqn}{f' at {tuple(index.offset)}' if index.offset else ''} {have}")

    def _check_places(self, items: dict[dcp.MetadataIndex, StorageInfo]) -> None:
        """Checks that no byte of a file belongs to two items."""
        placed = sorted((info.relative_path, info.offset, info.length, index.fqn) for index, info in items.items())
        for (file, at, length, name), (other_file, other_at, _, other) in pairwise(placed):
            if file == other_file and at + length > other_at:
                self._fail(f"{name} and {other} share bytes of {file}")

    def _planner_data(self, value: Any) -> Any:
        """The path of each entry in the state dict: dict keys and list indexes."""
        if value is None:
            return None
        if type(value) is not dict or not all(
            type(name) is str and type(path) is tuple and all(type(one) in (str, int) for one in path)
            for name, path in value.items()
        ):
            self._fail("its planner data are not the paths of entries, as DefaultSavePlanner writes them")
        for name, path in value.items():
            if name != ".".join(map(str, path)):
                self._fail(f"{name} is not the name of the path {short(path)}")
        return value

    def _storage_meta(self, value: Any) -> dcp.StorageMeta:
        fields = self._fields(value, "StorageMeta", "its storage data")
        for name, one in fields.items():
            fits = isinstance(one, str | PurePosixPath) if name != "modules" else _texts(one)
            if one is not None and not fits:
                self._fail(f"its storage data have the {name} {short(one)}")
        return dcp.StorageMeta(**fields)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_grid(chunks: list[dcp.ChunkStorageMetadata]) -> bool:
    """True if every cut goes through the whole tensor, like cuts between ranks. Then no two chunks overlap."""
    for dim in range(len(chunks[0].sizes)):
        spans = sorted({(chunk.offsets[dim], chunk.sizes[dim]) for chunk in chunks})
        if any(at + size > after for (at, size), (after, _) in pairwise(spans)):
            return False
    return len({tuple(chunk.offsets) for chunk in chunks}) == len(chunks)


def _texts(value: Any) -> bool:
    texts: Iterable[Any] = value if type(value) in (list, tuple) else [None]
    return all(type(one) is str for one in texts)

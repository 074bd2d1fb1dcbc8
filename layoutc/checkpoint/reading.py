"""Reads the metadata of a torch.distributed.checkpoint folder, and the headers of its items, without trusting them.

torch reads `.metadata` with plain pickle, which runs any code in the file. Here a pickle can only create the object
types that metadata consists of, and they are checked before use. An item's header comes from its zip's directory and
its pickle, a few KB each; no tensor data is read.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import metadata as dcp

from layoutc.checkpoint.untrusted import unpickling, zips
from layoutc.checkpoint.untrusted.files import open_file, read_at, read_whole, short
from layoutc.checkpoint.untrusted.metadata import StorageInfo, metadata_of
from layoutc.runtime.errors import DamagedError, LayoutError
from layoutc.runtime.weight.stored_form import FORMAT, is_shape, is_size, wrong_in

METADATA = ".metadata"
METADATA_BYTES = 2**30  # the largest metadata that is accepted: some ten million pieces
_PICKLE_BYTES = 2**26  # the largest item pickle that is accepted; a tensor's has a few KB


class Plain(NamedTuple):
    """A tensor in a file, without its data."""

    dtype: torch.dtype
    shape: tuple[int, ...]


# ------------------------------------------------------------------------------------------------------------ metadata
def read_metadata(folder: Path) -> dcp.Metadata:
    """The checked metadata of a checkpoint folder, in torch's classes.

    Chunks cover every tensor exactly once, every chunk has an item, and every item is in a file of this folder. Runs no
    code from the file. Raises LayoutError if there is no metadata, because the save did not finish or the folder is not
    a checkpoint; DamagedError if the metadata is not what torch.distributed.checkpoint writes.
    """
    path = folder / METADATA
    try:
        data = read_whole(path, METADATA_BYTES)
    except FileNotFoundError:
        raise LayoutError(_missing(folder)) from None
    return metadata_of(data, str(path))


def _missing(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder" if folder.exists() else f"{folder} does not exist"
    if any(folder.glob("__*.metadata")):
        return (
            f"{folder} has one metadata file for each rank (dcp.save with use_collectives=False), which layoutc "
            "does not read: save with collectives"
        )
    if any(folder.glob("*.distcp")) or any(folder.glob("*.metadata.tmp")):
        return (
            f"{folder} has no {METADATA}, which is written last: the save did not finish. Some of its weights are "
            "missing; use an earlier checkpoint, and delete this one"
        )
    return f"{folder} is not a checkpoint: it has no {METADATA}"


def bytes_needed(stored: Iterable[StorageInfo]) -> dict[str, int]:
    """The minimum size of each file that items are stored in, by file name."""
    needed: dict[str, int] = {}
    for info in stored:
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    return needed


def check_files(folder: Path, metadata: dcp.Metadata) -> None:
    """Raises DamagedError if a file of a checkpoint is missing, or shorter than its items."""
    for name, least in bytes_needed(metadata.storage_data.values()).items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            raise DamagedError(
                f"{folder / name} is missing, though {METADATA} names it; copy the whole folder"
            ) from None
        if size < least:
            raise DamagedError(
                f"{folder / name} has {size:,} bytes, but its items end at {least:,}: it is truncated; copy it again"
            )


# --------------------------------------------------------------------------------------------------------------- items
def header_of(folder: Path, info: StorageInfo) -> dict[str, Any] | None:
    """An item's header, read without its data.

    For a quantized tensor, its state (`stored_form.state_of`, with planes as `Plain`); for a plain tensor, {"dtype",
    "shape"}; for any other plain value, {"value": the name of its type}. None if the item was written through a
    transform (e.g. compression), which can't be read.

    Raises DamagedError if the item is not a torch.save zip, or its pickle refers to anything that tensors do not need.
    """
    if info.transform_descriptors:
        return None
    where = where_of(folder, info)
    with _window(folder, info) as read:
        directory = zips.directory(read, info.length, where)
        if getattr(info, "crc32", directory.crc32) != directory.crc32:
            raise DamagedError(f"{where} is not the item that was saved (the CRC-32 of its directory differs)")
        pickles = [r for r in directory.records if r.name.count("/") == 1 and r.name.endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].size > _PICKLE_BYTES:
            raise DamagedError(f"{where} is not a complete torch.save zip: it has no data.pkl of a plausible size")
        first = zips.data_start(read, pickles[0], where)
        data = bytes(read(first, pickles[0].size))
    if zlib.crc32(data) != pickles[0].crc32:
        raise DamagedError(f"{where}: the bytes of data.pkl are not those that were written (CRC-32 differs)")
    return _header(data, where)


def directory_crc_of(folder: Path, info: StorageInfo) -> int:
    """The CRC-32 of an item's zip directory: a fingerprint of the item, since the directory has all records' CRC-32.

    Reads only the end of the item. Raises DamagedError if there is no directory.
    """
    with _window(folder, info) as read:
        return zips.directory(read, info.length, where_of(folder, info)).crc32


def where_of(folder: Path, info: StorageInfo) -> str:
    """An item's location, for messages."""
    return f"{folder / info.relative_path}, bytes {info.offset:,} to {info.offset + info.length:,}"


@contextmanager
def _window(folder: Path, info: StorageInfo) -> Iterator[zips.Read]:
    """Opens an item's file; yields a function that reads bytes of the item."""
    path = folder / info.relative_path
    try:
        file = open_file(path)
    except FileNotFoundError as error:
        raise DamagedError(f"{path} can't be read, though {METADATA} names it: {error.strerror}") from error

    def read(offset: int, length: int) -> bytes:
        length = min(length, info.length - offset)
        return read_at(file, info.offset + offset, length) if offset >= 0 and length > 0 else b""

    with file:
        yield read


# ------------------------------------------------------------------------------------------------------- item pickles
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}


class Storage(NamedTuple):
    """A storage that a persistent id of an item's pickle names."""

    dtype: torch.dtype
    key: str
    elements: int


class _State(NamedTuple):
    """The argument of layoutc.restore_tensor."""

    state: Any


# Makes a tensor from storage, offset, shape, strides, dtype, and whether it has more than a plain tensor (hooks, ...).
Make = Callable[[Storage, Any, Any, Any, Any, bool], Any]


def value_of(data: bytes, where: str, make: Make, restored: Callable[[Any], Any], **options: Any) -> Any:
    """The value of an item's pickle.

    make: called in place of torch._utils._rebuild_tensor_v2 and _v3. restored: called in place of
    layoutc.restore_tensor. options: passed to `unpickling.read`. Raises DamagedError.
    """

    def persistent(pid: Any) -> Storage:
        if not _is_storage(pid):
            raise DamagedError(f"{where} has a persistent id that does not name a storage")
        return Storage(pid[1], pid[2], pid[4])

    def tensor(storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, *more: Any) -> Any:
        return typed_tensor(storage, offset, shape, strides, grad, None, getattr(storage, "dtype", None), *more)

    def typed_tensor(
        storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *more: Any
    ) -> Any:
        if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype) or not is_shape(shape):
            raise DamagedError(f"{where} holds a tensor with an invalid storage, shape or dtype")
        return make(storage, offset, shape, strides, dtype, any((hooks, *more)))

    names = {
        **{("torch", name): dtype for name, dtype in _STORAGES.items()},  # a storage class stands for its dtype
        ("torch.storage", "UntypedStorage"): torch.uint8,
        ("torch._utils", "_rebuild_tensor_v2"): tensor,
        ("torch._utils", "_rebuild_tensor_v3"): typed_tensor,
        ("torch._utils", "_rebuild_parameter"): lambda data, requires_grad, hooks: data,
        ("layoutc", "restore_tensor"): lambda state: restored(state),  # a new function, since a pickle may modify it
        ("collections", "OrderedDict"): lambda: {},
    }
    return unpickling.read(data, names, where, persistent=persistent, **options)


def _header(data: bytes, where: str) -> dict[str, Any]:
    value = value_of(
        data, where, lambda _, offset, shape, strides, dtype, more: Plain(dtype, shape), _State, longest=255
    )
    if isinstance(value, _State):
        return _checked(value.state, where)
    if isinstance(value, Plain):
        return {"dtype": value.dtype, "shape": value.shape}
    return {"value": type(value).__name__}


def _is_storage(pid: Any) -> bool:
    """True for a storage's persistent id: ("storage", dtype, key, device, elements)."""
    if not isinstance(pid, tuple) or len(pid) != 5:
        return False
    kind, dtype, key, _, elements = pid
    return kind == "storage" and isinstance(dtype, torch.dtype) and isinstance(key, str) and is_size(elements)


def _checked(state: Any, where: str) -> dict[str, Any]:
    """A quantized tensor's state. Raises DamagedError if a field's type is not the one that `state_of` writes."""
    if not isinstance(state, dict):
        raise DamagedError(f"{where} holds a quantized tensor without a state")
    if type(form := state.get("format")) is not int or form != FORMAT:
        raise LayoutError(f"{where} holds a tensor in format {short(form)}; this version of layoutc reads {FORMAT}")
    if (wrong := wrong_in(state, lambda plane: isinstance(plane, Plain))) is not None:
        raise DamagedError(f"{where} holds a damaged quantized tensor: {wrong}")
    return state

"""Parts of a torch.distributed.checkpoint folder, read without trusting it: its metadata, and what each item is.

torch reads `.metadata` with plain pickle, which runs whatever a file says. Here it may only make what such metadata is
made of, and it is checked before it is used. What an item holds is told from its zip's directory and its pickle, of a
few KB each; no tensor data is read for that.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import metadata as dcp

from layoutc.checkpoint.untrusted import unpickling, zips
from layoutc.checkpoint.untrusted.files import DIMS, open_file, read_at, read_whole, short
from layoutc.checkpoint.untrusted.metadata import StorageInfo, metadata_of
from layoutc.runtime.errors import DamagedError, LayoutError
from layoutc.runtime.weight.stored_form import FORMAT, wrong_in

METADATA = ".metadata"
METADATA_BYTES = 2**30  # the largest that is read: some ten million pieces
_PICKLE_BYTES = 2**26  # the largest pickle of an item: those of tensors have a few KB


class Plain(NamedTuple):
    """A tensor of which only this is known."""

    dtype: torch.dtype
    shape: tuple[int, ...]


# ------------------------------------------------------------------------------------------------------------ metadata
def read_metadata(folder: Path) -> dcp.Metadata:
    """The metadata of a checkpoint folder, of plain classes of torch, checked: every tensor is covered by its chunks
    once, every chunk has an item, and every item a file of this folder.

    Raises LayoutError where there is none, since the save has not ended, or the folder is no checkpoint of this kind;
    DamagedError where it is not what torch.distributed.checkpoint writes. Runs nothing that the file says.
    """
    path = folder / METADATA
    try:
        data = read_whole(path, METADATA_BYTES)
    except FileNotFoundError:
        raise LayoutError(_missing(folder)) from None
    return metadata_of(data, str(path))


def _missing(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is no folder"
    if any(folder.glob("__*.metadata")):
        return (
            f"{folder} has metadata of each rank (dcp.save with use_collectives=False), which layoutc does not read: "
            "save with collectives"
        )
    if any(folder.glob("*.distcp")) or any(folder.glob("*.metadata.tmp")):
        return (
            f"{folder} has no {METADATA}, which is written last: the save that made it did not end. Its weights are "
            "not all there; use an earlier checkpoint, and delete this one"
        )
    return f"{folder} is no checkpoint: it has no {METADATA}"


def check_files(folder: Path, metadata: dcp.Metadata) -> None:
    """Raises DamagedError where a file of a checkpoint is missing, or shorter than what its items need."""
    needed: dict[str, int] = {}
    for info in metadata.storage_data.values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    for name, least in needed.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            raise DamagedError(f"{folder / name} is missing, and {METADATA} names it; copy the whole folder") from None
        if size < least:
            raise DamagedError(f"{folder / name} has {size:,} bytes, and its items end at {least:,}: it was cut off")


# --------------------------------------------------------------------------------------------------------------- items
def header_of(folder: Path, info: StorageInfo) -> dict[str, Any] | None:
    """What an item is, without its data.

    The state of a quantized tensor (`stored_form.state_of`; planes as `Plain`), {"dtype", "shape"} of a plain tensor,
    {"value": name of its type} of any other plain value.

    None for an item that was transformed on its way to the file (compressed, say), which can't be looked into.
    Raises DamagedError where the item is no torch.save zip, or names something that is in neither kind of tensor.
    """
    if info.transform_descriptors:
        return None
    where = where_of(folder, info)
    with _Window(folder, info) as read:
        found = zips.directory(read, info.length, where)
        if getattr(info, "crc32", found.crc32) != found.crc32:
            raise DamagedError(f"{where} is not the item that was saved (the CRC-32 of its directory differs)")
        pickles = [r for r in found.records if r.name.count("/") == 1 and r.name.endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].size > _PICKLE_BYTES:
            raise DamagedError(f"{where} is not a whole torch.save zip: it has no data.pkl of a fit size")
        first = zips.place_of(read, pickles[0], where)
        data = bytes(read(first, pickles[0].size))
    if zlib.crc32(data) != pickles[0].crc32:
        raise DamagedError(f"{where}: the bytes of data.pkl are not those that were written (CRC-32 differs)")
    return _header(data, where)


def directory_crc_of(folder: Path, info: StorageInfo) -> int:
    """The CRC-32 of an item's directory, which has the names, sizes and CRC-32 of all its records: its fingerprint.

    Only the tail of the item is read. Raises DamagedError where it has none.
    """
    with _Window(folder, info) as read:
        return zips.directory(read, info.length, where_of(folder, info)).crc32


def where_of(folder: Path, info: StorageInfo) -> str:
    """How messages name an item."""
    return f"{folder / info.relative_path}, bytes {info.offset:,} to {info.offset + info.length:,}"


class _Window:
    """The bytes of an item, in its file; a context that closes the file and gives a function that reads."""

    def __init__(self, folder: Path, info: StorageInfo) -> None:
        self._info = info
        path = folder / info.relative_path
        try:
            self._file = open_file(path)
        except FileNotFoundError as error:
            raise DamagedError(f"{path} can't be read, and {METADATA} names it: {error.strerror}") from error

    def __enter__(self) -> zips.Read:
        return self._read

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def _read(self, offset: int, length: int) -> bytes:
        length = min(length, self._info.length - offset)
        if offset < 0 or length <= 0:
            return b""
        return read_at(self._file, self._info.offset + offset, length)


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


class _Storage(NamedTuple):
    dtype: torch.dtype
    elements: int


class _State(NamedTuple):
    """What restore_tensor was given."""

    state: Any


def names_of(
    tensor: Callable[..., Any], typed_tensor: Callable[..., Any], restored: Callable[[Any], Any]
) -> dict[tuple[str, str], Any]:
    """What the names in an item's pickle stand for. tensor, typed_tensor: called as torch._utils._rebuild_tensor_v2 and
    _v3 are; restored: as layoutc.restore_tensor. In persistent ids, a storage's class is its dtype."""
    return {
        **{("torch", name): dtype for name, dtype in _STORAGES.items()},
        ("torch.storage", "UntypedStorage"): torch.uint8,
        ("torch._utils", "_rebuild_tensor_v2"): tensor,
        ("torch._utils", "_rebuild_tensor_v3"): typed_tensor,
        ("torch._utils", "_rebuild_parameter"): lambda data, requires_grad, hooks: data,
        ("layoutc", "restore_tensor"): lambda state: restored(state),  # no function that a pickle could change
        ("collections", "OrderedDict"): lambda: {},
    }


def _header(data: bytes, where: str) -> dict[str, Any]:
    def storage(pid: Any) -> _Storage:
        if not is_storage(pid):
            raise DamagedError(f"{where} has a persistent id that names no storage")
        return _Storage(pid[1], pid[4])

    def tensor(storage: _Storage, offset: int, shape: Any, strides: Any, *rest: Any) -> Plain:
        return _plain(storage, shape, storage.dtype, where)

    def typed_tensor(
        storage: _Storage, offset: int, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *rest: Any
    ) -> Plain:
        return _plain(storage, shape, dtype, where)

    names = names_of(tensor, typed_tensor, _State)
    value = unpickling.read(data, names, where, dtypes=True, persistent=storage, longest=255)
    if isinstance(value, _State):
        return _checked(value.state, where)
    if isinstance(value, Plain):
        return {"dtype": value.dtype, "shape": value.shape}
    return {"value": type(value).__name__}


def _plain(storage: Any, shape: Any, dtype: Any, where: str) -> Plain:
    if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype) or not is_shape(shape):
        raise DamagedError(f"{where} holds a tensor whose storage, shape or dtype is none")
    return Plain(dtype, tuple(shape))


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def is_shape(value: Any) -> bool:
    """True for a tuple of as many sizes as a tensor may have."""
    return isinstance(value, tuple) and len(value) <= DIMS and all(map(_is_size, value))


def is_storage(pid: Any) -> bool:
    """True for what stands for a storage: ("storage", dtype, key, device, elements)."""
    if not isinstance(pid, tuple) or len(pid) != 5:
        return False
    kind, dtype, key, _, elements = pid
    return kind == "storage" and isinstance(dtype, torch.dtype) and isinstance(key, str) and _is_size(elements)


def _checked(state: Any, where: str) -> dict[str, Any]:
    """A state of which every part has the type that `state_of` gives it."""
    if not isinstance(state, dict):
        raise DamagedError(f"{where} holds a quantized tensor without a state")
    if type(form := state.get("format")) is not int or form != FORMAT:
        raise LayoutError(f"{where} holds a tensor in form {short(form)}; this version of layoutc reads {FORMAT}")
    if (wrong := wrong_in(state, lambda plane: isinstance(plane, Plain))) is not None:
        raise DamagedError(f"{where} holds a quantized tensor whose {wrong}")
    return state

"""Items of a checkpoint's files, read whole and checked; tensors stand where their bytes were read, uncopied."""

from __future__ import annotations

import io
import os
import pickle
import sys
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layoutc.checkpoint.reading import is_shape, is_storage, names_of
from layoutc.checkpoint.untrusted import unpickling, zips
from layoutc.checkpoint.untrusted.files import open_file
from layoutc.checkpoint.untrusted.metadata import StorageInfo
from layoutc.runtime.errors import DamagedError, LayoutError
from layoutc.runtime.weight import stored_form
from layoutc.runtime.weight.checksums import crc32


def read_item(folder: Path, name: str, info: StorageInfo, is_tensor: bool) -> Any:
    """A stored item, every byte of it checked, as torch.load gives it on the host.

    name: of the entry of the state dict, for messages. is_tensor: a tensor is expected; it keeps all bytes of the item
    in memory, and asks for no gradient.

    Raises DamagedError where the item is not what was saved, or holds anything but tensors and plain values; nothing is
    run. LayoutError where no installed recipe has the layout of a quantized tensor.
    """
    where = f"{folder / info.relative_path} at {info.offset} ({name})"
    if info.transform_descriptors:
        raise LayoutError(
            f"{where} was written through {', '.join(info.transform_descriptors)}, which is not read here"
        )
    data = _bytes(folder / info.relative_path, name, info, where)
    directory = zips.check(memoryview(data.numpy()), where)  # type: ignore[arg-type]
    if getattr(info, "crc32", directory.crc32) != directory.crc32:
        raise DamagedError(f"{where} is another item than was saved there")
    program, places = _program(data, directory, where)
    if is_tensor and program and (value := _tensor(data, directory, program, places, where)) is not None:
        return value
    unpickling.check(program, where, longest=255)
    return _any(data, name, where)


def _bytes(path: Path, name: str, info: StorageInfo, where: str) -> Tensor:
    """The bytes of an item, in memory that torch has aligned; none is asked for where the file has not as many."""
    try:
        with open_file(path) as file:
            there = max(os.fstat(file.fileno()).st_size - info.offset, 0)
            data = torch.empty(min(info.length, there), dtype=torch.uint8)
            view, so_far = memoryview(data.numpy()), 0  # type: ignore[arg-type]
            file.seek(info.offset)
            while so_far < len(view) and (more := file.readinto(view[so_far:])):  # type: ignore[attr-defined]
                so_far += more
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing ({name} is stored there)") from error
    if so_far != info.length:
        raise DamagedError(f"{where} ends after {so_far} of {info.length} bytes")
    return data


def _any(data: Tensor, name: str, where: str) -> Any:
    """What torch.load makes of an item."""
    try:
        with stored_form.at_most(2 * data.numel()):
            return torch.load(io.BytesIO(memoryview(data.numpy())), map_location="cpu", weights_only=True)  # type: ignore[arg-type]
    except pickle.UnpicklingError as error:
        told = next((line.strip() for line in str(error).splitlines() if "global" in line.lower()), str(error))
        raise DamagedError(f"{where} holds more than tensors and plain values; nothing was run: {told}") from error
    except LayoutError as error:
        raise type(error)(f"{name}: {error}") from error
    except Exception as error:
        raise DamagedError(f"{where} can't be read: {error}") from error


# ------------------------------------------------------------------------------------------------- tensors in the bytes
class _Storage(NamedTuple):
    dtype: torch.dtype
    data: Tensor  # uint8


def _program(data: Tensor, directory: zips.Directory, where: str) -> tuple[bytes, dict[str, slice]]:
    """The pickle of an item, b"" where it has none; and where each of its records lies."""
    view = memoryview(data.numpy())  # type: ignore[arg-type]

    def place_of(record: zips.Record) -> slice:
        first = zips.place_of(lambda offset, length: view[offset : offset + length], record, where)
        return slice(first, first + record.size)

    root = directory.records[0].name.split("/")[0]
    places = {record.name.removeprefix(f"{root}/"): place_of(record) for record in directory.records}
    return bytes(view[places["data.pkl"]]) if "data.pkl" in places else b"", places


def _tensor(
    data: Tensor, directory: zips.Directory, program: bytes, places: dict[str, slice], where: str
) -> Tensor | None:
    """The tensor that an item is, over the item's bytes; None for what only torch.load can make, or refuse."""
    order = data[places["byteorder"]].numpy().tobytes() if "byteorder" in places else b"little"
    if len(places) < len(directory.records) or order != sys.byteorder.encode():
        return None
    starts = (data.data_ptr() + place.start for place in places.values())
    checked = {(start, one.size): one.crc32 for start, one in zip(starts, directory.records, strict=True) if one.size}

    def crc32_of(plane: Tensor) -> int:
        known = checked.get((plane.data_ptr(), plane.nbytes)) if plane.is_contiguous() else None
        return crc32(plane) if known is None else known

    def storage(pid: Any) -> _Storage:
        if not is_storage(pid):
            raise DamagedError(f"{where} has a persistent id that names no storage")
        _, dtype, key, _, elements = pid
        place = places.get(f"data/{key}")
        if place is None or (found := data[place]).numel() != elements * dtype.itemsize:
            raise DamagedError(f"{where} has a storage of another size than its tensor says")
        return _Storage(dtype, found)

    def tensor(storage: _Storage, offset: int, shape: Any, strides: Any, grad: Any, *more: Any) -> Tensor:
        return _view(storage, offset, shape, strides, storage.dtype, any(more))

    def typed_tensor(
        storage: _Storage, offset: int, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *more: Any
    ) -> Tensor:
        return _view(storage, offset, shape, strides, dtype, any((hooks, *more)))

    calls = count()

    def restored(state: Any) -> Any:
        if next(calls):
            raise DamagedError(f"{where} is one tensor, and restores several")
        return stored_form.restored(state, crc32_of)

    names = names_of(tensor, typed_tensor, restored)
    try:
        value = unpickling.read(program, names, where, dtypes=True, persistent=storage, builds=False)
    except DamagedError:
        return None
    return value if isinstance(value, Tensor) else None


def _view(storage: _Storage, offset: int, shape: Any, strides: Any, dtype: torch.dtype, more: bool) -> Tensor:
    """A tensor over a storage. Raises ValueError where there is more to it, or it reaches beyond its storage."""
    sizes = is_shape(shape) and is_shape(strides) and len(shape) == len(strides)
    if not sizes or type(offset) is not int or not isinstance(dtype, torch.dtype):
        raise ValueError("no shape, strides, offset and dtype of a tensor")
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    beyond = prod(shape) > 0 and last * dtype.itemsize >= storage.data.numel()
    if more or beyond or offset < 0:
        raise ValueError("no plain tensor within its storage")
    flat = storage.data.view(dtype)
    return flat.as_strided(shape, strides, int(flat.storage_offset()) + offset)

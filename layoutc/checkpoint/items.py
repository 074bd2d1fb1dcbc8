"""Reads and checks whole items of a checkpoint's files. Tensors are views of the bytes read, not copies."""

from __future__ import annotations

import io
import os
import pickle
import re
import sys
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layoutc.checkpoint.reading import Storage, value_of
from layoutc.checkpoint.untrusted import unpickling, zips
from layoutc.checkpoint.untrusted.files import open_file
from layoutc.checkpoint.untrusted.metadata import StorageInfo
from layoutc.runtime.errors import DamagedError, LayoutError
from layoutc.runtime.weight import stored_form
from layoutc.runtime.weight.checksums import crc32


def read_item(folder: Path, name: str, info: StorageInfo, is_tensor: bool) -> Any:
    """Returns a stored item as torch.load would, on the host, after checking all of its bytes.

    name: the state dict entry, for messages. is_tensor: a tensor is expected. The returned tensor keeps the whole item
    in memory, and requires no gradient.

    Raises DamagedError if the item differs from what was saved, or holds anything but tensors and plain values; none of
    its code is run. Raises LayoutError if no installed recipe has a quantized tensor's layout.
    """
    where = f"{folder / info.relative_path} at {info.offset} ({name})"
    if info.transform_descriptors:
        raise LayoutError(
            f"{where} was transformed when it was written ({', '.join(info.transform_descriptors)}), which layoutc "
            "can't read: save without transforms"
        )
    data = _bytes(folder / info.relative_path, name, info, where)
    directory = zips.check(memoryview(data.numpy()), where)  # type: ignore[arg-type]
    if getattr(info, "crc32", directory.crc32) != directory.crc32:
        raise DamagedError(f"{where} is not the item that was saved there; read another copy of the file")
    program, slices = _program(data, directory, where)
    if is_tensor and program and (value := _tensor(data, directory, program, slices, where)) is not None:
        return value
    unpickling.check(program, where, longest=255)
    unpickling.check_calls(program, where)
    return _any(data, name, where)


def _bytes(path: Path, name: str, info: StorageInfo, where: str) -> Tensor:
    """The bytes of an item, in memory aligned by torch. Allocates at most the file's size."""
    try:
        with open_file(path) as file:
            there = max(os.fstat(file.fileno()).st_size - info.offset, 0)
            data = torch.empty(min(info.length, there), dtype=torch.uint8, device="cpu")
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
    """Reads an item with torch.load."""
    try:
        with stored_form.at_most(2 * data.numel()):
            return torch.load(io.BytesIO(memoryview(data.numpy())), map_location="cpu", weights_only=True)  # type: ignore[arg-type]
    except pickle.UnpicklingError as error:
        reason = next((line.strip() for line in str(error).splitlines() if "global" in line.lower()), str(error))
        if theirs := re.search(r"GLOBAL (torchao\.[\w.]+)", reason):
            module = ".".join(theirs[1].split(".")[:2])
            raise LayoutError(
                f"{name} is a {theirs[1]} in the checkpoint: `import {module}` before the load lets torch read it"
            ) from error
        raise DamagedError(f"{where} holds more than tensors and plain values; none of it was run: {reason}") from error
    except LayoutError as error:
        raise type(error)(f"{name}: {error}") from error
    except Exception as error:
        raise DamagedError(f"{where} can't be read: {error}") from error


# ------------------------------------------------------------------------------------------------- tensors in the bytes
def _program(data: Tensor, directory: zips.Directory, where: str) -> tuple[bytes, dict[str, slice]]:
    """An item's pickle (b"" if it has none), and each record's slice of the item's bytes."""
    view = memoryview(data.numpy())  # type: ignore[arg-type]

    root, slices = directory.records[0].name.split("/")[0], dict[str, slice]()
    for record in directory.records:
        first = zips.data_start(lambda offset, length: view[offset : offset + length], record, where)
        slices[record.name.removeprefix(f"{root}/")] = slice(first, first + record.size)
    return bytes(view[slices["data.pkl"]]) if "data.pkl" in slices else b"", slices


def _tensor(
    data: Tensor, directory: zips.Directory, program: bytes, slices: dict[str, slice], where: str
) -> Tensor | None:
    """An item's tensor as a view of the item's bytes; None if torch.load has to read or reject the item."""
    order = data[slices["byteorder"]].numpy().tobytes() if "byteorder" in slices else b"little"
    if len(slices) < len(directory.records) or order != sys.byteorder.encode():
        return None
    starts = (data.data_ptr() + record.start for record in slices.values())
    checked = {(start, one.size): one.crc32 for start, one in zip(starts, directory.records, strict=True) if one.size}

    def crc32_of(plane: Tensor) -> int:
        checksum = checked.get((plane.data_ptr(), plane.nbytes)) if plane.is_contiguous() else None
        return crc32(plane) if checksum is None else checksum

    def view(storage: Storage, offset: Any, shape: Any, strides: Any, dtype: torch.dtype, more: bool) -> Tensor:
        content = data[slices[f"data/{storage.key}"]]
        sizes = stored_form.is_shape(strides) and len(shape) == len(strides) and type(offset) is int and offset >= 0
        if more or not sizes or content.numel() != storage.elements * storage.dtype.itemsize:
            raise ValueError("not a plain tensor, or its storage has another size")
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if prod(shape) > 0 and last * dtype.itemsize >= content.numel():
            raise ValueError("not within its storage")
        flat = content.view(dtype)
        return flat.as_strided(shape, strides, int(flat.storage_offset()) + offset)

    calls = count()

    def restored(state: Any) -> Any:
        if next(calls):
            raise ValueError("not one tensor")
        return stored_form.restored(state, crc32_of)

    try:
        value = value_of(program, where, view, restored, builds=False)
    except DamagedError:
        return None
    return value if isinstance(value, Tensor) else None

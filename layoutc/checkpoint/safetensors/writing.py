"""Writes an export's files: each weight during the gather of the next, and config.json at the end."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from layoutc.checkpoint.bindings.configs import KEYS, holder, holders, spelled
from layoutc.checkpoint.bindings.source_configs import Modules, config_of
from layoutc.checkpoint.common.folders import partly, sync
from layoutc.checkpoint.held.stored import NAMES, OF_OTHERS, Stored
from layoutc.checkpoint.safetensors.files import INDEX, SINGLE
from layoutc.checkpoint.safetensors.recognize import CONFIG, Bound
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Facts


class Sized(Protocol):
    """Something to write, with its size in bytes."""

    @property
    def nbytes(self) -> int:
        """The item's bytes in a file."""


S = TypeVar("S", bound=Sized)


def split_into_files(items: Iterable[S], limit: int) -> dict[str, list[S]]:
    """Splits items, in order, into files of at most `limit` bytes or of one item; returns file name -> items. Raises
    ValueError if the limit is not positive."""
    if limit <= 0:
        raise ValueError(f"max_shard_bytes must be positive, not {limit}")
    files: list[list[S]] = [[]]
    used = 0
    for item in items:
        if files[-1] and used + item.nbytes > limit:
            files.append([])
            used = 0
        files[-1].append(item)
        used += item.nbytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{n:05}-of-{len(files):05}.safetensors": some for n, some in enumerate(files, 1)}


def check_new(folder: Path, what: str) -> None:
    """Raises FileExistsError unless a folder is new or empty. what: the operation, as a verb, for the message."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty: {what} into a new folder")


def begin_folder(folder: Path) -> Path:
    """Makes the temporary folder next to `folder` that files are written into."""
    made = partly(folder)
    made.mkdir()
    return made


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """The folder of `begin_folder`, removed on exit unless `finish_folder` has renamed it."""
    made = begin_folder(folder)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def finish_folder(partly: Path, folder: Path, files: Mapping[str, Sequence[Planned]]) -> None:
    """Writes the index, if there are several files, and renames the folder into place."""
    if len(files) > 1:
        where, total = {one.name: file for file, planned in files.items() for one in planned}, 0
        for name in files:
            with open(partly / name, "rb") as file:  # the size without the header, whose length is in 8 bytes
                total += os.fstat(file.fileno()).st_size - 8 - int.from_bytes(file.read(8), "little")
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (partly / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        sync(partly / INDEX)
    sync(partly)
    os.replace(partly, folder)  # `folder` is empty, if it exists
    sync(folder.parent)


class Planned(NamedTuple):
    """A tensor that a file will hold, before it is made. may_be_shorter: its planned size is a maximum. declared: the
    dtype and shape in the header, for raw bytes of a dtype that torch lacks."""

    name: str
    facts: Facts
    may_be_shorter: bool = False
    declared: tuple[str, tuple[int, ...]] | None = None

    @property
    def nbytes(self) -> int:
        """The tensor's maximum bytes."""
        return self.facts.nbytes


def copy_of(name: str, stored: Stored) -> Planned:
    """Plans a tensor copied from another file, as raw bytes if torch lacks its dtype."""
    if stored.dtype in OF_OTHERS:
        return Planned(name, Facts(stored.shape, OF_OTHERS[stored.dtype]))
    return Planned(name, Facts((stored.end - stored.begin,), torch.uint8), declared=(stored.dtype, stored.shape))


class OpenFile:
    """A safetensors file, written tensor by tensor in any order. It accepts exactly the planned tensors and sizes.

    As in the safetensors library, wider dtypes come first, so every tensor is aligned. Byte tensors that may be shorter
    than planned come last, in the order they are made. reserve: bytes for metadata, which is known only at the end.
    Raises OSError if writing fails.
    """

    def __init__(self, path: Path, planned: Iterable[Planned], reserve: int = 0) -> None:
        self._left = {one.name: one for one in planned}
        self._declared = {one.name: one.declared for one in self._left.values() if one.declared is not None}
        self._spans: dict[str, tuple[int, int]] = {}
        self._facts, self._nbytes = dict[str, Facts](), 0
        by_width = sorted(self._left.values(), key=lambda one: (-one.facts.dtype.itemsize, one.name))
        for one in sorted(by_width, key=lambda one: one.may_be_shorter):
            self._append(one.name, one.facts)
        self._room = len(self._header({"format": "pt"})) + reserve
        for one in reversed(by_width):
            if one.may_be_shorter:
                self._nbytes -= self._facts.pop(one.name).nbytes
                del self._spans[one.name]
        self._room += -self._room % 8
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115 - closed by `finish`, or with the process

    def _append(self, name: str, facts: Facts) -> None:
        self._spans[name] = self._nbytes, self._nbytes + facts.nbytes
        self._facts[name], self._nbytes = facts, self._nbytes + facts.nbytes

    def _header(self, metadata: Mapping[str, str]) -> bytes:
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        for name, span in self._spans.items():
            facts = self._facts[name]
            dtype, shape = self._declared.get(name) or (NAMES[facts.dtype], facts.shape)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": list(span)}
        return json.dumps(header, separators=(",", ":")).encode()

    def put(self, name: str, tensor: Tensor) -> None:
        """Writes a CPU tensor. Raises LayoutError if it differs from the plan."""
        one, facts = self._left.pop(name, None), Facts(tuple(tensor.shape), tensor.dtype)
        shorter = one is not None and one.may_be_shorter and facts.dtype == one.facts.dtype
        shorter = shorter and one is not None and len(facts.shape) == 1 and facts.nbytes <= one.facts.nbytes
        if one is None or not (shorter or facts == one.facts):
            raise LayoutError(
                f"{name} is {tensor.dtype} of {list(tensor.shape)}, not {one.facts if one else None} as planned"
            )
        if one.may_be_shorter:
            self._append(name, facts)
        self._file.seek(8 + self._room + self._spans[name][0])
        self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def put_all(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Writes tensors with `put`, one after another."""
        for name, tensor in tensors:
            self.put(name, tensor)

    def finish(self, metadata: Mapping[str, str] | None = None) -> None:
        """Writes the header, and syncs the file. Raises LayoutError if a planned tensor was not written."""
        if self._left:
            raise LayoutError(f"{next(iter(self._left))} was planned, and not made")
        header = self._header(metadata or {"format": "pt"})
        assert len(header) <= self._room
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))
        self._file.truncate(8 + self._room + self._nbytes)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class Writing:
    """A writer thread: it writes one weight while the next is gathered, so at most two are in memory."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "layoutc-export")
        self._last: Future[None] | None = None

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._pool.shutdown()

    def begin(self, work: Callable[..., None], *arguments: Any) -> None:
        """Waits for the previous work, then begins the next. Raises the previous work's error."""
        self.wait()
        self._last = self._pool.submit(work, *arguments)

    def wait(self) -> None:
        """Waits for the last work. Raises its error."""
        if self._last is not None:
            last, self._last = self._last, None
            last.result()


def write_streamed(path: Path, planned: Iterable[Planned], made: Iterable[tuple[str, Tensor]]) -> None:
    """Writes a file with one tensor in memory at a time. made: all planned tensors, in any order.

    Raises like OpenFile.
    """
    file = OpenFile(path, planned)
    file.put_all(made)
    file.finish()


def write_config(folder: Path, config: Mapping[str, Any], quantization: Mapping[str, Any]) -> None:
    """Writes config.json with this `quantization_config`, in the place where the config has it; none if it is empty."""
    stated = deepcopy(dict(config))
    found = holder(stated)
    before = found[0][found[1]] if found is not None else None
    for at in holders(stated) or [stated]:
        for one in KEYS:  # MLX writes the same config under two keys
            if one in at and at[one] == before:
                del at[one]
        if quantization:
            at[KEYS[0]] = dict(quantization)
            if "quant_method" not in spelled(quantization):
                at[KEYS[-1]] = dict(quantization)
    text = json.dumps(stated, indent=2, sort_keys=True, default=str) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    sync(folder / CONFIG)


def config_of_model(model: nn.Module | Mapping[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any] | None:
    """The config.json of a transformers model, as its save_pretrained writes it; None for other models. dtype: of plain
    tensors in the files; default: the model's."""
    from torch.distributed.fsdp import FSDPModule

    own: Any = getattr(model, "config", None)
    if not hasattr(own, "to_dict"):
        return None
    config = dict(own.to_dict())
    whole: Any = getattr(model, "_orig_mod", model)  # unwraps torch.compile
    classes = (kind for kind in type(whole).__mro__ if not issubclass(kind, FSDPModule))  # skips FSDP2's subclass
    config["architectures"] = config.get("architectures") or [next(classes).__name__]
    if (stored := dtype or getattr(whole, "dtype", None)) is not None:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(stored).removeprefix("torch.")
    return config


def quantization_of(
    theirs: Sequence[Bound], source: Mapping[str, Any], now: Modules, before: Modules
) -> dict[str, Any]:
    """Like `config_of`. Raises LayoutError for bindings that contradict each other."""
    found = config_of([one.binding for one in theirs], source, now, before)
    if found is None:
        raise LayoutError(
            f"the model's recipes have files {theirs[0].binding.name!r} with different configs, which one folder can't "
            "have: export a state dict for each"
        )
    return found

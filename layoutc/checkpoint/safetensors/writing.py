"""Writes files of an export: a weight at a time, beside the gather of the next, and config.json at the end."""

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

from layoutc.checkpoint.common.folders import partly, sync
from layoutc.checkpoint.held.stored import NAMES, OF_OTHERS, Stored
from layoutc.checkpoint.safetensors.files import INDEX, SINGLE
from layoutc.checkpoint.safetensors.recognize import CONFIG, Bound
from layoutc.runtime.bindings.configs import KEYS, holder, holders, spelled
from layoutc.runtime.bindings.source_configs import Modules, config_of
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Facts


class Sized(Protocol):
    """Something to write, with its size in bytes."""

    @property
    def nbytes(self) -> int:
        """Its bytes in a file."""


S = TypeVar("S", bound=Sized)


def split_into_files(items: Iterable[S], limit: int) -> dict[str, list[S]]:
    """Items, in order, in files of at most `limit` bytes, or of one item: by the names of the files. Raises ValueError
    if the limit is not positive."""
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
    """Raises FileExistsError if a folder is not a new one, or an empty one. what: what is done, as a verb."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty: {what} into a new folder")


def begin_folder(folder: Path) -> Path:
    """Makes the folder beside, into which files are written."""
    made = partly(folder)
    made.mkdir()
    return made


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """The folder of `begin_folder`, which is removed unless `finish_folder` has given it its name."""
    made = begin_folder(folder)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def finish_folder(partly: Path, folder: Path, files: Mapping[str, Sequence[Planned]]) -> None:
    """Writes the index, if there are several files, and gives the folder its name."""
    if len(files) > 1:
        where, total = {one.name: file for file, planned in files.items() for one in planned}, 0
        for name in files:
            with open(partly / name, "rb") as file:  # all but its header, whose length is in the first 8 bytes
                total += os.fstat(file.fileno()).st_size - 8 - int.from_bytes(file.read(8), "little")
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (partly / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        sync(partly / INDEX)
    sync(partly)
    os.replace(partly, folder)  # which is empty, if it exists
    sync(folder.parent)


class Planned(NamedTuple):
    """A tensor that a file will hold, before it is made. may_be_shorter: its size is the most that it can have.
    declared: the dtype and shape that the file says it has, of bytes of a dtype that torch does not have."""

    name: str
    facts: Facts
    may_be_shorter: bool = False
    declared: tuple[str, tuple[int, ...]] | None = None

    @property
    def nbytes(self) -> int:
        """The most bytes that it has."""
        return self.facts.nbytes


def copy_of(name: str, stored: Stored) -> Planned:
    """A tensor that is copied from another file: as bytes, where torch has no dtype for it."""
    if stored.dtype in OF_OTHERS:
        return Planned(name, Facts(stored.shape, OF_OTHERS[stored.dtype]))
    return Planned(name, Facts((stored.end - stored.begin,), torch.uint8), declared=(stored.dtype, stored.shape))


class OpenFile:
    """A file of safetensors that is written tensor by tensor, in any order, with what was planned and in no other size.

    As the library does, wider dtypes come first, so that every tensor is aligned. Those of bytes that may be shorter
    than planned come last, in the order in which they are made. reserve: bytes of metadata, which is known only at the
    end. Raises OSError if writing fails.
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
        """Writes a tensor on the CPU. Raises LayoutError if it is not as planned."""
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
        """Writes tensors as `put` does, one after another."""
        for name, tensor in tensors:
            self.put(name, tensor)

    def finish(self, metadata: Mapping[str, str] | None = None) -> None:
        """Writes the header, and waits for the disk. Raises LayoutError if something planned was not made."""
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
    """A thread that writes: a weight is written while the next is gathered, and no more are held."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "layoutc-export")
        self._last: Future[None] | None = None

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._pool.shutdown()

    def begin(self, work: Callable[..., None], *arguments: Any) -> None:
        """Begins work when the one before is done. Raises what failed in that."""
        self.wait()
        self._last = self._pool.submit(work, *arguments)

    def wait(self) -> None:
        """Waits for the last work. Raises what failed in it."""
        if self._last is not None:
            last, self._last = self._last, None
            last.result()


def write_streamed(path: Path, planned: Iterable[Planned], made: Iterable[tuple[str, Tensor]]) -> None:
    """Writes a file with one tensor in memory at a time. made: all that is planned, in any order.

    Raises as OpenFile.
    """
    file = OpenFile(path, planned)
    file.put_all(made)
    file.finish()


def write_config(folder: Path, config: Mapping[str, Any], quantization: Mapping[str, Any]) -> None:
    """Writes config.json with this `quantization_config`, where the config has one; or without any if it is empty."""
    stated = deepcopy(dict(config))
    found = holder(stated)
    before = found[0][found[1]] if found is not None else None
    for at in holders(stated) or [stated]:
        for one in KEYS:  # MLX has two that say the same
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
    """What config.json says of a model of transformers, as its save_pretrained does; None for others. dtype: of plain
    tensors in the files; default: the model's."""
    from torch.distributed.fsdp import FSDPModule

    own: Any = getattr(model, "config", None)
    if not hasattr(own, "to_dict"):
        return None
    config = dict(own.to_dict())
    whole: Any = getattr(model, "_orig_mod", model)  # of torch.compile
    classes = (kind for kind in type(whole).__mro__ if not issubclass(kind, FSDPModule))  # which FSDP2 subclasses
    config["architectures"] = config.get("architectures") or [next(classes).__name__]
    if (stored := dtype or getattr(whole, "dtype", None)) is not None:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(stored).removeprefix("torch.")
    return config


def quantization_of(
    theirs: Sequence[Bound], source: Mapping[str, Any], now: Modules, before: Modules
) -> dict[str, Any]:
    """As `config_of`. Raises LayoutError for bindings that contradict each other."""
    found = config_of([one.binding for one in theirs], source, now, before)
    if found is None:
        raise LayoutError(
            f"the model's recipes have files {theirs[0].binding.name!r} with different configs, which one folder can't "
            "have: export a state dict for each"
        )
    return found

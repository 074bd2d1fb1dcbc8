"""Writes files of an export: one at a time beside the gathers of the next, and config.json at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from layoutc.checkpoint.common.folders import sync
from layoutc.checkpoint.safetensors.files import INDEX, OF_OTHERS, library
from layoutc.checkpoint.safetensors.recognize import CONFIG, Bound
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Facts


class Writing:
    """Files that are written in a thread, one after another: one is written while the next is gathered."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "layoutc-export")
        self._last: Future[None] | None = None

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._pool.shutdown()

    def begin(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Begins to write a file, when the one before is written. Raises what failed in that."""
        self.finish()
        self._last = self._pool.submit(_write, path, dict(tensors), dict(metadata))

    def finish(self) -> None:
        """Waits for the last file. Raises what failed in it."""
        if self._last is not None:
            last, self._last = self._last, None
            last.result()


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    path.touch()  # with the usual mode of new files, which save_file would not give it
    mode = path.stat().st_mode
    library().save_file(tensors, path, metadata=metadata)
    path.chmod(mode)
    sync(path)


class Planned(NamedTuple):
    """A tensor that a file will hold, before it is made."""

    name: str
    facts: Facts


def write_streamed(path: Path, planned: Sequence[Planned], made: Iterable[tuple[str, Tensor]]) -> None:
    """Writes a file of safetensors with one tensor in memory at a time. made: all that is planned, in any order.

    As the library does, wider dtypes come first, so that every tensor is aligned. Raises LayoutError for a tensor that
    is not as planned, OSError if writing fails.
    """
    names = {dtype: name for name, dtype in OF_OTHERS.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for one in sorted(planned, key=lambda one: (-one.facts.dtype.itemsize, one.name)):
        span = [end, end := end + one.facts.nbytes]
        header[one.name] = {"dtype": names[one.facts.dtype], "shape": list(one.facts.shape), "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    left = {one.name: one.facts for one in planned}
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in made:
            if (facts := left.pop(name, None)) != Facts(tuple(tensor.shape), tensor.dtype):
                raise LayoutError(f"{name} is {tensor.dtype} of {list(tensor.shape)}, not {facts} as planned")
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.truncate(8 + len(text) + end)
        file.flush()
        os.fsync(file.fileno())
    if left:
        raise LayoutError(f"{next(iter(left))} was planned, and not made")


def write_index(folder: Path, files: Mapping[str, Sequence[Planned]]) -> None:
    """Writes the index of several files."""
    where = {one.name: file for file, planned in files.items() for one in planned}
    total = sum(one.facts.nbytes for planned in files.values() for one in planned)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    sync(folder / INDEX)


def write_config(
    folder: Path,
    theirs: Collection[Bound],
    source: nn.Module | Mapping[str, Any],
    stated: Mapping[str, Any] | None,
    plain: Collection[str],
) -> None:
    """Writes config.json: what is stated, or a model of transformers' own; with the bindings' `quantization_config`.

    plain: the modules whose weights are not quantized. Raises LayoutError for bindings that contradict each other.
    """
    own: Any = getattr(source, "config", None)
    if stated is not None:
        config = dict(stated)
    elif hasattr(own, "to_dict"):
        config = dict(own.to_dict())
        config["architectures"] = config.get("architectures") or [type(source).__name__]
    else:
        config = {}
    config.pop("quantization_config", None)
    for one in theirs:
        wanted = dict(one.binding.config)
        if one.binding.plain:
            wanted[one.binding.plain] = sorted(plain)
        if config.setdefault("quantization_config", wanted) != wanted:
            raise LayoutError(
                f"the model's recipes have files {one.binding.name!r} with different configs, which one folder can't "
                "have: export a state dict for each"
            )
    text = json.dumps(config, indent=2, sort_keys=True, default=str) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    sync(folder / CONFIG)

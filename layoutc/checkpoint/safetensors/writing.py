"""Writes files of an export: one at a time beside the gathers of the next, and config.json at the end."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from layoutc.checkpoint.common.folders import sync
from layoutc.checkpoint.safetensors.files import library
from layoutc.checkpoint.safetensors.recognize import CONFIG, Bound
from layoutc.runtime.errors import LayoutError


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

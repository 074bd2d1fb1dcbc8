"""Files beside a model's weights, which the next folder needs as well: tokenizer, templates, generation settings."""

from __future__ import annotations

import re
import shutil
from os import PathLike
from pathlib import Path

from layoutc.checkpoint.common.folders import sync

MOST = 64 * 2**20  # bytes of a file; tokenizers with large vocabularies take 30 MB
_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}
_NAMES = re.compile(r"LICEN[CS]E|NOTICE", re.IGNORECASE)
# What a folder states of its own weights: config.json, which a conversion writes, and the older files beside it.
_OF_WEIGHTS = re.compile(r"config\.json|.*\.index\.json|(hf_)?quant\w*_config\.json|layoutc\.json", re.IGNORECASE)


def copy_companions(source: str | PathLike[str] | None, folder: Path) -> tuple[str, ...]:
    """Copies them from one folder to another; returns their names, sorted. None, and a file, have none.

    Files of at most 64 MiB; no folders, no weights, and nothing that states how the source's weights are quantized.
    """
    beside = Path(source).iterdir() if source is not None and Path(source).is_dir() else ()
    found = sorted(path for path in beside if _is_companion(path) and not (folder / path.name).exists())
    names = tuple(path.name for path in found)
    for path in found:
        shutil.copyfile(path, folder / path.name)
        sync(folder / path.name)
    return names


def _is_companion(path: Path) -> bool:
    known = path.suffix in _SUFFIXES or _NAMES.match(path.name) is not None
    return known and not _OF_WEIGHTS.fullmatch(path.name) and path.is_file() and path.stat().st_size <= MOST

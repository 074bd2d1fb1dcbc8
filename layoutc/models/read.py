"""Reads a `Model` from a user's argument in any form: chooses the reader by what exists at that path or name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from layoutc.models import config, headers, installed, modules
from layoutc.models.headers import content_of, mapping_of
from layoutc.models.weights import Model, ModelError

CONFIG = "config.json"
FORMS = (
    "a known name, a config.json or a folder with one, a safetensors index or a folder of .safetensors "
    "files, or module:factory for a function that builds the model"
)
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)


def read(model: str, sizes: Mapping[str, int] | None = None) -> Model:
    """The model that an argument names. Raises ModelError, which lists the accepted forms, if it names none.

    A folder's config.json wins over its files, if its architecture is known, here or to the installed transformers.
    sizes: overrides for a named model.
    """
    path, known = Path(model), config.named()
    if model in known and not path.exists():
        found = config.read({**known[model], **(sizes or {})}, model)
        return replace(found, name=f"{model} with other sizes" if sizes else model)
    if sizes:
        raise ModelError(f"sizes can be given of the models that have a name: {', '.join(known)}")
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        if path.suffix == headers.SUFFIX:
            return headers.read_files([path], path)
        content = mapping_of(content_of(path), str(path))
        return headers.read_index(path) if "weight_map" in content else _named(_of_config(content, str(path)), path)
    if _FACTORY.fullmatch(model):
        return modules.read(model)
    close = get_close_matches(model, known, 1)
    meant = f"did you mean {close[0]}? " if close else ""
    raise ModelError(f"{model} does not exist; {meant}name {FORMS}; known are {', '.join(known)}")


def written(model: str, key: str) -> dict[str, Any] | None:
    """A JSON file's content, if it has this top-level key; None for anything else. Raises ModelError like `read`."""
    path = Path(model)
    if path.suffix != ".json" or not path.is_file():
        return None
    content = mapping_of(content_of(path), str(path))
    return content if key in content else None


def _of_config(content: Mapping[str, Any], source: str) -> Model:
    """By the table; of other architectures, as the installed transformers builds it."""
    if not config.serves(content) and installed.knows(content.get("model_type")):
        return installed.read(content, source)
    return config.read(content, source)


def _named(model: Model, path: Path) -> Model:
    """The model, named after its file, or after its folder if the file is config.json."""
    return replace(model, name=path.stem if path.name != CONFIG else path.absolute().parent.name)


def _folder(path: Path) -> Model:
    files = sorted(path.glob(f"*{headers.SUFFIX}"))
    if (path / CONFIG).is_file():
        content = mapping_of(content_of(path / CONFIG), str(path / CONFIG))
        has_files = bool(files) or (path / headers.INDEX).is_file()
        if config.serves(content) or installed.knows(content.get("model_type")) or not has_files:
            return _named(_of_config(content, str(path / CONFIG)), path / CONFIG)
    if (path / headers.INDEX).is_file():
        return headers.read_index(path / headers.INDEX)
    if not files:
        raise ModelError(f"{path} has no {CONFIG}, no {headers.INDEX} and no .safetensors file; name {FORMS}")
    return headers.read_files(files, path)

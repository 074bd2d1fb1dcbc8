"""Files that nobody has checked yet: read whole only if they are small, and JSON only if it is a mapping."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from layoutc.models.weights import ModelError

MOST_JSON = 100_000_000  # bytes of a config, an index, or a header


def content_of(path: Path, most: int = MOST_JSON) -> bytes:
    """A file of at most so many bytes. Raises ModelError for a larger one, or one that can't be read."""
    try:
        with path.open("rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > most:
                raise ModelError(f"{path} has {size:,} bytes, and the most that is read is {most:,}")
            return file.read(most)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error


def mapping_of(content: bytes, what: str) -> dict[str, Any]:
    """The mapping that some JSON is. Raises ModelError for anything else."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{what} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{what} is a {type(found).__name__}, and should be a mapping")
    return found

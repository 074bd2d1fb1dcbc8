"""Imports of packages that integrations need. A missing one raises an error with the install command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(package: str, extra: str = "integrations") -> Iterator[None]:
    """Wraps imports of `package`. Raises ModuleNotFoundError with the install command if it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"layoutc.integrations.{package} needs {package}, which is not installed: pip install 'layoutc[{extra}]', "
            f"or pip install {package}",
            name=package,
        ) from error

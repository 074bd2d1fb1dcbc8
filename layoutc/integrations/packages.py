"""Packages that an integration is for: which command installs one that is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(package: str, extra: str = "integrations") -> Iterator[None]:
    """Around imports of `package`. Raises ModuleNotFoundError with the command if it is not installed."""
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

"""Recipes that nobody ships, as packages: made when they are asked for, and imported as `layoutc.recipes.NAME`.

A session makes each once: its processes, ranks among them, find what another has made in a folder that they share.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import tempfile
from functools import cache
from pathlib import Path

from filelock import FileLock  # which torch brings
from places import EXCHANGED, UNSHIPPED

import layoutc.recipes
from layoutc.build import pipeline

SHARED = "LAYOUTC_UNSHIPPED"  # names the session's folder; without it each process makes its own


def names() -> list[str]:
    """Those of tests/unshipped."""
    return sorted(path.stem for path in UNSHIPPED.glob("*.yaml"))


def exchanged() -> list[str]:
    """Those of formats in which people hand on weights."""
    return sorted(path.stem for path in EXCHANGED.glob("*.yaml"))


def add_all(folder: Path = UNSHIPPED) -> list[str]:
    """Makes packages of all of tests/unshipped, or of another folder; their names."""
    paths = sorted(folder.glob("*.yaml"))
    for path in paths:
        add(path.stem, path.read_text(encoding="utf-8"))
    return [path.stem for path in paths]


def add_if_known(name: str) -> None:
    """Makes the package of a recipe of these folders; others are there already."""
    for folder in (UNSHIPPED, EXCHANGED):
        if (path := folder / f"{name}.yaml").is_file():
            add(name, path.read_text(encoding="utf-8"))


@cache
def add(name: str, text: str) -> None:
    """Makes the package of a spec's text, which must have no error, unless it is there."""
    package = _folder() / name
    if not package.is_dir():
        package.symlink_to(_made(name, text), target_is_directory=True)
        importlib.invalidate_caches()


def _made(name: str, text: str) -> Path:
    """The folder of a package's files, as some process of the session has written them."""
    shared = Path(os.environ[SHARED]) if SHARED in os.environ else _folder()
    made = shared / hashlib.sha256(f"{name}\n{text}".encode()).hexdigest()
    with FileLock(f"{made}.lock"):  # all ranks ask at once
        if not made.is_dir():
            spec, files, found = pipeline.read(text.encode(), f"{name}.yaml")
            assert spec is not None, [str(item) for item in found]
            begun = Path(tempfile.mkdtemp(dir=shared))
            for file, content in files.items():
                (begun / file).write_text(content, encoding="utf-8")
            begun.rename(made)
    return made


def name_of(text: str) -> str:
    """A name for a spec by its text, so that no two specs share a package."""
    return f"made_up_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@cache
def _folder() -> Path:
    """A folder whose packages are found as recipes; it goes when the process ends."""
    made = tempfile.TemporaryDirectory()
    _kept.append(made)
    layoutc.recipes.__path__.append(made.name)
    return Path(made.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []

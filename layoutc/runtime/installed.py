"""Finds the module of a recipe: by name, by the folder that a build wrote, by its spec, or by a dotted name.

Names are those of `layoutc.recipes`, of entry points of the group `layoutc.recipes`, and of `generated/` in the working
directory, where `layoutc build` writes. That folder is searched only for names that a caller passes, never for names
from a file: reading a checkpoint imports nothing from the working directory.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

Recipe = str | os.PathLike[str] | ModuleType

GROUP = "layoutc.recipes"
BUILT = Path("generated")  # the default of `layoutc build --out`
SPECS = Path("specs")  # the default of --specs
SUFFIXES = (".yaml", ".yml")
WAYS = "give a name, the folder that `layoutc build` wrote for it, its spec's path, or its imported module"


def find(recipe: Recipe) -> ModuleType:
    """The module of a recipe. Raises ValueError, with the ways to name one, for anything else."""
    if isinstance(recipe, ModuleType):
        return _checked(recipe)
    if not isinstance(recipe, str | os.PathLike):
        kind = recipe.__name__ if isinstance(recipe, type) else type(recipe).__name__
        meant = _elsewhere(kind)
        raise ValueError(f"{kind} names no recipe: {f'pass {meant!r}, or ' if meant else ''}{WAYS}")
    path = Path(recipe)
    if path.suffix in SUFFIXES:
        return _of_spec(path)
    if isinstance(recipe, os.PathLike) or len(path.parts) != 1:
        return _of_folder(path)
    if recipe in _own().RECIPES:
        return getattr(_own(), recipe)  # type: ignore[no-any-return]
    shipped = {point.name: point for point in points()}
    if recipe in shipped:
        return load(shipped[recipe])
    if "." in recipe and _is_importable(recipe):
        return _checked(importlib.import_module(recipe))
    for folder in (BUILT / recipe, path):
        if _is_package(folder):
            return _of_folder(folder)
    for spec in (SPECS / f"{recipe}{suffix}" for suffix in SUFFIXES):
        if spec.is_file():  # not built yet
            return _of_spec(spec)
    if _packages_in(path):
        return _of_folder(path)
    raise ValueError(
        _unknown(recipe, [*(one for one in shipped if one not in _own().RECIPES), *in_working_directory()])
    )


def in_working_directory() -> list[str]:
    """The names of recipes in `generated/` of the working directory that are not layoutc's own. Imports none."""
    return [name for name in _packages_in(BUILT) if name not in _own().RECIPES]


def points() -> list[EntryPoint]:
    """The entry points with which installed packages register their recipes."""
    return list(entry_points(group=GROUP))


def load(point: EntryPoint) -> ModuleType:
    """The module that an entry point names. Raises ValueError, with its distribution, if that is not a recipe."""
    try:
        return _checked(point.load())
    except (ImportError, AttributeError, ValueError) as error:
        owner = "an installed package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        raise ValueError(
            f"the entry point {point.name} = {point.value!r} of {owner}, group {GROUP}, names no recipe: {error}. Name "
            "the package that `layoutc build` wrote for the recipe, and install again"
        ) from error


def every() -> list[ModuleType]:
    """The recipes of `layoutc.recipes` and of installed packages; warns of entry points that name no recipe."""
    return [*(getattr(_own(), name) for name in _own().RECIPES), *_usable(points())]


def named(name: str) -> list[ModuleType]:
    """All installed recipes with a name; there may be several. Never searches the working directory."""
    own = [getattr(_own(), name)] if name in _own().RECIPES else []
    return [*own, *_usable(point for point in points() if point.name == name)]


def _usable(chosen: Iterable[EntryPoint]) -> Iterator[ModuleType]:
    for point in chosen:
        try:
            yield load(point)
        except ValueError as error:
            warnings.warn(f"{error}. It is left out", stacklevel=3)


def _own() -> ModuleType:
    return importlib.import_module("layoutc.recipes")


def _checked(module: object) -> ModuleType:
    if isinstance(module, ModuleType) and all(hasattr(module, name) for name in ("LAYOUT", "Tensor")):
        return module
    what = f"{module.__name__} is no recipe's package" if isinstance(module, ModuleType) else f"{module!r} is no module"
    raise ValueError(f"{what}; {WAYS}")


def _elsewhere(name: str) -> str | None:
    """The recipe that Transformer Engine, Megatron or torchao have a class or an option of that name for."""
    table = json.loads(Path(__file__).with_name("elsewhere.json").read_text(encoding="utf-8"))
    return table.get(name.casefold())  # type: ignore[no-any-return]


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The closest name, as a suggestion; None if none is close."""
    folded = {one.replace("_", "-"): one for one in sorted(names)}
    close = difflib.get_close_matches(name.casefold().replace("_", "-")[:80], folded, n=1)
    return folded[close[0]] if close else None


def _unknown(name: str, others: list[str]) -> str:
    meant = _elsewhere(name) or nearest(name, [*_own().RECIPES, *others])
    there = f"There are {', '.join(others)}, and layoutc's own, which" if others else "Those that there are,"
    hint = f"Did you mean {meant}?" if meant else f"{there} `layoutc list` names."
    return (
        f"there is no recipe {name!r} in layoutc.recipes, in an installed package or in {BUILT.absolute()}. {hint} Of "
        f"your own, {WAYS}"
    )


# ------------------------------------------------------------------------------------------------------ what was built
def _is_package(folder: Path) -> bool:
    return (folder / "__init__.py").is_file() and (folder / "layout.py").is_file()


def _packages_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if _is_package(path)) if folder.is_dir() else []


def _of_folder(folder: Path) -> ModuleType:
    if _is_package(folder):
        return _checked(_imported(folder.resolve()))
    inside = _packages_in(folder)
    what = f"is a folder of recipes: {', '.join(inside)}; name one, as {folder / inside[0]}" if inside else "is none"
    raise ValueError(f"a recipe's package was expected, and {folder} {what}. {WAYS.capitalize()}")


@cache
def _imported(folder: Path) -> ModuleType:
    """The package in a folder, under the name that import statements use, so that it is imported only once."""
    if folder.parent in map(_resolved, _own().__path__):
        return importlib.import_module(f"{_own().__name__}.{folder.name}")
    top = folder
    while (top.parent / "__init__.py").is_file():
        top = top.parent
    name = ".".join((top.name, *folder.relative_to(top).parts))
    if top.parent not in map(_resolved, sys.path) and not _is_imported_from(top):
        if top.name in sys.modules or _is_importable(top.name):  # another package has this name
            hashed = hashlib.sha256(str(top).encode()).hexdigest()[:12]
            name = ".".join((f"{top.name}_{hashed}", *folder.relative_to(top).parts))
        _import_from(top, name.partition(".")[0])
    return importlib.import_module(name)


def _resolved(place: str) -> Path:
    return Path(place).resolve()


def _is_imported_from(top: Path) -> bool:
    module = sys.modules.get(top.name)
    return module is not None and top in map(_resolved, getattr(module, "__path__", ()))


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _import_from(folder: Path, name: str) -> None:
    """Imports the package in a folder that is not on sys.path, under a name."""
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ValueError(f"{folder} can't be imported; {WAYS}")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _of_spec(path: Path) -> ModuleType:
    """The package built from a spec: in `generated/`, here or next to the spec's folder, or an installed one."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file; {WAYS}")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    changed = ""
    for folder in dict.fromkeys([(BUILT / path.stem).absolute(), path.absolute().parent.parent / BUILT / path.stem]):
        if _is_package(folder):
            module = _of_folder(folder)
            if module.LAYOUT.spec_sha256 == sha256:
                return module
            changed = f"; {folder} was built from another text"
    for module in named(path.stem):
        if module.LAYOUT.spec_sha256 == sha256:
            return module
    raise ValueError(
        f"{path} has not been built{changed}: run `layoutc build {path}`, or give the folder that --out named"
    )

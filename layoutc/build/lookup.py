"""Where specs are: folders, and those that installed packages ship, found by entry points of the group `layoutc.specs`.

    [project.entry-points."layoutc.specs"]
    their_name = "their_package.specs"      # a package folder that holds YAML files

`--specs their_name` then stands for that folder, and the name of a spec in it for that spec, in any directory. The
package that holds the folder is imported, as Python finds submodules that way; the folder itself is not and needs no
`__init__.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import click

from layoutc.diagnostics.diagnostic import nearest

GROUP = "layoutc.specs"
SUFFIXES = (".yaml", ".yml")
Command = TypeVar("Command", bound=Callable[..., Any])


def specs_in(folder: Path) -> list[Path]:
    """The specs of a folder, in order of their names; none where there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())


def folders() -> dict[str, Path]:
    """Every shipped folder by its name. What can't be found is left out."""
    places = {point.name: _place(point) for point in entry_points(group=GROUP)}
    return {name: place for name, place in places.items() if place is not None}


def _place(point: EntryPoint) -> Path | None:
    try:
        found = find_spec(point.module)
    except ImportError:
        return None
    locations = list(found.submodule_search_locations or ()) if found else []
    return Path(locations[0]) if locations else None


def chosen(given: tuple[str, ...], folder: Path) -> list[Path]:
    """The specs that a command's arguments name, or those of the folder where they name none.

    A file stands for itself, a folder for what is in it, a name for the recipe of `find`. Raises click.UsageError.
    """
    paths: list[Path] = []
    for one in given or (str(folder),):
        place = Path(one)
        if place.is_dir() and (inside := specs_in(place)):
            paths += inside
        elif given and _is_name(one):
            paths.append(find(one, folder))
        elif place.is_dir():
            raise click.UsageError(f"{place} holds no YAML file")
        elif place.exists():
            paths.append(place)
        else:
            words = "" if given else "; name a recipe or a spec, or a folder with --specs."
            listed = [] if given or _is_given() else _listed(by_package(), folder)
            raise click.UsageError(" ".join([f"{place} does not exist{words}", *listed]))
    return list(dict.fromkeys(paths))


def spec_of(given: str, folder: Path, everywhere: bool = False) -> Path:
    """The one spec that an argument names: a file, or the recipe of `find`. Raises click.UsageError."""
    if _is_name(given):
        return find(given, folder, everywhere)
    if not Path(given).is_file():
        raise click.UsageError(f"{given} {'is not a file' if Path(given).exists() else 'does not exist'}")
    return Path(given)


def find(name: str, folder: Path, everywhere: bool = False) -> Path:
    """The spec of a recipe: of the folder, or, unless --specs has named it, of those that installed packages ship.

    everywhere: of those in any case. Raises click.UsageError for a name that none has, with the names that there are,
    and for one that several packages ship.
    """
    own = {path.stem: path for path in specs_in(folder)}
    if name in own:
        return own[name]
    shipped, others = by_package(), {}
    if everywhere or not _is_given():
        others = shipped
    holding = [package for package, specs in shipped.items() if name in specs]
    if len(holding) == 1 and others:
        return others[holding[0]][name]
    if len(holding) > 1 and others:
        raise click.UsageError(f"{' and '.join(holding)} ship a recipe {name}; name one: --specs {holding[0]}")
    place = f"{folder} has no recipe" if folder.is_dir() and (own or not others) else "there is no recipe"
    place = place if others or folder.is_dir() else f"{folder} does not exist, and so has no recipe"
    known = [*own, *(one for specs in others.values() for one in specs)]
    if holding:
        hint = f"One comes with {holding[0]}: leave out --specs, or write --specs {holding[0]}."
    elif meant := nearest(name, known):
        hint = f"Did you mean {meant}?"
    else:
        hint = " ".join([f"It has {', '.join(own)}."] * bool(own) + _listed(others, folder))
    raise click.UsageError(f"{place} '{name}'. {hint}".rstrip())


def by_package() -> dict[str, dict[str, Path]]:
    """By the name of a shipped folder: its specs by their names."""
    return {package: {path.stem: path for path in specs_in(place)} for package, place in sorted(folders().items())}


def _listed(shipped: dict[str, dict[str, Path]], folder: Path) -> list[str]:
    """What comes with each package, but for that of the folder itself."""
    elsewhere = {package: specs for package, specs in shipped.items() if folders()[package] != folder.absolute()}
    return [f"With {package} come {', '.join(specs)}." for package, specs in elsewhere.items() if specs]


def _is_given() -> bool:
    """True where the command was told --specs."""
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source("folder") is click.core.ParameterSource.COMMANDLINE


def _is_name(given: str) -> bool:
    """True for what can be a recipe's name; a file's has a suffix, or a folder before it."""
    path = Path(given)
    return path.suffix not in SUFFIXES and len(path.parts) == 1 and not path.is_file()


class SpecsFolder(click.Path):
    """A folder; one that does not exist may be the name of one that a package ships."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The folder, existing or not: whoever reads it says so."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if path.exists() or len(path.parts) != 1:
            return path
        return folders().get(path.name, path)


def specs_option(words: str, place: click.Path | None = None) -> Callable[[Command], Command]:
    """Adds --specs to a command."""
    place = place or SpecsFolder()
    return click.option("--specs", "folder", type=place, default=Path("specs"), show_default=True, help=words)

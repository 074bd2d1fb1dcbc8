"""Where specs are: folders, and those that installed packages ship, found by entry points of the group `layoutc.specs`.

    [project.entry-points."layoutc.specs"]
    their_name = "their_package.specs"      # a package folder that holds YAML files

`--specs their_name` then stands for that folder. The package that holds the folder is imported, as Python finds
submodules that way; the folder itself is not and needs no `__init__.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import click

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

"""Finds specs: in folders, and in folders that installed packages ship (entry points of the group `layoutc.specs`).

    [project.entry-points."layoutc.specs"]
    their_name = "their_package.specs"      # a package folder that holds YAML files

`--specs their_name` then means that folder, and the name of a spec in it means that spec, in any directory. Python
imports the package that contains the folder, because it finds submodules that way. It does not import the folder, which
needs no `__init__.py`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from layoutc.diagnostics.diagnostic import nearest

GROUP = "layoutc.specs"
SUFFIXES = (".yaml", ".yml")
FEW = 8  # recipes that a message lists
LAYOUT = "layout.py"  # of a built package; it states the spec that it was built from
Command = TypeVar("Command", bound=Callable[..., Any])


def specs_in(folder: Path) -> list[Path]:
    """The specs in a folder, sorted by name; [] if the folder does not exist."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())


def folders() -> dict[str, Path]:
    """Shipped folders by name, except those that can't be found."""
    places = {point.name: _folder_of(point) for point in entry_points(group=GROUP)}
    return {name: folder for name, folder in places.items() if folder is not None}


def _folder_of(point: EntryPoint) -> Path | None:
    try:
        module = find_spec(point.module)
    except ImportError:
        return None
    locations = list(module.submodule_search_locations or ()) if module else []
    return Path(locations[0]) if locations else None


def chosen(arguments: tuple[str, ...], folder: Path) -> list[Path]:
    """The specs that a command's arguments name; without arguments, those in the folder.

    An argument is a file, a folder of specs, a recipe's name, or a built package. Raises click.UsageError."""
    paths: list[Path] = []
    for one in arguments or (str(folder),):
        path = Path(one)
        if path.is_dir() and (inside := specs_in(path)):
            paths += inside
        elif (built := _built(one)) is not None:
            paths.append(_spec_of_built(built, folder))
        elif arguments and _is_name(one):
            paths.append(find(one, folder))
        elif path.is_dir():
            raise click.UsageError(f"{path} holds no YAML file")
        elif path.exists():
            paths.append(path)
        else:
            words = "" if arguments else "; name a recipe or a spec, or a folder with --specs."
            listed = [] if arguments or is_given("folder") else _listed(by_package(), folder)
            raise click.UsageError(" ".join([f"{path} does not exist{words}", *listed]))
    return list(dict.fromkeys(paths))


def spec_of(argument: str, folder: Path, everywhere: bool = False) -> Path:
    """The spec that an argument names. Raises click.UsageError.

    The argument is a file, a recipe as for `find`, a folder that `layoutc build` wrote, or that package's dotted name.
    """
    if (built := _built(argument)) is not None:
        return _spec_of_built(built, folder)
    if _is_name(argument):
        return find(argument, folder, everywhere)
    if not Path(argument).is_file():
        raise click.UsageError(f"{argument} {'is not a file' if Path(argument).exists() else 'does not exist'}")
    return Path(argument)


def find(name: str, folder: Path, everywhere: bool = False) -> Path:
    """The spec of a recipe: from the folder, or, unless --specs was given, from installed packages.

    everywhere: search installed packages even if --specs was given. Raises click.UsageError for an unknown name, with a
    list of known names, and for a name that several packages ship.
    """
    own = {path.stem: path for path in specs_in(folder)}
    if name in own:
        return own[name]
    shipped, others = by_package(), {}
    if everywhere or not is_given("folder"):
        others = shipped
    holding = [package for package, specs in shipped.items() if name in specs]
    if len(holding) == 1 and others:
        return others[holding[0]][name]
    if len(holding) > 1 and others:
        raise click.UsageError(f"{' and '.join(holding)} ship a recipe {name}; name one: --specs {holding[0]}")
    problem = f"{folder} has no recipe" if folder.is_dir() and (own or not others) else "there is no recipe"
    problem = problem if others or folder.is_dir() else f"{folder} does not exist, so it has no recipe"
    names = [*own, *(one for specs in others.values() for one in specs)]
    if holding:
        hint = f"One comes with {holding[0]}: leave out --specs, or write --specs {holding[0]}."
    elif meant := nearest(name, names):
        hint = f"Did you mean {meant}?"
    elif inside := [path for path in _folders_in(Path(name)) if _built(str(path))]:
        hint = f"{name} is a folder of recipes: name one, as {inside[0]}."
    else:
        hint = " ".join([f"It has {', '.join(own)}."] * bool(own) + _listed(others, folder))
    raise click.UsageError(f"{problem} '{name}'. {hint}".rstrip())


def _folders_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _built(argument: str) -> Path | None:
    """The folder of a recipe's package, by path or dotted name; None if the argument is not a package."""
    places = [Path(argument)]
    if "." in argument and all(part.isidentifier() for part in argument.split(".")):
        try:
            found = find_spec(argument)
        except ImportError:
            found = None
        places += map(Path, (found.submodule_search_locations if found else None) or ())
    return next((place for place in places if (place / "__init__.py").is_file() and (place / LAYOUT).is_file()), None)


def _spec_of_built(built: Path, folder: Path) -> Path:
    """The spec from which a package was built: in `folder`, in specs/ next to the folder of packages, or shipped."""
    text = (built / LAYOUT).read_text(encoding="utf-8")
    made, stated = re.match(r"# Generated by layoutc from (\S+)\. ", text), re.search(r'spec_sha256="(\w+)"', text)
    if made is None or stated is None:
        raise click.UsageError(f"{built} is no package that `layoutc build` wrote")
    places = dict.fromkeys([folder, built.absolute().parent.parent / "specs", *folders().values()])
    there = [place / made[1] for place in places if (place / made[1]).is_file()]
    for path in there:
        if hashlib.sha256(path.read_bytes()).hexdigest() == stated[1]:
            return path
    why = f"{there[0]} has changed since" if there else f"it is not in {', nor in '.join(map(str, places))}"
    raise click.UsageError(f"{built} was built from {made[1]}, and {why}; give the spec's path")


def known(folder: Path) -> list[Path]:
    """The specs in the folder and, unless --specs was given, in installed packages; one per name."""
    found = {path.stem: path for path in specs_in(folder)}
    for specs in () if is_given("folder") else by_package().values():
        found = specs | found
    return [found[name] for name in sorted(found)]


def by_package() -> dict[str, dict[str, Path]]:
    """The name of each shipped folder -> its specs by name."""
    return {package: {path.stem: path for path in specs_in(folder)} for package, folder in sorted(folders().items())}


def completed(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Shell completions for a recipe: recipes in the folder of --specs, and shipped ones; files if none matches."""
    folder = Path(context.params.get("folder") or "specs")
    names = dict.fromkeys(
        [path.stem for path in specs_in(folder)] + [one for specs in by_package().values() for one in specs]
    )
    return [CompletionItem(name) for name in names if name.startswith(begun)] or [CompletionItem(begun, type="file")]


def _listed(shipped: dict[str, dict[str, Path]], folder: Path) -> list[str]:
    """Sentences about what each package ships, except the package that ships `folder`."""
    elsewhere = {package: specs for package, specs in shipped.items() if folders()[package] != folder.absolute()}
    return [
        f"{package} ships {', '.join(specs) if len(specs) <= FEW else f'{len(specs)}, which `layoutc list` names'}."
        for package, specs in elsewhere.items()
        if specs
    ]


def is_given(name: str) -> bool:
    """Whether the user passed a parameter, named as in Python, to the running command; False without a command."""
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _is_name(argument: str) -> bool:
    """True if an argument can be a recipe's name: it has no spec suffix and no folder, and is not a file."""
    path = Path(argument)
    return path.suffix not in SUFFIXES and len(path.parts) == 1 and not path.is_file()


class SpecsFolder(click.Path):
    """The type of --specs: a folder, or the name of a shipped one."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The folder, which may not exist: commands report that when they read it."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if path.exists() or len(path.parts) != 1:
            return path
        return folders().get(path.name, path)


def specs_option(words: str, folder_type: click.Path | None = None) -> Callable[[Command], Command]:
    """Adds --specs to a command."""
    folder_type = folder_type or SpecsFolder()
    return click.option("--specs", "folder", type=folder_type, default=Path("specs"), show_default=True, help=words)

"""Which binding a folder is read by: one of those that are told, by name or by config.json, that fits the weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from layoutc.checkpoint.safetensors import recognize
from layoutc.checkpoint.safetensors.bound import find
from layoutc.checkpoint.safetensors.files import Stored
from layoutc.checkpoint.safetensors.recognize import Bound
from layoutc.runtime.errors import LayoutError


class Fit(NamedTuple):
    """A binding that every weight that it finds follows: the names of these."""

    bound: Bound
    names: tuple[str, ...]


def told(path: Path, files: str | None, every: Sequence[Bound]) -> list[Bound]:
    """The bindings of `every` that a name or config.json tells of; none for a folder that says nothing.

    Raises LayoutError for a name that none has, and for a `quantization_config` that none knows.
    """
    if files is not None:
        return recognize.chosen(files, every)
    config = recognize.quantization_config(path)
    found = recognize.recognized(config, every)
    if config and not found:
        labels = ", ".join(sorted({one.label for one in every}))
        raise LayoutError(
            f"{path}: config.json has a quantization_config that no installed recipe knows: {dict(config)}. Known are "
            f"{labels}"
        )
    return found


def fitting(shapes: Mapping[str, tuple[int, ...]], told: Iterable[Bound], tensors: Mapping[str, Stored]) -> list[Fit]:
    """The bindings that fit: all weights that the files hold by their names have the shapes that they say.

    shapes: of the parameters that may be held so, by their names in the files. Where some of the bindings hold values
    as files do, those that convert them are left out. Raises LayoutError, with what the first one misses, if weights
    are found and none fits.
    """
    fits, refused = list[Fit](), list[LayoutError]()
    for one in told:
        try:
            names = tuple(name for name, shape in shapes.items() if find(name, shape, one, tensors) is not None)
        except LayoutError as error:
            refused.append(error)
            continue
        fits += [Fit(one, names)] if names else []
    if refused and not fits:
        raise refused[0]
    exact = as_files_hold_them([fit.bound for fit in fits])
    return [fit for fit in fits if fit.bound in exact]


def as_files_hold_them(bound: Sequence[Bound]) -> list[Bound]:
    """Those that hold values as files do; all, if none does."""
    return [one for one in bound if not one.converts] or list(bound)


def check_alike(bound: Sequence[Bound], what: str, how: str) -> None:
    """Raises LayoutError unless the bindings read files alike, as weights of different recipes may.

    what: the files, in words. how: what a user passes to choose one.
    """
    if any(dict(one.binding.planes) != dict(bound[0].binding.planes) for one in bound):
        raise several(bound, what, how)


def several(bound: Sequence[Bound], what: str, how: str) -> LayoutError:
    """The error for files that fit several bindings, with their names."""
    return LayoutError(f"{what} fit several recipes: pass {how} one of {', '.join(sorted(one.label for one in bound))}")

"""Chooses the binding that reads each weight of a folder, among those that a name or config.json identifies."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from layoutc.checkpoint.bindings.configs import READ_AS_PLAIN, spelled
from layoutc.checkpoint.bindings.names import contradicts, differences, values_at
from layoutc.checkpoint.common.verdicts import Problem, noted
from layoutc.checkpoint.held.stored import Stored
from layoutc.checkpoint.held.undecoded import undecoded
from layoutc.checkpoint.safetensors import recognize
from layoutc.checkpoint.safetensors.bound import find, named_in
from layoutc.checkpoint.safetensors.recognize import Bound
from layoutc.checkpoint.untrusted.files import short
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.installed import BUILT, in_working_directory

BY_THEIR_PROGRAM = "Let the program that wrote the files make plain weights of them, and load those"


class Fit(NamedTuple):
    """A binding, and the names of the weights that match it."""

    bound: Bound
    names: tuple[str, ...]


def told(path: Path, files: str | None, every: Sequence[Bound], tensors: Mapping[str, Stored]) -> list[Bound]:
    """The bindings of `every` that a name or config.json identifies; [] if the folder has no config and no name.
    tensors: the folder's.

    Raises LayoutError for an unknown name, a name that config.json contradicts, a `quantization_config` that matches no
    binding, and a config that transforms activations at run time.
    """
    config = recognize.quantization_config(path)
    _check_transforms(path, config)
    if files is not None:
        named = recognize.with_other_blocks(recognize.chosen(files, every), config)
        return _agreeing(path, config, named, every)
    found = recognize.recognized(config, every)
    if config and not found:
        raise _unknown(path, config, every, tensors)
    return found


def unknown(path: Path, tensors: Mapping[str, Stored]) -> list[Problem]:
    """The problem that a folder's config.json describes weights that no recipe knows; [] without such a config."""
    problems = list[Problem]()
    with noted(problems):
        told(path, None, recognize.installed(), tensors)
    return problems


def check_holds(path: Path, files: str | None, told: Sequence[Bound], tensors: Mapping[str, Stored]) -> None:
    """Raises LayoutError if a config or `files` says that a folder is quantized, but no tensor matches the names: an
    old config next to weights that are plain now, or another program's files."""
    if not told or any(named_in(one, tensors) for one in told):
        return
    older = recognize.older_file(path) if recognize.is_in_older_file(path) else None
    says = f"files={files!r}" if files else older or "quantization_config in config.json"
    instead = "leave it out" if files else f"delete {older}" if older else "delete quantization_config from config.json"
    instead, every = f"If all weights are plain, {instead}", recognize.installed()
    if held := holding(every, tensors):
        instead = _as_held(path, recognize.quantization_config(path), held[0], every)
    elif undecoded(tensors):
        instead = READ_AS_PLAIN.get(told[0].binding.config.get("quant_method"), BY_THEIR_PROGRAM)
    raise LayoutError(f"{path}: {says} describes files of {told[0].label}, but no tensor has their names. {instead}")


def holding(every: Iterable[Bound], tensors: Mapping[str, Stored]) -> list[Bound]:
    """The bindings by which files have weights, as their names, dtypes and shapes say; first those that fit best.
    Looks at the module of one of the names that differ only in numbers, since a model may have 100,000."""
    least, fits = dict[str, str](), list[tuple[int, Bound]]()
    for name in tensors:
        kind = re.sub(r"\d+", "*", name)
        least[kind] = min(name, least.get(kind, name))
    modules = {name.rpartition(".")[0] for name in least.values()}
    few = {name: one for name, one in tensors.items() if name.rpartition(".")[0] in modules}
    for one in every:
        named = named_in(one, few)
        fits.append((max((recognize.fit_of(one, name, None, few) for name in named), default=0), one))
    fits.sort(key=lambda pair: (-pair[0], pair[1].converts))
    return [one for fit, one in fits if fit > recognize.OF_OTHER_SHAPES]


def _as_held(path: Path, config: Mapping[str, Any], one: Bound, every: Sequence[Bound]) -> str:
    """What to do for tensors that may be those of a binding which the config does not identify."""
    try:
        _agreeing(path, config, [one], every)
    except LayoutError:
        own = {key: values_at(one.binding.config, key.split(".")) for key in differences(one.binding, config)}
        stated = ", ".join(f"{key} = {short(value)}" for key, values in own.items() for value in values[:1])
        return f"The tensors could be those of {one.label}: if they are, write {stated} in config.json"
    return (
        f"If the tensors are those of a binding all the same, name it, as files={one.label!r} or layoutc convert "
        f"--from {one.label}; `layoutc show RECIPE --files` prints the tensors of a recipe's"
    )


def _check_transforms(path: Path, config: Mapping[str, Any]) -> None:
    """Raises LayoutError for compressed-tensors' activation transforms: without them, the weights are another model."""
    where = values_at(config, ["transform_config", "config_groups", "*", "apply"])
    applied = [one for several in where if isinstance(several, list) for one in several if isinstance(one, Mapping)]
    if online := sorted({str(one["location"]) for one in applied if one.get("location") in ("input", "output")}):
        raise LayoutError(
            f"{path}: the transform_config in config.json transforms activations while the model runs "
            f"({' and '.join(online)} of layers), which layoutc does not do. The weights alone would be another model"
        )


def _unknown(
    path: Path, config: Mapping[str, Any], every: Sequence[Bound], tensors: Mapping[str, Stored]
) -> LayoutError:
    """The error for a config that matches no binding: the values that were compared, and the nearest bindings, which
    are those that the tensors fit, or else those of the same method."""
    own = spelled(config)
    method = own.get("quant_method")
    alike = [one for one in every if spelled(one.binding.config).get("quant_method") == method]
    least = min((len(differences(one.binding, config)) for one in alike), default=0)
    held = holding(every, tensors)
    near = (held or [one for one in alike if len(differences(one.binding, config)) == least])[:4]
    looked = dict.fromkeys(["quant_method", *(path for one in alike for path in one.binding.recognized)])
    values = {key: values_at(own, key.split(".")) for key in looked}
    there = [f"{key} = {' and '.join(map(short, found[:4])) or 'nothing'}" for key, found in values.items()]
    but = [f"  {one.label}, but for {', '.join(differences(one.binding, config))}" for one in near]
    of_mlx = method is not None or {"bits", "group_size"} <= own.keys()
    plain = READ_AS_PLAIN.get(method if isinstance(method, str) else None, "") if of_mlx else ""
    where = (recognize.is_in_older_file(path) and recognize.older_file(path)) or recognize.CONFIG
    lines = [
        f"{path}: {where} has a quantization_config that no installed recipe knows: {', '.join(there)}",
        *(["The nearest are", *but] if near else []),
        *[plain] * bool(plain),
    ]
    if held:
        lines.append(_as_held(path, config, held[0], every))
    elif near:
        recipe = near[0].cls.LAYOUT.name
        lines.append(
            "No installed recipe has tensors of such names, dtypes and shapes. One of your own may: `layoutc new mine "
            f"--from {recipe}`, their blocks and `files` in it, `layoutc build specs/mine.yaml`"
        )
    elif not plain:
        lines.append(BY_THEIR_PROGRAM)
    if mine := in_working_directory():
        lines.append(f"Recipes in {BUILT}/ here ({', '.join(mine)}) are read only if named: files='{mine[0]}/BINDING'")
    return LayoutError("\n".join(lines))


def _agreeing(path: Path, config: Mapping[str, Any], named: Sequence[Bound], every: Sequence[Bound]) -> list[Bound]:
    """The bindings in `named` that a config does not contradict. Raises LayoutError if it contradicts all."""
    if config.get("quant_method") not in {one.binding.config.get("quant_method") for one in every}:
        config = {key: value for key, value in config.items() if key != "quant_method"}  # other programs write it too
    wrong = [contradicts(one.binding, config) for one in named]
    if all(wrong):
        nearest = min(named, key=lambda one: len(differences(one.binding, config)))
        where, there, here = wrong[named.index(nearest)] or ("", "", "")
        raise LayoutError(
            f"{path}: config.json has {there!r} as {where} of its quantization_config, but files of {nearest.label} "
            f"have {here!r}: name a binding of such files, or correct config.json if it is wrong"
        )
    return [one for one, differs in zip(named, wrong, strict=True) if differs is None]


def fitting(
    shapes: Mapping[str, tuple[int, ...]],
    told: Sequence[Bound],
    tensors: Mapping[str, Stored],
    by: Callable[[str, tuple[int, ...], Bound, Mapping[str, Stored]], object] = find,
) -> list[list[Fit]]:
    """The bindings that fit, grouped by `alternatives`: all weights that match a binding's names have its shapes.

    shapes: name in the files -> shape, for the parameters that may be quantized. by: finds one of them. Raises
    LayoutError, with the first binding's reason, if weights match names but no binding fits them.
    """
    fits, refused = list[Fit](), list[tuple[LayoutError, Fit]]()
    for one in told:
        named = [name for name, shape in shapes.items() if recognize.is_for(one, name, shape, tensors, told)]
        try:
            names = tuple(name for name in named if by(name, shapes[name], one, tensors))
        except LayoutError as error:
            refused.append((error, Fit(one, tuple(named))))
            continue
        fits += [Fit(one, names)] if names else []
    check_all_fit(fits, refused)
    # For stacks of matrices, keep only the bindings with one amax per matrix, if there are any.
    stacks = {name for fit in fits if fit.bound.of_stacks for name in fit.names if len(shapes[name]) > 2}
    own = [[name for name in fit.names if (name in stacks) == fit.bound.of_stacks] for fit in fits]
    return alternatives([fit._replace(names=tuple(names)) for fit, names in zip(fits, own, strict=True) if names])


def check_all_fit(fits: Sequence[Fit], refused: Sequence[tuple[LayoutError, Fit]]) -> None:
    """Raises the error of a refused binding if any of the weights that match its names fits no other binding."""
    held = {name for fit in fits for name in fit.names}
    for error, (bound, names) in refused:
        if not held.issuperset(names):
            plain = READ_AS_PLAIN.get(bound.binding.config.get("quant_method"))
            raise LayoutError(f"{error}. {plain}") if bound.is_read_only and plain else error


def alternatives(fits: Iterable[Fit]) -> list[list[Fit]]:
    """Groups fits that share weights: one fit of each group must be chosen. Different groups hold different weights of
    the folder, each with its own recipe.

    Fits with the most weights come first. A group leaves out fits that convert values if others hold the values as
    stored, and fits for stacks of matrices if others hold the same weights.
    """
    groups = list[list[Fit]]()
    for fit in fits:
        joined = [group for group in groups if any(not {*fit.names}.isdisjoint(one.names) for one in group)]
        groups = [group for group in groups if group not in joined]
        groups.append([*(one for group in joined for one in group), fit])
    of_one = [[fit for fit in group if not fit.bound.of_stacks] or group for group in groups]
    exact = [[fit for fit in group if not fit.bound.converts] or group for group in of_one]
    return [sorted(group, key=lambda fit: -len(fit.names)) for group in exact]


def check_alike(bound: Sequence[Bound], what: str, how: str) -> None:
    """Raises LayoutError unless the bindings have the same planes; bindings of different recipes may.

    what: the files, for the message. how: the argument that chooses one.
    """
    if any(dict(one.binding.planes) != dict(bound[0].binding.planes) for one in bound):
        raise several(bound, what, how)


def one_of(named: Sequence[Bound], of_source: Collection[str]) -> Bound:
    """The binding that a name means; if several recipes have it, the one of the source's recipe. of_source: layout ids.
    Raises LayoutError if several remain."""
    bound = [one for one in named if one.layout_id in of_source] or named
    if len(bound) > 1:
        raise LayoutError(f"several recipes have such files: choose one of {', '.join(one.label for one in bound)}")
    return bound[0]


def several(bound: Sequence[Bound], what: str, how: str) -> LayoutError:
    """The error for files that fit several bindings; it lists their names."""
    return LayoutError(f"{what} fit several recipes: pass {how} one of {', '.join(sorted(one.label for one in bound))}")

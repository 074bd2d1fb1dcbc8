"""Plans a load: maps each parameter of a model to its values in the files."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from layoutc.checkpoint.bindings.names import named_parts
from layoutc.checkpoint.common.narrowing import warn_of
from layoutc.checkpoint.common.verdicts import Problem, noted
from layoutc.checkpoint.held import undecoded
from layoutc.checkpoint.held.regrouped import Flat, Regrouped
from layoutc.checkpoint.held.sources import BoundSource, PlaneSource
from layoutc.checkpoint.held.stored import DTYPES, Read, Stack, Stored
from layoutc.checkpoint.held.undecoded import Header
from layoutc.checkpoint.safetensors import beside, bound, choosing, recognize
from layoutc.checkpoint.safetensors.files import Contents, read_folder
from layoutc.checkpoint.safetensors.recognize import Bound
from layoutc.runtime.errors import DamagedError, LayoutError
from layoutc.runtime.torch_private import local_tensor
from layoutc.runtime.weight import stored_form
from layoutc.runtime.weight.tensor import QuantizedTensor

Rename = Callable[[str], str]
OF_EXPERT = re.compile(r"(^|\.)experts\.\d+\.")


class Loaded(NamedTuple):
    """The result of `load_safetensors`: names that the files lack, and names that the model lacks."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class Entry(NamedTuple):
    """A quantized weight in the files. found: the weight or its parts in another format; () for layoutc's files.
    apart: equal shares of its rows as separate entries, in place of planes. instead: the alternative in shares, for a
    weight whose planes have one value for all shares."""

    cls: type[QuantizedTensor]
    shape: tuple[int, ...]
    orientations: tuple[str, ...]
    planes: Mapping[str, Stored | PlaneSource]
    found: tuple[bound.Found, ...] = ()
    apart: tuple[Entry, ...] = ()
    instead: Entry | None = None


class Step(NamedTuple):
    """A parameter or buffer, and the source of its values."""

    name: str
    param: Tensor
    source: Stored | Stack | Entry


def bindings(
    model: nn.Module, folder: Path, contents: Contents, files: str | None, rename: Rename | None
) -> list[Bound]:
    """Bindings to look for: those of the model's recipes, and those that fit its other weights. Raises LayoutError."""
    state, _ = state_of(model)
    classes = {type(local): None for local in map(local_tensor, state.values()) if isinstance(local, QuantizedTensor)}
    own = recognize.bindings_of(classes)
    labels = {one.label for one in own}
    every = [*own, *(one for one in recognize.installed() if one.label not in labels)]
    if files is None and not recognize.recognized(recognize.quantization_config(folder), every):
        return []  # plain values, or names that the model lacks
    told = choosing.told(folder, files, every, contents.tensors)
    if not contents.described:
        choosing.check_holds(folder, files, told, contents.tensors)
    mine = [one for one in told if one.label in labels]
    shapes = {file_name(name, rename): tuple(value.shape) for name, value in state.items() if value.is_floating_point()}
    for one in mine:  # the remaining weights may be in recipes that the model lacks
        shapes = {
            name: shape
            for name, shape in shapes.items()
            if not recognize.is_for(one, name, shape, contents.tensors, told)
        }
    others = [one for one in told if one not in mine]
    groups = choosing.fitting(shapes, others, contents.tensors, bound.find_apart)
    for group in groups:
        choosing.check_alike([fit.bound for fit in group], "the files", "files=")
    return mine + [group[0].bound for group in groups]


def state_of(model: nn.Module) -> tuple[dict[str, Tensor], list[list[str]]]:
    """The tensors of a model's state dict, and their names, grouped by tied tensor."""
    # keep_vars keeps tied parameters one object, and cast-on-gather weights from becoming plain.
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    aliases = dict[int, list[str]]()
    for name, value in state.items():
        aliases.setdefault(id(value), []).append(name)
    return state, [*aliases.values()]


def plan(
    model: nn.Module,
    folder: Path,
    contents: Contents,
    rename: Rename | None,
    strict: bool,
    theirs: list[Bound],
    problems: list[Problem],
) -> tuple[list[Step], Loaded, list[str]]:
    """The steps, in state dict order, which is the same on all ranks; the result of the load; and the names of tensors
    that only other programs read, or that the model's class declares as ignored."""
    of_planes = {f"{name}.{plane}" for name, entry in contents.described.items() for plane in entry["planes"]}
    there = (contents.tensors.keys() - of_planes) | contents.described.keys()
    state, aliases = state_of(model)
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    steps, missing, expected, unread = list[Step](), list[str](), set[str](), set[str]()
    for names in aliases:
        in_files = {name: file_name(name, rename) for name in names}
        sources = dict[str, Stored | Stack | Entry]()
        for name in names:
            parts = named_parts(in_files[name], state[name].shape[0] if state[name].dim() > 2 else None)
            expected.update(parts)
            with noted(problems):
                if (found := _bound(in_files[name], state[name], contents, theirs)) is not None:
                    sources[name] = found
                    expected.update(*(weight.tensors for weight in found.found))
                    unread.update(*(weight.unread & there for weight in found.found))
                elif len(parts) > 1 and not there.isdisjoint(parts):
                    sources[name] = _stack(name, tuple(state[name].shape), parts, contents)
                elif in_files[name] in there:
                    sources[name] = _source(in_files[name], contents)
        if sources:
            name, source = next(iter(sources.items()))
            steps.append(Step(name, state[name], source))
        elif not any(in_files[name] in there for name in names):
            missing.append(names[0])
            if strict and names[0] not in buffers:
                of_experts = rename is None and state[names[0]].dim() > 2
                apart = min((one for one in there if of_experts and OF_EXPERT.search(one)), default="")
                instead = f"; they have {apart}. {how_to_rename(model)}" if apart else ""
                also = f", nor as {', '.join(names[1:])}" if len(names) > 1 else ""
                renamed = f" (as {in_files[names[0]]})" if in_files[names[0]] != names[0] else ""
                problems.append(
                    Problem(
                        "LayoutError",
                        f"{names[0]} is not in the files{renamed}{also}{instead}",
                    )
                )
    with noted(problems):
        refuse_beside(contents.tensors, expected)
    left_out = beside.left_out_by(model)
    unread |= {name for name in there - expected if left_out.search(name)}
    unexpected = sorted(there - expected - unread)
    if strict:
        problems += [Problem("LayoutError", f"{name} is in the files, but not in the model") for name in unexpected]
    if (problems or missing) and not theirs:  # perhaps because the files are quantized in an unknown format
        problems[:0] = choosing.unknown(folder, contents.tensors)
    return steps, Loaded(tuple(missing), tuple(unexpected)), sorted(unread)


def how_to_rename(model: object) -> str:
    """The argument that gives a load the names in the files."""
    if _is_of_transformers(model):
        return "Pass rename=names_in_files(model, folder), of layoutc.integrations.transformers"
    return (
        "Pass rename=, which maps names in the model to those in the files: for experts one by one to patterns of a "
        "stack's parts, as 'experts.{expert}.w1.weight + experts.{expert}.w3.weight'"
    )


def _is_of_transformers(model: object) -> bool:
    return any(one.__module__.startswith("transformers.") for one in type(model).__mro__)


def warn_own_names(model: object, written: Mapping[str, Iterable[str]], where: object) -> None:
    """Warns of experts of a transformers model that its save_pretrained writes under other names. written: name in the
    model -> names in the files."""
    conversions: Any = sys.modules.get("transformers.conversion_mapping") if _is_of_transformers(model) else None
    every = conversions.get_model_conversion_mapping(model, add_legacy=False) if conversions else ()
    others = list[str]()
    for one in (one for one in every if type(one).__name__ == "WeightConverter"):
        parts = "|".join(part.replace("*", r"\d+") for part in one.source_patterns)
        stacks = [name for name in written if any(re.search(whole, name) for whole in one.target_patterns)]
        if type(one.operations[0]).__name__ == "MergeModulelist":
            others += [name for name in stacks if not any(re.search(parts, tensor) for tensor in written[name])]
    own = " have the model's own names, which vLLM does not read; for those of save_pretrained, pass "
    warn_of(f"{where}: ", others, f"{own}rename=names_in_files(model), of layoutc.integrations.transformers")


def refuse_beside(tensors: Mapping[str, Header], expected: Collection[str]) -> None:
    """Raises LayoutError if a load reads a tensor but not the companion that says how to decode it.

    expected: the names of all tensors that the load reads or knows as companions.
    """
    left = {name: why for name, why in undecoded.beside(tensors, expected).items() if name in expected}
    undecoded.refuse("the files", left, "Pass files=, the binding that reads all of them, or dequantize them first")


def _bound(name: str, param: Tensor, contents: Contents, theirs: list[Bound]) -> Entry | None:
    """A quantized weight in another format: by a binding of the parameter's layout if possible, else part by part.
    Raises LayoutError if the files contradict the binding."""
    local = local_tensor(param)
    own = local.LAYOUT.layout_id if isinstance(local, QuantizedTensor) else None
    for one in sorted(theirs, key=lambda one: one.cls.LAYOUT.layout_id != own):
        if not recognize.is_for(one, name, tuple(param.shape), contents.tensors, theirs):
            continue
        shape, sources = tuple(param.shape), one.cls.LAYOUT.sources
        first = next(iter(sources.values()))
        orientations = tuple(name for name, planes in sources.items() if planes == first)
        found = bound.find_apart(name, shape, one, contents.tensors)
        parts = tuple(Entry(one.cls, part.shape, orientations, part.planes, (part,)) for part in found)
        apart = Entry(one.cls, shape, orientations, {}, tuple(found), parts) if len(parts) > 1 else None
        if own == one.cls.LAYOUT.layout_id and apart is not None:
            whole = bound.find(name, shape, one, contents.tensors)
            assert whole is not None
            return Entry(one.cls, shape, orientations, whole.planes, (whole,), (), apart)
        if parts:
            return apart or parts[0]
    return None


def file_name(name: str, rename: Rename | None) -> str:
    """The name in the files for a state dict name, without torch.compile's prefix."""
    name = name.replace("_orig_mod.", "")
    return name if rename is None else rename(name)


def _stack(name: str, shape: tuple[int, ...], parts: list[str], contents: Contents) -> Stack:
    """A stack whose matrices, or equal shares of their rows, are separate plain tensors in the files."""
    if lacking := [part for part in parts if part not in contents.tensors]:
        raise LayoutError(f"{lacking[0]}, a part of {name}, is not in the files")
    stored = [contents.tensors[part] for part in parts]
    of_each = len(parts) // shape[0]
    wanted = (stored[0].dtype, (shape[1] // of_each, shape[2]))
    for one in stored:
        if (one.dtype, one.shape) != wanted or one.dtype not in DTYPES or len(shape) != 3 or shape[1] % of_each:
            raise LayoutError(
                f"{one.name}, one of {of_each} parts of each matrix of {name} of shape {shape}, is {one.dtype} of "
                f"{list(one.shape)} in the files, but should be {wanted[0]} of {list(wanted[1])}"
            )
    return Stack(tuple(stored), shape)


def _source(name: str, contents: Contents) -> Stored | Entry:
    if (entry := contents.described.get(name)) is None:
        return contents.tensors[name]
    if entry["format"] != stored_form.FORMAT:
        raise LayoutError(f"{name} is in format {entry['format']}; this version of layoutc reads {stored_form.FORMAT}")
    cls, shape = stored_form.class_of(entry), tuple(entry["shape"])
    facts = cls.LAYOUT.planes(prod(shape[:-1]), shape[-1])
    planes = {plane: contents.tensors[f"{name}.{plane}"] for plane in entry["planes"]}
    for plane, stored in planes.items():
        wanted = facts.get(plane)
        fits = wanted is not None and stored.shape == wanted.shape and wanted.nbytes == stored.end - stored.begin
        if not fits or stored.dtype not in DTYPES:
            raise DamagedError(
                f"{plane} of {name} of shape {shape} in {cls.LAYOUT.name} should be {wanted}, but the file has "
                f"{stored.shape} {stored.dtype}"
            )
    return Entry(cls, shape, tuple(entry["orientations"]), planes)


def in_parts(step: Step, fetch: Read) -> Step:
    """Makes a step read a weight part by part if its parts differ in a value that the weight shares."""
    source = step.source
    if isinstance(source, Entry) and source.instead is not None:
        shared = (plane for plane in source.planes.values() if isinstance(plane, BoundSource) and plane.shared)
        if not all(plane.is_one(fetch) for plane in shared):
            return step._replace(source=source.instead)
    return step


def sources_of(step: Step) -> list[Stored]:
    """The tensors in files that a step reads."""
    if not isinstance(step.source, Entry):
        return [step.source] if isinstance(step.source, Stored) else [*step.source.parts]
    planes = [plane for entry in (step.source, *step.source.apart) for plane in entry.planes.values()]
    parts = [part for plane in planes if isinstance(plane, BoundSource) for part, _ in plane.parts]
    return [*(plane for plane in planes if isinstance(plane, Stored)), *parts]


def classes_in(
    path: Path, model: nn.Module, files: str | None, rename: Rename | None
) -> dict[str, type[QuantizedTensor]]:
    """Parameter -> the class of the recipe whose binding its tensors match; a folder may use several. Raises like
    `layoutc.checkpoint.quantize_as_stored`."""
    contents = read_folder(path)
    told = choosing.told(path, files, recognize.installed(), contents.tensors)
    if not told:
        raise LayoutError(f"{path}: config.json has no quantization_config: pass files=, the binding's name")
    choosing.check_holds(path, files, told, contents.tensors)
    parameters = {
        file_name(name, rename): (name, tuple(value.shape))
        for name, value in model.named_parameters()
        if value.dim() >= 2 and value.is_floating_point() and not isinstance(value, DTensor | QuantizedTensor)
    }
    groups = choosing.fitting({in_files: shape for in_files, (_, shape) in parameters.items()}, told, contents.tensors)
    if not groups:
        named = next(name for one in told for name in bound.named_in(one, contents.tensors))
        raise LayoutError(
            f"{path} holds no parameter of the model quantized under its name, but has {named}. {how_to_rename(model)}"
        )
    for group in groups:
        _check_is_held(group[0])
        if len(group) > 1:
            raise choosing.several([fit.bound for fit in group], "the files", "files=")
    return {parameters[one][0]: bound.cls for bound, in_files in (group[0] for group in groups) for one in in_files}


def _check_is_held(fit: choosing.Fit) -> None:
    """Raises LayoutError, with alternatives, if no recipe holds the weights without conversion."""
    cls = fit.bound.cls
    if not issubclass(cls, Regrouped):
        return
    recipe = cls.LAYOUT.name
    instead = (
        f"To train them as they are, make a recipe of it: `layoutc new mine --from {recipe}`, their blocks and dtype "
        "in it, `layoutc build specs/mine.yaml`, layoutc.quantize_(model, 'mine')"
    )
    if issubclass(cls, Flat):
        instead = (
            f"The others keep their codes if layoutc.quantize_(model, {recipe!r}, filter_fn=...) quantizes them first"
        )
    raise LayoutError(
        f"{len(fit.names)} weights, such as {fit.names[0]}, are in files of {fit.bound.label}, which no recipe "
        "holds as they are. load_safetensors(model, folder, convert=True) reads them as values, into a plain model "
        f"or any recipe; `layoutc convert` writes them in another. {instead}"
    )

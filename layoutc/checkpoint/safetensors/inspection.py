"""Lists a folder of safetensors files for `inspect`, from headers only, which can't run code."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layoutc.checkpoint.common.entries import EntryFacts, entry_of, header_of_others
from layoutc.checkpoint.held.stored import DTYPES, Stored
from layoutc.checkpoint.safetensors import choosing, recognize
from layoutc.checkpoint.safetensors.bound import Found, named_in, weights_in
from layoutc.checkpoint.safetensors.files import Contents, read_folder
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.weight import stored_form


def entries(folder: Path) -> tuple[EntryFacts, ...]:
    """A folder's entries, in file order. A quantized weight's planes are one entry.

    Raises DamagedError if a header or an index was changed, LayoutError if file names are not Hugging Face's.
    """
    try:
        contents = read_folder(folder)
    except FileNotFoundError as error:
        raise LayoutError(str(error)) from error
    theirs = _of_others(folder, contents)
    of_weights = {tensor: name for name, found in theirs.items() for tensor in found.tensors}
    owners = {f"{name}.{plane}": name for name, entry in contents.described.items() for plane in entry["planes"]}
    facts: dict[str, EntryFacts] = {}
    for tensor in sorted(contents.tensors.values(), key=lambda tensor: (tensor.path.name, tensor.begin)):
        if (weight := of_weights.get(tensor.name)) is not None:
            facts[weight] = facts.get(weight) or _held(weight, theirs[weight])
        elif (name := owners.get(tensor.name)) is None:
            facts[tensor.name] = _plain(tensor)
        elif name not in facts:
            planes = [contents.tensors[f"{name}.{plane}"] for plane in contents.described[name]["planes"]]
            facts[name] = _quantized(name, contents.described[name], planes)
    return tuple(facts.values())


def _of_others(folder: Path, contents: Contents) -> dict[str, Found]:
    """The quantized weights of other formats, found by the bindings that config.json identifies. Warns of weights that
    match a binding's names but fit no binding."""
    if not (config := recognize.quantization_config(folder)):
        return {}
    told, found, refused = recognize.recognized(config, recognize.installed()), dict[str, Found](), list[LayoutError]()
    lacking = list[str]()
    if not told:
        why = choosing.unknown(folder, contents.tensors)[0].text
        warnings.warn(f"tensors are listed as they lie in the files: {why}", stacklevel=4)
    for one in told:
        try:
            found = weights_in(one, contents.tensors, told) | found
        except LayoutError as error:
            refused.append(error)
            lacking += named_in(one, contents.tensors, told)
    if not found.keys() >= {*lacking}:
        warnings.warn(f"{folder}: weights are listed as they lie in the files: {refused[0]}", stacklevel=4)
    return found


def _held(name: str, found: Found) -> EntryFacts:
    """A weight found by a binding; the binding is the entry's kind."""
    stored = sum(part.end - part.begin for plane in found.planes.values() for part, _ in plane.parts)
    header = header_of_others(found.bound.cls.LAYOUT, found.bound.label, found.planes)
    return entry_of(name, found.shape, "bfloat16", [header], 1, stored)


def _plain(tensor: Stored) -> EntryFacts:
    dtype = str(DTYPES.get(tensor.dtype, tensor.dtype.lower()))
    return entry_of(tensor.name, tensor.shape, dtype, [{"dtype": dtype}], 1, tensor.end - tensor.begin)


def _quantized(name: str, described: Mapping[str, Any], planes: list[Stored]) -> EntryFacts:
    path, form = planes[0].path, described["format"]
    if form != stored_form.FORMAT:
        raise LayoutError(f"{path}: {name} is in format {form}; this version of layoutc reads {stored_form.FORMAT}")
    stored = sum(plane.end - plane.begin for plane in planes)
    return entry_of(name, tuple(described["shape"]), described["dtype"], [described], 1, stored)

"""Finds a folder's tensors of codes that no binding decodes, so that they are not loaded as values. Reads only headers.

Three signs identify codes: a dtype that needs a scale, a name that programs use for codes, and a companion tensor that
says how to decode them (scales, zero points, column order).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from layoutc.checkpoint.held.stored import NAMES, Stored
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.weight.tensor import recipe_of

LISTED = 24  # names that a message lists; if there are more, it groups names that differ only in numbers

_FLOATS = re.compile(r"F[468]_|F4$|float[468]_")  # dtypes whose values need a scale from another tensor
_INTEGERS = {"I8", "U8", "I16", "U16", "I32", "U32"}
_ALL_INTEGERS = _INTEGERS | {"I64", "U64"}
# Integer tensors of two or more dims that are not codes: masks, and indices of positions, tokens and experts.
_TABLES = re.compile(r"(^|[._])(ids?|idx|index|indices|mask|tid2eid|positions?|counts?|lengths?)$")
_OF_WEIGHTS = r"weight_(scale|scales|scale_inv|scale_2|global_scale|zero_point|g_idx)|pre_quant_scale|SCB"
# Last name parts that identify codes or their companions by themselves.
# HQQ's W_q may be declared as floats, and SpQR's words have 64 bits.
_CODES = re.compile(rf"weight_packed|qweight|qzeros|W_q|dense_weights|{_OF_WEIGHTS}")
# Last name parts of companions: _SUFFIX extends the decoded tensor's name; _OF_MODULE decodes the module's weight.
_SUFFIX = re.compile(r"_(scale|scales|scale_inv|scale_2|global_scale|zero_point|zero_points|g_idx|absmax)$")
_OF_MODULE = re.compile(rf"scales?|scale_inv|global_scale|zeros|zero_point|qzeros|g_idx|biases|{_OF_WEIGHTS}")
_WEIGHTS = ("weight", "weight_packed", "qweight")


class Described(NamedTuple):
    """A tensor as a header would describe it. dtype: safetensors' or torch's name."""

    dtype: str
    shape: tuple[int, ...]


Header = Stored | Described


def decoded_by(name: str, tensors: Mapping[str, Header]) -> str | None:
    """The tensor that `name` helps to decode; None if it decodes none."""
    parts = name.split(".")
    module, last = ".".join(parts[:-1]), parts[-1]
    inside = (".".join(parts[:end]) for end in range(1, len(parts)))  # a parameter can't be inside a tensor
    beside = [f"{name[: -len(suffix[0])]}"] if (suffix := _SUFFIX.search(last)) is not None else []
    if last.startswith("_"):  # torchao's _weight_scale of _weight_qdata
        words = last.split("_")
        beside += [f"{module}.{'_'.join(words[:end])}_qdata" for end in range(2, len(words)) if words[-1] != "qdata"]
    if (of := next((one for one in (*inside, *beside) if one in tensors), None)) is not None:
        return of
    if _OF_MODULE.fullmatch(last) is None:
        return None
    weights = (f"{module}.{one}" if module else one for one in _WEIGHTS)
    if (of := next((one for one in weights if one in tensors), None)) is None:
        return None
    codes = _is_codes(of, tensors[of])  # if not, a norm may have a scale, and a layer several biases
    return of if codes or (len(tensors[of].shape) > 1 and last != "biases") else None


def _is_codes(name: str, header: Header) -> bool:
    """True if a tensor's own name, dtype or shape identifies it as codes or as their companion."""
    last, shape = name.rpartition(".")[2], header.shape
    if _FLOATS.match(header.dtype) or _CODES.fullmatch(last):
        return True
    if last == "weight" and header.dtype in _ALL_INTEGERS:
        return True
    causal = len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]  # an attention mask
    return header.dtype in _INTEGERS and len(shape) > 1 and not causal and _TABLES.search(last) is None


def beside(tensors: Mapping[str, Header], decoded: Container[str] = ()) -> dict[str, str]:
    """The tensors whose companions are not among the `decoded` ones:
    name -> "BF16 of [64, 64] with a.weight_scale beside it"."""
    found = dict[str, list[str]]()
    for name in tensors:
        if name not in decoded and (of := decoded_by(name, tensors)) is not None:
            found.setdefault(of, []).append(name)
    return {name: f"{_header(tensors[name])} with {' and '.join(by)} beside it" for name, by in found.items()}


def undecoded(tensors: Mapping[str, Header], decoded: Container[str] = ()) -> dict[str, str]:
    """The tensors that `_is_codes` identifies, with their dtypes and shapes, and those of `beside`."""
    found = beside(tensors, decoded)
    for name, header in tensors.items():
        if name not in decoded and decoded_by(name, tensors) is None and _is_codes(name, header):
            found.setdefault(name, _header(header))
    return {name: found[name] for name in tensors if name in found}


def _header(header: Header) -> str:
    return f"{header.dtype} of {list(header.shape)}"


def refuse(where: str, found: Mapping[str, str], instead: str) -> None:
    """Raises LayoutError with all tensors that `undecoded` found, if any.

    where: the file, folder or model. instead: what to do.
    """
    if found:
        raise LayoutError(
            f"{where}: {len(found)} tensors hold codes that layoutc can't decode, so they can't pass for values: "
            f"{'; '.join(_listed(found))}. {instead}"
        )


def _listed(found: Mapping[str, str]) -> Iterable[str]:
    if len(found) <= LISTED:
        return [f"{name} ({why})" for name, why in found.items()]
    alike = dict[str, list[str]]()
    for name, why in found.items():
        alike.setdefault(re.sub(r"\d+", "*", name), []).append(f"such as {name}, {why}")
    return [f"{pattern} ({len(each)}, {each[0]})" for pattern, each in alike.items()]


def check_values(values: Mapping[str, Tensor]) -> None:
    """Raises LayoutError if a model's tensors, by name, include codes of other packages' quantized layers."""
    plain = {name: one for name, one in values.items() if recipe_of(one) is None}
    headers = {
        name: Described(NAMES.get(one.dtype, str(one.dtype)[6:]), tuple(one.shape)) for name, one in plain.items()
    }
    instead = "Load the folder that they came from with quantize_as_stored and load_safetensors, or dequantize them"
    refuse("the model", undecoded(headers), instead)

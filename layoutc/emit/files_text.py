"""The contents of files.py: how other checkpoint formats hold the recipe's planes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from layoutc.layout.bindings import Files
from layoutc.layout.layout import Layout
from layoutc.runtime.bindings.facts import EXPERTS, FUSED, MATRICES, REST, Binding, BoundPlane, Codes, RecordBinding
from layoutc.spec.notation import AS_STORED

CODEBOOK = "CODEBOOK"  # the name of the elements' codebook
LINE = 116  # characters of values
Fact = Binding | BoundPlane | Codes | RecordBinding
Names = Sequence[tuple[object, str]]
_SIZES: Names = [(MATRICES, "MATRICES"), (REST, "REST")]


def files_lines(layout: Layout) -> list[str]:
    """The entries of FILES, one per line; none for a recipe that states no files."""
    names: Names = [(EXPERTS, "EXPERTS"), (FUSED, "FUSED"), *_codebooks(layout).items()]
    return [line for files in layout.files for line in _binding(files, names)]


def codebook_lines(layout: Layout) -> dict[str, list[str]]:
    """The codebooks that bindings state, by name, with values in as few lines as possible."""
    return {
        name: textwrap.wrap(", ".join(map(repr, values)) + ",", LINE, break_on_hyphens=False)
        for values, name in _codebooks(layout).items()
    }


def container_lines(layout: Layout) -> list[str]:
    """The entries of CONTAINERS, one per line; none if no container holds the recipe's records."""
    return [f"RecordBinding({', '.join(_arguments(one, ()))},)," for one in layout.containers]


def _codebooks(layout: Layout) -> dict[tuple[float, ...], str]:
    """The values of codes -> their name in files.py."""
    found = {one.binding.codebook[2]: CODEBOOK for one in layout.files if one.binding.codebook}
    for files in layout.files:
        for plane, name in files.codebooks.items():
            codes = files.binding.planes[plane].codes
            found |= {codes.values: f"VALUES_OF_{name.upper()}"} if codes else {}
    return found


def _binding(files: Files, names: Names) -> list[str]:
    binding, orders = files.binding, {name: one for name, one in files.layouts.items() if one is not None}
    comments = {name: f"  # {one.pattern}" for name, one in orders.items() if one != AS_STORED}
    planes = [f'"{name}": {code(one, names)},{comments.get(name, "")}' for name, one in binding.planes.items()]
    lines = [f'"{binding.name}": Binding(']
    for one in _arguments(binding._replace(planes={}), names):
        lines += ["planes={", *planes, "},"] if one == "planes={}" else [f"{one},"]
    return [*lines, "),"]


def code(fact: object, names: Names) -> str:
    """A fact as code. names: values -> the names that replace them."""
    if (name := next((name for value, name in names if value == fact), None)) is not None:
        return name
    if not isinstance(fact, tuple):
        return repr(fact)
    each = [code(one, names) for one in fact]
    if isinstance(fact, BoundPlane | Codes):
        always = len(fact._fields) - len(fact._field_defaults)
        return f"{type(fact).__name__}({', '.join([*each[:always], *_arguments(fact, names)[always:]])})"
    return f"({', '.join(each)}{',' if len(each) == 1 else ''})"


def _arguments(fact: Fact, names: Names) -> list[str]:
    """The arguments of a fact with fields, except defaults."""
    usual, stated = fact._field_defaults, list[str]()
    for key, value in fact._asdict().items():
        if key not in usual or value != usual[key]:
            sizes = _SIZES if key in ("rows", "columns") else names
            stated.append(f"{key}={code(value, sizes)}")
    return stated

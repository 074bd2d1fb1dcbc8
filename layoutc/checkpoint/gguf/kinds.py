"""Maps GGUF types to the recipes whose specs define their records, and lists a file's entries for `inspect`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from layoutc.checkpoint.common.entries import EntryFacts, entry_of, header_of_others
from layoutc.checkpoint.gguf.container import Held
from layoutc.checkpoint.gguf.splits import read_model
from layoutc.checkpoint.held.stored import OF_OTHERS
from layoutc.checkpoint.safetensors import recognize
from layoutc.runtime.bindings.facts import RecordBinding
from layoutc.runtime.bindings.gguf_types import PLAIN, TYPES
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.weight.tensor import QuantizedTensor

CONTAINER = "gguf"


class Kind(NamedTuple):
    """A recipe's class, and the GGUF type of its records."""

    cls: type[QuantizedTensor]
    binding: RecordBinding

    @property
    def label(self) -> str:
        """recipe/binding, for display."""
        return f"{self.cls.LAYOUT.name}/{self.binding.name}"


def kinds_of(classes: Iterable[type[QuantizedTensor]]) -> list[Kind]:
    """The GGUF types of classes. Raises LayoutError if a spec contradicts GGUF's definition of the type."""
    found = [Kind(cls, one) for cls in classes for one in cls.LAYOUT.containers if one.container == CONTAINER]
    for kind in found:
        stated = (kind.binding.type, kind.binding.elements, kind.binding.nbytes)
        if (known := TYPES.get(kind.binding.number)) != stated:
            raise LayoutError(
                f"{kind.label} states type {kind.binding.number} of GGUF as {stated[0]}, {stated[2]} bytes for "
                f"{stated[1]} elements, which is {known or 'no type'}: its spec is wrong"
            )
    return found


def installed() -> list[Kind]:
    """The GGUF types of layoutc's recipes, and of packages that register recipes."""
    return kinds_of(recognize.classes())


def entries(path: Path) -> tuple[tuple[EntryFacts, ...], tuple[Path, ...]]:
    """A model's entries, in file order, and its files. An entry's kind is its type's recipe, else the type.

    Raises DamagedError if the file is not valid GGUF.
    """
    header, kinds = read_model(path), {kind.binding.number: kind for kind in installed()}
    return tuple(_entry(held, kinds.get(held.number)) for held in header.tensors.values()), header.files


def _entry(held: Held, kind: Kind | None) -> EntryFacts:
    stored = held.end - held.begin
    if held.type in PLAIN:
        dtype = str(OF_OTHERS[PLAIN[held.type]])
        return entry_of(held.name, held.shape, dtype, [{"dtype": dtype}], 1, stored)
    if kind is None or len(held.shape) < 2:
        return entry_of(held.name, held.shape, "bfloat16", [None], 1, stored, kind=held.type)
    header = header_of_others(layout := kind.cls.LAYOUT, kind.label, next(iter(layout.sources.values())))
    return entry_of(held.name, held.shape, "bfloat16", [header], 1, stored)

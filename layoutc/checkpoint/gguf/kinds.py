"""Which recipes' records are types of GGUF, as their specs state; and the entries of a file by them, for `inspect`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from layoutc.checkpoint.common.entries import EntryFacts, entry_of
from layoutc.checkpoint.gguf.container import Held
from layoutc.checkpoint.gguf.splits import read_model
from layoutc.checkpoint.held.stored import OF_OTHERS
from layoutc.checkpoint.safetensors import recognize
from layoutc.runtime.bindings.facts import RecordBinding
from layoutc.runtime.bindings.gguf_types import PLAIN, TYPES
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.weight import stored_form
from layoutc.runtime.weight.tensor import QuantizedTensor

CONTAINER = "gguf"


class Kind(NamedTuple):
    """A recipe's class, and the type that its records are."""

    cls: type[QuantizedTensor]
    binding: RecordBinding

    @property
    def label(self) -> str:
        """recipe/binding, as it is printed."""
        return f"{self.cls.LAYOUT.name}/{self.binding.name}"


def kinds_of(classes: Iterable[type[QuantizedTensor]]) -> list[Kind]:
    """The types of classes. Raises LayoutError for one that is no type of GGUF as its spec states it."""
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
    """The types of the recipes that come with layoutc, and of packages that register theirs."""
    return kinds_of(recognize.classes())


def entries(path: Path) -> tuple[tuple[EntryFacts, ...], tuple[Path, ...]]:
    """The entries of a model, in the order of their bytes, and its files: of types that a recipe states by the recipe,
    others by type.

    Raises DamagedError if the file is not GGUF as defined.
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
    layout = kind.cls.LAYOUT
    orientation = next(iter(layout.sources))
    described = stored_form.describe(layout) | {
        "recipe": kind.label,
        "planes": list(layout.sources[orientation]),
        "orientations": [orientation],
    }
    return entry_of(held.name, held.shape, "bfloat16", [described], 1, stored)

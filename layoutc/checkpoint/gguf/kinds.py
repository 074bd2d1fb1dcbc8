"""Which recipes' records are types of GGUF: as their specs state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from layoutc.checkpoint.safetensors import recognize
from layoutc.runtime.bindings.facts import RecordBinding
from layoutc.runtime.bindings.gguf_types import TYPES
from layoutc.runtime.errors import LayoutError
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

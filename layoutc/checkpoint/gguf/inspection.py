"""The entries of a GGUF file, for `inspect`: read from its header, which can't run code."""

from __future__ import annotations

from pathlib import Path

from layoutc.checkpoint.common.entries import EntryFacts, entry_of
from layoutc.checkpoint.gguf.container import Held
from layoutc.checkpoint.gguf.kinds import Kind, installed
from layoutc.checkpoint.gguf.splits import read_model
from layoutc.checkpoint.held.stored import OF_OTHERS
from layoutc.runtime.bindings.gguf_types import PLAIN
from layoutc.runtime.weight import stored_form


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

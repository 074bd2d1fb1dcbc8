"""Quantizes a model as the GGUF file that it will load holds it: the same weights, in the same types."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from torch import nn
from torch.distributed.tensor import DTensor

from layoutc.checkpoint.gguf.kinds import Kind, installed
from layoutc.checkpoint.gguf.planning import has, names_of
from layoutc.checkpoint.gguf.splits import read_model
from layoutc.checkpoint.safetensors.as_stored import quantize_each
from layoutc.checkpoint.safetensors.planning import Rename, file_name
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.weight.tensor import QuantizedTensor


def quantize_as_gguf(
    model: nn.Module, file: str | PathLike[str], *, files: str | None = None, rename: Rename | None = None
) -> dict[str, str]:
    """Quantizes those parameters of a model that a GGUF file holds in a type that a recipe states; returns parameter ->
    recipe. Tables of embeddings stay plain, tied ones too: they are looked up, not multiplied.

    As `quantize_as_stored`, which calls it for a file. files: `recipe/binding` where several recipes state a type.
    """
    header = read_model(Path(file))
    names, by_number = names_of(header), dict[int, list[Kind]]()
    every = installed()
    if files is not None and not any(files in (kind.label, kind.binding.name) for kind in every):
        there = ", ".join(sorted(kind.label for kind in every))
        raise LayoutError(f"no installed recipe has files {files!r} of GGUF; there are {there}")
    for kind in every:
        by_number.setdefault(kind.binding.number, []).append(kind)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    chosen = dict[str, type[QuantizedTensor]]()
    for name, value in model.named_parameters():
        found = names.in_files(file_name(name, rename))
        if found is None or not has(header, found) or id(value) in tables:
            continue
        numbers = {header.tensors[tensor].number for tensor in found.tensors}
        free = value.dim() >= 2 and value.is_floating_point() and not isinstance(value, DTensor | QuantizedTensor)
        of_type = by_number.get(min(numbers), []) if len(numbers) == 1 else []
        named = [kind for kind in of_type if files in (kind.label, kind.binding.name)] or of_type
        if len({kind.cls.LAYOUT.layout_id for kind in named}) > 1:
            labels = ", ".join(sorted(kind.label for kind in named))
            raise LayoutError(f"{name}: several recipes state its type: pass files= one of {labels}")
        if free and named:
            chosen[name] = named[-1].cls
    if not chosen:
        types = ", ".join(sorted({one.type for one in header.tensors.values()}))
        raise LayoutError(
            f"{header.path} holds no parameter of the model in a type that a recipe states (it has {types})"
        )
    return quantize_each(model, chosen)

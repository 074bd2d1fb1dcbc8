"""Exports a model to a GGUF file with another file's key-values: vocabulary, config, chat template."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from layoutc.checkpoint.common.exportable import check_exportable, state_of
from layoutc.checkpoint.common.verdicts import Problem, agree, everywhere, noted, rank_of
from layoutc.checkpoint.common.whole_weights import gathered_whole
from layoutc.checkpoint.gguf.architectures import Names, Place
from layoutc.checkpoint.gguf.container import Header
from layoutc.checkpoint.gguf.kinds import Kind, installed, kinds_of
from layoutc.checkpoint.gguf.planning import beside, entry, has, names_of, rotation_of, source_of
from layoutc.checkpoint.gguf.splits import read_model
from layoutc.checkpoint.gguf.values import Mapped, Rotated, Share
from layoutc.checkpoint.gguf.writing import OpenGguf, Planned, check_new, copied, plain_values_of, records_of
from layoutc.checkpoint.held.stored import NAMES, OF_OTHERS
from layoutc.checkpoint.safetensors.load import holds
from layoutc.checkpoint.safetensors.planning import Rename, Step, file_name
from layoutc.checkpoint.safetensors.values import values_of
from layoutc.runtime.bindings.gguf_types import NUMBERS, PLAIN, TYPES
from layoutc.runtime.errors import LayoutError, check_model
from layoutc.runtime.torch_private import local_tensor
from layoutc.runtime.weight.tensor import QuantizedTensor, recipe_of

BETWEEN = 1 << 30  # bytes to write before ranks exchange failures


class Item(NamedTuple):
    """A tensor to write. value: the model's; None for a source tensor that no parameter holds. kind: for a weight that
    is or will be quantized. order: of its rows. of: the first of the tensors that hold the value together. kept: write
    the source's bytes, since they decode to the plain value."""

    planned: Planned
    value: Tensor | None
    kind: Kind | None
    order: Rotated | Share | None
    of: str
    kept: bool


@torch.no_grad()
def export_gguf(
    model_or_state_dict: nn.Module | Mapping[str, Any],
    file: str | PathLike[str],
    *,
    source: str | PathLike[str],
    quantize: bool = False,
    rename: Rename | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, str]:
    """Writes model_or_state_dict as one GGUF file for llama.cpp and its ecosystem; returns tensor -> type.

    source: a GGUF file of the same architecture, e.g. the one that the model was loaded from. Its key-values (sizes,
    vocabulary, template) are copied byte for byte, and the order of tensors is kept. Quantized and cast-on-gather
    weights are written in the type that their recipe defines. A plain tensor with the same values as the source's keeps
    the source's bytes and type. Else it becomes F32 if it is 1-D, and keeps its dtype if it has more dims. Tensors that
    are one weight in the model, e.g. gate and up of experts, are kept together or not at all. So a model that was
    loaded but not trained reproduces the source file. Tensors that `load_gguf` leaves out are copied. quantize: also
    quantize plain tensors to the source's types, if recipes define them. rename: maps a state dict name to
    transformers' name. Only the first of tied weights is written.

    Collective if torch.distributed is initialized: all ranks of `process_group` (default: all) call it. Shards are
    gathered one weight at a time, and the first rank writes. The file is renamed into place when it is complete.

    If any rank finds a problem, every rank raises it: FileExistsError if the file exists; FileNotFoundError,
    DamagedError or LayoutError before anything is written; OSError if writing fails. A failure leaves nothing behind.

    Example:

        >>> model = Llama(config)
        >>> done = checkpoint.load_gguf(model, "Llama-3.gguf")
        >>> types = checkpoint.export_gguf(model, "tuned.gguf", source="Llama-3.gguf")
    """
    check_model(model_or_state_dict, "export_gguf", or_state=True)
    problems: list[Problem] = []
    path, items, every = Path(file), list[Item](), list[Kind]()
    first, digest = rank_of(process_group) == 0, ""
    header: Header | None = None
    mapped: Mapped | None = None
    with noted(problems):
        header = read_model(Path(source))
        mapped = Mapped(header, {})
        every = installed()
        into = {kind.binding.number: kind for kind in every} if quantize else {}
        items = _items(model_or_state_dict, header, mapped, into, rename, problems)
        if first:
            check_new(path)
        facts = repr([(item.planned, item.value is None) for item in items]) + header.digest
        digest = hashlib.sha256(facts.encode()).hexdigest()
    agree(problems, process_group, digest, "export different names, shapes or types, or beside different sources")
    assert header is not None
    assert mapped is not None
    with noted(problems):
        items = [_as_source(item, mapped, every) for item in items]
    kept = everywhere([item.kept for item in items], process_group)
    agree(problems, process_group)
    for at, (item, *of_ranks) in enumerate(zip(items, *kept, strict=True)):
        items[at] = item._replace(kept=all(of_ranks))
        if all(of_ranks):  # then use the source's type
            number = header.tensors[item.planned.name].number
            items[at] = items[at]._replace(kind=None, planned=item.planned._replace(number=number))
    out: OpenGguf | None = None
    try:
        with noted(problems):
            out = OpenGguf(path, header, [item.planned for item in items]) if first else None
        agree(problems, process_group)
        since = 0
        for item in items:
            whole = None if item.kept or item.value is None else gathered_whole(item.value)
            if out is not None and not problems:
                with noted(problems):
                    _put(out, item, whole, mapped, header)
            del whole
            if (since := since + item.planned.nbytes) > BETWEEN:
                agree(problems, process_group)
                since = 0
        agree(problems, process_group)
        with noted(problems):
            if out is not None:
                out.finish()
        agree(problems, process_group)
    finally:
        if out is not None:
            out.abandon()
    return {item.planned.name: TYPES[item.planned.number].name for item in items}


# ----------------------------------------------------------------------------------------------------------------- plan
def _items(
    model: nn.Module | Mapping[str, Any],
    header: Header,
    mapped: Mapped,
    into: Mapping[int, Kind],
    rename: Rename | None,
    problems: list[Problem],
) -> list[Item]:
    """The tensors to write: in the source's order, then those that it lacks. Plain tensors get the types of new ones.

    into: number -> type, for the source's types that plain weights are quantized to.
    """
    names, found, expected, state = names_of(header), dict[str, Item](), set[str](), state_of(model)
    kinds = kinds_of({cls: None for cls in map(recipe_of, state.values()) if cls is not None})
    for name, value in state.items():
        with noted(problems):
            in_file = names.in_files(file_name(name, rename))
            if in_file is None:
                raise LayoutError(f"{name} has no name in the architecture of {header.path}: pass rename=")
            expected |= {*in_file.tensors}
            check_exportable(name, value)
            if taken := [tensor for tensor in in_file.tensors if tensor in found]:
                raise LayoutError(f"{name} and another tensor of the model would both be {taken[0]}: check rename=")
            own = _kind(name, value, kinds)
            if has(header, in_file):
                mapped.sources[in_file.tensors[0]] = source_of(in_file, names, header)
            for tensor, shape, order in _shares(name, value, in_file, names, header):
                held = header.tensors.get(tensor)
                if held is not None and held.shape != shape:
                    raise LayoutError(f"{name} has shape {shape} in the model, and {held.shape} in {header.path}")
                kind = into.get(held.number) if own is None and held is not None and value.dim() > 1 else own
                planned = Planned(tensor, _number(name, value, kind), shape)
                found[tensor] = Item(planned, value, kind, order, in_file.tensors[0], False)
    may_lack = beside(header, names, model).union(names.architecture.ignored) - expected
    for tensor, held in header.tensors.items():
        if tensor in may_lack:
            found[tensor] = Item(Planned(tensor, held.number, held.shape), None, None, None, tensor, True)
        elif tensor not in expected:
            text = f"{tensor} is in {header.path}, but not in the model"
            problems.append(Problem("LayoutError", text))
    places = {tensor: number for number, tensor in enumerate(header.tensors)}
    return sorted(found.values(), key=lambda item: places.get(item.planned.name, len(places)))


def _shares(
    name: str, value: Tensor, place: Place, names: Names, header: Header
) -> Iterator[tuple[str, tuple[int, ...], Rotated | Share | None]]:
    """The (name, shape, row order) of each tensor that a parameter is written as. Raises LayoutError."""
    shape, parts = tuple(value.shape), len(place.tensors)
    if parts == 1:
        yield place.tensors[0], shape, rotation_of(place.tensors[0], place.module, shape, names, header)
        return
    if len(shape) < 2 or shape[-2] % parts:
        raise LayoutError(f"{name} of shape {shape} is not {parts} equal parts: {', '.join(place.tensors)}")
    each = shape[-2] // parts
    for number, tensor in enumerate(place.tensors):
        yield tensor, (*shape[:-2], each, shape[-1]), Share(parts, number, each)


def _kind(name: str, value: Tensor, kinds: list[Kind]) -> Kind | None:
    """The type to write a quantized weight in; None for a plain one. Raises LayoutError."""
    if (cls := recipe_of(value)) is None:
        return None
    kind = next((one for one in kinds if one.cls.LAYOUT.layout_id == cls.LAYOUT.layout_id), None)
    if kind is None:
        there = ", ".join(sorted({one.label for one in installed()}))
        raise LayoutError(f"GGUF has no type for {cls.LAYOUT.name}, the recipe of {name}. Recipes with a type: {there}")
    local = local_tensor(value)
    held = local.store.planes if isinstance(local, QuantizedTensor) else None
    needed = next(iter(kind.cls.LAYOUT.sources.values()))
    if held is not None and (lacking := [one for one in needed if one not in held]):
        raise LayoutError(f"{name} holds no {lacking[0]}, which {kind.binding.type} has: {local!r}")
    return kind


def _number(name: str, value: Tensor, kind: Kind | None) -> int:
    """The type number of a tensor that is not kept. Raises LayoutError if its dtype has none."""
    if kind is not None:
        return kind.binding.number
    plain = "F32" if value.dim() < 2 and value.is_floating_point() else NAMES.get(value.dtype, "")
    if plain not in PLAIN:
        raise LayoutError(f"{name} is {value.dtype}, which GGUF has no type for")
    return NUMBERS[plain]


def _as_source(item: Item, mapped: Mapped, kinds: list[Kind]) -> Item:
    """The item, marked as kept if this rank's values of a plain tensor equal the source's decoded values."""
    if item.value is None or recipe_of(item.value) is not None or (source := mapped.sources.get(item.of)) is None:
        return item
    local = local_tensor(item.value)
    if not holds(item.value):
        return item._replace(kept=True)
    step = Step(item.of, item.value, entry(item.of, local, source, mapped, kinds, False))
    values = values_of(step, mapped.read).to(local.device, local.dtype)
    here, there = (one.contiguous().reshape(-1).view(torch.uint8) for one in (local, values))  # bit for bit
    return item._replace(kept=torch.equal(here, there))


# ---------------------------------------------------------------------------------------------------------------- write
def _put(out: OpenGguf, item: Item, whole: Tensor | None, mapped: Mapped, header: Header) -> None:
    """Writes a tensor, on the writing rank."""
    name = item.planned.name
    if whole is None:
        out.put(name, copied(mapped.bytes_of(header.tensors[name])))
        return
    if item.kind is None:
        dtype = OF_OTHERS[next(plain for plain, number in NUMBERS.items() if number == item.planned.number)]
        out.put(name, plain_values_of(whole.detach(), dtype, item.order))
        return
    out.put(name, records_of(item.kind, whole.detach(), item.order))

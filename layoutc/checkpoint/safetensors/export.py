"""Exports a model to Hugging Face safetensors: quantized weights as planes, or dequantized to plain values."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from layoutc.checkpoint.bindings.names import named_parts
from layoutc.checkpoint.bindings.source_configs import goes_on
from layoutc.checkpoint.common.exportable import check_exportable, state_of
from layoutc.checkpoint.common.folders import copy_companions
from layoutc.checkpoint.common.narrowing import check_finite, warn_of
from layoutc.checkpoint.common.verdicts import Problem, agree, everywhere, from_first, noted, rank_of
from layoutc.checkpoint.common.whole_weights import cut, gathered_whole, join_amaxes, joint_amax, whole_planes
from layoutc.checkpoint.held import weights as held_weights
from layoutc.checkpoint.held.stored import DTYPES
from layoutc.checkpoint.held.undecoded import check_values
from layoutc.checkpoint.held.weights import Held, Noted
from layoutc.checkpoint.safetensors import beside, recognize, writing
from layoutc.checkpoint.safetensors.bound import held
from layoutc.checkpoint.safetensors.files import OURS, Slices, bytes_of
from layoutc.checkpoint.safetensors.kept import KeptIn, Origin, origin, warn_written
from layoutc.checkpoint.safetensors.planning import Rename, file_name, warn_own_names
from layoutc.checkpoint.safetensors.recognize import Bound
from layoutc.checkpoint.safetensors.writing import OpenFile, Planned, Writing, split_into_files
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Facts
from layoutc.runtime.torch_private import local_tensor
from layoutc.runtime.weight import checksums, stored_form
from layoutc.runtime.weight.tensor import QuantizedTensor, recipe_of


class Item(NamedTuple):
    """A weight: its name in the files, and the tensors to write for it. held: the binding's tensors, if files=."""

    source: str  # its name in the state dict
    name: str
    value: Tensor
    tensors: dict[str, Facts]
    held: tuple[Held, ...] = ()
    kept: KeptIn | None = None
    copied: Callable[[], Tensor] | None = None  # reads a tensor of the source, which replaces `value`
    declared: tuple[str, tuple[int, ...]] | None = None  # dtype and shape in the header, for raw bytes

    @property
    def nbytes(self) -> int:
        """The item's bytes in a file."""
        return sum(facts.nbytes for facts in self.tensors.values())

    @property
    def planned(self) -> list[Planned]:
        """The item's tensors in a file."""
        shorter = {one.name for one in self.held if one.may_be_shorter}
        return [Planned(name, facts, name in shorter, self.declared) for name, facts in self.tensors.items()]


@torch.no_grad()
def export_safetensors(
    model_or_state_dict: nn.Module | Mapping[str, Any],
    folder: str | PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 2**30,
    rename: Rename | None = None,
    files: str | None = None,
    config: Mapping[str, Any] | None = None,
    source: str | PathLike[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> list[str]:
    """Writes model_or_state_dict as a folder of safetensors files; returns the file names.

    dtype: None writes each plane of a quantized weight as a compact tensor `<weight>.<plane>`, with layouts and
    checksums in each file's metadata; `load_safetensors` reads the same bytes back. torch.bfloat16, float16 or float32
    converts all floating-point tensors, and dequantizes quantized weights under their usual names.
    files: a binding that the recipes' specs define under `files`, e.g. `deepseek`. Quantized and cast-on-gather weights
    are written in that format, and config.json says so. Formats with quantized scales (`bitsandbytes_double`) round
    them, and a warning says by how much. config: the rest of config.json; default: the config of a transformers model,
    if dtype or files is given.
    source: the folder that the weights were loaded from. Its small files (tokenizer, templates) are copied. If it has
    the same binding, its quantization_config is kept, updated with the modules that are plain now. Activation scales
    and layers that the model's class ignores are copied, and so are texts and codes of unchanged scales. A warning
    names tensors that are left out.
    max_shard_bytes: maximum file size, unless one weight is larger. rename: maps a state dict name to the name in the
    files; layoutc.integrations.transformers.names_in_files(model) gives those of transformers' save_pretrained. Only
    the first of tied weights is written; values that are not tensors are left out.

    Collective if torch.distributed is initialized: all ranks of `process_group` (default: all) call it. Ranks that see
    the folder take turns writing, a weight at a time, into a temporary folder, which is renamed when complete.

    If any rank finds a problem, every rank raises it: FileExistsError if the folder is not empty; LayoutError or
    ValueError before anything is gathered or written; OSError if writing fails, and LayoutError for scales without a
    finite mean. A failed export leaves nothing behind.

    Example:

        >>> model = nn.Linear(128, 128)
        >>> checkpoint.export_safetensors(model, "plain", dtype=torch.bfloat16)
        ['model.safetensors']
    """
    folder, split, items = Path(folder), dict[str, list[Item]](), list[Item]()
    problems, theirs, said = list[Problem](), list[Bound](), Noted([], {})
    first, slices, wide = rank_of(process_group) == 0, Slices(), list[str]()
    beside_it, quantization, lacking = list[Item](), dict[str, Any](), list[str]()
    began = Origin({}, slices, {})
    with slices, noted(problems):
        state = state_of(model_or_state_dict)
        theirs = bindings_of(state, files, dtype)
        if source is not None and not theirs:
            raise ValueError("source= needs files=, the binding that says what else the source's files hold")
        began = origin(source, slices)
        items = items_of(state, dtype, rename, theirs, problems, began)
        quantization, beside_it, lacking = _with_source(model_or_state_dict, items, theirs, rename, began)
    if source is not None:
        items, wide = settled(items, process_group)
    with slices, noted(problems):
        split = split_into_files([*items, *beside_it], max_shard_bytes)
        if first:
            writing.check_new(folder, "export")
    described = repr([[(item.name, item.tensors) for item in file] for file in split.values()]).encode()
    agree(problems, process_group, hashlib.sha256(described).hexdigest(), "export different names, shapes or dtypes")
    join_amaxes(item.value for item in items if item.held)
    partly = from_first(lambda: writing.begin_folder(folder), process_group)
    try:
        writers = [rank for rank, seen in enumerate(everywhere(partly.is_dir(), process_group)) if seen]
        with slices, Writing() as thread:
            for number, (name, file) in enumerate(split.items()):
                writes = writers[number % len(writers)] == rank_of(process_group)
                _gather_file(partly / name, file, dtype, thread if writes else None, problems, said)
                agree(problems, process_group)
            with noted(problems):
                thread.wait()
        agree(problems, process_group)
        with noted(problems):
            if first:
                stated = config if config is not None else writing.config_of_model(model_or_state_dict, dtype)
                if theirs or config is not None or (stated is not None and dtype is not None):
                    writing.write_config(partly, began.config if stated is None else stated, quantization)
                copy_companions(source, partly)
                planned = {name: [one for item in file for one in item.planned] for name, file in split.items()}
                writing.finish_folder(partly, folder, planned)
        agree(problems, process_group)
        if theirs:
            said = Noted.of_ranks(everywhere(said, process_group))
    finally:
        if first:
            shutil.rmtree(partly, ignore_errors=True)
    if first:
        warn_written(files, source, said, wide)
        if rename is None and (theirs or dtype is not None):
            warn_own_names(model_or_state_dict, {item.source: item.tensors for item in items}, folder)
        what = "are not written: the model has no such modules, or files of another form would not say what they are"
        warn_of("", lacking, f" of {source} {what}")
    return list(split)


# ----------------------------------------------------------------------------------------------------------------- plan
def bindings_of(state: Mapping[str, Tensor], files: str | None, dtype: torch.dtype | None) -> list[Bound]:
    """The binding `files` of each of the model's recipes. Raises ValueError, LayoutError."""
    if files is None:
        return []
    if dtype is not None:
        raise ValueError(f"files={files!r} keeps weights quantized, and dtype={dtype} does not: pass one of them")
    classes = {cls: None for cls in map(recipe_of, state.values()) if cls is not None}
    found = recognize.chosen(files, recognize.bindings_of(classes))
    have = {one.cls.LAYOUT.layout_id for one in found}
    if lacking := [cls.LAYOUT.name for cls in classes if cls.LAYOUT.layout_id not in have]:
        raise LayoutError(f"the model also has weights in {lacking[0]}, which has no files {files!r}")
    return found


def items_of(
    state: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    rename: Rename | None,
    theirs: list[Bound],
    problems: list[Problem],
    files: Origin,
) -> list[Item]:
    """The weights to write, after this rank's checks. files: their source's. Raises ValueError, LayoutError."""
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be floating point, or None for quantized weights as they are, not {dtype}")
    items, taken = [], dict[str, str]()
    check_values(state)
    for name, value in state.items():
        with noted(problems):
            check_exportable(name, value)
            to = file_name(name, rename)
            tensors, kept = _held(to, value, theirs, files)
            named = {one.name: one.facts for one in tensors} if tensors else _tensors(to, value, dtype)
            item = Item(name, to, value, named, tensors, kept)
            for one, facts in item.tensors.items():
                if one in taken:
                    raise ValueError(
                        f"{name} and {taken[one]} would both be named {one} in the files; rename one of them"
                    )
                if not tensors and facts.dtype not in DTYPES.values():
                    raise ValueError(f"{name}: safetensors files that others can read can't hold {facts.dtype}")
                taken[one] = name
            items.append(item)
    return items


def _held(name: str, value: Tensor, theirs: list[Bound], files: Origin) -> tuple[tuple[Held, ...], KeptIn | None]:
    """The tensors that the binding's files hold for a quantized or cast-on-gather weight, and what is kept from the
    files that it was loaded from; () and None for a plain weight, or without a binding."""
    local, cls = local_tensor(value), recipe_of(value)
    if not theirs or cls is None:
        return (), None
    one = next(one for one in theirs if one.cls.LAYOUT.layout_id == cls.LAYOUT.layout_id)
    held = local if isinstance(local, QuantizedTensor) else None
    if held is not None and (lacking := [plane for plane in one.binding.planes if plane not in held.store.planes]):
        raise LayoutError(f"{name} holds no {lacking[0]}, which files of {one.label} have: {held.label()}")
    kept = files.of(name, tuple(value.shape), one)
    return _as_kept(name, value, one, kept), kept


def _as_kept(name: str, value: Tensor, one: Bound, kept: KeptIn | None) -> tuple[Held, ...]:
    shape = tuple(value.shape)
    if kept is None:
        return held(name, shape, one)
    return held(name, shape, kept.found.bound, kept.texts, kept.like, kept.following)


def settled(items: Sequence[Item], group: dist.ProcessGroup | None) -> tuple[list[Item], list[str]]:
    """Chooses dtypes that hold all values: the source's, or else the planes'. Returns the items, and the names of the
    weights that need the planes' dtypes. Collective."""
    wide = {item.name: planes for item in items if item.kept and (planes := item.kept.too_wide(_planes_of(item.value)))}
    everyone = everywhere(wide, group)
    found = list[Item]()
    for item in items:
        planes = frozenset().union(*(of_rank.get(item.name, ()) for of_rank in everyone))
        if item.kept and planes:
            kept = item.kept._replace(wide=planes)
            tensors = _as_kept(item.name, item.value, kept.found.bound, kept)
            item = item._replace(kept=kept, held=tensors, tensors={one.name: one.facts for one in tensors})
        found.append(item)
    return found, [item.name for item in found if item.kept and item.kept.wide]


def _planes_of(value: Tensor) -> Mapping[str, Tensor] | None:
    """This rank's plane entries of a weight; None if the weight is quantized on gather."""
    local = local_tensor(value)
    return {name: local.entries(name) for name in local.store.planes} if isinstance(local, QuantizedTensor) else None


def _tensors(name: str, value: Tensor, dtype: torch.dtype | None) -> dict[str, Facts]:
    """The tensors to write for a value: name -> shape and dtype."""
    local, shape = local_tensor(value), tuple(value.shape)
    parts = named_parts(name, shape[0] if len(shape) > 2 else None)
    if not isinstance(local, QuantizedTensor) or dtype is not None:
        to = dtype if dtype is not None and value.is_floating_point() else value.dtype
        if len(parts) > 1 and prod(shape[:-1]) % len(parts):
            raise LayoutError(f"{name}: {prod(shape[:-1])} rows are not {len(parts)} equal parts")
        each = (prod(shape[:-1]) // len(parts), shape[-1]) if len(parts) > 1 else shape
        return dict.fromkeys(parts, Facts(each, to))
    if parts != [name]:
        raise LayoutError(f"layoutc's own files hold stacks whole, not as {name}: leave out rename=, or pass files=")
    planes = local.LAYOUT.planes(prod(shape[:-1]), shape[-1])
    return {f"{name}.{plane}": facts for plane, facts in planes.items() if plane in local.store.planes}


def _with_source(
    model: nn.Module | Mapping[str, Any],
    items: Sequence[Item],
    theirs: Sequence[Bound],
    rename: Rename | None,
    source: Origin,
) -> tuple[dict[str, Any], list[Item], list[str]]:
    """The quantization_config to write, the tensors to copy from a source of the same format, and the names of tensors
    that are left out. Raises LayoutError."""
    bounds = {one.cls.LAYOUT.layout_id: one for one in theirs}
    modules, weights = dict(model.named_modules()) if isinstance(model, nn.Module) else {}, list[beside.Weight]()
    for item in items:
        cls, (module, _, last) = recipe_of(item.value) if item.held else None, item.source.rpartition(".")
        matrix = (last == "weight" and item.value.dim() == 2) or "{expert}" in item.name
        is_matrix = matrix and item.value.is_floating_point() and not isinstance(modules.get(module), nn.Embedding)
        bound = bounds[cls.LAYOUT.layout_id] if cls is not None else None
        weights.append(beside.Weight(item.name, tuple(item.value.shape), bound, is_matrix))
    before, written = source.quantization, {tensor for item in items for tensor in item.tensors}
    config = writing.quantization_of(theirs, before, *beside.modules_of(weights, theirs, source.tensors))
    state = model.state_dict() if isinstance(model, nn.Module) else model
    left_out = beside.left_out_by(model) if isinstance(model, nn.Module) else None
    kept, others = beside.rest_of(source.tensors, [file_name(name, rename) for name in state], weights, left_out)
    if not goes_on([one.binding for one in theirs], before):
        kept, others = [], kept + others
    found = list[Item]()
    for name in (name for name in kept if name not in written):
        stored = source.tensors[name]
        copy = writing.copy_of(name, stored)
        read = partial(source.slices.read, stored, ()) if copy.declared is None else partial(bytes_of, stored)
        found.append(
            Item(name, name, torch.empty(0, device="cpu"), {name: copy.facts}, copied=read, declared=copy.declared)
        )
    return config, found, others


# ---------------------------------------------------------------------------------------------------------------- write
def _gather_file(
    path: Path,
    items: Sequence[Item],
    dtype: torch.dtype | None,
    thread: Writing | None,
    problems: list[Problem],
    said: Noted,
) -> None:
    """Gathers a file's weights on all ranks. The rank with a thread writes each while the next is gathered.

    Write errors are noted, not raised, since the other ranks wait in the gathers.
    """
    described, file = dict[str, Any](), None
    if thread and not problems:
        with noted(problems):
            thread.wait()
            file = OpenFile(path, [one for item in items for one in item.planned], _room_for_descriptions(items, dtype))
    for item in items:
        whole = gathered_whole(item.value)
        if thread and file and not problems:
            with noted(problems):
                made = dict(_made(item, whole, dtype, said))
                if isinstance(whole, QuantizedTensor) and dtype is None and not item.held:
                    sums = {name: checksums.crc32(tensor) for name, tensor in made.items()}
                    described[item.name] = _description(item.name, whole, whole.shape, sums)
                thread.begin(file.put_all, made.items())
                del made
        del whole
    if thread and file and not problems:
        with noted(problems):
            thread.begin(file.finish, _metadata(described))


def _metadata(described: Mapping[str, Any]) -> dict[str, str]:
    return {"format": "pt"} | ({OURS: json.dumps(described)} if described else {})


def _room_for_descriptions(items: Sequence[Item], dtype: torch.dtype | None) -> int:
    """The maximum bytes of a file's weight descriptions: assumes checksums with the most digits."""
    locals_of = ((item, local_tensor(item.value)) for item in items if dtype is None and not item.held)
    described = {
        item.name: _description(item.name, local, item.value.shape, dict.fromkeys(item.tensors, 2**32 - 1))
        for item, local in locals_of
        if isinstance(local, QuantizedTensor)
    }
    return len(json.dumps(_metadata(described)))


def _made(item: Item, whole: Tensor, dtype: torch.dtype | None, said: Noted) -> Iterator[tuple[str, Tensor]]:
    """An item's tensors by name, on the CPU, in new memory. Raises LayoutError if a plane has an unexpected shape."""
    if item.held:
        planes = whole_planes(recipe_of(item.value), whole, joint_amax(item.value))
        planes = {name: plane.cpu() for name, plane in planes.items()}
        yield from held_weights.made(item.held, planes, item.kept, said)
        return
    if not isinstance(whole, QuantizedTensor):
        tensors = cut(item.copied() if item.copied is not None else whole, item.tensors)
    elif dtype is not None:
        tensors = cut(whole.dequantize(dtype), item.tensors)
    else:
        whole.check_not_freed()
        tensors = {f"{item.name}.{plane}": whole.entries(plane) for plane in whole.planes()}
    for name, facts in item.tensors.items():
        if tuple((tensor := tensors[name]).shape) != facts.shape:
            raise LayoutError(f"{name} has shape {tuple(tensor.shape)} when gathered, not {facts.shape}")
        plain = tensor.view(facts.dtype) if isinstance(whole, QuantizedTensor) and dtype is None else tensor
        made = plain.detach().to("cpu", facts.dtype, copy=True, memory_format=torch.contiguous_format)
        wide = partial(_wide, item, name, whole)
        yield name, made if dtype is None else check_finite(name, made, wide)


def _wide(item: Item, name: str, whole: Tensor) -> Tensor:
    """The values of one of an item's tensors, before they are rounded."""
    values = whole.dequantize(torch.float32) if isinstance(whole, QuantizedTensor) else whole.detach()
    return cut(values, item.tensors)[name]


def _description(name: str, weight: QuantizedTensor, shape: Sequence[int], sums: Mapping[str, int]) -> dict[str, Any]:
    """A quantized weight's description in a file's metadata, as JSON values. sums: tensor name -> CRC-32."""
    return {
        "format": stored_form.FORMAT,
        **stored_form.describe(weight.LAYOUT),
        "shape": list(shape),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "orientations": list(weight.store.declared),
        "planes": {plane: str(tensor.dtype).removeprefix("torch.") for plane, tensor in weight.store.planes.items()},
        "crc32": {plane: sums[f"{name}.{plane}"] for plane in weight.store.planes},
    }

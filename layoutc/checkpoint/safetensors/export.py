"""A model with quantized weights as Hugging Face safetensors: as they are, plane by plane, or as plain values."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from layoutc.checkpoint.common.folders import sync
from layoutc.checkpoint.common.verdicts import Problem, agree, noted, rank_of
from layoutc.checkpoint.common.whole_weights import gathered_whole
from layoutc.checkpoint.safetensors.files import DTYPES, INDEX, OURS, SINGLE, library
from layoutc.checkpoint.safetensors.load import Rename, file_name
from layoutc.runtime.cast.tensor import CastOnGather
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Facts
from layoutc.runtime.sharding import meshes
from layoutc.runtime.weight import checksums, gathered_in_graphs, pending_writes, stored_form
from layoutc.runtime.weight.tensor import QuantizedTensor


class Item(NamedTuple):
    """One weight: its name in the files, and the tensors that are written of it."""

    name: str
    value: Tensor
    tensors: dict[str, Facts]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in a file."""
        return sum(facts.nbytes for facts in self.tensors.values())


@torch.no_grad()
def export_safetensors(
    model_or_state_dict: nn.Module | Mapping[str, Any],
    folder: str | PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 2**30,
    rename: Rename | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> list[str]:
    """Writes a folder of safetensors files as Hugging Face lays them out; returns the names of the files.

    dtype=None: quantized weights as they are, each plane of the whole weight as a tensor `<weight>.<plane>`, compact
    and without padding, with layouts and checksums in each file's metadata; `load_safetensors` reads them back byte for
    byte. dtype=torch.bfloat16 (float16, float32): all that is floating point in that dtype, quantized weights
    dequantized, under the usual names. rename: a name of the state dict -> the name in the files. Of tied weights the
    first is written; what is no tensor is left out.

    Collective where torch.distributed is initialized: all ranks of `process_group` (default: all) call. Shards are
    gathered one weight at a time; rank 0 of the group writes, and holds one file's worth. Files come to be in a folder
    beside, which is renamed when complete.

    Every rank raises what any rank finds: FileExistsError where the folder has something in it, LayoutError and
    ValueError before anything is gathered or written, OSError where writing failed; then nothing is left behind.
    """
    problems: list[Problem] = []
    folder, files = Path(folder), list[list[Item]]()
    writes = rank_of(process_group) == 0
    with noted(problems):
        library()
        items = _items(_state(model_or_state_dict), dtype, rename, problems)
        files = _split(items, max_shard_bytes)
        if writes and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError(f"{folder} is there and not empty: export into a new folder")
    told = repr([[(item.name, item.tensors) for item in file] for file in files])
    facts = hashlib.sha256(told.encode()).hexdigest()
    agree(problems, process_group, facts, "export different names, shapes or dtypes")
    names = [SINGLE]
    if len(files) > 1:
        names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    partly = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.partly"
    try:
        for name, file in zip(names, files, strict=True):
            with noted(problems):
                if writes:
                    partly.mkdir(parents=True, exist_ok=True)
            _write_file(partly / name, file, dtype, writes, problems)
            agree(problems, process_group)
        with noted(problems):
            if writes:
                _finish(partly, folder, names, files)
        agree(problems, process_group)
    finally:
        if writes:
            shutil.rmtree(partly, ignore_errors=True)
    return names


# ----------------------------------------------------------------------------------------------------------------- plan
def _state(given: nn.Module | Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors by name, each once: of names that share memory the first."""
    state = given.state_dict(keep_vars=True) if isinstance(given, nn.Module) else given
    found = {}
    seen = set()
    for name, value in state.items():
        if isinstance(value, Tensor) and (key := _identity(value.detach())) not in seen:
            seen.add(key)
            found[name] = value.detach()
    return found


def _identity(value: Tensor) -> Any:
    """Alike for tensors that are the same values in the same memory: for empty shards as well, so on all ranks."""
    local = meshes.local_of(value)
    if isinstance(local, QuantizedTensor):
        return id(local._planes), tuple(value.shape)
    plain = local.plain if isinstance(local, CastOnGather) else local
    storage = id(plain) if plain.is_meta else plain.untyped_storage()._cdata
    return storage, plain.storage_offset(), tuple(value.shape), plain.stride()


def _items(
    state: Mapping[str, Tensor], dtype: torch.dtype | None, rename: Rename | None, problems: list[Problem]
) -> list[Item]:
    """What is written, checked on this rank. Raises ValueError."""
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be floating point, or None for quantized weights as they are, not {dtype}")
    items, taken = [], dict[str, str]()
    for name, value in state.items():
        with noted(problems):
            _check(name, value)
            item = Item(to := file_name(name, rename), value, _tensors(to, value, dtype))
            for one, facts in item.tensors.items():
                if one in taken:
                    raise ValueError(f"{name} and {taken[one]} would both be {one} in the files")
                if facts.dtype not in DTYPES.values():
                    raise ValueError(f"{name}: files that others can read hold no {facts.dtype}")
                taken[one] = name
            items.append(item)
    return items


def _check(name: str, value: Tensor) -> None:
    local = meshes.local_of(value)
    if local.is_meta:
        raise LayoutError(f"{name} is on the meta device: it has no values to export")
    if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
        raise LayoutError(f"{name} is sharded over ranks that this one is none of; pass their process_group")
    if not isinstance(local, QuantizedTensor):
        return
    pending_writes.check_readable(local)
    if local._transposed or (value is local and (local._halo.rows or local._peers == ())):
        raise LayoutError(f"{name}: {local._label()} is a view or a part of a weight; export the weight itself")
    if local.shape[-1:] != local._matrix[1:]:
        raise LayoutError(f"{name}: {local._label()} is a view of another shape than the weight's")


def _tensors(name: str, value: Tensor, dtype: torch.dtype | None) -> dict[str, Facts]:
    """Name -> shape and dtype of what is written of a value."""
    local, shape = meshes.local_of(value), tuple(value.shape)
    if not isinstance(local, QuantizedTensor) or dtype is not None:
        to = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return {name: Facts(shape, to)}
    planes = local.LAYOUT.planes(prod(shape[:-1]), shape[-1])
    return {
        f"{name}.{plane}": facts._replace(dtype=_in_files(facts.dtype))
        for plane, facts in planes.items()
        if plane in local._planes
    }


def _in_files(dtype: torch.dtype) -> torch.dtype:
    """uint8 for codes whose dtype loaders of safetensors do not know."""
    return dtype if dtype in DTYPES.values() or dtype.itemsize != 1 else torch.uint8


def _split(items: Sequence[Item], limit: int) -> list[list[Item]]:
    """Weights in order into files of at most `limit` bytes, or of one weight. Raises ValueError for no limit."""
    if limit <= 0:
        raise ValueError(f"max_shard_bytes must be positive, not {limit}")
    files: list[list[Item]] = [[]]
    held = 0
    for item in items:
        if files[-1] and held + item.nbytes > limit:
            files.append([])
            held = 0
        files[-1].append(item)
        held += item.nbytes
    return files


# ---------------------------------------------------------------------------------------------------------------- write
def _write_file(
    path: Path, items: Sequence[Item], dtype: torch.dtype | None, writes: bool, problems: list[Problem]
) -> None:
    """Gathers the weights of a file, on all ranks, and writes it on one.

    What fails there is noted after all gathers, for which the others wait.
    """
    tensors: dict[str, Tensor] = {}
    described: dict[str, Any] = {}
    for item in items:
        whole = gathered_whole(item.value)
        if writes and not problems:
            with noted(problems):
                made = dict(_made(item, whole, dtype))
                if isinstance(whole, QuantizedTensor) and dtype is None:
                    described[item.name] = _description(item.name, whole, made)
                tensors.update(made)
        del whole
    if writes and not problems:
        with noted(problems):
            metadata = {"format": "pt"} | ({OURS: json.dumps(described)} if described else {})
            path.touch()  # with the mode that new files have, which save_file does not ask for
            mode = path.stat().st_mode
            library().save_file(tensors, path, metadata=metadata)
            path.chmod(mode)
            sync(path)


def _made(item: Item, whole: Tensor, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an item, on the CPU, in memory of their own. Raises LayoutError for planes of other shapes."""
    if not isinstance(whole, QuantizedTensor):
        found = {item.name: whole}
    elif dtype is not None:
        found = {item.name: whole.dequantize(dtype)}
    else:
        gathered_in_graphs.check_held(whole)
        found = {f"{item.name}.{plane}": whole._entries(plane) for plane in whole.planes()}
    for name, facts in item.tensors.items():
        tensor = found[name]
        if tuple(tensor.shape) != facts.shape:
            raise LayoutError(f"{name} has shape {tuple(tensor.shape)} when gathered, not {facts.shape}")
        plain = tensor.view(facts.dtype) if isinstance(whole, QuantizedTensor) and dtype is None else tensor
        yield name, plain.detach().to("cpu", facts.dtype, copy=True, memory_format=torch.contiguous_format)


def _description(name: str, whole: QuantizedTensor, made: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the metadata of a file says of a quantized weight, in values that JSON knows."""
    return {
        "format": stored_form.FORMAT,
        **stored_form.describe(whole.LAYOUT),
        "shape": list(whole.shape),
        "dtype": str(whole.dtype).removeprefix("torch."),
        "orientations": list(whole._orientations),
        "planes": {plane: str(held.dtype).removeprefix("torch.") for plane, held in whole.planes().items()},
        "crc32": {plane: checksums.crc32(made[f"{name}.{plane}"]) for plane in whole.planes()},
    }


def _finish(partly: Path, folder: Path, names: Sequence[str], files: Sequence[Sequence[Item]]) -> None:
    """Writes the index, where there is more than one file, and gives the folder its name."""
    if len(files) > 1:
        where = {
            tensor: name for name, file in zip(names, files, strict=True) for item in file for tensor in item.tensors
        }
        total = sum(item.nbytes for file in files for item in file)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (partly / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        sync(partly / INDEX)
    sync(partly)
    os.replace(partly, folder)  # where a folder is, it is empty
    sync(folder.parent)

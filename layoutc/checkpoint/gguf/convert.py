"""Converts a GGUF file to a folder of plain safetensors, and back, with one tensor in memory at a time."""

from __future__ import annotations

import json
from functools import partial
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from layoutc.checkpoint.common.narrowing import check_finite
from layoutc.checkpoint.gguf.export import export_gguf
from layoutc.checkpoint.gguf.kinds import Kind, installed
from layoutc.checkpoint.gguf.planning import beside, config_of, entry, has, names_of, source_of
from layoutc.checkpoint.gguf.splits import read_model
from layoutc.checkpoint.gguf.values import Mapped
from layoutc.checkpoint.held import undecoded
from layoutc.checkpoint.held.stored import OF_OTHERS
from layoutc.checkpoint.held.undecoded import Described
from layoutc.checkpoint.safetensors import recognize, writing
from layoutc.checkpoint.safetensors.convert import Converted, dtype_of
from layoutc.checkpoint.safetensors.files import Slices, library, read_folder
from layoutc.checkpoint.safetensors.planning import Step
from layoutc.checkpoint.safetensors.values import values_of
from layoutc.checkpoint.safetensors.writing import Planned
from layoutc.runtime.bindings.gguf_types import PLAIN
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.facts import Facts


@torch.no_grad()
def convert_gguf(
    file: str | PathLike[str],
    folder: str | PathLike[str],
    *,
    dtype: torch.dtype | str,
    max_shard_bytes: int = 5 * 2**30,
) -> Converted:
    """Writes a GGUF file as plain safetensors, with transformers' names and row order, in one process, without a model.

    dtype: of dequantized tensors (torch.bfloat16 or its name); plain tensors are copied. max_shard_bytes: maximum file
    size. Tensors derived from the config, and multi-token-prediction layers, are left out; the result names them.
    config.json is made from the file's keys, for transformers' AutoConfig; if that is not possible, the result says
    why. Raises FileExistsError if the folder is not empty, and what `load_gguf` raises, before anything is written.

    Example:

        >>> done = checkpoint.convert_gguf("Llama-3.gguf", "plain-llama", dtype="bfloat16")
    """
    to = dtype_of(dtype)
    header, out = read_model(Path(file)), Path(folder)
    writing.check_new(out, "convert")
    names, kinds = names_of(header), installed()
    mapped, jobs, left = Mapped(header, {}), dict[str, tuple[str, Facts]](), list[str]()
    plain = {name: Described(held.type, held.shape) for name, held in header.tensors.items()}
    records = {name for name, held in header.tensors.items() if held.type not in PLAIN}
    undecoded.refuse(
        str(header.path), undecoded.undecoded(plain, records), "llama.cpp's converter can write it in another type"
    )
    may_lack = beside(header, names).union(names.architecture.ignored)
    for tensor in header.tensors:
        if tensor in may_lack:
            left.append(tensor)
            continue
        if (name := names.parameter(tensor)) is None:
            raise LayoutError(f"{tensor} in {header.path} has no name in transformers' models of its architecture")
        place = names.in_files(name)
        assert place is not None
        if not has(header, place):
            raise LayoutError(f"{header.path} has {tensor}, but not all of {', '.join(place.tensors)}: {name}")
        if place.tensors[0] in mapped.sources:
            continue
        mapped.sources[place.tensors[0]] = source = source_of(place, names, header)
        entry(name, torch.empty(0, device="cpu"), source, mapped, kinds, False)  # raises if the type can't be read
        facts = Facts(source.shape, OF_OTHERS[source.plain] if source.plain else to)
        jobs[name] = place.tensors[0], facts
    config, why = dict[str, object](), ""
    try:
        config = config_of(header) | {"dtype": str(to).removeprefix("torch.")}
    except LayoutError as error:
        why = str(error)
    split = writing.split_into_files(
        [Planned(name, facts) for name, (_, facts) in sorted(jobs.items())], max_shard_bytes
    )
    with writing.new_folder(out) as partly:
        for part, some in split.items():
            writing.write_streamed(partly / part, some, (_made(one, jobs[one.name][0], mapped, kinds) for one in some))
        if config:
            (partly / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        writing.finish_folder(partly, out, split)
    dequantized = tuple(name for name, (tensor, _) in jobs.items() if header.tensors[tensor].type not in PLAIN)
    return Converted(tuple(split), (), tuple(left), why, dequantized)


def convert_to_gguf(
    folder: str | PathLike[str], file: str | PathLike[str], *, source: str | PathLike[str]
) -> Converted:
    """Writes a folder of plain safetensors, with transformers' names, as one GGUF file, without a model.

    source: a GGUF file of the same architecture. The new file gets its key-values, order and types. Tensors with the
    same values as the source's keep the source's bytes; others are quantized to its types if recipes define them. Works
    and raises like `export_gguf` with `quantize=True`. Raises LayoutError for a folder of quantized weights.

    Example:

        >>> done = checkpoint.convert_gguf("Llama-3.gguf", "plain-again", dtype="bfloat16")
        >>> types = checkpoint.convert_to_gguf("plain-again", "again.gguf", source="Llama-3.gguf")
    """
    path = Path(folder)
    library()
    contents = read_folder(path)
    if contents.described or recognize.quantization_config(path):
        raise LayoutError(
            f"{path} holds quantized weights: make them plain first, with `layoutc convert {path} plain --dtype "
            "bfloat16`"
        )
    instead = f"Make them plain first: layoutc convert {path} plain --dtype bfloat16 --from RECIPE/BINDING"
    undecoded.refuse(str(path), undecoded.undecoded(contents.tensors), instead)
    with Slices() as slices:
        state = {name: slices.read(stored, ()) for name, stored in contents.tensors.items()}  # views of mapped files
        types = export_gguf(state, file, source=source, quantize=True)
        del state
    return Converted((Path(file).name,), tuple(name for name, kind in types.items() if kind not in PLAIN), ())


def _made(planned: Planned, tensor: str, mapped: Mapped, kinds: list[Kind]) -> tuple[str, Tensor]:
    """A tensor to write, with its name. tensor: the first of the file's tensors that make up the weight."""
    name, facts = planned.name, planned.facts

    def values(dtype: torch.dtype) -> Tensor:
        like = torch.empty((), dtype=dtype, device="cpu").expand(facts.shape)  # needs no memory
        source = entry(name, like, mapped.sources[tensor], mapped, kinds, False)
        return values_of(Step(name, like, source), mapped.read).to(dtype)

    return name, check_finite(name, values(facts.dtype), partial(values, torch.float32))

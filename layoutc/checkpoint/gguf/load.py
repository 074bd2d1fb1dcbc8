"""Loads a GGUF file into a model with quantized and sharded weights. Each rank reads only its part."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from layoutc.checkpoint.common.buffers import made_anew
from layoutc.checkpoint.common.verdicts import Problem, agree, noted, rank_of
from layoutc.checkpoint.gguf.planning import LoadedGguf, Plan, plan
from layoutc.checkpoint.gguf.splits import read_model
from layoutc.checkpoint.gguf.values import Mapped
from layoutc.checkpoint.safetensors.beside import warn_left
from layoutc.checkpoint.safetensors.load import check, rounds, say_rounded, write
from layoutc.checkpoint.safetensors.planning import Rename
from layoutc.runtime.errors import check_model


@torch.no_grad()
def load_gguf(
    model: nn.Module,
    file: str | PathLike[str],
    *,
    rename: Rename | None = None,
    strict: bool = True,
    convert: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> LoadedGguf:
    """Loads a GGUF file, version 2 or 3, into a whole or sharded model with transformers' names.

    Weights whose recipe defines the file's type keep the file's bytes. Plain parameters and cast-on-gather weights
    accept tensors of every type: quantized ones are dequantized, and the result names them. The package gguf
    dequantizes types that no recipe defines. convert: also dequantize for weights that the model has quantized in
    another layout. Rows of q and k that llama.cpp reorders return to transformers' order.

    If a model has several files, pass the first, NAME-00001-of-00003.gguf; the others must be in the same folder.

    Each rank reads the header and its slices, one parameter at a time. rename: maps a name in the model's state dict to
    transformers' name. strict: raise for names that the file or the model lacks. Not loaded: multi-token-prediction
    layers, encoders, activation scales, and what a transformers model declares as ignored; a warning on the first rank
    names them. Buffers outside the state dict are recomputed, or named in the result, as in `load_safetensors`.

    Collective if torch.distributed is initialized: all ranks of `process_group` (default: all) call it.

    Everything is checked before anything is written. If any rank finds a problem, every rank raises it:
    FileNotFoundError; DamagedError for a truncated or invalid GGUF file; LayoutError for architectures, names, shapes
    and types that do not fit; ImportError if the package gguf is needed and missing.

    Example:

        >>> model = Llama(config)
        >>> recipes = checkpoint.quantize_as_stored(model, "Llama-3.gguf")
        >>> done = checkpoint.load_gguf(model, "Llama-3.gguf")
    """
    check_model(model, "load_gguf")
    problems: list[Problem] = []
    rounded = list[str]()
    made: tuple[Plan, Mapped] | None = None
    digest = ""
    with noted(problems):
        header = read_model(Path(file))
        digest = header.digest
        made = plan(model, header, rename, strict, convert, problems)
        for step in made[0].steps:
            with noted(problems):
                decoded = step.name in made[0].loaded.dequantized
                check(step, convert or decoded)
                rounded += rounds(step, made[1].read, decoded)
    agree(problems, process_group, digest, f"read different files as {file}")
    assert made is not None
    (steps, loaded, unread), mapped = made
    write(steps, mapped.read)
    say_rounded(file, rounded, process_group)
    if rank_of(process_group) == 0:
        warn_left(Path(file), unread, "export_gguf(..., source=file)")
    return loaded._replace(missing=(*loaded.missing, *made_anew(model)))

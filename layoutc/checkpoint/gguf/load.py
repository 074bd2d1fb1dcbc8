"""Loads a GGUF file into a model of quantized and sharded weights: each rank reads only its part."""

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
from layoutc.checkpoint.safetensors.load import check, joint_amaxes, rounds, say_rounded, write
from layoutc.checkpoint.safetensors.planning import Rename


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

    Weights of a recipe whose records are the file's type take its bytes as they are. Plain parameters, and weights that
    are cast on gather, take tensors of every type: quantized ones are dequantized, and the result names them. The
    package gguf dequantizes types that no recipe states. convert: also dequantize for weights that the model has
    quantized in another layout. Rows of q and k that llama.cpp reorders return to transformers' order.

    Of a model in several files, `file` is the first, NAME-00001-of-00003.gguf; the others lie beside it.

    Each rank reads its own slices, one parameter at a time, beside the header. rename: maps a name of the model's state
    dict to transformers' name. strict: raise for names that the file lacks or that the model does not have. Not loaded:
    layers that predict more tokens, encoders, scales of activations, and what a transformers model says it ignores; a
    warning on the first rank names them. Buffers outside the state dict are made anew, or named, as by
    `load_safetensors`.

    Collective if torch.distributed is initialized: all ranks of `process_group` (default: all) call it.

    Everything is checked before anything is written. If any rank finds a problem, every rank raises it:
    FileNotFoundError; DamagedError for a file that is truncated or not valid GGUF; LayoutError for architectures,
    names, shapes and types that do not fit; ImportError if the package gguf is needed and missing.

    Example:

        >>> model = Llama(config)
        >>> recipes = checkpoint.quantize_as_stored(model, "Llama-3.gguf")
        >>> done = checkpoint.load_gguf(model, "Llama-3.gguf")
    """
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
                rounded += rounds(step, made[1], decoded)
    agree(problems, process_group, digest, f"read different files as {file}")
    assert made is not None
    (steps, loaded, unread), mapped = made
    amaxes = joint_amaxes(steps, mapped)
    for step in steps:
        write(step, mapped, amaxes.get(step.name))
    say_rounded(file, rounded, process_group)
    if rank_of(process_group) == 0:
        warn_left(Path(file), unread, "export_gguf(..., source=file)")
    return loaded._replace(missing=(*loaded.missing, *made_anew(model)))

"""Quantizes a model as the files that it will load hold it: the same weights, in the same recipes."""

from __future__ import annotations

import importlib
from os import PathLike
from pathlib import Path

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from layoutc.checkpoint.safetensors import recognize
from layoutc.checkpoint.safetensors.bound import find
from layoutc.checkpoint.safetensors.files import Contents, read_folder
from layoutc.checkpoint.safetensors.load import Rename, file_name
from layoutc.checkpoint.safetensors.recognize import Bound
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.train.convert import quantize_
from layoutc.runtime.weight.tensor import QuantizedTensor


def quantize_as_stored(
    model: nn.Module, folder: str | PathLike[str], *, files: str | None = None, rename: Rename | None = None
) -> dict[str, str]:
    """Quantizes just those parameters of a model that a folder of another program's safetensors files holds quantized,
    in the recipe whose binding they follow; returns parameter -> recipe. Call it before fully_shard; then
    `load_safetensors` fills them, byte for byte.

    The model may be on the meta device. Only headers and config.json are read. files: the binding, as `deepseek` or
    `fp8_block/deepseek`; by default the one that config.json tells of. rename: as for `load_safetensors`.

    Raises FileNotFoundError without files, DamagedError for damaged ones, and LayoutError, before anything is changed,
    if no binding of an installed recipe fits, or several do: with their names, of which `files` takes one.
    """
    path = Path(folder)
    contents, config = read_folder(path), recognize.quantization_config(path)
    every = recognize.installed()
    told = recognize.chosen(files, every) if files is not None else recognize.recognized(config, every)
    if not told:
        names = ", ".join(sorted({one.label for one in every}))
        what = f"a quantization_config that no installed recipe knows: {dict(config)}" if config else "none"
        raise LayoutError(f"{path}: config.json has {what}. Known are {names}")
    parameters = {
        file_name(name, rename): (name, value)
        for name, value in model.named_parameters()
        if value.dim() >= 2 and value.is_floating_point() and not isinstance(value, DTensor | QuantizedTensor)
    }
    fits, refused = dict[str, tuple[Bound, list[str]]](), list[str]()
    for one in told:
        try:
            if held := _held(parameters, one, contents):
                fits[one.label] = one, held
        except LayoutError as error:
            refused.append(str(error))
    if not fits:
        raise LayoutError("; ".join(refused) or f"{path} holds no parameter of the model quantized: pass `rename`?")
    if len(fits) > 1:
        raise LayoutError(f"the files fit several recipes: pass files= one of {', '.join(sorted(fits))}")
    ((one, names),) = fits.values()
    chosen = frozenset(names)
    package = importlib.import_module(one.cls.__module__.rpartition(".")[0])
    quantize_(model, package, param_filter=lambda name, parameter: name in chosen, keep_values=False)
    return {name: one.cls.LAYOUT.name for name in names}


def _held(parameters: dict[str, tuple[str, Tensor]], one: Bound, contents: Contents) -> list[str]:
    """The model's parameters that the files hold by a binding. Raises LayoutError for those that they hold
    otherwise."""
    return [
        name
        for in_files, (name, value) in parameters.items()
        if find(in_files, tuple(value.shape), one, contents.tensors) is not None
    ]

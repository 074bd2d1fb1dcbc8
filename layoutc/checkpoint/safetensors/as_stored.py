"""Quantizes a model as the files that it will load hold it: the same weights, in the same recipes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from os import PathLike
from pathlib import Path

from torch import nn
from torch.distributed.tensor import DTensor

from layoutc.checkpoint.held.regrouped import Flat, Regrouped
from layoutc.checkpoint.safetensors import choosing, recognize
from layoutc.checkpoint.safetensors.files import read_folder
from layoutc.checkpoint.safetensors.planning import Rename, file_name
from layoutc.runtime.bindings.fused import groups_of
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.train.convert import quantize_
from layoutc.runtime.weight.tensor import QuantizedTensor


def quantize_as_stored(
    model: nn.Module,
    folder: str | PathLike[str],
    *,
    files: str | None = None,
    rename: Rename | None = None,
    share_amax: bool = False,
) -> dict[str, str]:
    """Quantizes just those parameters of a model that a folder of another program's safetensors files holds quantized,
    each in the recipe whose binding it follows, of which a folder may have several; returns parameter -> recipe. Call
    it before fully_shard; then `load_safetensors` fills them, byte for byte.

    The model may be on the meta device. Only headers and config.json are read. files: the binding, as `deepseek` or
    `fp8_block/deepseek`; by default the one that config.json tells of. rename: as for `load_safetensors`.
    share_amax: weights that engines join are quantized under one amax at each step, as by `layoutc.quantize_`.

    Raises FileNotFoundError without files, DamagedError for damaged ones, and LayoutError, before anything is changed,
    if no binding of an installed recipe fits, or several do: with their names, of which `files` takes one.
    """
    path = Path(folder)
    contents, told = read_folder(path), choosing.told(path, files, recognize.installed())
    if not told:
        raise LayoutError(f"{path}: there is no quantization_config in config.json: pass files=, the binding's name")
    choosing.check_holds(path, files, told, contents.tensors)
    parameters = {
        file_name(name, rename): (name, tuple(value.shape))
        for name, value in model.named_parameters()
        if value.dim() >= 2 and value.is_floating_point() and not isinstance(value, DTensor | QuantizedTensor)
    }
    groups = choosing.fitting({in_files: shape for in_files, (_, shape) in parameters.items()}, told, contents.tensors)
    if not groups:
        raise LayoutError(f"{path} holds no parameter of the model quantized, by its name: pass `rename`?")
    for group in groups:
        _check_is_held(group[0])
        if len(group) > 1:
            raise choosing.several([fit.bound for fit in group], "the files", "files=")
    return quantize_each(
        model,
        {parameters[one][0]: bound.cls for bound, in_files in (group[0] for group in groups) for one in in_files},
        share_amax,
    )


def _check_is_held(fit: choosing.Fit) -> None:
    """Raises LayoutError, with what would work, for weights that no recipe holds as they are."""
    cls = fit.bound.cls
    if not issubclass(cls, Regrouped):
        return
    recipe = cls.LAYOUT.name
    instead = (
        f"To train them as they are, make a recipe of it: `layoutc new mine --from {recipe}`, their blocks and dtype "
        "in it, `layoutc build specs/mine.yaml`, layoutc.quantize_(model, 'mine')"
    )
    if issubclass(cls, Flat):
        instead = (
            f"The others keep their codes if layoutc.quantize_(model, {recipe!r}, filter_fn=...) quantizes them first"
        )
    raise LayoutError(
        f"{len(fit.names)} weights, such as {fit.names[0]}, are in files of {fit.bound.label}, which no recipe "
        "holds as they are. load_safetensors(model, folder, convert=True) reads them as values, into a plain model "
        f"or any recipe; `layoutc convert` writes them in another. {instead}"
    )


def quantize_each(
    model: nn.Module, chosen: Mapping[str, type[QuantizedTensor]], share_amax: bool = False
) -> dict[str, str]:
    """Quantizes parameters, each as it is chosen, without values to keep; returns parameter -> recipe.
    share_amax: those that engines join, under one amax.

    Raises LayoutError, before anything is changed, for a shape that a recipe does not take, and for `share_amax` of
    weights that nothing joins.
    """
    parameters, by_class = dict(model.named_parameters()), dict[type[QuantizedTensor], set[str]]()
    for name, cls in chosen.items():
        try:
            cls.LAYOUT.check_shape(tuple(parameters[name].shape), name)
        except ValueError as error:
            raise LayoutError(str(error)) from error
        by_class.setdefault(cls, set()).add(name)
    stated = {cls: [group for one in cls.LAYOUT.files.values() for group in one.fused] for cls in by_class}
    joined = {cls for cls, names in by_class.items() if share_amax and groups_of(names, stated[cls])}
    if share_amax and not joined:
        raise LayoutError(
            "share_amax=True: the files hold no weights beside each other that engines join, under one scale each"
        )
    for cls, names in by_class.items():
        package = importlib.import_module(cls.__module__.rpartition(".")[0])
        own = partial(quantize_, keep_values=False, share_amax=cls in joined)
        own(model, package, param_filter=lambda name, _, names=names: name in names)
    return {name: cls.LAYOUT.name for name, cls in chosen.items()}

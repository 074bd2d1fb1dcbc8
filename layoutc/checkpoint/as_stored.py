"""Quantizes a model the way a safetensors or GGUF checkpoint stores it."""

from __future__ import annotations

import importlib
from functools import partial
from os import PathLike
from pathlib import Path

from torch import nn

from layoutc.checkpoint.gguf import planning as of_gguf
from layoutc.checkpoint.safetensors import planning
from layoutc.checkpoint.safetensors.planning import Rename
from layoutc.runtime.bindings.fused import groups_of
from layoutc.runtime.errors import LayoutError, check_model
from layoutc.runtime.train.convert import quantize_
from layoutc.runtime.weight.tensor import QuantizedTensor


def quantize_as_stored(
    model: nn.Module,
    path: str | PathLike[str],
    *,
    files: str | None = None,
    rename: Rename | None = None,
    share_amax: bool = False,
) -> dict[str, str]:
    """Quantizes the parameters that a checkpoint in another format holds quantized, and no others.

    Returns parameter -> recipe: the recipe whose binding matches the stored tensors; one checkpoint may use several.
    Call it before fully_shard. Then `load_safetensors` or `load_gguf` fills the parameters, byte for byte.

    path: a folder of safetensors files, or a GGUF file, whose embedding tables stay plain. The model may be on the
    meta device. Only headers and config.json are read. files: the binding, e.g. `deepseek` or `fp8_block/deepseek`;
    default: inferred from config.json or from the GGUF tensor types. rename: same as for the load. share_amax: weights
    that engines fuse share an amax at each step, as in `layoutc.quantize_`.

    Raises, before anything is changed: FileNotFoundError if there are no files; DamagedError if they are damaged;
    LayoutError if no binding of an installed recipe fits, if several do (the message lists the values that `files`
    accepts), if a recipe does not support a shape, or if `share_amax` is set and engines fuse none of the weights.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> layoutc.quantize_(model, "fp8_block")
        ['0.weight']
        >>> checkpoint.export_safetensors(model, "stored", files="deepseek")
        ['model.safetensors']
        >>> checkpoint.quantize_as_stored(nn.Sequential(nn.Linear(128, 128, bias=False)), "stored")
        {'0.weight': 'fp8_block'}
    """
    check_model(model, "quantize_as_stored")
    path = Path(path)
    chosen = (of_gguf if path.is_file() else planning).classes_in(path, model, files, rename)
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
            f"share_amax=True joins nothing: {path} holds no neighbouring weights that engines join under one scale. "
            "Leave it out"
        )
    for cls, names in by_class.items():
        package = importlib.import_module(cls.__module__.rpartition(".")[0])
        own = partial(quantize_, keep_values=False, share_amax=cls in joined)
        own(model, package, param_filter=lambda name, _, names=names: name in names)
    return {name: cls.LAYOUT.name for name, cls in chosen.items()}

"""Quantizes a model as other programs' files hold it, whatever their kind."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from torch import nn

from layoutc.checkpoint.gguf.as_stored import quantize_as_gguf
from layoutc.checkpoint.safetensors import as_stored
from layoutc.checkpoint.safetensors.planning import Rename
from layoutc.runtime.errors import LayoutError


def quantize_as_stored(
    model: nn.Module,
    path: str | PathLike[str],
    *,
    files: str | None = None,
    rename: Rename | None = None,
    share_amax: bool = False,
    fused: bool = False,
) -> dict[str, str]:
    """Quantizes just those parameters of a model that another program's files hold quantized, each in the recipe whose
    binding it follows, of which files may have several; returns parameter -> recipe. Call it before fully_shard; then
    `load_safetensors` or `load_gguf` fills them, byte for byte.

    path: a folder of safetensors files, or a GGUF file, of which tables of embeddings stay plain. The model may be on
    the meta device. Only headers and config.json are read. files: the binding, as `deepseek` or `fp8_block/deepseek`;
    by default the one that the folder's config.json tells of, or the file's types. rename: as for the load.
    share_amax: weights that engines join have one amax at each step, as by `layoutc.quantize_`, which has `fused` too.

    Raises FileNotFoundError without files, DamagedError for damaged ones, and LayoutError, before anything is changed,
    if no binding of an installed recipe fits, or several do: with their names, of which `files` takes one.

    Example:

        >>> model = nn.Sequential(nn.Linear(128, 128, bias=False))
        >>> layoutc.quantize_(model, "fp8_block")
        ['0.weight']
        >>> checkpoint.export_safetensors(model, "stored", files="deepseek")
        ['model.safetensors']
        >>> checkpoint.quantize_as_stored(nn.Sequential(nn.Linear(128, 128, bias=False)), "stored")
        {'0.weight': 'fp8_block'}
    """
    if not Path(path).is_file():
        more = {"share_amax": share_amax, "fused": fused}
        return as_stored.quantize_as_stored(model, path, files=files, rename=rename, **more)
    if share_amax or fused:
        raise LayoutError(
            f"{path}: no type of GGUF has a scale for a whole weight, which share_amax=True would make one"
        )
    return quantize_as_gguf(model, path, files=files, rename=rename)

"""Tensors in files that are no parameter of a model: scales of activations, and parts that its class leaves out."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from layoutc.checkpoint.held.stored import OF_OTHERS
from layoutc.checkpoint.safetensors.files import Slices, read_folder
from layoutc.checkpoint.safetensors.recognize import Bound
from layoutc.runtime.bindings.names import parts_of, tensor_name
from layoutc.runtime.errors import LayoutError, printable

OF_ACTIVATIONS = re.compile(
    r"(^|\.)(input|output|activation|prob_output|q|k|v|kv|qkv)_(scale|scale_inv|global_scale|zero_point)$"
)
# What transformers' loader leaves out of old files where a model makes it itself: the buffer, and the name there.
MADE_BY_MODELS = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
MOST = 1 << 20  # bytes of such a tensor: scales of activations have a value for each channel at most


def names_beside(bound: Bound, name: str, matrices: int | None) -> list[str]:
    """The names that such tensors of a weight have. matrices: of a weight with leading dims; None without any."""
    parameters = parts_of(bound.binding, name, matrices)
    return [tensor_name(pattern, parameter) for pattern in bound.binding.ignored for parameter in parameters]


def left_out_by(model: nn.Module) -> re.Pattern[str]:
    """The names of tensors in files that a model leaves out: those of activations, and what its classes, as in
    transformers, say that they ignore: layers that predict more tokens, towers of other modalities, old buffers."""
    patterns = [OF_ACTIVATIONS.pattern]
    for module in model.modules():
        patterns += getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    buffers = [name for name, _ in model.named_buffers()]
    patterns += [pattern for end, pattern in MADE_BY_MODELS.items() if any(name.endswith(end) for name in buffers)]
    return re.compile("|".join(f"(?:{pattern})" for pattern in dict.fromkeys(patterns)))


def copied(source: Path, weights: Iterable[tuple[str, int | None, Bound]]) -> dict[str, Tensor]:
    """Those of some weights that a folder holds, in memory of their own.

    weights: names in the files, matrices and binding of each. Raises what read_folder raises, and LayoutError for a
    tensor that is too large to be one of these.
    """
    contents, found = read_folder(source), dict[str, Tensor]()
    with Slices() as slices:
        for name, matrices, bound in weights:
            for one in names_beside(bound, name, matrices):
                if (stored := contents.tensors.get(one)) is None:
                    continue
                if stored.end - stored.begin > MOST or stored.dtype not in OF_OTHERS:
                    raise LayoutError(
                        f"{one} of {list(stored.shape)} {stored.dtype} in {source} is no scale of activations: rename "
                        "it, or leave out source="
                    )
                found[one] = slices.read(stored, ()).clone(memory_format=torch.contiguous_format)
    return found


def warn_left(folder: Path, names: Sequence[str]) -> None:
    """Says once that a load left such tensors alone, and what to do about it."""
    if names:
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        warnings.warn(
            f"{folder}: {printable(', '.join(names[:2]))}{more} are for other programs alone, and not loaded. "
            "An export has them too if it is told the folder: export_safetensors(..., source=folder)",
            stacklevel=4,
        )

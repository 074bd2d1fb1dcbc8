"""Tensors in files that are not model parameters: activation scales, and parts that the model's class ignores."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from torch import nn

from layoutc.checkpoint.bindings.names import named_parts, parts_of, tensor_name
from layoutc.checkpoint.bindings.source_configs import Modules
from layoutc.checkpoint.common.narrowing import warn_of
from layoutc.checkpoint.held.stated import ORDER
from layoutc.checkpoint.held.stored import Stored
from layoutc.checkpoint.safetensors import recognize
from layoutc.checkpoint.safetensors.recognize import Bound

OF_ACTIVATIONS = re.compile(
    r"(^|\.)(input|output|activation|prob_output|q|k|v|kv|qkv)_(scale|scale_inv|global_scale|zero_point)$"
)
OF_INPUTS = re.compile(r"\.(input|activation)_\w+$")  # scales of a weight's input, not of caches
# Buffer -> its name in old files, which transformers' loader ignores because the model makes the buffer itself.
MADE_BY_MODELS = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}


class Weight(NamedTuple):
    """A tensor that an export writes. name, shape: in the files. bound: the binding that it is written by, if
    quantized. is_matrix: the weight could be quantized, and its module is not an embedding table."""

    name: str
    shape: tuple[int, ...]
    bound: Bound | None
    is_matrix: bool

    @property
    def matrices(self) -> int | None:
        """The number of matrices of a weight with leading dims; None without any."""
        return prod(self.shape[:-2]) if len(self.shape) > 2 else None

    @property
    def parts(self) -> list[str]:
        """The parameters in the files that hold this one."""
        if self.bound is None:
            return named_parts(self.name, self.matrices)
        return parts_of(self.bound.binding, self.name, self.matrices)


def left_out_by(model: nn.Module) -> re.Pattern[str]:
    """Matches the names of tensors in files that a model ignores: activation scales, and what its classes declare, as
    in transformers: multi-token-prediction layers, towers of other modalities, old buffers."""
    patterns = [OF_ACTIVATIONS.pattern]
    for module in model.modules():
        patterns += getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    buffers = [name for name, _ in model.named_buffers()]
    patterns += [pattern for end, pattern in MADE_BY_MODELS.items() if any(name.endswith(end) for name in buffers)]
    return re.compile("|".join(f"(?:{pattern})" for pattern in dict.fromkeys(patterns)))


def modules_of(
    weights: Sequence[Weight], theirs: Sequence[Bound], source: Mapping[str, Stored]
) -> tuple[Modules, Modules]:
    """The modules of plain and of quantized weights, as written and as in the source."""
    plain, quantized, was_plain, was_quantized = list[str](), list[str](), list[str](), list[str]()
    of, was_of = [list[str]() for _ in theirs], [list[str]() for _ in theirs]
    for one in weights:
        if one.bound is None and not one.is_matrix:
            continue
        parts = one.parts
        modules = [_module(part) for part in parts]
        (plain if one.bound is None else quantized).extend(modules)
        for bound, own, was_own in zip(theirs, of, was_of, strict=True):
            own.extend(modules if bound is one.bound else ())
            was_own.extend(modules if recognize.is_held(bound, one.name, one.shape, source) else ())
        if any(recognize.is_for(bound, one.name, one.shape, source) for bound in theirs):
            was_quantized.extend(modules)
        elif any(part in source for part in (one.name, *parts)):
            was_plain.extend(modules)
    return Modules(plain, quantized, of), Modules(was_plain, was_quantized, was_of)


def rest_of(
    source: Mapping[str, Stored], names: Iterable[str], weights: Sequence[Weight], left_out: re.Pattern[str] | None
) -> tuple[list[str], list[str]]:
    """The source's tensors that the model has no parameter for, in two lists: those that still belong to the model
    (activation scales, and what `left_out` matches); and all others (modules that the model lacks, and activation
    scales of weights that are quantized only in the source).

    names: the model's tensors in files, including tied ones."""
    own = {*names, *(part for one in weights for part in one.parts)}
    modules = {_module(name) for name in own}
    plain = {name for name, one in source.items() if one.dtype in ("F32", "BF16", "F16")}
    made_plain = {_module(part) for one in weights if one.bound is None for part in one.parts if part not in plain}
    above = {prefix for module in modules for prefix in _prefixes(module)}
    parts = [(one.bound.binding, part) for one in weights if one.bound is not None for part in one.parts]
    stated = {tensor_name(pattern, part) for of, part in parts for pattern in (*of.ignored, ORDER)}
    kept, others = list[str](), list[str]()
    for name in source:
        module = _module(name)
        if name in stated or (OF_ACTIVATIONS.search(name) and module in above):
            if name not in own:
                (others if module in made_plain and OF_INPUTS.search(name) else kept).append(name)
        elif module not in modules and own.isdisjoint(_prefixes(name)):
            (kept if left_out is not None and left_out.search(name) else others).append(name)
    return kept, others


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def warn_left(path: Path, names: Sequence[str], export: str = "export_safetensors(..., source=folder)") -> None:
    """Warns once that a load skipped these tensors, and says what to do about it."""
    what = " are for other programs alone, and not loaded. An export has them too if it is told of these files: "
    warn_of(f"{path}: ", names, what + export)

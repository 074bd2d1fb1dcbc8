"""transformers: the names in a release's files, as `rename=`.

rename = names_in_files(model, "Mixtral-8x7B-FP8")
layoutc.checkpoint.quantize_as_stored(model, "Mixtral-8x7B-FP8", rename=rename)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from os import PathLike
from typing import Any

from layoutc.checkpoint.inspection import LayoutError, inspect
from layoutc.integrations.packages import needs

with needs("transformers"):
    from transformers import PreTrainedModel


def names_in_files(model: PreTrainedModel, folder: str | PathLike[str] | None = None) -> Callable[[str], str]:
    """A `rename` for `quantize_as_stored`, `load_safetensors` and `export_safetensors`: maps names in the model's state
    dict to those in the folder's files, for releases whose names are not transformers', such as Mixtral, MiniMax-M2 and
    DeepSeek-V4. folder: None for the names that `save_pretrained` writes.

    Stacks of experts get the names of their parts, unless the folder has them stacked. Reads only headers. Raises
    LayoutError without files and DamagedError for damaged ones. The returned function raises LayoutError for a name
    that transformers would read as another weight's.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, rename_source_key

    # As in save_pretrained, except for the base model's prefix: no rule covers releases that leave it out.
    mapping = get_model_conversion_mapping(model, add_legacy=False)
    forward: Any = [one for one in mapping if isinstance(one, WeightRenaming) and not isinstance(one, PrefixChange)]
    back: Any = [one.reverse_transform() for one in reversed(forward)]
    stacking: Any = [one for one in mapping if isinstance(one, WeightConverter) and _stacks(one)]
    apart: Any = [one.reverse_transform() for one in stacking]
    names = None if folder is None else [entry.name for entry in inspect(folder).entries]
    prefix, kinds = f"{model.base_model_prefix}.", {re.sub(r"\d+", "0", name) for name in names or ()}
    has_prefix = (rename_source_key(name, forward, [])[0].startswith(prefix) for name in kinds)
    is_bare = names is not None and not any(has_prefix)

    def rename(name: str) -> str:
        inner = name.removeprefix(prefix) if is_bare else name
        parts = next((found for one in apart if (found := _parts(inner, one))), [])
        there = [rename_source_key(key, back, [])[0] for key in parts]
        if names is not None and there:
            first = there[0].replace("{expert}", "0").removesuffix("weight")
            there = there if any(one.startswith(first) for one in names) else []
        there = there or [rename_source_key(inner, back, [])[0]]
        for key in there:
            if (again := rename_source_key(key, forward, stacking)[0]) != inner:
                raise LayoutError(
                    f"{name} would be {key} in the files, which transformers reads as {again}: pass `rename`"
                )
        return " + ".join(there)

    return rename


def _parts(name: str, apart: Any) -> list[str]:
    """The patterns of the parts that a converter of transformers splits a stack into; [] for other names."""
    first, matched = apart.rename_source_key(name)
    parts = [first.replace(apart.target_patterns[0], one, 1) for one in apart.target_patterns] if matched else []
    return [part.replace("*", "{expert}") for part in parts]


def _stacks(converter: Any) -> bool:
    """True if a converter of transformers stacks experts, with the rows of its tensors one below the other."""
    operations = [(type(one).__name__, getattr(one, "dim", None)) for one in converter.operations]
    merges = operations[:1] == [("MergeModulelist", 0)] and len(converter.target_patterns) == 1
    return merges and operations[1:] in ([], [("Concatenate", 1)])

"""Maps names of parameters to names of tensors in other formats, and says which bindings a config states."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from layoutc.checkpoint.bindings.configs import OF_FORMAT, completed, schemes_of, spelled
from layoutc.runtime.bindings.facts import Binding


def tensor_name(pattern: str, parameter: str) -> str:
    """The tensor name by a pattern such as `{name}_scale_inv` or `{module}.weight_packed`, for a parameter."""
    return pattern.replace("{name}", parameter).replace("{module}", parameter.rpartition(".")[0])


def parameter_name(pattern: str, tensor: str) -> str | None:
    """The parameter whose tensor has this name by the pattern; None if none has. With `{module}`: its `weight`."""
    before, after = re.split(r"{name}|{module}", pattern)
    if not (tensor.startswith(before) and tensor.endswith(after) and len(tensor) > len(before) + len(after)):
        return None
    middle = tensor[len(before) : len(tensor) - len(after)]
    return middle if "{name}" in pattern else f"{middle}.weight"


def named_parts(parameter: str, matrices: int | None) -> list[str]:
    """The names that `rename` gives a parameter: itself, or for a stack of experts patterns of its parts, joined by
    " + ", such as `mlp.experts.{expert}.w1.weight + mlp.experts.{expert}.w3.weight`. Returned in the order of rows."""
    if "{expert}" not in parameter:
        return [parameter]
    parts = parameter.split(" + ")
    return [part.replace("{expert}", str(number)) for number in range(matrices or 1) for part in parts]


def parts_of(binding: Binding, parameter: str, matrices: int | None) -> list[str]:
    """The parameters in the files that hold this one, in the order of its rows: itself, or its parts, as `rename` or
    the binding has them.

    matrices: the number of matrices of a weight with leading dims; None without leading dims.
    """
    if len(named := named_parts(parameter, matrices)) > 1:
        return named
    for whole, parts in binding.parts:
        before, after = whole.split("{module}")
        if not (parameter.startswith(before) and parameter.endswith(after)):
            continue
        module = parameter[len(before) : len(parameter) - len(after)]
        if any("{expert}" in part for part in parts):
            if matrices is None:
                continue
            numbers: Sequence[int | str] = range(matrices)
        elif matrices is None:
            numbers = [""]
        else:
            continue
        return [
            part.replace("{module}", module).replace("{expert}", str(number)) for number in numbers for part in parts
        ]
    return [parameter]


def recognizes(binding: Binding, config: Mapping[str, Any]) -> bool:
    """True if a folder's `quantization_config`, or a scheme of it, has the values that identify this binding."""
    return not differences(binding, config)


def differences(binding: Binding, config: Mapping[str, Any]) -> list[str]:
    """The paths that identify this binding's files and at which a config has none of the binding's values. With several
    schemes, those of the closest one."""
    own, paths = spelled(binding.config), [(path, path.split(".")) for path in binding.recognized]
    each = [completed(one) for one in schemes_of(spelled(config))]
    found = [
        [name for name, path in paths if not _agrees(values_at(own, path), values_at(theirs, path), name)]
        for theirs in each
    ]
    return min(found, key=len)


def _agrees(own: Sequence[Any], theirs: Sequence[Any], name: str) -> bool:
    """True if a config has one of the binding's values, or does not state the version of its format."""
    return any(_of_weights(one) in own for one in theirs) or (name in OF_FORMAT and not theirs)


def _of_weights(value: Any) -> Any:
    """A config's value without the prefix for unquantized activations, as in ModelOpt's W4A16_NVFP4."""
    return re.sub(r"^w\d+a16_", "", value) if isinstance(value, str) else value


def contradicts(binding: Binding, config: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first identifying path at which a config has only other values than the binding, with a value of the config
    and one of the binding. None if the config, or one of its schemes, has the same values or none."""
    found = [_contradicts(binding, one) for one in schemes_of(spelled(config))]
    return None if None in found else found[0]


def _contradicts(binding: Binding, theirs: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    own = spelled(binding.config)
    for path in binding.recognized:
        there = [value for value in values_at(theirs, path.split(".")) if value is not None]
        here = values_at(own, path.split("."))
        if there and not any(_of_weights(value) in here for value in there):
            return path, there[0], here[0]
    return None


def values_at(config: Any, path: Sequence[str]) -> list[Any]:
    """The values at a path; `*` matches any key."""
    if not path:
        return [config]
    if not isinstance(config, Mapping):
        return []
    return [found for key, value in config.items() if path[0] in ("*", key) for found in values_at(value, path[1:])]

"""Names of parameters and of the tensors that hold them in other programs' files; and weights that engines join into
one, by the names of their modules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from layoutc.runtime.bindings.configs import OF_FORMAT, completed, schemes_of, spelled
from layoutc.runtime.bindings.facts import Binding

Fused = Sequence[Sequence[str]]


def tensor_name(pattern: str, parameter: str) -> str:
    """`{name}_scale_inv` or `{module}.weight_packed`, of a parameter's name."""
    return pattern.replace("{name}", parameter).replace("{module}", parameter.rpartition(".")[0])


def parameter_name(pattern: str, tensor: str) -> str | None:
    """The parameter whose tensor by this pattern has this name; None if none can have it. `{module}` is the module of
    a parameter that is called weight."""
    before, after = re.split(r"{name}|{module}", pattern)
    if not (tensor.startswith(before) and tensor.endswith(after) and len(tensor) > len(before) + len(after)):
        return None
    middle = tensor[len(before) : len(tensor) - len(after)]
    return middle if "{name}" in pattern else f"{middle}.weight"


def parts_of(binding: Binding, parameter: str, matrices: int | None) -> list[str]:
    """The parameters in the files that hold this one, in the order of its rows: itself, or its parts.

    matrices: of a weight with leading dims; None without any.
    """
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
    """True if a folder's `quantization_config`, or one scheme of several there, has the values that tell this binding's
    files from others."""
    return not differences(binding, config)


def differences(binding: Binding, config: Mapping[str, Any]) -> list[str]:
    """The paths that tell this binding's files from others, and at which a config has none of its values: of several
    schemes, the one that is nearest."""
    own, paths = spelled(binding.config), [(path, path.split(".")) for path in binding.recognized]
    each = [completed(one) for one in schemes_of(spelled(config))]
    found = [
        [name for name, path in paths if not _agrees(values_at(own, path), values_at(theirs, path), name)]
        for theirs in each
    ]
    return min(found, key=len)


def _agrees(own: Sequence[Any], theirs: Sequence[Any], name: str) -> bool:
    """True if a config has a binding's value, or leaves out which version of a format it is of."""
    return any(_of_weights(one) in own for one in theirs) or (name in OF_FORMAT and not theirs)


def _of_weights(value: Any) -> Any:
    """A config's value without what it says of activations that stay as they are, as in ModelOpt's W4A16_NVFP4."""
    return re.sub(r"^w\d+a16_", "", value) if isinstance(value, str) else value


def contradicts(binding: Binding, config: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first path that tells this binding's files from others, and at which a config has other values alone: the
    path, and a value of each; None if the config, or one scheme of several there, says the same, or nothing."""
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
    """What a path leads to; `*` stands for any key."""
    if not path:
        return [config]
    if not isinstance(config, Mapping):
        return []
    return [found for key, value in config.items() if path[0] in ("*", key) for found in values_at(value, path[1:])]


def joined(name: str, fused: Fused) -> str | None:
    """A name of a parameter or tensor, with the group that its module is joined with in place of the module's own name:
    `a.q_proj.weight` is `a.[q_proj, k_proj, v_proj].weight`. None for a module that is in no group."""
    parts = name.split(".")
    for at in reversed(range(len(parts))):
        for group in fused:
            if parts[at] in group:
                return ".".join([*parts[:at], f"[{', '.join(group)}]", *parts[at + 1 :]])
    return None


def groups_of(names: Iterable[str], fused: Fused) -> Mapping[str, list[str]]:
    """The names that are joined with others of these, by what `joined` calls them."""
    found = dict[str, list[str]]()
    for name in names:
        if (group := joined(name, fused)) is not None:
            found.setdefault(group, []).append(name)
    return {group: members for group, members in found.items() if len(members) > 1}

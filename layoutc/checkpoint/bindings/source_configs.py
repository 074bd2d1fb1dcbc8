"""The `quantization_config` of files to write: the source's with the changes, or one made from bindings."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from layoutc.checkpoint.bindings.configs import list_in, modules_in, schemes_of
from layoutc.checkpoint.bindings.names import recognizes, values_at
from layoutc.runtime.bindings.facts import Binding


class Modules(NamedTuple):
    """Names in files of the modules that have a weight that may be quantized. of: the quantized modules of each
    binding; several bindings may use the same names."""

    plain: Collection[str]
    quantized: Collection[str]
    of: Sequence[Collection[str]] = ()


def goes_on(bindings: Collection[Binding], source: Mapping[str, Any]) -> bool:
    """True if a source's config describes files by these bindings, so the rest of the config still holds."""
    return bool(source and bindings) and all(recognizes(one, source) for one in bindings)


def config_of(
    bindings: Sequence[Binding], source: Mapping[str, Any], now: Modules, before: Modules
) -> dict[str, Any] | None:
    """The config of files by these bindings. None if they contradict each other; {} without any.

    source: the config of the files that weights were loaded from, {} without any. If it describes files by these
    bindings, all of it is kept, such as how activations and caches are quantized; only its list of modules that are not
    quantized is updated from `before` to `now`. Otherwise the result is what the bindings state, with a list of the
    modules that are plain now. Several schemes become one entry of `config_groups` per binding, whose targets are its
    modules; or one `quant_algo` per layer; or, in MLX's form, the first binding's config with the modules of the
    others.
    """
    had = {*before.quantized} if len(schemes_of(source)) > 1 else set[str]()
    moved = any(not had.intersection(those) <= {*was} for those, was in zip(now.of, before.of, strict=True))
    moved = moved or (bool(had) and not all(_tells_of(source, one) for one in {*now.quantized} - had))
    if goes_on(bindings, source) and not moved:
        config = dict(deepcopy(dict(source)))
        for key in dict.fromkeys(list_in(config, one.plain) for one in bindings if one.plain):
            listed = [str(one) for one in config.get(key) or ()]
            if (changed := _changed(listed, now, before, by_prefix=key not in ("ignore", "exclude_modules"))) != listed:
                config[key] = changed
        wrong = [name for name, one in modules_in(config).items() if bool(one) != (name in now.quantized)]
        return {key: value for key, value in config.items() if key not in wrong}
    by_targets = _by_targets(bindings, now.of) or _by_layers(bindings, now.of, source) or _by_modules(bindings, now.of)
    config = dict[str, Any]()
    for one in bindings:
        stated = dict(one.config) | by_targets | ({one.plain: sorted(now.plain)} if one.plain else {})
        if any(config.setdefault(key, value) != value for key, value in stated.items()):
            return None
    return config


def _tells_of(source: Mapping[str, Any], module: str) -> bool:
    """True if one of several schemes names a module, or names modules by class, which can't be resolved here."""
    if isinstance(layers := source.get("quantized_layers"), Mapping):
        return module in layers
    if stated := modules_in(source):
        return bool(stated.get(module))
    targets = [str(one) for found in values_at(source, ["config_groups", "*", "targets"]) for one in found or ()]
    return "Linear" in targets or is_listed(module, targets, by_prefix=False)


def _by_targets(bindings: Sequence[Binding], modules: Sequence[Collection[str]]) -> dict[str, Any]:
    """The keys of a config with several schemes, each for its modules; {} for bindings with one scheme."""
    stated = [one.config.get("config_groups") for one in bindings]
    if not all(stated) or all(one == stated[0] for one in stated):
        return {}
    groups = dict[str, Any]()
    for one, names in zip(bindings, modules, strict=True):
        for group in one.config["config_groups"].values():
            own = {"format": one.config["format"], "targets": sorted(names)}
            groups[f"group_{len(groups)}"] = dict(group) | own
    forms = {one.config["format"] for one in bindings}
    return {"config_groups": groups, "format": forms.pop() if len(forms) == 1 else "mixed-precision"}


def _by_layers(
    bindings: Sequence[Binding], modules: Sequence[Collection[str]], source: Mapping[str, Any]
) -> dict[str, Any]:
    """ModelOpt's keys for one scheme per layer; {} for bindings with one scheme, or without `quant_algo`. A scheme's
    other settings in the source, such as the group size, are kept."""
    algos = [one.config.get("quant_algo") for one in bindings]
    if len({*algos}) < 2 or None in algos:
        return {}
    said = source.get("quantized_layers") or {}
    alike = {one["quant_algo"]: one for one in said.values() if isinstance(one, Mapping) and "quant_algo" in one}
    layers = {
        name: dict(alike.get(algo, {"quant_algo": algo}))
        for algo, own in zip(algos, modules, strict=True)
        for name in own
    }
    return {"quant_algo": "MIXED_PRECISION", "quantized_layers": dict(sorted(layers.items()))}


def _by_modules(bindings: Sequence[Binding], modules: Sequence[Collection[str]]) -> dict[str, Any]:
    """MLX's config for several schemes: the first one's, and one for each module of the others; {} for one scheme."""
    stated = [one.config for one in bindings]
    if any("quant_method" in one or "bits" not in one for one in stated) or all(one == stated[0] for one in stated):
        return {}
    rest = zip(stated[1:], modules[1:], strict=True)
    return {**stated[0], **{name: dict(one) for one, names in rest for name in sorted(names)}}


def _changed(listed: Sequence[str], now: Modules, before: Modules, *, by_prefix: bool) -> list[str]:
    """Updates a list of modules that are not quantized: drops entries for those that are quantized now, and adds those
    that are plain now and not covered by it."""
    became = [name for name in now.quantized if name in before.plain]
    kept = [entry for entry in listed if not any(is_listed(name, [entry], by_prefix=by_prefix) for name in became)]
    lost = [entry for entry in listed if entry not in kept]
    new = (name for name in now.plain if name in before.quantized or is_listed(name, lost, by_prefix=by_prefix))
    return [*kept, *sorted(name for name in new if not is_listed(name, kept, by_prefix=by_prefix))]


def is_listed(module: str, entries: Collection[str], *, by_prefix: bool) -> bool:
    """True if a config's list names a module, by the rules of the programs that read it.

    `ignore` of compressed-tensors and ModelOpt has names, `re:` and a regular expression, or patterns with `*`.
    by_prefix: lists that transformers reads have a name's beginning up to a dot, an expression for it, or a name's end.
    """
    return any(_names(entry, module, by_prefix) for entry in entries)


def _names(entry: str, module: str, by_prefix: bool) -> bool:
    if entry.startswith("re:"):
        return _matches(entry[3:], module)
    if fnmatchcase(module, entry):
        return True
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return by_prefix and (module.endswith(entry) or _matches(f"(?:{entry}){boundary}", module))


def _matches(expression: str, module: str) -> bool:
    try:
        return re.match(expression, module) is not None
    except re.error:
        return False

"""The config of a folder states each module's scheme, whichever bindings of one program write it."""

from __future__ import annotations

import json
import runpy
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from layoutc.checkpoint.bindings.source_configs import Modules, config_of
from layoutc.runtime.bindings.facts import Binding

SPEC = find_spec("layoutc.recipes")
assert SPEC is not None
STATED = [runpy.run_path(str(path)) for path in sorted(Path(SPEC.submodule_search_locations[0]).glob("*/files.py"))]
BINDINGS: list[Binding] = [one for module in STATED for one in module.get("FILES", {}).values() if one.config]
BY_MODULE = {"compressed-tensors", "modelopt", None}  # None: MLX, whose configs name no program


def scheme_of(config: dict[str, Any], module: str) -> object:
    """As the programs read it: by group, by layer, by module, or of all modules."""
    if "config_groups" in config:
        (own,) = [one for one in config["config_groups"].values() if {module, "Linear"} & {*one["targets"]}]
        return own["weights"], own.get("format", config["format"])
    if "quantized_layers" in config:
        return config["quantized_layers"][module]["quant_algo"]
    if "quant_algo" in config:
        return config["quant_algo"]
    return [(config | config.get(module, {})).get(key) for key in ("mode", "bits", "group_size")]


@pytest.mark.parametrize("program", sorted({one.config.get("quant_method") for one in BINDINGS}, key=str))
def test_each_module_has_the_scheme_that_wrote_it(program: str | None) -> None:
    """One scheme is stated as the binding has it. Two are stated by modules, or contradict each other."""
    for pair in product([one for one in BINDINGS if one.config.get("quant_method") == program], repeat=2):
        one, two = (dict(binding.config) for binding in pair)
        of = [["b", "a"], ["d", "c"]]
        modules = Modules(["tail", "head"], [*of[0], *of[1]], of)
        config = config_of(pair, {}, modules, modules)
        same = Modules(["head", "tail"], sorted(modules.quantized), [sorted(names) for names in of])
        assert json.dumps(config) == json.dumps(config_of(pair, {}, same, same)), "sets of names give one text"
        plain = {binding.plain: ["head", "tail"] for binding in pair if binding.plain}
        if one == two:
            assert config == one | plain
        elif program in BY_MODULE:
            assert config is not None
            assert [scheme_of(config, name) for name in "abcd"] == [scheme_of(own, "") for own in (one, one, two, two)]
            assert config.items() >= plain.items()
        else:
            merged = one | two | plain
            assert config == (merged if merged.items() >= one.items() else None)

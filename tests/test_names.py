"""Names of recipes that mean something to Python, torch or the generated package itself: each package works."""

from __future__ import annotations

import builtins
import importlib
import keyword
import sys
from pathlib import Path

import pytest
import torch

from layoutc.build import pipeline

SPEC = """\
layoutc: 1
name: {name}
summary: a recipe named {name}
element: {{format: e4m3}}
scale: {{format: f32, rule: amax-over-max}}
orientations:
  rowwise: {{block: {{m: all, k: all}}, data: {{layout: m k}}, scale: {{layout: scalar}}}}
"""
OF_THE_PACKAGE = (
    "import_module",
    "recipes",
    "layout",
    "reference",
    "dispatch",
    "tensor",
    "kernels",
    "quantize",
    "cast",
)
ELSEWHERE = ("torch", "triton", "quantized", "base", "functools", "types", "importlib", "sys", "a1", "x__y", "s_")
SOFT = tuple(name for name in keyword.softkwlist if name.isidentifier() and name[0].islower())
BUILTIN = ("list", "type", "len", "tuple", "dict", "getattr", "super", "property", "classmethod", "staticmethod", "any")
NAMES = dict.fromkeys((*OF_THE_PACKAGE, *ELSEWHERE, *SOFT, *BUILTIN))


def test_any_name_gives_a_package_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name for name in BUILTIN if not hasattr(builtins, name)} == set()
    specs = []
    for name in NAMES:
        specs.append(tmp_path / f"{name}.yaml")
        specs[-1].write_text(SPEC.format(name=name), encoding="utf-8")
    result = pipeline.build(specs, tmp_path / "out" / "named", check=False)
    assert result.diagnostics == []
    monkeypatch.syspath_prepend(str(tmp_path / "out"))
    package = importlib.import_module("named")
    x = torch.randn(4, 8)
    expected = None
    for _ in range(2):  # what is imported becomes an attribute of the package
        for name in NAMES:
            recipe = getattr(package, name)
            assert recipe.__name__ == f"named.{name}"
            assert recipe.LAYOUT.name == name
            data = recipe.quantize(x).planes()["rowwise_data"]
            expected = data if expected is None else expected
            assert torch.equal(data, expected)
            assert type(recipe.quantize(x)) is recipe.Tensor
            assert recipe.CastTensor.QUANTIZED is recipe.Tensor
    for name in [name for name in sys.modules if name.partition(".")[0] == "named"]:
        del sys.modules[name]

"""The suite's model: it agrees with the compiler, and shares nothing with it, nor knows a recipe."""

from __future__ import annotations

import re

import numpy as np
import pytest
import yaml
from places import ROOT

from layoutc.conformance.model.codes import codes_of, pack, unpack
from layoutc.spec.formats import BUILTIN


@pytest.mark.parametrize("name", [name for name, fmt in BUILTIN.items() if not fmt.is_f32])
def test_codes_by_definition_agree_with_the_compiler(name: str) -> None:
    """Two definitions of each built-in format, written apart."""
    fmt = BUILTIN[name]
    values = codes_of(fmt).values
    top = len(values) // 2  # around it and at the ends lie the values that are no numbers
    some = {*range(0, len(values), 1 if fmt.bits <= 8 else 61), *range(max(top - 300, 0), min(top + 300, len(values)))}
    for code in {*some, len(values) - 1}:
        assert np.array_equal(float(values[code]), fmt.value(code), equal_nan=True)


@pytest.mark.parametrize("bits", range(1, 8))
@pytest.mark.parametrize("low_first", [True, False])
def test_unpack_undoes_pack(bits: int, low_first: bool) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 16)).astype(np.uint8)
    np.testing.assert_array_equal(unpack(pack(codes, bits, low_first), bits, low_first), codes)


def test_the_suite_knows_no_recipe_no_format_and_no_rule() -> None:
    names = {path.stem for path in (ROOT / "specs").glob("*.yaml")}
    for file in ("formats.yaml", "rules.yaml"):
        names |= set(yaml.safe_load((ROOT / "layoutc" / "spec" / file).read_text(encoding="utf-8"))) - {
            "f32",
            "f16",
            "bf16",
        }  # also words for dtypes
    word = re.compile(rf"(?<![\w-])({'|'.join(sorted(map(re.escape, names)))})(?![\w-])")
    for path in sorted((ROOT / "layoutc" / "conformance").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert not word.search(text), (path.name, word.search(text))
        assert len(text.splitlines()) <= 400, path.name


@pytest.mark.parametrize("module", ["codes", "hadamard", "philox", "rules", "weights", "placing"])
def test_the_independent_model_shares_no_arithmetic(module: str) -> None:
    """It imports the types of the layout and of formats, and nothing of the runtime or the generated code."""
    text = (ROOT / "layoutc" / "conformance" / "model" / f"{module}.py").read_text(encoding="utf-8")
    imported = set(re.findall(r"^from (layoutc[\w.]*) import", text, flags=re.M))
    assert imported <= {
        f"layoutc.conformance.model.{name}" for name in ("codes", "hadamard", "philox", "rules", "weights")
    } | {
        "layoutc.spec.formats",
        "layoutc.spec.notation",
        "layoutc.layout.layout",
    }
    assert "torch" not in re.findall(r"^(?:import|from) (\w+)", text, flags=re.M)
    for line_ in re.findall(r"^from layoutc\.(?:spec\.\w+|layout\.layout) import (.*)", text, flags=re.M):
        types = {
            "Format",
            "Layout",
            "Plane",
            "Level",
            "Quantization",
            "Source",
            "Buffer",
            "Record",
            "Swizzle",
            "Transform",
        }
        assert set(line_.split(", ")) <= types

"""The recipes that a spec names for activations and gradients: found beside it or shipped, or refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import ROOT

from layoutc.build import pipeline

SPECS = ROOT / "specs"


def spec(folder: Path, name: str, like: str, gemm: str) -> Path:
    """A spec like a shipped one, with another name and another `gemm`."""
    text = (SPECS / f"{like}.yaml").read_text(encoding="utf-8").replace(f"name: {like}", f"name: {name}")
    path = folder / f"{name}.yaml"
    path.write_text(text.split("gemm:")[0] + gemm + "\n", encoding="utf-8")
    return path


def findings(path: Path) -> list[tuple[str, str, str | None]]:
    return [(one.code, one.message, one.help) for one in pipeline.check(path.read_bytes(), str(path))]


def test_a_recipe_beside_it_comes_before_a_shipped_one(tmp_path: Path) -> None:
    own = spec(tmp_path, "fp8_block_1d", "fp8_rowwise", "gemm: {activation: fp8_rowwise}")
    weight = spec(tmp_path, "mine", "fp8_rowwise", "gemm: {activation: fp8_block_1d}")
    assert findings(own) == findings(weight) == []
    _, texts, _ = pipeline.read(weight.read_bytes(), str(weight))
    assert 'activation=("fp8_block_1d", "a93daaa57939")' in texts["layout.py"]  # the layout of fp8_rowwise


def test_a_shipped_recipe_is_found_from_anywhere(tmp_path: Path) -> None:
    assert findings(spec(tmp_path, "mine", "fp8_block", "gemm: {activation: fp8_block_1d}")) == []


def test_an_unknown_recipe_is_refused_where_it_is_named(tmp_path: Path) -> None:
    path = spec(tmp_path, "mine", "fp8_block", "gemm:\n  activation: fp8_block1d\n  gradient: nothing_like_it")
    found = pipeline.check(path.read_bytes(), str(path))
    assert [(one.code, one.message) for one in found] == [
        ("LC908", "there is no recipe `fp8_block1d`"),
        ("LC908", "there is no recipe `nothing_like_it`"),
    ]
    assert found[0].help == "write `activation: fp8_block_1d`"
    assert found[1].help is not None
    assert found[1].help.startswith("name one of adam_m4, ")
    lines = path.read_text(encoding="utf-8").split("\n")
    for one, key in zip(found, ("activation", "gradient"), strict=True):
        assert one.primary is not None
        assert lines[one.primary.span.line - 1].startswith(f"  {key}:")
    fixed = (
        path.read_text(encoding="utf-8")
        .replace("fp8_block1d", "fp8_block_1d")
        .replace("  gradient: nothing_like_it", "")
    )
    path.write_text(fixed, encoding="utf-8")
    assert findings(path) == []


def test_a_recipe_whose_spec_has_errors_is_refused(tmp_path: Path) -> None:
    broken = spec(tmp_path, "acts", "fp8_block_1d", "gemm: {}")
    weight = spec(tmp_path, "mine", "fp8_block", "gemm: {activation: acts}")
    (found,) = pipeline.check(weight.read_bytes(), str(weight))
    assert (found.code, found.message) == ("LC908", "the spec of `acts` has errors")
    assert found.why == "the first is: `gemm` is empty"
    assert found.help == f"see them all with `layoutc check {broken}`"


def test_nothing_is_built_for_an_unknown_recipe(tmp_path: Path) -> None:
    path = spec(tmp_path, "mine", "fp8_block", "gemm: {activation: nobody}")
    result = pipeline.build([path], tmp_path / "out", check=False)
    assert [one.code for one in result.diagnostics] == ["LC908"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("gemm", ["gemm: {activation: mine}", "gemm: {activation: mine, gradient: fp8_e5m2_current}"])
def test_a_recipe_may_name_itself(tmp_path: Path, gemm: str) -> None:
    assert findings(spec(tmp_path, "mine", "fp8_current", gemm)) == []


def test_gradients_travel_by_a_recipe_of_the_wire(tmp_path: Path) -> None:
    """`reduce` names one, which the package states; another recipe, and one that is not there, are refused."""
    path = spec(tmp_path, "mine", "mxfp8", "reduce: grad_fp8")
    assert findings(path) == []
    _, texts, _ = pipeline.read(path.read_bytes(), str(path))
    assert 'reduce="grad_fp8",' in texts["layout.py"]
    for name, said in (
        ("mxfp8", "`mxfp8` is not a recipe for gradients on the wire"),
        ("grad", "there is no recipe `grad`"),
    ):
        path = spec(tmp_path, "mine", "mxfp8", f"reduce: {name}")
        (found,) = pipeline.check(path.read_bytes(), str(path))
        assert (found.code, found.message) == ("LC908", said)
        assert found.help is not None
        assert "reduce: grad_fp8" in found.help or "name one of" in found.help
    path = spec(tmp_path, "mine", "adam_v8", "reduce: grad_fp8")
    assert [one.code for one in pipeline.check(path.read_bytes(), str(path))] == ["LC338"]


def test_code_that_follows_from_a_layout_is_taken_from_the_recipe_beside_that_has_it(tmp_path: Path) -> None:
    """That of activations, where all that code follows from is the same; and no package is built without it."""
    base = spec(tmp_path, "acts", "fp8_rowwise", "gemm: {activation: acts}")
    weight = spec(tmp_path, "mine", "fp8_rowwise", "gemm: {activation: acts}")
    other = spec(tmp_path, "even", "fp8_rowwise", "shape: {m: 2}\ngemm: {activation: acts}")
    out = tmp_path / "out"
    (found,) = pipeline.build([weight], out, check=False, whole=False).diagnostics[:1]
    assert (found.code, found.help) == ("LC908", "build the spec of `acts` too")
    assert not out.exists()
    assert pipeline.build([base, weight, other], out, check=False).diagnostics == []
    for name in ("reference", "dispatch", "kernels"):
        assert f"from ..acts.{name} import *" in (out / "mine" / f"{name}.py").read_text(encoding="utf-8")
        assert "from .." not in (out / "even" / f"{name}.py").read_text(encoding="utf-8")
    assert pipeline.build([weight], out, check=True, whole=False).diagnostics == []
    shipped = spec(tmp_path, "alone", "fp8_rowwise", "gemm: {activation: fp8_rowwise}")
    assert "from .." not in pipeline.read(shipped.read_bytes(), str(shipped))[1]["kernels.py"]

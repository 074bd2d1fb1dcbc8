"""What `layoutc build` writes: current, deterministic, clean, independent of names and of where it stands, and fast."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from calls import calls_in
from places import ROOT

from layoutc.build import pipeline
from layoutc.emit import emit
from layoutc.emit.recipe_text import cast_name, class_name
from layoutc.spec import formats
from layoutc.spec.checks import read

SPECS = sorted((ROOT / "specs").glob("*.yaml"))
FEW = SPECS[:4]  # where what is shown has nothing to do with what a spec says
LAYOUTC = [sys.executable, "-m", "layoutc"]


def written(folder: Path) -> dict[str, str]:
    """Every file below a folder, by relative path."""
    return {str(p.relative_to(folder)): p.read_text(encoding="utf-8") for p in sorted(folder.rglob("*.py"))}


def test_generated_code_is_what_the_specs_produce() -> None:
    states = pipeline.build(SPECS, ROOT / "generated", check=True).states
    drifted = [f"{state.path}: {state.status}" for state in states if state.status != "same"]
    assert not drifted, f"{drifted}; run: layoutc build"


@pytest.mark.thorough
def test_two_hash_seeds_and_two_places_give_the_same_bytes(tmp_path: Path) -> None:
    for seed in ("0", "12345"):
        command = [*LAYOUTC, "build", "--specs", str(ROOT / "specs"), "--out", str(tmp_path / seed), "-q"]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed}, cwd=tmp_path)
    assert written(tmp_path / "0") == written(tmp_path / "12345") == written(ROOT / "generated")


def test_a_second_build_writes_nothing(tmp_path: Path) -> None:
    pipeline.build(FEW, tmp_path, check=False)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.py")}
    states = pipeline.build(FEW, tmp_path, check=False).states
    assert {state.status for state in states} == {"same"}
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.py")}


def test_a_spec_with_an_error_leaves_everything_as_it_was(tmp_path: Path) -> None:
    pipeline.build(FEW, tmp_path, check=False)
    before = written(tmp_path)
    bad = tmp_path / "bad.yaml"
    bad.write_text("layoutc: 1\nname: bad\n", encoding="utf-8")
    result = pipeline.build([FEW[0], bad], tmp_path, check=False)
    assert result.diagnostics
    assert not result.states
    assert written(tmp_path) == before


def test_files_that_no_spec_makes_are_reported_and_left(tmp_path: Path) -> None:
    pipeline.build(FEW, tmp_path, check=False)
    states = pipeline.build(FEW[1:], tmp_path, check=False).states
    stale = {state.path.parent.name for state in states if state.status == "stale"}
    assert stale == {FEW[0].stem}
    assert (tmp_path / FEW[0].stem / "tensor.py").is_file()


def test_building_one_spec_keeps_the_others_in_the_index(tmp_path: Path) -> None:
    pipeline.build(FEW, tmp_path, check=False)
    before = written(tmp_path)
    states = pipeline.build([FEW[1]], tmp_path, check=False, whole=False).states
    assert {state.status for state in states} == {"same"}
    assert written(tmp_path) == before


def test_two_specs_of_one_name_are_refused(tmp_path: Path) -> None:
    other = tmp_path / SPECS[0].name
    other.write_text(SPECS[0].read_text(encoding="utf-8"), encoding="utf-8")
    result = pipeline.build([SPECS[0], other], tmp_path / "out", check=False)
    assert [item.code for item in result.diagnostics] == ["LC904"]
    assert not (tmp_path / "out").exists()


def test_generated_code_is_clean_under_ruff() -> None:
    for arguments in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *arguments, str(ROOT / "generated")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.sample(3)
@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_renaming_a_recipe_and_its_format_changes_names_alone(path: Path, tmp_path: Path) -> None:
    """The same bits under other names give the same code: nothing is decided by a name."""
    text = path.read_text(encoding="utf-8")
    spec, _ = read.read_spec(text, str(path))
    assert spec
    name = spec.element.format
    if name in spec.formats:
        renamed = re.sub(rf"\b{name}\b", "quagga", text)
    else:
        fmt = formats.BUILTIN[name]
        codes = f"inf: {list(fmt.inf)}, nan: {list(fmt.nan)}" + (f", torch: {fmt.torch}" if fmt.torch else "")
        numbers = f"sign: {fmt.sign}, exponent: {fmt.exponent}, mantissa: {fmt.mantissa}, bias: {fmt.bias}, {codes}"
        if fmt.integer:
            numbers = f"integer: {fmt.integer}, fraction: {fmt.fraction}, symmetric: {str(fmt.symmetric).lower()}"
        if fmt.values:
            numbers = f"values: {list(fmt.values)}"
        own = f"formats:\n  quagga: {{{numbers}}}\nelement: {{format: quagga"
        renamed = text.replace(f"element: {{format: {name}", own, 1)
    other = f"{path.stem[0]}okapi"  # names are sorted, and these two begin alike
    renamed = renamed.replace(f"name: {path.stem}", f"name: {other}")
    (tmp_path / f"{other}.yaml").write_text(renamed, encoding="utf-8")
    result = pipeline.build([tmp_path / f"{other}.yaml"], tmp_path / "out", check=False)
    assert not result.diagnostics
    for name in emit.OF_STATE if spec.use != "weight" else emit.FILES:
        ours = (ROOT / "generated" / path.stem / name).read_text(encoding="utf-8")
        if base := re.search(r"^from \.\.(\w+)\.", ours, re.MULTILINE):  # whose code it has
            ours = (ROOT / "generated" / base[1] / name).read_text(encoding="utf-8")
        theirs = (tmp_path / "out" / other / name).read_text(encoding="utf-8")
        back = theirs.replace(class_name(other), class_name(path.stem)).replace(other, path.stem)
        back = back.replace(cast_name(other), cast_name(path.stem))
        assert statements(ours) == statements(back)


def statements(code: str) -> str:
    """The code as a tree, without docstrings and without the spec's hash."""
    tree = ast.parse(re.sub(r'spec_sha256="\w+"', 'spec_sha256=""', code))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            del body[0]
    return ast.dump(tree)


@pytest.mark.thorough
def test_a_package_built_elsewhere_works_where_it_stands(tmp_path: Path) -> None:
    specs = tmp_path / "mine"
    specs.mkdir()
    text = (ROOT / "specs" / "mxfp8.yaml").read_text(encoding="utf-8").replace("name: mxfp8", "name: wide")
    text = text.replace("shape: {m: 32, k: 32}", "shape: {m: 32, k: 64}")
    text = text.replace("block: {m: 1, k: 32}", "block: {m: 1, k: 64}").replace("layout: m k/32", "layout: m k/64")
    (specs / "wide.yaml").write_text(text, encoding="utf-8")
    package = tmp_path / "my_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    subprocess.run([*LAYOUTC, "build", "--specs", "mine", "--out", "my_pkg/quant", "-q"], check=True, cwd=tmp_path)
    program = (
        "import torch; from my_pkg.quant import wide; x = torch.randn(64, 128); q = wide.quantize(x)\n"
        "assert q.buffers()['rowwise_scale'].shape == (128, 4), q.buffers()['rowwise_scale'].shape\n"
        "assert type(q).__module__ == 'my_pkg.quant.wide.tensor'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)


# Calls of functions for a spec: 82,000 when this was set. Unlike times, they are the same on any machine, busy or not.
CALLS = 100_000


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", [["build", "--check", "-q"], ["check"]], ids=lambda words: words[0])
def test_commands_are_quick(arguments: list[str], tmp_path: Path) -> None:
    """Of all specs, in what takes about a second."""
    profile = tmp_path / "profile"
    command = [sys.executable, "-m", "cProfile", "-o", str(profile), "-m", "layoutc", *arguments]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert calls_in(profile) < CALLS * len(list((ROOT / "specs").glob("*.yaml")))

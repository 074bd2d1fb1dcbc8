"""`layoutc new`: a starter that builds and passes, a copy of a recipe, and refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from places import ROOT

from layoutc.cli.app import main
from layoutc.spec.checks.read import read_spec

SPECS = sorted((ROOT / "specs").glob("*.yaml"))


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def test_the_starter_is_sound_short_and_says_what_each_key_is(tmp_path: Path) -> None:
    result = run("new", "my_format", "--specs", tmp_path)
    path = tmp_path / "my_format.yaml"
    assert (result.exit_code, result.stdout) == (0, f"{path}\n")
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    assert all(len(line) <= 120 for line in text.splitlines())
    assert "specs/README.md" in text
    spec, found = read_spec(text, str(path))
    assert spec is not None
    assert found == []
    assert spec.name == "my_format"
    for key in ("layoutc:", "name:", "shape:", "block:", "data:", "scale: {layout", "columnwise:"):
        line = next(line for line in text.splitlines() if line.strip().startswith(key))
        assert "#" in line, key
    for key in ("element:", "scale: {format"):
        lines = text.splitlines()
        number = next(number for number, line in enumerate(lines) if line.startswith(key))
        assert lines[number - 1].startswith("#"), key


ADDED = {
    "record": (
        "    data: {layout: m k}\n    scale: {layout: m k/32}  ",
        "    record: {size: 32, fields: [scale, data]}\n",
    ),
    "super": (
        "scale: {format: e8m0, rule: power-of-two, round: up}\n",
        "scale: {format: int8, rule: scale-first, super: {format: f32, rule: scale-first, block: {m: 1, k: 256}}}\n",
    ),
    "values": ("element: {format: e4m3}\n", "formats: {mine: {values: [-1, 0, 0.5, 1]}}\nelement: {format: mine}\n"),
    "order": (
        "    data: {layout: k m}\n",
        "    data: {layout: k m, swizzle: k (g a b) -> k (g b a), a: 4, b: 2, words: 32}\n",
    ),
}


@pytest.mark.parametrize("key", ADDED)
def test_lines_that_the_starter_offers_make_a_sound_spec(key: str, tmp_path: Path) -> None:
    """Each is in the starter's comments, and is typed where they say."""
    run("new", "my_format", "--specs", tmp_path)
    text = (tmp_path / "my_format.yaml").read_text(encoding="utf-8")
    offered = {
        "record": "record: {size: 32, fields: [scale, data]}",
        "super": "{format: int8, rule: scale-first, super: {format: f32, rule: scale-first, block: {m: 1, k: 256}}}",
        "values": "formats: {mine: {values: [-1, 0, 0.5, 1]}}",
        "order": "swizzle: k (g a b) -> k (g b a), a: 4, b: 2",
    }[key]
    assert offered in " ".join(line.lstrip("# ") for line in text.splitlines())
    rowwise = text.partition("  columnwise:")[0]
    before, after = ADDED[key]
    if key == "record":
        rowwise += after
    elif key == "order":
        rowwise = rowwise.replace("    data: {layout: m k} ", after.rstrip())
    else:
        assert before in rowwise
        rowwise = rowwise.replace(before, after)
    assert after.strip() in rowwise
    spec, found = read_spec(rowwise, "my_format.yaml")
    assert (spec is not None, found) == (True, [])


@pytest.mark.sample(4)
@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_copy_is_the_recipe_under_another_name(path: Path, tmp_path: Path) -> None:
    """Comments included, nothing else changed."""
    (tmp_path / path.name).write_bytes(path.read_bytes())
    result = run("new", "copied", "--from", path.stem, "--specs", tmp_path)
    assert result.exit_code == 0, result.output
    before, after = path.read_text(encoding="utf-8"), (tmp_path / "copied.yaml").read_text(encoding="utf-8")
    assert after == before.replace(f"name: {path.stem}\n", "name: copied\n")
    assert run("check", tmp_path / "copied.yaml").exit_code == 0


def test_a_copy_of_a_file_and_of_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert run("new", "one", "--from", SPECS[0], "--specs", tmp_path).exit_code == 0
    assert run("new", "two", "--from", SPECS[0].stem, "--specs", tmp_path / "deep" / "folder").exit_code == 0
    assert (tmp_path / "deep" / "folder" / "two.yaml").is_file()


@pytest.mark.parametrize("name", ["Bad-Name", "2nd", "class", "layoutc", "a" * 41, "../up", "", "mit.punkt"])
def test_bad_names_are_refused(name: str, tmp_path: Path) -> None:
    result = run("new", name, "--specs", tmp_path)
    assert result.exit_code == 2
    assert "can't name a recipe" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_bad_name_is_answered_with_a_good_one(tmp_path: Path) -> None:
    assert "For instance: bad_name." in run("new", "Bad-Name", "--specs", tmp_path).stderr


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.yml").write_text("mine\n", encoding="utf-8")
    result = run("new", "mine", "--specs", tmp_path)
    assert (result.exit_code, "exists" in result.stderr) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yml"]
    assert (tmp_path / "mine.yml").read_text(encoding="utf-8") == "mine\n"


def test_an_unknown_recipe_is_answered_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_bytes(SPECS[0].read_bytes())
    result = run("new", "mine", "--from", "frist", "--specs", tmp_path)
    assert (result.exit_code, "Did you mean first?" in result.stderr) == (2, False) or "Did you mean" in result.stderr
    assert run("new", "mine", "--from", str(tmp_path / "none.yaml"), "--specs", tmp_path).exit_code == 2
    assert not (tmp_path / "mine.yaml").exists()


@pytest.mark.thorough
@pytest.mark.slow
def test_a_newcomers_path(tmp_path: Path) -> None:
    """new, edit block and format, check, build, test: as commands, in a project of its own, without an interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}

    def layoutc(*args: str) -> str:
        command = [sys.executable, "-m", "layoutc", *args]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False, env=environment
        )
        assert done.returncode == 0, (args, done.stdout, done.stderr)
        return done.stdout

    layoutc("new", "my_format", "--specs", "mine")
    path = tmp_path / "mine" / "my_format.yaml"
    text = path.read_text(encoding="utf-8")
    edited = text.replace("{format: e4m3}", "{format: e2m1, pack: high-first}").replace("32", "16")
    assert edited != text
    path.write_text(edited, encoding="utf-8")
    layoutc("check", "mine")
    layoutc("build", "--specs", "mine", "--out", "quant")
    assert (tmp_path / "quant" / "my_format" / "tensor.py").is_file()
    report = layoutc("test", "mine/my_format.yaml")
    assert " failed" not in report
    assert "  pass  fsdp2 " in report

"""doctor, completion, and progress: what they print, where, and the exit code when something is missing."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from layoutc.cli import progress
from layoutc.cli.app import main
from layoutc.doctor import machine, packages, recipes
from layoutc.doctor.findings import Line, is_healthy
from layoutc.runtime.sharding import registry


def run(*args: str) -> Result:
    return CliRunner().invoke(main, [*args])


@pytest.fixture
def no_group() -> Iterator[None]:
    """doctor makes a process group of its own."""
    import torch.distributed as dist

    assert not dist.is_initialized()
    yield
    assert not dist.is_initialized()


@pytest.mark.usefixtures("no_group")
def test_this_machine_is_fine() -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    found = {line["about"]: line for line in data["findings"]}
    import torch

    assert found["torch"]["found"] == torch.__version__
    assert found["what is read of FSDP2"]["verdict"] == "fine"
    kinds = {one["recipe"]: one for one in data["recipes"]}
    where = "kernels" if torch.cuda.is_available() else "reference: there is no card"
    assert kinds["mxfp8"]["kernels"] == where
    assert kinds["mxint8"]["products"] == "dequantized"
    assert "scaled_mm" not in result.stdout


@pytest.mark.usefixtures("no_group")
def test_tables_and_quiet() -> None:
    result = run("doctor")
    for said in ("This machine", "torch is built for", "Recipes", "nvfp4", "products of linear layers"):
        assert said in result.stdout
    quiet = run("doctor", "--quiet")
    assert (quiet.exit_code, quiet.output) == (0, "")


@pytest.mark.usefixtures("no_group")
def test_what_fsdp2_has_renamed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_OF_PARAM", (*registry._OF_PARAM, "renamed_by_torch"))
    result = run("doctor", "--quiet")
    assert result.exit_code == 1
    assert "FSDPParam has no renamed_by_torch" in result.stderr
    assert "pip install 'torch>=2.11,<2.15'" in result.stderr


def stated(*lines: str) -> Any:
    return lambda name: list(lines)


def have(**versions: str) -> Any:
    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    return version


def test_packages_that_are_needed_and_that_add_something() -> None:
    wanted = stated("torch<2.15,>=2.11", "numpy", "ruff<0.18,>=0.17", 'triton>=3.6,<3.10; extra == "triton"')
    found = {
        line.about: line
        for line in packages.look(have(layoutc="1.0", torch="2.15.1+cu130", numpy="2.0", triton="3.5.1"), wanted)
    }
    assert (found["torch"].verdict, found["torch"].fix) == ("missing", "pip install 'torch<2.15,>=2.11'")
    assert (found["ruff"].verdict, found["numpy"].verdict) == ("missing", "fine")
    assert (found["triton"].verdict, found["triton"].fix) == ("without", "pip install 'layoutc[triton]'")
    assert "layoutc runs with >=3.6,<3.10" in found["triton"].found
    assert found["matplotlib"].found == "is not installed: layoutc plan --chart"
    assert not is_healthy(found.values())


@pytest.mark.parametrize(
    ("installed", "bounds", "fits"),
    [
        ("2.13.0+cpu", ">=2.11,<2.15", True),
        ("2.15.0", ">=2.11,<2.15", False),
        ("2.15.0.dev1", "<2.15", False),
        ("2.9", ">=2.11", False),
        ("2.11", ">=2.11", True),
        ("3", ">=2.11", True),
        ("0.17.5", ">=0.17,<0.18", True),
        ("1.0", "", True),
    ],
)
def test_versions(installed: str, bounds: str, fits: bool) -> None:
    assert packages.satisfies(installed, bounds) == fits


def test_cards_without_a_fitting_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "driver", lambda: "580.1")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert [line.verdict for line in machine._cards()] == ["fine", "missing"]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "update the driver" in list(machine._cards())[-1].fix
    monkeypatch.setattr(machine, "driver", lambda: "")
    assert list(machine._cards())[-1].verdict == "without"


def test_recipes_that_can_not_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "installed", lambda: [("mxfp8", "layoutc.recipes"), ("no_such", "theirs")])
    runs, lines = recipes.look()
    assert [one.recipe for one in runs] == ["mxfp8"]
    assert [(line.about, line.verdict) for line in lines] == [("recipe no_such", "missing")]
    assert is_healthy([Line("a", "fine", ""), Line("b", "without", "")])


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_what_the_shell_asks(shell: str) -> None:
    script = run("completion", shell)
    assert script.exit_code == 0
    assert f"_LAYOUTC_COMPLETE={shell}_complete" in script.stdout


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("layoutc pl", "plan"),
        ("layoutc plan --chart x --st", "--stored"),
        ("layoutc completion z", "zsh"),
        ("layoutc show mxfp8_", "mxfp8_2d"),
    ],
)
def test_completion_completes(words: str, found: str) -> None:
    """As bash calls it."""
    place = str(len(words.split()) - 1)
    environment = {**os.environ, "_LAYOUTC_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": place}
    program = [sys.executable, "-m", "layoutc"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert found in [line.partition(",")[2] for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("words", "begun", "found"),
    [
        (["show"], "nvfp4_1", ["nvfp4_1d"]),
        (["check"], "mxfp8_2", ["mxfp8_2d"]),
        (["check", "--specs", "mine"], "ow", ["own"]),
        (["bench"], "fp8_block_", ["fp8_block_1d"]),
        (["plan", "--recipe"], "hybrid", ["hybrid_fp8"]),
        (["demo", "--recipe"], "hybrid", ["hybrid_fp8"]),
        (["estimate"], "mine/own.y", []),
        (["test"], "mine/", []),
    ],
    ids=str,
)
def test_names_of_recipes_are_completed_and_else_files(
    words: list[str], begun: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/own.yaml").write_text("layoutc: 1", encoding="utf-8")
    offered = ShellComplete(main, {}, "layoutc", "_LAYOUTC_COMPLETE").get_completions(words, begun)
    if found:
        assert [(one.value, one.type) for one in offered] == [(name, "plain") for name in found]
    else:
        assert [(one.value, one.type) for one in offered] == [(begun, "file")]


class Terminal(io.StringIO):
    """A stream that says that it is a terminal, or not."""

    def __init__(self, is_one: bool) -> None:
        super().__init__()
        self.is_one = is_one

    def isatty(self) -> bool:
        return self.is_one


@pytest.mark.parametrize(
    ("terminal", "quiet", "patience", "shown"),
    [(True, False, -1.0, True), (True, True, -1.0, False), (False, False, -1.0, False), (True, False, 60.0, False)],
)
def test_progress_is_for_terminals_and_for_what_takes_long(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, quiet: bool, patience: float, shown: bool
) -> None:
    stream = Terminal(terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "PATIENCE", patience)
    monkeypatch.setenv("TERM", "xterm")
    assert list(progress.tracked([1, 2, 3], "plans", quiet)) == [1, 2, 3]
    assert ("plans" in stream.getvalue()) == shown

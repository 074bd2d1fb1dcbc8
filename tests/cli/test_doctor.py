"""doctor and completion: what they print, where, and the exit code when something is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from layoutc.cli.app import main
from layoutc.doctor import machine, packages, recipes
from layoutc.doctor.findings import Line, Runs, is_healthy
from layoutc.runtime.torch_private import fsdp2, planned_groups, reductions


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

    plain = torch.__version__.partition("+")[0]  # wheels of some releases don't name what they were built for
    assert found["torch"]["found"].partition("+")[0] == plain
    assert found["what is read of FSDP2"]["verdict"] == "fine"
    assert found["gathers in few steps"]["verdict"] == "fine"
    assert "a warning" in found["gathers in few steps"]["found"]
    kinds = {one["recipe"]: one for one in data["recipes"]}
    where = "kernels" if torch.cuda.is_available() else "reference: there is no card"
    assert kinds["mxfp8"]["kernels"] == where
    assert kinds["mxint8"]["products"] == "dequantized"
    assert "scaled_mm" not in result.stdout


@pytest.mark.usefixtures("no_group")
@pytest.mark.parametrize("module", [planned_groups, reductions], ids=["gathers", "reductions"])
def test_what_a_torch_has_under_other_names_is_said(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is needed is missing: FSDP2 takes its own steps."""
    monkeypatch.setattr(module, "_OF_GROUP", (*module._OF_GROUP, "_no_such_name"))
    found = {line.about: line for line in machine.look()}
    assert found["what is read of FSDP2"].verdict == "fine"
    assert found["gathers in few steps"].verdict == "without"
    assert found["gathers in few steps"].found.startswith("_no_such_name of FSDP2 differ")


@pytest.mark.usefixtures("no_group")
def test_tables_and_quiet() -> None:
    result = run("doctor")
    for said in ("This machine", "torch is built for", "Recipes", "nvfp4", "products of linear layers"):
        assert said in result.stdout
    quiet = run("doctor", "--quiet")
    assert (quiet.exit_code, quiet.output) == (0, "")


@pytest.mark.usefixtures("no_group")
def test_what_fsdp2_has_renamed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp2, "_OF_PARAM", (*fsdp2._OF_PARAM, "renamed_by_torch"))
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


@pytest.mark.parametrize(
    ("installed", "bounds", "fits"),
    [
        *(
            ("1.4", bound, fits)
            for bound, fits in (("==1.4", True), ("!=1.4", False), ("<=1.4", True), (">1.4", False))
        ),
        *(
            ("1.4.2", bound, fits)
            for bound, fits in (("==1.4", True), ("!=1.4", False), ("<=1.4", True), (">1.4", False))
        ),
        *(
            ("1.5", bound, fits)
            for bound, fits in (("==1.4", False), ("!=1.4", True), ("<=1.4", False), (">1.4", True))
        ),
        *(
            ("1.4", bound, fits)
            for bound, fits in (("<1.4", False), ("<1.4.1", True), (">=1.4", True), (">=1.4.1", False))
        ),
        ("unknown", ">=1", False),
    ],
)
def test_each_kind_of_bound(installed: str, bounds: str, fits: bool) -> None:
    assert packages.satisfies(installed, bounds) == fits


def test_lines_of_packages() -> None:
    """All of them, in order, word by word: those that are needed, and those that add something."""
    python = packages.look(have(), stated())[0]
    assert (python.about, python.verdict) == ("Python", "fine")
    wanted = stated("Torch (>=2.11)", "yaml ; python_version > '3'", "x[y]>=2", "-", 'peft>=1; extra == "integrations"')
    found = packages.look(have(layoutc="1.0", torch="2.10", x="2", peft="1.1", triton="9"), wanted)
    without = "is not installed"
    assert [(line.about, line.verdict, line.found, line.fix) for line in found[1:]] == [
        ("layoutc", "fine", "1.0", ""),
        ("torch", "missing", "2.10, and layoutc runs with >=2.11", "pip install 'torch>=2.11'"),
        ("yaml", "missing", without, "pip install 'yaml'"),
        ("x", "fine", "2", ""),
        ("triton", "fine", "9", ""),
        *(
            (name, "without", f"{without}: {packages.ADDS[name][1]}", f"pip install 'layoutc[{extra}]'")
            for name, extra in (
                *(("safetensors", "safetensors"), ("matplotlib", "charts"), ("torchao", "test")),
                *(("transformers", "integrations"), ("accelerate", "integrations")),
            )
        ),
        ("peft", "fine", "1.1", ""),
    ]
    absent = packages.look(have(peft="0.9"), stated('peft>=1; extra == "integrations"'))
    assert absent[1] == Line("layoutc", "missing", "runs from a folder, and is not installed", "pip install layoutc")
    assert absent[-1] == Line("peft", "fine", "0.9")  # what is asked for is unknown then


def test_lines_of_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    cards = [("L40", (8, 9)), ("H100", (9, 0)), ("B200", (10, 0)), ("A100", (8, 0))]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: cards[number][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: cards[number][1])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(machine, "driver", lambda: "")
    to_fp8, to_all = "to FP8 with", "to FP8, FP6, FP4 and E8M0 with"
    own = "the card's own instructions"
    assert [(line.about, line.verdict, line.found) for line in machine._cards()] == [
        ("torch is built for", "fine", "CUDA 13.0"),
        ("driver", "fine", "unknown"),
        ("card 0", "fine", f"L40, compute capability 8.9: kernels convert {to_fp8} {own}"),
        ("card 1", "fine", f"H100, compute capability 9.0: kernels convert {to_fp8} {own}"),
        ("card 2", "fine", f"B200, compute capability 10.0: kernels convert {to_all} {own}"),
        ("card 3", "fine", "A100, compute capability 8.0: kernels convert with integer arithmetic"),
    ]
    monkeypatch.setattr(machine, "driver", lambda: "580.1")
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    _, driver, *_, last = machine._cards()
    assert driver == Line("driver", "fine", "580.1")
    assert (last.about, last.verdict, last.fix) == ("kernels", "missing", "pip install 'layoutc[triton]'")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (None, ""),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu\nGCC version: 12.2.0\n", "570.86.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n", "580.65.06"),
        ("else", "of an unknown version"),
    ],
)
def test_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, version: str) -> None:
    monkeypatch.setattr(machine, "DRIVER", tmp_path / "version")
    if text is not None:
        (tmp_path / "version").write_text(text, encoding="utf-8")
    assert machine.driver() == version


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


LINES = [
    Line("torch", "missing", "is not installed", "pip install torch"),
    Line("cards", "without", "none"),
    Line("triton", "without", "3.5: kernels", "pip install triton"),
    Line("numpy", "fine", "2.0"),
]


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of which each room of doctor finds a part."""
    monkeypatch.setattr(packages, "look", lambda: LINES[:1])
    monkeypatch.setattr(machine, "look", lambda: LINES[1:3])
    monkeypatch.setattr(recipes, "look", lambda: ([Runs("mxfp8", "theirs", "kernels", "dequantized")], LINES[3:]))


TABLES = """This machine
  missing  torch   is not installed
  without  cards   none
  without  triton  3.5: kernels
  fine     numpy   2.0

Recipes
  recipe  of      quantizing  products of linear layers
  mxfp8   theirs  kernels     dequantized

To install
  needed    torch   pip install torch
  optional  triton  pip install triton
"""


@pytest.mark.usefixtures("stand_ins")
def test_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Word by word: as tables, as JSON, and quietly; a machine without recipes or work to do has shorter tables."""
    result = run("doctor")
    assert (result.exit_code, result.stdout, result.stderr) == (1, TABLES, "")
    result = run("doctor", "--json")
    data = json.loads(result.stdout)
    assert (result.exit_code, list(data), data["healthy"]) == (1, ["healthy", "findings", "recipes"], False)
    assert [Line(**line) for line in data["findings"]] == LINES
    assert data["recipes"] == [
        {"recipe": "mxfp8", "package": "theirs", "kernels": "kernels", "products": "dequantized"}
    ]
    result = run("doctor", "--quiet")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "torch: is not installed; pip install torch\n"
    monkeypatch.setattr(packages, "look", lambda: LINES[3:])
    monkeypatch.setattr(machine, "look", list)
    monkeypatch.setattr(recipes, "look", lambda: ([], []))
    result = run("doctor")
    assert (result.exit_code, result.stdout) == (0, "This machine\n  fine  numpy  2.0\n")


@pytest.mark.usefixtures("stand_ins")
def test_without_torch_packages_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    import layoutc.doctor

    monkeypatch.delattr(layoutc.doctor, "machine")
    monkeypatch.setitem(sys.modules, "layoutc.doctor.machine", None)
    result = run("doctor", "--quiet")
    assert result.exit_code == 1
    torch_line, runtime_line = result.stderr.splitlines()
    assert torch_line == "torch: is not installed; pip install torch"
    assert runtime_line.startswith("runtime: can't be imported: ")
    assert runtime_line.endswith("; pip install torch")


def test_what_runs_of_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By stand-ins for what the runtime chooses, on a card and without."""
    import torch

    from layoutc.runtime.train.convert import recipe_class

    cpu, card = torch.device("cpu"), torch.device("cuda")
    mxfp8 = recipe_class("mxfp8")
    without = type("Without", (), {"KERNELS": None, "LAYOUT": mxfp8.LAYOUT})
    assert recipes.kernels(without, card).startswith("reference: the recipe has no kernels")  # type: ignore[arg-type]
    assert recipes.kernels(mxfp8, cpu) == "reference: there is no card"
    assert recipes.kernels(mxfp8, card) == "kernels"
    monkeypatch.setattr(recipes.importlib.util, "find_spec", lambda name: None)
    assert recipes.kernels(mxfp8, card) == "reference: there is no Triton"
    asked: list[Any] = []
    ways = {"forward": ("kernel", ""), "grad_input": ("dequantize", "too old"), "grad_weight": ("reference", "why")}

    def choose(cls: Any, name: str, *rest: Any) -> Any:
        asked.append((cls, name, *rest))
        way, reason = ways[name]
        return SimpleNamespace(way=way, reason=reason)

    monkeypatch.setattr(recipes, "choose", choose)
    assert recipes.products(mxfp8, card) == "low precision: forward; others dequantized: too old"
    assert asked == [(mxfp8, name, recipes.Sizes(0, 4096, 4096, 4096), card, "low_precision") for name in ways]
    ways |= dict.fromkeys(ways, ("kernel", ""))
    assert recipes.products(mxfp8, card) == "low precision"
    ways |= dict.fromkeys(ways, ("dequantize", "no kernel"))
    assert recipes.products(mxfp8, card) == "dequantized: no kernel"
    assert recipes.products(recipe_class("mxint8"), card) == "dequantized"


def test_recipes_of_other_packages_follow_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    import layoutc.recipes

    own = [(name, "layoutc.recipes") for name in layoutc.recipes.RECIPES]
    monkeypatch.setattr(recipes, "points", lambda: [SimpleNamespace(name="a", value="layoutc.recipes")])
    assert recipes.installed() == [*own, ("a", "layoutc.recipes")]
    monkeypatch.setitem(sys.modules, "layoutc.recipes", None)
    assert recipes.installed() == [("a", "layoutc.recipes")]
    monkeypatch.setattr(recipes, "points", lambda: [])
    runs, (line,) = recipes.look()
    assert (runs, line.about, line.verdict) == ([], "recipes", "missing")


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
        (["bench"], "fp8_block_", ["fp8_block_1d", "fp8_block_e8m0"]),
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

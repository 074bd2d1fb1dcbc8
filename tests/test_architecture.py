"""Rules of the house that a test can keep: import directions, line budgets, no torch in the compiler, no names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.checkout
ROOT = Path(__file__).parent.parent
SPECS = sorted((ROOT / "specs").glob("*.yaml"))
# What trains and what measures stands on the runtime, and on nothing of the compiler.
ABOVE = sorted(path for path in (ROOT / "layoutc").glob("*.py") if path.name.startswith(("bench", "demo")))
COMPILER = sorted(path for path in (ROOT / "layoutc").glob("*.py") if path not in ABOVE)
CHECKPOINT = sorted((ROOT / "layoutc" / "checkpoint").glob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
RUNTIME = sorted((ROOT / "layoutc" / "runtime").glob("*.py"))
GENERATED = sorted((ROOT / "generated").rglob("*.py"))
# What only a card needs, imported when there is one.
DEVICE = [path for path in RUNTIME if path.name.startswith("triton_")]
KERNELS = [path for path in GENERATED if path.name == "kernels.py"]


def imported(path: Path) -> set[str]:
    """Absolute names of everything that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{name.name}" for name in node.names} | {str(node.module)}
    return found


def roots(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


@pytest.mark.parametrize("path", COMPILER, ids=lambda path: path.name)
def test_the_compiler_imports_neither_torch_nor_the_runtime(path: Path) -> None:
    lazily = {"__init__.py", "cli.py"}
    found = imported(path)
    assert not {"torch", "triton"} & roots(path)
    if path.name not in lazily:
        assert not [name for name in found if name.startswith("layoutc.runtime")]


@pytest.mark.parametrize("path", RUNTIME, ids=lambda path: path.name)
def test_the_runtime_imports_torch_and_itself_alone(path: Path) -> None:
    assert (
        not roots(path)
        - set(sys.stdlib_module_names)
        - {"torch", "layoutc"}
        - ({"triton"} if path in DEVICE else set())
    )
    assert all(name.startswith(("layoutc.runtime", "layoutc")) for name in imported(path) if "layoutc" in name)
    compiler = {f"layoutc.{other.stem}" for other in COMPILER}
    assert not compiler & imported(path)


@pytest.mark.parametrize("path", CHECKPOINT, ids=lambda path: path.name)
def test_checkpoints_stand_on_the_runtime_alone(path: Path) -> None:
    """safetensors is asked for where it is used."""
    assert not roots(path) - set(sys.stdlib_module_names) - {"torch", "layoutc", "safetensors"}
    within = ("layoutc.runtime", "layoutc.checkpoint", "layoutc.recipes", "layoutc.__version__")
    assert all(name.startswith(within) for name in imported(path) if name.startswith("layoutc."))


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_generated_code_needs_torch_and_the_runtime_alone(path: Path) -> None:
    """And its kernels Triton, which nothing else imports before a card is there."""
    assert (
        not roots(path)
        - set(sys.stdlib_module_names)
        - {"torch", "layoutc"}
        - ({"triton"} if path in KERNELS else set())
    )
    assert all(name.startswith("layoutc.runtime") for name in imported(path) if name.startswith("layoutc"))


@pytest.mark.parametrize("path", ABOVE, ids=lambda path: path.name)
def test_the_bench_runs_where_the_compiler_cannot(path: Path) -> None:
    """On machines with nothing but torch and Triton; the demo is for those where layoutc is installed."""
    if path.name.startswith("bench"):
        allowed = {"torch", "triton", "layoutc"}
        assert not roots(path) - set(sys.stdlib_module_names) - allowed
        compiler = {f"layoutc.{other.stem}" for other in COMPILER} - {"layoutc.diagnostics", "layoutc.__init__"}
        assert not compiler & imported(path)


def test_layout_and_plan_are_pure() -> None:
    for name in ("chain", "layout", "plan", "sizes"):
        found = roots(ROOT / "layoutc" / f"{name}.py")
        assert not found & {
            "os",
            "pathlib",
            "subprocess",
            "torch",
            "yaml",
            "jinja2",
            "pydantic",
            "io",
            "time",
            "random",
        }


def test_private_parts_of_fsdp2_are_read_in_two_files() -> None:
    for path in (*RUNTIME, *GENERATED, *ABOVE):
        text = path.read_text(encoding="utf-8")
        if path.name not in ("fsdp.py", "registry.py"):
            assert not re.search(r"_fully_shard|_composable_state|_training_state|_fsdp_param", text), path


@pytest.mark.parametrize("path", [*COMPILER, *ABOVE, *RUNTIME, *CHECKPOINT], ids=lambda path: path.name)
def test_modules_stay_under_400_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_recipe_is_at_most_60_lines_and_its_code_at_most_700(path: Path) -> None:
    """Kernels apart, which are at most 750."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 60
    files = [file for file in GENERATED if file.parent.name == path.stem]
    assert files
    lines = {file.name: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert lines.pop("kernels.py", 0) <= 750
    assert sum(lines.values()) <= 700


def test_no_code_knows_a_recipe_or_a_format_by_name() -> None:
    names = {path.stem for path in SPECS}
    names |= set(yaml.safe_load((ROOT / "layoutc" / "formats.yaml").read_text(encoding="utf-8"))) - {"f32"}
    names |= set(yaml.safe_load((ROOT / "layoutc" / "rules.yaml").read_text(encoding="utf-8")))
    word = re.compile(rf"(?<![\w-])({'|'.join(sorted(map(re.escape, names)))})(?![\w-])")
    templates = sorted((ROOT / "layoutc" / "templates").glob("*.j2"))
    # Its table of what to type is examples.
    examples = {"findings.py"}
    for path in (path for path in (*COMPILER, *RUNTIME, *templates) if path.name not in examples):
        text = path.read_text(encoding="utf-8")
        code = text if path.suffix == ".j2" else _without_prose(text)
        assert not word.search(code), (path.name, word.search(code))


def _without_prose(text: str) -> str:
    """Code without docstrings, comments, and messages that give an example in backquotes."""
    text = re.sub(r'"""[\s\S]*?"""|#.*', "", text)
    return re.sub(r"`[^`]*`", "", text)


def test_importing_layoutc_and_the_command_line_imports_no_torch() -> None:
    program = "import sys, layoutc, layoutc.cli, layoutc.compiler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("path", [*TESTS, *COMPILER, *ABOVE, *RUNTIME, *CHECKPOINT], ids=lambda path: path.name)
def test_programs_of_the_environment_are_started_as_modules(path: Path) -> None:
    """By the Python that runs: where the environment is not activated, the path has none of them."""
    programs = {"layoutc", "mypy", "pip", "pytest", "python", "python3", "ruff", "torchrun"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.List) and len(node.elts) > 1 and isinstance(node.elts[0], ast.Constant):
            assert node.elts[0].value not in programs, f"{path}:{node.lineno}: [sys.executable, '-m', ...]"

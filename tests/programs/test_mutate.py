"""The program that injects faults: which it makes, and what it says of those that tests notice and of the others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mutate import area_of, every_test, starts_programs
from mutation.choosing import choose
from mutation.fault import is_fault
from mutation.finding import faults_in
from mutation.workers import Workers
from places import ROOT


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("comparison", "ok = a < b <= c\n", ["ok = a <= b <= c\n", "ok = a < b < c\n"]),
        ("comparison", "ok = a not in b\n", ["ok = a in b\n"]),
        ("arithmetic", "n = (a) // b % c\n", ["n = (a) * b % c\n", "n = (a) // b // c\n"]),
        ("off by one", "n = x[0] + 3\n", ["n = x[1] + 3\n", "n = x[0] + 2\n", "n = x[0] + 4\n"]),
        ("constant", "f(x, True, 0.5)\n", ["f(x, False, 0.5)\n", "f(x, True, 1.0)\n"]),
        ("bound dropped", "y = x[a:b]\n", ["y = x[:b]\n", "y = x[a:]\n"]),
        ("and, or", "ok = a and b or c\n", ["ok = a and b and c\n", "ok = a or b or c\n"]),
        ("part of a condition dropped", "ok = a and b\n", ["ok = a\n", "ok = b\n"]),
        ("sign or not dropped", "ok = not a\n", ["ok = a\n"]),
        ("condition negated", "y = a if b else c\n", ["y = a if (not (b)) else c\n"]),
        ("condition negated", "y = [a for a in b if c]\n", ["y = [a for a in b if (not (c))]\n"]),
        ("check dropped", "if a:\n    raise E('no')\n", ["pass\n"]),
        ("raise dropped", "if a:\n    raise E('no')\n", ["if a:\n    pass\n"]),
        ("guard dropped", "if a:\n    b()\n", ["pass\n"]),
        ("call dropped", "f()\n", ["pass\n"]),
        ("assignment dropped", "x.a = 1\nx[0] = y\nn = a\n", ["pass\nx[0] = y\nn = a\n", "x.a = 1\npass\nn = a\n"]),
        ("assignment dropped", "def f(n):\n    n = g(n)\n    return n\n", ["def f(n):\n    pass\n    return n\n"]),
        (".clone() dropped", "y = x.clone(memory_format=f)\n", ["y = x\n"]),
        (".contiguous() dropped", "y = x.t().contiguous()\n", ["y = x.t()\n"]),
        ("sorted() dropped", "y = sorted(x)\n", ["y = x\n"]),
        (
            "another function",
            "y = torch.amax(max(a, b))\n",
            ["y = torch.amax(min(a, b))\n", "y = torch.amin(max(a, b))\n"],
        ),
        ("arguments exchanged", "f(a, b)\n", ["f(b, a)\n"]),
        ("arguments exchanged", "n = tl.minimum(a, b)\n", []),
        ("arguments exchanged", "n = min(a, b, key=f)\n", ["n = min(b, a, key=f)\n"]),
        ("keyword dropped", "f(a, b=c, d=e)\n", ["f(a, b=c)\n", "f(a, d=e)\n"]),
        ("element dropped", "y = {a: b, c: d}\n", ["y = {a: b}\n", "y = {c: d}\n"]),
        ("returned early", "def f():\n    a()\n    b()\n", ["def f():\n    a()\n    return\n"]),
        ("returned early", "def f() -> int | None:\n    return a\n", ["def f() -> int | None:\n    return None\n"]),
        ("answer negated", "def f() -> bool:\n    return a\n", ["def f() -> bool:\n    return (not (a))\n"]),
        ("only once", "for a in b:\n    c(a)\n", ["for a in b:\n    c(a)\n    break\n"]),
        ("context dropped", "with a, b():\n    c()\n", ["if True:\n    c()\n"]),
        ("finally dropped", "try:\n    a()\nfinally:\n    b()\n", ["try:\n    a()\nfinally:\n    pass\n"]),
        ("decorator dropped", "@torch.no_grad()\ndef f(): ...\n", ["\ndef f(): ...\n"]),
    ],
)
def test_what_is_changed(kind: str, before: str, after: list[str]) -> None:
    found = [fault for fault in faults_in(before, "m.py") if fault.kind == kind and is_fault(fault, before)]
    assert sorted(re.sub(" +\n", "\n", fault.apply(before)) for fault in found) == sorted(after)


@pytest.mark.parametrize(
    "text",
    [
        '"""Of 3 kinds."""\n',
        "x: tuple[int, str] | None = y\n",
        "Pair = tuple[int, str]\n",
        "if TYPE_CHECKING:\n    import a\n",
        "raise_ = None\nassert x is not None\n",
        'warnings.warn("3", stacklevel=2)\n',
        "@lru_cache(maxsize=8)\ndef f() -> Literal[3]: ...\n",
        'told = f"{x + 1}"\n',
        "found = dict[str, int]()\n",
        "found = f(zip(*a, strict=True))\n",
    ],
)
def test_what_is_left_alone(text: str) -> None:
    """What only people and type checkers read."""
    assert not [fault.apply(text) for fault in faults_in(text, "m.py") if is_fault(fault, text)]


def test_an_edit_that_changes_no_instruction_is_no_fault() -> None:
    text = "def f():\n    if a:\n        return\n    b = 1 + 2\n"
    found = [fault.apply(text) for fault in faults_in(text, "m.py") if not is_fault(fault, text)]
    assert "def f():\n    if a:\n        return\n    b = 1 + 2\n" not in found
    same = [fault for fault in faults_in("n = 2 * 2\n", "m.py") if not is_fault(fault, "n = 2 * 2\n")]
    assert [fault.apply("n = 2 * 2\n") for fault in same] == ["n = 2 + 2\n"]


def test_a_seed_chooses_the_same_faults_of_all_kinds_and_modules() -> None:
    sources = {
        name: (ROOT / "layoutc" / name).read_text(encoding="utf-8") for name in ("layout/chain.py", "plan/plan.py")
    }
    found = {name: faults_in(source, name) for name, source in sources.items()}
    one, same, other = (choose(found, sources, 20, seed) for seed in (1, 1, 2))
    assert one == same != other
    assert len({fault.key for fault in one}) == 20
    assert len({fault.kind for fault in one}) >= 10
    assert {fault.module for fault in one} == set(sources)
    assert all(fault.diff(sources[fault.module]).startswith("@@") for fault in one)


def test_longer_modules_are_chosen_more_often_where_lines_count() -> None:
    sources = {"long.py": "n = a + b\n" * 190, "short.py": "n = a + b\n" * 10}
    found = {name: faults_in(source, name) for name, source in sources.items()}
    chosen = [[fault.module for fault in choose(found, sources, 40, 5, by_lines)] for by_lines in (True, False)]
    assert chosen[0].count("long.py") > 33 > chosen[1].count("long.py")


def test_faults_know_their_functions() -> None:
    text = "class A:\n    x = f(1)\n\n    def b(self, n=2):\n        def c():\n            return 3\n        return 4\n"
    scopes = {(fault.new, fault.scope) for fault in faults_in(text, "m.py")}
    assert {("0", ""), ("1", ""), ("3", ""), ("2", "A.b.<locals>.c"), ("5", "A.b")} <= scopes


def test_every_module_has_tests_that_are_asked() -> None:
    for folder in ("layoutc", "generated"):
        for path in (ROOT / folder).rglob("*.py"):
            area = area_of(path.relative_to(ROOT).as_posix(), ROOT)
            assert area, path
            room = path.parent.name
            if folder == "layoutc" and (ROOT / "tests" / room).is_dir():
                assert any(file.startswith(f"tests/{room}/") for file in area), path
    assert "tests/runtime/test_master_weights.py" in area_of("layoutc/runtime/train/inner_optimizer.py", ROOT)


def test_files_that_start_programs_are_asked_of_all_that_is_in_their_area() -> None:
    """By themselves, or by a helper that they import; functions that are sent to ranks are followed."""
    starts = ("cli/test_doctor.py", "runtime/test_compiled_kernels.py", "checkpoint/test_killed_saves.py")
    assert all(starts_programs(f"tests/{name}", ROOT) for name in starts)
    for name in ("ints/test_cuts.py", "distributed/test_training.py", "spec/test_notation.py"):
        assert not starts_programs(f"tests/{name}", ROOT), name


def test_every_test_can_be_asked_but_those_that_are_slow_or_need_a_card() -> None:
    found = every_test(ROOT)
    assert {"tests/bindings/test_places.py", "tests/test_names.py"} <= set(found)
    assert not [name for name in found if "/gpu/" in name or name.endswith(("test_mutate.py", "/test_kernels.py"))]
    of_kernels = area_of("layoutc/runtime/triton/units.py", ROOT)
    assert {"tests/runtime/test_kernels.py", "tests/runtime/test_compiled_kernels.py"} <= set(of_kernels)
    assert not set(area_of("layoutc/plan/plan.py", ROOT)) - set(found)


def test_copies_have_all_of_a_checkout_but_what_builds_leave_at_its_root(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    kept = {"layoutc/build/files.py", "tests/build/test_files.py", "generated/nvfp4/tensor.py"}
    for name in (*kept, "build/lib/files.py", "dist/layoutc.whl", "layoutc/__pycache__/a.pyc", ".venv/bin/python"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name, encoding="utf-8")
    (copy,) = Workers(root, tmp_path / "copies", 1).copies
    assert {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()} == kept


# -------------------------------------------------------------------------------------------------------- a toy project
TOY = '''"""A toy."""


def least(numbers):
    found = numbers[0]
    for number in numbers:
        if number < found:
            found = number
    return found


def count_down(n):
    while n > 0:
        n -= 1
    return n


def helper(n):
    return n + 5
'''
TESTS = """from toy import count_down, helper, least


def test_least():
    assert least([3, 1, 2]) == 1


def test_down():
    assert count_down(3) == 0


def test_helper():
    assert helper(1)
"""

ELSEWHERE = """

def test_last():
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert repr(pool.submit(least, [1.0, 1]).result()) == "1.0"
"""  # in a process that is started as ranks are

NOISY = """

def test_fails_once():
    import toy
    from pathlib import Path

    seen = Path(toy.__file__).with_suffix(".seen")
    if helper(2) != 7 and not seen.exists():
        seen.touch()
        assert False
"""  # and passes when it is asked again, as on a machine that is less busy


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The program on the toy, as a user runs it."""
    command = [sys.executable, str(ROOT / "tests" / "programs" / "mutate.py"), "--root", str(folder), *arguments]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder.parent / "cache"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """Its folder."""
    folder = tmp_path / "toy"
    (folder / "tests").mkdir(parents=True)
    (folder / "toy.py").write_text(TOY, encoding="utf-8")
    (folder / "tests" / "test_toy.py").write_text(TESTS, encoding="utf-8")
    return folder


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_what_survived_is_listed_with_its_diff_and_nothing_is_written(toy: Path) -> None:
    """Noticed: by the test that calls the function; by its time; at import. Not: a constant that no test looks at."""
    before = {path: path.read_bytes() for path in toy.rglob("*") if path.is_file()}
    done = run(toy, "toy.py", "--count", "100", "--patience", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    noticed = {line.split("  ")[0]: line for line in lines if "  noticed by " in line}
    late = {line.split("  ")[0]: line for line in lines if "  late in " in line}
    survived = {line.split("  ")[0]: line for line in lines if "  SURVIVED  " in line}
    text = (toy / "toy.py").read_text(encoding="utf-8")
    faults = {fault.key: fault for fault in faults_in(text, "toy.py") if is_fault(fault, text)}
    assert set(faults) == {*noticed, *late, *survived}
    told = {key: (faults[key].kind, faults[key].line, faults[key].new) for key in faults}
    assert {told[key] for key in survived} == {
        ("comparison", 7, "<="),
        ("off by one", 5, "1"),
        ("off by one", 19, "4"),
        ("off by one", 19, "6"),
        ("arithmetic", 19, "-"),
    }
    assert all("tests/test_toy.py::test_" in line for line in noticed.values())
    assert "test_down" in late[next(key for key in told if told[key] == ("assignment dropped", 14, "pass"))]
    assert "-    return n + 5\n+    return n + 6\n" in done.stdout
    assert lines[-1].startswith(f"{len(faults)} faults of ")
    assert f"{len(noticed)} noticed, {len(late)} late or ended, {len(survived)} survived" in lines[-1]
    assert {path: path.read_bytes() for path in toy.rglob("*") if path.is_file()} == before


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_one_fault_again_and_exit_codes(toy: Path) -> None:
    """0 where all are noticed, 2 where nothing can be asked."""
    listed = run(toy, "toy.py", "--count", "100", "--list")
    assert listed.returncode == 0
    key = next(line for line in listed.stdout.splitlines() if "toy.py:7  comparison" in line).split("  ")[0]
    assert run(toy, "toy.py", "--only", key).returncode == 1
    with (toy / "tests" / "test_toy.py").open("a", encoding="utf-8") as file:
        file.write(ELSEWHERE)
    done = run(toy, "toy.py", "--only", key)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "noticed by tests/test_toy.py::test_last" in done.stdout
    assert run(toy, "toy.py", "--only", "0000000").returncode == 2
    assert run(toy, "none.py").returncode == 2
    (toy / "tests" / "test_toy.py").write_text("def test_wrong():\n    assert False\n", encoding="utf-8")
    done = run(toy, "toy.py")
    assert done.returncode == 2
    assert "no test passes without a fault" in done.stderr


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_failure_that_does_not_repeat_has_noticed_nothing(toy: Path) -> None:
    with (toy / "tests" / "test_toy.py").open("a", encoding="utf-8") as file:
        file.write(NOISY)
    listed = run(toy, "toy.py", "--count", "100", "--list").stdout.splitlines()
    key = next(line for line in listed if "toy.py:19  arithmetic" in line).split("  ")[0]
    done = run(toy, "toy.py", "--only", key)
    assert f"{key}  again: tests/test_toy.py::test_fails_once passes alone" in done.stdout, done.stdout + done.stderr
    assert "1 faults of" in done.stdout
    assert "0 noticed, 0 late or ended, 1 survived, 0%" in done.stdout

"""The suite passes for all recipes, those that are shipped and those that nobody ships, and in two processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from injected_faults import IN_PROCESSES, MUTANTS, edit
from places import ROOT, TESTS

from layoutc.conformance.ranks import PRELOADED, RankError, Ranks
from layoutc.conformance.registry import all_checks
from layoutc.conformance.report import line
from layoutc.conformance.runner import Outcome, run_check, run_checks
from layoutc.conformance.subject import compile_subject

SPECS = sorted((ROOT / "specs").glob("*.yaml"))
MADE_UP = sorted((TESTS / "conformance").glob("*.yaml"), reverse=True)  # zero points first, the dearest last
CHECKS = {check.name: check for check in all_checks()}
torch.set_num_threads(1)


def failures(outcomes: list[Outcome]) -> str:
    return "\n".join(line(outcome) for outcome in outcomes if outcome.status == "fail")


def test_checks_in_processes_are_of_weights() -> None:
    """A recipe of activations skips all of them; with a reason, and before processes are asked for anything."""
    subject = compile_subject(ROOT / "specs" / "nvfp4_gradient.yaml")
    try:
        outcomes = [run_check(subject, check) for check in CHECKS.values() if check.needs_processes or check.of_weights]
    finally:
        subject.close()
    assert len(outcomes) >= 8
    assert {outcome.status for outcome in outcomes} == {"skip"}
    assert {outcome.message for outcome in outcomes} == {f"the recipe is {subject.plan.not_weights}"}


COUNTED = ("fp8_delayed", "int4_group32", "mxfp6_e2m3", "nvfp4")  # a history, zero points, codes across bytes, swizzles
OF_THE_MACHINE = {"kernels", "products", "low-precision"}  # what these can do decides how much they compare


def compared(outcomes: list[Outcome]) -> str:
    """How much each check compared, by name: their order is that in which modules are imported."""
    counted = (one for one in outcomes if one.status == "pass" and one.check not in OF_THE_MACHINE)
    return "".join(sorted(f"{one.check}: {one.compared} {CHECKS[one.check].compares}\n" for one in counted))


@pytest.mark.sample(2)
@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_shipped_recipes_pass(path: Path, golden: Callable[[Path, str], None]) -> None:
    """All kernels are in tests/runtime/test_kernels.py; here the check of them runs for three recipes that differ.

    A check that compares less than it did, and so passes, is one that looks at less.
    """
    subject = compile_subject(path)
    checks_kernels = path.stem in ("fp8_current", "nvfp4", "int4_group32")
    try:
        wanted = run_checks(subject, lambda c: not c.needs_processes and (c.name != "kernels" or checks_kernels))
        outcomes = list(wanted)
    finally:
        subject.close()
    assert not failures(outcomes), failures(outcomes)
    if path.stem in COUNTED:
        golden(TESTS / "golden" / "compared" / f"{path.stem}.txt", compared(outcomes))
    not_weights = subject.plan.not_weights
    of_weights = sum(check.of_weights and not check.needs_processes for check in CHECKS.values())
    assert sum(outcome.status == "pass" for outcome in outcomes) >= 26 - (of_weights if not_weights else 0)
    assert {outcome.message for outcome in outcomes if outcome.status == "skip"} <= {
        "elements are rounded to nearest",
        f"the recipe is {not_weights}",
        "the spec has no swizzle",
        "no rows share values",
        "the spec names no recipe for activations",
        "the current amax decides the scale",
        "the recipe has no kernels: it uses the reference on every device",
        "this machine has no GPU; TRITON_INTERPRET=1 runs them without one",
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("path", MADE_UP, ids=lambda path: path.stem)
def test_recipes_that_nobody_ships_pass(path: Path) -> None:
    """Zero points, codes of six bits, odd and large blocks, scales of rows and of columns, two formats at once."""
    subject = compile_subject(path)
    try:
        outcomes = list(run_checks(subject, lambda check: not check.needs_processes))
    finally:
        subject.close()
    root = subject.package.__name__.partition(".")[0]
    assert not [name for name in sys.modules if name.partition(".")[0] == root]
    assert not failures(outcomes), failures(outcomes)


@pytest.mark.thorough
@pytest.mark.slow
def test_two_processes_train_and_restore_as_one_and_faults_are_caught_there_too() -> None:
    """One group of processes serves both; a rank that raises ends it, and it starts again."""
    path = ROOT / "specs" / "mxfp8.yaml"
    wanted = [check for check in CHECKS.values() if check.needs_processes]
    assert len(wanted) == 3
    with Ranks() as ranks:
        subject = compile_subject(path, ranks=ranks)
        outcomes = [run_check(subject, check) for check in wanted]
        subject.close()
        assert [outcome.status for outcome in outcomes] == ["pass"] * 3, failures(outcomes)
        assert all(outcome.compared for outcome in outcomes)
        for name, catching in IN_PROCESSES.items():
            recipe, file, pattern, replacement, _ = MUTANTS[name]
            broken = compile_subject(
                ROOT / "specs" / f"{recipe}.yaml", ranks=ranks, edit=edit(file, pattern, replacement)
            )
            found = [run_check(broken, CHECKS[check]) for check in catching]
            broken.close()
            assert [outcome.status for outcome in found] == ["fail"] * len(catching), name
            assert all("differs" in outcome.message or "loss" in outcome.message for outcome in found), failures(found)
        with pytest.raises(RankError, match=r"(?s)rank 1: .*KeyError"):
            ranks.run(fails_on_one_rank)
        with pytest.raises(RankError, match=r"(?s)rank 1: the process ended: SIGABRT.*ends_on_one_rank"):
            ranks.run(ends_on_one_rank)
        with pytest.raises(RankError, match=r"(?s)rank 0: .*FileNotFoundError: no such module.*rank 1: "):
            ranks.run(int, NotRead())
        with pytest.raises(RankError, match=r"rank 0: (?s:.*)lambda"):
            ranks.run(gives_no_plain_python)
        assert ranks.run(int, "7") == [7, 7]
        os.kill(ranks._processes[1].pid, signal.SIGKILL)
        ranks._processes[1].join()
        with pytest.raises(RankError, match="rank 1: the process ended: SIGKILL"):
            ranks.run(int, "7")
        assert ranks.run(int, "7") == [7, 7]


@pytest.mark.thorough
def test_what_processes_are_copied_with_asks_cuda_nothing_and_starts_no_thread() -> None:
    """A copy of a process that has asked can't ask again, and has none of its threads."""
    program = (
        "import importlib, sys, threading, torch\n"
        "def asked(*_): sys.exit('CUDA was asked')\n"
        "torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = asked\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert not [name for name in sys.modules if name.startswith('layoutc')]"
    )
    done = subprocess.run([sys.executable, "-c", program, *PRELOADED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class NotRead:
    """Reading it fails as an import does whose file is gone."""

    def __reduce__(self) -> tuple[Any, ...]:
        return fails_to_import, ()


def fails_to_import() -> None:
    raise FileNotFoundError("no such module")


def gives_no_plain_python() -> Callable[[], None]:
    return lambda: None


def ends_on_one_rank() -> None:
    if os.environ["RANK"] == "1":
        os.abort()


def fails_on_one_rank() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise KeyError("on purpose")
    dist.barrier()

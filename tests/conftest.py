"""Options and fixtures that tests share."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Hundreds of processes, of tests and of ranks, would compile layoutc's modules again where an image says so.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also of processes that tests start: their tensors are small
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # here, not in processes that would import torch again
# Or Inductor builds a library for each set of instructions, and each process loads it in another that imports torch.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Ranks of many workers share the cores: each worker's take as many times as long.
os.environ.setdefault(
    "LAYOUTC_RANKS_SECONDS",
    str(60 * max(2, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) // (os.cpu_count() or 1))),
)
import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent / "helpers"))  # in processes of any test folder
import tiers
from interpreter import quicken

from layoutc.conformance import ranks

sys.dont_write_bytecode = False
# Nothing fails because a machine is busy.
settings.register_profile("layoutc", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("layoutc")
gc.disable()  # until tests are collected: what is imported lives on, and each collection would look at all of it
PROJECT = Path(__file__).parent.parent / "pyproject.toml"
# Where tests that pass are noted, which runs after that leave out: those that lack no package then run once.
# A worker keeps the name from processes that its tests start, which may run tests of their own.
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
PASSED = Path(os.environ["LAYOUTC_PASSED"]) if "LAYOUTC_PASSED" in os.environ else None
if IS_WORKER:
    os.environ.pop("LAYOUTC_PASSED", None)
NOT_REWRITTEN = {"anyio", "hypothesis", "layoutc"}

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where kernels are defined


def pytest_configure(config: pytest.Config) -> None:
    """Makes Triton's interpreter fast enough to test kernels with.

    Makes the folder where processes find recipes that one of them has built (helpers/unshipped.py).

    Also keeps pytest from rewriting the asserts of plugins' packages, of which hypothesis has as many files as tests/.
    """
    quicken()
    if not IS_WORKER:
        made = tempfile.TemporaryDirectory(prefix="layoutc-unshipped-", ignore_cleanup_errors=True)
        os.environ["LAYOUTC_UNSHIPPED"] = made.name
        config.add_cleanup(made.cleanup)
    getattr(config.pluginmanager.rewrite_hook, "_must_rewrite", set()).difference_update(NOT_REWRITTEN)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Which cases the second tier runs."""
    if not config.option.markexpr:
        return None
    if tiers.EVERY:
        return "second tier: all cases"
    return f"second tier: cases of LAYOUTC_WEEK={tiers.WEEK}, a third of those that the first tier leaves out"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each worker begins with a run of folders of its own: what ranks and recipes keep is made by one worker only."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Python's collector goes on from here."""
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Puts tests into tiers, and of one folder those that run on ranks last, whose processes are then started once."""
    tiers.mark(items)
    config.stash[tiers.COLLECTED] = {item.nodeid.partition("[")[0] for item in items}
    if not any("::" in argument for argument in config.args):
        _, second, others = tiers.parted(items)
        left = {*others} if config.option.markexpr else {*second, *others}
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]
    if PASSED is not None and PASSED.is_file():
        before = set(PASSED.read_text(encoding="utf-8").splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in before])
        items[:] = [item for item in items if item.nodeid not in before]
    yield
    folders = {path: number for number, path in enumerate(dict.fromkeys(item.path.parent for item in items))}
    items.sort(key=lambda item: (folders[item.path.parent], runs_on_ranks(item)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes what has passed, for runs in other environments; workers' reports come to the process that started them."""
    if PASSED is not None and report.when == "call" and report.passed and not IS_WORKER:
        with PASSED.open("a", encoding="utf-8") as file:
            file.write(report.nodeid + "\n")


def runs_on_ranks(item: pytest.Item) -> bool:
    """Whether a test asks for a group of processes."""
    return not tiers.RANKS.isdisjoint(getattr(item, "fixturenames", ()))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Puts aside what lives as long as the session, modules and tests: each collection would look at them again.

    What is garbage by now stays: to find it takes more than a second.

    The process that all ranks are copied from starts with what most of them need, whichever test asks first for ranks.
    """
    gc.freeze()
    gc.set_threshold(*ranks.COLLECTED_AFTER)
    if any(map(runs_on_ranks, session.items)) and not session.config.option.collectonly:
        sys.modules["harness"].prepare()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what reads a checkout where there is none.

    Ends groups of processes when a test begins that runs in none: they are never quite idle.
    """
    if item.get_closest_marker("checkout") and not PROJECT.is_file():
        pytest.skip("needs a checkout: reads files that are not installed")
    harness = sys.modules.get("harness")
    if harness is not None and not runs_on_ranks(item):
        for group in harness.STARTED:
            group.stop()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --update-golden."""
    parser.addoption("--update-golden", action="store_true", help="write expected files instead of comparing with them")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Compares a text with a file, or writes the file under --update-golden. Review what that writes."""

    def compare(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8", newline="\n")
            return
        assert path.is_file(), f"{path} is missing; run: pytest --update-golden"
        assert text == path.read_text(encoding="utf-8"), f"{path} differs; if that is right: pytest --update-golden"

    return compare

"""The pytest plugins of mutate.py: one notes which functions each test calls, the other runs chosen tests in order."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

Calls = set[tuple[str, str]]  # module, as a path below the root, and qualified name of a function


class Tracer:
    """Notes the functions of the package that are called. As a context, in all threads that begin meanwhile."""

    def __init__(self, root: str) -> None:
        self.root, self.calls = root.rstrip("/") + "/", Calls()
        self._known: dict[CodeType, tuple[str, str] | None] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in self._known:
            inside = code.co_filename.startswith(self.root)
            self._known[code] = (code.co_filename.removeprefix(self.root), code.co_qualname) if inside else None
        if (called := self._known[code]) is not None:
            self.calls.add(called)

    def __enter__(self) -> Tracer:
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def traced(root: str, check: Callable[..., Any], *arguments: Any) -> tuple[Any, Calls]:
    """What a rank runs in place of a check: its result, and what was called on that rank."""
    with Tracer(root) as tracer:
        result = check(*arguments)
    return result, tracer.calls


class Recorder:
    """Writes {test: {"seconds", "calls": [[module, function], ...]}} of all tests that passed to a file."""

    def __init__(self, root: str, file: Path, is_traced: bool = True) -> None:
        self.root, self.file, self.is_traced, self.tests = root, file, is_traced, dict[str, dict[str, Any]]()
        self._ranks: Calls = set()
        self._failed: set[str] = set()
        self._next_write = 0.0

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Around one test, its fixtures included."""
        if self.is_traced:
            self._follow_ranks()
        self._ranks.clear()
        start, tracer = time.perf_counter(), Tracer(self.root)
        with tracer if self.is_traced else nullcontext():
            yield
        calls = sorted(tracer.calls | self._ranks)
        self.tests[item.nodeid] = {"seconds": round(time.perf_counter() - start, 3), "calls": calls}
        if time.perf_counter() > self._next_write:  # the run may be ended
            self.pytest_sessionfinish()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tests that fail, or are skipped, can't notice anything."""
        if report.outcome != "passed":
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Writes."""
        passed = {name: test for name, test in self.tests.items() if name not in self._failed}
        self.file.write_text(json.dumps(passed), encoding="utf-8")
        self._next_write = time.perf_counter() + 20

    def _follow_ranks(self) -> None:
        """Processes that tests start and send functions to: there, too, calls are noted."""
        ranks: Any = getattr(sys.modules.get("layoutc.conformance.ranks"), "Ranks", None)
        if ranks is None or hasattr(ranks.run, "followed"):
            return

        def run(here: Any, check: Any, *arguments: Any, _run: Any = ranks.run, **options: float) -> list[Any]:
            answers = _run(here, traced, self.root, check, *arguments, **options)
            for _, calls in answers:
                self._ranks |= calls
            return [result for result, _ in answers]

        run.followed = True  # type: ignore[attr-defined]
        ranks.run = run


class Late(Exception):
    """A test takes much longer than it did."""


NO_ANSWER = re.compile(r"(rank \d+: no answer\s*)+")  # of ranks that all wait, or start slowly; none has failed


class Chooser:
    """Runs the named tests in their order, each up to so many seconds.

    Writes {test: whether it failed by time alone} of those that failed.
    """

    def __init__(self, limits: dict[str, float], file: Path) -> None:
        self.limits, self.file, self.failed = limits, file, dict[str, bool]()
        self.order = {name: number for number, name in enumerate(limits)}
        self._is_late = False

    def _late(self, *_: object) -> None:
        self._is_late = True
        raise Late

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves out the others."""
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda item: self.order[item.nodeid])

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Ends a test that takes too long."""
        self._is_late = False
        signal.signal(signal.SIGALRM, self._late)
        signal.setitimer(signal.ITIMER_REAL, self.limits[item.nodeid])
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that can't be imported."""
        if report.failed:
            self.failed[report.nodeid] = False

    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        """Ranks that do not answer are late, too."""
        if call.excinfo is not None and NO_ANSWER.fullmatch(str(call.excinfo.value)):
            self._is_late = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that failed."""
        if report.failed:
            self.failed.setdefault(report.nodeid, self._is_late)

    def pytest_sessionfinish(self) -> None:
        """Writes."""
        self.file.write_text(json.dumps(self.failed), encoding="utf-8")

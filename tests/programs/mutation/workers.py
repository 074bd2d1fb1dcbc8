"""Runs of pytest in copies of a checkout, each in a forked process that may hang, crash or take any memory."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from mutation.fault import Fault

NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "*.egg-info")
MADE = {"build", "dist"}  # what builds leave at the root; further down, `build` is a room
MEMORY = 8 << 30  # bytes that one process may take: a fault can ask for any amount
PACKAGES = {"layoutc/recipes": "generated", "layoutc/specs": "specs"}  # where an import finds what lies elsewhere
PRELOADED = (
    "pytest",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo",
    "triton.runtime.interpreter",
    "pydantic",
    "jinja2",
    "yaml",
    "click",
    "rich",
)


@dataclass
class Run:
    """One run of pytest on files, with a fault or without, and what to do when it is done.

    `plugin` makes a plugin of the copy's root and of the file that it writes its result to, as JSON. `done` gets how
    the run ended ("exit 0", "late"), the result, or None, and seconds; it returns a run that shall follow, or None.
    """

    files: list[str]
    plugin: Callable[[Path, Path], Any]
    done: Callable[[str, Any, float], Run | None]
    seconds: float
    fault: Fault | None = None
    stops: bool = True


class Workers:
    """Copies of a checkout, in each of which one run is made at a time."""

    def __init__(self, root: Path, folder: Path, count: int) -> None:
        self.root, self.copies, self.turn = root, [folder / str(i) for i in range(count)], 0
        for copy in self.copies:
            shutil.copytree(root, copy, ignore=self._ignored, symlinks=True)
            for name, target in PACKAGES.items():
                if (copy / target).is_dir() and not (copy / name).exists():
                    (copy / name).symlink_to(copy / target)

    def _ignored(self, folder: str, names: list[str]) -> set[str]:
        return NOT_COPIED(folder, names) | (MADE if Path(folder) == self.root else set())

    def run(self, runs: Iterable[Run]) -> None:
        """All runs, and those that follow them."""
        waiting, free, active = deque(runs), list(self.copies), dict[int, tuple[Run, Path, float]]()
        try:
            while waiting or active:
                while waiting and free:
                    run, copy = waiting.popleft(), free.pop()
                    active[self._start(run, copy)] = run, copy, time.monotonic()
                for process, (run, copy, start) in list(active.items()):
                    ended, status = os.waitpid(process, os.WNOHANG)
                    took = time.monotonic() - start
                    if not ended and took < run.seconds:
                        continue
                    del active[process]
                    _end(process, not ended)
                    free.append(copy)
                    how = f"exit {os.waitstatus_to_exitcode(status)}" if ended else "late"
                    if (following := run.done(how, _result(copy), took)) is not None:
                        waiting.appendleft(following)
                time.sleep(0.02)
        finally:
            for process in active:
                _end(process, True)

    def _start(self, run: Run, copy: Path) -> int:
        """Forks, so that what all runs import is imported once. Returns the process."""
        result, scratch, changed = (copy.with_suffix(f".{kind}") for kind in ("json", "tmp", "changed"))
        result.unlink(missing_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        if changed.is_file():
            module = changed.read_text(encoding="utf-8")
            self._write(copy / module, (self.root / module).read_text(encoding="utf-8"))
            changed.unlink()
        if run.fault is not None:
            source = (self.root / run.fault.module).read_text(encoding="utf-8")
            self._write(copy / run.fault.module, run.fault.apply(source))
            changed.write_text(run.fault.module, encoding="utf-8")
        process = os.fork()
        if process == 0:
            _child(run, copy, result, scratch)
        return process

    def _write(self, path: Path, text: str) -> None:
        """Writes a module, and a time that it never had before, so that no old bytecode is taken for it."""
        path.write_text(text, encoding="utf-8")
        self.turn += 1
        os.utime(path, (2**30 + self.turn, 2**30 + self.turn))


def _end(process: int, is_running: bool) -> None:
    """Ends a run, if it has not, and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if is_running:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _result(copy: Path) -> Any:
    file = copy.with_suffix(".json")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _child(run: Run, copy: Path, result: Path, scratch: Path) -> NoReturn:
    code = 3
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        log = os.open(copy.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for file, place in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
            os.dup2(file, place)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(copy)
        sys.path[:0] = [str(copy), str(copy / "tests")]  # before that of this program, which ranks look for, too
        os.environ |= {"PYTHONPATH": str(copy), "TMPDIR": str(scratch)}
        tempfile.tempdir = None
        import pytest

        options = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", *(["-x"] if run.stops else [])]
        code = int(pytest.main([*options, *run.files], plugins=[run.plugin(copy, result)]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def preload() -> None:
    """Imports what most tests import, once for all runs; nothing of the package. Runs see no GPU."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for name in PRELOADED:
        with suppress(ImportError):
            import_module(name)

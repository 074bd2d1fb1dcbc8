"""Ranks: the processes of a local gloo group. They run job after job, so that each imports torch only once.

A job is a module-level function that every rank calls with the same arguments. Nothing hangs: if a rank fails or is
late, the group ends, and the next job starts a new one.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

SECONDS = float(os.environ.get("LAYOUTC_RANKS_SECONDS", "60"))  # raise it if many processes share few cores
# Imported once, in the process that all ranks are forked from. None of these initializes CUDA, which a forked process
# could not redo. layoutc is not preloaded, since only this process's path may have it.
PRELOADED = ("torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp")
# Thresholds of Python's garbage collector: with its default of 700, it takes a tenth of these small steps' time.
COLLECTED_AFTER = (20_000, 10, 10)


class RankError(Exception):
    """Raised if ranks fail; says which ones, and why."""


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    """A rank's main loop: joins the group, then runs jobs from the pipe until it is closed."""
    from datetime import timedelta

    crashed = open(f"{store}.{rank}", "w", encoding="utf-8")  # noqa: SIM115 (open as long as the process lives)
    faulthandler.enable(crashed)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=SECONDS / 2)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    pipe.send((True, None))
    gc.collect()
    gc.freeze()  # modules, which hold most objects: each collection would scan them again
    gc.set_threshold(*COLLECTED_AFTER)
    while True:
        try:
            sent = pipe.recv_bytes()
        except (EOFError, OSError):  # the parent is gone
            os._exit(0)
        try:
            job, arguments = ForkingPickler.loads(sent)  # imports the job's module, which may fail only here
            answer = ForkingPickler.dumps((True, job(*arguments)))
        except BaseException as error:
            said = getattr(error, "told", None) or traceback.format_exc(limit=-8)
            answer = ForkingPickler.dumps((False, said))
        pipe.send_bytes(answer)


def process_context(preloaded: Sequence[str]) -> Any:
    """How processes start: forked from a server that has imported `preloaded`, if the system supports it.

    There is only one server, which imports what the first group asked for.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    return context


class Ranks:
    """A group of `world` processes, started at first use. Use it as a context manager, or call stop()."""

    def __init__(self, world: int = 2, preloaded: Sequence[str] = PRELOADED) -> None:
        self.world = world
        self._preloaded = preloaded
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._store = Path()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, job: Callable[..., Any], *arguments: Any, seconds: float = SECONDS) -> list[Any]:
        """Runs a job on all ranks and returns the results. Raises RankError with failed ranks' messages and late ranks.

        seconds: the job's time limit. A collective may wait for at most half of SECONDS.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # the rank has ended since the last job; _answers says how
                pipe.send((job, arguments))
        return self._answers(seconds)

    def stop(self) -> None:
        """Ends the processes that this object started."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join(5)
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        context = process_context(self._preloaded)
        self._folder = tempfile.TemporaryDirectory(prefix="layoutc-ranks-", ignore_cleanup_errors=True)
        self._store = Path(self._folder.name) / "store"
        for rank in range(self.world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, str(self._store), there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        self._answers(SECONDS)

    def _answers(self, seconds: float) -> list[Any]:
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + seconds
        while len(answers) < self.world:
            left = max(deadline - time.monotonic(), 0.0)
            if any(not fine for fine, _ in answers.values()):  # others wait for it in a collective
                left = min(left, 2.0)
            open_ = {id(pipe): rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait([self._pipes[rank] for rank in open_.values()], left)
            if not ready:
                break
            for pipe in ready:
                try:
                    answer: tuple[bool, Any] = pipe.recv()  # type: ignore[union-attr, call-arg, assignment]
                    answers[open_[id(pipe)]] = answer
                except (EOFError, OSError):
                    answers[open_[id(pipe)]] = (False, self._ending(open_[id(pipe)]))
        failed = {rank: said for rank, (fine, said) in sorted(answers.items()) if not fine}
        late = [rank for rank in range(self.world) if rank not in answers]
        if failed or late:
            self.stop()
            lines = [f"rank {rank}: {said}" for rank, said in failed.items()]
            lines += [f"rank {rank}: no answer" for rank in late]
            raise RankError("\n".join(lines))
        return [answer for _, answer in (answers[rank] for rank in range(self.world))]

    def _ending(self, rank: int) -> str:
        """How a silent rank's process ended: its exit code, or the signal that killed it."""
        process = self._processes[rank]
        process.join(5)
        if (code := process.exitcode) is None:
            return "the process no longer answers"
        ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        where = self._store.with_name(f"{self._store.name}.{rank}")
        return f"the process ended: {ending}\n{where.read_text(encoding='utf-8')}".rstrip()

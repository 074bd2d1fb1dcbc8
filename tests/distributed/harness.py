"""Processes of one gloo group on this machine, which run check after check; torch is imported once for all of them.

A check is a function at the top of a module, called on every rank with the same arguments; it returns plain Python.
Nothing hangs: a rank that fails or is late ends the whole group, and the next check starts another.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from math import prod
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT = 60.0
# What processes are forked with; torch's compiler is half of all that fully_shard imports when it is first called.
IMPORTED = [
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "layoutc.checkpoint",
    "pytest",
]
Check = Callable[..., Any]
STARTED: list[Ranks] = []


def serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    """What a process does: joins the group, then runs the checks that come through the pipe."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT / 2)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    pipe.send((True, None))
    gc.collect()
    gc.freeze()  # modules, which are most objects: each collection would look at them again
    while True:
        try:
            check, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((True, check(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


@cache
def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    """A mesh of all ranks, or of the first prod(shape); the same one in all checks. Collective over all ranks.

    A process group has threads, one of which wakes up a hundred times a second: some hundreds of groups, as many as
    there are checks, take half of the machine. They can't be ended after a check, since DTensor remembers meshes.
    """
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", torch.arange(prod(shape)).reshape(shape), mesh_dim_names=names)


class Ranks:
    """A group of `world` processes, started when first used."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        STARTED.append(self)

    def run(self, check: Check, *arguments: Any, timeout: float = TIMEOUT) -> list[Any]:
        """Every rank's result. Raises AssertionError with the tracebacks of ranks that failed, and names late ones.

        timeout: seconds that the check may take, without collectives that wait for more than half of TIMEOUT.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((check, arguments))
        return self._answers(check.__name__, timeout)

    def stop(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.world):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, self.world, store, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        self._answers("joining the group", TIMEOUT)

    def _answers(self, what: str, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(results) + len(errors) < self.world:
            left = deadline - time.monotonic()
            if errors:  # the others wait in a collective, or fail by themselves within a moment
                left = min(left, 2.0)
            ready = wait([p for r, p in enumerate(self._pipes) if r not in results and r not in errors], max(left, 0.0))
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    fine, answer = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    fine, answer = False, "the process ended"
                (results if fine else errors)[rank] = answer
        late = [rank for rank in range(self.world) if rank not in results and rank not in errors]
        if errors or late:
            self.stop()
            told = "\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(errors.items()))
            raise AssertionError(f"{what}: ranks {late} are late\n{told}" if late else f"{what}\n{told}")
        return [results[rank] for rank in range(self.world)]

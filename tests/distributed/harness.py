"""Processes of one gloo group that run check after check, as those of `layoutc test`, and what all checks share.

A check is a function at the top of a module, called on every rank with the same arguments; it returns plain Python.
"""

from __future__ import annotations

import os
import stat
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from math import prod
from multiprocessing import forkserver, get_all_start_methods, resource_tracker, util
from typing import Any
from unittest import mock

import one_loop
import quick_sharding
import torch

from layoutc.conformance import ranks

# Here layoutc stands where all processes look.
PRELOADED = (
    *ranks.PRELOADED,
    "torch.distributed.tensor.parallel",
    "torch._inductor.pattern_matcher",  # takes as long to import as two graphs to compile
    "layoutc.checkpoint",
    "layoutc.build.pipeline",  # of specs that helpers read and build, and what these import
    "pytest",
)
WANTED: list[str] = []
STARTED: list[Ranks] = []


class Ranks(ranks.Ranks):
    """A group that the session can end."""

    def __init__(self, world: int) -> None:
        super().__init__(world, PRELOADED)
        STARTED.append(self)

    def _start(self) -> None:
        super()._start()
        self.run(begin)


def begin() -> None:
    """The first check of a rank."""
    sys.dont_write_bytecode = False  # as tests/conftest.py has it: of modules that ranks alone import
    one_loop.share()
    if os.environ.get("LAYOUTC_PLAIN_SHARDING") != "1":
        quick_sharding.quicken()


def preload(*modules: str) -> None:
    """Has the process that all ranks are copied from import what a test file's ranks need, if it is collected and
    the packages are installed."""
    WANTED.extend(one for one in modules if find_spec(one.partition(".")[0]) is not None)


def prepare() -> None:
    """Starts the process that all ranks are copied from: this one, copied, which has imported all tests' modules.

    Where CUDA was asked for, a copy could not ask again: there, and where copies need more than Linux gives them, it is
    a new process, which imports what the first group to start asks for.
    """
    if "forkserver" not in get_all_start_methods():
        return
    ranks.process_context((*PRELOADED, *WANTED))
    resource_tracker.ensure_running()
    copies = sys.platform == "linux" and not torch.cuda.is_available()
    with mock.patch.object(util, "spawnv_passfds", copied if copies else util.spawnv_passfds):
        forkserver.ensure_running()


def copied(_: bytes, arguments: Sequence[str], passed: Sequence[int]) -> int:
    """A copy of this process runs what another Python was to run. Returns its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # xdist's thread, which the copy hasn't, holds no lock
        process = os.fork()
    if process != 0:
        return process
    try:
        for file in map(int, os.listdir("/dev/fd")):
            with suppress(OSError):  # the one that listed them
                if file > 2 and file not in passed and stat.S_ISFIFO(os.fstat(file).st_mode):
                    os.close(file)  # or whoever reads it would wait for this process to end, and that for itself
        exec(arguments[-1], {})
    finally:
        os._exit(0)


@cache
def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    """A mesh of all ranks, or of the first prod(shape); the same one in all checks. Collective over all ranks.

    A process group has threads and connections, and can't be ended after a check, since DTensor remembers meshes.
    """
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", torch.arange(prod(shape)).reshape(shape), mesh_dim_names=names)

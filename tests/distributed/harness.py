"""Processes of one gloo group that run check after check, as those of `layoutc test`, and what all checks share.

A check is a function at the top of a module, called on every rank with the same arguments; it returns plain Python.
`@on("two")` makes a test of one that returns nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, Signature, signature
from math import prod
from multiprocessing import forkserver, get_all_start_methods
from typing import Any

import one_loop
import pytest

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


if "LOCAL_RANK" in os.environ:  # in a rank, at its first check
    sys.dont_write_bytecode = False  # as tests/conftest.py has it: of modules that ranks alone import
    one_loop.share()


class Ranks(ranks.Ranks):
    """A group that the session can end."""

    def __init__(self, world: int) -> None:
        super().__init__(world, PRELOADED)
        STARTED.append(self)

    def told(self, check: Callable[..., Any], *arguments: Any) -> Any:
        """What a check returns, the same on all ranks."""
        first, *others = self.run(check, *arguments)
        assert all(one == first for one in others), (first, *others)
        return first


def preload(*modules: str) -> None:
    """Has the process that all ranks are copied from import what a test file's ranks need, if it is collected and
    the packages are installed."""
    WANTED.extend(one for one in modules if find_spec(one.partition(".")[0]) is not None)


def prepare() -> None:
    """Starts the process that all ranks are copied from: it imports once what the first group to start asks for."""
    if "forkserver" in get_all_start_methods():
        ranks.process_context((*PRELOADED, *WANTED))
        forkserver.ensure_running()


def group(world: int) -> Any:
    """A fixture: so many processes, which all tests of a session share."""

    @pytest.fixture(scope="session")
    def made() -> Iterator[Ranks]:
        ranks = Ranks(world)
        yield ranks
        ranks.stop()

    return made


@cache
def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    """A mesh of all ranks, or of the first prod(shape); the same one in all checks. Collective over all ranks.

    A process group has threads and connections, and can't be ended after a check, since DTensor remembers meshes.
    """
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", torch.arange(prod(shape)).reshape(shape), mesh_dim_names=names)


def on(group: str, **how: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a check: it runs on all ranks of the fixture `group`. how: options of Ranks.run."""

    def made(check: Callable[..., None]) -> Callable[..., None]:
        given = signature(check).parameters.values()

        @wraps(check)
        def test(**arguments: Any) -> None:
            ranks = arguments.pop(group)
            ranks.run(check_of, check.__module__, check.__name__, arguments, **how)

        ranks = Parameter(group, Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = Signature([ranks, *given])  # type: ignore[attr-defined]
        return test

    return made


def check_of(module: str, test: str, arguments: dict[str, Any]) -> None:
    """A test's check, on a rank."""
    getattr(import_module(module), test).__wrapped__(**arguments)

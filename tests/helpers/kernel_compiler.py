"""Kernels compiled for a card, by one process for all tests of a session: to start it takes as long as four kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from typing import Any

from places import HELPERS

PROGRAM = HELPERS / "compile_kernels.py"
EVERY = bool(os.environ.get("LAYOUTC_ALL_KERNELS"))
# Without them a recipe has each piece of its code in one kernel at least: that of two orientations has that of each.
SOME = ("quantize* all *", "quantize* rowwise+*", "lay_out*", "dequantize rowwise *")
# What writes buffers holds the code that quantizes and the code that lays out; where nothing does, both are asked for.
FUSED = ("quantize_buffers all *", "quantize_buffers rowwise+*", "dequantize rowwise *")
QUANTIZING = ("quantize all *", "quantize rowwise+*")  # what newer cards convert in


def some(recipe: str, patterns: Iterable[str] = SOME) -> list[str]:
    """Names of those kernels of a recipe; LAYOUTC_ALL_KERNELS=1 makes it all."""
    return [recipe] if EVERY else [f"{recipe}/{pattern}" for pattern in patterns]


def compiled(capability: int, *names: str, count: Iterable[tuple[str, str]] = ()) -> list[dict[str, Any]]:
    """What the program tells of each kernel. names: as it takes them. count: (recipe, kernel) whose code is counted."""
    counted = [f"{recipe}/{kernel}" for recipe, kernel in count]
    process, said = _started()
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps([str(capability), *names, "--count", *counted]), file=process.stdin, flush=True)
    found = []
    for line in process.stdout:
        if not line.strip():
            return found
        found.append(json.loads(line))
    process.wait()
    _started.cache_clear()
    said.seek(0)
    raise AssertionError(said.read()[-4000:])


@cache
def _started() -> tuple[subprocess.Popen[str], Any]:
    """The process, which ends with this one, when nobody writes to it any more; and a file with its errors."""
    # Code for cards is the same without lines of source, which take a fifth of the time.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1"}
    said = tempfile.TemporaryFile("w+")  # noqa: SIM115
    command = [sys.executable, str(PROGRAM), "--serve"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": said}
    return subprocess.Popen(command, text=True, env=environment, **pipes), said  # type: ignore[call-overload]

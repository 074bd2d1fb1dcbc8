"""A process whose threads of gloo still hold tensors when Python ends does not abort, once layoutc runs in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "gloo_at_exit.py"


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="threads are found as Linux lists them")
def test_threads_of_gloo_let_go_before_python_ends() -> None:
    """Without what layoutc does at exit (`--uses "trained, nothing at exit"`), half of the runs abort on an idle
    machine before Python 3.14, and fewer on a busy one: that is no test."""
    command = [sys.executable, PROGRAM, "--waiting", "--runs", "4", "--uses", "trained"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "trained: 0 of 4" in said, said

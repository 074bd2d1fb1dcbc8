"""A save that is killed at any point leaves the checkpoints before it as they were, and is itself refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from places import HELPERS

PROGRAM = HELPERS / "killed_saves.py"


@pytest.mark.parametrize(("how", "times"), [("apart", 20), ("overwrite", 14)])
def test_a_killed_save_loses_nothing(tmp_path: Path, how: str, times: int) -> None:
    command = [sys.executable, str(PROGRAM), str(tmp_path), str(times), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["whole"] > 0
    assert found["torn"] > 0, "no save was killed while it wrote"
    assert found["reported"] > 0, "every save was killed before it was done"

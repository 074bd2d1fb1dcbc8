"""A save that is killed at any point leaves the checkpoints before it as they were, and is itself refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from places import HELPERS

PROGRAM = HELPERS / "killed_saves.py"


@pytest.mark.thorough
def test_a_killed_save_loses_nothing(tmp_path: Path) -> None:
    """Saves into folders of their own, and saves that replace the one before: one program, which imports torch once."""
    command = [sys.executable, str(PROGRAM), str(tmp_path), "apart:20", "overwrite:14"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == 2
    for found in told:
        assert found["whole"] > 0
        assert found["torn"] > 0, "no save was killed while it wrote"
        assert found["reported"] > 0, "every save was killed before it was done"

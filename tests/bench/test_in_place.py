"""`tests/bench/in_place.py`: both ways give the same bytes, and what they took is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT


@pytest.mark.thorough
def test_both_ways_are_compared_and_timed(tmp_path: Path) -> None:
    """On two processes of a CPU; the program fails where bytes differ."""
    file, options = tmp_path / "ways.json", "--divide 16 --recipes mxfp8 nvfp4 --json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += [str(ROOT / "tests/bench/in_place.py"), *options.split(), str(file)]
    helpers = os.pathsep.join([str(ROOT / "tests/helpers"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": helpers, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    rows = {row["recipe"]: row for row in json.loads(file.read_text())["rows"]}
    elements = sum(m * k for m, k in [(256, 256)] * 2 + [(64, 256)] * 2 + [(896, 256)] * 2 + [(256, 896)])
    assert {name: (row["count"], row["nbytes"] / elements) for name, row in rows.items()} == {
        "bf16": (7, 2.0),
        "mxfp8": (14, 1 + 1 / 32),
        "nvfp4": (14, 1 / 2 + 1 / 256),
    }
    assert all(0 < host <= ready for row in rows.values() for ready, host in (row["row_us"], row["planes_us"]))

"""`tests/bench/step.py --alone`: a rank's steps in one process, for the host's time without links."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

SMALL = "--layers 2 --dim 128 --ffn 256 --heads 4 --kv-heads 2 --sequence 64 --batch 1 --steps 2 --warm 2 --turns 2"


@pytest.mark.thorough
def test_one_process_takes_the_steps_of_a_rank(tmp_path: Path) -> None:
    """FSDP2 gathers, reduces and reshards as for a rank of two, and says where the host's time goes."""
    file, options = tmp_path / "steps.json", "--alone 2 --eager --phases --variants bf16 layoutc:fp8_current+adam8bf16"
    command = [sys.executable, str(ROOT / "tests/bench/step.py"), *f"{SMALL} {options} --json {file}".split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    hooks = {line.split()[1]: line.split()[2:] for line in done.stdout.splitlines() if line.startswith("FSDP2 ")}
    assert set(hooks) == {"pre_forward", "post_forward", "pre_backward", "post_backward"}
    assert all(cells[1::2] == ["(2)", "(2)"] for cells in hooks.values())  # two blocks, in both variants
    found = json.loads(file.read_text())
    assert (found["world"], found["alone"]) == (2, True)
    assert [row["variant"] for row in found["rows"]] == ["bf16", "layoutc:fp8_current+adam8bf16"]

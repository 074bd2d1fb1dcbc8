"""The programs of README and the pages run on two cards as they are printed, a card for each rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pages import PAGES, lines, missing, programs, starts
from places import ROOT

pytestmark = [
    pytest.mark.checkout,
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
FOUND = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
ENVIRONMENT = os.environ | {"PYTHONPATH": FOUND}
LINES = [(page, line) for page in PAGES for line in starts(page)]


def torchrun(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs torchrun in a folder, with this checkout's layoutc."""
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    return subprocess.run(
        [*command, *words], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize(("page", "line"), LINES, ids=[" ".join(line[2:]) for _, line in LINES])
def test_a_program_trains_on_two_cards(page: Path, line: list[str], tmp_path: Path) -> None:
    assert line[:2] == ["--nproc-per-node", "2"]
    if absent := missing(page):
        pytest.skip(f"needs {', '.join(absent)}: pip install 'layoutc[integrations]'")
    for name, text in programs(page).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for word, *rest in lines(page):  # what the page says to run before
        if word == "torchrun":
            break
        if word in ("layoutc", "python") and (tmp_path / "make_release.py").is_file():
            command = [sys.executable, *(["-m", "layoutc"] if word == "layoutc" else []), *rest]
            subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, timeout=300, check=True)
    ran = torchrun(line, tmp_path)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert re.search(r": loss \d\.\d+", ran.stdout), ran.stdout


PLAIN = """
import torch, torch.distributed as dist, layoutc
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
model = torch.nn.Linear(128, 128, device=torch.device("cuda", dist.get_rank()))
layoutc.quantize_(model, "mxfp8")
fully_shard(model)
{call}
"""


@pytest.mark.parametrize("call", ["layoutc.check_ranks(model)", 'model(torch.randn(8, 128, device="cuda"))'])
def test_ranks_that_share_a_card_are_named(call: str, tmp_path: Path) -> None:
    """On both ranks, before NCCL refuses them."""
    (tmp_path / "shared.py").write_text(PLAIN.format(call=call), encoding="utf-8")
    logs = ["--redirects", "3", "--log-dir", str(tmp_path / "logs")]
    ran = torchrun(["--nproc-per-node", "2", *logs, "shared.py"], tmp_path)
    assert ran.returncode != 0
    said = [path.read_text() for path in (tmp_path / "logs").rglob("stderr.log")]
    assert any("ranks 0, 1 have card" in one and "set_device" in one for one in said), said
    assert not any("Duplicate GPU" in one for one in said)

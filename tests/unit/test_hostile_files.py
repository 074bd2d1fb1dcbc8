"""Files that are made to do harm: refused in words, soon, in little memory; nothing of the live state is changed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import hostile
import pytest
import torch

from layoutc import checkpoint


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)  # processes that are forked have no others
    folder = tmp_path_factory.mktemp("sound") / "checkpoint"
    checkpoint.save(hostile.state(), folder)
    assert hostile.load(folder) == ""
    return folder


@pytest.mark.parametrize("name", hostile.HOSTILE)
def test_a_hostile_checkpoint_is_refused(name: str, sound: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound, tmp_path / "checkpoint"))
    make, words = hostile.HOSTILE[name]
    make(folder)
    told = hostile.limited(lambda: hostile.load(folder))
    if words == hostile.MAY_LOAD and not told:
        return
    assert re.match(f"(DamagedError|LayoutError): .*(?:{words})", told, re.DOTALL), told
    assert len(told) < 5000

"""Ranks save into one folder, or all of them refuse to: none reports a checkpoint that is not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import Ranks

from layoutc import checkpoint
from layoutc.checkpoint import saving
from layoutc.checkpoint.common import folders
from layoutc.runtime.errors import LayoutError

SAVES = {"save": checkpoint.save, "async_save": lambda *a, **k: checkpoint.async_save(*a, **k).result()}


def state(seed: int = 0) -> dict[str, Any]:
    """Something that each rank writes."""
    return {f"of_rank_{dist.get_rank()}": torch.arange(64.0) + seed, "step": seed}


def refused(how: str, folder: str, **options: Any) -> str:
    with pytest.raises(LayoutError) as caught:
        SAVES[how](state(), folder, **options)
    return str(caught.value)


def names_its_own(how: str, folder: str) -> str:
    return refused(how, f"{folder}/of_rank_{dist.get_rank()}")


@pytest.mark.parametrize("how", SAVES)
def test_ranks_that_name_different_folders_are_told(two: Ranks, how: str, tmp_path: Path) -> None:
    first = two.told(names_its_own, how, str(tmp_path))
    assert f"{tmp_path}/of_rank_0 on rank 0; {tmp_path}/of_rank_1 on rank 1" in first
    assert not list(tmp_path.iterdir())


def has_a_disk_of_its_own(folder: str) -> str:
    """As on nodes that do not share a file system: one name leads to two folders."""
    own = Path(folder, f"disk_{dist.get_rank()}", "checkpoint")
    with patch.object(folders, "resolved", lambda _: own), patch.object(folders, "SEEN_WITHIN", 0.2):
        return refused("save", "/mnt/checkpoint")


def test_nodes_that_share_no_file_system_are_told(two: Ranks, tmp_path: Path) -> None:
    first = two.told(has_a_disk_of_its_own, str(tmp_path))
    assert first.startswith("rank 1: ")
    assert "that all hosts mount" in first
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "nothing is left"


def names_it_in_another_way(folder: str) -> None:
    """A relative name, and one by way of a link."""
    os.chdir(folder)
    checkpoint.save(state(3), "checkpoint" if dist.get_rank() else f"{folder}/link")
    os.chdir("/")


def test_names_that_lead_to_one_folder_agree(two: Ranks, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("checkpoint")
    two.run(names_it_in_another_way, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"link", "checkpoint"}
    assert two.run(steps_in, f"{tmp_path}/link") == [3, 3]


def steps_in(folder: str) -> int:
    found = state()
    checkpoint.load(found, folder, strict=False)
    return int(found["step"])


def disagrees_about_overwrite(folder: str) -> str:
    return refused("save", folder, overwrite=dist.get_rank() == 1)


def test_ranks_that_disagree_about_overwrite_are_told(two: Ranks, tmp_path: Path) -> None:
    told = two.run(disagrees_about_overwrite, str(tmp_path / "checkpoint"))
    assert set(told) == {"ranks disagree about overwrite: False on rank 0; True on rank 1. Pass the same on all ranks"}


def loses_what_it_wrote(folder: str, how: str) -> str:
    """Rank 1's file is gone, or torn, when all have reported."""
    write = saving.Writer.write_data

    def lossy(self: saving.Writer, *args: Any) -> Any:
        done = write(self, *args)
        if dist.get_rank() == 1:
            (file,) = Path(self.path).glob("__1_*.distcp")
            file.unlink() if how == "gone" else os.truncate(file, file.stat().st_size - 1)
        return done

    with patch.object(saving.Writer, "write_data", lossy):
        return refused("save", folder, overwrite=True)


@pytest.mark.parametrize("how", ["gone", "torn"])
def test_a_file_that_is_missing_in_the_end_fails_the_save_on_all_ranks(two: Ranks, how: str, tmp_path: Path) -> None:
    """And the checkpoint that it would have replaced is what it was."""
    folder = tmp_path / "checkpoint"
    two.run(saved, str(folder), 7)
    told = two.told(loses_what_it_wrote, str(folder), how)
    assert told.startswith("the save is not complete: ")
    assert "__1_0.distcp" in told
    assert two.run(steps_in, str(folder)) == [7, 7]
    two.run(saved, str(folder), 8)
    assert two.run(steps_in, str(folder)) == [8, 8]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def saved(folder: str, seed: int) -> None:
    checkpoint.save(state(seed), folder, overwrite=True)


def replaces(folder: str) -> str:
    return refused("save", folder, overwrite=True)


def test_a_folder_of_other_things_is_not_replaced(two: Ranks, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    two.run(saved, str(runs / "step_1"), 1)
    (runs / "notes.txt").write_text("do not lose me")
    told = two.told(replaces, str(runs))
    assert f"{runs} holds notes.txt, step_1/, which is not part of a checkpoint" in told
    assert two.run(steps_in, str(runs / "step_1")) == [1, 1]
    assert (runs / "notes.txt").read_text() == "do not lose me"
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}

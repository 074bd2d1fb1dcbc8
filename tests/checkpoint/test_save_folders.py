"""Where a save writes: what it replaces, what it removes, what killed saves have left, and links."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import save as save_as_torch

from layoutc import checkpoint
from layoutc.checkpoint import saving
from layoutc.checkpoint.common import folders
from layoutc.recipes import mxfp8
from layoutc.runtime.errors import LayoutError


def state(step: int) -> dict[str, Any]:
    """What the checkpoint of a step holds."""
    generator = torch.Generator().manual_seed(step)
    return {"weight": mxfp8.quantize(torch.randn(64, 64, generator=generator)), "step": step}


def step_in(folder: Path) -> int:
    """The step that a folder holds, whole."""
    found = state(10**6)
    checkpoint.load(found, folder)
    assert torch.equal(found["weight"], state(found["step"])["weight"])
    return int(found["step"])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ------------------------------------------------------------------------------------------------------------ overwrite
def a_file(path: Path) -> None:
    path.write_text("mine")


def a_file_beside_a_checkpoint(path: Path) -> None:
    checkpoint.save(state(1), path)
    (path / "train_state.json").write_text("{}")


def folders_below(path: Path) -> None:
    for step in range(9):
        (path / f"step_{step}").mkdir(parents=True)


def a_link_in_a_checkpoint(path: Path) -> None:
    checkpoint.save(state(1), path)
    (path / "__9_0.distcp").symlink_to("elsewhere")


def a_folder_named_as_a_file(path: Path) -> None:
    (path / ".metadata").mkdir(parents=True)


OTHERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file": (a_file, "is a file: overwrite=True replaces a checkpoint"),
    "a file more": (a_file_beside_a_checkpoint, r"holds train_state\.json, which is not part of a checkpoint"),
    "folders": (folders_below, r"holds step_0/, step_1/, .*step_5/ and 3 more, which"),
    "a link": (a_link_in_a_checkpoint, r"holds __9_0\.distcp, which"),
    "a folder of that name": (a_folder_named_as_a_file, r"holds \.metadata/, which"),
}


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("what", OTHERS)
def test_only_a_checkpoint_is_replaced(what: str, tmp_path: Path) -> None:
    make, words = OTHERS[what]
    make(tmp_path / "there")
    before = tree(tmp_path)
    with pytest.raises(LayoutError, match=words):
        checkpoint.save(state(2), tmp_path / "there", overwrite=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("what", ["ours", "of torch", "torn", "empty"])
def test_checkpoints_are_replaced(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    if what == "empty":
        folder.mkdir()
    elif what == "of torch":
        save_as_torch(state(1), folder)
    else:
        checkpoint.save(state(1), folder)
    if what == "torn":
        (folder / ".metadata").unlink()
    checkpoint.save(state(2), folder, overwrite=True)
    assert step_in(folder) == 2
    assert names(tmp_path) == ["there"]


def test_what_comes_into_the_folder_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "latest"
    checkpoint.save(state(1), folder)
    finish = saving.Writer.finish

    def late(self: saving.Writer, **given: Any) -> None:
        (folder / "notes.txt").write_text("mine")
        finish(self, **given)

    monkeypatch.setattr(saving.Writer, "finish", late)
    with pytest.warns(UserWarning, match=r"\.latest\.previous is kept: it holds notes\.txt"):
        checkpoint.save(state(2), folder, overwrite=True)
    monkeypatch.undo()
    assert step_in(folder) == 2
    assert tree(tmp_path / ".latest.previous") == {"notes.txt": b"mine"}


def test_a_folder_that_comes_to_be_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of another run that saves into the same one."""
    checkpoint.save(state(1), tmp_path / "other")
    finish = saving.Writer.finish

    def late(self: saving.Writer, **given: Any) -> None:
        shutil.copytree(tmp_path / "other", tmp_path / "there")
        finish(self, **given)

    monkeypatch.setattr(saving.Writer, "finish", late)
    with pytest.raises(LayoutError, match=r"something else created .* during the save"):
        checkpoint.save(state(2), tmp_path / "there")
    assert step_in(tmp_path / "there") == 1


def test_another_save_into_the_same_folder_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = saving.Writer.write_data

    def beside(self: saving.Writer, *args: Any) -> Any:
        Path(self.path, "__7_0.distcp").write_bytes(b"of another save")
        return write(self, *args)

    monkeypatch.setattr(saving.Writer, "write_data", beside)
    with pytest.raises(LayoutError, match=r"none of its ranks wrote .*__7_0\.distcp\. Another save"):
        checkpoint.save(state(1), tmp_path / "there")
    assert names(tmp_path) == [".there.incomplete"]


# ------------------------------------------------------------------------------------------------ leftovers and renames
def test_what_killed_saves_have_left_is_cleaned_up(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    checkpoint.save(state(1), folder)
    for beside in (folders.incomplete(folder), folders.previous(folder)):
        shutil.copytree(folder, beside)
        (beside / ".metadata").unlink()
        (beside / ".metadata.tmp").write_bytes(b"torn")
        (beside / "__12_0.distcp").write_bytes(b"torn")
    checkpoint.save(state(2), folder, overwrite=True)
    assert step_in(folder) == 2
    assert names(tmp_path) == ["there"]
    assert names(folder) == [".metadata", "__0_0.distcp", "layoutc.json"]


@pytest.mark.parametrize("end", [folders.INCOMPLETE, folders.PREVIOUS])
@pytest.mark.parametrize("what", ["file", "folder", "tree", "link"])
def test_what_is_in_the_way_is_named_and_kept(what: str, end: str, tmp_path: Path) -> None:
    beside = tmp_path / f".there{end}"
    if what == "file":
        beside.write_text("mine")
    elif what == "link":
        (tmp_path / "elsewhere").mkdir()
        beside.symlink_to("elsewhere")
    else:
        (beside / "mine").mkdir(parents=True)
    if what == "tree":
        (beside / "mine" / "deep").write_text("mine")
    before = tree(tmp_path)
    words = "is not a folder" if what in ("file", "link") else "holds mine/, which no save writes"
    with pytest.raises(LayoutError, match=rf"{beside.name} {words}, and saving .* needs that name: move it away"):
        checkpoint.save(state(1), tmp_path / "there")
    assert tree(tmp_path) == before


def test_a_place_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match=r"can't be saved: .*\.there\.incomplete can't be written: Not a directory"):
        checkpoint.save(state(1), tmp_path / "file" / "there")
    with pytest.raises(LayoutError, match="can't be a checkpoint: it is the root"):
        checkpoint.save(state(1), "/")


def killed_between_renames(folder: Path, step: int) -> None:
    """What was there has made room, and the new one has not taken its place."""
    child = os.fork()
    if not child:
        rename = Path.rename

        def dies(self: Path, target: Path) -> Path:
            if self.name.endswith(folders.INCOMPLETE):
                os._exit(9)
            return rename(self, target)

        Path.rename = dies  # type: ignore[method-assign, assignment]
        checkpoint.save(state(step), folder, overwrite=True)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_the_previous_checkpoint_is_there_until_the_next_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between the two renames leaves nothing else; nor does the save after it lose it before it is done."""
    folder, old = tmp_path / "latest", tmp_path / ".latest.previous"
    checkpoint.save(state(1), folder)
    killed_between_renames(folder, 2)
    assert names(tmp_path) == [".latest.incomplete", ".latest.previous"]
    with pytest.warns(UserWarning, match=r"a save stopped while it replaced .*: loading .*\.latest\.previous instead"):
        assert step_in(folder) == 1

    def fails(*_: Any) -> None:
        raise LayoutError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(saving, "write_manifest", fails)
        with pytest.raises(LayoutError, match="no room"):
            checkpoint.save(state(3), folder)
    with pytest.warns(UserWarning, match="a save stopped while it replaced"):
        assert step_in(folder) == 1
    killed_between_renames(folder, 3)
    assert step_in(old) == 1
    checkpoint.save(state(4), folder)
    assert step_in(folder) == 4
    assert names(tmp_path) == ["latest"]


# ---------------------------------------------------------------------------------------------------------------- links
def test_a_link_is_the_folder_that_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    checkpoint.save(state(1), tmp_path / "disk" / "run")
    (tmp_path / "latest").symlink_to("disk/run")
    for step in (2, 3):
        checkpoint.save(state(step), tmp_path / "latest", overwrite=True)
        assert (tmp_path / "latest").is_symlink()
        assert step_in(tmp_path / "latest") == step_in(tmp_path / "disk" / "run") == step
    with pytest.raises(LayoutError, match=r"run exists: save into another folder"):
        checkpoint.save(state(4), tmp_path / "latest")
    killed_between_renames(tmp_path / "latest", 5)
    with pytest.warns(UserWarning, match="a save stopped while it replaced"):
        assert step_in(tmp_path / "latest") == 3
    checkpoint.save(state(6), tmp_path / "latest")  # a link to nothing: what it names is made
    assert step_in(tmp_path / "disk" / "run") == 6
    assert (names(tmp_path), names(tmp_path / "disk")) == (["disk", "latest"], ["run"])


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(LayoutError, match="a link to itself"):
        checkpoint.save(state(1), tmp_path / "loop", overwrite=True)


# -------------------------------------------------------------------------------------------------------------- Windows
def test_no_folder_is_synced_where_none_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has no O_DIRECTORY, refuses to open folders, and syncs only files that are open to be written."""
    synced, real_open, real_sync = list[int](), os.open, os.fsync

    def windows_open(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        number = real_open(path, flags, *rest, **options)
        if stat.S_ISDIR(os.fstat(number).st_mode) and "dir_fd" not in options:
            os.close(number)
            raise PermissionError(13, "Permission denied", str(path))
        return number

    def windows_sync(number: int) -> None:
        if not fcntl.fcntl(number, fcntl.F_GETFL) & (os.O_RDWR | os.O_WRONLY):
            raise OSError(9, "Bad file descriptor")
        synced.append(number)
        real_sync(number)

    monkeypatch.delattr(os, "O_DIRECTORY")
    monkeypatch.setattr(os, "open", windows_open)
    monkeypatch.setattr(os, "fsync", windows_sync)
    checkpoint.save(state(1), tmp_path / "there")
    checkpoint.save(state(2), tmp_path / "there", overwrite=True)
    folders.sync(tmp_path / "there" / ".metadata")
    monkeypatch.undo()
    assert step_in(tmp_path / "there") == 2
    assert synced


def test_folders_are_synced_where_they_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, synced = os.fsync, list[bool]()

    def watched(number: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(number).st_mode))
        real(number)

    monkeypatch.setattr(os, "fsync", watched)
    checkpoint.save(state(1), tmp_path / "there")
    assert synced.count(True) == 2, "the new folder, and the one that has its name"

"""The folder of a save: checks that all ranks name and see the same folder, and that it holds only checkpoint files.

A save writes to `.NAME.incomplete` next to the folder NAME. While NAME is replaced, the old folder is `.NAME.previous`.
Only checkpoint files are ever removed.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
import uuid
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from layoutc.checkpoint.common.verdicts import everywhere, from_first, rank_of, together
from layoutc.runtime.errors import LayoutError, by_value, few, printable

MANIFEST = "layoutc.json"
INCOMPLETE, PREVIOUS = ".incomplete", ".previous"  # suffixes of the folders next to a checkpoint
PARTLY = ".partly"  # suffix of an export or a conversion in progress
SEEN_WITHIN = 10.0  # seconds within which a file must be visible on other nodes
_PROBE = ".layoutc-probe-"
_FILES = re.compile(
    rf"__\d+_\d+\.distcp|(__\d+)?\.metadata(\.tmp)?|{re.escape(MANIFEST)}|{re.escape(_PROBE)}[0-9a-f]{{32}}"
)
MOST = 64 * 2**20  # maximum bytes of a companion file; tokenizers with large vocabularies have 30 MB
_BESIDE = re.compile(r".*\.(json|jinja|txt|model|tiktoken|py)|(?i:LICEN[CS]E|NOTICE).*")
# Files that describe the folder's weights, which a conversion rewrites or drops: config.json and older equivalents.
_OF_WEIGHTS = re.compile(r"(config|.*\.index|(hf_)?quant\w*_(config|q?map)|layoutc)\.json", re.IGNORECASE)


def incomplete(folder: Path) -> Path:
    """The folder that a checkpoint is written into before it is renamed into place."""
    return folder.with_name(f".{folder.name}{INCOMPLETE}")


def previous(folder: Path) -> Path:
    """The name of an old checkpoint while it is being replaced."""
    return folder.with_name(f".{folder.name}{PREVIOUS}")


def partly(path: Path) -> Path:
    """A new temporary path next to a file or folder, to write to before the rename. Creates the parent folder.

    Warns of leftover temporary paths. They may belong to a running export, so it removes none.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    like = re.compile(rf"{re.escape(f'.{path.name}.')}[0-9a-f]{{8}}{re.escape(PARTLY)}")
    if left := sorted(one.name for one in os.scandir(path.parent) if like.fullmatch(one.name)):
        told = (
            f"{path}: {few(left)} beside it is left of an export or a conversion that was stopped, or of one that "
            f"still runs; if none does: rm -r {path.with_name(left[0])}"
        )
        warnings.warn(printable(told), stacklevel=4)
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{PARTLY}")


def resolved(folder: str | os.PathLike[str]) -> Path:
    """The folder's real path, with symbolic links followed."""
    return Path(os.path.realpath(folder))


def agreed(folder: str | os.PathLike[str], overwrite: bool, group: dist.ProcessGroup | None) -> Path:
    """The folder that all ranks save into, as this rank names it. Makes its `incomplete` folder, empty. Collective.

    Raises LayoutError on all ranks if they name different folders or don't see the same one, if the folder exists and
    overwrite is off, or if it or a temporary folder next to it holds anything but a checkpoint; OSError if the folder
    can't be made.
    """
    mine = together(lambda: (os.path.abspath(folder), str(resolved(folder)), bool(overwrite)), group)
    _check_same(everywhere(mine, group))
    path = Path(mine[1])
    probe, host = from_first(lambda: (_prepared(path, overwrite), socket.gethostname()), group)
    try:
        together(lambda: _check_seen(incomplete(path) / probe, host), group)
    finally:
        if rank_of(group) == 0:
            (incomplete(path) / probe).unlink(missing_ok=True)
    return path


def _check_same(intents: Sequence[tuple[str, str, bool]]) -> None:
    """Raises LayoutError if ranks name different folders, or disagree about overwrite."""
    named, real, overwrites = ([one[part] for one in intents] for part in range(3))
    if len(set(named)) > 1 and len(set(real)) > 1:
        raise LayoutError(
            f"ranks save into different folders: {_by_rank(named)}. A checkpoint is one folder: choose its name on one "
            "rank, and send it to all (torch.distributed.broadcast_object_list)"
        )
    if len(set(overwrites)) > 1:
        raise LayoutError(f"ranks disagree about overwrite: {_by_rank(overwrites)}. Pass the same on all ranks")


def _by_rank(values: Sequence[object]) -> str:
    ranks = by_value(enumerate(map(str, values)))
    return few([f"{value} on rank {few([*map(str, on)])}" for value, on in ranks.items()], between="; ")


def _prepared(folder: Path, overwrite: bool) -> str:
    """On the first rank: makes an empty folder to write into, with a probe file. Returns the probe's name."""
    if not folder.name or folder.is_symlink():  # `resolved` could not follow the link
        raise LayoutError(f"{folder} can't be a checkpoint: it is {'a link to itself' if folder.name else 'the root'}")
    if os.path.lexists(folder):
        if not overwrite:
            raise LayoutError(f"{folder} exists: save into another folder, or pass overwrite=True")
        _check_replaceable(folder)
    partial = incomplete(folder)
    for beside in (partial, previous(folder)):
        _check_left(beside, folder)
    probe = _PROBE + uuid.uuid4().hex
    try:
        partial.mkdir(parents=True, exist_ok=True)
        for left in partial.iterdir():
            left.unlink()
        (partial / probe).write_text(socket.gethostname(), encoding="utf-8")
    except OSError as error:
        raise OSError(f"{folder} can't be saved: {partial} can't be written: {error.strerror or error}") from error
    return probe


def foreign(folder: Path) -> list[str]:
    """The sorted names of everything in a folder that is not a checkpoint file; subfolders end with a slash."""
    with os.scandir(folder) as entries:
        names = [
            f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name
            for entry in entries
            if not (_FILES.fullmatch(entry.name) and entry.is_file(follow_symlinks=False))
        ]
    return sorted(names)


def _check_replaceable(folder: Path) -> None:
    if not folder.is_dir():
        raise LayoutError(f"{folder} is a file: overwrite=True replaces a checkpoint, which is a folder")
    if names := foreign(folder):
        raise LayoutError(
            f"{folder} holds {few(names)}, which is not part of a checkpoint: overwrite=True replaces a checkpoint "
            f"and deletes nothing else. Save into another folder, such as {folder / 'checkpoint'}, or move that away"
        )


def _check_left(beside: Path, folder: Path) -> None:
    """Raises LayoutError if `beside` exists and is not a leftover of an earlier save."""
    if not os.path.lexists(beside):
        return
    what = "is not a folder"
    if not beside.is_symlink() and beside.is_dir():
        if not (names := foreign(beside)):
            return
        what = f"holds {few(names)}, which no save writes"
    raise LayoutError(f"{beside} {what}, and saving {folder} needs that name: move it away")


def _check_seen(probe: Path, host: str) -> None:
    """Raises LayoutError if this rank does not see the probe file of the first rank."""
    end = time.monotonic() + SEEN_WITHIN
    while not probe.is_file():
        if time.monotonic() > end:
            raise LayoutError(
                f"{probe.parent} on host {socket.gethostname()} is not the folder that rank 0 made on host {host}: "
                "they have different file systems there. Save into a folder on a file system that all hosts mount"
            )
        time.sleep(0.05)
        if probe.parent.is_dir():
            os.listdir(probe.parent)  # refreshes the cache of network file systems


def publish(folder: Path, overwrite: bool) -> None:
    """Renames a complete folder into place. Raises LayoutError if the name is now taken and overwrite is off."""
    partial, old = incomplete(folder), previous(folder)
    sync(partial)
    if os.path.lexists(folder):
        if not overwrite:
            raise LayoutError(
                f"something else created {folder} during the save: the complete checkpoint is in {partial}, which can "
                "be renamed"
            )
        if old.exists():
            remove(old)
        folder.rename(old)
    partial.rename(folder)
    sync(folder.parent)
    if old.exists():
        remove(old)


def remove(folder: Path) -> None:
    """Removes a checkpoint's files. Keeps the folder, with a warning, if it holds anything else."""
    names = foreign(folder)
    for entry in folder.iterdir():
        if entry.name not in names and f"{entry.name}/" not in names:
            entry.unlink()
    if names:
        warnings.warn(
            f"{folder} is kept: it holds {printable(few(names))}, which is not part of a checkpoint",
            stacklevel=2,
        )
    else:
        folder.rmdir()


def sync(path: Path) -> None:
    """Syncs a file's bytes, or a folder's names, to disk: until it returns, a machine crash may lose them.

    Does nothing for folders on systems that can't open them: Windows makes names durable by itself.
    """
    is_folder = path.is_dir()
    if is_folder and not hasattr(os, "O_DIRECTORY"):
        return
    number = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)  # Windows syncs only writable files
    try:
        os.fsync(number)
    finally:
        os.close(number)


def copy_companions(source: str | os.PathLike[str] | None, folder: Path) -> tuple[str, ...]:
    """Copies companion files of a model's weights into `folder`: tokenizer, templates, generation settings. Returns
    their names, sorted; () if `source` is None or a file.

    Copies files of at most 64 MiB, but no folders, no weights, and no file that describes the source's quantization.
    """
    names = list[str]()
    for path in sorted(Path(source).iterdir()) if source is not None and Path(source).is_dir() else ():
        known = (
            _BESIDE.fullmatch(path.name) and not _OF_WEIGHTS.fullmatch(path.name) and not (folder / path.name).exists()
        )
        if known and path.is_file() and path.stat().st_size <= MOST:
            shutil.copyfile(path, folder / path.name)
            sync(folder / path.name)
            names.append(path.name)
    return tuple(names)

"""The folder of a save: all ranks name the same one and see it, and nothing in it is anybody else's.

Beside a folder NAME stand `.NAME.incomplete`, which a save writes, and `.NAME.previous`: what NAME was, for the moment
in which another takes its place. Nothing is removed that is no file of a checkpoint.
"""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from layoutc.checkpoint.common.verdicts import everywhere, from_first, rank_of, together
from layoutc.runtime.errors import LayoutError

MANIFEST = "layoutc.json"
INCOMPLETE, PREVIOUS = ".incomplete", ".previous"  # how the names of folders beside end
SEEN_WITHIN = 10.0  # seconds that a file may take to be seen by other nodes
_PROBE = ".layoutc-probe-"
_FILES = re.compile(
    rf"__\d+_\d+\.distcp|(__\d+)?\.metadata(\.tmp)?|{re.escape(MANIFEST)}|{re.escape(_PROBE)}[0-9a-f]{{32}}"
)
_SHOWN = 6  # names that a message spells out


def incomplete(folder: Path) -> Path:
    """Where a checkpoint is written."""
    return folder.with_name(f".{folder.name}{INCOMPLETE}")


def previous(folder: Path) -> Path:
    """Where a checkpoint stands for the moment in which another takes its place."""
    return folder.with_name(f".{folder.name}{PREVIOUS}")


def resolved(folder: str | os.PathLike[str]) -> Path:
    """The folder itself: a symbolic link is the folder that it leads to, now."""
    return Path(os.path.realpath(folder))


def agreed(folder: str | os.PathLike[str], overwrite: bool, group: dist.ProcessGroup | None) -> Path:
    """The folder that all ranks save into, by the name that it has on this one; what a save writes lies in
    `incomplete` of it, which is there and empty. Collective.

    Raises LayoutError on all ranks where they name different folders, or do not see the same one, where it exists and
    may not be replaced, and where something that is no checkpoint stands in it, or in the place of a folder beside it;
    OSError where it can't be made.
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


def _check_same(told: Sequence[tuple[str, str, bool]]) -> None:
    """Raises LayoutError where ranks have named different folders, or mean to do different things."""
    given, real, overwrites = ([one[part] for one in told] for part in range(3))
    if len(set(given)) > 1 and len(set(real)) > 1:
        raise LayoutError(
            f"ranks save into different folders: {_by_rank(given)}. A checkpoint is one folder: name it on one rank, "
            "and send the name to all (torch.distributed.broadcast_object_list)"
        )
    if len(set(overwrites)) > 1:
        raise LayoutError(f"ranks disagree about overwrite: {_by_rank(overwrites)}. Pass the same on all ranks")


def _by_rank(values: Sequence[object]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    found = [f"{value} on rank {_few([str(rank) for rank in on])}" for value, on in ranks.items()]
    return "; ".join(found[:_SHOWN]) + (f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _prepared(folder: Path, overwrite: bool) -> str:
    """On the first rank: makes an empty folder to write in, and a file in it, whose name it returns."""
    if not folder.name or folder.is_symlink():  # a link that `resolved` could not follow
        raise LayoutError(f"{folder} can't be a checkpoint: it is {'a link to itself' if folder.name else 'the root'}")
    if os.path.lexists(folder):
        if not overwrite:
            raise LayoutError(f"{folder} exists: save into another folder, or with overwrite=True")
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
        raise OSError(f"{partial} can't be written, where {folder} is saved: {error.strerror or error}") from error
    return probe


def foreign(folder: Path) -> list[str]:
    """The names of what lies in a folder and is no file of a checkpoint, in order; folders end with a slash."""
    with os.scandir(folder) as entries:
        found = [
            f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name
            for entry in entries
            if not (_FILES.fullmatch(entry.name) and entry.is_file(follow_symlinks=False))
        ]
    return sorted(found)


def _check_replaceable(folder: Path) -> None:
    if not folder.is_dir():
        raise LayoutError(f"{folder} is a file: overwrite=True replaces a checkpoint, which is a folder")
    if names := foreign(folder):
        raise LayoutError(
            f"{folder} holds {_few(names)}, which is no part of a checkpoint: overwrite=True replaces a checkpoint and "
            f"deletes nothing else. Save into another folder, such as {folder / 'checkpoint'}, or move that away"
        )


def _check_left(beside: Path, folder: Path) -> None:
    """Raises LayoutError where what stands beside a folder is not what an earlier save has left."""
    if not os.path.lexists(beside):
        return
    what = "is no folder"
    if not beside.is_symlink() and beside.is_dir():
        if not (names := foreign(beside)):
            return
        what = f"holds {_few(names)}, which no save has written"
    raise LayoutError(f"{beside} {what}, and saving {folder} needs that name: move it away")


def _check_seen(probe: Path, host: str) -> None:
    """Raises LayoutError where this rank does not see a file that the first one has written."""
    end = time.monotonic() + SEEN_WITHIN
    while not probe.is_file():
        if time.monotonic() > end:
            raise LayoutError(
                f"{probe.parent} on host {socket.gethostname()} is not the folder that rank 0 has made on host {host}: "
                "each has a file system of its own there. Save into a folder of one that all hosts mount"
            )
        time.sleep(0.05)
        if probe.parent.is_dir():
            os.listdir(probe.parent)  # has clients of network file systems ask again


def publish(folder: Path, overwrite: bool) -> None:
    """Gives a complete folder its name. Raises LayoutError where that has come to be taken, and may not be replaced."""
    partial, old = incomplete(folder), previous(folder)
    sync(partial)
    if os.path.lexists(folder):
        if not overwrite:
            raise LayoutError(f"{folder} has come to be while it was saved: the new one is left in {partial}")
        if old.exists():
            remove(old)
        folder.rename(old)
    partial.rename(folder)
    sync(folder.parent)
    if old.exists():
        remove(old)


def remove(folder: Path) -> None:
    """Removes a checkpoint. What else lies in its folder stays there, and a warning tells of it."""
    names = foreign(folder)
    for entry in folder.iterdir():
        if entry.name not in names and f"{entry.name}/" not in names:
            entry.unlink()
    if names:
        warnings.warn(f"{folder} is left, since it holds {_few(names)}, which is no part of a checkpoint", stacklevel=2)
    else:
        folder.rmdir()


def sync(path: Path) -> None:
    """Makes what was written to a file, or the names in a folder, last: until it returns, a crash of the machine may
    undo it. Where the system opens no folders, as Windows, which keeps names by itself, it does nothing for them."""
    is_folder = path.is_dir()
    if is_folder and not hasattr(os, "O_DIRECTORY"):
        return
    number = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)  # Windows syncs only what may be written
    try:
        os.fsync(number)
    finally:
        os.close(number)

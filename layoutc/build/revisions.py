"""Reads specs at a git revision with the `git` command. Changes nothing."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


class RevisionError(Exception):
    """Raised if git can't answer; the message says what to do."""


@dataclass(frozen=True)
class SpecFile:
    """A spec file at a revision: name in the folder, and bytes."""

    name: str
    content: bytes


def specs_at(revision: str, folder: Path) -> list[SpecFile]:
    """The spec files in `folder` at `revision`, sorted by name; [] if the folder did not exist yet.

    Raises RevisionError without git, without a repository, or for an unknown revision.
    """
    commit = _commit(revision, folder)
    listed = _git(folder, "ls-tree", "-z", "--name-only", commit, "--", "./", failed=f"git can't list {revision}")
    names = sorted(name for name in listed.decode("utf-8", "surrogateescape").split("\0") if name)
    return [
        SpecFile(name, _git(folder, "show", f"{commit}:./{name}", failed=f"git can't read {name} of {revision}"))
        for name in names
        if name.endswith((".yaml", ".yml"))
    ]


def text_at(revision: str, folder: Path, name: str) -> str | None:
    """A text file in `folder` at `revision`; None if it did not exist, or if `folder` does not exist now."""
    if not folder.is_dir():
        return None
    try:
        content = _git(folder, "show", f"{_commit(revision, folder)}:./{name}", failed=f"no {name} at {revision}")
        return content.decode("utf-8")
    except (RevisionError, UnicodeDecodeError):
        return None


def _commit(revision: str, folder: Path) -> str:
    outside = f"{folder} is not in a git repository, so there is nothing to compare with"
    _git(folder, "rev-parse", "--show-prefix", failed=outside)
    spelled = f"{revision}^{{commit}}"
    hint = f"{revision} is not a revision of this repository; in a shallow clone, fetch it first: git fetch origin"
    commit = _git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", spelled, failed=hint)
    return commit.decode().strip()


def _git(folder: Path, *arguments: str, failed: str) -> bytes:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        raise RevisionError("the `git` command is not installed") from None
    if done.returncode:
        raise RevisionError(failed)
    return done.stdout

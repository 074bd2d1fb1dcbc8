"""What ranks tell each other: which problems a message spells out, in which order, and as which exception."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from layoutc.checkpoint.common import folders, verdicts
from layoutc.checkpoint.common.verdicts import LONGEST, SHOWN, Problem, agree, noted, together
from layoutc.runtime import errors
from layoutc.runtime.errors import DamagedError, LayoutError


def told(reports: list[tuple[list[Problem], str]], monkeypatch: pytest.MonkeyPatch, what: str = "differ") -> str:
    """What `agree` raises where ranks report this; "" if nothing."""
    monkeypatch.setattr(verdicts, "everywhere", lambda value, group: reports)
    try:
        agree([], None, what=what)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("count", [1, SHOWN, SHOWN + 1, SHOWN + 5])
def test_so_many_problems_are_spelled_out(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [Problem("DamagedError", f"file {number} is torn") for number in range(count)]
    said = told([(problems, ""), (problems[:1], "")], monkeypatch)
    first, *rest = said.split("\n  ")
    assert first == "DamagedError: file 0 is torn", "all ranks say so, so that none is named"
    assert rest[: SHOWN - 1] == [f"rank 0: file {number} is torn" for number in range(1, min(count, SHOWN))]
    assert rest[SHOWN - 1 :] == ([f"and {count - SHOWN} more"] if count > SHOWN else [])


def test_the_first_problem_decides_the_kind_and_ranks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Problem("FileExistsError", "it is there"), Problem("LayoutError", "no such recipe")
    assert told([([], ""), ([other], ""), ([one, other], "")], monkeypatch) == (
        "LayoutError: rank 1, 2: no such recipe\n  rank 2: it is there"
    )
    assert told([([], "a"), ([], "b"), ([], "a"), ([], "c")], monkeypatch) == "LayoutError: rank 1, 3 and rank 0 differ"
    assert told([([], "a"), ([], "a")], monkeypatch) == ""


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (DamagedError("torn"), "DamagedError", "torn"),
        (ValueError("no"), "ValueError", "no"),
        (FileNotFoundError("gone"), "FileNotFoundError", "gone"),
        (PermissionError("closed"), "OSError", "PermissionError: closed"),
        (KeyError("a"), "LayoutError", "KeyError: 'a'"),
        (ValueError("x" * LONGEST), "ValueError", "x" * LONGEST),
        (ValueError("x" * (LONGEST + 1)), "ValueError", "x" * LONGEST + " ..."),
    ],
)
def test_what_is_raised_is_noted_and_raised_again(error: Exception, kind: str, text: str) -> None:
    problems: list[Problem] = []
    with noted(problems):
        raise error
    assert problems == [Problem(kind, text)]

    def work() -> Any:
        raise error

    with pytest.raises(verdicts.KINDS[kind]) as again:
        together(work, None)
    assert (type(again.value), str(again.value)) == (verdicts.KINDS[kind], text)


def test_what_is_not_an_exception_of_a_program_is_not_noted() -> None:
    problems: list[Problem] = []
    with pytest.raises(KeyboardInterrupt), noted(problems):
        raise KeyboardInterrupt
    assert problems == []


@pytest.mark.parametrize("count", [1, errors.SHOWN, errors.SHOWN + 1, errors.SHOWN + 3])
def test_so_many_names_are_spelled_out(count: int, tmp_path: Path) -> None:
    """Of files in a folder that is no checkpoint, of ranks, and of what ranks name."""
    names = [f"file{number}" for number in range(count)]
    shown, left = names[: errors.SHOWN], count - errors.SHOWN
    assert errors.few(names) == ", ".join(shown) + (f" and {left} more" if left > 0 else "")
    by_rank = "; ".join(f"{name} on rank {rank}" for rank, name in enumerate(shown))
    assert folders._by_rank(names) == by_rank + (f"; and {left} more" if left > 0 else "")


def test_ranks_name_one_folder_and_one_answer() -> None:
    """Other spellings of a folder are the same folder."""
    folders._check_same([("a", "/run/a", True), ("./a", "/run/a", True)])
    folders._check_same([("a", "/one/a", False), ("a", "/other/a", False)])  # each machine has its own mount
    with pytest.raises(LayoutError, match=r"into different folders: a on rank 0, 2; b on rank 1\. A checkpoint is one"):
        folders._check_same([("a", "/run/a", True), ("b", "/run/b", True), ("a", "/run/a", True)])
    with pytest.raises(LayoutError, match=r"disagree about overwrite: True on rank 0; False on rank 1\. Pass the same"):
        folders._check_same([("a", "/run/a", True), ("a", "/run/a", False)])

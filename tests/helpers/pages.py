"""What README and the pages of docs/ have between fences."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from places import ROOT

PAGES = [*ROOT.glob("README.md"), *sorted((ROOT / "docs" / "pages").glob("*.md"))]  # none outside of a checkout


class Block(NamedTuple):
    """What stands between two fences."""

    language: str
    title: str | None
    text: str


def blocks(page: Path) -> list[Block]:
    """All of a page, in order."""
    found = re.findall(r"^```(\w*)(?: title=\"(.*?)\")?\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    return [Block(language, title or None, text) for language, title, text in found]


def programs(page: Path) -> dict[str, str]:
    """The whole programs of a page, by the file that each is to be written to."""
    return {block.title: block.text for block in blocks(page) if block.title is not None}


def lines(page: Path) -> list[list[str]]:
    """The words of each command of a page, in order; without where the environment's programs lie."""
    shell = "".join(block.text for block in blocks(page) if block.language == "sh").replace("\\\n", " ")
    words = [shlex.split(line.removeprefix(".venv/bin/")) for line in shell.splitlines()]
    return [one for one in words if one and one[1:3] != ["-m", "venv"]]


def starts(page: Path) -> list[list[str]]:
    """The words after torchrun of each line that starts one of the page's programs."""
    return [rest for word, *rest in lines(page) if word == "torchrun" and set(rest) & set(programs(page))]


def missing(page: Path) -> list[str]:
    """Packages that a page's programs import and this environment lacks."""
    words = {word for text in programs(page).values() for word in re.findall(r"^(?:from|import) (\w+)", text, re.M)}
    return sorted(word for word in words if importlib.util.find_spec(word) is None)

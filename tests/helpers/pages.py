"""What README and the pages of docs/ have between fences."""

from __future__ import annotations

import re
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


def starts(page: Path) -> list[list[str]]:
    """The words after torchrun of each line that starts one of the page's programs."""
    shell = "".join(block.text for block in blocks(page) if block.language == "sh").replace("\\\n", " ")
    words = [line.removeprefix(".venv/bin/").split() for line in shell.splitlines()]
    return [rest for word, *rest in filter(None, words) if word == "torchrun" and set(rest) & set(programs(page))]

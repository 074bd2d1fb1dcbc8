"""The page: one HTML text with the template, style, scripts and exported data. It loads nothing."""

from __future__ import annotations

import html
import json
from importlib.resources import files

from layoutc.explorer.data import Page
from layoutc.report.describe import as_data

SCRIPTS = ("maps", "state", "words", "weight", "memory", "record", "values", "readout", "figures", "spec", "main")
LARGEST = 500 * 1000  # the most bytes of a page


def render(page: Page) -> str:
    """Renders a page's HTML. Equal data gives equal text.

    Raises ValueError if it would have more than LARGEST bytes.
    """
    folder = files("layoutc.explorer").joinpath("page")
    parts = {
        "title": html.escape(f"{', '.join(recipe.name for recipe in page.recipes)} - layoutc"),
        "style": folder.joinpath("page.css").read_text(encoding="utf-8"),
        "data": _as_json(page),
        "script": "\n".join(folder.joinpath(f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS),
    }
    before, *rest = folder.joinpath("page.html").read_text(encoding="utf-8").split("@")
    # Names alternate with the text between them, so inserted text is never scanned for names.
    text = "".join((before, *(parts[name] if at % 2 == 0 else name for at, name in enumerate(rest))))
    if len(text.encode()) > LARGEST:
        count = len(page.recipes)
        raise ValueError(f"a page of {count} recipes would have more than {LARGEST:,} bytes; name fewer recipes")
    return text


def _as_json(page: Page) -> str:
    """JSON that is safe in a script element: no text of a spec can end it."""
    text = json.dumps(as_data(page), ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")

"""Writes and reads JSON that states a weight's sizes, by a template that has names in place of the sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_sizes(template: Any, sizes: Mapping[str, int]) -> Any:
    """The template with numbers in place of the names of sizes."""
    if isinstance(template, dict):
        return {key: with_sizes(one, sizes) for key, one in template.items()}
    if isinstance(template, list):
        return [with_sizes(one, sizes) for one in template]
    return sizes.get(template, template) if isinstance(template, str) else template


def sizes_in(template: Any, text: Any) -> dict[str, int]:
    """The numbers in a JSON value where the template has "rows" and "columns"."""
    if template in ("rows", "columns"):
        return {template: text} if type(text) is int and 0 < text < 2**63 else {}
    pairs: list[tuple[Any, Any]] = []
    if isinstance(template, Mapping) and isinstance(text, Mapping):
        pairs = [(one, text.get(key)) for key, one in template.items()]
    elif isinstance(template, list) and isinstance(text, list) and len(template) == len(text):
        pairs = list(zip(template, text, strict=True))
    return {key: size for one, there in pairs for key, size in sizes_in(one, there).items()}

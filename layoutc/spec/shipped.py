"""Reads the YAML files beside this module: formats, rules, and other projects' words.

They are layoutc's own, so PyYAML may read them in C, which is eight times as fast. `source.py`, which reads what users
write, keeps to one parser for the sake of its messages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def load(name: str) -> Any:
    """The data of a file."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))

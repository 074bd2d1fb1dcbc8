"""Reads the YAML files next to this module: formats, rules, and other projects' words.

layoutc ships them, so PyYAML may parse them in C, which is eight times as fast. `source.py`, which reads users' files,
sticks to one parser for consistent messages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def load(name: str) -> Any:
    """The data of a file."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))

"""What benchmarks wrote as JSON, told apart and put together, for `charts.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Curves = dict[str, list[list[float]]]


@dataclass
class Found:
    """What files have, by what measured it."""

    steps: list[dict[str, Any]] = field(default_factory=list)  # rows of step.py, each with its `mode`
    host: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    gathers: list[dict[str, Any]] = field(default_factory=list)
    kernels: list[dict[str, Any]] = field(default_factory=list)  # kernels and peers
    curves: Curves = field(default_factory=dict)
    machines: list[str] = field(default_factory=list)


def kind_of(data: Any) -> str:
    """What wrote a file. Raises ValueError."""
    if isinstance(data, dict) and isinstance(data.get("kind"), str):
        return str(data["kind"])
    if isinstance(data, list) and data and all(isinstance(row, dict) and "median_ms" in row for row in data):
        return "step"
    if isinstance(data, dict):
        if "copy_bytes_per_us" in data:
            return "kernels"
        if "runs" in data:
            return "host"
        if all("card_us" in row for row in data.get("rows") or [{}]):
            return "gather"
        if data and all(isinstance(runs, list) and runs and isinstance(runs[0], list) for runs in data.values()):
            return "curves"
    raise ValueError("no benchmark that is drawn wrote this")


def read(paths: Iterable[Path]) -> Found:
    """All files together. Raises ValueError for one that no benchmark wrote."""
    found = Found()
    for path in paths:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            _add(found, kind_of(data), data, path)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from None
    return found


def _add(found: Found, kind: str, data: Any, path: Path) -> None:
    if kind == "step":
        old = isinstance(data, list)
        mode = re.sub(r"[\d_-]+$", "", path.stem) if old else ("eager" if data["eager"] else "compiled")
        if not old and data.get("saves"):
            mode += f", saves {data['saves']}"
        found.steps += [row | {"mode": mode} for row in (data if old else data["rows"])]
    elif kind == "host":
        for form, runs in data["runs"].items():
            found.host.setdefault(form.removesuffix(":float8"), []).extend(runs)
    elif kind == "gather":
        found.gathers += data["rows"]
    elif kind == "kernels":
        found.kernels += [row for row in (*data["kernels"], *data["peers"]) if row["dtype"] == "bfloat16"]
    elif kind == "curves":
        for name, losses in data.items():
            found.curves.setdefault(name, []).extend(losses)
    else:
        raise ValueError(f"it is of kind '{kind}', which is not drawn")
    if isinstance(data, dict) and isinstance(data.get("device"), str):
        ranks = f", {data['world']} ranks" if "world" in data else ""
        machine = f"{data['device']}, torch {data['torch']}{ranks}"
        if machine not in found.machines:
            found.machines.append(machine)

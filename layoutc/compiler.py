"""The pipeline as functions: spec text -> spec -> layout -> plan -> files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from layoutc import emit, files, layout, plan, schema
from layoutc.diagnostics import Diagnostic


@dataclass(frozen=True)
class BuildResult:
    """What a build found and would write, or has written."""

    states: list[files.FileState]
    diagnostics: list[Diagnostic]


def plan_for(spec: schema.Spec) -> plan.Plan:
    """A checked spec -> its plan."""
    return plan.derive(layout.resolve(spec))


def compile_spec(spec: schema.Spec, sha256: str) -> dict[str, str]:
    """A checked spec -> {file name: unformatted text}."""
    return emit.emit(plan_for(spec), sha256)


def build(specs: list[Path], out: Path, check: bool) -> BuildResult:
    """Compiles spec files into `out`; writes nothing when a spec has an error, or with `check`.

    Stale files are reported and left. Raises OSError for files that can't be read or written.
    """
    diagnostics: list[Diagnostic] = []
    rendered: dict[str, str] = {}
    recipes: list[tuple[str, str]] = []
    failed = False
    for path in specs:
        data = path.read_bytes()
        spec, found = schema.read_spec(data.decode("utf-8", errors="replace"), str(path))
        diagnostics += found
        if spec is None:
            failed = True
            continue
        recipes.append((spec.name, spec.summary.rstrip(".")))
        for name, text in compile_spec(spec, hashlib.sha256(data).hexdigest()).items():
            rendered[f"{spec.name}/{name}"] = text
    if failed:
        return BuildResult([], diagnostics)
    formatted = emit.format_files({**rendered, "__init__.py": emit.emit_index(recipes)})
    states = files.compare(out, formatted)
    if not check:
        files.write(out, formatted, states)
    return BuildResult(states, diagnostics)

"""The pipeline as functions: spec text -> spec -> layout -> plan -> files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from layoutc import emit, files, layout, plan, schema
from layoutc.diagnostics import Diagnostic, has_errors


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


def build(specs: list[Path], out: Path, check: bool, *, whole: bool = True) -> BuildResult:
    """Compiles spec files into `out`; writes nothing when a spec has an error, or with `check`.

    `whole`: these are all specs of the folder, so other files of ours there are stale (reported, and left). Otherwise
    other recipes stay in the package's index. Raises OSError for files that can't be read or written.
    """
    diagnostics: list[Diagnostic] = []
    rendered: dict[str, str] = {}
    made: dict[str, str] = {}  # recipe -> summary
    for path in specs:
        data = path.read_bytes()
        spec, found = schema.read_spec_bytes(data, str(path))
        diagnostics += found
        if spec is None:
            continue
        if spec.name in made:
            diagnostics.append(_twice(spec.name, path))
            continue
        made[spec.name] = spec.summary.rstrip(".")
        texts = compile_spec(spec, hashlib.sha256(data).hexdigest())
        rendered |= {f"{spec.name}/{name}": text for name, text in texts.items()}
    if has_errors(diagnostics):
        return BuildResult([], diagnostics)
    recipes = made if whole else {**files.recipes_in(out), **made}
    formatted = emit.format_files({**rendered, "__init__.py": emit.emit_index(list(recipes.items()))})
    states = files.compare(out, formatted, stale=whole)
    if not check:
        files.write(out, formatted, states)
    return BuildResult(states, diagnostics)


def _twice(name: str, path: Path) -> Diagnostic:
    return Diagnostic(
        "LC904",
        f"recipe `{name}` is made by two specs",
        str(path),
        why="the second would overwrite the first",
        help="rename one of them, or leave it out",
    )

"""The pipeline as functions: spec text -> spec -> layout -> plan -> files."""

from __future__ import annotations

import hashlib
import traceback
from dataclasses import dataclass
from pathlib import Path

from layoutc.build import files
from layoutc.diagnostics.diagnostic import Diagnostic, has_errors
from layoutc.emit import emit
from layoutc.layout import layout
from layoutc.plan import plan
from layoutc.spec import schema
from layoutc.spec.checks.read import read_spec_bytes


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


def read(content: bytes, path: str) -> tuple[schema.Spec | None, dict[str, str], list[Diagnostic]]:
    """A spec file's bytes -> the spec, its unformatted files, every finding. None and no files where one is an error.

    What is found sound and can't be printed all the same is a finding of its own. Never raises.
    """
    spec, found = read_spec_bytes(content, path)
    if spec is None:
        return None, {}, found
    try:
        return spec, compile_spec(spec, hashlib.sha256(content).hexdigest()), found
    except Exception as error:
        return None, {}, [*found, _unprintable(error, path)]


def check(content: bytes, path: str) -> list[Diagnostic]:
    """Every finding about a spec file's bytes: the whole pipeline, up to text that Python can compile. Never raises."""
    _, texts, found = read(content, path)
    for name, text in texts.items():
        try:
            compile(text, name, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            found = [*found, _unprintable(error, path)]
    return found


def build(specs: list[Path], out: Path, check: bool, *, whole: bool = True) -> BuildResult:
    """Compiles spec files into `out`; writes nothing when a spec has an error, a file is in the way, or with `check`.

    `whole`: these are all specs of the folder, so other files of ours there are stale (reported, and left). Otherwise
    other recipes stay in the package's index. Raises OSError for files that can't be read or written, and RuntimeError
    where ruff is missing.
    """
    diagnostics: list[Diagnostic] = []
    rendered: dict[str, str] = {}
    made: dict[str, str] = {}  # recipe -> summary
    for path in specs:
        spec, texts, found = read(path.read_bytes(), str(path))
        diagnostics += found
        if spec is None:
            continue
        if spec.name in made:
            diagnostics.append(_twice(spec.name, path))
            continue
        made[spec.name] = spec.summary.rstrip(".")
        rendered |= {f"{spec.name}/{name}": text for name, text in texts.items()}
    if has_errors(diagnostics):
        return BuildResult([], diagnostics)
    others, broken = ({}, []) if whole else files.recipes_in(out, besides=made)
    recipes = {**others, **made}
    formatted = emit.format_files({**rendered, files.INDEX: emit.emit_index(list(recipes.items()))})
    states = files.compare(out, formatted, stale=whole)
    diagnostics += [_unreadable(state) for state in broken]
    diagnostics += [_in_the_way(state, out) for state in states if state.status == "blocked"]
    if has_errors(diagnostics) and not check:
        return BuildResult([], diagnostics)
    if not check:
        files.write(out, formatted, states)
    return BuildResult([state for state in states if state.status != "blocked"], diagnostics)


def _unprintable(error: Exception, path: str) -> Diagnostic:
    """A spec for which the compiler itself fails."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return Diagnostic(
        "LC907",
        f"layoutc can't write the code of this spec: {type(error).__name__}{at}",
        path,
        why=f"{error}; the spec has no error that layoutc knows of, so this is a mistake in layoutc",
        help="report it with this spec",
    )


def _in_the_way(state: files.FileState, out: Path) -> Diagnostic:
    """What keeps the build from writing where it must."""
    return Diagnostic(
        "LC905",
        f"this is in the way of a generated file: {state.obstacle}",
        str(state.path),
        why="layoutc replaces only files that begin with its own mark; nothing was written",
        help=f"move it away, or build into another folder: `--out {out / 'quant'}`",
    )


def _unreadable(state: files.FileState) -> Diagnostic:
    """A recipe that a build of others would drop from the index."""
    return Diagnostic(
        "LC906",
        f"this generated file can't be read: {state.obstacle}",
        str(state.path),
        why="the package's index lists this recipe, with the summary that stands there; nothing was written",
        help=f"build it again with its spec beside the others, or delete {state.path.parent}",
    )


def _twice(name: str, path: Path) -> Diagnostic:
    return Diagnostic(
        "LC904",
        f"recipe `{name}` is made by two specs",
        str(path),
        why="the second would overwrite the first",
        help="rename one of them, or leave it out",
    )

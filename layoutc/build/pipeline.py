"""The pipeline as functions: spec text -> spec -> layout -> plan -> files."""

from __future__ import annotations

import hashlib
import re
import traceback
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from layoutc.build import files, operands
from layoutc.diagnostics.diagnostic import Diagnostic, has_errors
from layoutc.emit import emit
from layoutc.layout import layout
from layoutc.plan import plan
from layoutc.plan.kernels import missing
from layoutc.spec import schema


@dataclass(frozen=True)
class BuildResult:
    """A build's findings, and the files that it would write or has written."""

    states: list[files.FileState]
    diagnostics: list[Diagnostic]


def plan_for(spec: schema.Spec, others: Mapping[str, layout.Layout] | None = None) -> plan.Plan:
    """A checked spec -> its plan. others: the layouts of the recipes that it names."""
    return plan.derive(layout.resolve(spec), others)


def compile_spec(
    spec: schema.Spec, sha256: str, others: Mapping[str, layout.Layout] | None = None, path: str | None = None
) -> dict[str, str]:
    """A checked spec -> {file name: unformatted text}. others: as in plan_for. path: the spec's."""
    made = plan_for(spec, others)
    return emit.emit(made, sha256, operands.base_of(made.layout, others, path) if others and path else None)


def read(content: bytes, path: str) -> tuple[schema.Spec | None, dict[str, str], list[Diagnostic]]:
    """A spec file's bytes -> (spec, unformatted files, all findings); None and no files if a finding is an error.

    If the compiler fails on a valid spec, that is a finding too. Never raises.
    """
    spec, found = operands.read_spec(content, path)
    if spec is None:
        return None, {}, list(found)
    others, findings = operands.layouts_of(spec, content, path)
    diagnostics = [*found, *findings]
    if has_errors(findings):
        return None, {}, diagnostics
    try:
        return spec, compile_spec(spec, hashlib.sha256(content).hexdigest(), others, path), diagnostics
    except Exception as error:
        return None, {}, [*diagnostics, _unprintable(error, path)]


def written(content: bytes, path: str) -> dict[str, str]:
    """{name: text} of the files that `build` would write for a spec; {} if it has errors.

    Raises RuntimeError if ruff is missing.
    """
    return emit.format_files(read(content, path)[1])


def check(content: bytes, path: str) -> list[Diagnostic]:
    """All findings about a spec file's bytes, from the spec to text that Python must compile. Never raises."""
    _, texts, diagnostics = read(content, path)
    for name, text in texts.items():
        try:
            compile(text, name, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            diagnostics = [*diagnostics, _unprintable(error, path)]
    return diagnostics


def no_kernels(content: bytes, path: str) -> str | None:
    """Which kernels a recipe lacks, and why; None if it lacks none, or if its spec has errors."""
    spec, _ = operands.read_spec(content, path)
    if spec is None or not (lacking := missing(layout.resolve(spec))):
        return None
    if len(lacking) == 3:
        return f"no kernels, so the reference serves every device: {lacking[0][1]}"
    return "; ".join(f"no kernel to {what}, so the reference does on every device: {why}" for what, why in lacking)


def build(specs: Iterable[Path], out: Path, check: bool, *, whole: bool = True) -> BuildResult:
    """Compiles spec files into `out`. Writes nothing if a spec has an error, if a file is in the way, or with `check`.

    whole: `specs` are all specs, so layoutc's other files in `out` are stale; they are reported, not removed. Otherwise
    other recipes stay in the package's index. Raises OSError for unreadable files, RuntimeError without ruff.
    """
    diagnostics: list[Diagnostic] = []
    rendered: dict[str, str] = {}
    made: dict[str, str] = {}  # recipe -> summary
    for path in specs:
        spec, texts, findings = read(path.read_bytes(), str(path))
        diagnostics += findings
        if spec is None:
            continue
        if spec.name in made:
            message, why = f"recipe `{spec.name}` is made by two specs", "the second would overwrite the first"
            help = "rename one of them, or leave it out"
            diagnostics.append(Diagnostic("LC904", message, str(path), why=why, help=help))
            continue
        made[spec.name] = spec.summary.rstrip(".")
        rendered |= {f"{spec.name}/{name}": text for name, text in texts.items()}
    if has_errors(diagnostics):
        return BuildResult([], diagnostics)
    others, broken = ({}, []) if whole else files.recipes_in(out, besides=made)
    recipes = {**others, **made}
    diagnostics += _lacking(rendered, recipes, out)
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
    """The finding about a spec on which the compiler fails."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    message = f"layoutc can't write the code of this spec: {type(error).__name__}{at}"
    why = f"{error}; layoutc finds no error in the spec, so this is a bug in layoutc"
    return Diagnostic("LC907", message, path, why=why, help="report it with this spec")


def _lacking(rendered: Mapping[str, str], recipes: Container[str], out: Path) -> Iterator[Diagnostic]:
    """Findings about files that import another recipe's code if that recipe is missing."""
    for name, text in rendered.items():
        base = re.search(r"^from \.\.(\w+)\.", text, re.MULTILINE)
        if base is not None and base[1] not in recipes:
            message = f"{name} has the code of `{base[1]}`, whose layout is the same and which is not in {out}"
            yield Diagnostic("LC908", message, str(out), help=f"build the spec of `{base[1]}` too")


def _in_the_way(state: files.FileState, out: Path) -> Diagnostic:
    """The finding about a file that the build must not replace."""
    message = f"this is in the way of a generated file: {state.obstacle}"
    why = "layoutc only replaces files that begin with its own mark; nothing was written"
    help = f"move it away, or build into another folder: `--out {out / 'quant'}`"
    return Diagnostic("LC905", message, str(state.path), why=why, help=help)


def _unreadable(state: files.FileState) -> Diagnostic:
    """The finding about a recipe that building others would drop from the index."""
    message = f"this generated file can't be read: {state.obstacle}"
    why = "the package's index lists this recipe with the summary in this file; nothing was written"
    help = f"build it again with its spec beside the others, or delete {state.path.parent}"
    return Diagnostic("LC906", message, str(state.path), why=why, help=help)

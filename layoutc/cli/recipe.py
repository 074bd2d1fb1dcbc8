"""The commands that a new recipe begins with: new, which writes its spec, and test, which proves what is built from it.

As in app.py: arguments, streams and exit codes. Only `test` imports torch.
"""

from __future__ import annotations

import json
import keyword
import os
import re
import sys
import time
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from layoutc.build.lookup import SUFFIXES, chosen, completed, spec_of, specs_in, specs_option
from layoutc.cli.shared import meant, refuse, refusing

if TYPE_CHECKING:
    from layoutc.conformance.registry import Check
    from layoutc.conformance.runner import Outcome
    from layoutc.conformance.subject import Subject


@click.command()
@click.argument("recipes", nargs=-1, metavar="[RECIPE or SPEC]...", shell_complete=completed)
@specs_option("The folder of specs.")
@click.option("--check", "only", multiple=True, metavar="NAME", help="Run only this check; can be repeated.")
@click.option("--list", "listing", is_flag=True, help="Print the checks and what each means.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Seed of the weights.")
@click.option("--thorough", is_flag=True, help="Try more shapes.")
@click.option("--no-distributed", is_flag=True, help="Skip checks that start processes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per recipe, each on a line.")
@click.option("-q", "--quiet", is_flag=True, help="Print only failures.")
def test(
    recipes: tuple[str, ...],
    folder: Path,
    only: tuple[str, ...],
    listing: bool,
    seed: int,
    thorough: bool,
    no_distributed: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Prove that the code built from a spec does what the spec says.

    Compiles each spec into a temporary package and runs the conformance suite on it: codes, index maps, references
    against an independent reading of the spec, hooks on 1 to 8 ranks, operators, checkpoints, FSDP2 with 2 processes.

    \b
    layoutc test                              every spec in specs/
    layoutc test mine/my_format.yaml          one spec, in any folder
    layoutc test my_format --check encode     one recipe of specs/, one check
    layoutc test --list                       the checks, and what each means
    """
    with refusing(ImportError, words="`layoutc test` needs torch and numpy: "):
        from layoutc.conformance.registry import all_checks
    checks = all_checks()
    if listing:
        for one in checks:
            click.echo(f"{one.name:18} {one.meaning}")
        return
    unknown = [name for name in only if name not in {one.name for one in checks}]
    if unknown:
        refuse(f"no check is named '{unknown[0]}'.{meant(unknown[0], [one.name for one in checks])}")
    paths = chosen(recipes, folder)

    def wanted(one: Check) -> bool:
        return (not only or one.name in only) and not (no_distributed and one.needs_processes)

    sys.exit(0 if _test_all(paths, wanted, seed, thorough, not no_distributed, as_json, quiet) else 1)


def _test_all(
    paths: list[Path], wanted: Any, seed: int, thorough: bool, distributed: bool, as_json: bool, quiet: bool
) -> bool:
    """Runs the suite on every spec, with one group of processes for all; true if nothing failed."""
    from layoutc.conformance.ranks import Ranks
    from layoutc.conformance.runner import one_thread
    from layoutc.conformance.subject import BadSpec, Unusable, compile_subject

    one_thread()
    passed = True
    with Ranks() as ranks:
        for number, path in enumerate(paths):
            try:
                with refusing(OSError):
                    subject = compile_subject(path, seed=seed, thorough=thorough, ranks=ranks if distributed else None)
            except (BadSpec, Unusable) as bad:
                passed = False
                _tell_bad(path, bad, as_json)
                continue
            if number and not as_json and not quiet:
                click.echo()
            try:
                passed &= _test_one(subject, wanted, as_json, quiet)
            finally:
                subject.close()
    return passed


def _test_one(subject: Subject, wanted: Any, as_json: bool, quiet: bool) -> bool:
    """Runs the suite on a subject and prints as it goes; true if nothing failed."""
    from layoutc.conformance import report
    from layoutc.conformance.runner import run_checks

    start = time.perf_counter()
    outcomes: list[Outcome] = []
    heading = report.heading(subject.name, os.path.relpath(subject.path), subject.plan.layout_id)
    if not as_json and not quiet:
        click.echo(heading)
    for outcome in run_checks(subject, wanted):
        outcomes.append(outcome)
        if not as_json and (not quiet or outcome.status == "fail"):
            click.echo(f"{heading}\n{report.line(outcome)}" if quiet else report.line(outcome))
    seconds = time.perf_counter() - start
    passed = all(outcome.status != "fail" for outcome in outcomes)
    if not as_json:
        if not quiet:
            click.echo(report.tally(outcomes, seconds))
        return passed
    result = {
        "recipe": subject.name,
        "spec": str(subject.path),
        "layout_id": subject.plan.layout_id,
        "seed": subject.seed,
        "passed": passed,
        "seconds": round(seconds, 3),
        "checks": [report.as_data(outcome) for outcome in outcomes],
    }
    click.echo(json.dumps(result))
    return passed


def _tell_bad(path: Path, bad: Exception, as_json: bool) -> None:
    """Prints the findings of a spec with errors, as `check` does, or why a package can't be imported."""
    text = str(bad) if str(bad).startswith(str(path)) else f"{path}: {bad}"
    click.echo(text, err=True)
    if as_json:
        lines = str(bad).splitlines()
        click.echo(json.dumps({"recipe": path.stem, "spec": str(path), "passed": False, "findings": lines}))


@click.command()
@click.argument("name")
@click.option("--from", "original", metavar="RECIPE", help="Start from a copy of this recipe's spec.")
@specs_option("The folder to write to.", click.Path(path_type=Path))
def new(name: str, original: str | None, folder: Path) -> None:
    """Write a commented spec to start from.

    \b
    layoutc new my_format                     specs/my_format.yaml, which builds and passes `layoutc test`
    layoutc new my_format --specs mine        mine/my_format.yaml
    layoutc new my_nvfp4 --from nvfp4         a copy of a recipe, comments included
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name) or keyword.iskeyword(name) or name == "layoutc":
        fixed = re.sub(r"[^a-z0-9_]+", "_", name.lower()).strip("_")[:40]
        hint = f" For instance: {fixed}." if re.fullmatch(r"[a-z][a-z0-9_]*", fixed) and fixed != name else ""
        words = "a lower-case letter, then lower-case letters, digits and underscores, at most 40 in all, not a keyword"
        refuse(f"'{name}' can't name a recipe: {words}.{hint}")
    path = folder / f"{name}.yaml"
    taken = next((folder / f"{name}{s}" for s in SUFFIXES if (folder / f"{name}{s}").exists()), None)
    if taken is not None:
        refuse(f"{taken} exists; choose another name, or delete it")
    text = files("layoutc.cli").joinpath("starter.yaml").read_text(encoding="utf-8")
    if original is not None:
        places = (path.parent for path in (*specs_in(folder), *specs_in(Path("specs"))) if path.stem == original)
        source = spec_of(original, next(places, Path("specs")), everywhere=True)
        text = source.read_bytes().decode("utf-8", errors="replace").replace("\r\n", "\n")
    renamed, count = re.subn(r"(?m)^name:[ ]*[^\s#]+", f"name: {name}", text, count=1)
    if not count:
        refuse(f"{original} has no line `name: ...` to change")
    with refusing(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8", newline="\n") as file:
            file.write(renamed)
    click.echo(path)
    click.echo(f"next: edit it, then  layoutc build {path}  and  layoutc test {path}", err=True)

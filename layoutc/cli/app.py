"""The command line: arguments, streams, exit codes. Decides nothing about layouts.

Exit codes: 0 nothing found, 1 findings (errors in specs, drift), 2 the command could not do its work. Findings for
people (full, concise) and progress go to stderr; data goes to stdout, and so do findings for machines (github, json,
sarif).

Slow modules are imported by the commands that need them: `layoutc check` of 20 specs takes less than a second.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from layoutc import __version__
from layoutc.build.lookup import chosen
from layoutc.cli.reading import content_of
from layoutc.cli.shared import choosing, meant, out_option, refuse, refusing, report, reporting, safe
from layoutc.diagnostics.diagnostic import Diagnostic, catalogue, has_errors, nearest, tidy
from layoutc.diagnostics.renderers import page, summary

if TYPE_CHECKING:
    from layoutc.build.files import FileState


# Verbs of other tools.
_KNOWN_ELSEWHERE = {
    **dict.fromkeys(("generate", "gen", "compile", "make"), "build"),
    **dict.fromkeys(("vet", "lint", "validate", "verify"), "check"),
    **dict.fromkeys(("diff", "drift"), "build --check"),
    **dict.fromkeys(("rule", "why", "error"), "explain CODE"),
    "train": "demo",
}


# The other families: module of this room -> its commands, which are imported when they are named or listed.
_FAMILIES = {
    "layout": ("list", "show", "breaking"),
    "recipe": ("new", "test"),
    "estimate": ("estimate",),
    "files": ("convert",),
    "plan": ("plan",),
    "doctor": ("doctor", "completion"),
    "measure": ("bench", "demo"),
}


_NAMES = {"list": "list_recipes"}  # of commands that Python has for something else


class _Verbs(click.Group):
    """A group that imports families of commands when they are needed, and suggests the nearest verb."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click, but for an unknown verb suggests the one that was probably meant."""
        name = args[0] if args else ""
        if name and not name.startswith("-") and self.get_command(ctx, name) is None:
            verb = _KNOWN_ELSEWHERE.get(name) or nearest(name, self.list_commands(ctx))
            hint = f"Did you mean `layoutc {verb}`?" if verb else f"Verbs: {', '.join(self.list_commands(ctx))}."
            ctx.fail(f"No such verb '{name}'. {hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """As click; errors print names that came from files as text alone."""
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            vars(error)["message"] = safe(error.message)  # of whatever kind it is, with its context
            raise

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order in which users need them."""
        return [*self.commands, *(name for names in _FAMILIES.values() for name in names)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command by name; None if there is none."""
        for family, names in _FAMILIES.items():
            if cmd_name in names:
                module = import_module(f"layoutc.cli.{family}")
                command: click.Command = getattr(module, _NAMES.get(cmd_name, cmd_name))
                return command
        return super().get_command(ctx, cmd_name)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Compile layout specs into quantized FSDP2 tensors.

    A recipe is one YAML file that says where every bit lies. layoutc generates everything else from it.

    \b
    layoutc check                     find what is wrong in specs/
    layoutc build                     write generated/
    layoutc explain LC315             what a finding means
    """


@main.command()
@choosing
@out_option("The folder to write.")
@click.option("--check", is_flag=True, help="Write nothing; fail if a file differs from what its spec produces.")
@click.option("--diff", is_flag=True, help="Like --check, and print a unified diff.")
@click.option("-q", "--quiet", is_flag=True, help="Print findings only.")
@reporting
def build(
    specs: tuple[str, ...], folder: Path, out: Path, check: bool, diff: bool, quiet: bool, form: str | None, color: str
) -> None:
    """Compile specs into Python packages.

    \b
    layoutc build                             every spec in specs/ into generated/
    layoutc build mxfp8                       one spec
    layoutc build --specs mine --out my_pkg/quant
    layoutc build --check                     in CI: fail on drift, write nothing
    layoutc build --diff | less               what a build would change
    """
    from layoutc.build import pipeline

    with refusing(OSError, RuntimeError):
        result = pipeline.build(chosen(specs, folder), out, check or diff, whole=not specs)
    drift = [item for state in result.states if (item := _drift(state))] if check or diff else []
    if diff:
        click.echo("".join(state.diff for state in result.states), nl=False)
    elif not quiet:
        verbs = {"new": "missing" if check else "wrote", "changed": "changed" if check else "wrote"}
        for state in result.states:
            click.echo(f"{verbs.get(state.status, state.status):8}{state.path}")
    findings = tidy([*result.diagnostics, *drift])
    report(findings, form, color)
    sys.exit(1 if has_errors(findings) else 0)


@main.command()
@choosing
@click.option("--strict", is_flag=True, help="Treat warnings as errors.")
@click.option("--explain", is_flag=True, help="Also print what is proved about each layout, and how.")
@click.option("-q", "--quiet", is_flag=True, help="Print no summary line.")
@reporting
def check(
    specs: tuple[str, ...], folder: Path, strict: bool, explain: bool, quiet: bool, form: str | None, color: str
) -> None:
    """Find every problem in specs, and write nothing. A spec that passes builds.

    \b
    layoutc check                             every spec in specs/
    layoutc check mxfp8 specs/a.yaml mine/    a recipe by name, a file, a folder
    layoutc check --format github             annotations for a GitHub workflow
    layoutc check --format json | jq .code    one JSON object per finding
    layoutc check --explain specs/mxfp8.yaml  the proofs about its layout
    """
    from layoutc.build import pipeline

    paths = chosen(specs, folder)
    findings: list[Diagnostic] = []
    for path in paths:
        content = content_of(path)
        findings += pipeline.check(content, str(path))
        if not quiet and (reason := pipeline.no_kernels(content, str(path))):
            click.echo(f"{path}: {reason}", err=True)
    if explain:
        from layoutc.cli import layout as cli_layout

        findings += cli_layout.explain_specs(paths, form)
    report(tidy(findings), form, color)
    if not quiet:
        click.echo(summary(len(paths), findings), err=True)
    sys.exit(1 if has_errors(findings) or (strict and findings) else 0)


@main.command()
def schema() -> None:
    """Print the JSON Schema of the spec language, for editors.

    \b
    layoutc schema > .vscode/layoutc.schema.json
    Then begin a spec with:  # yaml-language-server: $schema=../.vscode/layoutc.schema.json
    """
    import json

    from layoutc.spec.json_schema import json_schema

    click.echo(json.dumps(json_schema(), indent=2))


@main.command()
@click.argument("code", required=False)
@click.option("--all", "every", is_flag=True, help="Print the pages of all codes.")
def explain(code: str | None, every: bool) -> None:
    """Print what a finding means and what to do.

    \b
    layoutc explain LC315                     one page
    layoutc explain                           all codes, one line each
    layoutc explain --all                     all pages
    """
    entries = catalogue()
    if every:
        click.echo(("\n" + "-" * 80 + "\n\n").join(page(entry) for entry in entries.values()), nl=False)
    elif code is None:
        for entry in entries.values():
            click.echo(f"{entry.code}  {entry.severity:8} {entry.title}")
    else:
        name = code.strip("[]").upper()
        name = name if name.startswith("LC") else f"LC{name}"
        if name not in entries:
            refuse(f"no finding has the code {code}.{meant(name, entries, ' See: layoutc explain')}")
        click.echo(page(entries[name]), nl=False)


@main.command()
def version() -> None:
    """Print the version.

    \b
    layoutc version
    """
    click.echo(f"layoutc {__version__}")


def _drift(state: FileState) -> Diagnostic | None:
    """The finding of `build --check` about a file; None if it is up to date."""
    path = str(state.path)
    if state.status == "same":
        return None
    if state.status == "new":
        return Diagnostic("LC902", "this file is missing", path, help="run `layoutc build`, and commit the result")
    if state.status == "stale":
        return Diagnostic("LC903", "no spec produces this file", path, help=f"delete it: `git rm {path}`")
    lines = state.diff.splitlines()
    count = sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in lines)
    hunks = [number for number, line in enumerate(lines) if line.startswith("@@")]
    first = lines[hunks[0] : hunks[1] if len(hunks) > 1 else None][:12] if hunks else []
    message = f"this file is not what its spec produces ({count} lines differ)"
    help = "run `layoutc build`, and commit the result"
    return Diagnostic("LC901", message, path, help=help, detail="\n".join(first) or None)

"""The commands about this installation: doctor, and completion for shells. As in app.py: arguments, streams, codes."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from layoutc.cli.shared import print_tables

if TYPE_CHECKING:
    from layoutc.doctor.findings import Line, Runs
    from layoutc.report.tables import Table

PROGRAM = "layoutc"
SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Print only what is missing.")
def doctor(as_json: bool, quiet: bool) -> None:
    """Report what this machine has, can run, and lacks.

    \b
    layoutc doctor                            everything
    layoutc doctor --quiet                    in CI: required packages that are missing; exit code 1
    layoutc doctor --json | jq .recipes
    """
    from layoutc.doctor import packages
    from layoutc.doctor.findings import Line, is_healthy

    lines, runs = packages.look(), list["Runs"]()
    try:
        from layoutc.doctor import machine, recipes
    except ImportError as error:
        lines.append(Line("runtime", "missing", f"can't be imported: {error}", "pip install torch"))
    else:
        lines += machine.look()
        runs, more = recipes.look()
        lines += more
    if as_json:
        from layoutc.report.describe import as_data

        healthy = is_healthy(lines)
        click.echo(json.dumps({"healthy": healthy, "findings": as_data(lines), "recipes": as_data(runs)}))
    elif quiet:
        for line in lines:
            if line.verdict == "missing":
                click.echo(f"{line.about}: {line.found}; {line.fix}", err=True)
    else:
        print_tables(_tables(lines, runs))
    sys.exit(0 if is_healthy(lines) else 1)


def _tables(lines: list[Line], runs: list[Runs]) -> list[Table]:
    from layoutc.report.tables import Table

    found = [Table("This machine", (), tuple((line.verdict, line.about, line.found) for line in lines))]
    if runs:
        heads = ("recipe", "of", "quantizing", "products of linear layers")
        rows = tuple((one.recipe, one.package, one.kernels, one.products) for one in runs)
        found.append(Table("Recipes", heads, rows))
    todo = tuple(
        (("needed" if line.verdict == "missing" else "optional"), line.about, line.fix)
        for line in lines
        if line.verdict != "fine" and line.fix
    )
    return [*found, Table("To install", (), todo)] if todo else found


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    eval "$(layoutc completion bash)"         in ~/.bashrc
    eval "$(layoutc completion zsh)"          in ~/.zshrc
    layoutc completion fish > ~/.config/fish/completions/layoutc.fish
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None
    complete = made(ctx.find_root().command, {}, PROGRAM, f"_{PROGRAM.upper()}_COMPLETE")
    if shell == "bash":
        # click would ask bash for its version, which is not this shell's business: the script checks nothing.
        click.echo(complete.source_template % complete.source_vars())
    else:
        click.echo(complete.source())

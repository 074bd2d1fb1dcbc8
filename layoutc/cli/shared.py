"""What the families of commands share: options, refusals, and how tables and findings are printed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn, cast

import click

from layoutc.build.lookup import Command, completed, specs_option
from layoutc.diagnostics.diagnostic import Diagnostic, nearest
from layoutc.diagnostics.renderers import FORMS, render
from layoutc.report.tables import Table, plain, print_rich, shown


class FiniteRange(click.FloatRange):
    """Numbers from `min` to `max`, which NaN is not, although it is never less nor more."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click's, and fails for NaN."""
        found = super().convert(value, param, ctx)
        if not isfinite(found):
            self.fail(f"{found} is no number in the range {self._describe_range()}.", param, ctx)
        return found


MOST_RANKS = 2**20


def reporting(command: Command) -> Command:
    """Adds --format and --color."""
    words = "How to print findings; default: full on a terminal, else concise."
    form = click.option("--format", "form", type=click.Choice(FORMS), help=words)
    words = "Color the full form; auto obeys NO_COLOR."
    choice = click.Choice(["auto", "always", "never"])
    color = click.option("--color", type=choice, default="auto", show_default=True, help=words)
    return form(color(command))


def out_option(words: str) -> Callable[[Command], Command]:
    """Adds --out, the folder of generated code."""
    path = click.Path(path_type=Path)
    return click.option("--out", type=path, default=Path("generated"), show_default=True, help=words)


def choosing(command: Command) -> Command:
    """Adds RECIPE or SPEC... and --specs."""
    specs = click.argument("specs", nargs=-1, metavar="[RECIPE|SPEC]...", shell_complete=completed)
    return specs(specs_option("The folder of recipes, and of the specs to read if none is named.")(command))


recipe_option = click.option(
    *("--recipe", "named"),
    multiple=True,
    metavar="RECIPE|SPEC",
    help="A recipe to compare; can be repeated.",
    shell_complete=completed,
)


def comparing(metavar: str) -> Callable[[Command], Command]:
    """Adds RECIPE... and --recipe, which say the same: the command gets both as `recipes`."""

    def decorated(command: Command) -> Command:
        @wraps(command)
        def joined(*, recipes: tuple[str, ...], named: tuple[str, ...], **rest: Any) -> Any:
            return command(recipes=(*recipes, *split_list(named)), **rest)

        arguments = click.argument("recipes", nargs=-1, metavar=metavar, shell_complete=completed)
        return arguments(recipe_option(cast(Command, joined)))

    return decorated


def shape_of(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """`4096x14336` -> (4096, 14336)."""
    match = re.fullmatch(r"([1-9][0-9]{0,9})[xX]([1-9][0-9]{0,9})", value or "", re.ASCII)
    if match is None and value is not None:
        raise click.BadParameter(f"'{value}' is not a shape; write rows x columns, as in 4096x14336.", ctx, param)
    return (int(match[1]), int(match[2])) if match else None


def shape_option(words: str, many: bool = False) -> Callable[[Command], Command]:
    """Adds --shape, once, or repeated as the list `shapes`."""

    def shapes_of(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[tuple[int, int]]:
        return [shape for value in values if (shape := shape_of(ctx, param, value)) is not None]

    name, callback = ("shapes", shapes_of) if many else ("shape", shape_of)
    return click.option("--shape", name, multiple=many, callback=callback, metavar="MxK", help=words)


def worlds_of(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> list[int]:
    """`8,64,512` -> [8, 64, 512]."""
    found: list[int] = []
    for word in split_list(value):
        if not (word.isascii() and word.isdigit() and 1 <= int(word) <= MOST_RANKS):
            message = f"'{word}' is not a number of ranks; write 1 to {MOST_RANKS:,}, as in --world 8,64,512."
            raise click.BadParameter(message, ctx, param)
        found.append(int(word))
    return list(dict.fromkeys(found))


def split_list(value: tuple[str, ...]) -> list[str]:
    """The words of an option that may be given several times, with several words each, between commas."""
    return [word.strip() for one in value for word in one.split(",")]


def report(diagnostics: Iterable[Diagnostic], form: str | None = None, color: str = "auto") -> None:
    """Prints findings, for people to stderr, for machines to stdout."""
    form = form or ("full" if sys.stderr.isatty() else "concise")
    for_machines = form in ("github", "json", "sarif")
    auto = sys.stderr.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    colored = form == "full" and (color == "always" or (color == "auto" and auto))
    click.echo(render(diagnostics, form, colored), err=not for_machines, nl=False, color=colored or None)


def print_tables(drawn: list[Table]) -> None:
    """Prints tables: rich on a terminal; else text that is the same everywhere."""
    if sys.stdout.isatty():
        print_rich(drawn)
    else:
        click.echo(plain(drawn), nl=False)


def told(text: str) -> None:
    """Prints lines for people to stderr: what is unprintable in names from files is escaped."""
    click.echo(safe(text), err=True)


def safe(text: str) -> str:
    """Lines that a terminal takes for nothing but text."""
    return "\n".join(map(shown, text.split("\n")))


def refuse(message: str) -> NoReturn:
    """Ends the command with a usage error: exit code 2, in click's form."""
    raise click.UsageError(message)


def meant(word: str, choices: Iterable[str], otherwise: str = "") -> str:
    """A sentence after one that says that a word is unknown: the nearest choice, or what to do without one."""
    found = nearest(word, choices)
    return f" Did you mean {found}?" if found else otherwise


@contextmanager
def refusing(*kinds: type[Exception], words: str = "") -> Iterator[None]:
    """What is raised of these kinds ends the command as `refuse` does; of an OSError, the file and its problem.

    words: what stands before that.
    """
    try:
        yield
    except kinds as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise click.UsageError(words + text) from error


def grouped(groups: Mapping[str, Sequence[str]]) -> type[click.Command]:
    """Commands whose help has these groups: titles, and parameters' names in order. What no group names is first."""

    class Grouped(click.Command):
        """As click's, but for the options of its help."""

        def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
            """Writes each group."""
            records = {one.name: one.get_help_record(ctx) for one in self.get_params(ctx)}
            named = {name for names in groups.values() for name in names}
            rest = {"Options": [name for name in records if name not in named]}
            for title, names in {**rest, **groups}.items():
                rows = [record for name in names if (record := records.get(name)) is not None]
                if rows:
                    with formatter.section(title):
                        formatter.write_dl(rows)

    return Grouped

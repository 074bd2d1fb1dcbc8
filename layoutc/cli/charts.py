"""--chart, and results that a command wrote before, from which it draws again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from layoutc.cli.shared import linked

MOST_BYTES = 64 << 20
MOST_NAMED = 8  # lines of a chart
Draw = Callable[[Mapping[str, Any], Path], Sequence[str]]

chart_option = click.option(
    "--chart",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw to a .png, .svg or .pdf.",
)


def check_chart(path: Path | None) -> None:
    """Before any work: refuses what can't be drawn to."""
    from layoutc.charts import style

    if path is not None:
        try:
            style.check(path)
        except ValueError as error:
            raise click.UsageError(str(error)) from error


def draw_chart(draw: Draw, data: Mapping[str, Any], path: Path | None) -> None:
    """Draws, where a path was given, and says what on stderr."""
    if path is None:
        return
    try:
        lines = draw(data, path)
    except OSError as error:
        raise click.UsageError(f"{path}: {error.strerror}") from error
    what = ", ".join(lines) if len(lines) <= MOST_NAMED else f"{len(lines)} lines"
    click.echo(f"{linked(path, err=True)}: {what}", err=True)


@contextmanager
def shown_again(name: str | None) -> Iterator[None]:
    """What is shown of a file's values: whatever is wrong with them is said of the file. None: they are of no file."""
    try:
        yield
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, ArithmeticError) as error:
        if name is None:
            raise
        why = f": {error}" if type(error) is ValueError else f" is not whole: {type(error).__name__}: {error}"
        raise click.UsageError(f"{name}{why}") from error


def draw_again(draw: Draw, name: str, data: Mapping[str, Any], path: Path) -> None:
    """As draw_chart, of what `written` has read from a file of this name."""
    with shown_again(name):
        draw_chart(draw, data, path)


def written(name: str) -> Any | None:
    """What a command wrote to a file with --json, if a name is that of one; None for other names."""
    path = Path(name)
    if path.suffix != ".json":
        return None
    try:
        if path.stat().st_size > MOST_BYTES:
            raise click.UsageError(f"{path} has more than {MOST_BYTES >> 20} MiB, so it is no result of this command")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise click.UsageError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"{path} is no JSON: {error}") from error

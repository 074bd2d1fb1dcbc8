"""--chart, and results that a command wrote before, from which it draws again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from layoutc.cli.shared import refuse, refusing

MOST_BYTES = 64 << 20
MOST_NAMED = 8  # lines of a chart
Draw = Callable[[Mapping[str, Any], Path], Sequence[str]]

_FILE = click.Path(dir_okay=False, path_type=Path)
chart_option = click.option("--chart", type=_FILE, metavar="FILE", help="Draw a chart to a .png, .svg or .pdf file.")


def check_chart(path: Path | None) -> None:
    """Before any work: refuses what can't be drawn to."""
    from layoutc.charts import style

    if path is not None:
        with refusing(ValueError):
            style.check(path)


def draw_chart(draw: Draw, data: Mapping[str, Any], path: Path | None) -> None:
    """Draws, where a path was given, and says what on stderr."""
    if path is None:
        return
    with refusing(OSError):
        lines = draw(data, path)
    what = ", ".join(lines) if len(lines) <= MOST_NAMED else f"{len(lines)} lines"
    click.echo(f"{path}: {what}", err=True)


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


def drawn_again(draw: Draw, names: tuple[str, ...], chart: Path | None) -> bool:
    """As draw_chart, of what the command wrote to a file with --json, if that is what was named; False if not."""
    path = Path(names[0] if len(names) == 1 else "")
    if path.suffix != ".json":
        return False
    if chart is None:
        refuse(f"{path} has been measured: give --chart FILE to draw it")
    with refusing(OSError), refusing(ValueError, RecursionError, words=f"{path} is no JSON: "):
        if path.stat().st_size > MOST_BYTES:
            refuse(f"{path} has more than {MOST_BYTES >> 20} MiB, so it is not a result of this command")
        data = json.loads(path.read_text(encoding="utf-8"))
    with shown_again(str(path)):
        draw_chart(draw, data, chart)
    return True

"""Tables as text: rich on a terminal, plain and stable otherwise."""

from __future__ import annotations

from dataclasses import dataclass

NAME = 18  # the most characters of a cell in a narrow column


@dataclass(frozen=True)
class Table:
    """A title, column heads (none: a list of facts) and rows of text. `numbers`: right-aligned columns.

    Text may come from files, so unprintable characters are escaped.
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", shown(self.title))
        object.__setattr__(self, "rows", tuple(tuple(map(shown, row)) for row in self.rows))


def shown(text: str) -> str:
    """Makes text from a file safe for a terminal: escapes unprintable characters."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode()


def plain(tables: list[Table]) -> str:
    """Tables below each other, with columns two spaces apart; the same text on all machines."""
    return "\n".join(_plain(table) for table in tables)


def _plain(table: Table) -> str:
    lines = [table.heads, *table.rows] if table.heads else list(table.rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))] if lines else []
    text = [table.title] if table.title else []
    for line in lines:
        cells = (
            cell.rjust(width) if column in table.numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        text.append("  " + "  ".join(cells).rstrip())
    return "\n".join(text) + "\n"


def print_rich(tables: list[Table]) -> None:
    """Prints the tables on a terminal, with colors and wrapped cells."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(highlight=False)
    for table in tables:
        if table.title:
            console.print(Text(table.title, style="bold"))
        drawn = RichTable(box=SIMPLE_HEAD, show_header=bool(table.heads), pad_edge=False, padding=(0, 1))
        columns = len(table.heads or (table.rows[0] if table.rows else ()))
        for column in range(columns):
            head = Text(table.heads[column] if table.heads else "")
            flush = "right" if column in table.numbers else "left"
            style = "cyan" if column == 0 else None
            whole = all(len(row[column]) <= NAME for row in table.rows)  # don't wrap names and numbers
            drawn.add_column(head, justify=flush, style=style, overflow="fold", no_wrap=whole)  # type: ignore[arg-type]
        for row in table.rows:
            drawn.add_row(*(Text(cell) for cell in row))
        console.print(drawn)

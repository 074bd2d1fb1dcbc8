"""What each command takes, and what it says of that: a golden text each. Review them when an option changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from places import TESTS

from layoutc.cli.app import main


def commands(command: click.Command, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All of them, with their names."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            one = command.get_command(context, name)
            assert one is not None
            yield from commands(one, *path, name)


EVERY = dict(commands(main))


def test_the_list_of_commands_cuts_no_sentence_off() -> None:
    """In a terminal of 80 columns."""
    shown = CliRunner().invoke(main, ["--help"], terminal_width=80).output
    assert "..." not in shown.partition("Commands:")[2]


def described(command: click.Command) -> str:
    """Its parameters, as any release of click has them."""
    lines = [*(command.help or "").strip().splitlines(), ""]
    for one in command.params:
        kind = "|".join(map(str, one.type.choices)) if isinstance(one.type, click.Choice) else one.type.name
        default = one.default if isinstance(one.default, str | int | float) and kind != "boolean" else "none"
        traits = [name for name in ("required", "multiple", "is_flag") if getattr(one, name, False)]
        traits += [f"{one.nargs} values"] if one.nargs != 1 else []
        lines.append(
            f"{', '.join([*one.opts, *one.secondary_opts])}  {one.metavar}  {kind}  default {default}  {traits}"
        )
        lines += [f"    {one.help}"] if isinstance(one, click.Option) else []
    return "\n".join(line.rstrip() for line in lines) + "\n"


@pytest.mark.parametrize("path", EVERY, ids=" ".join)
def test_what_a_command_takes(path: tuple[str, ...], golden: Callable[[Path, str], None]) -> None:
    golden(TESTS / "golden" / "commands" / f"{'-'.join(('layoutc', *path))}.txt", described(EVERY[path]))
    result = CliRunner().invoke(main, [*path, "--help"], prog_name="layoutc")
    assert result.exit_code == 0
    for one in EVERY[path].params:
        assert str(one.metavar or one.opts[0]).split(" ")[0].lower() in result.output.lower()


@pytest.mark.parametrize("path", EVERY, ids=" ".join)
def test_every_option_says_what_it_does(path: tuple[str, ...]) -> None:
    options = [one for one in EVERY[path].params if isinstance(one, click.Option)]
    assert [one.name for one in options if not one.help] == []
    assert (EVERY[path].help or "").strip()

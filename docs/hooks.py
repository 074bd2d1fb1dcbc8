"""Pages of the site that are made from other files: the command line's help, one section for each diagnostic, and the
glossary of CONTRIBUTING."""

from __future__ import annotations

from pathlib import Path

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from layoutc.cli.app import main
from layoutc.diagnostics.diagnostic import catalogue
from layoutc.diagnostics.renderers import page


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    reference = {"reference/commands.md": _commands(), "reference/diagnostics.md": _diagnostics()}
    for name, text in {**reference, "glossary.md": _glossary()}.items():
        files.append(File.generated(config, name, content=text))
    return files


def _commands() -> str:
    """The help of each command, as `layoutc COMMAND --help` prints it."""
    parts = ["# The command line\n\nExit codes: 0 nothing found, 1 findings, 2 the command could not do its work.\n"]
    with click.Context(main, info_name="layoutc") as above:
        for name in main.list_commands(above):
            command = main.get_command(above, name)
            assert command is not None
            with click.Context(command, info_name=name, parent=above, max_content_width=100, terminal_width=100) as one:
                parts.append(f"## layoutc {name}\n\n```text\n{command.get_help(one)}\n```\n")
    return "\n".join(parts)


def _diagnostics() -> str:
    """What `layoutc explain CODE` prints, of all codes."""
    parts = [
        "# Diagnostics\n\n`layoutc explain CODE` prints one of these; messages of `layoutc check` name the code.\n"
    ]
    parts += [f"## {code}\n\n```text\n{page(entry)}```\n" for code, entry in sorted(catalogue().items())]
    return "\n".join(parts)


def _glossary() -> str:
    """The words that specs, code, messages and pages use."""
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return "# Glossary" + text.partition("## Words")[2].partition("\n## ")[0]

"""Options that several commands share: what they read, what they refuse, and where findings go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from layoutc.build import lookup
from layoutc.checkpoint import load_safetensors
from layoutc.cli import shared
from layoutc.cli.app import main
from layoutc.diagnostics.diagnostic import Diagnostic
from layoutc.runtime.errors import LayoutError


def context() -> tuple[click.Context, click.Parameter]:
    return click.Context(click.Command("c")), click.Option(["--o"])


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        (None, None),
        ("4096x14336", (4096, 14336)),
        ("1X9999999999", (1, 9999999999)),
        ("7x8", (7, 8)),
        *((bad, "refused") for bad in ("", "0x4", "4x0", "4x04", "10000000000x4", "4x4x4", "4", " 4x4", "٤x4", "-4x4")),
    ],
)
def test_shapes(text: str | None, shape: Any) -> None:
    if shape == "refused":
        with pytest.raises(click.BadParameter, match=r"is not a shape; write rows x columns, as in 4096x14336\."):
            shared.shape_of(*context(), text)
    else:
        assert shared.shape_of(*context(), text) == shape


@pytest.mark.parametrize(
    ("texts", "worlds"),
    [
        (("8,64", "4"), [8, 64, 4]),
        (("8, 8,1 ", "8"), [8, 1]),
        ((str(2**20),), [2**20]),
        *(((bad,), None) for bad in (str(2**20 + 1), "0", "", "8,", "-1", "1.5", "٤", "²", "eight")),
    ],
)
def test_worlds(texts: tuple[str, ...], worlds: list[int] | None) -> None:
    if worlds is None:
        with pytest.raises(click.BadParameter, match="is not a number of ranks; write 1 to 1,048,576, as in --world"):
            shared.worlds_of(*context(), texts)
    else:
        assert shared.worlds_of(*context(), texts) == worlds


def test_numbers_are_finite_in_all_commands() -> None:
    """NaN is neither less nor more than a bound: an estimate with it would never end."""
    commands = {name: main.get_command(click.Context(main), name) for name in main.list_commands(click.Context(main))}
    options = [
        (name, one.opts[0])
        for name, command in commands.items()
        for one in getattr(command, "params", ())
        if isinstance(one.type, click.types.FloatParamType)
    ]
    both = [(name, option) for name in ("estimate", "plan") for option in ("--latency", "--host")]
    assert sorted(options) == sorted([*both, ("plan", "--memory")])
    for name, option in options:
        for word in ("nan", "-NaN", "inf", "1e400"):
            shown = CliRunner().invoke(main, [name, option, word])
            assert (shown.exit_code, f"Invalid value for '{option}'" in shown.stderr) == (2, True), shown.stderr


def test_names_from_files_are_text_alone_on_a_terminal(tmp_path: Path) -> None:
    """In what commands say, in tables, and in what a load raises."""
    name = "\x1b]0;owned\x07\u202e.weight"
    save_file({name: torch.ones(4, 4)}, tmp_path / "model.safetensors")
    save_file({name: torch.ones(2, 2, dtype=torch.uint8)}, tmp_path / "codes.safetensors")
    (tmp_path / "other.json").write_text(json.dumps({"weight_map": {name: "\x1b[31m"}}))
    for arguments in (
        ("convert", tmp_path, tmp_path / "out", "--files", "mxfp8/compressed_tensors", "--match", "*"),
        ("show", "--checkpoint", tmp_path),
        ("plan", tmp_path / "model.safetensors", "--world", 2, "--recipe", "mxfp8", "--weights"),
        ("plan", tmp_path / "codes.safetensors"),
        ("plan", tmp_path / "other.json"),
    ):
        shown = CliRunner().invoke(main, [str(one) for one in arguments])
        assert not {*shown.output} & {"\x1b", "\x07", "\u202e"}, shown.output
        assert "\\x1b" in shown.output, shown.output
    with pytest.raises(LayoutError) as error:
        load_safetensors(torch.nn.Linear(4, 4), tmp_path)
    assert "\\x1b]0;owned\\x07\\u202e.weight is in the files, but not in the model" in str(error.value)
    assert "\x1b" not in str(error.value)


FINDING = Diagnostic("LC315", "no such format", "specs/a.yaml", help="name another")


@pytest.mark.parametrize(
    ("form", "is_terminal"),
    [
        (None, True),
        (None, False),
        ("full", True),
        ("concise", False),
        ("github", True),
        ("json", True),
        ("sarif", False),
    ],
)
@pytest.mark.parametrize(
    ("color", "variables", "colored"),
    [
        ("always", {"NO_COLOR": "1"}, True),
        ("never", {}, False),
        ("auto", {}, None),
        ("auto", {"NO_COLOR": ""}, False),
        ("auto", {"TERM": "dumb"}, False),
    ],
)
def test_where_findings_go(
    form: str | None,
    is_terminal: bool,
    color: str,
    variables: dict[str, str],
    colored: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Machines read stdout, people stderr; colours in the full form alone, of a terminal that wants them."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    seen: list[Any] = []
    monkeypatch.setattr(shared.sys, "stderr", type("Stream", (), {"isatty": lambda self: is_terminal})())
    monkeypatch.setattr(shared, "render", lambda items, *rest: seen.append((list(items), *rest)) or "text")
    monkeypatch.setattr(shared.click, "echo", lambda text, **options: seen.append((text, options)))
    shared.report([FINDING], form, color)
    written = form or ("full" if is_terminal else "concise")
    paints = written == "full" and (is_terminal if colored is None else colored)
    to_people = written in ("full", "concise")
    assert seen == [([FINDING], written, paints), ("text", {"err": to_people, "nl": False, "color": paints or None})]


def test_specs_are_looked_up_without_a_command_line(tmp_path: Path) -> None:
    """As a function that a program calls: nothing was given then."""
    assert lookup.find("mxfp8", tmp_path).stem == "mxfp8"
    with pytest.raises(click.UsageError, match="nvfp5"):
        lookup.find("nvfp5", tmp_path)


@pytest.mark.parametrize("command", ["bench", "demo", "estimate"])
def test_recipes_are_named_by_arguments_or_by_recipe(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any mixture, and several at once, as `plan --recipe` takes them."""
    asked: list[tuple[str, ...]] = []

    def stopped(*args: Any, **kwargs: Any) -> None:
        asked.append(tuple({**dict(enumerate(args)), **kwargs}[0 if command == "bench" else "recipes"]))
        raise ValueError("seen")

    monkeypatch.setattr("layoutc.bench.measure.report", stopped)
    monkeypatch.setattr("layoutc.bench.demo.run", stopped)
    monkeypatch.setattr("layoutc.cli.estimate.planned", lambda _, given: stopped(**given))
    for words in (["mxfp8", "nvfp4"], ["mxfp8", "--recipe", "nvfp4"], ["--recipe", "mxfp8,nvfp4"]):
        assert CliRunner().invoke(main, [command, *words]).exit_code != 0
    assert asked == [("mxfp8", "nvfp4")] * 3

"""The command line from outside: exit codes, streams, formats, hints."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from places import ROOT, TESTS

import layoutc
from layoutc.cli.app import main
from layoutc.diagnostics.diagnostic import catalogue
from layoutc.spec.rules import RULES

SPECS, ERRORS = ROOT / "specs", TESTS / "errors"
COUNT = len(list(SPECS.glob("*.yaml")))
CONTEXT = click.Context(main)


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def test_good_specs() -> None:
    result = run("check", SPECS)
    assert (result.exit_code, result.stdout) == (0, "")
    *notes, last = result.stderr.splitlines()
    assert last == f"{COUNT} specs, no problems"
    lacking = [
        (Path(path).stem, rest.partition(", ")[0])
        for path, _, rest in (line.partition(": no kernel to ") for line in notes)
    ]
    experts = ("nvfp4_compressed_tensors_experts", "nvfp4_modelopt_experts")
    assert lacking == [(name, "quantize") for name in experts] + [
        (name, "lay out") for name in ("q4_k", "q6_k", "q8_0")
    ]


def test_specs_is_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "specs").mkdir()
    for name in ("mxfp8", "nvfp4"):
        shutil.copy(SPECS / f"{name}.yaml", tmp_path / "specs")
    monkeypatch.chdir(tmp_path)
    assert run("check").stderr == "2 specs, no problems\n"


def test_findings_for_people_go_to_stderr() -> None:
    result = run("check", ERRORS / "octal.yaml", SPECS / "mxfp8.yaml")
    assert result.exit_code == 1
    assert result.stdout == ""
    path = ERRORS / "octal.yaml"
    expected = f"{path}:4:12: error[LC103] YAML reads `010` as an octal number, 8\n2 specs, 1 error\n"
    assert result.stderr == expected


def test_full_form() -> None:
    result = run("check", "--format", "full", "-q", ERRORS / "octal.yaml")
    assert result.stderr == (ERRORS / "octal.txt").read_text(encoding="utf-8").replace("specs/", f"{ERRORS}/")


def test_color() -> None:
    assert "\x1b" not in run("check", "--format", "full", ERRORS / "octal.yaml").stderr
    assert "\x1b" in run("check", "--format", "full", "--color", "always", ERRORS / "octal.yaml").stderr


def test_json_form_goes_to_stdout() -> None:
    result = run("check", "--format", "json", ERRORS / "several_meanings.yaml")
    items = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(items) > 4
    assert all(item["file"].endswith("several_meanings.yaml") and item["code"] in catalogue() for item in items)
    assert items[0]["span"] == {"line": 2, "column": 7, "end_line": 2, "end_column": 21}
    assert result.stderr == f"1 spec, {len(items)} errors\n"


def test_github_form() -> None:
    line = run("check", "--format", "github", ERRORS / "octal.yaml").stdout
    place = f"title=layoutc (LC103),file={ERRORS}/octal.yaml,line=4,col=12,endLine=4,endColumn=15"
    assert (
        line == f"::error {place}::YAML reads `010` as an octal number, 8%0Ahelp: write `10` without the leading zero\n"
    )


def test_warnings_pass_unless_strict() -> None:
    result = run("check", ERRORS / "pack_of_bytes.yaml")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (0, "1 spec, 1 warning")
    assert run("check", "--strict", ERRORS / "pack_of_bytes.yaml").exit_code == 1


@pytest.mark.parametrize(
    "args", [("check", "nowhere.yaml"), ("build", "nowhere.yaml"), ("check", "--specs", "nowhere")]
)
def test_what_is_not_there_is_a_usage_error(args: tuple[str, ...]) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "does not exist" in result.stderr


def test_empty_folders_and_flags_are_usage_errors(tmp_path: Path) -> None:
    assert run("check", tmp_path).exit_code == 2
    assert run("check", "--formt", "json").exit_code == 2
    assert run("check", "--format", "xml").exit_code == 2


def test_binary_files_are_findings(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"layoutc: 1\nname: \xff\n")
    result = run("check", path)
    assert result.exit_code == 1
    assert f"{path}:2:1: error[LC107] this file is not UTF-8 text" in result.stderr


@pytest.mark.parametrize(
    ("verb", "hint"),
    [
        ("generate", "layoutc build`"),
        ("vet", "layoutc check`"),
        ("diff", "layoutc build --check`"),
        ("chekc", "layoutc check`"),
        ("xyzzy", "build, check"),
    ],
)
def test_unknown_verbs_are_answered(verb: str, hint: str) -> None:
    result = run(verb)
    assert result.exit_code == 2
    assert hint in result.stderr


@pytest.mark.parametrize("verb", sorted(main.list_commands(CONTEXT)))
def test_help_has_examples_that_parse(verb: str) -> None:
    """Each line of a help text that begins with `layoutc` is a command that click accepts."""
    text = run(verb, "--help").stdout
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("layoutc ")]
    assert lines, "a help text shows how the command is used"
    for line in lines:
        words = re.split(r"  +| [|>] ", line)[0].split()[1:]
        command = main.get_command(CONTEXT, words[0])
        assert command is not None, line
        command.make_context(words[0], words[1:])


def test_explain() -> None:
    assert run("explain", "LC315").stdout.startswith("LC315 (error): ")
    assert run("explain", "315").stdout == run("explain", "lc315").stdout
    assert len(run("explain").stdout.splitlines()) == len(catalogue())
    assert run("explain", "--all").exit_code == 0
    assert run("explain", "LC999").exit_code == 2


def test_schema_knows_formats_rules_and_parameters() -> None:
    schema = json.loads(run("schema").stdout)
    scale = schema["$defs"]["Scale"]
    assert scale["properties"]["rule"]["enum"] == list(RULES)
    assert set(RULES["amax-over-max"].parameters) < set(scale["properties"])
    assert "parameters" not in scale["properties"]
    assert "e2m1" in schema["$defs"]["Element"]["properties"]["format"]["anyOf"][0]["enum"]
    assert schema["$defs"]["GemmScale"]["additionalProperties"]["type"] == "integer"
    assert "sizes" not in schema["$defs"]["GemmScale"]["properties"]
    buffer = schema["$defs"]["Buffer"]
    assert "sizes" not in buffer["properties"]
    assert {"type": "integer"}.items() <= buffer["additionalProperties"]["anyOf"][0].items()
    assert buffer["else"]["propertyNames"]["enum"] == ["layout", "pad", "swizzle", "words"]
    assert "\x00" not in json.dumps(schema)


def test_version() -> None:
    """That of the code which runs, whatever is installed."""
    assert run("version").stdout == f"layoutc {layoutc.__version__}\n"


def test_build_check_and_drift(tmp_path: Path) -> None:
    out = tmp_path / "out"
    spec = SPECS / "fp8_current.yaml"
    assert run("build", "--check", "--out", out, spec).exit_code == 1
    assert not out.exists()
    result = run("build", "--out", out, spec)
    assert (result.exit_code, result.stderr) == (0, "")
    written = sorted(path for path in out.rglob("*") if path.is_file())
    assert written
    assert all(line.startswith("wrote ") for line in result.stdout.splitlines())
    assert run("build", "--check", "--out", out, spec).exit_code == 0

    edited = next(path for path in written if path.suffix == ".py" and path.parent != out)
    edited.write_text(edited.read_text(encoding="utf-8") + "# edited\n", encoding="utf-8")
    result = run("build", "--check", "--format", "full", "--out", out, spec)
    assert result.exit_code == 1
    assert "error[LC901]" in result.stderr
    assert "-# edited" in result.stderr
    result = run("build", "--diff", "--out", out, spec)
    assert (result.exit_code, "-# edited" in result.stdout) == (1, True)
    assert edited.read_text(encoding="utf-8").endswith("# edited\n"), "a diff writes nothing"

    edited.unlink()
    assert "error[LC902]" in run("build", "--check", "--out", out, spec).stderr


def test_build_writes_nothing_when_a_spec_is_wrong(tmp_path: Path) -> None:
    result = run("build", "--out", tmp_path / "out", ERRORS / "octal.yaml", SPECS / "mxfp8.yaml")
    assert result.exit_code == 1
    assert "LC103" in result.stderr
    assert not (tmp_path / "out").exists()

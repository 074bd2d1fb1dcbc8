"""What `layoutc show` prints, letter by letter for recipes that have all of it between them; refusals, SARIF."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner, Result
from places import ROOT, TESTS, UNSHIPPED
from test_describe import NAMES, plan_of, recipe

from layoutc.cli.app import main
from layoutc.diagnostics.diagnostic import Diagnostic, Label, Span, catalogue
from layoutc.diagnostics.renderers import FORMS
from layoutc.diagnostics.sarif import sarif
from layoutc.report import show, tables
from layoutc.report.describe import describe
from layoutc.report.files import file_tables
from layoutc.spec.checks.read import read_spec_bytes

SPECS, ERRORS, GOLDEN = ROOT / "specs", TESTS / "errors", TESTS / "golden" / "show"
# An amax with a history; passes that differ; scales on two levels; a codebook; zero points in words; records.
ARCHETYPES = ("fp8_delayed", "mxfp8", "nvfp4", "nf4_bitsandbytes", "int4_packed128_zeros", "q4_k")


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["show", "--specs", str(SPECS), *map(str, args)])


@pytest.mark.parametrize("name", ["fp8_block", "fp8_rowwise", "mxfp8", "nvfp4", "int8_block", "hybrid_fp8"])
def test_products(name: str, golden: Callable[[Path, str], None]) -> None:
    result = run(name, "--products")
    assert result.exit_code == 0, result.stderr
    golden(GOLDEN.parent / "products" / f"{name}.txt", result.stdout)


WITH_FILES = [
    path
    for path in sorted((*SPECS.glob("*.yaml"), *(UNSHIPPED / "exchanged").glob("*.yaml")))
    if "\nfiles:" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("path", WITH_FILES, ids=lambda path: path.stem)
def test_files_of_others(path: Path, golden: Callable[[Path, str], None]) -> None:
    result = run(path, "--files")
    assert (result.exit_code, result.stderr) == (0, "")
    layout = plan_of(path.read_text(encoding="utf-8"), path.stem).layout
    assert all(held.name in result.stdout for files in layout.files for held in files.binding.planes.values())
    if path.stem in (*ARCHETYPES, "fp8_block", "nvfp4_modelopt"):
        golden(GOLDEN.parent / "files" / f"{path.stem}.txt", result.stdout)


def test_a_tensor_of_sizes_is_a_row_of_its_own() -> None:
    layout = recipe("fp8_block").layout
    first, *others = layout.files
    stated = first.binding._replace(shape=("{module}.weight_shape", "I64"))
    sized = replace(layout, files=(first._replace(binding=stated), *others))
    plain, found = file_tables(layout)[0], file_tables(sized)[0]
    assert found.rows == (*plain.rows, ("the weight's sizes", "{module}.weight_shape", "I64", "2", ""))
    of_zeros = next(files for files in recipe("int8_rowwise").layout.files if files.binding.name == "torchao")
    shown = file_tables(replace(layout, files=(of_zeros,)))[0].rows
    assert shown[-1] == ("zero points", "{module}._weight_zero_point", "I8", "m x 1", "0 for each row")


def test_a_recipe_without_files_of_others_says_so() -> None:
    result = run("nvfp4", "--files")
    assert (result.exit_code, result.stdout) == (0, "nvfp4: its spec states no other checkpoint formats\n")


def test_products_and_files_are_shown_one_at_a_time() -> None:
    result = run("nvfp4", "--products", "--files")
    assert result.exit_code == 2
    assert "--products goes with no other option" in result.stderr


def test_kernels_of_a_recipe_that_has_none(tmp_path: Path) -> None:
    spec = yaml.safe_load((SPECS / "fp8_block.yaml").read_text(encoding="utf-8"))
    text = yaml.safe_dump(spec, sort_keys=False).replace("128", "160")
    (tmp_path / "fp8_block.yaml").write_text(text, encoding="utf-8")
    result = run(tmp_path / "fp8_block.yaml")
    assert result.exit_code == 0, result.output
    why = "a program holds up to 16384 elements, and rowwise has 160 x 160 in 256 x 256 lanes"
    assert f"none, so the reference serves every device: {why}" in result.stdout


@pytest.mark.parametrize("option", [("--json",), ("--shape", "64x64"), ("--picture", "rowwise_scale")])
def test_products_go_with_no_other_option(option: tuple[str, ...]) -> None:
    result = run("nvfp4", "--products", *option)
    assert result.exit_code == 2
    assert "--products goes with no other option" in result.stderr


@pytest.mark.parametrize("name", NAMES)
def test_text(name: str, golden: Callable[[Path, str], None]) -> None:
    result = run(name, "--shape", "384x512", "--world", "3", "--picture", "rowwise_scale")
    assert (result.exit_code, result.stderr) == (0, "")
    assert max(map(len, result.stdout.splitlines())) <= 168
    layout = recipe(name).layout
    assert all(f"\n  {one.name} " in result.stdout for one in (*layout.planes, *layout.buffers))
    if name in ARCHETYPES:
        golden(GOLDEN / f"{name}.txt", result.stdout.replace(recipe(name).layout_id, "(layout id)"))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4_4over6"])
def test_text_where_blocks_are_cut(name: str, golden: Callable[[Path, str], None]) -> None:
    """Scales that travel in one pass, or in both; extremes of blocks told, or all values."""
    result = run(name, "--shape", "160x128", "--world", "3")
    assert (result.exit_code, result.stderr) == (0, "")
    assert max(map(len, result.stdout.splitlines())) <= 168
    golden(GOLDEN / f"{name}-cut.txt", result.stdout.replace(recipe(name).layout_id, "(layout id)"))


def test_pictures_of_every_buffer_fit() -> None:
    for layout, buffer in ((one, buffer) for one in (recipe(name).layout for name in NAMES) for buffer in one.buffers):
        drawn = show.pictures(layout, buffer.name, 256, 384, 80)
        lines = [line for text in drawn for line in text.splitlines()[2:]]
        assert 0 < len(lines) <= 16 + 32
        assert max(map(len, lines)) <= 80


def test_packed_codes_share_a_cell() -> None:
    lines = run("nvfp4", "--shape", "16x32", "--world", "1", "--picture", "columnwise_data").stdout.splitlines()
    assert lines[-15].split()[:4] == ["1", "0,1|1,1", "2,1|3,1", "4,1|5,1"]


def test_padding_is_a_dot() -> None:
    lines = run("fp8_block", "--shape", "200x200", "--world", "1", "--picture", "rowwise_scale").stdout.splitlines()
    assert [line.split() for line in lines[-2:]] == [["0", "0,0", "0,1", ".", "."], ["1", "1,0", "1,1", ".", "."]]


def test_a_path_is_a_spec(tmp_path: Path) -> None:
    path = tmp_path / "mxfp8.yaml"
    path.write_bytes((SPECS / "mxfp8.yaml").read_bytes())
    assert run(path).stdout == run("mxfp8").stdout


def test_json() -> None:
    result = run("nvfp4", "--shape", "128x64", "--world", "2", "--json", "--picture", "rowwise_scale")
    data = json.loads(result.stdout)
    assert (data["name"], data["m"], data["k"], data["alignment"]["rows"]) == ("nvfp4", 128, 64, 16)
    assert [one["bytes_per_rank"] for one in data["passes"]] == [64 * 32 + 4 * 4] * 3
    assert len(data["index_map"]["bytes"]) == 128 * 4
    assert "index_map" not in json.loads(run("nvfp4", "--json").stdout)


@pytest.mark.parametrize(
    "shape", ["4096", "4096x", "0x4", "-1x4", "1x2x3", "axb", "1e3x4", "99999999999x1", "4 x 4", ""]
)
def test_what_is_no_shape_is_a_usage_error(shape: str) -> None:
    result = run("nvfp4", f"--shape={shape}")
    assert result.exit_code == 2
    assert "is not a shape; write rows x columns" in result.stderr


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["nvfp5"], "Did you mean nvfp4?"),
        (["qqq"], "It has adam_m4"),
        (["nowhere.yaml"], "does not exist"),
        (["no/where"], "does not exist"),
        (["."], "is not a file"),
        (["nvfp4", "--world", "0"], "--world"),
        (["nvfp4", "--picture", "rowwise_scales"], "Did you mean rowwise_scale?"),
        (["nvfp4", "--picture", "x"], "It has rowwise_data"),
        (["nvfp4", "--json", "--picture", "rowwise_data"], "Give a smaller --shape"),
    ],
)
def test_usage_errors(args: list[str], hint: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert hint in result.stderr
    assert result.stdout == ""


def test_shapes_that_do_not_work_say_what_would() -> None:
    result = run("nvfp4", "--shape", "100x64", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "error[LC401]: nvfp4 takes rows in multiples of 16, not 100" in result.stderr
    assert "= help: m can be 96 or 112" in result.stderr


def test_cuts_inside_blocks_say_what_they_cost_and_where_they_cost_nothing() -> None:
    lines = run("nvfp4", "--shape", "144x64").stdout.splitlines()
    table = [line.strip() for line in lines[lines.index("Sharded over 8 ranks") :]][1:7]
    assert [re.sub(" +", " ", line) for line in table] == [
        "rows 18 a rank",
        "cuts 7 of 7 inside a block of 16 rows; 8 ranks with part of one",
        "scales each rank sends those of all blocks that it has rows of: 4 bytes a rank more in each pass",
        "optimizer step 1,024 bytes a rank in an all-gather that all weights share: "
        "the least and greatest value of each column of a rank's first and last block",
        "buffers none of a shard by itself; the gathered weight has them",
        "costs nothing 128 or 256 rows over 8 ranks, or 144 rows over 3 or 9 ranks",
    ]
    inside = json.loads(run("nvfp4", "--shape", "144x64", "--json").stdout)["alignment"]["cut_blocks"]
    assert (inside["cuts"], inside["exchange_bytes_per_rank"]) == (7, 2 * 2 * 64 * 4)
    assert json.loads(run("nvfp4", "--json").stdout)["alignment"]["cut_blocks"] is None
    assert "or 130 rows over 1 rank\n" in run("fp8_block", "--shape", "130x64", "--world", "2").stdout


def test_a_spec_with_errors_is_not_shown() -> None:
    result = run(ERRORS / "octal.yaml")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "error[LC103]" in result.stderr


def test_ranks_without_rows_and_short_ones_are_said() -> None:
    text = run("fp8_current", "--shape", "7x5", "--world", "3").stdout
    assert "Sharded over 3 ranks\n  rows  3 a rank, the last 1\n  cuts  none inside a block\n" in text
    text = run("fp8_current", "--shape", "4x5", "--world", "6").stdout
    assert "Sharded over 6 ranks\n  rows  1 a rank, 2 ranks without rows\n" in text
    assert "Sharded over 1 rank\n  rows  4 a rank\n" in run("fp8_current", "--shape", "4x5", "--world", "1").stdout


def test_filling_is_said() -> None:
    text = (SPECS / "mxfp8.yaml").read_text(encoding="utf-8")
    text = text.replace("m: 32, k: 1}", "m: 16, k: 1}").replace("m/32 k", "m/16 k")
    facts = describe(plan_of(text, "mxfp8"), 128, 128, 2)
    assert "filling up to the larger pass: 256 in forward" in tables.plain(show.tables(facts))


def test_terminals_get_rich_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        main(["show", "nvfp4", "--specs", str(SPECS), "--picture", "rowwise_scale"])
    assert not ended.value.code
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "─" in text, "rich draws rules"
    assert "rowwise_data" in text
    assert "as a GEMM wants it" in text
    assert max(map(len, text.splitlines())) <= 100


def test_rich_shows_every_cell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    drawn = show.tables(describe(recipe("mxfp8"), 128, 128, 2))
    tables.print_rich(drawn)
    text = capsys.readouterr().out
    assert all(cell in text for table in drawn for row in table.rows for cell in row)


@pytest.mark.parametrize("length", [tables.NAME, tables.NAME + 1])
def test_names_are_not_broken_and_texts_are(
    length: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a narrow terminal, in a column whose cells are at most as long as a name."""
    monkeypatch.setenv("COLUMNS", "30")
    name, text = "n" * length, "word " * 20
    tables.print_rich([tables.Table("Title", ("a", "b", "c"), ((name, text, "1"), ("m", "x", "22")), frozenset({2}))])
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "Title"
    names = [line.split()[0] for line in lines if line.startswith(" n")]
    assert "".join(names) == name
    assert (len(names) == 1) == (length == tables.NAME)
    assert [line.rstrip()[-2:] for line in lines if line.rstrip().endswith(("1", "2"))] == [" 1", "22"]


def test_plain_tables_have_columns_two_spaces_apart() -> None:
    made = [
        tables.Table("A", ("name", "n"), (("x", "1"), ("longer", "22")), frozenset({1})),
        tables.Table("", (), (("k", "v"), ("key", ""))),
        tables.Table("C", (), ()),
    ]
    assert tables.plain(made) == "A\n  name     n\n  x        1\n  longer  22\n\n  k    v\n  key\n\nC\n"


# --------------------------------------------------------------------------------------------------------------- SARIF
def check_sarif(log: dict[str, Any], expected: list[Diagnostic]) -> None:
    """What SARIF 2.1.0 demands of the parts that are written."""
    assert log["version"] == "2.1.0"
    (one,) = log["runs"]
    rules = one["tool"]["driver"]["rules"]
    assert one["tool"]["driver"]["name"] == "layoutc"
    assert one["columnKind"] == "unicodeCodePoints"
    assert len({rule["id"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["id"] in catalogue()
        assert all(rule[key]["text"] for key in ("shortDescription", "fullDescription", "help"))
        assert rule["defaultConfiguration"]["level"] in ("error", "warning", "note", "none")
    assert len(one["results"]) == len(expected)
    for result, item in zip(one["results"], expected, strict=True):
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"] == item.code
        assert result["level"] == item.severity
        assert item.message in result["message"]["text"]
        assert all(isinstance(place["id"], int) for place in result.get("relatedLocations", []))
        places = [*result["locations"], *result.get("relatedLocations", [])]
        labels = [item.primary, *item.secondary]
        for place, label in zip(places, labels, strict=True):
            physical = place["physicalLocation"]
            assert physical["artifactLocation"]["uri"]
            assert " " not in physical["artifactLocation"]["uri"]
            if label is None:
                assert "region" not in physical
            else:
                span = label.span
                keys = ("startLine", "startColumn", "endLine", "endColumn")
                assert [physical["region"][key] for key in keys] == [
                    span.line,
                    span.column,
                    span.end_line,
                    span.end_column,
                ]


@pytest.mark.sample(16)
@pytest.mark.parametrize("case", sorted(ERRORS.glob("*.yaml"))[::5], ids=lambda path: path.stem)
def test_sarif_of_bad_specs(case: Path) -> None:
    found = read_spec_bytes(case.read_bytes(), f"specs/{case.name}")[1]
    check_sarif(json.loads(sarif(found)), found)


def test_sarif_without_findings_is_a_log_too() -> None:
    result = CliRunner().invoke(main, ["check", "--format", "sarif", str(SPECS / "mxfp8.yaml")])
    assert result.exit_code == 0
    check_sarif(json.loads(result.stdout), [])
    assert "sarif" in FORMS


def test_sarif_paths() -> None:
    label = Label(Span(1, 1, 1, 2))
    log = json.loads(sarif([Diagnostic("LC101", "a", "my specs/ä.yaml", label), Diagnostic("LC901", "b", "/a b/c.py")]))
    uris = [
        result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in log["runs"][0]["results"]
    ]
    assert uris == ["my%20specs/%C3%A4.yaml", "file:///a%20b/c.py"]


# ---------------------------------------------------------------------------------------------------------- pre-commit
@pytest.mark.checkout
def test_pre_commit_hooks_are_commands() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert [hook["id"] for hook in hooks] == ["layoutc-check", "layoutc-build"]
    for hook in hooks:
        program, verb, *rest = shlex.split(hook["entry"])
        assert program == "layoutc"
        command = main.get_command(click.Context(main), verb)
        assert command is not None
        command.make_context(verb, rest)
        assert {"id", "name", "description", "entry", "language", "files"} <= set(hook)


def test_the_list_says_what_each_recipe_is_for() -> None:
    """Only those that weights can be quantized to are for training; those of one set of codes, for freezing too."""
    names = {"state": "moment_fp8", "wire": "grad_int4", "operand": "nvfp4_gradient"}
    names |= {"train, freeze": "nf4", "train": "mxfp8"}
    done = CliRunner().invoke(main, ["list", *names.values(), "--json"])
    assert {one["name"]: one["use"] for one in json.loads(done.stdout)} == {name: use for use, name in names.items()}

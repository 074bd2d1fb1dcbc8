"""`layoutc breaking` in small git repositories, and what it says of two layouts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from places import ROOT
from test_describe import NAMES, plan_of, recipe

from layoutc.cli.app import main
from layoutc.plan.plan import Plan
from layoutc.report.breaking import SHOWN, Change, Difference, compare, differences, findings

SPECS = ROOT / "specs"
Edit = Callable[[dict[str, Any]], object]


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def text_of(name: str, edit: Edit | None = None, rename: str | None = None) -> str:
    data = yaml.safe_load((SPECS / f"{name}.yaml").read_text(encoding="utf-8"))
    if rename:
        data["name"] = rename
    if edit:
        data.pop("files", None)  # which an edit may not fit
        edit(data)
    return yaml.safe_dump(data, sort_keys=False)


@pytest.mark.parametrize("count", [0, 1, SHOWN, SHOWN + 1, SHOWN + 4])
def test_so_many_differences_are_spelled_out(count: int) -> None:
    differing = tuple(Difference(f"fact {number}", "old", "new") for number in range(count))
    (found,) = findings([Change("a", "changed", "a-1", "a-2", None, differing)], "main", {"a": "specs/a.yaml"})
    listed = [f"fact {number}: old -> new" for number in range(min(count, SHOWN))]
    listed += [f"and {count - SHOWN} more"] if count > SHOWN else []
    assert (found.code, found.path, found.why) == ("LC601", "specs/a.yaml", "; ".join(listed) or None)
    assert found.message == "bytes of recipe `a` have changed since main: a-1 -> a-2"


def test_each_status_has_its_finding_or_none() -> None:
    changes = [
        Change("a", "unchanged", "a-1", "a-1"),
        Change("b", "added", None, "b-1"),
        Change("c", "removed", "c-1", None),
        Change("d", "renamed", "d-1", "d-1", "e"),
    ]
    gone, renamed = findings(changes, "v1", {name: f"{name}.yaml" for name in "abcd"})
    assert (gone.code, gone.path) == ("LC602", "c.yaml")
    assert gone.message == "recipe `c` of v1 is gone, and so is its layout c-1"
    assert (renamed.code, renamed.path, renamed.help) == ("LC603", "d.yaml", "import `e` where `d` is imported")
    assert renamed.message == "recipe `d` of v1 is now `e`; its bytes are the same"


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two specs, committed, as the current folder."""
    for variable in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(variable, raising=False)
    git(tmp_path, "init", "-q", "-b", "main")
    (tmp_path / "specs").mkdir()
    for name in ("mxfp8", "nvfp4"):
        (tmp_path / "specs" / f"{name}.yaml").write_text(text_of(name), encoding="utf-8")
    (tmp_path / "specs" / "README.md").write_text("not a spec", encoding="utf-8")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def breaking(*args: str) -> Result:
    return CliRunner().invoke(main, ["breaking", "--against", *(args or ("main",))])


def statuses(*args: str) -> dict[str, str]:
    return {item["name"]: item["status"] for item in json.loads(breaking(*(args or ("main",)), "--json").stdout)}


def test_nothing_changed(repo: Path) -> None:
    result = breaking()
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["unchanged", "mxfp8"], ["unchanged", "nvfp4"]]
    assert all(recipe(line.split()[1]).layout_id in line for line in lines)


def test_words_and_accepted_shapes_break_nothing(repo: Path) -> None:
    def edit(data: dict[str, Any]) -> None:
        data["summary"] = "other words"
        data["shape"] = {"m": 64, "k": 64}

    (repo / "specs" / "mxfp8.yaml").write_text(text_of("mxfp8", edit), encoding="utf-8")
    assert breaking().exit_code == 0
    assert statuses()["mxfp8"] == "unchanged"


def test_changed_bytes(repo: Path) -> None:
    def edit(data: dict[str, Any]) -> None:
        data["orientations"]["rowwise"]["block"] = {"m": 1, "k": 16}
        data["orientations"]["rowwise"]["scale"]["layout"] = "m k/16"

    path = repo / "specs" / "mxfp8.yaml"
    path.write_text(text_of("mxfp8", edit), encoding="utf-8")
    result = breaking("main", "--format", "full")
    assert result.exit_code == 1
    old, new = recipe("mxfp8").layout_id, plan_of(path.read_text(encoding="utf-8"), "mxfp8").layout_id
    assert f"changed   mxfp8  {old} -> {new}\n" in result.stdout
    assert f"error[LC601]: bytes of recipe `mxfp8` have changed since main: {old} -> {new}" in result.stderr
    assert "rowwise.block.k: 32 -> 16" in result.stderr
    assert "rowwise_scale.dims.1.per: 32 -> 16" in result.stderr
    (item,) = (item for item in json.loads(breaking("main", "--json").stdout) if item["status"] == "changed")
    assert {"fact": "rowwise.block.k", "before": "32", "after": "16"} in item["differences"]


def test_a_rule_that_changed_in_layoutc_itself_is_seen_in_the_code_built_then(repo: Path) -> None:
    """The spec is the same, and reads the same on both sides; the id in the committed code is another."""
    assert CliRunner().invoke(main, ["build", "-q"]).exit_code == 0
    code = repo / "generated" / "nvfp4" / "layout.py"
    now = recipe("nvfp4").layout_id
    code.write_text(code.read_text(encoding="utf-8").replace(now, "0123456789ab"), encoding="utf-8")
    git(repo, "add", ".")
    git(repo, "commit", "-q", "-m", "built by another version")
    assert statuses() == {"mxfp8": "unchanged", "nvfp4": "changed"}
    result = breaking("main", "--format", "full")
    assert result.exit_code == 1
    assert f"0123456789ab -> {now}" in result.stderr
    assert "layoutc's rules and formats: as they were -> as they are" in result.stderr
    (repo / "specs" / "nvfp4.yaml").write_text(text_of("nvfp4") + "# a comment\n", encoding="utf-8")
    git(repo, "commit", "-q", "-am", "the code was not built again, so it says nothing of this spec")
    assert statuses() == {"mxfp8": "unchanged", "nvfp4": "unchanged"}


def test_added_removed_and_renamed(repo: Path) -> None:
    specs = repo / "specs"
    (specs / "mxfp8.yaml").unlink()
    (specs / "fp8_block.yaml").write_text(text_of("fp8_block"), encoding="utf-8")
    result = breaking()
    assert result.exit_code == 1
    assert "specs/mxfp8.yaml: error[LC602] recipe `mxfp8` of main is gone" in result.stderr
    assert statuses() == {"fp8_block": "added", "mxfp8": "removed", "nvfp4": "unchanged"}

    (specs / "mxfp8_v1.yaml").write_text(text_of("mxfp8", rename="mxfp8_v1"), encoding="utf-8")
    result = breaking()
    assert result.exit_code == 0, "a rename changes no byte"
    assert "warning[LC603] recipe `mxfp8` of main is now `mxfp8_v1`" in result.stderr
    assert statuses() == {"fp8_block": "added", "mxfp8": "renamed", "nvfp4": "unchanged"}
    assert "renamed   mxfp8 -> mxfp8_v1" in result.stdout


def test_a_copy_is_not_a_rename(repo: Path) -> None:
    (repo / "specs" / "mxfp8_v1.yaml").write_text(text_of("mxfp8", rename="mxfp8_v1"), encoding="utf-8")
    assert statuses() == {"mxfp8": "unchanged", "mxfp8_v1": "added", "nvfp4": "unchanged"}


def test_each_new_name_stands_for_one_old_name() -> None:
    plan, other = recipe("mxfp8"), recipe("nvfp4")
    found = compare({"a": plan, "b": plan, "c": other}, {"d": plan, "c": plan})
    assert [(change.name, change.status, change.now) for change in found] == [
        ("a", "renamed", "d"),
        ("b", "removed", None),
        ("c", "changed", None),
    ]


def test_specs_that_one_side_can_not_read(repo: Path) -> None:
    """An error of then is LC604; an error of now is reported as `check` does. Neither counts as removed or added."""
    specs = repo / "specs"
    (specs / "nvfp4.yaml").write_text("layoutc: 1\nnmae: nvfp4\n", encoding="utf-8")
    result = breaking()
    assert result.exit_code == 1
    assert "specs/nvfp4.yaml:2:1: error[LC201]" in result.stderr
    assert statuses() == {"mxfp8": "unchanged"}

    git(repo, "commit", "-q", "-a", "-m", "two")
    (specs / "nvfp4.yaml").write_text(text_of("nvfp4"), encoding="utf-8")
    result = breaking("HEAD", "--format", "full")
    assert result.exit_code == 1
    assert "error[LC604]: the spec at HEAD is not one that this version of layoutc reads" in result.stderr
    assert "= why: LC2" in result.stderr
    assert statuses("HEAD") == {"mxfp8": "unchanged"}
    assert statuses("HEAD~1") == {"mxfp8": "unchanged", "nvfp4": "unchanged"}


def test_a_folder_that_is_new(repo: Path) -> None:
    (repo / "deep" / "mine").mkdir(parents=True)
    (repo / "deep" / "mine" / "mxfp8.yaml").write_text(text_of("mxfp8"), encoding="utf-8")
    assert statuses("main", "--specs", "deep/mine") == {"mxfp8": "added"}


def test_from_another_folder(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert statuses("main", "--specs", str(repo / "specs")) == {"mxfp8": "unchanged", "nvfp4": "unchanged"}
    monkeypatch.chdir(repo / "specs")
    assert statuses("main", "--specs", ".") == {"mxfp8": "unchanged", "nvfp4": "unchanged"}


def test_for_machines(repo: Path) -> None:
    (repo / "specs" / "mxfp8.yaml").unlink()
    github = breaking("main", "--format", "github")
    assert github.stdout.startswith("::error title=layoutc (LC602),file=specs/mxfp8.yaml::")
    assert github.exit_code == 1
    log = json.loads(breaking("main", "--format", "sarif").stdout)
    assert [result["ruleId"] for result in log["runs"][0]["results"]] == ["LC602"]


@pytest.mark.parametrize("revision", ["nowhere", "--help-me", "-x", "main:specs", ""])
def test_no_such_revision(repo: Path, revision: str) -> None:
    result = CliRunner().invoke(main, ["breaking", f"--against={revision}"])
    assert result.exit_code == 2
    assert "is not a revision of this repository" in result.stderr
    assert result.stdout == ""


def test_no_repository_and_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert breaking().exit_code == 2
    assert "specs is not a folder" in breaking().stderr
    (tmp_path / "specs").mkdir()
    result = breaking()
    assert result.exit_code == 2
    assert "specs is not in a git repository" in result.stderr


def test_no_git(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(repo))
    result = breaking()
    assert result.exit_code == 2
    assert "`git` command is not installed" in result.stderr


# ---------------------------------------------------------------------------------------------------------------- facts
def edited(name: str, edit: Edit) -> Plan:
    return plan_of(text_of(name, edit), name)


def into(*path: str, **values: Any) -> Edit:
    def edit(data: dict[str, Any]) -> None:
        for key in path:
            data = data[key]
        data.update(values)

    return edit


CHANGES = {
    "pad": ("nvfp4", into("orientations", "rowwise", "scale", pad=[256, 4]), {"rowwise_scale.dims.0.multiple"}),
    "order": ("fp8_block", into("orientations", "columnwise", "data", layout="m k"), {"columnwise_data.dims.0.axis"}),
    "pack": ("nvfp4", into("element", pack="high-first"), {"rowwise.low_first", "columnwise_data.low_first"}),
    "rounding": ("mxfp8", into("scale", round="down"), {"rowwise.rounding", "columnwise.rounding"}),
    "element": ("fp8_current", into("element", format="e5m2"), {"rowwise.element.exponent"}),
    "parameter": ("fp8_block", into("scale", **{"power-of-two": False}), {"rowwise.parameters.power-of-two"}),
    "random bits": ("nvfp4_1d", into("element", round="stochastic"), {"rowwise.stochastic", "columnwise.stochastic"}),
    "signs": (
        "nvfp4_gradient",
        into("orientations", "columnwise", "transform", signs=0xACE1),
        {"columnwise.transform"},
    ),
    "no transform": (
        "nvfp4_activation",
        lambda data: data["orientations"]["columnwise"].pop("transform"),
        {"columnwise.transform"},
    ),
    "history": ("fp8_delayed", into("scale", history={"length": 16, "pick": "max"}), {"history"}),
    "pick": ("fp8_delayed", into("scale", history={"length": 1024, "pick": "most-recent"}), {"pick"}),
    "orientation": ("fp8_block", lambda data: data["orientations"].pop("columnwise"), {"columnwise_data"}),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_changed_is_named(case: str) -> None:
    name, edit, expected = CHANGES[case]
    old, new = recipe(name), edited(name, edit)
    assert old.layout_id != new.layout_id
    found = {one.fact: one for one in differences(old.layout, new.layout)}
    assert expected <= set(found)
    assert all(one.before != one.after for one in found.values())
    back = {one.fact: one for one in differences(new.layout, old.layout)}
    assert {fact: (one.after, one.before) for fact, one in back.items()} == {
        fact: (one.before, one.after) for fact, one in found.items()
    }


def test_a_source_of_its_own_is_one_difference() -> None:
    """A block of its own gives an orientation its own planes: said once, not for each number in them."""

    def edit(data: dict[str, Any]) -> None:
        data["orientations"]["columnwise"] |= {"block": {"m": 32, "k": 16}}

    found = {
        one.fact: (one.before, one.after) for one in differences(recipe("nvfp4").layout, edited("nvfp4", edit).layout)
    }
    assert found["columnwise.source"] == ("rowwise", "columnwise")
    assert found["columnwise.block"] == ("none", "present")
    assert "columnwise.block.k" not in found


def test_layouts_have_differences_exactly_when_their_ids_differ() -> None:
    """Of each recipe: none from itself, read again, and some from its neighbor, which is often of its family."""
    for before, name in pairwise([NAMES[-1], *NAMES]):
        a, b = recipe(before), recipe(name)
        assert (a.layout_id == b.layout_id) == (differences(a.layout, b.layout) == ()), name
        assert differences(b.layout, recipe.__wrapped__(name).layout) == (), name


LABELS = {
    "summary": lambda data: data.update(summary="words"),
    "shape": lambda data: data.update(shape={"m": 64, "k": 64}),
    "swizzle": lambda data: data.pop("gemm"),
}


@pytest.mark.parametrize("label", LABELS)
def test_labels_are_no_differences(label: str) -> None:
    old, new = recipe("mxfp8"), edited("mxfp8", LABELS[label])
    assert old.layout_id == new.layout_id
    assert differences(old.layout, new.layout) == ()


def test_a_format_under_another_name_is_no_difference() -> None:
    def edit(data: dict[str, Any]) -> None:
        data["formats"] = {"mine": {"sign": 1, "exponent": 4, "mantissa": 3, "bias": 7, "nan": [0x7F]}}
        data["element"] = {"format": "mine"}

    old, new = recipe("mxfp8"), edited("mxfp8", edit)
    assert old.layout_id == new.layout_id
    assert differences(old.layout, new.layout) == ()

"""`layoutc test` and the pytest plugin: what they say, and how they end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import CliRunner, Result
from injected_faults import MUTANTS, edit
from places import ROOT

from layoutc.cli.app import main
from layoutc.conformance.plugin import CheckItem, Suite
from layoutc.conformance.registry import TALLY, Check, Failure, all_checks
from layoutc.conformance.subject import BadSpec, Subject, compile_subject

SPECS = sorted((ROOT / "specs").glob("*.yaml"))


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def test_the_command_reports_each_check_with_its_meaning() -> None:
    result = run("test", "--specs", ROOT / "specs", "fp8_current", "--check", "encode", "--check", "history")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert re.fullmatch(r"fp8_current  \(.*fp8_current\.yaml, layout \w{12}\)", lines[0])
    assert re.fullmatch(r"  pass  encode +\d+\.\d s  elements at, next to .*", lines[1])
    assert re.fullmatch(r"  skip  history +\d+\.\d s  the current amax decides the scale", lines[2])
    assert re.fullmatch(r"  1 passed, 1 skipped in \d+\.\d s", lines[3])


def test_json_is_one_object_a_recipe() -> None:
    result = run("test", *SPECS[:2], "--json", "--check", "decode", "--seed", 3)
    items = [json.loads(text) for text in result.stdout.splitlines()]
    assert [item["recipe"] for item in items] == [path.stem for path in SPECS[:2]]
    assert all(item["passed"] and item["seed"] == 3 for item in items)
    assert items[0]["checks"][0]["check"] == "decode"
    assert items[0]["checks"][0]["status"] == "pass"


def test_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 for a check that fails and for a spec with errors, 2 for what can't be asked."""
    bad = tmp_path / "bad.yaml"
    bad.write_text("layoutc: 1\nname: bad\n", encoding="utf-8")
    result = run("test", bad, "--check", "decode")
    assert result.exit_code == 1
    assert "bad.yaml:1:1: error[" in result.stderr
    with pytest.raises(BadSpec):
        compile_subject(bad)
    result = run("test", "--specs", ROOT / "specs", "nvfp44")
    assert (result.exit_code, "Did you mean nvfp4?" in result.stderr) == (2, True)
    result = run("test", SPECS[0], "--check", "decod")
    assert (result.exit_code, "Did you mean decode?" in result.stderr) == (2, True)
    assert run("test", tmp_path / "none.yaml").exit_code == 2
    assert run("test", "--specs", tmp_path / "none").exit_code == 2

    recipe, *fault = MUTANTS["a tie goes to the odd code"][:4]

    def broken(path: Path, **options: object) -> Subject:
        return compile_subject(path, seed=int(str(options["seed"])), edit=edit(*fault))

    monkeypatch.setattr("layoutc.conformance.subject.compile_subject", broken)
    result = run("test", ROOT / "specs" / f"{recipe}.yaml", "--check", "encode", "--no-distributed")
    assert result.exit_code == 1
    assert re.search(
        r"  FAIL  encode .*\n +rowwise_data differs in \d+ of \d+ bytes\n +plane rowwise_data, seed 0", result.stdout
    )


def test_list_says_what_each_check_means() -> None:
    lines = run("test", "--list").stdout.splitlines()
    assert len(lines) == len(all_checks()) >= 35
    assert all(re.fullmatch(r"[a-z0-9-]+ +\S.*", text) for text in lines)


# --------------------------------------------------------------------------------------------------------------- plugin
def pytest_run(folder: Path, *args: object) -> subprocess.CompletedProcess[str]:
    """pytest as a third party runs it, in a folder of its own, and without the interpreter that tests/ asks for."""
    plugin = ["-p", "layoutc.conformance.plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugin, *map(str, args)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TRITON_INTERPRET": "0"}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=900, check=False, env=environment
    )


@pytest.mark.thorough
@pytest.mark.slow
def test_the_plugin_runs_a_spec_beside_other_tests(tmp_path: Path) -> None:
    text = (ROOT / "specs" / "mxfp8.yaml").read_text(encoding="utf-8").replace("name: mxfp8", "name: mine")
    (tmp_path / "mine.yaml").write_text(text.replace("32", "16"), encoding="utf-8")
    (tmp_path / "other.yaml").write_text("not: a spec\n", encoding="utf-8")
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n", encoding="utf-8")
    wanted = ("-k", "encode or own or fsdp2")  # of which the last would need processes
    done = pytest_run(tmp_path, "--layoutc-spec", "mine.yaml", "--layoutc-no-distributed", "-v", *wanted)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_own.py::test_own PASSED" in done.stdout
    assert done.stdout.count("::encode PASSED") == 1
    assert "other.yaml" not in done.stdout
    assert "::fsdp2" not in done.stdout


@pytest.mark.thorough
def test_the_plugin_reports_what_was_found_and_not_its_own_frames(tmp_path: Path) -> None:
    """Of a file, and of a shipped recipe by its name."""
    (tmp_path / "bad.yaml").write_text("layoutc: 1\nname: bad\n", encoding="utf-8")
    done = pytest_run(tmp_path, "--layoutc-spec", "bad.yaml", "--layoutc-spec", "mxfp8", "-k", "decode", "-v")
    assert done.returncode == 1, done.stdout
    assert "error[" in done.stdout
    assert "Traceback" not in done.stdout
    assert done.stdout.count("::decode PASSED") == 1, done.stdout + done.stderr
    assert pytest_run(tmp_path, "--layoutc-spec", "none.yaml").returncode == 4


def test_the_plugin_asks_a_check_as_the_command_does() -> None:
    """What only weights do is asked of weights alone; a check has to compare something; warnings fail nobody's run."""
    item, suite = object.__new__(CheckItem), object.__new__(Suite)
    item.parent, suite.subject = suite, Mock(seed=0)

    def warns(_: Subject) -> None:
        warnings.warn("of torch's", stacklevel=1)
        TALLY.bytes += 1

    item.check = Check("name", "meaning", warns)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        item.runtest()
    item.check = Check("name", "meaning", lambda _: None)
    with pytest.raises(Failure, match="it compared no bytes") as found:
        item.runtest()
    assert item.repr_failure(found).startswith("failed: meaning\n")
    suite.subject.plan.not_weights = "for gradients"
    item.check = Check("name", "meaning", warns, of_weights=True)
    with pytest.raises(pytest.skip.Exception, match="the recipe is for gradients"):
        item.runtest()


def test_the_plugin_ends_what_it_started() -> None:
    """Once, whether there are processes or not; and nothing where nothing was compiled."""
    for ranks in (None, Mock()):
        suite = object.__new__(Suite)
        suite.ranks, suite.subject = ranks, None
        suite.close()
        suite.subject = subject = Mock()
        suite.close()
        suite.close()
        subject.close.assert_called_once_with()
        assert suite.subject is None
        assert ranks is None or ranks.stop.called


def test_the_plugin_imports_nothing_heavy_until_it_is_asked() -> None:
    program = (
        "import sys, layoutc.conformance.plugin; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'pydantic', 'yaml')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

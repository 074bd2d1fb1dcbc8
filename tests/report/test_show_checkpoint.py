"""What `layoutc show --checkpoint` prints for a saved model, letter by letter; and for folders that are none."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from places import ROOT, TESTS

from layoutc.cli.app import main
from layoutc.report import show_checkpoint, tables

torch = pytest.importorskip("torch")

GOLDEN = TESTS / "golden" / "show_checkpoint"


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["show", *map(str, args)])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its optimizer's state, a layout that nobody has, and a name that a terminal would obey."""
    import layoutc
    import layoutc.checkpoint
    from layoutc.runtime.weight import stored_form

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128, bias=bias) for bias in (True, False, False)))
    for layer, recipe in zip(model, ("nvfp4", "mxfp8"), strict=False):
        layoutc.quantize_(layer, recipe)
    strange = torch.nn.Linear(128, 32, bias=False)
    layoutc.quantize_(strange, "mxfp8")
    state: dict[str, Any] = {"model": model.state_dict(), "strange": strange.weight.detach(), "step": 3}
    state |= {"red \x1b[31m": torch.arange(2), "a.very" + 20 * ".long" + ".name": torch.zeros(2, 3, 4)}
    folder, state_of = tmp_path_factory.mktemp("saved") / "step-3", stored_form.state_of

    def other(tensor: Any) -> dict[str, Any]:
        return state_of(tensor) | ({"layout_id": "0123456789ab", "language": 9} if len(tensor) == 32 else {})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_form, "state_of", other)
        layoutc.checkpoint.save(state, folder, no_dist=True)
    return folder


def plain(text: str, folder: Path) -> str:
    """Without what differs from one machine to the next."""
    text = text.replace(str(folder), "(folder)")
    text = re.sub(r"(?<=on disk  )[\d,]+", "(number)", text)
    text = re.sub(r"(?<=the folder has )[\d.]+", "(number)", text)
    return re.sub(r"\b[0-9a-f]{12}\b", "(layout id)", text)


def test_text(saved: Path, golden: Callable[[Path, str], None]) -> None:
    result = run("--checkpoint", saved)
    assert (result.exit_code, result.stderr) == (0, "")
    golden(GOLDEN / "saved.txt", plain(result.stdout, saved))
    assert "\x1b" not in result.stdout


def test_json(saved: Path) -> None:
    result = run("--checkpoint", saved, "--json", "--thorough")
    assert (result.exit_code, result.stderr) == (0, "")
    data = json.loads(result.stdout)
    assert data.keys() == {
        "folder", "form", "thorough", "entries", "totals", "files", "bytes_on_disk", "bf16_bytes"
    }  # fmt: skip
    entries = {one["name"]: one for one in data["entries"]}
    assert data["thorough"] is True
    assert entries["a.very" + 20 * ".long" + ".name"]["shape"] == [2, 3, 4]
    assert entries["red \x1b[31m"]["kind"] == "int64"
    assert entries["model.1.weight"]["layouts"][0] | {"layout_id": "", "spec_sha256": ""} == {
        "recipe": "mxfp8", "layout_id": "", "language": 1, "spec_sha256": "", "installed": True, "difference": None,
        "pieces": 1,
    }  # fmt: skip
    assert entries["strange"]["layouts"][0]["installed"] is False


def test_wide_names_are_whole_when_piped(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main(["show", "--checkpoint", str(saved)])
    assert not ended.value.code
    assert "a.very" + 20 * ".long" + ".name  2x3x4" in capsys.readouterr().out


def test_terminals_get_rich_tables(saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main(["show", "--checkpoint", str(saved)])
    assert not ended.value.code
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "─" in text, "rich draws rules"
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 200


def test_mixed_tensors_are_named() -> None:
    from layoutc.checkpoint.common.entries import EntryFacts, LayoutFacts
    from layoutc.checkpoint.inspection import CheckpointFacts

    layouts = tuple(LayoutFacts(name, name[:2] * 6, 1, "", True, None, 2) for name in ("mxfp8", "nvfp4"))
    one = EntryFacts("weight", "mixed", (8, 4), "bfloat16", layouts, 1, (), (), 5, 100, 3.125, 64)
    text = tables.plain(show_checkpoint.tables(CheckpointFacts("x", "y", True, (one,), (), 1, 100, 64)))
    assert "weight  2 in mxfp8 mxmxmxmxmxmx, 2 in nvfp4 nvnvnvnvnvnv, 1 plain" in text


def test_damaged_and_torn_folders(saved: Path, tmp_path: Path) -> None:
    result = run("--checkpoint", tmp_path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {tmp_path} is not a checkpoint")
    (tmp_path / "__0_0.distcp").touch()
    result = run("--checkpoint", tmp_path, "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "did not finish" in result.stderr
    raw = (saved / ".metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(raw[:-9])
    result = run("--checkpoint", tmp_path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert ".metadata is damaged" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "name a RECIPE, or a --checkpoint"),
        (["mxfp8", "--checkpoint", "."], "do not go with it"),
        (["--checkpoint", ".", "--world", "8"], "do not go with it"),
        (["--checkpoint", ".", "--shape", "4x4"], "do not go with it"),
        (["--checkpoint", ".", "--picture", "x"], "do not go with it"),
        (["--checkpoint", ".", "--specs", "specs"], "do not go with it"),
        (["--checkpoint", "nowhere"], "does not exist"),
        (["mxfp8", "--thorough"], "--thorough needs --checkpoint"),
    ],
)
def test_usage_errors(args: list[str], message: str) -> None:
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_a_file_that_is_no_gguf_file_is_refused() -> None:
    result = run("--checkpoint", __file__)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "is not a GGUF file" in result.stderr


def test_without_torch_it_says_so(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"from layoutc.cli.app import main; main(['show', '--checkpoint', {str(tmp_path)!r}])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 2
    assert "`layoutc show --checkpoint` needs torch" in result.stderr

"""`layoutc bench` and `layoutc demo` draw what they measured, now or again from their JSON, and refuse other files."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from layoutc.bench import measure
from layoutc.cli.app import main

needs_matplotlib = pytest.mark.skipif(
    find_spec("matplotlib") is None, reason="needs matplotlib: pip install 'layoutc[charts]'"
)
FIXED = {"dtype": "bfloat16", "nbytes": 8, "us": 2.0, "flushed_us": 3.0, "flushed_share": 0.7, "differs": None}


def row(recipe: str, work: str, shape: tuple[int, int] = (8, 8), **more: Any) -> dict[str, Any]:
    return {"recipe": recipe, "work": work, "shape": list(shape), "share": 0.9, **FIXED, **more}


BENCH: dict[str, Any] = {
    **{"kind": "kernels", "torch": "2.13.0", "triton": "3.7.1", "device": "a card", "hooks": []},
    "kernels": [
        row("", "amax"),
        row("mxfp8", "quantize rowwise"),
        row("mxfp8", "quantize rowwise", dtype="float32"),
        row("mxfp8", "quantize 16 weights of 8x8, one launch", share=None),
        row("nvfp4", "quantize rowwise"),
        row("nvfp4", "quantize rowwise", (16, 16)),
    ],
    "peers": [
        row("mxfp8", "quantize 1x32, torchao to_mx compiled", share=0.5, differs=0.0),
        row("", "quantize 1x128, torchao", share=0.6, differs=0.01),
        row("fp8_block", "quantize, of a recipe without kernels", differs=0.01),
        row("nvfp4", "quantize rowwise, torch.compile", (16, 16), differs=0.0),
    ],
}
RUN = {"loss": 2.0, "gathered": 1 << 20, "resident": 2 << 20, "step_ms": 3.0, "verified": 4, "resumed": True}
DEMO: dict[str, Any] = {
    **{"kind": "demo", "torch": "2.13.0", "device": "CPU", "processes": 2, "seconds": 8.0},
    "rows": [{"name": name, "losses": [5.0, 4.0, 3.0], **RUN} for name in ("bf16", "mxfp8")],
}


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def saved(folder: Path, data: object) -> Path:
    path = folder / "result.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


@needs_matplotlib
@pytest.mark.parametrize(
    ("command", "data", "lines"),
    [
        (
            "bench",
            BENCH,
            [
                *("amax", "quantize 1x128, torchao", "mxfp8 quantize rowwise"),
                *("mxfp8 quantize 1x32, torchao to_mx compiled", "nvfp4 quantize rowwise"),
                "fp8_block quantize, of a recipe without kernels",
            ],
        ),
        ("demo", DEMO, ["bf16", "mxfp8"]),
    ],
    ids=["bench", "demo"],
)
def test_results_are_drawn_again(tmp_path: Path, command: str, data: dict[str, Any], lines: list[str]) -> None:
    path = saved(tmp_path, data)
    for suffix, begin in (("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")):
        drawn = tmp_path / f"{command}.{suffix}"
        found = run(command, path, "--chart", drawn)
        assert found.exit_code == 0, found.output
        assert found.stderr == f"{drawn}: {', '.join(lines)}\n"
        first = drawn.read_bytes()
        assert first.startswith(begin)
        assert run(command, path, "--chart", drawn).exit_code == 0
        assert drawn.read_bytes() == first, "equal charts are equal files"
    svg = (tmp_path / f"{command}.svg").read_text(encoding="utf-8")
    assert ('id="legend_1"' in svg) == (command == "demo"), "curves are named; marks are named by their axis"


@needs_matplotlib
def test_what_no_graph_can_hold_is_drawn_by_the_other_clock(tmp_path: Path) -> None:
    slow = {**BENCH, "peers": [row("mxfp8", "quantize rowwise, torch.compile", share=None, us=None, differs=0.0)]}
    drawn = tmp_path / "bench.svg"
    assert run("bench", saved(tmp_path, slow), "--chart", drawn).exit_code == 0
    assert run("bench", saved(tmp_path, BENCH), "--chart", tmp_path / "other.svg").exit_code == 0
    assert drawn.read_bytes() != (tmp_path / "other.svg").read_bytes()


@needs_matplotlib
def test_bench_draws_what_it_has_just_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "run", lambda recipes, shapes, world, peers, say: BENCH)
    found = run("bench", "mxfp8", "--json", "--chart", tmp_path / "bench.svg")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout) == BENCH
    assert (tmp_path / "bench.svg").is_file()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("bench", "{file}"), "give --chart FILE"),
        (("demo", "{demo}"), "give --chart FILE"),
        (("bench", "missing.json", "--chart", "x.svg"), "missing.json: No such file"),
        (("bench", "--chart", "x.gif"), "x.gif should end in .png, .svg, .pdf"),
        (("demo", "--chart", "no/such/folder/x.svg"), "can't write x.svg: the folder "),
        (("demo", "{file}", "--chart", "x.svg"), "it is not what `layoutc demo --json` writes"),
        (("bench", "{demo}", "--chart", "x.svg"), "it is not what `layoutc bench --json` writes"),
        (("bench", "{bare}", "--chart", "x.svg"), "no kernels were timed"),
        (("bench", "{text}", "--chart", "x.svg"), "is no JSON"),
        (("bench", "{cut}", "--chart", "x.svg"), "cut.json is not whole: KeyError: 'kernels'"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, tuple) else "",
)
def test_what_can_not_be_drawn_is_refused_before_any_work(
    args: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--chart" in args and find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib: pip install 'layoutc[charts]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "run", lambda *_: pytest.fail("something was measured"))
    files = {"file": BENCH, "demo": DEMO, "bare": {**BENCH, "kernels": []}, "cut": {"kind": "kernels"}}
    for name, data in files.items():
        Path(f"{name}.json").write_text(json.dumps(data), encoding="utf-8")
    Path("text.json").write_text("{", encoding="utf-8")
    found = run(*[arg.format(**{name: f"{name}.json" for name in (*files, "text")}) for arg in args])
    assert found.exit_code == 2, found.output
    assert words in found.output
    assert not Path("x.svg").exists()

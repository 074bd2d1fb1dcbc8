"""The page of charts: which panels files give, what is drawn in them, and files that are not what they should be."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import chart_files
import chart_panels
import charts

drawn = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib, which draws")
PARTS = {"products": 40.0, "gather": 30.5, "idle": 2.0}


def step(variant: str, batch: int, ms: float, **more: Any) -> dict[str, Any]:
    peak = {"spread_ms": 10.0, "peak_bytes": 17 << 30, "loss": 0.4, "parts_ms": PARTS}
    return {"variant": variant, "batch": batch, "median_ms": ms} | peak | more


def timed(recipe: str, work: str, share: float | None, **more: Any) -> dict[str, Any]:
    row = {"recipe": recipe, "work": work, "dtype": "bfloat16", "shape": [64, 64], "share": share}
    return row | {"flushed_share": 0.25} | more


VARIANTS = ("bf16", "torchao", "layoutc:fp8_block+low", "cast:fp8_block", "layoutc:my_own")
MACHINE = {"device": "a card", "torch": "2.13"}
STEPS = [step(variant, batch, 100.0 * batch + 9 * i) for batch in (1, 4) for i, variant in enumerate(VARIANTS)]
NEW_STEPS = {
    "kind": "step",
    "eager": True,
    "saves": "input",
    "world": 2,
    **MACHINE,
    "rows": [STEPS[0] | {"fastest_ms": 99.0}],
}
FIGURES = {"gather": 9.0, "pre": 3.0, "post": 2.0, "step": 1.0}
HOST = {
    "world": 2,
    **MACHINE,
    "runs": {form: [FIGURES, FIGURES] for form in ("bf16", "layoutc:nvfp4", "torchao:float8")},
}
FORMS = (("bf16", "plain"), ("nvfp4", "planes"), ("nvfp4", "interleaved"))
GATHERS = {
    **MACHINE,
    "rows": [{"recipe": recipe, "form": form, "world": 4, "card_us": 9.5, "host_us": 4.0} for recipe, form in FORMS],
}
KERNELS = {
    **MACHINE,
    "copy_bytes_per_us": {"64x64": [1.0, 1.0]},
    "kernels": [
        timed("", "amax", 0.9),
        timed("mxfp8", "quantize rowwise", 0.97),
        timed("mxfp8", "quantize rowwise", 0.99, dtype="float32"),
        timed("mxfp8", "quantize rowwise", 0.5, shape=[8, 8]),
        timed("mxfp8", "quantize rowwise+columnwise", 0.95),
        timed("mxfp8", "quantize to buffers", 0.9),
        timed("mxfp8", "quantize 16 weights of 4x64, one launch", None),
        timed("mxfp8", "dequantize rowwise", 0.9),
    ],
    "peers": [
        timed("mxfp8", "quantize rowwise, torch.compile", 0.7),
        timed("mxfp8", "quantize rowwise, torch.compile max-autotune", 0.1),  # a reference, as old files have it
        timed("mxfp8", "quantize x and x.t(), torch.compile", 0.4),
        timed("mxfp8", "quantize 1x32, torchao to_mx compiled", 0.6),
        timed("", "bytes transposed, .t().contiguous()", 0.1),
    ],
    "hooks": [],
}
CURVES = {
    name: [[4 - 0.01 * step + 0.1 * seed for step in range(100)] for seed in (0, 1)] for name in ("bf16", "nvfp4")
}
Files = Callable[..., list[Path]]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    def write(**data: Any) -> list[Path]:
        paths = [tmp_path / f"{name}.json" for name in data]
        for path, content in zip(paths, data.values(), strict=True):
            path.write_text(json.dumps(content), encoding="utf-8")
        return paths

    return write


def names(found: chart_files.Found) -> list[str]:
    return [panel.name for panel in charts.panels(found)]


def test_each_file_is_told_by_what_it_holds() -> None:
    kinds = [chart_files.kind_of(data) for data in (STEPS, NEW_STEPS, HOST, GATHERS, KERNELS, CURVES)]
    assert kinds == ["step", "step", "host", "gather", "kernels", "curves"]
    for other in ({}, [], 1, {"rows": [{"plane": 1}]}, {"rows": []}, [{"variant": "bf16"}]):
        with pytest.raises(ValueError, match="no benchmark"):
            chart_files.kind_of(other)


def test_panels_without_data_are_left_out(files: Files) -> None:
    assert names(chart_files.read(files(compiled=STEPS))) == ["steps", "memory", "parts"]
    bare = [row | {"peak_bytes": 0, "parts_ms": {}} for row in STEPS]
    assert names(chart_files.read(files(compiled=bare))) == ["steps"]
    assert names(chart_files.read(files(host=HOST, gather=GATHERS))) == ["host", "gathers"]
    assert names(chart_files.read(files(curves={"nvfp4": CURVES["nvfp4"]}))) == ["losses"]
    assert names(chart_files.read(files(bench=KERNELS | {"kernels": []}))) == []


def test_runs_of_one_thing_come_together(files: Files) -> None:
    """Old files by their names, without numbers; new ones by what they say."""
    found = chart_files.read(files(compiled1=STEPS, compiled2=STEPS, other=NEW_STEPS))
    clusters = chart_panels.clusters(found.steps)
    assert list(clusters) == [(1, "compiled"), (4, "compiled"), (1, "eager, saves input")]
    assert [len(runs) for runs in clusters[1, "compiled"].values()] == [2] * len(VARIANTS)
    assert found.machines == ["a card, torch 2.13, 2 ranks"]
    both = chart_files.read(files(one=CURVES, two=CURVES)).curves
    assert [len(runs) for runs in both.values()] == [4, 4]


def test_peers_stand_beside_the_kernel_that_does_their_work() -> None:
    """By one clock: the one with the host, where a peer has no other."""
    rows = [row for row in KERNELS["kernels"] + KERNELS["peers"] if row["dtype"] == "bfloat16"]
    assert chart_panels.kernel_rows(rows) == (
        "share",
        {
            ("mxfp8", "rowwise"): {"kernel": 0.97, "torch.compile": 0.7, "torchao": 0.6},
            ("mxfp8", "to buffers"): {"kernel": 0.9, "torch.compile": 0.4},
        },
    )
    clock, found = chart_panels.kernel_rows([*rows, timed("mxfp8", "quantize x and x.t(), torch.compile", None)])
    assert clock == "flushed_share"
    assert {share for makers in found.values() for share in makers.values()} == {0.25}
    alone = chart_panels.kernel_rows([row for row in rows if "," not in row["work"]])[1]
    assert [what for _, what in alone] == ["rowwise", "both", "to buffers"]


def test_a_recipe_has_one_colour() -> None:
    look = chart_panels.Look(["layoutc:fp8_block+low", "fp8_block", "my_own", "layoutc:zz"])
    assert look.colour("layoutc:fp8_block+low") == look.colour("layoutc:fp8_block") == look.colour("fp8_block")
    assert len({look.colour(name) for name in ("fp8_block", "cast:fp8_block", "my_own", "layoutc:zz", "bf16")}) == 5
    assert look.bar("layoutc:fp8_block", products=True)["hatch"]
    assert not look.bar("layoutc:fp8_block+low", products=True)["hatch"]
    assert not look.bar("layoutc:fp8_block", products=False)["hatch"]
    assert (look.paler, look.hatched) == (True, True)


@drawn
def test_all_panels_are_drawn_on_one_page(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars as high as figures, axes with units, a legend for what is drawn, and no page larger than A4."""
    from matplotlib import pyplot

    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    paths = files(compiled=STEPS, new=NEW_STEPS, host=HOST, gather=GATHERS, bench=KERNELS, curves=CURVES)
    made = charts.page(chart_files.read(paths), tmp_path / "page.png")
    assert made == ["steps", "memory", "parts", "host", "gathers", "kernels", "losses", "distances"]
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    assert all(size <= most for size, most in zip(figure.get_size_inches(), charts.A4, strict=True))
    panels = {axes.get_label(): axes for axes in figure.axes}
    assert list(panels) == made
    units = {"steps": "ms", "memory": "GiB", "host": "µs a parameter", "gathers": "µs", "losses": "nats"}
    for name, unit in units.items():
        assert panels[name].get_ylabel().startswith(unit)
    assert sorted(bar.get_height() for bar in panels["steps"].patches) == sorted(
        [row["median_ms"] for row in STEPS] + [100.0]
    )
    assert len(panels["host"].patches) == 3 * 3
    assert sum(bar.get_width() for bar in panels["parts"].patches) == pytest.approx(11 * sum(PARTS.values()))
    lines = [(min(line.get_ydata()), max(line.get_ydata())) for line in panels["steps"].lines]
    assert (99.0, 109.0) in lines, "from the fastest to the slowest step"
    assert (95.0, 105.0) in lines, "centred, where the fastest is not known"
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    wanted = ["bf16", "torchao", "fp8_block", "mxfp8", "nvfp4", "my_own", "paler: cast on gather"]
    assert legend == [*wanted, "hatched: products of dequantized weights"]


def command(*args: object) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, str(Path(__file__).with_name("charts.py")), *map(str, args)]
    return subprocess.run(program, capture_output=True, text=True, check=False)


@drawn
def test_the_command_says_what_it_drew(files: Files, tmp_path: Path) -> None:
    done = command(*files(curves=CURVES), "--png", tmp_path / "page.png")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'page.png'}: losses, distances\n"), done.stderr


@drawn
@pytest.mark.parametrize(("data", "message"), [({"a": 1}, "no benchmark"), ({"kind": "wire"}, "of kind 'wire'")])
def test_a_file_that_is_something_else_is_named(files: Files, tmp_path: Path, data: Any, message: str) -> None:
    done = command(*files(wrong=data), "--png", tmp_path / "page.png")
    assert done.returncode == 2
    assert "wrong.json: " in done.stderr
    assert message in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="needs matplotlib to be missing")
def test_without_matplotlib_the_command_says_so(files: Files, tmp_path: Path) -> None:
    done = command(*files(curves=CURVES), "--png", tmp_path / "page.png")
    assert done.returncode == 2
    assert "pip install matplotlib" in done.stderr

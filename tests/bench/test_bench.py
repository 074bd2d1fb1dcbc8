"""`layoutc bench`: what is printed, what is measured without a card, and that it times the work it names."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from kernels_on_cpu import use_kernels

from layoutc.bench import clocks, measure, peers
from layoutc.bench import jobs as bench_jobs
from layoutc.cli.app import main
from layoutc.runtime.train.convert import recipe_class

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a card, whose clock takes few calls."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(clocks, "CALLS", 3)


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, args)])


def test_without_a_card_hooks_are_timed_and_the_rest_is_said() -> None:
    result = run("mxfp8", "--shape", "256x256", "--shape", "128x64", "--world", 2)
    assert (result.exit_code, result.stderr) == (0, "")
    assert measure.NO_CARD in result.stdout
    assert [line.split()[1] for line in result.stdout.splitlines() if line.startswith("  mxfp8")] == [
        *("forward", "backward", "both"),
        *("forward", "backward", "both"),
    ]


def test_json_goes_to_stdout_and_counts_what_travels() -> None:
    """The bytes that the hooks return are those of LAYOUT.gather, filling included."""
    result = run("mxfp8", "nvfp4", "hybrid_fp8", "--shape", "512x256", "--world", 4, "--json")
    assert result.exit_code == 0
    assert measure.NO_CARD in result.stderr
    found = json.loads(result.stdout)
    assert (found["device"], found["kernels"], found["peers"], found["copy_bytes_per_us"]) == ("cpu", [], [], {})
    rows = found["hooks"]
    assert len(rows) == 9
    for row in rows:
        facts = recipe_class(row["recipe"]).LAYOUT.gather(512, 256, 4, row["pass_name"])
        assert (row["sent"], row["gathered"]) == (facts.bytes_per_rank, facts.nbytes)
        assert row["of_bf16"] == row["sent"] / (2 * 128 * 256)
        assert row["pre_us"] > 0 < row["post_us"]


def test_a_shape_whose_shards_cut_blocks_sends_what_is_planned() -> None:
    result = run("nvfp4", "--shape", "144x64", "--world", 8, "--json")
    assert result.exit_code == 0
    planned = importlib.import_module("layoutc.recipes.nvfp4").LAYOUT.gather(144, 64, 8).bytes_per_rank
    assert {row["sent"] for row in json.loads(result.stdout)["hooks"]} == {planned}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nvfp5",), "Did you mean nvfp4?"),
        (("zzz",), "no recipe 'zzz' in layoutc.recipes"),
        (("nvfp4", "--shape", "100x100"), "takes rows in multiples of 16"),
        (("mxfp8", "--shape", "large"), "is not a shape; write rows x columns"),
        (("mxfp8", "--world", "1"), "Invalid value for '--world'"),
    ],
)
def test_bad_input_is_refused_before_work(args: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "host", lambda call: pytest.fail("something was timed"))
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_what_is_asked_is_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each option reaches the report; without options, its own defaults."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(measure, "report", lambda *args: asked.append(args))
    options = ("--shape", "96x64", "--shape", "8X32", "--world", 2, "--peers", "--json")
    assert (run().exit_code, run("mxfp8", "nvfp4", *options).exit_code) == (0, 0)
    assert asked == [((), [], 8, False, False), (("mxfp8", "nvfp4"), [(96, 64), (8, 32)], 2, True, True)]


def test_without_a_shape_the_one_of_the_help_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "host", lambda call: 1.0)
    (shape,) = {tuple(row["shape"]) for row in json.loads(run("mxfp8", "--json").stdout)["hooks"]}
    assert f"[default: {shape[0]}x{shape[1]}]" in run("--help").stdout


@pytest.mark.thorough
def test_the_module_runs_without_the_command_line() -> None:
    """Where pydantic, click, jinja2, yaml and rich can't be imported."""
    program = (
        "import sys, runpy\n"
        "for name in ('pydantic', 'click', 'jinja2', 'yaml', 'rich'): sys.modules[name] = None\n"
        "from layoutc.bench import clocks; clocks.CALLS = 3\n"
        "def run(*args):\n"
        "    sys.argv = ['bench', *args]\n"
        "    try: runpy.run_module('layoutc.bench', run_name='__main__')\n"
        "    except SystemExit as end: return end.code\n"
        "assert not run('nvfp4', '--shape', '64x64', '--world', '2', '--json')\n"
        "sys.exit(run('nvfp5'))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "Did you mean nvfp4?" in done.stderr) == (2, True), done.stderr
    assert [row["pass_name"] for row in json.loads(done.stdout)["hooks"]] == ["forward", "backward", "both"]


@pytest.fixture
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)
    monkeypatch.setattr(bench_jobs, "GROUPED", 2)


@pytest.mark.sample(1)
@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["nvfp4", "fp8_rowwise", "fp8_delayed", "fp8_channel_bf16"])
def test_every_job_of_a_recipe_runs(name: str) -> None:
    """Under the interpreter; its bytes are those of x and of what is written."""
    cls = recipe_class(name)
    m, k = 32, 64
    jobs: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for job in bench_jobs.kernel_jobs(name, cls, (m, k), dtype, CPU):
            jobs[job.work, job.dtype] = job
            if dtype == torch.bfloat16:
                job.make()()
    every = "+".join(cls.LAYOUT.orientations)
    written = sum(facts.nbytes for facts in cls.LAYOUT.written(m, k, cls.LAYOUT.orientations).values())
    for dtype, itemsize in (("bfloat16", 2), ("float32", 4)):
        assert jobs[f"quantize {every}", dtype].nbytes == m * k * itemsize + written
    assert {f"dequantize {o}" for o in cls.LAYOUT.orientations} <= {work for work, _ in jobs}
    assert ("quantize 2 weights of 16x64, one launch", "bfloat16") in jobs
    if name == "nvfp4":  # codes transposed, scales spread into 128 x 4 twice; read are codes, scales and the amax
        assert jobs["lay out", "bfloat16"].nbytes == (m * k // 2 + 2 * 128 * 4) + (m * k // 2 + m * k // 256 + 4)
    assert all(job.nbytes > 0 for job in jobs.values())


@pytest.mark.usefixtures("kernels_on_cpu")
def test_what_no_kernel_quantizes_is_dequantized_and_the_rest_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    name, said = "nvfp4_modelopt_experts", list[str]()
    cls = recipe_class(name)
    jobs = [job for dtype in bench_jobs.DTYPES for job in bench_jobs.kernel_jobs(name, cls, (32, 64), dtype, CPU)]
    assert [(job.work, job.dtype) for job in jobs] == [("dequantize rowwise", "bfloat16")]
    assert jobs[0].nbytes == 32 * 64 * 2 + sum(plane.nbytes for plane in cls.LAYOUT.planes(32, 64).values())
    assert jobs[0].make()() is not None
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(clocks, "copy_rates", lambda _: (1.0, 1.0))
    for listed in ("amax_jobs", "kernel_jobs"):
        monkeypatch.setattr(measure, listed, lambda *_: ())
    measure._time_kernels([(name, cls)], (32, 64), False, said.append, {"copy_bytes_per_us": {}, "kernels": []})
    assert said[-1] == f"  {name}: no quantize kernel, so quantizing is not timed"


def test_each_hook_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent is a tuple; a weight that is gathered into another is no result."""
    monkeypatch.setattr(clocks, "host", lambda call: 1.0 if isinstance(call(), tuple) else 2.0)
    rows = list(measure.hooks("mxfp8", recipe_class("mxfp8"), (64, 64), 2, CPU))
    assert [(row.pre_us, row.post_us) for row in rows] == [(1.0, 2.0)] * 3


def test_works_that_take_turns_are_more_than_a_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times as much, and two at least; made before anything runs on the card."""

    class Enough(Exception): ...

    def stream() -> None:
        raise Enough

    made: list[int] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(L2_cache_size=1000))
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    for nbytes, count in ((100, 30), (999, 4), (10_000, 2)):
        made.clear()
        with pytest.raises(Enough):
            clocks.rotated(lambda: made.append(1) or (lambda: None), nbytes)  # type: ignore[func-returns-value]
        assert len(made) == count


def test_help_names_the_recipes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--help"])
    with pytest.raises(SystemExit, match="0"):
        measure.main()
    assert f"default: {', '.join(measure.RECIPES)}" in " ".join(capsys.readouterr().out.split())


def test_jobs_of_others_run() -> None:
    said: list[str] = []
    jobs = list(peers.other_jobs((64, 64), CPU, said.append))
    for job in jobs:
        job.make()()
    assert [job.nbytes for job in jobs] == [64 * 64 * 2, 64 * 64 * 4, 2 * 64 * 64]
    assert said, "what is not there is said"


def test_shares_are_of_what_a_copy_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the bytes in the same time are twice the share; what can't be in a graph has one clock."""
    monkeypatch.setattr(clocks, "rotated", lambda make, nbytes: 4.0)
    monkeypatch.setattr(clocks, "flushed", lambda work: 8.0)
    job = bench_jobs.Job("nvfp4", "quantize", "bfloat16", 1000, lambda: lambda: None)
    row = measure.timed(job, (8, 8), (500.0, 250.0))
    assert (row.us, row.share, row.flushed_us, row.flushed_share) == (4.0, 0.5, 8.0, 0.5)
    row = measure.timed(job._replace(in_graph=False), (8, 8), (500.0, 250.0))
    assert (row.us, row.share, row.flushed_share) == (None, None, 0.5)

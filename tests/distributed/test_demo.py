"""The demo: what it trains, counts, verifies and says, on a small model."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from torch import Tensor

import layoutc
from layoutc.bench import demo
from layoutc.runtime.train.convert import recipe_class

SMALL = demo.Config(("mxfp8",), steps=6, dim=64, layers=2, heads=2, context=16, batch=4, lr=1e-2)
LINEAR = {"qkv": (192, 64), "proj": (64, 64), "up": (256, 64), "down": (64, 256)}  # no cut goes through a block
PLAIN = 256 * 64 + 16 * 64 + (2 * 2 + 1) * 64  # elements of embeddings and norms, which stay in bf16
CPU = torch.device("cpu")


def gathered_in_a_step(recipe: str | None) -> int:
    """Bytes that reach a rank of two, by the layout: layers and the head for each pass, the root once."""

    def of(shape: tuple[int, int], which: str) -> int:
        if recipe is None:
            return 2 * shape[0] * shape[1]
        return 2 * recipe_class(recipe).LAYOUT.gather(*shape, 2, which).bytes_per_rank  # type: ignore[arg-type]

    passes = ("forward", "backward")
    blocks = sum(SMALL.layers * of(shape, which) for shape in LINEAR.values() for which in passes)
    norms = 2 * SMALL.layers * 2 * 64 * 2
    return blocks + norms + (256 * 64 + 16 * 64 + 64) * 2 + of((256, 64), "both" if recipe else "forward")


def trains(recipe: str | None) -> demo.Result:
    """A run, and what of it can be had by other means."""
    text, steps = demo.corpus(), list[int]()
    found = demo.train(SMALL, recipe, text, CPU, steps.append)
    assert steps == [1] * SMALL.steps
    assert found.name == (recipe or "bf16")
    assert found.losses[-1] < found.losses[0] - 0.1
    assert found.loss == found.losses[-1]
    assert found.step_ms > 0
    assert found.resumed
    assert found.verified == (0 if recipe is None else 4 * SMALL.layers + 1)
    model, optimizer = demo.build(SMALL, recipe, CPU)
    held = demo.resident_bytes(model)
    assert found.resident == held
    if recipe is None:
        assert held == 2 * (PLAIN + 256 * 64 + SMALL.layers * sum(m * k for m, k in LINEAR.values())) // 2
        return found
    assert isinstance(optimizer, layoutc.MasterWeights)
    demo.train_step(model, optimizer, next(demo.batches(text, SMALL, 0, CPU)))  # which makes masters
    shards = {name: param._local_tensor for name, param in model.named_parameters()}  # type: ignore[attr-defined]
    name, shard = next((name, one) for name, one in shards.items() if hasattr(one, "QUANTIZED"))
    shard.store.planes["rowwise_data"].view(torch.uint8)[0] += 1
    what = "rowwise_data" if shard.LAYOUT.passes_differ else "values"  # of blocks whose gathers leave values
    with pytest.raises(AssertionError, match=f"{name}: gathered {what} differ from quantizing the whole"):
        demo.verify_gather(model, optimizer)
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", [None, "mxfp8", "fp8_current"])
def test_a_run_trains_counts_verifies_and_resumes(two: Ranks, recipe: str | None) -> None:
    first, second = two.run(trains, recipe)
    assert first.losses == second.losses
    assert first.gathered == second.gathered == gathered_in_a_step(recipe)


def resumes_elsewhere() -> bool:
    """A checkpoint that is not loaded: the next losses are those of a new model."""
    model, optimizer = demo.build(SMALL, "mxfp8", CPU)
    kept, demo.load = demo.load, lambda *args, **options: None
    try:
        return demo.resumes(replace(SMALL, lr=1e-1), "mxfp8", model, optimizer, demo.corpus(), CPU)
    finally:
        demo.load = kept


def test_a_run_that_goes_on_otherwise_is_told(two: Ranks) -> None:
    assert two.run(resumes_elsewhere) == [False, False]


def test_batches_depend_on_step_and_rank_alone() -> None:
    text = (torch.arange(4096) % 251).to(torch.uint8)
    first, again, other = (demo.batches(text, SMALL, rank, CPU, start) for rank, start in ((0, 0), (0, 1), (1, 0)))
    (x, y), (x2, y2) = next(first), next(first)
    assert x.shape == y.shape == (SMALL.batch, SMALL.context)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert all(map(torch.equal, (x2, y2), next(again)))
    assert not torch.equal(x, next(other)[0])
    assert torch.equal((x[:, :-1] + 1) % 251, x[:, 1:] % 251)


def result(name: str, **more: Any) -> demo.Result:
    return demo.Result(name, loss=2.5, gathered=3 << 20, resident=1 << 20, step_ms=12.34, resumed=True, **more)


def test_what_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    runs = [result("bf16"), replace(result("mxfp8", verified=9), gathered=3 << 19, resident=1 << 19)]
    demo.report(runs, SMALL, 2, 3.4, as_json=False)
    said = capsys.readouterr().out
    assert "6 steps on 2 ranks, CPU" in said
    titles = next(line for line in said.splitlines() if "weights" in line).strip("│┃ ").split("┃")
    assert [*map(str.strip, titles)] == [
        "weights",
        "loss at the end",
        "gathered in a step",
        "parameters of a rank",
        "step",
    ]
    cells = [[cell.strip() for cell in line.strip("│┃ ").split("│")] for line in said.splitlines() if "MiB" in line]
    assert cells == [
        ["bf16", "2.5000", "3.00 MiB (1.00x)", "1.00 MiB (1.00x)", "12.3 ms"],
        ["mxfp8", "2.5000", "1.50 MiB (0.50x)", "0.50 MiB (0.50x)", "12.3 ms"],
    ]
    saved = "saved with torch.distributed.checkpoint and resumed; the next 3 losses"
    told = f"""bf16: {saved} equal the uninterrupted run, bit for bit
mxfp8: 9 gathered weights equal quantizing the whole weight, byte for byte
mxfp8: {saved} equal the uninterrupted run, bit for bit
3 s in all
"""
    assert said.endswith(told)
    demo.report([runs[0], replace(runs[1], resumed=False)], SMALL, 2, 3.4, as_json=True)
    told_on = capsys.readouterr()
    assert f"mxfp8: {saved} DIFFER from the uninterrupted run" in told_on.err
    assert not told_on.out


def test_what_is_asked_is_what_is_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Recipes, steps and ranks reach the launcher; the first rank's results the report, and the JSON."""
    from torch.distributed.launcher import api

    asked: list[Any] = []
    first = [result("bf16", losses=[2.0]), result("mxfp8", verified=9)]

    def launch(config: Any, program: Any) -> Any:
        assert program is demo.worker
        return lambda given: asked.append((config.nproc_per_node, config.max_nodes, given)) or [first, "second"]

    monkeypatch.setattr(api, "elastic_launch", launch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(demo, "report", lambda *args: asked.append((*args[:3], args[4])))
    demo.run()
    assert not capsys.readouterr().out
    found = demo.run(["nvfp4"], 5, 3, as_json=True)
    of_all, some = (demo.Config(names, steps, batch=2) for names, steps in ((("mxfp8", "nvfp4"), 40), (("nvfp4",), 5)))
    assert asked == [(2, 1, of_all), (first, of_all, 2, False), (3, 1, some), (first, some, 3, True)]
    assert json.loads(capsys.readouterr().out) == found
    assert found.pop("seconds") >= 0
    rows = [asdict(one) for one in first]
    assert found == {"kind": "demo", "torch": torch.__version__, "device": "CPU", "processes": 3, "rows": rows}
    with pytest.raises(ValueError, match="there is no recipe 'nvfp5'"):
        demo.run(["nvfp5"])
    assert len(asked) == 4


def of_two_runs(*_: Any) -> list[str]:
    """The program of a rank, in a group that is there already."""
    seen: list[str] = []

    def train(config: demo.Config, recipe: str | None, text: Tensor, device: torch.device, progress: Any) -> str:
        progress(1)
        seen.append(f"{recipe} {device.type} {len(text) == len(demo.corpus())}")
        return recipe or "bf16"

    kept = demo.train, demo.dist, demo.os
    barrier = dist.barrier
    named = SimpleNamespace(init_process_group=seen.append, destroy_process_group=lambda: seen.append("left"))
    named.barrier, named.get_rank = barrier, dist.get_rank
    demo.train, demo.dist = train, named  # type: ignore[assignment]
    demo.os = SimpleNamespace(environ={"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}, cpu_count=lambda: 2)  # type: ignore[assignment]
    try:
        assert demo.worker(SMALL) == ["bf16", "mxfp8"]
    finally:
        demo.train, demo.dist, demo.os = kept
    return seen


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a card")
def test_a_rank_runs_bf16_first_and_leaves_its_group(two: Ranks) -> None:
    for seen in two.run(of_two_runs):
        assert seen == ["gloo", "None cpu True", "mxfp8 cpu True", "left"]

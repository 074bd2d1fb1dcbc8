"""Every block of code in README and in docs/pages runs, on two ranks, in the order of its page."""

from __future__ import annotations

import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import gguf_files
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from click.testing import CliRunner
from harness import Ranks
from pages import PAGES, Block, blocks, lines, missing, programs
from places import ROOT
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import layoutc
from layoutc import checkpoint
from layoutc.cli.app import main

pytestmark = pytest.mark.checkout
# What other tests run: CI README's two commands; tests/integrations the trainers; a card the graphs (tests/gpu).
ELSEWHERE = {"trainers.md": "python sh", "graphs.md": "python"}
LOSS = r": loss \d\.\d+"
GGUF = find_spec("gguf") is not None


def of_page(page: Path, language: str) -> list[Block]:
    """Those that run here."""
    if language in ELSEWHERE.get(page.name, ""):
        return []
    return [block for block in blocks(page) if block.language == language]


# ------------------------------------------------------------------------------------------------ what pages speak of
class Experts(nn.Module):
    """Weights of experts, (experts, m, k)."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(2, 128, 128)), nn.Parameter(torch.randn(2, 128, 128))


class Transformer(nn.Module):
    """Something with layers, some of them with experts."""

    def __init__(self, _: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(128, 128, bias=False) for _ in range(2)])
        self.sparse = nn.ModuleDict({"experts": Experts()})
        self.head = nn.Linear(128, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        experts: Any = self.sparse["experts"]
        x = x + (x @ experts.w1[0] @ experts.w2[1]) / 128
        out: Tensor = self.head(x)
        return out


class Engine:
    """What serves a model, and is sent its weights."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def update(self, name: str, tensor: Tensor) -> None:
        self.weights[name] = tensor


def quantized_plain() -> nn.Module:
    """A sharded model in fp8_block."""
    model: Any = Transformer()
    layoutc.quantize_(model, "fp8_block")
    sharded: nn.Module = fully_shard(model)
    return sharded


def needs_gguf(page: Path) -> None:
    """Skips a page whose files the package gguf writes, where that is missing."""
    if page.name == "files.md" and not GGUF:
        pytest.skip("needs gguf: pip install 'layoutc[formats]'")


def names() -> dict[str, Any]:
    """What blocks use and do not define."""
    torch.manual_seed(0)
    model: Any = Transformer()
    experts = nn.Linear(128, 128, bias=False)
    experts.weight = nn.Parameter(torch.randn(2, 128, 128))
    layoutc.quantize_(experts, "fp8_rowwise")
    plain: Any = fully_shard(Transformer())
    checkpoint.save({"model": plain.state_dict()}, "run/bf16")
    stepped = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    plain(torch.randn(8, 128)).square().mean().backward()
    stepped.step()
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(plain, stepped), strict=True)), checkpoint_id="step_1000")
    checkpoint.export_safetensors(plain, "llama")
    checkpoint.export_safetensors(quantized_plain(), "DeepSeek-V3", files="deepseek")
    if GGUF:
        if dist.get_rank() == 0:
            gguf_files.write(Path("Llama-3.gguf"))
        dist.barrier()
    layoutc.quantize_(model, "fp8_block")
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3)
    x = torch.randn(8, 128)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    found = {
        "Transformer": Transformer,
        "Llama": lambda _: gguf_files.skeleton(),
        "config": None,
        "model": model,
        "optimizer": optimizer,
        "x": x,
    }
    found |= {"experts": experts, "tokens": torch.randn(6, 128), "offsets": torch.tensor([4, 6], dtype=torch.int32)}
    found |= {"rows": torch.randn(4, 128), "out": torch.randn(4, 128), "ep_group": dist.group.WORLD}
    found |= {"input_splits": None, "output_splits": None}
    found |= {"get_state_dict": get_state_dict, "set_state_dict": set_state_dict}
    return found | {"torch": torch, "F": F, "layoutc": layoutc, "fully_shard": fully_shard, "engine": Engine()}


def runs(page: Path, folder: Path) -> None:
    """The Python of a page, one block after the other. `...` stands for a training loop."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        known = names()
        for number, block in enumerate(of_page(page, "python")):
            if block.title is None and not block.text.startswith("def fsdp_"):  # which is a piece of generated code
                exec(compile(block.text, f"{page.name}, block {number}", "exec"), known)
                if (future := known.pop("future", None)) is not None:
                    future.result()
    finally:
        os.chdir(before)


@pytest.mark.every_week
@pytest.mark.parametrize("page", [page for page in PAGES if of_page(page, "python")], ids=lambda page: page.name)
def test_python(two: Ranks, page: Path, tmp_path: Path) -> None:
    needs_gguf(page)
    two.run(runs, page, tmp_path)


def runs_program(file: Path, arguments: list[str]) -> str:
    """What a program prints that torchrun starts in its folder, in ranks that are there already."""
    printed = io.StringIO()
    with (
        chdir(file.parent),
        mock.patch.object(sys, "argv", [str(file), *arguments]),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        redirect_stdout(printed),
    ):
        runpy.run_path(str(file), run_name="__main__")
    return printed.getvalue()


TENS = re.compile(r"\b(\d)0\b")


def shortened(text: str) -> str:
    """A program with one text a step, and a tenth of the steps, as of those that its arguments count: CPUs are slow."""
    return re.sub(r"range\(\d0\)", lambda found: TENS.sub(r"\1", found[0]), text.replace("(8,)", "(1,)"))


def trainers(page: Path) -> Any:
    """A page, of the second tier where its programs need another package's models or weights."""
    words = re.search(r"^(?:from|import) (?:transformers|torchao)", "".join(programs(page).values()), re.M)
    return pytest.param(page, id=page.name, marks=[pytest.mark.thorough] if words else [])


@pytest.mark.every_week
@pytest.mark.parametrize("page", [trainers(page) for page in PAGES if of_page(page, "sh")])
def test_commands(two: Ranks, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """layoutc's own, and those that start a program of the page, in ranks that are there already."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").symlink_to(ROOT / "tests")  # whose files pages name
    needs_gguf(page)
    if absent := missing(page):
        pytest.skip(f"needs {', '.join(absent)}: pip install 'layoutc[integrations]'")
    if page.name == "files.md":
        gguf_files.write(tmp_path / "Llama-3.gguf")
        model = Transformer()
        layoutc.quantize_(model, "fp8_block")
        checkpoint.export_safetensors(model, "DeepSeek-V3", files="deepseek")
    for name, text in programs(page).items():
        (tmp_path / name).write_text(shortened(text), encoding="utf-8")
    for line in lines(page):
        word, *arguments = line
        if word == "layoutc":
            done = CliRunner().invoke(main, arguments)
            assert done.exit_code == 0, (line, done.output)
            continue
        if word == "python":
            runpy.run_path(str(tmp_path / arguments[0]), run_name="__main__")
            continue
        assert word == "torchrun", line
        assert arguments[:2] == ["--nproc-per-node", "2"], line
        printed = two.run(runs_program, tmp_path / arguments[2], [TENS.sub(r"\1", one) for one in arguments[3:]])[0]
        assert re.search(LOSS, printed), (line, printed)


@pytest.mark.thorough
def test_torchrun_starts_the_program_of_the_first_page(tmp_path: Path) -> None:
    (page,) = (page for page in PAGES if page.name == "index.md")
    for name, text in programs(page).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    arguments = [line for line in lines(page) if line[0] == "torchrun"][-1][1:]
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    done = subprocess.run(
        [*command, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(LOSS, done.stdout), done.stdout


def test_what_runs_elsewhere_is_python() -> None:
    """So that a typing error is found here as well."""
    for page in PAGES:
        for block in blocks(page):
            if block.language == "python":
                compile(block.text, page.name, "exec")


def test_links_lead_somewhere() -> None:
    """Pages to pages; and each file that a page names as a test exists."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (page.parent / target).exists(), (page.name, target)
        for name in re.findall(r"`(tests/[\w/.]+)`", text):
            assert (ROOT / name).exists(), (page.name, name)
        for name in re.findall(r'--8<-- "(.*)"', text):
            assert (ROOT / name).exists(), (page.name, name)


@pytest.mark.thorough
def test_the_site_builds(tmp_path: Path) -> None:
    """Without a warning."""
    pytest.importorskip("material", reason="needs mkdocs-material: pip install 'layoutc[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "docs" / "mkdocs.yml")]
    done = subprocess.run([*command, "-d", str(tmp_path)], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for page in PAGES[1:]:
        made = tmp_path / ("index.html" if page.stem == "index" else f"{page.stem}/index.html")
        assert "<h1" in made.read_text(encoding="utf-8"), page.name

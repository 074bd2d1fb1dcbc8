"""README and the pages say what files and recorded runs say, and the reference names all that is public."""

from __future__ import annotations

import doctest
import inspect
import io
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import torch
import torch.distributed as dist
import yaml
from pages import PAGES
from places import ROOT
from torch import nn
from torch.distributed.fsdp import fully_shard

import layoutc
from layoutc import checkpoint

sys.path.insert(0, str(ROOT / "tests" / "programs"))
import measured

pytestmark = pytest.mark.checkout
NUMBER = r"(?<![\w.])\d[\d,]*(?:\.\d+)?"
UNIT = r"(?:ms|us|seconds|GiB|MiB|tokens/s|times (?:as (?:fast|long)|bf16's speed)|%)(?![\w/])"
FIGURE = re.compile(rf"({NUMBER})(?:%?\s(?:to|and|or)\s({NUMBER}))?(?:\s|(?=%)){UNIT}")


def test_readme_shows_what_stands_in_the_files() -> None:
    """The spec, the generated hook, and the chart and table of recorded runs."""
    command = [sys.executable, str(ROOT / "tests" / "programs" / "front.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## ([\d.]+)", text, re.M)[0] == layoutc.__version__


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "pages" / "reference" / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^::: (\S+)$", text, re.M))
    assert named == public().keys(), "docs/pages/reference/api.md"


def public() -> dict[str, Any]:
    """All that users call: name -> function or class."""
    found = {f"layoutc.{name}": getattr(layoutc, name) for name in layoutc.__all__}
    found |= {f"layoutc.checkpoint.{name}": value for name, value in vars(checkpoint).items()}
    return {name: value for name, value in found.items() if callable(value) and name != "layoutc.inspect"}


@pytest.mark.parametrize("name", public())
def test_a_docstring_has_arguments_errors_and_an_example(name: str) -> None:
    value = public()[name]
    text = value.__doc__ or ""
    named = {arg for arg in inspect.signature(value).parameters if not re.search(rf"\b{arg}\b", text)}
    if "Arguments" not in text and "same arguments" not in text:  # which stand in the docstring that this one names
        assert named <= {"args", "kwargs", "model", "options", "folder"}, named
    assert re.search(r"\braises?\b", text, re.I)
    assert doctest.DocTestParser().get_examples(text)


def example_of(name: str) -> None:
    """Runs a docstring's example. Raises AssertionError with what it printed instead."""
    known = {"torch": torch, "nn": nn, "layoutc": layoutc, "checkpoint": checkpoint, "fully_shard": fully_shard}
    known |= {"Llama": lambda _: gguf_files.skeleton(), "config": None}
    test = doctest.DocTestParser().get_doctest(public()[name].__doc__ or "", known, name, None, 0)
    printed = io.StringIO()
    options = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    done = doctest.DocTestRunner(optionflags=options).run(test, out=printed.write)
    assert not done.failed, printed.getvalue()


def test_examples_of_docstrings_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a group of one rank, as printed."""
    monkeypatch.chdir(tmp_path)
    gguf = find_spec("gguf") is not None
    if gguf:
        gguf_files.write(Path("Llama-3.gguf"))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        for name in public():
            if gguf or "gguf" not in name:
                example_of(name)
    finally:
        dist.destroy_process_group()


def paragraphs(text: str) -> list[str]:
    """Each with the table below it; without code but for names of tests, and without what is written from files."""
    code = re.compile(r"^```.*?^```$|<!-- from .*?<!-- end -->|`[^`]*`", re.M | re.S)
    text = code.sub(lambda found: found[0] if found[0].endswith(".py`") else "", text)
    return [part for part in re.split(r"\n\n+(?![|\n])|\n(?=- |\d+\. )", text) if part.strip()]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "measured.md"], ids=lambda page: page.name)
def test_each_figure_stands_in_a_recorded_run(page: Path) -> None:
    """A paragraph with a time, a size in GiB, a speed or a percentage links to the sections of runs that have each of
    its figures, or names the test that computes them."""
    runs = measured.sections()
    for part in paragraphs(page.read_text(encoding="utf-8")):
        figures = {number for found in FIGURE.findall(part) for number in found if number}
        if figures and not re.search(r"`tests/[\w/]+\.py`", part):
            linked = re.findall(r"\]\((?:docs/pages/)?measured\.md#([\w-]+)\)", part)
            known = {number for name in linked for number in re.findall(NUMBER, runs[name])}
            assert figures <= known, (page.name, sorted(figures - known), part)


def test_losses_of_plans_are_those_that_were_recorded() -> None:
    rows = {
        name: {row["name"]: dict(zip(data["columns"], row["cells"], strict=True)) for row in data["rows"]}
        for name in ("losses", "tuning")
        if (data := measured.run(name))
    }
    stated = yaml.safe_load((ROOT / "layoutc" / "report" / "losses.yaml").read_text(encoding="utf-8"))
    assert stated.keys() == rows["losses"].keys() - {"bf16"}
    for name, loss in stated.items():
        recorded = rows["losses"][name]
        assert (recorded["mean, from bf16"], recorded["seeds"]) == (f"{loss['low'][0]:+.2f}%", loss["low"][1])
        tuned = rows["tuning"].get(name, {}).get("from plain weights' loss")
        assert tuned == (f"{loss['weights']:+.3f}%" if "weights" in loss else None)

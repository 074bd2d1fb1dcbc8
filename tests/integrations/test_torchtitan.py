"""torchtitan's own trainer, by its command line alone: both uses train as one process does, to the bit, and resume."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import titan
from harness import Ranks

pytestmark = pytest.mark.skipif(
    find_spec("torchtitan") is None, reason="needs torchtitan: pip install 'layoutc[torchtitan]'"
)
SECONDS = 300.0
FILTERS = {"llama3": "layers.*.weight", "qwen3": "layers.*.w?_*,layers.*.attention.*.weight"}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a text."""
    folder: Path = tmp_path_factory.mktemp("torchtitan") / "assets"
    titan.write_assets(folder)
    return folder


@pytest.mark.parametrize(
    ("model", "use", "recipe"),
    [("llama3", "quantized", "nvfp4"), ("llama3", "cast_on_gather", "mxfp8"), ("qwen3", "quantized", "fp8_block")],
)
def test_a_command_line_trains_on_ranks_as_on_one(
    one: Ranks, two: Ranks, four: Ranks, assets: Path, tmp_path: Path, model: str, use: str, recipe: str
) -> None:
    """From one seed checkpoint, as torchtitan compares parallelisms; and from the middle on, again."""
    options = ["--layoutc.recipe", recipe, "--layoutc.use", use, "--layoutc.param-filter", FILTERS[model]]
    seed = tmp_path / "seed"
    command = titan.arguments(model, assets, seed, *options, "--checkpoint.create-seed-checkpoint")
    one.run(titan.losses, command, seconds=SECONDS)
    curves = []
    for ranks in (one, two, four):
        folder = tmp_path / str(ranks.world)
        shutil.copytree(seed, folder)
        found = ranks.run(titan.losses, titan.arguments(model, assets, folder, *options), seconds=SECONDS)
        assert all(curve == found[0] for curve in found)
        curves.append(found[0])
    assert len(set(curves[0])) == titan.STEPS
    assert curves[0][-1] < curves[0][0]
    assert curves[1] == curves[0]
    assert curves[2] == curves[0]
    shutil.rmtree(tmp_path / "2" / "checkpoint" / f"step-{titan.STEPS}")
    resumed = two.run(titan.losses, titan.arguments(model, assets, tmp_path / "2", *options), seconds=SECONDS)
    assert resumed[0] == curves[0][titan.STEPS // 2 :]

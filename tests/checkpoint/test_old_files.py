"""Files that earlier versions wrote load: pickles, torch.save, checkpoints, safetensors, optimizer states.

tests/old/interface_4 was written at interface 4 of the runtime, when modules lay elsewhere. It has, for each recipe, a
model of one 32 x 64 weight after one step, and the SHA-256 of its planes.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from places import TESTS
from torch import Tensor, nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

import layoutc
import layoutc.checkpoint
import layoutc.recipes
from layoutc.runtime.weight import stored_form

FOLDER = TESTS / "old" / "interface_4"
RECIPES = ("fp8_delayed", "mxfp8")


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def held(weight: Any) -> dict[str, str]:
    """SHA-256 of the planes of a quantized weight; of the values of one that is cast on gather."""
    planes = weight.planes() if hasattr(weight, "planes") else {"cast": weight.plain}
    return {name: digest(plane) for name, plane in planes.items()}


def expected(recipe: str, cast: bool = False) -> dict[str, str]:
    facts = json.loads((FOLDER / f"{recipe}.json").read_text(encoding="utf-8"))
    return {name: value for name, value in facts.items() if (name == "cast") == cast}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("cast", [False, True], ids=["quantized", "cast"])
def test_pickled_weights_and_modules(recipe: str, cast: bool) -> None:
    """Also a module whose hooks were pickled by name; it gives and takes a state dict as before."""
    prefix = f"{recipe}_cast" if cast else recipe
    weight = pickle.loads((FOLDER / f"{prefix}_weight.pickle").read_bytes())
    module = torch.load(FOLDER / f"{prefix}_module.pt", weights_only=False)
    assert type(weight) is type(module[0].weight.data)
    assert isinstance(weight, nn.Parameter)
    assert held(weight) == held(module[0].weight) == expected(recipe, cast)
    module.load_state_dict(module.state_dict())
    assert held(module[0].weight) == expected(recipe, cast)
    assert module(torch.ones(2, 64)).shape == (2, 32)


@pytest.mark.parametrize("recipe", RECIPES)
def test_state_dicts_of_models_and_optimizers(recipe: str) -> None:
    """With weights_only, which knows the names that layoutc has registered."""
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    layoutc.quantize_(model, recipe)
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3)
    model.load_state_dict(torch.load(FOLDER / f"{recipe}_state.pt"))
    optimizer.load_state_dict(torch.load(FOLDER / f"{recipe}_optim.pt"))
    assert held(model[0].weight) == expected(recipe)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    assert held(model[0].weight) != expected(recipe)


def test_a_checkpoint_and_safetensors() -> None:
    for load in (
        lambda model: layoutc.checkpoint.load({"model": model.state_dict()}, FOLDER / "checkpoint"),
        lambda model: layoutc.checkpoint.load_safetensors(model, FOLDER / "safetensors"),
    ):
        model = nn.Sequential(nn.Linear(64, 32, bias=False))
        layoutc.quantize_(model, "mxfp8")
        load(model)
        assert held(model[0].weight) == expected("mxfp8")


@pytest.mark.parametrize("cast", [False, True], ids=["quantized", "cast"])
def test_what_is_pickled_now_names_no_room(cast: bool, tmp_path: Path) -> None:
    """Rooms may change; layoutc, layoutc.pickled and the recipe's own class stay where they are."""
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    (layoutc.cast_on_gather_ if cast else layoutc.quantize_)(model, "mxfp8")
    data = pickle.dumps(model)
    assert b"layoutc.runtime" not in data
    assert b"layoutc.pickled" in data
    assert held(pickle.loads(data)[0].weight) == held(model[0].weight)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_copy_attribute_by_attribute_is_written_as_its_source(recipe: str) -> None:
    """As stagers make them: the copy's state is that which files have had, the store's own facts included."""
    weight = pickle.loads((FOLDER / f"{recipe}_weight.pickle").read_bytes()).detach()
    staged = StateDictStager().stage({"weight": weight})["weight"]
    assert staged.store is not weight.store
    assert staged.store.layout is weight.LAYOUT
    assert held(staged) == expected(recipe)
    ours, theirs = stored_form.state_of(staged), stored_form.state_of(weight)
    assert list(ours) == list(theirs)
    assert all(ours[name] == theirs[name] for name in ours if name != "planes")

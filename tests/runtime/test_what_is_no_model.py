"""Public functions say what they take, where they are given something else than a model or a state dict."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import layoutc
from layoutc import checkpoint

MODEL, STATE = ("model", "model_or_state_dict"), "state_dict"
PUBLIC = {name: getattr(place, name) for place in (layoutc, checkpoint) for name in dir(place) if name[0] != "_"}
PUBLIC |= {name: getattr(layoutc, name) for name in layoutc.__all__}


def taking(*firsts: str) -> list[str]:
    """The public functions whose first parameter has one of these names."""
    functions = {name: one for name, one in PUBLIC.items() if inspect.isfunction(one)}
    return [
        name for name, one in sorted(functions.items()) if next(iter(inspect.signature(one).parameters), "") in firsts
    ]


def called(function: Callable[..., Any], first: Any) -> Any:
    """Other arguments that have no default are texts."""
    others = list(inspect.signature(function).parameters.values())[1:]
    given = {one.name: "x" for one in others if one.default is one.empty and one.kind is not one.VAR_KEYWORD}
    found = function(first, **given)
    return list(found) if isinstance(found, Iterator) else found


def wrong() -> list[Any]:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    return [[model], model.parameters(), model.named_parameters(), optimizer, model.weight, nn.Linear, None]


@pytest.mark.parametrize("name", taking(*MODEL))
def test_what_is_no_model_is_named(name: str) -> None:
    for given in wrong():
        with pytest.raises(
            TypeError, match=rf" takes a model \(nn.Module\).*, and got {type(given).__name__}: pass the "
        ):
            called(PUBLIC[name], given)


@pytest.mark.parametrize("name", taking(STATE))
def test_what_is_no_dict_is_told_the_call(name: str) -> None:
    for given in (nn.Linear(8, 8), *wrong()):
        with pytest.raises(
            TypeError, match=rf"{name} takes a dict, and got {type(given).__name__}: call checkpoint.{name}"
        ):
            called(PUBLIC[name], given)


def test_functions_are_found() -> None:
    assert {"quantize_", "cast_on_gather_", "check_ranks", "precompute_amaxes", "load_gguf"} < {*taking(*MODEL)}
    assert taking(STATE) == ["async_save", "load", "save"]

"""What files say of quantized tensors, before it is believed: each value of a state in turn is something else.

What fits is stated here by hand, for each place of a state; all else is refused, in words that name the place.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import layoutc.recipes.nvfp4 as nvfp4
from layoutc.runtime.errors import DamagedError
from layoutc.runtime.weight import stored_form

LARGE = 2**63
OTHERS: list[Any] = [
    *(None, True, -1, 0, 1, LARGE - 1, LARGE, 1.5, -0.5, "", "x", "float32", "int8", b"x"),
    *([], (), {}, {"x": "y"}, {1: "y"}, {"x": 1}, (1,), (1, 2), (-1, 2), (1, LARGE), (1.0, 2), ("x",), ["x"]),
    *((1,) * 65, (1,) * 64, torch.ones(2), torch.float32),
]


def text(value: Any) -> bool:
    return type(value) is str


def size(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGE


def sizes(value: Any) -> bool:
    return type(value) is tuple and len(value) <= 64 and all(map(size, value))


def pair(value: Any) -> bool:
    return sizes(value) and len(value) == 2


def truth(value: Any) -> bool:
    return value is True or value is False


def count_or_none(value: Any) -> bool:
    return value is None or (type(value) in (int, float, bool) and value > 0)


# Place in a state -> what fits there. What is left out of a mapping is tried as well.
PLACES: dict[tuple[str, ...], Callable[[Any], bool]] = {
    ("recipe",): text,
    ("layout_id",): text,
    ("language",): size,
    ("spec_sha256",): text,
    ("module",): text,
    ("shape",): sizes,
    ("dtype",): lambda value: text(value) and value in ("float32",),
    ("matrix",): pair,
    ("halo",): pair,
    ("orientations",): lambda value: type(value) is tuple and all(map(text, value)),
    ("transposed",): truth,
    ("requires_grad",): truth,
    ("parameter",): truth,
    ("crc32",): lambda value: type(value) is dict and all(map(size, value.values())),
    ("planes",): lambda value: type(value) is dict and not value,
    ("planes", "rowwise_data"): lambda value: isinstance(value, Tensor),
    ("facts",): lambda value: False,
    ("facts", "blocks"): lambda value: type(value) is dict and all(text(x) and text(y) for x, y in value.items()),
    ("facts", "blocks", "rowwise"): text,
    ("facts", "planes"): lambda value: value == {},
    ("facts", "planes", "rowwise_scale"): lambda value: False,
    ("facts", "planes", "rowwise_scale", "0"): count_or_none,
    ("facts", "planes", "rowwise_scale", "1"): count_or_none,
    ("facts", "planes", "rowwise_scale", "2"): text,
}
REQUIRED = {place for place in PLACES if len(place) == 1 or (place[0] == "facts" and len(place) == 2)}


def state() -> dict[str, Any]:
    """As `state_of` writes it."""
    return stored_form.state_of(nvfp4.quantize(torch.randn(32, 64)))


def changed(place: tuple[str, ...], change: Callable[[Any, Any], None]) -> dict[str, Any]:
    """A state in which one mapping, or a plane's facts as a list, has been changed."""
    whole: dict[str, Any] = copy.copy(state())
    whole["facts"] = copy.deepcopy(whole["facts"])
    whole["facts"]["planes"] = {name: list(plane) for name, plane in whole["facts"]["planes"].items()}
    whole["planes"] = dict(whole["planes"])
    inner: Any = whole
    for name in place[:-1]:
        inner = inner[name]
    change(inner, int(place[-1]) if isinstance(inner, list) else place[-1])
    return whole


def wrong(found: dict[str, Any]) -> str | None:
    return stored_form.wrong_in(found, lambda plane: isinstance(plane, Tensor))


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_each_value_is_checked(place: tuple[str, ...]) -> None:
    for other in OTHERS:

        def put(inner: Any, name: Any, other: Any = other) -> None:
            inner[name] = other

        found = changed(place, put)
        said, fits = wrong(found), PLACES[place](other)
        if fits and place[0] in ("shape", "matrix", "halo"):
            assert said in (None, "shape and matrix have different numbers of elements")
        else:
            assert said == (None if fits else f"{place[0]} is not what layoutc writes"), other


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_what_is_left_out_is_missed(place: tuple[str, ...]) -> None:
    def drop(inner: Any, name: Any) -> None:
        del inner[name]

    fits = place not in REQUIRED and not place[-1].isdigit()
    assert wrong(changed(place, drop)) == (None if fits else f"{place[0]} is not what layoutc writes")


@pytest.mark.parametrize("place", [("facts", "more"), ("facts", "planes", "rowwise_scale", "3"), ("more",)])
def test_facts_have_nothing_more(place: tuple[str, ...]) -> None:
    """A state may: later versions add to it."""

    def add(inner: Any, name: Any) -> None:
        inner.append("uint8") if isinstance(inner, list) else inner.update({name: {}})

    assert (wrong(changed(place, add)) is None) == (place == ("more",))


@pytest.mark.parametrize(
    ("shape", "matrix", "halo", "fits"),
    [
        ((32, 64), (32, 64), (0, 0), True),
        ((2, 16, 64), (32, 64), (0, 0), True),
        ((20, 64), (32, 64), (4, 8), True),
        ((0, 64), (32, 64), (20, 12), True),
        ((0, 64), (32, 64), (20, 13), False),
        ((0, 0), (32, 0), (20, 13), False),
        ((32, 64), (32, 64), (4, 8), False),
        ((32, 32), (32, 64), (0, 0), False),
    ],
)
def test_a_shape_has_the_elements_of_its_matrix_without_the_halo(
    shape: tuple[int, ...], matrix: tuple[int, int], halo: tuple[int, int], fits: bool
) -> None:
    said = wrong(state() | {"shape": shape, "matrix": matrix, "halo": halo})
    assert said == (None if fits else "shape and matrix have different numbers of elements")


def test_a_damaged_state_is_refused_before_its_planes_are_read() -> None:
    """By what restores it, in the words of what is wrong."""
    said = "the state of a quantized tensor is damaged: halo is not what layoutc writes"
    with pytest.raises(DamagedError, match=f"^{said}$"):
        stored_form.restored(state() | {"halo": (0, 0, 0)}, pytest.fail)


STACKED = ["nvfp4_modelopt_experts", "nvfp4_compressed_tensors_experts"]  # an amax for each matrix


@pytest.mark.parametrize("recipe", STACKED)
def test_views_of_stacks_are_written_by_the_amaxes_of_their_matrices(recipe: str) -> None:
    """Also after they were saved and loaded, when the stack is gone."""
    torch.manual_seed(0)
    stack = import_module(f"layoutc.recipes.{recipe}").quantize(torch.randn(3, 64, 64))
    values = torch.randn(3, 64, 64) * torch.tensor([1.0, 50.0, 1000.0]).view(3, 1, 1)

    def views(of: Any) -> list[Any]:
        return [of, of.flatten(), of.view(192, 64), of.view(192, 64)[64:], of[1][16:32]]

    for view, written in zip(views(stack), views(values), strict=True):
        both = [view.clone(), pickle.loads(pickle.dumps(view))]
        with torch.no_grad():
            for one in both:
                one.copy_(written)
        before, again = (one.planes() for one in both)
        assert all(torch.equal(plane, again[name]) for name, plane in before.items())


@pytest.mark.parametrize("stack", [(0, 0), (64,), (64, -1), [64, 0], None, "64"])
def test_a_damaged_stack_is_refused(stack: Any) -> None:
    state = stored_form.state_of(import_module(f"layoutc.recipes.{STACKED[0]}").quantize(torch.randn(3, 64, 64)))
    with pytest.raises(DamagedError, match="stack is not what layoutc writes"):
        stored_form.restore_tensor({**state, "stack": stack})

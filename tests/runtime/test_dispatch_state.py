"""What a quantized tensor is outside of operators: printing, flattening, pickling, files, attributes."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_cases import (
    aliases,
    each_recipe,
    facts,
    is_compact,
    make,
    module,
    same,
    same_bits,
    same_tensors,
    snapshot,
    weight,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import layoutc
from layoutc.runtime.errors import LayoutError

pytestmark = each_recipe


def through_file(value: Any) -> Any:
    """torch.save, then torch.load with weights_only."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


ROUND_TRIPS = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "deepcopy": copy.deepcopy,
    "file": through_file,
}
TENSORS = {
    "whole": lambda recipe: make(recipe),
    "bf16": lambda recipe: make(recipe, dtype=torch.bfloat16),
    "experts": lambda recipe: make(recipe, 4, 128, 256),
    "flat": lambda recipe: make(recipe).view(-1),
    "transposed": lambda recipe: make(recipe).t(),
    "rows": lambda recipe: make(recipe)[128:],
    "columns": lambda recipe: make(recipe)[:, :128],
    "empty": lambda recipe: make(recipe)[:0],
    "rowwise": lambda recipe: make(recipe, orientations=("rowwise",)),
    "meta": lambda recipe: make(recipe).to("meta"),
}


def test_a_round_trip_is_byte_exact_and_compact(recipe: str) -> None:
    """Copies keep class, shape, strides, dtype, orientations and planes; a view takes its own bytes alone."""
    for name, trip in product(TENSORS, ROUND_TRIPS):
        q, case = TENSORS[name](recipe), (name, trip)
        back = ROUND_TRIPS[trip](q)
        assert type(back) is type(q), case
        assert (back.shape, back.stride(), back.dtype, back.device) == (q.shape, q.stride(), q.dtype, q.device), case
        assert (back.orientations, back.requires_grad) == (q.orientations, q.requires_grad), case
        assert back.store.matrix == q.store.matrix, case
        if name == "meta":
            assert facts(back) == facts(q), case
            continue
        assert same(back, q), case
        assert is_compact(back), case
        assert same_tensors(back.buffers(), q.buffers()), case
        assert not (q.numel() and aliases(back, q)), case


def test_a_narrow_view_saves_its_own_bytes_alone(recipe: str) -> None:
    """A file of a piece has the piece's bytes, and none of the rest."""
    q = make(recipe, 1024, 256)
    piece = q[:128]
    sizes = []
    for value in (q, piece, piece.clone()):
        file = io.BytesIO()
        torch.save(value, file)
        sizes.append(len(file.getvalue()))
    held = sum(plane.numel() * plane.element_size() for plane in piece.planes().values())
    assert sizes[1] < held + 8192 < sizes[0]
    assert abs(sizes[1] - sizes[2]) < 512


@pytest.mark.parametrize("trip", ROUND_TRIPS)
def test_a_parameter_stays_a_parameter(recipe: str, trip: str) -> None:
    """Copies of a parameter keep requires_grad, by themselves and in a module, as those of plain parameters do."""
    parameter = nn.Parameter(make(recipe))
    back = ROUND_TRIPS[trip](parameter)
    assert back.requires_grad
    assert same(back, parameter)
    assert isinstance(back, nn.Parameter)
    if trip != "file":
        linear = nn.Linear(256, 256)
        layoutc.quantize_(linear, recipe)
        other = ROUND_TRIPS[trip](linear)
        assert isinstance(other.weight, nn.Parameter)
        assert [name for name, _ in other.named_parameters()] == ["weight", "bias"]
        assert same(other.weight, linear.weight)
        x = weight(4, 256)
        assert same_bits(other(x), linear(x))


def test_views_of_one_weight_stay_together_in_a_copy(recipe: str) -> None:
    """deepcopy and torch.save keep ties of one tensor object."""
    tied = {"a": (q := make(recipe)), "b": q}
    for trip in ROUND_TRIPS.values():
        back = trip(tied)
        assert back["a"] is back["b"]


def test_a_state_dict_round_trip_restores_bytes(recipe: str, tmp_path: Path) -> None:
    """Saved, loaded, and given to load_state_dict with and without assign."""
    first, second = nn.Linear(256, 256), nn.Linear(256, 256)
    for linear in (first, second):
        layoutc.quantize_(linear, recipe)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    address = second.weight.planes()["rowwise_data"].data_ptr()
    with layoutc.strict():
        assert str(second.load_state_dict(state)) == "<All keys matched successfully>"
    assert same(second.weight, first.weight)
    assert second.weight.planes()["rowwise_data"].data_ptr() == address
    third = nn.Linear(256, 256, device="meta")
    layoutc.quantize_(third, recipe)
    third.load_state_dict(state, assign=True)
    assert same(third.weight, first.weight)
    assert isinstance(third.weight, nn.Parameter)


def test_bytes_of_another_layout_are_refused(recipe: str) -> None:
    """The recipe's layout id travels with the bytes."""
    q = make(recipe)
    function, (state,) = q.__reduce_ex__(2)[:2]
    with pytest.raises(LayoutError, match=rf"{recipe}.*0123456789ab.*{q.LAYOUT.layout_id}"):
        function(state | {"layout_id": "0123456789ab"})
    names, context = q.__tensor_flatten__()
    inner = {name: getattr(q, name) for name in names}
    other = context._replace(layout_id="0123456789ab")
    with pytest.raises(ValueError, match="0123456789ab"):
        type(q).__tensor_unflatten__(inner, other, q.shape, q.stride())


def test_flattening_lists_the_planes_and_unflattening_restores_the_tensor(recipe: str) -> None:
    """The names are those of planes; the context is hashable, has no tensors, and pickles."""
    for name, made in TENSORS.items():
        q = made(recipe)
        names, context = q.__tensor_flatten__()
        assert len(names) == len(q.planes()), name
        assert hash(context) == hash(q.__tensor_flatten__()[1]), name
        assert pickle.loads(pickle.dumps(context)) == context, name
        inner = {plane: getattr(q, plane) for plane in names}
        assert all(type(tensor) is torch.Tensor for tensor in inner.values()), name
        back = type(q).__tensor_unflatten__(inner, context, q.shape, q.stride())
        assert (back.shape, back.stride(), back.dtype) == (q.shape, q.stride(), q.dtype), name
        assert back.orientations == q.orientations, name
        assert all(plane is q.planes()[n] for n, plane in back.planes().items()), name
        assert torch.utils._python_dispatch.is_traceable_wrapper_subclass(q), name
        assert back._stable_hash_for_caching() == q._stable_hash_for_caching(), name


def test_what_compiles_to_other_code_is_cached_apart(recipe: str) -> None:
    """By shapes, dtypes and what is held; not by values."""
    x = torch.randn(128, 128)
    quantize = importlib.import_module(f"layoutc.recipes.{recipe}").quantize
    q = quantize(x)
    others = [q.t(), q.view(64, 256), q.view(2, 64, 128), quantize(x.bfloat16()), quantize(torch.randn(256, 128))]
    hashes = {tensor._stable_hash_for_caching() for tensor in (q, *others, nn.Parameter(q))}
    assert len(hashes) == len(others) + 2
    assert quantize(2 * x)._stable_hash_for_caching() == q._stable_hash_for_caching()


def test_printing_never_reads_values(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta and empty tensors print too: shape, bytes and orientations."""
    tensors = [made(recipe) for made in TENSORS.values()]
    monkeypatch.setattr(module(recipe).Tensor, "dequantize", lambda *_: pytest.fail("values were read"))
    for q in tensors:
        for text in (repr(q), str(q), f"{q}", repr([q]), repr(nn.Parameter(q))):
            assert type(q).__name__ in text
            assert str(tuple(q.shape)) in text
            assert "bytes=" in text
            assert "+".join(q.orientations) in text
        assert "requires_grad=True" in repr(nn.Parameter(q))


def test_a_freed_tensor_prints(recipe: str) -> None:
    """A weight whose planes FSDP2 has freed after a pass prints."""
    q = make(recipe)
    for plane in q.planes().values():
        plane.untyped_storage().resize_(0)
    assert "holds=" in repr(q)
    assert repr(q.t())
    assert q.shape == (256, 256)
    assert q.detach().orientations == q.orientations


def test_attributes_can_be_set(recipe: str) -> None:
    """FSDP2 and optimizers leave marks on tensors; an unknown name is an AttributeError."""
    q = make(recipe)
    q._fsdp_orig_uid = 7
    q.tag = "x"
    assert (q._fsdp_orig_uid, q.tag) == (7, "x")
    del q.tag
    assert not hasattr(q, "tag")
    assert not hasattr(q, "plane_nothing")
    with pytest.raises(AttributeError, match="nothing"):
        q.nothing  # noqa: B018
    assert copy.deepcopy(q)._fsdp_orig_uid == 7


def test_planes_and_buffers_have_the_facts_of_the_layout(recipe: str) -> None:
    """Names in order, shapes and dtypes, before and after quantizing; a buffer that equals a plane is that plane."""
    layout = module(recipe).LAYOUT
    for shape in [(256, 256), (4, 128, 256), (0, 256)]:
        q = make(recipe, *shape)
        m, k = torch.Size(shape[:-1]).numel(), shape[-1]
        for held, expected in ((q.planes(), layout.planes(m, k)), (q.buffers(), layout.buffers(m, k))):
            assert {n: (tuple(t.shape), t.dtype) for n, t in held.items()} == expected
            assert list(held) == list(expected)
    q = make(recipe)
    assert q.buffers()["rowwise_data"] is q.planes()["rowwise_data"]
    assert all(getattr(q, name) is plane for name, plane in q.planes().items() if name != "amax")
    before = snapshot(q)
    for buffer in q.buffers().values():
        assert buffer.is_contiguous()
    assert same_tensors(q.planes(), before)


def test_a_state_is_loaded_without_bytes_under_fake_tensors(recipe: str) -> None:
    """To plan memory, or to trace: shapes and dtypes as they were saved, and no bytes to compare with a CRC-32."""
    q, file = make(recipe), io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    with FakeTensorMode():
        loaded = torch.load(file)
    assert (type(loaded), loaded.shape, loaded.dtype) == (type(q), q.shape, q.dtype)
    assert all(isinstance(plane, FakeTensor) for plane in loaded.planes().values())

"""Laid out weights of ragged shapes, under Triton's interpreter, and buffers_of: the reference's bytes for each."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from numpy_models import laid_out, recipe, reference
from quantized_cases import make, same_bits, same_tensors
from test_batches import off_card, ragged
from test_kernels import weight
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from weight_recipes import KINDS

import layoutc
from layoutc.runtime.errors import MissingOrientation
from layoutc.runtime.kernels import buffers, launch
from layoutc.runtime.kernels.recipe_kernels import Kernels
from layoutc.runtime.weight.tensor import QuantizedTensor

triton = pytest.importorskip("triton", reason="needs triton, which kernels are written in")
pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def kernels(name: str) -> Kernels:
    return importlib.import_module(f"layoutc.recipes.{name}.kernels").KERNELS


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tensors hold what no kernel writes everywhere, so that bytes that are left out show."""
    monkeypatch.setattr(torch, "empty", lambda shape, *, dtype, device: torch.full(shape, 0x5A, dtype=dtype))


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels serve plain CPU tensors, as they do those of a card."""
    monkeypatch.setattr(launch, "usable", lambda x, dtype=None: type(x) is Tensor and x.numel() > 0)


def tensors_of(name: str, count: int) -> list[QuantizedTensor]:
    return [recipe(name).quantize(weight(m, k, seed)) for seed, (m, k) in enumerate(ragged(name, count))]


def compare(name: str, tensors: list[QuantizedTensor], orientations: tuple[str, ...], swizzled: bool) -> None:
    """Of kernels, and of the reference."""
    flags = (swizzled,) if recipe(name).LAYOUT.swizzled else ()
    for tensor in tensors:
        planes, shape = tensor.planes(), tensor.store.matrix
        found = kernels(name).lay_out(planes, *shape, orientations, *flags)
        expected = laid_out(name, planes, shape, orientations)
        for orientation in orientations if swizzled else ():
            expected[f"{orientation}_scale"] = reference(name).gemm_scale(expected, orientation)
        assert list(expected) == list(found)
        for buffer, entries in expected.items():
            assert same_bits(entries, found[buffer]), (name, shape, buffer)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", KINDS)
def test_kernels_give_the_bytes_of_the_reference(name: str) -> None:
    """Ragged shapes, all orientations at once in both orders of scales, and each by itself in a GEMM's."""
    layout = recipe(name).LAYOUT
    tensors = tensors_of(name, 3)
    compare(name, tensors, layout.orientations, False)
    for orientations in dict.fromkeys((layout.orientations, *((one,) for one in layout.orientations))):
        if layout.swizzled or orientations != layout.orientations:
            compare(name, tensors, orientations, bool(layout.swizzled))


@pytest.mark.usefixtures("poisoned")
def test_whole_words_and_single_codes_are_moved() -> None:
    """Of fp8_current, whose shapes are free."""
    shapes = [(32, 64), (48, 16), (20, 12), (5, 7), (3, 9), (4, 8)]
    tensors = [recipe("fp8_current").quantize(weight(m, k, seed)) for seed, (m, k) in enumerate(shapes)]
    compare("fp8_current", tensors, ("rowwise", "columnwise"), False)


@pytest.mark.usefixtures("on_card")
def test_buffers_of_gives_what_each_tensor_gives() -> None:
    """Recipes and shapes mixed, in the order given."""
    names = ["mxfp8", "nvfp4", "fp8_delayed", "mxfp8", "nvfp4", "mxfp8", "fp8_block"]
    with off_card():
        tensors = [make(name, 64, 32 * (2 + index), seed=index) for index, name in enumerate(names)]
        tensors.append(make("mxfp8", 64, 64, orientations="rowwise"))
        each = [tensor.buffers() for tensor in tensors]
        swizzled = [tensor.buffers(swizzled=True) for tensor in tensors[:2]]
    found = layoutc.buffers_of(tensors)
    assert all(map(same_tensors, each, found))
    found = layoutc.buffers_of(tensors[:2] * 2, swizzled=True)
    assert all(map(same_tensors, swizzled * 2, found))
    found = layoutc.buffers_of(tensors, orientations=["rowwise"])
    for expected, one in zip(each, found, strict=True):
        assert all(buffer.startswith("rowwise") or buffer == "amax" for buffer in one)
        assert all(same_bits(buffer, expected[name]) for name, buffer in one.items())
    assert layoutc.buffers_of([]) == []


@pytest.mark.usefixtures("on_card")
def test_pieces_empty_weights_and_planes_that_lie_anywhere() -> None:
    """Views of a weight's planes, columns of it that are strided, and planes that begin between words."""
    whole = make("mxfp8", 128, 128)
    moved = make("mxfp8", 64, 64)
    space = {name: torch.empty(plane.numel() + 1, dtype=plane.dtype) for name, plane in moved.planes().items()}
    odd = {name: space[name][1:].view(plane.shape).copy_(plane) for name, plane in moved.planes().items()}
    pieces = [whole[:64], whole[:, 32:64], whole[64:96], moved.with_planes(odd), whole[:0]]
    found = layoutc.buffers_of(pieces)
    assert all(same_tensors(piece.buffers(), one) for piece, one in zip(pieces, found, strict=True))


def test_without_kernels_weights_go_one_by_one() -> None:
    tensors = [make(name, 64, 64, seed=seed) for seed in range(2) for name in ("mxfp8", "nvfp4", "fp8_current")]
    found = layoutc.buffers_of(tensors)
    assert all(same_tensors(tensor.buffers(), one) for tensor, one in zip(tensors, found, strict=True))


@pytest.mark.usefixtures("on_card")
def test_what_is_recorded_goes_through_operators() -> None:
    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    tensors = [make("nvfp4", 64, 64, seed=seed) for seed in range(2)]
    with Recorder():
        found = layoutc.buffers_of(tensors)
    assert names.count("layoutc.lay_out.default") == 2
    assert all(same_tensors(tensor.buffers(), one) for tensor, one in zip(tensors, found, strict=True))


@pytest.mark.parametrize("name", KINDS)
def test_what_is_allocated_is_on_the_device_that_was_asked_for(name: str) -> None:
    """Buffers and planes; on `meta`, since a machine without a card has no other."""
    layout, device = recipe(name).LAYOUT, torch.device("meta")
    m, k = 2 * max(layout.multiple_m, 64), 2 * max(layout.multiple_k, 64)
    one = buffers.new(layout, m, k, layout.orientations, device)
    planes = launch.new(layout.written(m, k, layout.orientations), device)
    assert {tensor.device for made in (one, planes) for tensor in made.values()} == {device}
    facts = layout.laid_out(m, k, layout.orientations)
    assert {buffer: (tuple(tensor.shape), tensor.dtype) for buffer, tensor in one.items()} == facts


def test_bad_batches_are_refused_before_work() -> None:
    tensors = [make("mxfp8", 64, 64), make("mxfp8", 64, 64, orientations="rowwise")]
    with pytest.raises(TypeError, match="buffers_of takes quantized tensors, not Tensor"):
        layoutc.buffers_of([tensors[0], torch.ones(2, 2)])  # type: ignore[list-item]
    with pytest.raises(MissingOrientation, match="holds rowwise, not columnwise"):
        layoutc.buffers_of(tensors, orientations=["columnwise"])
    with pytest.raises(ValueError, match="has orientations rowwise, columnwise, not sideways"):
        layoutc.buffers_of(tensors, orientations=["sideways"])
    with pytest.raises(ValueError, match="fp8_block: swizzled=True"):
        layoutc.buffers_of([tensors[0], make("fp8_block")], swizzled=True)

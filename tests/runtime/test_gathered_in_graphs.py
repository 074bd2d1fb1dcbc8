"""What graphs read of weights that each pass gathers anew: the operators, by themselves."""

from __future__ import annotations

import gc
import importlib
from functools import partial
from typing import Any

import pytest
import torch
from one_rank import gather
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from layoutc.runtime.errors import LayoutError, MissingOrientation

OPERATORS = torch.ops.layoutc
pytestmark = pytest.mark.parametrize("recipe", ["fp8_rowwise", "int4_group32", "mxfp8", "nvfp4_1d"])


def weight(recipe: str) -> Any:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    return importlib.import_module(f"layoutc.recipes.{recipe}").quantize(x * torch.logspace(-2, 2, 256, 2.0))


def test_a_graph_reads_what_the_weight_holds_when_it_runs(recipe: str) -> None:
    """Traced in forward, run in both passes: the values of the orientation that was asked for, or an error."""
    shard, memory = weight(recipe), list[Tensor]()
    whole = gather(shard, "forward", memory)
    read = make_fx(lambda: whole.dequantize())
    graph = read()
    assert torch.equal(graph(), shard.values_of("rowwise", torch.float32))
    gather(shard, "backward", memory, whole)
    with pytest.raises(MissingOrientation, match="FSDP2 no longer holds this shard"):
        graph()
    gather(shard, "forward", memory, whole)
    assert torch.equal(graph(), shard.values_of("rowwise", torch.float32))
    memory[0].untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match=f"reads rowwise of a gathered weight in {recipe}, which FSDP2 has resharded"):
        graph()


def read_buffers(tensor: Any, swizzled: bool, names: list[str]) -> list[Tensor]:
    buffers = tensor.buffers(swizzled=swizzled)
    names[:] = buffers
    return list(buffers.values())


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_buffers_of_a_weight_and_of_a_piece(recipe: str, which: str) -> None:
    """Those of the pass, in the order and with the bytes of eager calls, none of them the weight's own memory."""
    memory: list[Tensor] = []
    whole = gather(weight(recipe), which, memory)
    for tensor in (whole, whole[128:], whole[:, 128:]):
        for swizzled in (False, True) if tensor.LAYOUT.swizzled else (False,):
            expected = tensor.buffers(swizzled=swizzled)
            names: list[str] = []
            found = make_fx(partial(read_buffers, tensor, swizzled, names))()()
            assert names == list(expected)
            for one, buffer in zip(found, expected.values(), strict=True):
                assert (one.shape, one.dtype) == (buffer.shape, buffer.dtype)
                assert torch.equal(one.contiguous().view(torch.uint8), buffer.contiguous().view(torch.uint8))
                assert one.untyped_storage().data_ptr() not in {held.data_ptr() for held in memory}


def test_a_copy_has_all_planes_that_the_pass_gathered(recipe: str) -> None:
    whole = gather(weight(recipe), "forward", [])
    clone = make_fx(lambda: list(whole.clone().planes().values()))()()
    for one, plane in zip(clone, whole.planes().values(), strict=True):
        assert torch.equal(one.view(torch.uint8), plane.contiguous().view(torch.uint8))


@pytest.mark.parametrize("window", [[0, 256, 0, 256], [128, 256, 0, 128]])
def test_shapes_and_dtypes_without_values(recipe: str, window: list[int]) -> None:
    """Of every operator, the same as with values."""
    whole = gather(weight(recipe), "forward", [])
    key = type(whole).KEY

    def facts(handle: Tensor) -> list[Any]:
        made = [OPERATORS.plane_gathered(handle, 256, 256, key, name) for name in whole.planes()]
        made.append(OPERATORS.dequantize_gathered(handle, window, key, "rowwise", torch.bfloat16))
        for swizzled in (False, True) if whole.LAYOUT.swizzled else (False,):
            made += OPERATORS.lay_out_gathered(handle, window, key, "rowwise", swizzled)
        return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in made]

    expected = facts(whole.store.planes.handle)
    with FakeTensorMode():
        assert facts(torch.empty(1, dtype=torch.uint8)) == expected


@pytest.mark.sample(2)
def test_a_weight_that_is_gone(recipe: str) -> None:
    """Its handle, saved by a graph, stands for nothing; nor does a copy of it."""
    whole = gather(weight(recipe), "forward", [])
    handle, key = whole.store.planes.handle, type(whole).KEY
    arguments = [0, 256, 0, 256], key, "rowwise", torch.float32
    assert torch.equal(OPERATORS.dequantize_gathered(handle.detach(), *arguments), whole.dequantize())
    with pytest.raises(MissingOrientation, match="FSDP2 does not hold that weight any more"):
        OPERATORS.dequantize_gathered(handle.clone(), *arguments)
    del whole
    gc.collect()
    with pytest.raises(MissingOrientation, match="FSDP2 does not hold that weight any more"):
        OPERATORS.dequantize_gathered(handle, *arguments)


def test_an_orientation_that_the_shard_does_not_hold(recipe: str) -> None:
    """Nothing can gather it: said before a collective starts."""
    module = importlib.import_module(f"layoutc.recipes.{recipe}")
    shard = module.quantize(torch.randn(256, 256), orientations=("rowwise",))
    whole = gather(shard, "forward", [])
    arguments = [0, 256, 0, 256], type(whole).KEY, "columnwise", torch.float32
    with pytest.raises(MissingOrientation, match="but its shard holds no columnwise"):
        OPERATORS.dequantize_gathered(whole.store.planes.handle, *arguments)

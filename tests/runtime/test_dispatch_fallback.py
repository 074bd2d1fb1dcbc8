"""Operators without a rule: they run on values, which is counted, or refused under strict(); cat, where it is bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from quantized_cases import (
    BLOCKED,
    SHARED,
    aliases,
    each_recipe,
    is_plain,
    make,
    module,
    same,
    same_bits,
    same_tensors,
    snapshot,
)
from torch import Tensor

import layoutc
from layoutc.runtime.errors import ImplicitDequantize, UnsupportedOperator

pytestmark = each_recipe


def counts(call: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """The result of a call, and which operators dequantized in it unasked."""
    before = layoutc.implicit_dequantizes()
    result = call()
    return result, dict(layoutc.implicit_dequantizes() - before)


# ------------------------------------------------------------------------------------------------------------------ cat
def test_cat_on_block_boundaries_joins_bytes(recipe: str) -> None:
    """Pieces of one weight, short and empty ones at the end, become the weight; nothing is dequantized."""
    q = make(recipe)
    with layoutc.strict():
        for pieces in (q.split(128), [q[:128], q[128:], q[256:]], [q], list(q.split(256))):
            whole = torch.cat(list(pieces))
            assert same(whole, q)
            assert not aliases(whole, q)
        experts = make(recipe, 4, 128, 256)
        assert same(torch.cat([experts[:1], experts[1:]]), experts)
        for columns in (list(q.split(128, 1)), [q[:, :128], q[:, 128:]]):
            assert same(torch.cat(columns, 1), q)
            assert same(torch.cat(columns, -1), q)
        assert same(torch.cat([experts[..., :128], experts[..., 128:]], -1), experts)


def test_whole_blocks_are_selected_in_any_order_as_bytes(recipe: str) -> None:
    """As DTensor puts strided shards in order; a row inside of a block is a counted copy."""
    q = make(recipe)
    order = torch.cat([torch.arange(128, 256), torch.arange(128)])
    for dim in (0, 1):
        with layoutc.strict():
            selected = torch.index_select(q, dim, order)
        assert type(selected) is type(q)
        assert same_bits(selected.dequantize(), q.dequantize().index_select(dim, order))
    row, counted = counts(lambda: q.index_select(0, torch.tensor([5])))
    values = row if is_plain(row) else row.dequantize()
    assert same_bits(values, q.dequantize()[5:6])
    assert counted == ({"aten.index_select.default": 1} if recipe in BLOCKED else {})


def test_any_other_cat_is_a_counted_copy(recipe: str) -> None:
    """Inside of blocks, with plain tensors, under different amaxes, of other recipes: the values are right."""
    q, other = make(recipe), make(recipe, seed=1)
    another = make("mxfp8" if recipe != "mxfp8" else "nvfp4")
    calls: list[tuple[list[Tensor], int]] = [
        ([q, q.dequantize()], 0),
        ([q, another], 0),
        ([q.t(), q.t()], 0),
    ]
    if recipe in SHARED:
        calls.append(([q, other], 0))
    else:
        calls.append(([q.view(32, 8, 256), q.view(32, 8, 256)], 1))
    for pieces, dim in calls:
        joined, counted = counts(lambda pieces=pieces, dim=dim: torch.cat(pieces, dim))
        plain = [p.dequantize() if hasattr(p, "planes") else p for p in pieces]
        assert is_plain(joined)
        assert same_bits(joined, torch.cat(plain, dim))
        assert counted == {"aten.cat.default": 1}
        with layoutc.strict(), pytest.raises(ImplicitDequantize, match=r"aten\.cat"):
            torch.cat(pieces, dim)


# ------------------------------------------------------------------------------------------------------------- fallback
READS: dict[str, Callable[[Tensor], Any]] = {
    "aten.add.Tensor": lambda x: x + 1,
    "aten.mul.Tensor": lambda x: 2.0 * x,
    "aten.neg.default": lambda x: -x,
    "aten.sum.default": lambda x: x.sum(),
    "aten.linalg_vector_norm.default": lambda x: torch.linalg.vector_norm(x),
    "aten.stack.default": lambda x: torch.stack([x, x]),
    "aten.index.Tensor": lambda x: x[torch.tensor([3, 1, 2])],
    "aten.gt.Scalar": lambda x: x > 0,
    "aten._foreach_mul.Scalar": lambda x: torch._foreach_mul([x, x], 2.0)[1],
}


def test_an_operator_without_a_rule_runs_on_values_and_is_counted(recipe: str) -> None:
    """The result is plain, counted once under the operator's name; strict() refuses it by name."""
    q = make(recipe)
    before, values = snapshot(q), q.dequantize()
    for name, read in READS.items():
        result, counted = counts(lambda read=read: read(q))
        assert is_plain(result), name
        assert same_bits(result, read(values)), name
        assert counted == {name: 1}
        with layoutc.strict(), pytest.raises(ImplicitDequantize, match=name.replace(".", r"\.")):
            read(q)
        with layoutc.strict(), layoutc.strict(False):
            read(q)
        assert same_tensors(q.planes(), before), name


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda x: x.add_(0.5),
    "mul_": lambda x: x.mul_(-2.0),
    "lerp_": lambda x: x.lerp_(torch.ones_like(x), 0.5),
    "addcdiv_": lambda x: x.addcdiv_(torch.ones(256, 256), torch.full((256, 256), 2.0), value=3.0),
    "fill_": lambda x: x.fill_(1.5),
    "clamp_": lambda x: x.clamp_(-1.0, 1.0),
    "foreach_add": lambda x: torch._foreach_add_([x], [torch.ones(256, 256)]),
    "foreach_mul": lambda x: torch._foreach_mul_([x, torch.ones(3)], 0.5),
    "out": lambda x: torch.add(torch.ones(256, 256), 1.0, out=x),
    "masked_fill_": lambda x: x.masked_fill_(torch.eye(256, dtype=torch.bool), 7.0),
}


def test_an_operator_in_place_requantizes_all_planes(recipe: str) -> None:
    """The object stays, as if the result had been quantized into it; its aliases see it."""
    for name, write in WRITES.items():
        q = make(recipe)
        alias, values = q.t(), q.dequantize()
        write(values)
        expected = module(recipe).quantize(values)
        result, counted = counts(lambda write=write, q=q: write(q))
        assert same(q, expected), name
        assert same_bits(alias.dequantize(), expected.dequantize().t()), name
        assert sum(counted.values()) == 1, name
        assert not isinstance(result, Tensor) or result is q, name
        before = snapshot(q)
        with layoutc.strict(), pytest.raises(ImplicitDequantize):
            write(q)
        assert same_tensors(q.planes(), before), name


def test_zero_in_place_needs_no_values(recipe: str) -> None:
    """Every alias has exact zeros."""
    q = make(recipe)
    alias = q.view(-1)
    with layoutc.strict():
        assert q.zero_() is q
    assert same_bits(alias.dequantize(), torch.zeros(65536))


def test_zero_in_place_is_quantizing_zeros(recipe: str) -> None:
    """In every byte; a history of amaxes does not go on from the values before."""
    q = make(recipe, 128, 128)
    q.zero_()
    assert same(q, module(recipe).quantize(torch.zeros(128, 128)))


def test_an_operator_that_fails_leaves_the_weight_intact(recipe: str) -> None:
    """An error in the middle changes nothing."""
    q = make(recipe)
    before = snapshot(q)
    for call in (
        lambda: q.add_(torch.ones(3, 3)),
        lambda: q + torch.ones(3, 3),
        lambda: q.index_add_(0, torch.tensor([999]), q),
    ):
        with pytest.raises((RuntimeError, IndexError)):
            call()
        assert same_tensors(q.planes(), before)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.complex64])
def test_dtypes_that_are_not_floating_point_take_the_values(recipe: str, dtype: torch.dtype) -> None:
    """Also for torch.fft, which computes in complex numbers."""
    q = make(recipe)
    assert torch.equal(q.to(dtype), q.dequantize().to(dtype))
    assert torch.equal(torch.fft.ifft2(q), torch.fft.ifft2(q.dequantize()))


def test_a_view_in_place_is_refused(recipe: str) -> None:
    """A square weight had been quantized anew in the other order; detach_ writes nothing in inference mode either."""
    q = make(recipe)
    before = snapshot(q)
    for call in (q.t_, lambda: q.transpose_(0, 1), lambda: q.unsqueeze_(0), lambda: q.resize_(3, 3)):
        with pytest.raises(UnsupportedOperator, match="keeps its shape"):
            call()
    with torch.inference_mode():
        inferred = q.clone()
        assert inferred.detach_() is inferred
    assert same(inferred, q)
    assert same_tensors(q.planes(), before)


def test_room_that_an_operator_asks_for_holds_plain_values(recipe: str) -> None:
    """hinge_embedding_loss computes in empty_like(weight): codes would round its differences."""
    q, target = make(recipe), torch.eye(256) * 2 - 1
    loss = torch.nn.functional.hinge_embedding_loss
    assert same_bits(loss(q, target, margin=8.4), loss(q.dequantize(), target, margin=8.4))


@pytest.mark.parametrize("name", ["sparse_", "dirac_"])
def test_initializers_of_single_elements_are_refused_before_they_write(recipe: str, name: str) -> None:
    """They fill the weight first, so it had held other values when they were refused. What the words say works."""
    q = make(recipe) if name == "sparse_" else make(recipe, 4, 128, 256)
    before, initialize = snapshot(q), getattr(torch.nn.init, name)
    options = {"sparsity": 0.5} if name == "sparse_" else {}
    with pytest.raises(UnsupportedOperator, match=rf"torch\.nn\.init\.{name} writes single elements"):
        initialize(q, **options)
    assert same_tensors(q.planes(), before)
    q.copy_(initialize(torch.empty(q.shape), **options))

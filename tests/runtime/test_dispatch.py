"""New tensors, copies and storage: exact on planes, or plain, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quantized_cases import (
    RECIPES,
    aliases,
    each_recipe,
    facts,
    is_compact,
    is_plain,
    make,
    module,
    raw,
    same,
    same_bits,
    same_tensors,
    snapshot,
    weight,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import layoutc
from layoutc.conformance.as_fsdp2 import called
from layoutc.runtime.errors import ImplicitDequantize, LayoutError, UnsupportedOperator

pytestmark = each_recipe
aten = torch.ops.aten


def counts(call: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """The result of a call, and which operators dequantized in it unasked."""
    before = layoutc.implicit_dequantizes()
    result = call()
    return result, dict(layoutc.implicit_dequantizes() - before)


# ---------------------------------------------------------------------------------------------------------- new tensors
@pytest.mark.parametrize("size", [(256, 256), (128, 256), (384, 128), (2, 128, 256), (0, 256), (0,)])
def test_new_zeros_for_fsdp2_has_the_class_and_dequantizes_to_exact_zeros(recipe: str, size: tuple[int, ...]) -> None:
    """It has the planes that the layout gives for the size, and shares none with its source."""
    q, layout = make(recipe, dtype=torch.bfloat16), module(recipe).LAYOUT
    new = called(q, "new_zeros", size, pin_memory=False)
    assert type(new) is type(q)
    assert (tuple(new.shape), new.dtype, new.is_contiguous()) == (size, torch.bfloat16, True)
    assert same_bits(new.dequantize(), torch.zeros(size, dtype=torch.bfloat16))
    m, k = (size[0] // 256, 256) if len(size) == 1 else (torch.Size(size[:-1]).numel(), size[-1])
    assert {n: (tuple(p.shape), p.dtype) for n, p in new.planes().items()} == dict(layout.planes(m, k))
    assert same(q, make(recipe, dtype=torch.bfloat16))


def test_new_tensors_of_users_are_plain(recipe: str) -> None:
    """Whatever the size: a LoRA adapter that is made from a weight holds fp32, of quantized weights and cast ones."""
    values = make(recipe).dequantize()
    for one in (make(recipe), module(recipe).CastTensor(values), nn.Parameter(module(recipe).CastTensor(values))):
        for size in ((256, 256), (128, 256), (0, 256)):
            for made in (one.new_empty(size), one.new_zeros(size), nn.Parameter(one.new_zeros(size))):
                assert is_plain(made.data)
                assert (tuple(made.shape), made.dtype) == (size, torch.float32)
        adapter = nn.Parameter(one.new_zeros((256, 256)))
        nn.init.orthogonal_(adapter, generator=torch.Generator().manual_seed(1))
        plain = nn.init.orthogonal_(torch.empty(256, 256), generator=torch.Generator().manual_seed(1))
        assert torch.equal(adapter, plain)


@pytest.mark.parametrize("size", [(256, 256), (0,), (0, 256), (2, 128, 256)])
def test_new_empty_for_fsdp2_has_the_class_on_any_device(recipe: str, size: tuple[int, ...]) -> None:
    """The class is the source's, whatever the device."""
    q = make(recipe)
    for device in ("cpu", "meta"):
        new = called(q, "new_empty", size, device=device)
        assert type(new) is type(q)
        assert (tuple(new.shape), new.device.type) == (size, device)
        assert {plane.device.type for plane in new.planes().values()} == {device}


def test_shards_have_the_class_under_a_dispatch_mode_of_users(recipe: str) -> None:
    """Counters and debuggers pass operators on, with frames of compilers around them."""

    class Passes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    q = make(recipe)
    with Passes():
        made, of_users = called(q, "new_zeros", (256, 256)), q.new_zeros((256, 256))
    assert type(made) is type(q)
    assert is_plain(of_users)


def test_a_size_of_one_dim_is_of_the_class_for_flat_tensors_alone(recipe: str) -> None:
    """A bias made with new_zeros is no weight; a flat weight's new_zeros is one, with its columns."""
    q = make(recipe)
    assert type(called(q, "new_zeros", 256)) is torch.Tensor
    assert type(called(q, "new_zeros", 65536)) is torch.Tensor
    flat = called(q.view(-1), "new_zeros", 65536)
    assert type(flat) is type(q)
    assert flat.planes().keys() == q.planes().keys()


def test_sizes_and_dtypes_that_the_recipe_cannot_hold_give_plain_tensors(recipe: str) -> None:
    """The result is what the operator gives for a plain tensor."""
    q, layout = make(recipe), module(recipe).LAYOUT
    for make_new in (partial(called, q, "new_empty"), partial(called, q, "new_zeros")):
        assert is_plain(make_new(()))
        assert is_plain(make_new((3, 5), dtype=torch.int64))
        assert make_new((256, 256), dtype=torch.float16).dtype == torch.float16
        assert is_plain(make_new((256, 256), dtype=torch.float16))
        if layout.multiple_k > 1:
            assert is_plain(make_new((256, layout.multiple_k - 1)))
            assert is_plain(make_new((layout.multiple_m - 1, 512)))
        assert type(make_new((5, 256))) is type(q), "a shard may have any number of rows"


@pytest.mark.parametrize("amounts", [(0, 5), (0, 0, 0, 3), (0, 0, -3, 0), (0, 256), (0, 0, 0, 256), (1, 1, 1, 1)])
def test_padding_has_the_values_of_a_padded_plain_weight(recipe: str, amounts: tuple[int, ...]) -> None:
    """Of the class where blocks stay whole; for others, crops and other fill values, a copy of values."""
    q = make(recipe)
    cast = module(recipe).CastTensor(q.dequantize())
    values = cast.quantize().dequantize()
    for one, plain, fill in (
        (q, q.dequantize(), 0.0),
        (q, q.dequantize(), 1.5),
        (q.t(), q.dequantize().t(), 0.0),
        (cast, values, 0.0),
    ):
        found, counted = counts(lambda one=one, fill=fill: F.pad(one, amounts, value=fill))
        assert torch.equal(found if is_plain(found) else found.dequantize(), F.pad(plain, amounts, value=fill))
        assert is_plain(found) == bool(counted)


def test_pinning_reaches_every_plane(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """new_zeros, new_empty and empty_like ask for pinned memory for each plane."""
    q, asked = make(recipe), []
    originals = {"zeros": torch.zeros, "empty": torch.empty}

    def pinning(name: str, *args: Any, **kwargs: Any) -> Tensor:
        asked.append(kwargs.pop("pin_memory"))
        made: Tensor = originals[name](*args, **kwargs)
        return made

    for name in originals:
        monkeypatch.setattr(torch, name, partial(pinning, name))
    for name in ("new_zeros", "new_empty"):
        called(q, name, q.shape, pin_memory=True)
    torch.empty_like(q, pin_memory=True)
    torch.empty_like(q, pin_memory=True, dtype=torch.float64)  # plain
    assert asked == [True] * (3 * len(q.planes()) + 1)


def test_empty_like_has_the_class_the_orientations_and_the_device(recipe: str) -> None:
    """Of a tensor with one orientation, of any outer shape; to_empty of a meta model needs it."""
    q = make(recipe, 4, 128, 256, orientations=("rowwise",))
    for device in ("cpu", "meta"):
        new = torch.empty_like(q, device=device)
        assert type(new) is type(q)
        assert (new.shape, new.dtype, new.device.type, new.orientations) == (q.shape, q.dtype, device, q.orientations)
        assert facts(new) == facts(q)
    assert not aliases(torch.empty_like(q), q)
    assert is_compact(torch.empty_like(q[1:2]))
    assert is_plain(torch.empty_like(q, dtype=torch.float16))
    assert torch.empty_like(q.transpose(1, 2)).shape == (4, 256, 128)


@pytest.mark.parametrize("name", ["zeros", "ones", "full", "rand", "randn"])
def test_the_state_of_optimizers_is_plain(recipe: str, name: str) -> None:
    """zeros_like and its kin give plain tensors, with the arguments that optimizers pass."""
    q = make(recipe, dtype=torch.bfloat16)
    arguments = (2.0,) if name == "full" else ()
    make_like = getattr(torch, f"{name}_like")
    with layoutc.strict():
        new = make_like(q, *arguments, memory_format=torch.preserve_format)
        other = make_like(q, *arguments, dtype=torch.float32, device="meta")
    assert is_plain(new)
    assert (new.shape, new.dtype, new.device.type) == (q.shape, torch.bfloat16, "cpu")
    assert (other.dtype, other.device.type) == (torch.float32, "meta")
    if arguments or name in ("zeros", "ones"):
        assert torch.equal(new, make_like(q.dequantize(), *arguments))


# --------------------------------------------------------------------------------------------------------------- copies
@pytest.mark.parametrize(
    "cut", [lambda q: q, lambda q: q[128:], lambda q: q[:, :128], lambda q: q.t(), lambda q: q.view(-1)]
)
def test_a_clone_is_compact_and_shares_nothing(recipe: str, cut: Callable[[Any], Any]) -> None:
    """It has scales and an amax of its own, so requantizing one never changes the other."""
    q = make(recipe)
    piece = cut(q)
    expected = piece.dequantize()
    for copy in (piece.clone(), piece.clone(memory_format=torch.contiguous_format), torch.clone(piece)):
        assert type(copy) is type(q)
        assert is_compact(copy)
        assert all(plane.is_contiguous() for plane in copy.planes().values())
        owned = {plane.untyped_storage().data_ptr() for plane in copy.planes().values()}
        assert owned.isdisjoint(plane.untyped_storage().data_ptr() for plane in q.planes().values())
        assert same_bits(copy.dequantize(), expected)
    copy = piece.clone()
    q.copy_(make(recipe, seed=5))
    assert same_bits(copy.dequantize(), expected)


def test_a_copy_of_the_same_recipe_copies_bytes(recipe: str) -> None:
    """Bytes that quantizing would never give are copied too; copy_ returns its target."""
    source, target = make(recipe, seed=1), make(recipe)
    with torch.no_grad():
        for plane in source.planes().values():
            plane.view(torch.uint8).random_(0, 120)
    with layoutc.strict():
        result = target.copy_(source)
    assert result is target
    assert same(target, source)
    assert not aliases(target, source)


def test_a_plain_copy_quantizes_and_a_copy_into_plain_dequantizes(recipe: str) -> None:
    """The call asks for both, so neither is counted; other dtypes too. A history of amaxes starts anew."""
    target, x = make(recipe), weight(256, 256, seed=2)
    with layoutc.strict():
        assert target.copy_(x) is target
        assert same(target, module(recipe).quantize(x))
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            plain = torch.empty(256, 256, dtype=dtype)
            assert plain.copy_(target) is plain
            assert same_bits(plain, target.dequantize(dtype))
        target.copy_(x.bfloat16())
    assert same_tensors(target.planes(), module(recipe).quantize(x.bfloat16()).planes())


@pytest.mark.parametrize("other", RECIPES)
def test_a_copy_from_another_recipe_goes_through_values_and_is_counted(recipe: str, other: str) -> None:
    """Bytes of one layout never become those of another."""
    target, source = make(recipe), make(other, seed=1)
    if other == recipe:
        return
    expected = module(recipe).quantize(source.dequantize(torch.float32))
    _, counted = counts(lambda: target.copy_(source))
    assert same(target, expected)
    assert sum(counted.values()) == 1
    assert other in next(iter(counted))
    before = snapshot(target)
    with layoutc.strict(), pytest.raises(ImplicitDequantize, match="copy_"):
        target.copy_(source)
    assert same_tensors(target.planes(), before)


def test_a_copy_that_cannot_be_made_leaves_the_target_intact(recipe: str) -> None:
    """Everything is checked before the first byte is written."""
    q = make(recipe)
    before = snapshot(q)
    rows = make(recipe, seed=1, orientations=("rowwise",))
    failing: list[tuple[type[Exception], Callable[[], Any]]] = [
        (RuntimeError, lambda: q.copy_(torch.zeros(255, 256))),
        (RuntimeError, lambda: q.copy_(make(recipe, 128, 256))),
        (RuntimeError, lambda: q.copy_(torch.zeros(256))),
        ((TypeError, RuntimeError), lambda: q.copy_(torch.zeros(256, 256, dtype=torch.complex64))),
        (UnsupportedOperator, lambda: q.t().copy_(torch.zeros(256, 256))),
        (RuntimeError, lambda: torch.zeros(3, 3).copy_(q)),
    ]
    if recipe == "mxfp8":
        failing.append((LayoutError, lambda: q.copy_(rows)))
    for error, call in failing:
        with pytest.raises(error):
            call()
        assert same_tensors(q.planes(), before)
    if recipe == "mxfp8":
        with pytest.raises(LayoutError, match="columnwise_data, columnwise_scale"):
            q.copy_(rows)
    fewer = make(recipe, orientations=("rowwise",))
    fewer.copy_(make(recipe, seed=3))
    assert same_bits(fewer.dequantize(), make(recipe, seed=3).dequantize())


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool])
def test_a_copy_from_other_dtypes_quantizes_their_values(recipe: str, dtype: torch.dtype) -> None:
    """They are converted as copy_ into a floating tensor does; or a TypeError changes nothing."""
    q, source = make(recipe), weight(256, 256, seed=4).to(dtype)
    before, expected = snapshot(q), make(recipe)
    module(recipe).quantize(source.float(), out=expected)
    refused = ""
    try:
        q.copy_(source)
    except TypeError as error:
        refused = str(error)
    if refused:
        assert str(dtype) in refused
        assert same_tensors(q.planes(), before)
    else:
        assert same(q, expected)


def test_another_device_keeps_the_class_and_another_dtype_dequantizes(recipe: str) -> None:
    """Every plane moves; .to(dtype) is counted."""
    q = make(recipe)
    for moved in (q.to("meta"), q.to(device="meta", non_blocking=True), q.to("meta", copy=True)):
        assert type(moved) is type(q)
        assert moved.device.type == "meta"
        assert {plane.device.type for plane in moved.planes().values()} == {"meta"}
        assert moved.orientations == q.orientations
    assert q.to("cpu") is q
    assert q.cpu() is q
    assert same(q.to("cpu", copy=True), q)
    assert not aliases(q.to("cpu", copy=True), q)
    for call in (lambda: q.to(torch.bfloat16), lambda: q.bfloat16(), lambda: q.to("cpu", torch.bfloat16)):
        plain, counted = counts(call)
        assert is_plain(plain)
        assert same_bits(plain, q.dequantize(torch.bfloat16))
        assert sum(counted.values()) == 1
    assert q.float() is q
    with layoutc.strict(), pytest.raises(ImplicitDequantize, match="bfloat16"):
        q.bfloat16()


# -------------------------------------------------------------------------------------------------------------- storage
def test_record_stream_and_pinning_reach_every_plane(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales and the amax are among them; nothing is dequantized or requantized."""
    q = make(recipe)
    before, recorded, pinned = snapshot(q), [], []
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: recorded.append((self.data_ptr(), stream)))
    handler = type(q).HANDLERS[aten.record_stream.default]
    assert handler(aten.record_stream.default, (q, "stream"), {}) is None
    assert recorded == [(plane.data_ptr(), "stream") for plane in q.planes().values()]
    assert same_tensors(q.planes(), before)
    assert not q.is_pinned()

    def pin(self: Tensor, device: Any = None) -> Tensor:
        pinned.append(self.data_ptr())
        return self.clone()

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    handler = type(q).HANDLERS[aten._pin_memory.default]
    result = handler(aten._pin_memory.default, (q,), {})
    assert same(result, q)
    assert pinned == [plane.data_ptr() for plane in q.planes().values()]


def test_storage_is_safe_to_ask_for(recipe: str) -> None:
    """numel, element_size and nbytes are those of the outer shape; sharing memory moves every plane."""
    q = make(recipe)
    assert q.untyped_storage() is not None
    assert (q.numel(), q.element_size(), q.nbytes) == (65536, 4, 4 * 65536)
    next(iter(q.planes().values())).share_memory_()
    assert not q.is_shared()
    assert q.share_memory_() is q
    assert q.is_shared()


def test_equal_compares_bytes_of_one_recipe_and_values_otherwise(recipe: str) -> None:
    """Neither has a tolerance."""
    q = make(recipe)
    assert torch.equal(q, q)
    assert torch.equal(q, q.clone())
    assert not torch.equal(q, make(recipe, seed=1))
    assert not torch.equal(q, q.view(128, 512))
    assert torch.equal(q, q.dequantize())
    assert torch.equal(q.dequantize(), q)
    assert not torch.equal(q, q.dequantize() + 1)
    assert not torch.equal(q, q.dequantize()[:128])
    changed = q.clone()
    changed.planes()["rowwise_scale"].view(torch.uint8).view(-1)[0] ^= 1
    assert not torch.equal(q, changed)


def test_rows_that_begin_elsewhere_in_a_block_are_others(recipe: str) -> None:
    """Equal bytes of equal shapes, whose rows belong to other scales."""
    layout = module(recipe).LAYOUT
    if (rows := layout.block_rows) == 1 or layout.stored["rowwise_scale"].rows_per_value != rows:
        pytest.skip("not all scales are shared by rows")
    values = torch.ones(2 * rows, 128)
    values[rows:] *= 4
    q = module(recipe).quantize(values)
    a, b = (q[start : start + rows] for start in (rows // 4, rows // 2))
    for name in q.planes():
        assert torch.equal(raw(a.entries(name)), raw(b.entries(name))), name
    assert not torch.equal(a.dequantize(), b.dequantize())
    assert not torch.equal(a, b)
    assert torch.equal(a, q[rows // 4 : rows // 4 + rows])

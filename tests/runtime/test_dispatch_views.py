"""Views that change the outer shape alone: the class stays, the planes are shared, nothing is copied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from quantized_cases import aliases, each_recipe, make, module, same, same_bits
from torch import Tensor

import layoutc
from layoutc.runtime.errors import ImplicitDequantize, UnsupportedOperator

pytestmark = each_recipe
Operation = Callable[[Tensor], Tensor]

EXACT: dict[str, Operation] = {
    "detach": lambda x: x.detach(),
    "alias": torch.ops.aten.alias.default,
    "view_same": lambda x: x.view(x.shape),
    "view_as": lambda x: x.view_as(x),
    "reshape_same": lambda x: x.reshape(x.shape),
    "flat": lambda x: x.view(-1),
    "flatten": lambda x: x.flatten(),
    "flat_and_back": lambda x: x.view(-1).view(256, 256),
    "split_rows": lambda x: x.view(2, 128, 256),
    "split_rows_unknown": lambda x: x.view(-1, 64, 256),
    "split_and_merge": lambda x: x.view(4, 64, 256).view(2, 128, 256).flatten(0, 1),
    "unflatten": lambda x: x.unflatten(0, (8, 32)),
    "unsqueeze_first": lambda x: x.unsqueeze(0),
    "unsqueeze_negative": lambda x: x.unsqueeze(-3),
    "unsqueeze_middle": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.unsqueeze(0).squeeze(),
    "squeeze_dim": lambda x: x.unsqueeze(0).squeeze(0),
    "squeeze_dims": lambda x: x.unsqueeze(0).squeeze((0, 1)),
    "squeeze_nothing": lambda x: x.squeeze(0),
    "t": lambda x: x.t(),
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "transpose": lambda x: x.transpose(0, 1),
    "transpose_negative": lambda x: x.transpose(-1, -2),
    "transpose_itself": lambda x: x.transpose(1, 1),
    "t_twice": lambda x: x.t().t(),
    "batch_transpose": lambda x: x.view(2, 128, 256).transpose(1, 2),
    "t_view_same": lambda x: x.t().view(256, 256),
    "as_strided_own": lambda x: x.as_strided(x.shape, x.stride()),
    "as_strided_transposed": lambda x: x.t().as_strided((256, 256), (1, 256)),
    "expand_same": lambda x: x.expand(256, -1),
    "expand_as": lambda x: x.expand_as(x),
}


def test_views_keep_the_class_and_the_planes(recipe: str) -> None:
    """A view has the very dict of planes, and shape, strides and values of the same view of a plain tensor."""
    q = make(recipe)
    plain = q.dequantize()
    for name, take in EXACT.items():
        with layoutc.strict():
            view, expected = take(q), take(plain)
        assert type(view) is module(recipe).Tensor, name
        assert view.store.planes is q.store.planes, name
        assert (view.shape, view.stride(), view.dtype) == (expected.shape, expected.stride(), expected.dtype), name
        assert view.is_contiguous() == expected.is_contiguous(), name
        assert same_bits(view.dequantize(), expected), name


def test_views_of_views_see_what_is_written_to_the_base(recipe: str) -> None:
    """All aliases have one set of planes, whichever of them writes."""
    q, other = make(recipe), make(recipe, seed=1)
    seen = [q.detach(), q.view(-1), q.view(2, 128, 256), q.t(), q.as_strided(q.shape, q.stride())]
    q.copy_(other)
    for view in seen:
        assert same_bits(view.dequantize().flatten(), (other.t() if view.transposed else other).dequantize().flatten())
    seen[2].copy_(make(recipe, 2, 128, 256, seed=2))
    assert torch.equal(q.dequantize(), make(recipe, 2, 128, 256, seed=2).dequantize().view(256, 256))


def test_a_view_of_one_element_can_drop_all_dims(recipe: str) -> None:
    """An empty size is one element, where a recipe takes a weight of one element."""
    layout = module(recipe).LAYOUT
    if (layout.multiple_m, layout.multiple_k) != (1, 1):
        pytest.skip("the recipe takes no weight of one element")
    q = make(recipe, 1, 1)
    assert q.view(()).shape == ()
    assert q.view([]).dequantize() == q.dequantize()[0, 0]
    assert q.squeeze().shape == ()


@pytest.mark.parametrize("size", [(256, 255), (3, -1), (-1, -1), (-2, -128), (65536, 2), (0, -1), ()])
def test_an_invalid_size_is_refused_as_torch_refuses_it(recipe: str, size: tuple[int, ...]) -> None:
    """A RuntimeError for a plain tensor and for a quantized one."""
    q = make(recipe)
    with pytest.raises(RuntimeError):
        q.dequantize().view(size)
    with pytest.raises(RuntimeError, match="invalid"):
        q.view(size)


def test_transposing_other_dims_is_refused_with_the_shape(recipe: str) -> None:
    """Leading dims of experts do not swap without moving bytes."""
    q = make(recipe, 4, 128, 256)
    for dims in [(0, 1), (0, 2)]:
        with pytest.raises(UnsupportedOperator, match=r"transpose.*\(4, 128, 256\)"):
            q.transpose(*dims)
    with pytest.raises(UnsupportedOperator, match=r"permute.*for a copy of the values, call \.dequantize\(\) first"):
        q.permute(1, 0, 2)


INEXACT: dict[str, Operation] = {
    "transpose": lambda x: x.view(4, 64, 256).transpose(0, 1),
    "permute": lambda x: x.view(4, 64, 256).permute(1, 2, 0),
    "movedim": lambda x: x.view(4, 64, 256).movedim(0, 2),
    "heads": lambda x: x.view(8, 32, 256).permute(2, 0, 1).flatten(1),
    "expand": lambda x: x.expand(3, -1, -1),
    "every_other_row": lambda x: x[::2],
    "every_other_column": lambda x: x[:, 1::2],
}


@pytest.mark.parametrize("name", INEXACT)
def test_a_model_that_trains_sees_the_values_where_codes_cannot_follow(recipe: str, name: str) -> None:
    """Values, gradients and a count; a write to such a view, which would be lost, is refused."""
    q = make(recipe)
    cast = module(recipe).CastTensor(q.dequantize() * 1.1)
    for weight, plain in ((q, q.dequantize()), (cast, cast.quantize().dequantize())):
        expected, trained = plain.requires_grad_(), torch.nn.Parameter(weight)
        before = layoutc.implicit_dequantizes().total()
        found, wanted = INEXACT[name](trained) * 2.0, INEXACT[name](expected) * 2.0
        assert layoutc.implicit_dequantizes().total() > before
        assert same_bits(found.detach(), wanted.detach())
        factors = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2))
        (found * factors).sum().backward()
        (wanted * factors).sum().backward()
        assert trained.grad is not None
        assert expected.grad is not None
        assert same_bits(trained.grad, expected.grad)
        with pytest.raises(RuntimeError, match="leaf"):
            INEXACT[name](trained).mul_(2.0)
    trained = torch.nn.Parameter(q)
    with layoutc.strict(), pytest.raises(ImplicitDequantize, match="aten"):
        INEXACT[name](trained)
    for weight in (torch.nn.Parameter(q, requires_grad=False), q):
        with pytest.raises(UnsupportedOperator, match="for a copy of the values"):
            INEXACT[name](weight)
    with torch.no_grad(), pytest.raises(UnsupportedOperator, match="for a copy of the values"):
        INEXACT[name](trained)


@pytest.mark.parametrize("shape", [(128, 128), (16384,), (2, 64, 128)])
def test_an_order_of_dims_is_kept_or_the_last_two_are_swapped(recipe: str, shape: tuple[int, ...]) -> None:
    """permute, with dims counted from either end."""
    q, dims = make(recipe, 128, 128).view(shape), list(range(len(shape)))
    orders = [dims, [dim - len(shape) for dim in dims], [*dims[:-2], *reversed(dims[-2:])]]
    for order in orders:
        view, expected = q.permute(order), q.dequantize().permute(order)
        assert (view.shape, view.stride()) == (expected.shape, expected.stride()), order
        assert same_bits(view.dequantize(), expected), order


@pytest.mark.parametrize("orientation", ["rowwise", "columnwise"])
def test_a_view_has_the_orientations_that_the_weight_was_made_with(recipe: str, orientation: str) -> None:
    """Also where what is stored would do for both."""
    q = make(recipe, 128, 128, orientations=(orientation,))
    for view in (q.detach(), q.data, q.view(2, 64, 128), torch.nn.Parameter(q)):
        assert view.orientations == q.orientations == (orientation,)
        assert list(view.buffers()) == list(q.buffers())


OUT_OF_RANGE: dict[str, Operation] = {
    "transpose": lambda x: x.transpose(0, 2),
    "transpose_flat": lambda x: x.view(-1).transpose(-1, -2),
    "transpose_flat_dim_1": lambda x: x.view(-1).transpose(0, 1),
    "unsqueeze": lambda x: x.unsqueeze(3),
    "unsqueeze_negative": lambda x: x.unsqueeze(-4),
    "squeeze": lambda x: x.squeeze(2),
    "select": lambda x: x.select(2, 0),
    "narrow": lambda x: x.narrow(2, 0, 1),
    "split": lambda x: x.split(128, dim=2)[0],
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_dims_out_of_range_are_refused_as_torch_refuses_them(recipe: str, name: str) -> None:
    """An IndexError for a plain tensor and for a quantized one."""
    q = make(recipe)
    with pytest.raises(IndexError):
        OUT_OF_RANGE[name](q.dequantize())
    with pytest.raises(IndexError):
        OUT_OF_RANGE[name](q)


def test_a_view_of_a_transposed_weight_is_refused(recipe: str) -> None:
    """As for plain tensors, whose view would not be contiguous."""
    with pytest.raises(UnsupportedOperator, match=r"transposed"):
        make(recipe).t().view(-1)


@pytest.mark.parametrize(
    "arguments",
    [
        ((128, 256), (256, 1)),
        ((256, 256), (1, 256)),
        ((256, 256), (256, 1), 256),
        ((65536,), (1,)),
        ((256, 256), (0, 1)),
    ],
)
def test_as_strided_of_anything_else_is_refused(recipe: str, arguments: tuple[tuple[int, ...], ...]) -> None:
    """Another size, other strides, another offset."""
    with pytest.raises(UnsupportedOperator, match=r"as_strided.*offset"):
        make(recipe).as_strided(*arguments)


@pytest.mark.parametrize("size", [(2, 256, 256), (256, 512), (512, 256)])
def test_expanding_is_refused(recipe: str, size: tuple[int, ...]) -> None:
    """A repeated weight has no planes."""
    with pytest.raises((UnsupportedOperator, RuntimeError)):
        make(recipe).expand(size)


@pytest.mark.parametrize("name", ["diagonal", "unfold", "swapdims", "movedim"])
def test_views_without_a_rule_are_refused_by_name(recipe: str, name: str) -> None:
    """A dequantized copy in place of a view would lose what is written to it."""
    q = make(recipe, 4, 128, 256)
    calls: dict[str, Operation] = {
        "diagonal": lambda x: x.diagonal(),
        "unfold": lambda x: x.unfold(1, 2, 1),
        "swapdims": lambda x: x.swapdims(0, 1),
        "movedim": lambda x: x.movedim(0, 1),
    }
    with pytest.raises(UnsupportedOperator, match="aten"):
        calls[name](q)
    assert same(q, make(recipe, 4, 128, 256))


def test_as_strided_keeps_what_a_parameter_holds(recipe: str) -> None:
    """as_strided and then Parameter, as after the first gather: the same planes and buffers."""
    q = make(recipe)
    parameter = torch.nn.Parameter(torch.as_strided(q, q.shape, q.stride(), 0))
    assert isinstance(parameter, torch.nn.Parameter)
    assert type(parameter) is type(q)
    assert parameter.store.planes is q.store.planes
    assert aliases(parameter, q)
    assert list(parameter.buffers()) == list(q.buffers())

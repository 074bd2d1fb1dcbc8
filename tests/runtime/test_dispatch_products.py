"""Products: what is contracted decides which orientation is read; bit for bit the product of the dequantized weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from quantized_cases import each_recipe, is_plain, make, module, same_bits, weight
from torch import Tensor, nn

import layoutc
from layoutc.runtime.errors import MissingOrientation
from layoutc.runtime.weight.tensor import QuantizedTensor

pytestmark = each_recipe
Product = Callable[[Tensor, Tensor], Tensor]

K_CONTRACTED: dict[str, Product] = {
    "linear": F.linear,
    "linear_bias": lambda x, w: F.linear(x, w, torch.arange(256.0, dtype=x.dtype)),
    "linear_3d": lambda x, w: F.linear(x.view(2, 4, 256), w),
    "linear_3d_bias": lambda x, w: F.linear(x.view(2, 4, 256), w, torch.arange(256.0, dtype=x.dtype)),
    "linear_1d": lambda x, w: F.linear(x[0], w),
    "mm": lambda x, w: x.mm(w.t()),
    "matmul": lambda x, w: x @ w.t(),
    "matmul_mT": lambda x, w: x @ w.mT,
    "matmul_3d": lambda x, w: x.view(2, 4, 256) @ w.t(),
    "left": lambda x, w: w @ x.t(),
    "mv": lambda x, w: w.mv(x[0]),
    "matmul_vector": lambda x, w: w @ x[0],
    "addmm": lambda x, w: torch.addmm(torch.ones(8, 256, dtype=x.dtype), x, w.t(), beta=0.5, alpha=2.0),
    "addmv": lambda x, w: torch.addmv(torch.ones(256, dtype=x.dtype), w, x[0]),
}
M_CONTRACTED: dict[str, Product] = {
    "mm": lambda x, w: x.mm(w),
    "matmul": lambda x, w: x @ w,
    "matmul_3d": lambda x, w: x.view(2, 4, 256) @ w,
    "left": lambda x, w: w.t() @ x.t(),
    "mv": lambda x, w: w.t().mv(x[0]),
    "addmm": lambda x, w: torch.addmm(torch.ones(8, 256, dtype=x.dtype), x, w),
}


def values(q: QuantizedTensor, orientation: str, dtype: torch.dtype) -> Tensor:
    """The plain weight that an orientation stands for."""
    return q.values_of(orientation, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_contracted_decides_which_values_are_read(recipe: str, dtype: torch.dtype) -> None:
    """Columns: rowwise ones; rows, as the gradient of a layer's input does: columnwise ones. In the activation's dtype;
    the call asks for values, so nothing is counted."""
    q, x = make(recipe, dtype=dtype), weight(8, 256, seed=9, dtype=dtype)
    for products, orientation in ((K_CONTRACTED, "rowwise"), (M_CONTRACTED, "columnwise")):
        read = values(q, orientation, dtype)
        for name, product in products.items():
            with layoutc.strict():
                result = product(x, q)
            assert is_plain(result), name
            assert same_bits(result, product(x, read)), name


@pytest.mark.parametrize("shape", [(8, 256), (2, 4, 256)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_reads_rowwise_forward_and_columnwise_backward(recipe: str, shape: tuple[int, ...], bias: bool) -> None:
    """Output and gradients of input, weight and bias are right; the weight's gradient is plain."""
    q = make(recipe)
    layer = nn.Linear(256, 256, bias=bias)
    layer.weight = nn.Parameter(q)
    x = weight(*shape, seed=9).requires_grad_()
    grad = weight(*shape, seed=10)
    with layoutc.strict():
        out = layer(x)
        out.backward(grad)
    assert same_bits(out, F.linear(x, values(q, "rowwise", torch.float32), layer.bias))
    flat = grad.reshape(-1, 256)
    assert x.grad is not None
    assert same_bits(x.grad, flat.mm(values(q, "columnwise", torch.float32)).view(shape))
    assert layer.weight.grad is not None
    assert is_plain(layer.weight.grad)
    assert same_bits(layer.weight.grad, flat.t().mm(x.detach().reshape(-1, 256)))


def test_experts_multiply_in_batches(recipe: str) -> None:
    """bmm, baddbmm and matmul of 3-D weights, forward and backward."""
    q, x = make(recipe, 4, 128, 256), weight(4, 8, 256, seed=9)
    y = weight(4, 8, 128, seed=10)
    rowwise, columnwise = values(q, "rowwise", torch.float32), values(q, "columnwise", torch.float32)
    with layoutc.strict():
        assert same_bits(torch.bmm(x, q.transpose(1, 2)), torch.bmm(x, rowwise.transpose(1, 2)))
        assert same_bits(torch.bmm(y, q), torch.bmm(y, columnwise))
        assert same_bits(x @ q.mT, x @ rowwise.mT)
        out = torch.zeros(4, 8, 128)
        assert same_bits(torch.baddbmm(out, x, q.transpose(1, 2)), torch.baddbmm(out, x, rowwise.transpose(1, 2)))
        assert same_bits(x[1] @ q[1].t(), x[1] @ rowwise[1].t())
    parameter, x = nn.Parameter(q), x.clone().requires_grad_()
    with layoutc.strict():
        torch.bmm(x, parameter.transpose(1, 2)).backward(y)
    assert x.grad is not None
    assert same_bits(x.grad, torch.bmm(y, columnwise))
    assert parameter.grad is not None
    assert parameter.grad.shape == q.shape


def test_experts_multiply_groups_of_tokens(recipe: str) -> None:
    """grouped_mm, forward and backward: contracting k reads rowwise values, contracting m those for backward."""
    q, x = make(recipe, 4, 128, 256), weight(40, 256, seed=9).requires_grad_()
    rowwise, columnwise = values(q, "rowwise", torch.float32), values(q, "columnwise", torch.float32)
    y, offs = weight(40, 128, seed=10), torch.tensor([7, 7, 8, 40], dtype=torch.int32)
    parameter = nn.Parameter(q)
    with layoutc.strict():
        out = F.grouped_mm(x, parameter.transpose(1, 2), offs=offs)
        out.backward(y)
    assert same_bits(out.detach(), F.grouped_mm(x.detach(), rowwise.transpose(1, 2), offs=offs))
    assert x.grad is not None
    assert same_bits(x.grad, F.grouped_mm(y, columnwise, offs=offs))
    assert parameter.grad is not None
    assert is_plain(parameter.grad)
    plain = rowwise.clone().requires_grad_()
    F.grouped_mm(x.detach(), plain.transpose(1, 2), offs=offs).backward(y)
    assert same_bits(parameter.grad, plain.grad)


def test_a_weight_of_one_orientation_serves_its_own_product_alone(recipe: str) -> None:
    """An orientation with codes of its own is not made up from the other."""
    rows, columns = make(recipe, orientations=("rowwise",)), make(recipe, orientations=("columnwise",))
    x = weight(8, 256, seed=9)
    assert same_bits(F.linear(x, rows), F.linear(x, values(make(recipe), "rowwise", torch.float32)))
    assert same_bits(x @ columns, x @ values(make(recipe), "columnwise", torch.float32))
    if recipe == "mxfp8":
        with pytest.raises(MissingOrientation, match=r"holds rowwise, not columnwise"):
            x @ rows
        with pytest.raises(MissingOrientation, match=r"holds columnwise, not rowwise"):
            F.linear(x, columns)
        assert same_bits(columns.dequantize(), values(make(recipe), "columnwise", torch.float32))


def test_two_quantized_operands_multiply(recipe: str) -> None:
    """Each is read along the axis that is contracted."""
    a, b = make(recipe), make(recipe, seed=1)
    expected = values(a, "rowwise", torch.float32) @ values(b, "columnwise", torch.float32)
    assert same_bits(a @ b, expected)


def test_products_under_autocast_and_no_grad_are_those_of_the_dequantized_weight(recipe: str) -> None:
    """Autocast casts the weight to bf16 as it casts a plain one."""
    q, x = make(recipe), weight(8, 256, seed=9)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        result = F.linear(x, q)
        expected = F.linear(x, values(q, "rowwise", torch.float32))
    assert result.dtype == expected.dtype == torch.bfloat16
    assert same_bits(result, expected)


def test_a_product_into_a_given_tensor_writes_it(recipe: str) -> None:
    """`out=` gets the values of the product."""
    q, x = make(recipe), weight(8, 256, seed=9)
    out = torch.empty(8, 256)
    assert torch.mm(x, q.t(), out=out) is out
    assert same_bits(out, x.mm(values(q, "rowwise", torch.float32).t()))


LED: dict[str, Product] = {
    "bmm": lambda x, w: torch.bmm(x[None], w.t().unsqueeze(0)),
    "bmm_transposed": lambda x, w: torch.bmm(x[None], w.unsqueeze(0).transpose(1, 2)),
    "matmul": lambda x, w: x @ w.t()[None],
    "baddbmm": lambda x, w: torch.baddbmm(torch.ones(1, 8, 256, dtype=x.dtype), x[None], w.t().unsqueeze(0)),
    "addbmm": lambda x, w: torch.addbmm(torch.ones(8, 256, dtype=x.dtype), x[None], w.t().unsqueeze(0)),
    "einsum": lambda x, w: torch.einsum("bsk,bkn->bsn", x[None], w.t().unsqueeze(0)),
    "back": lambda x, w: x @ w.t().unsqueeze(0).squeeze(0),
    "middle": lambda x, w: x @ w.t().unsqueeze(1)[:, 0],  # a view of the values
}


@pytest.mark.sample(1)
def test_a_transposed_weight_with_another_dim_is_multiplied_alike_in_graphs(recipe: str) -> None:
    """Quantized, and cast on gather: the bits of eager calls, whose products are those of values. All in one graph."""
    torch.compiler.reset()

    def led(x: Tensor, w: Tensor) -> list[Tensor]:
        return [multiply(x, w) for multiply in LED.values()]

    values = make(recipe).dequantize()
    kinds = {nn.Parameter(make(recipe)): values}
    if not module(recipe).LAYOUT.history:  # graphs of weights that are cast would not advance it
        kinds[nn.Parameter(module(recipe).CastTensor(values * 1.1))] = (
            module(recipe).quantize(values * 1.1).dequantize()
        )
    for one, whole in kinds.items():
        made = []
        for multiply in (led, torch.compile(led, fullgraph=True, backend="aot_eager")):
            x = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)).requires_grad_()
            found = multiply(x, one)
            for out in list(found):
                found += torch.autograd.grad(out.square().sum(), (x, one), retain_graph=True)
            made.append(found)
        assert all(map(same_bits, *made))
        assert all(map(same_bits, made[0], led(x, whole)))

"""Products: which values a multiplication reads, and whether a layer trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layoutc
from layoutc.conformance.checks.dispatch import make
from layoutc.conformance.material import array, expect, expect_same, weight
from layoutc.conformance.registry import check
from layoutc.conformance.subject import Subject

Product = Callable[[Tensor, Tensor, Tensor], Tensor]

# x has k columns, y has m columns.
K_CONTRACTED: dict[str, Product] = {
    "linear": lambda x, y, w: F.linear(x, w),
    "linear with bias": lambda x, y, w: F.linear(x, w, y[0]),
    "x @ w.t()": lambda x, y, w: x @ w.t(),
    "w @ x.t()": lambda x, y, w: w @ x.t(),
    "mv": lambda x, y, w: w.mv(x[0]),
    "linear of 3 dims": lambda x, y, w: F.linear(x.view(2, -1, x.shape[1]), w),
}
M_CONTRACTED: dict[str, Product] = {
    "y @ w": lambda x, y, w: y @ w,
    "w.t() @ y.t()": lambda x, y, w: w.t() @ y.t(),
    "addmm": lambda x, y, w: torch.addmm(x, y, w),
    "mv of the transpose": lambda x, y, w: w.t().mv(y[0]),
}


def values(subject: Subject, q: Any, orientation: str) -> Tensor:
    """An orientation's values from the independent model; rowwise ones if the recipe has no other."""
    if orientation not in subject.layout.orientations:
        orientation = subject.layout.orientations[0]
    planes = {name: array(plane) for name, plane in q.planes().items()}
    return torch.from_numpy(subject.model.values(planes, orientation, *q.store.matrix))


@check("products", "a product that contracts k reads rowwise values, one that contracts m reads columnwise values")
def products(subject: Subject) -> None:
    """Products run in the activation's dtype, and never count as implicit dequantizes."""
    m, k = shape = subject.whole()
    for kind in ("plain", "coarse"):
        q = make(subject, shape, kind=kind)
        for dtype in (torch.float32, torch.bfloat16):
            x, y = (weight(subject, (8, n), "coarse", dtype) for n in (k, m))
            for group, orientation in ((K_CONTRACTED, "rowwise"), (M_CONTRACTED, "columnwise")):
                plain = values(subject, q, orientation).to(dtype)
                for what, product in group.items():
                    with layoutc.strict():
                        actual = product(x, y, q)
                    expected = product(x, y, plain)
                    expect(type(actual) is Tensor, f"{what} gives {type(actual).__name__}", shape=shape)
                    expect_same(subject, what, actual.float(), expected.float(), shape=shape, dtype=str(dtype))


@check("layer", "a linear layer computes forward with rowwise and backward with columnwise values; gradients are plain")
def layer(subject: Subject) -> None:
    """Compares the output and the gradients of input and weight."""
    m, k = shape = subject.whole()
    q = make(subject, shape)
    linear = nn.Linear(k, m, bias=False)
    linear.weight = nn.Parameter(q)
    x, grad = weight(subject, (4, k), "coarse").requires_grad_(), weight(subject, (4, m), "coarse", salt=1)
    with layoutc.strict():
        out = linear(x)
        out.backward(grad)
    rowwise, columnwise = (values(subject, q, name) for name in ("rowwise", "columnwise"))
    assert x.grad is not None
    assert linear.weight.grad is not None
    expect_same(subject, "output", out.detach(), F.linear(x.detach(), rowwise), shape=shape)
    expect_same(subject, "gradient of the input", x.grad, grad.mm(columnwise), shape=shape)
    expect(type(linear.weight.grad) is Tensor, "the weight's gradient is not plain", shape=shape)
    expect_same(subject, "gradient of the weight", linear.weight.grad, grad.t().mm(x.detach()), shape=shape)


def master_of(linear: nn.Linear) -> Any:
    """The quantized tensor of a layer's parameter."""
    return linear.weight.data


@check(
    "master-weights",
    "MasterWeights requantizes from fp32 masters: the weight equals its quantized master",
    of_weights=True,
)
def master_weights(subject: Subject) -> None:
    """Runs three SGD steps in one process."""
    m, k = shape = subject.whole()
    linear = nn.Linear(k, m, bias=False)
    linear.weight = nn.Parameter(make(subject, shape))
    optimizer = layoutc.MasterWeights(torch.optim.SGD, linear.parameters(), lr=0.1)
    twin = make(subject, shape)
    master = twin.dequantize(torch.float32)
    for step in range(3):
        x = weight(subject, (4, k), "coarse", salt=step)
        linear(x).square().mean().backward()
        assert linear.weight.grad is not None
        master = master.add(linear.weight.grad, alpha=-0.1)
        optimizer.step()
        optimizer.zero_grad()
        subject.quantize(master, out=twin)
        for name, plane in master_of(linear).planes().items():
            expect_same(subject, name, plane, twin.planes()[name], shape, step=step)

"""Products in low precision: compares what a linear layer multiplies with the independent model of each operand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layoutc
from layoutc.conformance.checks.products import values
from layoutc.conformance.material import as_fp32, expect, expect_same, generator, input_max, weight
from layoutc.conformance.model.weights import Model
from layoutc.conformance.registry import Skipped, check
from layoutc.conformance.subject import Subject
from layoutc.ints.sizes import up
from layoutc.layout.layout import Layout
from layoutc.runtime.product_mode import Mode, reference_products
from layoutc.runtime.random_bits import draw_seed

DTYPE = torch.bfloat16  # all kernels return it
SHARES = (0.0, 0.25, 0.5, 1.0)  # of the largest element: every format has these
# Product -> (role, orientation) of its operands; the contracted axis is along their rows.
OPERANDS = {
    "forward": (("activation", "rowwise"), ("weight", "rowwise")),
    "grad_input": (("gradient", "rowwise"), ("weight", "columnwise")),
    "grad_weight": (("gradient", "columnwise"), ("activation", "columnwise")),
}
NAMES = ("output", "gradient of the input", "gradient of the weight")


@dataclass(frozen=True)
class Operands:
    """A layer's weight, its input, and its output's gradient, with the layouts that they are quantized in."""

    weight: Tensor
    activation: Tensor
    gradient: Tensor
    layouts: dict[str, Layout]


@check("low-precision", "a linear layer in low precision multiplies its quantized operands, forward and backward")
def low_precision(subject: Subject) -> None:
    """Also compares mode "dequantize", in which only the weight is quantized."""
    if subject.plan.products is None:
        raise Skipped("the spec names no recipe for activations")
    _compare(subject, _operands(subject, "plain"), "cpu", "plain")
    operands = _operands(subject, "exact")
    _compare(subject, operands, "cpu", "exact")
    if torch.cuda.is_available() and not any(one.transforms or one.stochastic for one in operands.layouts.values()):
        _compare(subject, operands, "cuda", "exact")


def _compare(subject: Subject, operands: Operands, device: str, kind: str) -> None:
    """Compares the products on a device. Kernels sum in a different order, so they get only exact values."""
    q = subject.quantize(operands.weight)
    rows = layoutc.explain_products(_layer(q.to(device)), tokens=len(operands.activation), mode="reference")
    expect([row.product for row in rows] == list(OPERANDS), "explain_products leaves a product out")
    for row in rows:
        expect(row.way == "kernel" or bool(row.reason), "explain_products gives no reason", product=row.product)
    if kind != "exact" and any(row.way == "kernel" for row in rows):
        return
    low, dequantized = _multiplied(operands), _dequantized(subject, q, operands)
    modes: tuple[tuple[Mode, list[Tensor]], ...] = (("reference", low), ("dequantize", dequantized))
    for mode, expected in modes:
        where: dict[str, Any] = {"mode": mode, "device": device, "kind": kind, "shape": tuple(q.shape)}
        for name, actual, wanted in zip(NAMES, _trained(q.to(device), operands, mode), expected, strict=True):
            expect_same(subject, name, actual.float(), wanted.float(), **where)


def _operands(subject: Subject, kind: str) -> Operands:
    """Plain values, or exact ones, which quantize to few enough bits that sums of products are exact in any order."""
    stated = subject.layout.others
    assert stated is not None
    layouts = {
        "weight": subject.layout,
        "activation": subject.others[stated.activation],
        "gradient": subject.others[stated.gradient],
    }
    blocks = [source.quantization.block for layout in layouts.values() for source in layout.sources]
    step = min((size for block in blocks for size in (block.m, block.k) if size and size > 1), default=16)
    m, k = subject.whole()
    m, k = (
        up(up(size, 16), max(one.multiple_k for one in layouts.values()) if which else subject.layout.multiple_m)
        for which, size in enumerate((m, k))
    )
    tokens = up(3 * 16, max(one.multiple_m for one in layouts.values()))
    sizes = {"weight": (m, k), "activation": (tokens, k), "gradient": (tokens, m)}
    if kind == "plain":
        made = {role: weight(subject, shape, "plain", DTYPE, salt) for salt, (role, shape) in enumerate(sizes.items())}
    else:
        made = {role: _exact(subject, layouts[role], shape, step) for role, shape in sizes.items()}
    return Operands(made["weight"], made["activation"], made["gradient"], layouts)


def _exact(subject: Subject, layout: Layout, shape: tuple[int, int], step: int) -> Tensor:
    """Values that quantize to few distinct ones; half of them are not representable, except each block's largest."""
    random = generator(subject, "low precision", layout.name, shape)
    shares = random.choice(SHARES, shape)
    shares *= 1 - random.integers(0, 2, shape) / 256  # rounding changes half of them
    shares[:, ::step] = shares[::step] = 1.0
    signs = 1 - 2 * random.integers(0, 2, shape)
    largest = layout.sources[0].quantization.element.max
    return torch.from_numpy(shares * signs * largest).to(DTYPE)


def _trained(q: Tensor, operands: Operands, mode: Mode) -> tuple[Tensor, Tensor, Tensor]:
    """The output and both gradients of a layer, on the weight's device."""
    torch.manual_seed(0)
    x = operands.activation.to(q.device, copy=True).requires_grad_()
    linear = _layer(q)
    with reference_products() if mode == "reference" else layoutc.products(mode):
        out = linear(x)
        out.backward(operands.gradient.to(q.device))
    assert x.grad is not None
    assert linear.weight.grad is not None
    return out.detach().cpu(), x.grad.cpu(), linear.weight.grad.cpu()


def _layer(q: Tensor) -> nn.Linear:
    linear = nn.Linear(q.shape[1], q.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(q)
    return linear


def _multiplied(operands: Operands) -> list[Tensor]:
    """The three products by the model. Those that the spec leaves out, or an operand can't have, use plain values."""
    stated = operands.layouts["weight"].others
    assert stated is not None
    torch.manual_seed(0)
    seeds = {role: _seed(operands.layouts[role]) for role in ("activation", "gradient")}
    found: list[Tensor] = []
    for name, sides in OPERANDS.items():
        low = name not in stated.dequantized and all(o in operands.layouts[role].orientations for role, o in sides)
        a, b = (
            _read(operands, role, orientation, seeds.get(role, 0), low or role == "weight")
            for role, orientation in sides
        )
        dtype = torch.float32 if low else DTYPE
        found.append(_product(name, a.to(dtype), b.to(dtype)).to(DTYPE))
    return found


def _product(name: str, a: Tensor, b: Tensor) -> Tensor:
    """The product of OPERANDS' operands, neither of which is transposed yet."""
    if name == "forward":
        return a @ b.t()
    return a @ b if name == "grad_input" else a.t() @ b


def _seed(layout: Layout) -> int:
    """The seed that the layer draws: in forward for the activation, in backward for the gradient."""
    return int(draw_seed(torch.empty(0))) if layout.stochastic else 0


def _read(operands: Operands, role: str, orientation: str, seed: int, low: bool) -> Tensor:
    """An operand's values after quantization by its recipe's independent model; the operand itself if not `low`."""
    x, layout = getattr(operands, role), operands.layouts[role]
    if not low:
        return torch.as_tensor(x)
    model = Model(layout, seed)
    orientation = orientation if orientation in layout.orientations else layout.orientations[0]
    planes = model.quantize(as_fp32(x), input_max(x.dtype))
    return torch.from_numpy(model.values(planes, orientation, *x.shape))


def _dequantized(subject: Subject, q: Tensor, operands: Operands) -> list[Tensor]:
    """The three products with only the weight quantized."""
    x, grad = operands.activation, operands.gradient
    rowwise, columnwise = (values(subject, q, name).to(DTYPE) for name in ("rowwise", "columnwise"))
    return [F.linear(x, rowwise), grad @ columnwise, grad.t() @ x]

"""Products in low precision on a card: against whole numbers, against quantized values in fp32, compiled, captured."""

from __future__ import annotations

import importlib
from itertools import accumulate, pairwise
from typing import Any

import product_modes
import pytest
import torch
import torch.nn.functional as F
from exact_products import exact, product
from torch import Tensor, nn
from torch.nn.functional import ScalingType

import layoutc
from layoutc.runtime.operands import columns_of_groups
from layoutc.runtime.operands.expert_rows import gated, of_experts, routes_of, sum_of_experts
from layoutc.runtime.product_mode import Mode
from layoutc.runtime.products import choice, linear
from layoutc.runtime.products.choice import NAMES as NAMES_OF_PRODUCTS
from layoutc.runtime.products.experts import gated_experts, routed_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EVERY = importlib.import_module("layoutc.recipes").RECIPES
NAMES = [name for name in EVERY if importlib.import_module(f"layoutc.recipes.{name}").LAYOUT.products is not None]
TOKENS, M, K = 512, 768, 1024


def module(name: str) -> Any:
    return importlib.import_module(f"layoutc.recipes.{name}")


def run(name: str, x: Tensor, w: Tensor, g: Tensor, how: Mode, compiled: bool = False) -> tuple[Tensor, ...]:
    """The output and both gradients."""
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False, device="cuda", dtype=x.dtype)
    with torch.no_grad():
        layer.weight.copy_(w)
    layoutc.quantize_(layer, name)
    torch._dynamo.reset()
    called: Any = torch.compile(layer, fullgraph=True) if compiled else layer
    x = x.clone().requires_grad_()
    torch.manual_seed(1)  # of random bits, which some recipes round gradients by
    with product_modes.products(how):
        out = called(x)
        out.backward(g)
    assert x.grad is not None
    assert layer.weight.grad is not None
    return out.detach(), x.grad, layer.weight.grad


def ways(name: str, how: Mode = "low_precision", tokens: int = TOKENS) -> linear.Ways:
    held = module(name).quantize(torch.empty(M, K, device="cuda"))
    return linear.plan_of(held, torch.empty(tokens, K, device="cuda"), how).ways


@pytest.mark.parametrize("how", ["low_precision", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_products_are_exact_where_nothing_rounds(name: str, how: Mode) -> None:
    x, w, g = (exact(name, *size, seed=i).cuda() for i, size in enumerate(((TOKENS, K), (M, K), (TOKENS, M))))
    found = run(name, x, w, g, how)
    expected = product(x.cpu(), w.cpu().t()), product(g.cpu(), w.cpu()), product(g.cpu().t(), x.cpu())
    tensorwise = module(name).LAYOUT.operands["rowwise"].scaling == "TensorWise"
    rounds = module(module(name).LAYOUT.products.activation[0]).LAYOUT.not_weights  # transformed values do
    for one, whole, way in list(zip(found, expected, ways(name, how), strict=True))[: 2 if rounds else 3]:
        rounded = torch.from_numpy(whole).float()
        given = torch.float32 if way != "kernel" or tensorwise else torch.bfloat16
        assert torch.equal(one.cpu(), rounded.to(given).float()), (name, way)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_multiply_quantized_values(name: str, dtype: torch.dtype) -> None:
    """Against the products of the same quantized values in fp32: the accumulator and one rounding lie between."""
    x, w, g = (torch.randn(*size, device="cuda", dtype=dtype) for size in ((TOKENS, K), (M, K), (TOKENS, M)))
    kernel, values = run(name, x, w, g, "low_precision"), run(name, x, w, g, "reference")
    chosen = ways(name)
    if "kernel" not in chosen:
        pytest.skip("needs a card that has kernels for it: " + " ".join(chosen))
    if "kernel" in ways(name, "reference"):  # then both are the kernel: its operands' values by hand
        recipes = module(name).LAYOUT.products
        activation, gradient = module(recipes.activation[0]), module(recipes.gradient[0])
        held = module(name).quantize(w)
        a, b = activation.quantize(x).values_of("rowwise", torch.float32), held.values_of("rowwise", torch.float32)
        c, d = gradient.quantize(g).values_of("rowwise", torch.float32), held.values_of("columnwise", torch.float32)
        values = (a @ b.t(), c @ d, values[2])
    for one, other in list(zip(kernel, values, strict=True))[:2]:
        error = (one.float() - other.float()).norm() / other.float().norm()
        assert error < 2**-7, (name, float(error))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_kernel_is_scaled_mm_on_the_same_bytes(dtype: torch.dtype) -> None:
    """Of one scale for each matrix. Forward adds up in the tensor cores' precision, as torchao's does."""
    x, w, g = (torch.randn(*size, device="cuda", dtype=dtype) for size in ((TOKENS, K), (M, K), (TOKENS, M)))
    out, of_x, _ = run("fp8_current", x, w, g, "low_precision")
    recipe, gradient = module("fp8_current"), module(module("fp8_current").LAYOUT.products.gradient[0])
    activations, held, gradients = recipe.quantize(x).buffers(), recipe.quantize(w).buffers(), gradient.quantize(g)
    one, kind = gradients.buffers(), ScalingType.TensorWise
    e5m2 = torch.float8_e5m2 if "e5m2" in gradient.LAYOUT.name else torch.float8_e4m3fn
    for made, left, of_left, codes, side in (
        (out, activations, torch.float8_e4m3fn, held["rowwise_data"], "rowwise"),
        (of_x, one, e5m2, held["columnwise_data"], "columnwise"),
    ):
        expected = F.scaled_mm(
            *(left["rowwise_data"].view(of_left), codes.view(torch.float8_e4m3fn).t()),
            *(left["rowwise_scale"], kind, held[f"{side}_scale"], kind),
            output_dtype=dtype,
            use_fast_accum=side == "rowwise",
        )
        assert torch.equal(made, expected)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_equals_eager(name: str) -> None:
    x, w, g = (torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in ((TOKENS, K), (M, K), (TOKENS, M)))
    for one, other in zip(
        run(name, x, w, g, "low_precision"), run(name, x, w, g, "low_precision", compiled=True), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("tokens", [1, 100, 129])
@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_tokens(name: str, tokens: int) -> None:
    """What kernels do not take is dequantized; what they take equals the first rows of a longer product."""
    x, w = torch.randn(512, K, device="cuda", dtype=torch.bfloat16), torch.randn(M, K, device="cuda")
    held = module(name).quantize(w.bfloat16())
    with layoutc.products("low_precision"), torch.no_grad():
        out = F.linear(x[:tokens], held)
    assert out.shape == (tokens, M)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_of_one_value(name: str) -> None:
    """That of a sum has strides of 0: it gives what a copy of it gives."""
    x, w = torch.randn(TOKENS, K, device="cuda", dtype=torch.bfloat16), torch.randn(M, K, device="cuda")
    one = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(TOKENS, M)
    expanded, copied = (
        run(name, x, w.bfloat16(), one, "low_precision"),
        run(name, x, w.bfloat16(), one.contiguous(), "low_precision"),
    )
    assert all(map(torch.equal, expanded, copied))


def test_a_step_in_a_cuda_graph() -> None:
    """Forward and backward are captured, and replayed on other values."""
    layer = nn.Linear(K, M, bias=False, device="cuda", dtype=torch.bfloat16)
    layoutc.quantize_(layer, "fp8_current")
    x = torch.randn(TOKENS, K, device="cuda", dtype=torch.bfloat16)
    with layoutc.products("low_precision"):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                layer.weight.grad = None
                layer(x).square().sum().backward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        layer.weight.grad = None
        with torch.cuda.graph(graph):
            out = layer(x)
            out.square().sum().backward()
        x.copy_(torch.randn_like(x))
        graph.replay()
        captured, of_w = out.detach().clone(), layer.weight.grad.clone()
        layer.weight.grad = None
        expected = layer(x)
        expected.square().sum().backward()
    assert torch.equal(captured, expected.detach())
    assert torch.equal(of_w, layer.weight.grad)


def test_a_scale_that_is_a_piece_of_a_larger_tensor() -> None:
    """cuBLAS multiplies with none that does not begin at a multiple of 16 bytes."""
    x = torch.randn(TOKENS, K, device="cuda", dtype=torch.bfloat16)
    weight = module("fp8_current").quantize(torch.randn(M, K, device="cuda", dtype=torch.bfloat16))
    with product_modes.products("reference"):
        expected = F.linear(x, weight)
        planes = weight.store.planes
        planes["rowwise_scale"] = torch.cat([planes["rowwise_scale"]] * 2)[1:]
        assert planes["rowwise_scale"].data_ptr() % 16
        assert torch.equal(F.linear(x, weight), expected)


GROUPS = {"mixed": (100, 0, 1, 411), "all in one": (0, 512, 0, 0), "one each": (1, 1, 1, 1), "equal": (128,) * 4}


@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("how", ["low_precision", "reference"])
@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_rowwise_all", "fp8_current", "mxfp8"])
def test_groups_of_tokens_by_experts_are_exact_where_nothing_rounds(
    name: str, how: Mode, sizes: tuple[int, ...]
) -> None:
    """As tests/runtime/test_expert_products.py has it: forward, which has a kernel on some cards, and both gradients.

    In bf16, since torch multiplies groups of no other dtype without a copy for each.
    """
    n, k = 256, 512
    x, g = (
        torch.cat([exact(name, size, features, seed=seed + i) for i, size in enumerate(sizes)])
        for seed, features in ((10, k), (20, n))
    )
    w = exact(name, len(sizes) * n, k, seed=1).view(len(sizes), n, k)
    ends = list(accumulate(sizes))
    groups = [slice(*both) for both in pairwise((0, *ends))]
    weight = nn.Parameter(module(name).quantize(w.cuda().bfloat16()))
    tokens, offs = x.cuda().bfloat16().requires_grad_(), torch.tensor(ends, dtype=torch.int32, device="cuda")
    shape = choice.Sizes(len(sizes), n, k, len(x))
    ways = [choice.choose(type(weight), one, shape, tokens.device, how).way for one in NAMES_OF_PRODUCTS]
    with product_modes.products(how):
        out = F.grouped_mm(tokens, weight.transpose(-2, -1), offs=offs)
        found = [out.detach(), *torch.autograd.grad(out, [tokens, weight], g.cuda().bfloat16())]
    expected = [
        torch.cat([torch.from_numpy(product(x[rows], w[e].t())) for e, rows in enumerate(groups)]),
        torch.cat([torch.from_numpy(product(g[rows], w[e])) for e, rows in enumerate(groups)]),
        torch.stack([torch.from_numpy(product(g[rows].t(), x[rows])) for rows in groups]),
    ]
    for one, whole, way in zip(found, expected, ways, strict=True):
        assert torch.equal(one.cpu(), whole.bfloat16()), (name, way)


@pytest.mark.parametrize("how", ["low_precision", "reference"])
@pytest.mark.parametrize("name", ["fp8_rowwise", "mxfp8"])
def test_batches_are_groups_of_equal_sizes(name: str, how: Mode) -> None:
    held = module(name).quantize(torch.randn(4, 256, 512, device="cuda", dtype=torch.bfloat16))
    x = torch.randn(4, 48, 512, device="cuda", dtype=torch.bfloat16)
    offs = torch.arange(48, 193, 48, device="cuda", dtype=torch.int32)
    shape, right = choice.Sizes(4, 256, 512, 192), held.transpose(-2, -1)
    way = choice.choose(type(held), "forward", shape, x.device, how).way
    with product_modes.products(how):
        batched, in_groups = torch.bmm(x, right), F.grouped_mm(x.view(-1, 512), right, offs=offs)
    if way != "dequantize":  # else torch multiplies them in two ways
        assert torch.equal(batched.view(-1, 256), in_groups)
    assert batched.shape == (4, 48, 256)


def test_groups_of_tokens_are_multiplied_without_waiting_for_their_offsets() -> None:
    """A step of experts is captured, and replayed on groups of other sizes."""
    weight = nn.Parameter(module("fp8_rowwise").quantize(torch.randn(4, M, K, device="cuda", dtype=torch.bfloat16)))
    x = torch.randn(TOKENS, K, device="cuda", dtype=torch.bfloat16)
    first, second = (16, 16, 256, TOKENS), (128, 256, 272, TOKENS)
    held = weight.detach()
    if choice.choose(type(held), "forward", choice.Sizes(4, M, K, TOKENS), x.device, "low_precision").way != "kernel":
        pytest.skip("needs a card of compute capability 9.0")
    offs = torch.tensor(first, dtype=torch.int32, device="cuda")
    with layoutc.products("low_precision"), torch.no_grad():
        F.grouped_mm(x, held.transpose(-2, -1), offs=offs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = F.grouped_mm(x, held.transpose(-2, -1), offs=offs)
        offs.copy_(torch.tensor(second))
        graph.replay()
        expected = F.grouped_mm(x, held.transpose(-2, -1), offs=offs)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_routed_tokens_on_card(dtype: torch.dtype) -> None:
    """Sums over experts, and their gradients of whole numbers, are to the bit those of a CPU."""
    tokens, each, experts, columns = 300, 8, 64, 2048
    chosen = torch.stack([torch.randperm(experts)[:each] for _ in range(tokens)])
    y, grad = (torch.randint(-4, 5, (rows, columns)).to(dtype) for rows in (tokens * each, tokens))
    values, weights = torch.randn(tokens * each, columns).to(dtype), torch.rand(tokens, each).to(dtype)

    def found(device: str) -> list[Tensor]:
        _, rows, ends = routes_of(chosen.to(device), experts - 1)
        those = [one.to(device) for one in (y, grad, values, weights)]
        sums = [sum_of_experts(those[2], rows, by, ends) for by in (those[3], None)]
        return [one.cpu() for one in (*sums, *of_experts(those[1], those[0], rows, those[3], ends))]

    order, *_ = routes_of(chosen, experts)
    assert torch.equal(order, routes_of(chosen.cuda(), experts)[0].cpu())
    assert all(map(torch.equal, found("cuda"), found("cpu")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gates_on_card(dtype: torch.dtype) -> None:
    """Both ways within half a unit in the last place of fp64, and what fp32 leaves."""
    both = (torch.randn(4000, 2 * 768, device="cuda") * 3).to(dtype).requires_grad_()
    grad = torch.randn(4000, 768, device="cuda").to(dtype)
    double = both.detach().double().requires_grad_()
    expected = gated(double)  # no kernel takes fp64
    expected.backward(grad.double())
    found = gated(both)
    found.backward(grad)
    assert both.grad is not None
    assert double.grad is not None
    within = torch.finfo(dtype).eps / 2 + 2**-20
    for one, other in ((found.detach(), expected.detach()), (both.grad, double.grad)):
        assert ((one.double() - other).abs() <= other.abs() * within + 4e-6).all()


@pytest.mark.parametrize("each", [1, 3])
def test_columns_of_groups_on_card(each: int) -> None:
    """Quantized to the bytes that a CPU's reference has, of rows as they are and chosen; and multiplied: groups of no
    rows, of one and of more than a tile."""
    recipe, columns, sizes = module("fp8_rowwise_all").Tensor, 1040, (0, 1, 127, 128, 129, 1000, 0)
    ends = torch.tensor(sizes).cumsum(0).int()
    x = torch.randn(2000 // each, columns).bfloat16()
    order = None if each == 1 else torch.randperm(2000 // each * each)
    given = x, order, each, ends, recipe.KEY
    found = columns_of_groups.quantized(*(one.cuda() if isinstance(one, Tensor) else one for one in given))
    expected = columns_of_groups.quantized(*given)
    last = int(columns_of_groups.ends_apart(ends)[-1])
    assert torch.equal(found[0][:, :last].cpu(), expected[0][:, :last])
    assert torch.equal(found[1].cpu(), expected[1])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("recipe", "columns", "inner"),
    [("fp8_rowwise", 2048, 768), ("fp8_rowwise_all", 2048, 768), ("fp8_rowwise_all", 1024, 3584)],
)
def test_rows_quantized_where_they_are_made_on_card(recipe: str, columns: int, inner: int, compiled: bool) -> None:
    """Experts in FP8 by rows: the bytes of one step after the other, eager and in one graph; an expert of another
    rank, and one without tokens."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("groups of rows have a kernel on Hopper alone")
    tokens, experts = 1500, 8
    chosen = torch.stack([torch.randperm(experts)[:3] for _ in range(tokens)]).cuda()
    chosen[chosen == 2] = experts  # another rank's; expert 2 has none
    shapes = ((tokens, columns), (tokens, 3), (experts, 2 * inner, columns), (experts, columns, inner))
    made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 8 for shape in shapes]

    def as_read(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        return up.transpose(-2, -1), down.transpose(-2, -1)

    def fused(x: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return gated_experts(x, chosen, weights, *as_read(up, down))

    def apart(x: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
        read = as_read(up, down)

        def compute(rows: Tensor, ends: Tensor) -> Tensor:
            return F.grouped_mm(gated(F.grouped_mm(rows, read[0], offs=ends)), read[1], offs=ends)

        return routed_experts(x, chosen, weights, experts, compute)

    def found(function: Any) -> list[Tensor]:
        quantize = module(recipe).quantize
        leaves = [one.clone().requires_grad_() for one in (*made[:2], *map(quantize, made[2:]))]
        with layoutc.products("low_precision"):
            out = function(*leaves)
            out.backward(out.detach().cos())
        return [out.detach(), *(one.grad for one in leaves)]

    expected = found(apart)
    assert not any(bool(one.isnan().any()) for one in expected)
    torch._dynamo.reset()
    assert all(map(torch.equal, found(torch.compile(fused, fullgraph=True) if compiled else fused), expected))

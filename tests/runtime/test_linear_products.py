"""Linear layers in low precision: exact where nothing rounds, and as modes, shapes and dtypes ask."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from typing import Any

import product_modes
import pytest
import torch
import torch.nn.functional as F
from exact_products import exact, product
from quantized_cases import make, module, same_bits, weight
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import ScalingType
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from weight_recipes import PRODUCTS

import layoutc
from layoutc.runtime import product_mode as mode
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.operands import kept as of_operands
from layoutc.runtime.operands.kept import kept_side
from layoutc.runtime.products import choice, linear, measured
from layoutc.runtime.torch_private import scaled_mm_on_cpus
from layoutc.runtime.weight import operators

EVERY = importlib.import_module("layoutc.recipes").RECIPES
WITH_PRODUCTS = tuple(name for name in EVERY if module(name).LAYOUT.products is not None)
ON_CPU = ("fp8_current", "fp8_rowwise")  # whose kernels CPUs have as well
TOKENS, M, K = 128, 256, 384


on_cpus = pytest.mark.skipif(
    not scaled_mm_on_cpus, reason="needs a torch whose scaled_mm multiplies on CPUs, such as 2.13"
)
checks_in_python = pytest.mark.skipif(
    torch.__version__ >= "2.14", reason="needs torch before 2.14, whose function for meta tensors checks scales"
)


def run(
    recipe: str, x: Tensor, w: Tensor, g: Tensor, how: mode.Mode, bias: Tensor | None = None, use: str = "quantize_"
) -> tuple[Tensor, ...]:
    """The output and the gradients of the input, the weight and the bias."""
    layer = nn.Linear(w.shape[1], w.shape[0], bias=bias is not None)
    with torch.no_grad():
        layer.weight.copy_(w)
        if bias is not None:
            layer.bias.copy_(bias)
    getattr(layoutc, use)(layer, recipe)
    x = x.clone().requires_grad_()
    with product_modes.products(how):
        out = layer(x)
        out.backward(g)
    return out.detach(), x.grad, *(param.grad for param in layer.parameters())


def inputs(recipe: str, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """x, w and g that are exact in the recipe."""
    sizes = ((tokens, K), (M, K), (tokens, M))
    x, w, g = (exact(recipe, *size, seed=seed) for seed, size in enumerate(sizes))
    return x, w, g


@pytest.mark.sample(8)
@pytest.mark.parametrize("use", ["quantize_", "cast_on_gather_"])
@pytest.mark.parametrize("how", ["reference", "low_precision", "dequantize"])
@pytest.mark.parametrize("recipe", PRODUCTS)
def test_products_are_exact_where_nothing_rounds(recipe: str, how: mode.Mode, use: str) -> None:
    """Against whole numbers: kernels of CPUs, the reference, and dequantized weights. Transformed values do round."""
    x, w, g = inputs(recipe)
    found = run(recipe, x, w, g, how, use=use)
    expected = product(x, w.t()), product(g, w), product(g.t(), x)
    ways = linear.plan_of(make(recipe, M, K), x, how).ways
    rounds = how != "dequantize" and module(module(recipe).LAYOUT.products.activation[0]).LAYOUT.not_weights
    for one, whole, way in list(zip(found, expected, ways, strict=True))[: 2 if rounds else 3]:
        # scaled_mm with RowWise scales gives bf16, whatever it is asked for.
        given = torch.bfloat16 if recipe.startswith("fp8_rowwise") and way == "kernel" else torch.float32
        assert same_bits(one, torch.from_numpy(whole).to(given).float())


@pytest.mark.parametrize("recipe", PRODUCTS)
def test_low_precision_multiplies_quantized_values(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product against that of the recipes' own values in fp64: an fp32 accumulator is all that lies between."""
    monkeypatch.setattr(operators, "draw_seed", lambda x: torch.tensor([5]))
    x, w, g = weight(TOKENS, K, seed=1), weight(M, K, seed=2), weight(TOKENS, M, seed=3)
    products = module(recipe).LAYOUT.products
    activation, gradient = module(products.activation[0]), module(products.gradient[0])

    def values(one: Any, data: Tensor, orientation: str) -> Tensor:
        planes = one.quantize(data).planes()
        found: Tensor = one.dequantize_reference(planes, *data.shape, orientation)
        return found.double()

    out, of_x, of_w = run(recipe, x, w, g, "reference")
    wanted = (
        (out, values(activation, x, "rowwise"), values(module(recipe), w, "rowwise").t()),
        (of_x, values(gradient, g, "rowwise"), values(module(recipe), w, "columnwise")),
        (of_w, values(gradient, g, "columnwise").t(), values(activation, x, "columnwise")),
    )
    for found, left, right in wanted[: 2 if products.grad_weight is None else 3]:
        unit = 2**-8 if recipe.startswith("fp8_rowwise") else left.shape[1] * 2**-23  # RowWise scales give bf16
        bound = unit * (left.abs() @ right.abs())
        assert ((found.double() - left @ right).abs() <= bound).all()


@on_cpus
@pytest.mark.parametrize("recipe", ON_CPU)
def test_a_kernel_is_scaled_mm_on_the_same_bytes(recipe: str) -> None:
    x, w, g = weight(TOKENS, K, seed=1), weight(M, K, seed=2), weight(TOKENS, M, seed=3)
    out, of_x, _ = run(recipe, x, w, g, "low_precision")
    kind = {"fp8_current": ScalingType.TensorWise, "fp8_rowwise": ScalingType.RowWise}[recipe]
    gradient = module(module(recipe).LAYOUT.products.gradient[0])
    e5m2 = torch.float8_e5m2 if "e5m2" in gradient.LAYOUT.name else torch.float8_e4m3fn

    def by_hand(left: Any, right: Any, right_side: str, dtype: torch.dtype) -> Tensor:
        a, b = left.buffers(), right.buffers()
        scale_a, scale_b = a["rowwise_scale"], b[f"{right_side}_scale"]
        if kind == ScalingType.RowWise:
            scale_a, scale_b = scale_a.view(-1, 1), scale_b.view(1, -1)
        codes = b[f"{right_side}_data"].view(torch.float8_e4m3fn).t()
        wanted = torch.float32 if kind == ScalingType.TensorWise else torch.bfloat16
        made: Tensor = F.scaled_mm(
            a["rowwise_data"].view(dtype), codes, scale_a, kind, scale_b, kind, output_dtype=wanted
        )
        return made.float()

    held = module(recipe).quantize(w)
    assert same_bits(out, by_hand(module(recipe).quantize(x), held, "rowwise", torch.float8_e4m3fn))
    assert same_bits(of_x, by_hand(gradient.quantize(g), held, "columnwise", e5m2))


@on_cpus
@pytest.mark.parametrize(
    ("recipe", "dtype"), [*((one, torch.bfloat16) for one in ON_CPU), ("fp8_current", torch.float32)]
)
@pytest.mark.parametrize("fast", [False, True])
def test_a_product_into_memory_that_is_there(recipe: str, dtype: torch.dtype, fast: bool) -> None:
    """The same bytes as in new memory, in a view of a tensor of more dims as well."""
    layout, read = module(recipe).LAYOUT, linear.scaled_mm.side
    a, b = (module(recipe).quantize(weight(rows, K, seed=rows)).buffers() for rows in (TOKENS, M))
    sides = read(layout, "rowwise", a, TOKENS, is_left=True), read(layout, "rowwise", b, M, is_left=False)
    assert linear.scaled_mm.supports_output_dtype(sides[0].kinds, dtype)
    assert not linear.scaled_mm.supports_output_dtype(sides[0].kinds, torch.float16)
    out = torch.empty(2, TOKENS // 2, M, dtype=dtype)
    linear.scaled_mm.multiply_into(out.view(-1, M), *sides, fast=fast)
    assert same_bits(out.flatten(0, 1), linear.scaled_mm.multiply(*sides, dtype, fast=fast))


@pytest.mark.parametrize("tokens", [TOKENS, 160])
@pytest.mark.parametrize("recipe", WITH_PRODUCTS)
def test_what_kernels_get_passes_the_checks_of_torch(recipe: str, tokens: int) -> None:
    """On the meta device scaled_mm checks dtypes, shapes, strides and orders of scales as it does on a card."""
    held = make(recipe, M, K).to("meta")
    x, g = torch.empty(tokens, K, device="meta"), torch.empty(tokens, M, device="meta")
    activation = module(module(recipe).LAYOUT.products.activation[0])
    fits = tokens % 128 == 0 or activation.LAYOUT.operands["columnwise"].scaling != "BlockWise1x128"
    out, *saved = linear.forward(x, held, None, "low_precision", "quantized")
    assert out.shape == (tokens, M)
    ways = linear.plan_of(held, x, "low_precision").ways
    stated = module(recipe).LAYOUT.products
    assert ways.forward == ways.grad_input == "kernel"
    assert (ways.grad_weight == "kernel") == (stated.grad_weight is not None and fits)
    of_x, of_w = linear.backward(g, held, saved or [x], "low_precision", True, "quantized")
    assert (of_x.shape, of_w.shape) == ((tokens, K), (M, K))


@on_cpus
@pytest.mark.parametrize("recipe", ON_CPU)
def test_an_operand_is_kept_while_the_planes_stay(recipe: str) -> None:
    """It follows what is written into them, and planes that take their place; freed ones are refused."""
    x, held, other = exact(recipe, TOKENS, K, seed=0), make(recipe, M, K), make(recipe, M, K, seed=1)

    def out(weight: Any) -> Tensor:
        return linear.forward(x, weight, None, "low_precision", "nothing")[0]

    expected, of_other = out(make(recipe, M, K)), out(make(recipe, M, K, seed=1))
    assert not torch.equal(expected, of_other)
    assert same_bits(out(held), expected)
    kept = held.readings["rowwise", "operand"].side
    assert same_bits(out(held), expected)
    assert held.readings["rowwise", "operand"].side is kept
    held.copy_(other)  # into the same planes
    assert same_bits(out(held), of_other)
    assert held.readings["rowwise", "operand"].side is kept
    held.data = make(recipe, M, K)
    assert same_bits(out(held), expected)
    held.store.planes["rowwise_data"] = held.store.planes["rowwise_data"].clone()
    assert same_bits(out(held), expected)
    assert held.readings["rowwise", "operand"].side is not kept
    held.store.planes["rowwise_data"].untyped_storage().resize_(0)
    assert kept_side(held, "rowwise") is None


@checks_in_python
def test_the_checks_of_torch_refuse_another_order_of_scales() -> None:
    """That is, the test above would fail with scales in a wrong order."""
    held = make("fp8_block", M, K).to("meta")
    buffers = held.buffers()
    buffers["rowwise_scale"] = buffers["rowwise_scale"].t().contiguous()
    side = linear.scaled_mm.side
    x = module("fp8_block_1d").quantize_buffers(torch.empty(TOKENS, K, device="meta"))
    a = side(module("fp8_block_1d").LAYOUT, "rowwise", x, TOKENS, is_left=True)
    b = side(held.LAYOUT, "rowwise", buffers, M, is_left=False)
    with pytest.raises(RuntimeError, match="scale b must have shape"):
        linear.scaled_mm.multiply(a, b, torch.bfloat16)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4"])
def test_scales_lie_where_cublas_takes_them(recipe: str) -> None:
    """A scale that is a piece of a larger tensor is copied to 16 bytes; the others aren't."""
    made = module(recipe)
    held = made.quantize(weight(M, K))
    buffers = dict(held.buffers(swizzled=bool(made.LAYOUT.swizzled)))
    whole = linear.scaled_mm.side(made.LAYOUT, "rowwise", buffers, M, is_left=False)
    scale = buffers["rowwise_scale"]
    for at in range(0, 32, 4):
        storage = torch.zeros(scale.nbytes + 64, dtype=torch.uint8)
        begin = -storage.data_ptr() % 16 + at
        piece = storage[begin : begin + scale.nbytes].view(scale.dtype).view(scale.shape)
        piece.copy_(scale)
        found = linear.scaled_mm.side(made.LAYOUT, "rowwise", buffers | {"rowwise_scale": piece}, M, is_left=False)
        assert found.scales[0].data_ptr() % 16 == 0
        assert (found.scales[0].data_ptr() == piece.data_ptr()) == (at % 16 == 0)
        assert found.scales[0].stride() == whole.scales[0].stride()
        assert torch.equal(
            found.scales[0].contiguous().view(torch.uint8), whole.scales[0].contiguous().view(torch.uint8)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_rowwise", "mxfp8"])
def test_dtypes_bias_and_leading_dims(recipe: str, dtype: torch.dtype) -> None:
    """The output has x's dtype and leading dims; so has the gradient; the bias is added in that dtype."""
    x, w, g = weight(4, 32, K, seed=1, dtype=dtype), weight(M, K, seed=2), weight(4, 32, M, seed=3, dtype=dtype)
    layer = nn.Linear(K, M, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(w)
    layoutc.quantize_(layer, recipe)
    x.requires_grad_()
    with product_modes.products("reference"):
        out = layer(x)
        out.backward(g)
        with torch.no_grad():
            alone = F.linear(x.reshape(-1, K), layer.weight)
    assert same_bits(out.detach(), (alone + layer.bias.detach()).view(4, 32, M))
    assert x.grad is not None
    assert (x.grad.dtype, x.grad.shape, out.dtype) == (dtype, x.shape, dtype)
    assert same_bits(layer.bias.grad, g.reshape(-1, M).sum(0))
    assert layer.weight.grad.shape == (M, K)


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "fp8_rowwise"])
def test_autocast_decides_the_dtype_and_nothing_else(recipe: str) -> None:
    """Also if backward runs under it."""
    layer = nn.Linear(K, M, bias=False)
    layoutc.quantize_(layer, recipe)
    x, cast = weight(TOKENS, K).bfloat16().requires_grad_(), weight(TOKENS, K).requires_grad_()
    with product_modes.products("reference"):
        plain = layer(x)
        plain.square().sum().backward()
        expected, layer.weight.grad = layer.weight.grad, None
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(cast)
            out.square().sum().backward()
    assert same_bits(out.detach(), plain.detach())
    assert same_bits(layer.weight.grad, expected)
    assert x.grad is not None
    assert same_bits(cast.grad, x.grad.float())


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("recipe", "use", "compiled"),
    [
        ("nvfp4", layoutc.quantize_, False),
        ("mxfp8", layoutc.cast_on_gather_, False),
        ("fp8_current", layoutc.cast_on_gather_, False),
        ("mxfp8", layoutc.quantize_, True),
        ("nvfp4", layoutc.cast_on_gather_, True),
    ],
)
def test_autocast_casts_a_bias_too(
    recipe: str, use: Callable[..., Any], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a kernel "low_precision" is what autocast makes of a plain layer, gradients included; "reference" adds it
    as well."""
    monkeypatch.setattr(choice, "not_here", lambda *_: "there is none")
    choice.plan_of.cache_clear()
    layer, plain = nn.Linear(K, M), nn.Linear(K, M)
    use(layer, recipe)
    held: Any = layer.weight
    values = (held if hasattr(held, "dequantize") else held.quantize()).dequantize().detach()
    plain.load_state_dict({"weight": values, "bias": layer.bias.detach()})
    torch._dynamo.reset()
    called: list[Any] = [layer, plain]
    if compiled:
        called = [torch.compile(one, fullgraph=True, backend="aot_eager") for one in called]
    found, cases = [], [(called[0], "low_precision"), (called[1], "low_precision"), (called[0], "reference")]
    for one, how in cases:
        x = weight(TOKENS, K).requires_grad_()
        with product_modes.products(how), torch.autocast("cpu", torch.bfloat16):
            out = one(x)
        out.float().square().sum().backward()
        found.append((out.detach(), x.grad))
        if how == "reference":
            with product_modes.products(how), torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                alone = F.linear(x, layer.weight)
            assert same_bits(out.detach(), alone + layer.bias.detach().bfloat16())
        elif one is called[1]:
            assert same_bits(layer.bias.grad, plain.bias.grad)
            assert same_bits(layer.weight.grad, plain.weight.grad)
    choice.plan_of.cache_clear()
    assert all(map(same_bits, found[0], found[1]))


def test_matrix_products_follow_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """x @ w.t() and g @ w, which is also what DTensor calls, equal the products of F.linear."""
    monkeypatch.setattr(operators, "draw_seed", lambda x: torch.tensor([5]))
    for recipe in ("fp8_current", "mxfp8", "nvfp4"):
        x, w, g = weight(TOKENS, K, seed=1), weight(M, K, seed=2), weight(TOKENS, M, seed=3)
        out, of_x, _ = run(recipe, x, w, g, "reference")
        held = module(recipe).quantize(w)
        with product_modes.products("reference"):
            assert same_bits(x @ held.t(), out)
            assert same_bits(g @ held, of_x)
            assert same_bits(torch.addmm(torch.ones(M), x, held.t()), out + 1)
        assert same_bits(x @ held.t(), x @ held.dequantize().t())


@pytest.mark.parametrize(
    ("recipe", "tokens", "expected"),
    [
        ("fp8_block", 100, ("kernel", "kernel", "dequantize")),
        ("fp8_block", 130, ("dequantize", "dequantize", "dequantize")),  # cuBLAS reads scales of 4 rows at a time
        ("fp8_current", 100, ("kernel", "kernel", "dequantize")),
        ("fp8_rowwise", 100, ("kernel", "kernel", "dequantize")),
        ("nvfp4", 100, ("dequantize", "dequantize", "dequantize")),
        ("mxfp8", 0, ("dequantize", "dequantize", "dequantize")),
        ("int8_block", 128, ("dequantize", "dequantize", "dequantize")),
    ],
)
def test_sizes_that_kernels_do_not_take(recipe: str, tokens: int, expected: tuple[str, ...]) -> None:
    x = torch.empty(tokens, K, device="meta")
    assert linear.plan_of(make(recipe, M, K), x, "low_precision").ways == expected


@on_cpus
def test_reasons() -> None:
    def reason(
        recipe: str, name: Any, m: int = M, k: int = K, tokens: int = TOKENS, how: mode.Mode = "low_precision"
    ) -> str:
        return choice.choose(
            module(recipe).Tensor, name, choice.Sizes(0, m, k, tokens), torch.device("cpu"), how
        ).reason

    assert reason("fp8_current", "forward") == ""
    assert reason("fp8_current", "forward", how="dequantize") == 'products are set to "dequantize"'
    assert (
        reason("fp8_current", "grad_weight", tokens=24)
        == "TensorWise takes a contracted dim in multiples of 16, not 24"
    )
    assert reason("fp8_current", "forward", m=24) == "scaled_mm takes a dim in multiples of 16, not 24"
    assert reason("fp8_rowwise", "grad_weight") == "the spec says so"
    assert reason("mxfp8", "forward") == "CPUs have no kernel for it"
    assert reason("nvfp4", "forward", tokens=24) == "nvfp4_activation takes tokens in multiples of 16, not 24"
    assert reason("int8_block", "forward") == "the recipe names none for activations"


@pytest.mark.parametrize(("name", "n", "k"), [("forward", 192, 128), ("grad_input", 128, 192)])
def test_weights_of_part_of_a_block_are_dequantized(name: Any, n: int, k: int) -> None:
    """The weight is the second operand of both; activations, the first, would fit."""
    cls, sizes = module("fp8_block").Tensor, choice.Sizes(0, n, k, TOKENS)
    said = "BlockWise128x128 takes a dim in multiples of 128, not 192"
    assert choice.choose(cls, name, sizes, torch.device("meta"), "low_precision") == ("dequantize", said)


@pytest.mark.parametrize(
    ("capability", "served"),
    [
        ((8, 0), set()),
        ((8, 9), {"fp8_current", "fp8_rowwise"}),
        ((9, 0), {"fp8_current", "fp8_rowwise", "fp8_block"}),
        ((10, 0), {"fp8_current", "fp8_rowwise", "mxfp8", "nvfp4"}),
        ((12, 0), {"fp8_current", "fp8_rowwise"}),
    ],
)
def test_cards(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], served: set[str]) -> None:
    monkeypatch.setattr(measured, "capability_of", lambda device: capability)
    card = torch.device("cuda", 0)
    recipes = ("fp8_current", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4")
    sizes = choice.Sizes(0, M, K, TOKENS)
    ways = {name: choice.choose(module(name).Tensor, "forward", sizes, card, "low_precision").way for name in recipes}
    assert {name for name, way in ways.items() if way == "kernel"} == served
    assert {name for name, way in ways.items() if way == "dequantize"} == set(recipes) - served


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "nvfp4"])
def test_what_backward_needs_is_saved_quantized(recipe: str) -> None:
    """Beside the weight, as many bytes as the activation has in the recipe; in bf16 it would have two an element."""
    layer = nn.Linear(K, M, bias=False, dtype=torch.bfloat16)
    layoutc.quantize_(layer, recipe)
    x = weight(TOKENS, K, dtype=torch.bfloat16).requires_grad_()
    saved: list[Tensor] = []
    with (
        product_modes.products("reference"),
        saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one),
    ):
        layer(x)
    kept = sum(one.nbytes for one in saved if type(one) is Tensor)
    activation = module(layer.weight.LAYOUT.products.activation[0]).quantize(x, orientations="columnwise")
    assert kept == sum(plane.nbytes for plane in activation.planes().values()) < TOKENS * K * 1.1


@pytest.mark.parametrize("how", ["reference", "low_precision"])
@pytest.mark.parametrize("recipe", WITH_PRODUCTS)
def test_gradients_of_saved_inputs_are_those_of_saved_codes(
    recipe: str, how: mode.Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "draw_seed", lambda x: torch.tensor([5]))
    x, w, g = weight(TOKENS, K, seed=1), weight(M, K, seed=2), weight(TOKENS, M, seed=3)
    layer = nn.Linear(K, M, bias=False)
    made: list[tuple[Tensor, Tensor]] = []
    kept: list[int] = []
    for saves in ("quantized", "input"):
        with torch.no_grad():
            layer.weight = nn.Parameter(w.clone())
        layoutc.quantize_(layer, recipe)
        one, saved = x.clone().requires_grad_(), []
        hooks = saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t)
        with product_modes.products(how, saves=saves), hooks:  # type: ignore[arg-type]
            layer(one).backward(g)
        assert one.grad is not None
        assert layer.weight.grad is not None
        made.append((one.grad, layer.weight.grad))
        kept.append(sum(t.nbytes for t in saved if type(t) is Tensor))
    assert all(same_bits(*both) for both in zip(*made, strict=True))
    assert kept[1] == x.nbytes
    activation = module(module(recipe).LAYOUT.products.activation[0])
    if linear.plan_of(make(recipe, M, K), x, how).ways.grad_weight != "dequantize" and not activation.LAYOUT.stochastic:
        assert kept[0] < x.nbytes / 2


@on_cpus
def test_activations_are_quantized_once_for_all_weights_that_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.Linear(K, M, bias=False) for _ in range(3)]
    for layer in layers:
        layoutc.quantize_(layer, "fp8_current")
    read: list[Tensor] = []
    quantize_buffers = linear.operators.quantize_buffers

    def counted(cls: Any, x: Tensor, *options: Any, **typed: bool) -> dict[str, Tensor]:
        read.append(x)
        return quantize_buffers(cls, x, *options, **typed)

    monkeypatch.setattr(linear.operators, "quantize_buffers", counted)
    x = weight(TOKENS, K)
    with layoutc.products("low_precision"):
        first = [layer(x) for layer in layers]
        assert len(read) == 1
        x.mul_(2)
        second = [layer(x) for layer in layers]
        assert len(read) == 2
        alone = [layer(x.clone()) for layer in layers]
        assert len(read) == 5
    assert all(same_bits(a, b) for a, b in zip(second, alone, strict=True))
    assert not any(same_bits(a, b) for a, b in zip(first, second, strict=True))
    del x, read[:]
    gc.collect()
    assert of_operands._last is None or of_operands._last.x() is None


@pytest.mark.sample(1)
@pytest.mark.parametrize(("recipe", "use"), [("fp8_current", "quantize_"), ("nvfp4", "cast_on_gather_")])
def test_compiled_equals_eager(recipe: str, use: str) -> None:
    """One graph; every byte of the output and of the gradients, also under activation checkpointing."""

    def made(compiled: bool, recomputed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(K, M), nn.ReLU(), nn.Linear(M, M, bias=False))
        getattr(layoutc, use)(model, recipe)
        torch._dynamo.reset()
        called: Any = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        x = weight(TOKENS, K).requires_grad_()
        with product_modes.products("reference"):
            out = checkpoint(called, x, use_reentrant=False) if recomputed else called(x)
            out.square().mean().backward()
        return [out.detach(), x.grad, *(param.grad for param in model.parameters())]

    expected = made(False, False)
    for compiled, recomputed in ((True, False), (False, True)):
        assert all(map(same_bits, made(compiled, recomputed), expected))


def test_a_mode_that_changes_is_traced_anew() -> None:
    layer = nn.Linear(K, M, bias=False)
    layoutc.quantize_(layer, "mxfp8")
    torch._dynamo.reset()
    called = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = weight(TOKENS, K)
    with torch.no_grad():
        dequantized, expected = called(x), layer(x)
        with product_modes.products("reference"):
            low, expected_low = called(x), layer(x)
    assert same_bits(dequantized, expected)
    assert same_bits(low, expected_low)
    assert not same_bits(low, dequantized)


def test_what_is_saved_is_traced_anew() -> None:
    """Also where torch keeps graphs: the setting is a part of the key."""
    layer = nn.Linear(K, M, bias=False)
    layoutc.quantize_(layer, "mxfp8")
    keys = set()
    for saves in (None, "quantized", "input"):
        with product_modes.products("reference", saves=saves):  # type: ignore[arg-type]
            keys.add(layer.weight._stable_hash_for_caching())
            keys.add(layer.weight.__tensor_flatten__()[1])
    assert len(keys) == 6


def test_modes() -> None:
    assert mode.current() == ("dequantize", "gather")
    with layoutc.products("low_precision"):
        with product_modes.products("reference"):
            assert mode.current().products == "reference"
        assert mode.current().products == "low_precision"
    assert mode.current() == ("dequantize", "gather")
    with pytest.raises(ValueError, match="products take low_precision or dequantize, not 'fp8'"):
        layoutc.products("fp8")  # type: ignore[arg-type]
    with layoutc.products("low_precision", saves="quantized"):
        assert mode.saves(in_graph=True) == "quantized"
        with pytest.raises(ValueError, match="saves must be 'quantized' or 'input', not 'bf16'"):
            layoutc.products("low_precision", saves="bf16")  # type: ignore[arg-type]
        assert mode.saves(in_graph=True) == "quantized"
    assert (mode.saves(in_graph=True), mode.saves(in_graph=False)) == ("input", "quantized")
    assert mode.current() == ("dequantize", "gather")


def test_two_settings_that_end_in_any_order() -> None:
    """Each takes back what it has set, and nothing else."""
    first, second = layoutc.products("low_precision"), layoutc.dequantize("layer")
    assert mode.current() == ("low_precision", "layer")
    first.__exit__(None, None, None)
    assert mode.current() == ("dequantize", "layer")
    second.__exit__(None, None, None)
    assert mode.current() == ("dequantize", "gather")
    with pytest.raises(ValueError, match="dequantize takes gather or layer, not 'hook'"):
        layoutc.dequantize("hook")  # type: ignore[arg-type]


def test_without_gradients_and_in_inference_mode() -> None:
    layer = nn.Linear(K, M)
    layoutc.quantize_(layer, "fp8_current")
    x = weight(TOKENS, K)
    with layoutc.products("low_precision"):
        expected = layer(x).detach()
        with torch.no_grad():
            assert same_bits(layer(x), expected)
        with torch.inference_mode():
            assert same_bits(layer(x).clone(), expected)
        layer.weight.requires_grad_(False)
        x.requires_grad_()
        layer(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None


def test_a_wrong_size_is_what_torch_says_it_is() -> None:
    layer = nn.Linear(K, M, bias=False)
    layoutc.quantize_(layer, "fp8_current")
    with product_modes.products("reference"):
        for columns in (2 * K, K // 2):  # which could be read as other numbers of tokens
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                layer(torch.ones(8, columns))
        assert layer(torch.ones(0, K)).shape == (0, M)
        assert same_bits(layer(torch.ones(K)), layer(torch.ones(1, K))[0])


def test_pieces_of_weights() -> None:
    """Those of whole blocks multiply as weights do; others, and transposed ones, are dequantized, and counted."""
    x, w = weight(TOKENS, K), weight(M, K, seed=1)
    held = module("fp8_block").quantize(w)
    with product_modes.products("reference"):
        whole = F.linear(x, held)
        assert same_bits(F.linear(x, held[:128]), whole[:, :128])
        before = layoutc.products_without_kernel()
        assert same_bits(F.linear(x, held[32:200]), F.linear(x, held.dequantize()[32:200]))
        assert same_bits(F.linear(w, held.t().contiguous().t()[:, :K]).isfinite().all(), torch.tensor(True))
    counted = layoutc.products_without_kernel() - before
    assert counted["fp8_block forward: the weight is transposed, or cuts blocks"] == 1


@on_cpus
def test_products_without_a_kernel_are_counted() -> None:
    x, w, g = weight(24, K), weight(M, K, seed=1), weight(24, M, seed=2)
    before = layoutc.products_without_kernel()
    run("fp8_current", x, w, g, "low_precision")
    run("mxfp8", weight(TOKENS, K), w, weight(TOKENS, M), "low_precision")
    run("fp8_rowwise", weight(TOKENS, K), w, weight(TOKENS, M), "low_precision")  # whose spec dequantizes one
    run("int8_block", weight(TOKENS, K), w, weight(TOKENS, M), "low_precision")  # whose spec has none
    assert layoutc.products_without_kernel() - before == {
        "fp8_current grad_weight: TensorWise takes a contracted dim in multiples of 16, not 24": 1,
        "mxfp8 forward: CPUs have no kernel for it": 1,
        "mxfp8 grad_input: CPUs have no kernel for it": 1,
        "mxfp8 grad_weight: CPUs have no kernel for it": 1,
    }
    before = layoutc.products_without_kernel()
    run("mxfp8", x, w, g, "dequantize")
    assert layoutc.products_without_kernel() == before


@on_cpus
def test_gradients_have_no_gradients() -> None:
    layer = nn.Linear(K, M, bias=False)
    layoutc.quantize_(layer, "fp8_current")
    x = weight(TOKENS, K).requires_grad_()
    with layoutc.products("low_precision"):
        (of_x,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            of_x.sum().backward()


@on_cpus
def test_without_gradients_nothing_is_made_for_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(K, M, bias=False)
    layoutc.quantize_(layer, "fp8_current")
    asked: list[Any] = []
    quantize_buffers = linear.operators.quantize_buffers

    def noted(*args: Any, **typed: bool) -> dict[str, Tensor]:
        asked.append(args[3])
        return quantize_buffers(*args, **typed)

    monkeypatch.setattr(linear.operators, "quantize_buffers", noted)
    with layoutc.products("low_precision"):
        with torch.no_grad():
            layer(weight(TOKENS, K))
        layer(weight(TOKENS, K))
        layer.requires_grad_(False)
        layer(weight(TOKENS, K).requires_grad_())
    assert asked == [("rowwise",), ("rowwise", "columnwise"), ("rowwise",)]


def test_a_recipe_that_was_changed_since_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    choice.recipes_of.cache_clear()
    monkeypatch.setattr(module("fp8_block_1d"), "LAYOUT", module("fp8_block").LAYOUT)
    with pytest.raises(
        LayoutError, match="fp8_block was built to be multiplied with fp8_block_1d of layout f52fff5e711b"
    ):
        choice.recipes_of(module("fp8_block").Tensor)
    choice.recipes_of.cache_clear()


@on_cpus
def test_explain_products() -> None:
    model = nn.Sequential(nn.Linear(K, M, bias=False), nn.Linear(M, 24, bias=False), nn.LayerNorm(24))
    layoutc.quantize_(model, "fp8_current")
    rows = layoutc.explain_products(model)
    assert [str(row) for row in rows] == [
        "0.weight 256x384 fp8_current forward: scaled_mm, TensorWise by TensorWise",
        "0.weight 256x384 fp8_current grad_input: scaled_mm, TensorWise by TensorWise",
        "0.weight 256x384 fp8_current grad_weight: scaled_mm, TensorWise by TensorWise",
        "1.weight 24x256 fp8_current forward: dequantize: scaled_mm takes a dim in multiples of 16, not 24",
        "1.weight 24x256 fp8_current grad_input: dequantize: "
        "TensorWise takes a contracted dim in multiples of 16, not 24",
        "1.weight 24x256 fp8_current grad_weight: scaled_mm, TensorWise by TensorWise",
    ]
    with product_modes.products("reference"):
        assert {row.way for row in layoutc.explain_products(model)} == {"kernel", "reference"}


@pytest.mark.parametrize("use", ["quantize_", "cast_on_gather_"])
@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4"])
def test_flops_are_those_of_plain_layers(recipe: str, use: str) -> None:
    """FlopCounterMode counts products in low precision, of layers and of experts, as it counts a plain model's."""

    def counted(of: nn.Module, what: str) -> int:
        x = torch.randn(32, 128, requires_grad=True)
        with FlopCounterMode(display=False) as counter, product_modes.products("reference"):
            if what == "bmm":
                made = torch.bmm(x.expand(4, 32, 128), of.experts.transpose(-2, -1))  # type: ignore[operator]
            else:
                of.layer.weight.requires_grad_(what != "frozen")  # type: ignore[union-attr]
                made = of.layer(x)  # type: ignore[operator]
            if what != "forward":
                made.sum().backward()
        return counter.get_total_flops()

    def built() -> nn.Module:
        model = nn.Module()
        model.layer, model.experts = nn.Linear(128, 256), nn.Parameter(torch.randn(4, 256, 128))
        return model

    model = built()
    getattr(layoutc, use)(model, recipe, param_filter=["layer.weight", "experts"])
    for what in ("forward", "backward", "frozen", "bmm"):
        assert counted(model, what) == counted(built(), what) > 0, what

"""Weights of experts in low precision: exact where nothing rounds, each group of tokens by itself, and as kernels read
it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from math import lcm
from typing import Any

import grouped_kernels
import product_modes
import pytest
import torch
import torch.nn.functional as F
from exact_products import exact, product
from quantized_cases import make, module, same_bits, weight
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import layoutc
from layoutc.bench import experts as bench
from layoutc.runtime import product_mode as mode
from layoutc.runtime.facts import Grouped
from layoutc.runtime.operands.groups import Groups, rows_together, shares_all_rows
from layoutc.runtime.products import choice, grouped, measured, scaled_grouped_mm

EVERY = importlib.import_module("layoutc.recipes").RECIPES
WITH_PRODUCTS = tuple(name for name in EVERY if module(name).LAYOUT.products is not None)
WITH_KERNELS = ("fp8_current", "fp8_rowwise", "fp8_rowwise_all", "mxfp8", "mxfp8_2d", "nvfp4", "nvfp4_1d")
ALONE = ("fp8_block", "fp8_block_1d", "mxfp8", "mxfp8_2d")  # no scale covers more than some tokens, and no spec says no
EXPERTS, N, K = 4, 128, 256
SIZES = {"mixed": (40, 0, 1, 87), "all in one": (0, 128, 0, 0), "one each": (1, 1, 1, 1), "equal": (32, 32, 32, 32)}

each_groups = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


class Experts(nn.Module):
    """A weight of experts, by which groups of tokens are multiplied."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)

    def forward(self, x: Tensor, offs: Tensor | None) -> Tensor:
        """(tokens, k) in groups, or (experts, tokens, k)."""
        right = self.weight.transpose(-2, -1)
        return torch.bmm(x, right) if offs is None else F.grouped_mm(x, right, offs=offs)


def experts(recipe: str, values: Tensor, use: str = "quantize_") -> Experts:
    made = Experts(values)
    getattr(layoutc, use)(made, recipe, filter_fn=lambda *_: True)
    return made


def offsets(sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor(list(accumulate(sizes)), dtype=torch.int32)


def slices(sizes: tuple[int, ...]) -> list[slice]:
    return [slice(*both) for both in pairwise((0, *accumulate(sizes)))]


def run(
    recipe: str, x: Tensor, w: Tensor, g: Tensor, offs: Tensor | None, how: mode.Mode, use: str = "quantize_"
) -> tuple[Tensor, Tensor, Tensor]:
    """The output and the gradients of the input and of the weight."""
    layer = experts(recipe, w, use)
    x = x.clone().requires_grad_()
    with product_modes.products(how):
        out = layer(x, offs)
        out.backward(g)
    assert x.grad is not None
    assert layer.weight.grad is not None
    return out.detach(), x.grad, layer.weight.grad


def exact_groups(recipe: str, sizes: tuple[int, ...], features: int, seed: int) -> Tensor:
    """Tokens of which each group is exact in the recipe."""
    return torch.cat([exact(recipe, size, features, seed=10 * seed + i) for i, size in enumerate(sizes)])


def exact_inputs(recipe: str, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """x, w and g."""
    w = exact(recipe, EXPERTS * N, K, seed=1).view(EXPERTS, N, K)
    return exact_groups(recipe, sizes, K, 2), w, exact_groups(recipe, sizes, N, 3)


def uneven(x: Tensor, rows: int, seed: int) -> Tensor:
    """x times 1, 2 or 4 for every so many rows, and 1 or 2 for every 32 columns: still exact, but no scales repeat."""
    generator = torch.Generator().manual_seed(seed)
    matrix = x.reshape(-1, x.shape[-1])
    of_rows = torch.randint(0, 3, (-(-len(matrix) // rows),), generator=generator).repeat_interleave(rows)[
        : len(matrix)
    ]
    of_columns = torch.randint(0, 2, (matrix.shape[1] // 32,), generator=generator).repeat_interleave(32)
    return (matrix * torch.exp2(of_rows[:, None] + of_columns)).view(x.shape)


def whole_numbers(x: Tensor, w: Tensor, g: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """The output and both gradients."""
    groups = slices(sizes)
    return [
        torch.cat([torch.from_numpy(product(x[rows], w[e].t())) for e, rows in enumerate(groups)]).float(),
        torch.cat([torch.from_numpy(product(g[rows], w[e])) for e, rows in enumerate(groups)]).float(),
        torch.stack([torch.from_numpy(product(g[rows].t(), x[rows])) for rows in groups]).float(),
    ]


def random_inputs(sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x, w and g."""
    tokens = sum(sizes)
    x, g = weight(tokens, K, seed=1, dtype=dtype), weight(tokens, N, seed=3, dtype=dtype)
    return x, weight(EXPERTS, N, K, seed=2, dtype=dtype), g


# ------------------------------------------------------------------------------------------------------------- products
@pytest.mark.sample(12)
@each_groups
@pytest.mark.parametrize("how", ["reference", "low_precision", "dequantize"])
@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_rowwise_all", "mxfp8", "nvfp4", "nvfp4_1d"])
def test_products_are_exact_where_nothing_rounds(recipe: str, how: mode.Mode, sizes: tuple[int, ...]) -> None:
    """The gradient of the weight where the recipes of tokens keep them columnwise, too."""
    x, w, g = exact_inputs(recipe, sizes)
    found = run(recipe, x, w, g, offsets(sizes), how)
    products = module(recipe).LAYOUT.products
    others = module(products.activation[0]), module(products.gradient[0])
    kept = all(
        same_bits(one.quantize(data).values_of("columnwise", data.dtype), data)
        for one, data in zip(others, (exact(recipe, 64, 64, 1), exact(recipe, 64, 64, 2)), strict=True)
    )
    count = 3 if kept or how != "reference" else 2
    assert all(map(same_bits, found[:count], whole_numbers(x, w, g, sizes)[:count]))


@pytest.mark.parametrize(("how", "use"), [("reference", "quantize_"), ("low_precision", "cast_on_gather_")])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_rowwise", "mxfp8", "nvfp4_1d"])
def test_batches_are_groups_of_equal_sizes(recipe: str, how: mode.Mode, use: str) -> None:
    x, w, g = exact_inputs(recipe, SIZES["equal"])
    out, of_x, of_w = run(recipe, x.view(EXPERTS, 32, K), w, g.view(EXPERTS, 32, N), None, how, use)
    found = out.reshape(-1, N), of_x.reshape(-1, K), of_w
    assert all(map(same_bits, found, whole_numbers(x, w, g, SIZES["equal"])))
    expected = run(recipe, x, w, g, offsets(SIZES["equal"]), how, use)
    assert all(map(same_bits, found, expected))


def by_groups(recipe: Any, x: Tensor, sizes: tuple[int, ...], orientation: str) -> Tensor:
    """The fp64 values of tokens, each group quantized by itself, under the scale of all tokens where there is one."""
    layout = recipe.LAYOUT
    values = torch.empty(x.shape, dtype=torch.float64)
    for rows in slices(sizes):
        if (size := rows.stop - rows.start) == 0:
            continue
        part = torch.zeros(-(-size // layout.multiple_m) * layout.multiple_m, x.shape[1])
        part[:size] = x[rows]
        whole = layout.shares_amax and layout.amax_columns is None
        planes = recipe.quantize(part, amax=x.abs().amax().view(1) if whole else None).planes()
        values[rows] = recipe.dequantize_reference(planes, *part.shape, orientation)[:size].double()
    return values


@pytest.mark.sample(8)
@each_groups
@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_current", "fp8_rowwise_all", "mxfp8", "nvfp4_1d"])
def test_low_precision_multiplies_values_that_are_quantized_by_group(recipe: str, sizes: tuple[int, ...]) -> None:
    """Each product against that of the recipes' own values in fp64: an fp32 accumulator is all that lies between."""
    x, w, g = random_inputs(sizes)
    products = module(recipe).LAYOUT.products
    activation, gradient = module(products.activation[0]), module(products.gradient[0])
    planes = module(recipe).quantize(w).planes()

    def held(orientation: str) -> Tensor:
        found: Tensor = module(recipe).dequantize_reference(planes, EXPERTS * N, K, orientation)
        return found.view(EXPERTS, N, K).double()

    def near(found: Tensor, left: Tensor, right: Tensor) -> bool:
        bound = max(left.shape[1], 1) * 2**-23 * (left.abs() @ right.abs())
        return bool(((found.double() - left @ right).abs() <= bound).all())

    out, of_x, of_w = run(recipe, x, w, g, offsets(sizes), "reference")
    left, back = by_groups(activation, x, sizes, "rowwise"), by_groups(gradient, g, sizes, "rowwise")
    for expert, rows in enumerate(slices(sizes)):
        assert near(out[rows], left[rows], held("rowwise")[expert].t())
        assert near(of_x[rows], back[rows], held("columnwise")[expert])
    if products.grad_weight is None:  # then it is that of the values as they are
        assert same_bits(of_w, torch._grouped_mm(g.t(), x, offs=offsets(sizes)))
        return
    left, right = by_groups(gradient, g, sizes, "columnwise"), by_groups(activation, x, sizes, "columnwise")
    assert all(near(of_w[expert], left[rows].t(), right[rows]) for expert, rows in enumerate(slices(sizes)))


@pytest.mark.parametrize("recipe", ALONE)
def test_a_group_is_what_a_linear_layer_of_its_expert_gives(recipe: str) -> None:
    sizes = (64, 0, 32, 96)
    x, w, g = random_inputs(sizes)
    out, of_x, of_w = run(recipe, x, w, g, offsets(sizes), "reference")
    held = module(recipe).quantize(w)
    for expert, rows in enumerate(slices(sizes)):
        if rows.start == rows.stop:
            assert not of_w[expert].any()
            continue
        layer = nn.Parameter(held[expert])
        one = x[rows].clone().requires_grad_()
        with product_modes.products("reference"):
            made = F.linear(one, layer)
            made.backward(g[rows])
        assert one.grad is not None
        assert layer.grad is not None
        assert same_bits(out[rows], made.detach())
        assert same_bits(of_x[rows], one.grad)
        assert same_bits(of_w[expert], layer.grad)


@pytest.mark.parametrize("recipe", ALONE)
def test_groups_know_nothing_of_one_another(recipe: str) -> None:
    """Groups that end inside what would be a block: values of the others do not change their scales."""
    sizes = (5, 18, 7, 40)
    x, w, g = random_inputs(sizes)
    rows = slices(sizes)[1]
    louder, back = x.clone(), g.clone()
    for one in (louder, back):
        one[: rows.start] *= 1000
        one[rows.stop :] *= 1000
    quiet, loud = (run(recipe, *one, offsets(sizes), "reference") for one in ((x, w, g), (louder, w, back)))
    assert same_bits(quiet[0][rows], loud[0][rows])
    assert same_bits(quiet[1][rows], loud[1][rows])
    assert same_bits(quiet[2][1], loud[2][1])


@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4"])
def test_a_scale_of_the_tensor_is_one_for_all_tokens(recipe: str) -> None:
    """As a linear layer has it: tokens are quantized as if they were in no groups."""
    sizes = (16, 32, 0, 16)
    x, w, g = random_inputs(sizes)
    out, _, _ = run(recipe, x, w, g, offsets(sizes), "reference")
    held = module(recipe).quantize(w)
    activation = module(module(recipe).LAYOUT.products.activation[0])
    values = activation.quantize(x).dequantize()
    for expert, rows in enumerate(slices(sizes)):
        assert same_bits(out[rows], values[rows] @ held.dequantize()[expert].t())


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
def test_tokens_behind_the_last_group_belong_to_none(recipe: str) -> None:
    sizes = (40, 0, 1, 50)
    x, w, g = exact_inputs(recipe, (*sizes[:3], 87))
    ends = offsets(sizes)
    found = run(recipe, x, w, g, ends, "reference")
    expected = whole_numbers(x[:91], w, g[:91], sizes)
    assert same_bits(found[0][:91], expected[0])
    assert same_bits(found[1][:91], expected[1])
    assert same_bits(found[2], expected[2])
    assert not found[0][91:].any()
    assert not found[1][91:].any()


@pytest.mark.parametrize(
    ("recipe", "how"), [("mxfp8", "low_precision"), ("int8_block", "low_precision"), ("int8_block", "reference")]
)
def test_what_is_dequantized_has_the_bytes_of_no_products_at_all(recipe: str, how: mode.Mode) -> None:
    """On a CPU, all of auto; and recipes without products in every mode."""
    x, w, g = random_inputs(SIZES["mixed"])
    for offs, shape in ((offsets(SIZES["mixed"]), ()), (None, (EXPERTS, 32))):
        one, back = (x.view(*shape, K), g.view(*shape, N)) if shape else (x, g)
        plain = run(recipe, one, w, back, offs, "dequantize")
        assert all(map(same_bits, run(recipe, one, w, back, offs, how), plain))


@pytest.mark.parametrize("multiple", [2, 16, 32, 48])
def test_groups_are_moved_to_whole_blocks(multiple: int) -> None:
    """Also more groups than rows of a block; tokens behind the last group are in blocks of their own."""
    sizes = [1, 0, multiple, multiple + 1, *[1] * 60]
    tokens = sum(sizes) + 3
    apart = Groups(offsets(tuple(sizes)), tokens).apart(multiple)
    assert apart is not None
    ends, starts, row = [], [], 0
    for size in (*sizes, 3):
        starts += range(row, row + size)
        row += -(-size // multiple) * multiple
        ends.append(row)
    assert apart.rows.tolist() == starts
    assert apart.ends.tolist() == ends[:-1]
    assert apart.ends.dtype == torch.int32
    assert ends[-1] <= apart.size <= tokens + (len(sizes) + 1) * multiple
    assert apart.size % multiple == 0
    moved = apart.spread(torch.ones(tokens, 1)).flatten()
    assert moved.nonzero().flatten().tolist() == starts


def test_rows_with_blocks_of_their_own_stay() -> None:
    assert Groups(offsets((5, 7)), 12).apart(1) is None
    together = {name: rows_together(module(name).LAYOUT, "rowwise") for name in WITH_KERNELS}
    assert together == {
        **{"fp8_current": 1, "fp8_rowwise": 1, "fp8_rowwise_all": 1},
        **{"mxfp8": 32, "mxfp8_2d": 32, "nvfp4": 16, "nvfp4_1d": 16},
    }


def test_scales_of_all_tokens_are_those_of_several_groups() -> None:
    """One for each column is; one for the tensor is meant to be."""
    assert shares_all_rows(module("fp8_rowwise").LAYOUT, "columnwise")
    assert not shares_all_rows(module("fp8_rowwise").LAYOUT, "rowwise")
    for name in ("fp8_current", "mxfp8", "nvfp4_1d"):
        assert not shares_all_rows(module(name).LAYOUT, "columnwise")


# -------------------------------------------------------------------------------------------------------------- kernels
@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """CPUs have all kernels: they read what cards would, as cards do. Of each call, whether it may add up fast."""
    fast: list[bool] = []

    def noted(function: Any) -> Any:
        return lambda *args: (fast.append(args[-1]), function(*args))[1]

    monkeypatch.setattr(choice, "not_here", lambda cards, device: "")
    monkeypatch.setattr(choice, "scaled_grouped_mm_v2_is_traced", True)
    monkeypatch.setattr(scaled_grouped_mm, "scaled_grouped_mm", noted(grouped_kernels.one_scale))
    monkeypatch.setattr(scaled_grouped_mm, "scaled_grouped_mm_v2", noted(grouped_kernels.two_scales))
    choice.plan_of.cache_clear()
    yield fast
    choice.plan_of.cache_clear()


@pytest.fixture
def a_card(kernels: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose products were measured, and another one of its compute capability."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a card")
    monkeypatch.setattr(measured, "capability_of", lambda device: (9, 0))
    sizes = {"recipe": "fp8_rowwise", "experts": 8, "n": 1024, "k": 2048}
    rows = [
        measured.Timed(card, (9, 0), product=product, tokens=8 * each, kernel=time, dequantized=100, **sizes)
        for card, product, each, time in (
            *(("a card", "forward", 64, 150), ("a card", "forward", 4096, 50), ("a card", "grad_input", 64, 100)),
            *(("another", "forward", 64, 50), ("another", "forward", 4096, 200)),
        )
    ]
    monkeypatch.setattr(measured, "table", lambda: tuple(rows))


def test_kernels_are_taken_where_they_were_measured_faster(a_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the nearest sizes and tokens of an expert; other recipes, products and capabilities, of which nothing is
    known, have what the card has."""

    def ways(recipe: str, experts: int, each: int) -> list[str]:
        sizes = choice.Sizes(experts, 1536, 2048, experts * each)
        cls = importlib.import_module(f"layoutc.recipes.{recipe}").Tensor
        names: tuple[Any, ...] = ("forward", "grad_input")
        found = [choice.choose(cls, name, sizes, torch.device("cuda"), "low_precision") for name in names]
        assert [one.way for one in found if not one.reason] == [one.way for one in found if one.way == "kernel"]
        return [one.way for one in found]

    assert ways("fp8_rowwise", 64, 100) == ["dequantize", "kernel"]
    assert ways("fp8_rowwise", 4, 1000) == ["kernel", "kernel"]
    assert ways("fp8_current", 64, 100)[0] == "kernel"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "another")
    choice.plan_of.cache_clear()
    assert ways("fp8_rowwise", 64, 100) == ["kernel", "kernel"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a third one")
    monkeypatch.setattr(measured, "capability_of", lambda device: (10, 0))
    choice.plan_of.cache_clear()
    assert ways("fp8_rowwise", 64, 100) == ["kernel", "kernel"]


def test_what_was_measured_slower_is_explained_and_is_no_missing_kernel(a_card: None) -> None:
    layer = experts("fp8_rowwise", torch.zeros(8, 1024, 2048))
    found = {row.product: row for row in layoutc.explain_products(layer, tokens=8 * 64, device="cuda")}
    assert (found["forward"].way, found["grad_input"].way) == ("dequantize", "kernel")
    expected = "the kernel is slower: for 8 experts of 1024x2048 and 512 tokens it took 150 us and dequantizing 100"
    assert found["forward"].reason == f"{expected}, on a card (layoutc bench --experts)"
    before = dict(layoutc.products_without_kernel())
    sizes = choice.Sizes(8, 1024, 2048, 8 * 64)
    choice.plan_of(type(layer.weight), sizes, torch.device("cuda"), "low_precision").note("forward")
    assert dict(layoutc.products_without_kernel()) == before


def test_what_was_measured_has_all_fields() -> None:
    """Of each card; times are positive."""
    assert all(row.kernel > 0 and row.dequantized > 0 and row.tokens >= row.experts for row in measured.table())


def test_bench_measures_each_product_either_way(kernels: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it prints is an entry of the table."""
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "SHAPES", ((4, 32, 64),))
    monkeypatch.setattr(bench, "TOKENS", (8,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bench.clocks, "rotated", lambda make, nbytes: float(make()().shape[1]))
    monkeypatch.setattr(bench, "RECIPES", ("fp8_rowwise_all", "fp8_current"))
    lines: list[str] = []
    found = bench.run(lines.append)
    rows = [measured.Timed(found["card"], tuple(found["capability"]), **row) for row in found["rows"]]
    assert [(row.recipe, row.product, row.kernel, row.dequantized) for row in rows] == [
        ("fp8_rowwise_all", "forward", 32.0, 32.0),
        ("fp8_rowwise_all", "grad_input", 64.0, 64.0),
        ("fp8_rowwise_all", "grad_weight", 32.0, 32.0),
        ("fp8_current", "forward", 32.0, 32.0),
    ]
    assert len(lines) == 4
    assert len(kernels) == 4


@each_groups
@pytest.mark.parametrize("recipe", WITH_KERNELS)
def test_kernels_read_what_was_quantized(recipe: str, sizes: tuple[int, ...], kernels: list[bool]) -> None:
    """Tiles of scales of groups and of experts, rows and strides: exact, and rounded once to bf16.

    Scales of tensors are multiplied by one another, which rounds.
    """
    rows = 128 if recipe == "fp8_rowwise_all" else 1  # uneven rows are not exact under scales of columns
    x, w, g = (uneven(one, by, by) for one, by in zip(exact_inputs(recipe, sizes), (rows, 32, rows), strict=True))
    ways = ways_of(recipe, sum(sizes), "cpu")
    assert ways[0] == "kernel"
    assert (ways[1] == "kernel") == (recipe != "fp8_current")  # whose gradients are e5m2
    found = run(recipe, x, w, g, offsets(sizes), "low_precision")
    for one, expected, way in zip(found, whole_numbers(x, w, g, sizes), ways, strict=True):
        if way == "kernel" and "nvfp4" in recipe:
            assert ((one - expected).abs() <= 2**-8 * expected.abs()).all()
        else:
            assert same_bits(one, expected.bfloat16().float() if way == "kernel" else expected)
    rows = module(recipe).LAYOUT.operands["rowwise"].scaling in ("RowWise", "TensorWise")
    assert kernels == [rows] * ways.count("kernel")  # forward and gradients


def test_kernels_multiply_batches(kernels: list[bool]) -> None:
    x, w, g = exact_inputs("fp8_rowwise", SIZES["equal"])
    x, w = uneven(x, 1, 1), uneven(w, 32, 2)
    found = run("fp8_rowwise", x.view(EXPERTS, 32, K), w, g.view(EXPERTS, 32, N), None, "low_precision")
    expected = whole_numbers(x, w, g, SIZES["equal"])
    assert same_bits(found[0].reshape(-1, N), expected[0].bfloat16().float())
    assert same_bits(found[1].reshape(-1, K), expected[1].bfloat16().float())


def ways_of(recipe: str, tokens: int, device: str) -> list[str]:
    sizes = choice.Sizes(EXPERTS, N, K, tokens)
    cls = module(recipe).Tensor
    return [choice.choose(cls, name, sizes, torch.device(device), "low_precision").way for name in choice.NAMES]


@pytest.mark.parametrize("tokens", [128, 50])
@pytest.mark.parametrize("recipe", WITH_KERNELS)
def test_what_kernels_get_passes_the_checks_of_torch(recipe: str, tokens: int) -> None:
    """On the meta device torch checks dtypes, shapes and strides as it does on a card."""
    held = make(recipe, EXPERTS, N, K).to("meta")
    x, g = (torch.empty(tokens, size, device="meta", dtype=torch.bfloat16) for size in (K, N))
    offs = torch.empty(EXPERTS, device="meta", dtype=torch.int32)
    is_traced = choice.scaled_grouped_mm_v2_is_traced or "nvfp4" not in recipe
    assert (ways_of(recipe, tokens, "meta")[0] == "kernel") == is_traced
    out, *saved = grouped.forward(x, held.transpose(1, 2), offs, "low_precision", "input")
    of_x, of_w = grouped.backward(g, held.transpose(1, 2), saved or [x], offs, "low_precision", True, "input")
    assert (out.shape, of_x.shape, of_w.shape) == ((tokens, N), (tokens, K), (EXPERTS, N, K))


def test_the_checks_of_torch_refuse_scales_of_another_shape() -> None:
    """That is, the test above would fail with tiles of all experts in one."""
    held = make("mxfp8", EXPERTS, N, K).to("meta")
    sizes = choice.Sizes(EXPERTS, N, K, 128)
    kernel: Any = choice.kernel(type(held), "forward")
    b = scaled_grouped_mm.experts(held.LAYOUT, "rowwise", held.buffers(swizzled=True), kernel, sizes)
    a = scaled_grouped_mm.tokens(held.LAYOUT, make("mxfp8", 128, K).to("meta").buffers(swizzled=True), kernel)
    ends = torch.empty(EXPERTS, device="meta", dtype=torch.int32)
    assert scaled_grouped_mm.multiply(a, b, ends, kernel, torch.bfloat16).shape == (128, N)
    wrong = b._replace(scale=b.scale.view(1, -1).expand(EXPERTS, -1))
    with pytest.raises(RuntimeError, match="to have scale shape of"):
        scaled_grouped_mm.multiply(a, wrong, ends, kernel, torch.bfloat16)


@pytest.mark.parametrize("recipe", WITH_PRODUCTS)
def test_generated_code_states_the_kernels_of_the_plan(recipe: str) -> None:
    from numpy_models import recipe_layout

    from layoutc.plan import products as plan

    weight_layout = recipe_layout(recipe)
    assert weight_layout.others is not None
    others = {name: recipe_layout(name) for name in (weight_layout.others.activation, weight_layout.others.gradient)}
    found = plan.products_of(weight_layout, others)
    assert found is not None
    for one in found.products:
        if one.name in weight_layout.others.dequantized:
            assert one.grouped == ""
            continue
        kernel = choice.kernel(module(recipe).Tensor, one.name)
        if isinstance(one.grouped, str):
            assert kernel == (one.grouped or one.reason)
        else:
            assert isinstance(kernel, Grouped)
            cards = one.grouped.cards
            assert (kernel.kind, tuple(kernel.cards)) == (one.grouped.kind, (cards.least, cards.below, cards.cpu))


def test_what_no_linear_layer_multiplies_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = module("mxfp8").Tensor
    stated = cls.LAYOUT.products._replace(forward="its operands do not match")
    monkeypatch.setattr(cls, "LAYOUT", replace(cls.LAYOUT, products=stated))
    assert choice.kernel(cls, "forward") == "its operands do not match"
    assert isinstance(choice.kernel(cls, "grad_input"), Grouped)


@pytest.mark.parametrize(
    ("recipe", "name", "sizes", "words"),
    [
        ("fp8_rowwise", "forward", (4, 24, 256), "a dim of experts in multiples of 16, not 24"),
        ("fp8_rowwise", "grad_input", (4, 24, 256), "a contracted dim of experts in multiples of 16, not 24"),
        ("mxfp8", "forward", (4, 160, 256), "a dim of experts in multiples of 128, not 160"),
        ("mxfp8", "grad_input", (4, 160, 256), "a contracted dim of experts in multiples of 128, not 160"),
        ("mxfp8", "forward", (1024, 128, 256), "up to 1023 experts, not 1024"),
        ("fp8_block", "forward", (4, 128, 256), "does not take BlockWise1x128 by BlockWise128x128"),
        ("fp8_current", "grad_input", (4, 128, 256), "scaled_grouped_mm does not take float8_e5m2"),
        ("fp8_rowwise", "grad_weight", (4, 128, 256), "the spec says so"),
        ("int8_block", "forward", (4, 128, 256), "the recipe names none for activations"),
        ("mxfp8", "grad_weight", (4, 128, 256), "it contracts groups of tokens, and no kernel is called for that"),
    ],
)
def test_reasons(recipe: str, name: Any, sizes: tuple[int, ...], words: str) -> None:
    shape = choice.Sizes(*sizes, 128)
    chosen = choice.choose(module(recipe).Tensor, name, shape, torch.device("meta"), "low_precision")
    assert chosen.way == "dequantize"
    assert words in chosen.reason


@pytest.mark.parametrize(
    ("capability", "served"),
    [
        ((8, 9), set()),
        ((9, 0), {"fp8_current", "fp8_rowwise", "fp8_rowwise_all"}),
        ((10, 0), {"mxfp8", "mxfp8_2d", "nvfp4", "nvfp4_1d"}),
        ((12, 0), set()),
    ],
)
def test_cards(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], served: set[str]) -> None:
    monkeypatch.setattr(measured, "capability_of", lambda device: capability)
    monkeypatch.setattr(measured, "table", tuple)
    monkeypatch.setattr(choice, "scaled_grouped_mm_v2_is_traced", True)
    choice.plan_of.cache_clear()
    assert {recipe for recipe in WITH_KERNELS if ways_of(recipe, 128, "cuda:0")[0] == "kernel"} == served
    choice.plan_of.cache_clear()


# -------------------------------------------------------------------------------- autograd, compiled, as torch says
COMPILED = ("fp8_current", "fp8_rowwise", "mxfp8", "nvfp4")


@pytest.mark.sample(1)
@pytest.mark.parametrize(  # every pair of the three
    ("recipe", "use", "batched"),
    [
        (recipe, use, (number + turn) % 2 == 1)
        for number, recipe in enumerate(COMPILED)
        for turn, use in enumerate(("quantize_", "cast_on_gather_"))
    ],
)
def test_compiled_equals_eager(recipe: str, use: str, batched: bool) -> None:
    """One graph; every byte of the output and of the gradients, also under activation checkpointing."""
    offs = None if batched else offsets(SIZES["mixed"])
    shape = (EXPERTS, 32, K) if batched else (128, K)

    def made(compiled: bool, recomputed: bool) -> list[Tensor]:
        layer = experts(recipe, weight(EXPERTS, N, K, dtype=torch.bfloat16), use)
        torch.manual_seed(0)
        torch._dynamo.reset()
        called: Any = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        x = weight(*shape, seed=1, dtype=torch.bfloat16).requires_grad_()
        with product_modes.products("reference"):
            out = checkpoint(called, x, offs, use_reentrant=False) if recomputed else called(x, offs)
            out.square().mean().backward()
        assert x.grad is not None
        assert layer.weight.grad is not None
        return [out.detach(), x.grad, layer.weight.grad]

    expected = made(False, False)
    for compiled, recomputed in ((True, False), (False, True), (True, True)):
        assert all(map(same_bits, made(compiled, recomputed), expected))


@pytest.mark.thorough
def test_a_graph_of_any_number_of_tokens() -> None:
    layer = experts("mxfp8", weight(EXPERTS, N, K, dtype=torch.bfloat16))
    torch._dynamo.reset()
    called: Any = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    with product_modes.products("reference"):
        for sizes in ((40, 0, 1, 87), (3, 4, 5, 6), (0, 200, 0, 1)):
            x, _, g = random_inputs(sizes, torch.bfloat16)
            one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
            out, expected = called(one, offsets(sizes)), layer(other, offsets(sizes))
            out.backward(g)
            compiled, layer.weight.grad = layer.weight.grad, None
            expected.backward(g)
            assert same_bits(out.detach(), expected.detach())
            assert one.grad is not None
            assert other.grad is not None
            assert same_bits(one.grad, other.grad)
            assert same_bits(compiled, layer.weight.grad)
            layer.weight.grad = None


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
def test_autocast_decides_the_dtype_and_nothing_else(recipe: str) -> None:
    """Of torch.bmm; F.grouped_mm is not under autocast."""
    layer = experts(recipe, weight(EXPERTS, N, K))
    x = weight(EXPERTS, 32, K, seed=1)
    with product_modes.products("reference"):
        expected = layer(x.bfloat16(), None)
        expected.float().square().sum().backward()
        of_w, layer.weight.grad = layer.weight.grad, None
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x, None)
            out.float().square().sum().backward()
            tokens, offs = x.view(-1, K), offsets(SIZES["equal"])
            grouped_out = layer(tokens, offs)
        assert same_bits(out.detach(), expected.detach())
        assert same_bits(layer.weight.grad, of_w)
        assert same_bits(grouped_out.detach(), layer(tokens, offs).detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    """What is multiplied in fp32 is rounded once."""
    x, w, g = random_inputs(SIZES["mixed"], dtype)
    found = run("mxfp8", x, w, g, offsets(SIZES["mixed"]), "reference")
    expected = run("mxfp8", x.float(), w.float(), g.float(), offsets(SIZES["mixed"]), "reference")
    assert all(same_bits(one, other.to(dtype)) for one, other in zip(found, expected, strict=True))


def test_without_gradients_and_in_inference_mode() -> None:
    layer = experts("mxfp8", weight(EXPERTS, N, K))
    x, _, _ = random_inputs(SIZES["mixed"])
    offs = offsets(SIZES["mixed"])
    with product_modes.products("reference"):
        expected = layer(x, offs).detach()
        with torch.no_grad():
            assert same_bits(layer(x, offs), expected)
        with torch.inference_mode():
            assert same_bits(layer(x, offs).clone(), expected)
        layer.weight.requires_grad_(False)
        x.requires_grad_()
        layer(x, offs).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None


def test_gradients_have_no_gradients() -> None:
    layer = experts("mxfp8", weight(EXPERTS, N, K))
    x = weight(EXPERTS, 8, K).requires_grad_()
    with product_modes.products("reference"):
        (of_x,) = torch.autograd.grad(layer(x, None).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            of_x.sum().backward()


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_what_backward_needs_is_saved_quantized(recipe: str) -> None:
    """Beside the weight and the offsets, each group in blocks of its own."""
    layer = experts(recipe, weight(EXPERTS, N, K, dtype=torch.bfloat16))
    sizes = (32, 0, 32, 64)  # whole blocks
    x = random_inputs(sizes, torch.bfloat16)[0].requires_grad_()
    offs, saved = offsets(sizes), []
    with (
        product_modes.products("reference"),
        saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one),
    ):
        layer(x, offs)
    kept = sum(one.nbytes for one in saved if type(one) is Tensor and one is not offs)
    activation = module(layer.weight.LAYOUT.products.activation[0])
    rows = lcm(activation.LAYOUT.multiple_m, activation.LAYOUT.block_rows)
    most = activation.quantize(torch.zeros(128 + (EXPERTS + 1) * rows, K), orientations="columnwise")
    assert kept <= sum(plane.nbytes for plane in most.planes().values())
    assert all(one is not x for one in saved)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("recipe", WITH_PRODUCTS)
def test_gradients_of_saved_inputs_are_those_of_saved_codes(
    recipe: str, batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped.operators, "draw_seed", lambda x: torch.tensor([5]))
    sizes = SIZES["equal" if batched else "mixed"]
    x, w, g = weight(sum(sizes), K, seed=1), weight(EXPERTS, N, K, seed=2), weight(sum(sizes), N, seed=3)
    offs = None if batched else offsets(sizes)
    x, g = (one.reshape(EXPERTS, -1, one.shape[-1]) if batched else one for one in (x, g))
    made: list[tuple[Tensor, ...]] = []
    for saves in ("quantized", "input"):
        with monkeypatch.context() as patch:
            patch.setattr(mode, "saves", lambda in_graph, saves=saves: saves)
            made.append(run(recipe, x, w, g, offs, "reference"))
    assert all(same_bits(*both) for both in zip(*made, strict=True))


def test_tokens_are_quantized_once_for_all_weights_that_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And anew for other groups, where those decide what shares a block."""
    layers = [experts("mxfp8", weight(EXPERTS, N, K, seed=seed)) for seed in range(2)]
    read: list[Tensor] = []
    quantize = grouped.weights.quantize

    def counted(cls: Any, x: Tensor, **options: Any) -> Any:
        read.append(x)
        return quantize(cls, x, **options)

    monkeypatch.setattr(grouped.weights, "quantize", counted)
    x, _, _ = random_inputs(SIZES["mixed"])
    offs, others = offsets(SIZES["mixed"]), offsets((10, 20, 30, 68))
    with product_modes.products("reference"):
        first = [layer(x, offs) for layer in layers]
        assert len(read) == 2  # rowwise and columnwise
        second = [layer(x, others) for layer in layers]
        assert len(read) == 4
        others.copy_(offs)
        third = [layer(x, others) for layer in layers]
        assert len(read) == 6
        alone = [layer(x.clone(), offs) for layer in layers]
        del read[:]
        batches = x.view(EXPERTS, 32, K)
        batched = [layer(batches, None) for layer in layers]
        assert len(read) == 2
        assert same_bits(batched[1].detach(), layers[1](batches.clone(), None).detach())
    for one, other, again in zip(first, third, alone, strict=True):
        assert same_bits(one.detach(), other.detach())
        assert same_bits(one.detach(), again.detach())
    assert not same_bits(first[0].detach(), second[0].detach())


def test_products_without_a_kernel_are_counted() -> None:
    x, w, g = random_inputs(SIZES["mixed"])
    offs = offsets(SIZES["mixed"])
    before = layoutc.products_without_kernel()
    run("fp8_rowwise", x, w, g, offs, "low_precision")  # whose spec dequantizes one
    run("fp8_block", x, w, g, offs, "low_precision")
    run("int8_block", x, w, g, offs, "low_precision")  # whose spec has none
    run("mxfp8", x, w, g, offs, "dequantize")
    reason = "scaled_grouped_mm does not take BlockWise1x128 by BlockWise128x128"
    assert layoutc.products_without_kernel() - before == {
        "fp8_rowwise forward: CPUs have no kernel for it": 1,
        "fp8_rowwise grad_input: CPUs have no kernel for it": 1,
        f"fp8_block forward: {reason}": 1,
        f"fp8_block grad_input: {reason}": 1,
        "fp8_block grad_weight: it contracts groups of tokens, and no kernel is called for that": 1,
    }


def test_other_products_are_those_of_torch() -> None:
    """Wrong sizes, no tokens."""
    held = make("mxfp8", EXPERTS, N, K)
    x, offs = weight(128, K), offsets(SIZES["mixed"])
    before = layoutc.products_without_kernel()
    with product_modes.products("reference"):
        with pytest.raises(RuntimeError, match="contraction dimension"):
            F.grouped_mm(x[:, :-16], held.transpose(1, 2), offs=offs)
        with pytest.raises(RuntimeError, match=r"[Oo]ffsets"):
            F.grouped_mm(x, held.transpose(1, 2))
        assert F.grouped_mm(x[:0], held.transpose(1, 2), offs=torch.zeros(EXPERTS, dtype=torch.int32)).shape == (0, N)
    assert layoutc.products_without_kernel() - before == {"mxfp8 forward: there are no tokens": 1}


def test_pieces_of_weights() -> None:
    """Some of the experts; and rows that cut blocks, which are dequantized."""
    held = make("fp8_block", EXPERTS, N, K)
    x, offs = weight(128, K), offsets(SIZES["mixed"])
    with product_modes.products("reference"):
        whole = F.grouped_mm(x, held.transpose(1, 2), offs=offs)
        some = F.grouped_mm(x[40:], held[2:].transpose(1, 2), offs=offs[2:] - 40)
        assert same_bits(some, whole[40:])
        cut = make("fp8_block", EXPERTS, 96, K)[1:3]
        assert cut.store.halo.rows
        before = layoutc.products_without_kernel()
        ends = offsets((40, 88))
        made = F.grouped_mm(x, cut.transpose(1, 2), offs=ends)
        assert same_bits(made, F.grouped_mm(x, cut.dequantize().transpose(1, 2), offs=ends))
    assert layoutc.products_without_kernel() - before == {"fp8_block forward: the weight cuts blocks": 1}


def test_explain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict({"experts": Experts(weight(EXPERTS, N, K)), "head": nn.Linear(K, N, bias=False)})
    layoutc.quantize_(model, "fp8_rowwise", filter_fn=lambda *_: True)
    rows = layoutc.explain_products(model, device="meta")
    assert [str(row) for row in rows] == [
        "experts.weight 4x128x256 fp8_rowwise forward: scaled_grouped_mm, RowWise by RowWise",
        "experts.weight 4x128x256 fp8_rowwise grad_input: scaled_grouped_mm, RowWise by RowWise",
        "experts.weight 4x128x256 fp8_rowwise grad_weight: dequantize: the spec says so",
        "head.weight 128x256 fp8_rowwise forward: scaled_mm, RowWise by RowWise",
        "head.weight 128x256 fp8_rowwise grad_input: scaled_mm, RowWise by RowWise",
        "head.weight 128x256 fp8_rowwise grad_weight: dequantize: the spec says so",
    ]
    low = layoutc.explain_products(model, device="cpu", mode="reference")
    assert [row.way for row in low[:3]] == ["reference", "reference", "dequantize"]

"""Parameters that are chosen by name, whatever module has them; and what `coverage` says of a model."""

from __future__ import annotations

import copy
from typing import Any

import product_modes
import pytest
import torch
import torch.nn.functional as F
from models_of_experts import EXPERTS, INNER, WIDTH, Gated, Joined, Mixture, batch
from quantized_cases import module, same_bits
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import layoutc
from layoutc.runtime.weight.tensor import QuantizedTensor

USES = ("quantize_", "cast_on_gather_")
W = ["*experts.w?"]
NAMES = ["experts.w1", "experts.w2", "experts.w3"]


def build(experts: Any = Gated, **options: Any) -> Mixture:
    torch.manual_seed(0)
    return Mixture(experts, **options)


def classes(model: nn.Module) -> dict[str, str]:
    """The class of each parameter that is no plain one."""
    return {name: type(p).__name__ for name, p in model.named_parameters() if hasattr(p, "LAYOUT")}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"param_filter": W}, NAMES),
        ({"param_filter": ["mixed.weight", *W]}, ["mixed.weight", *NAMES]),
        ({"param_filter": ["*.weight", "*.w[13]"]}, ["embed.weight", "mixed.weight", *NAMES[::2], "head.weight"]),
        ({"param_filter": lambda name, param: param.dim() == 3 and param.shape[1] == INNER}, NAMES[::2]),
        (
            {"param_filter": ["*"], "filter_fn": lambda one, _: isinstance(one, (nn.Linear, Gated))},
            ["mixed.weight", *NAMES, "head.weight"],
        ),
        ({"param_filter": ["*"], "filter_fn": lambda _, name: name == "mixed"}, ["mixed.weight"]),
        ({}, ["mixed.weight", "head.weight"]),
    ],
)
def test_what_is_chosen(use: str, filters: dict[str, Any], expected: list[str]) -> None:
    """Vectors are never asked for; the default is what it was."""
    model = build()
    assert getattr(layoutc, use)(model, "fp8_current", **filters) == expected
    assert list(classes(model)) == expected
    with pytest.raises(ValueError, match="all others that were chosen are quantized already"):
        getattr(layoutc, use)(model, "fp8_current", **filters)


@pytest.mark.parametrize("use", [*USES, "quantized_init"])
@pytest.mark.parametrize(
    ("filters", "match"),
    [
        ({"param_filter": lambda *_: False}, "param_filter chooses no weight of the model, which has 6 of two dims"),
        ({"filter_fn": lambda *_: False}, "filter_fn chooses no weight of the model, which has 6 .*: embed.weight, "),
    ],
)
def test_filters_that_choose_nothing_are_refused(use: str, filters: dict[str, Any], match: str) -> None:
    if use == "quantized_init":
        with pytest.raises(ValueError, match=match), layoutc.quantized_init("fp8_current", **filters):
            Mixture()
        return
    with pytest.raises(ValueError, match=match):
        getattr(layoutc, use)(build(), "fp8_current", **filters)
    with pytest.raises(ValueError, match=r"none of its modules is an nn\.Linear, and the default chooses no weight"):
        getattr(layoutc, use)(nn.Sequential(nn.LayerNorm(4)), "fp8_current")
    for wrong in (nn.Linear(4, 4).parameters(), "fp8_current"):
        with pytest.raises(TypeError, match=rf"{use} takes a model \(nn.Module\), and got {type(wrong).__name__}"):
            getattr(layoutc, use)(wrong, nn.Linear(4, 4))


@pytest.mark.parametrize("use", USES)
def test_weights_of_another_package_are_refused(use: str) -> None:
    """They would lose what their class does: torchao's BitNet and INT8 training, its FP8 gather."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    plain = model[0].weight
    model[1].weight = nn.Parameter(TwoTensor(torch.ones(64, 64), torch.ones(64, 64)))
    with pytest.raises(ValueError, match=rf"1\.weight has torch's class TwoTensor, and {use} would .* name != '1'"):
        getattr(layoutc, use)(model, "mxfp8")
    assert model[0].weight is plain
    assert getattr(layoutc, use)(model, "mxfp8", filter_fn=lambda _, name: name == "0") == ["0.weight"]
    assert [row.reason for row in layoutc.coverage(model)] == ["", "torch's class TwoTensor"]


@pytest.mark.parametrize("use", USES)
def test_weights_without_a_shape_are_refused(use: str) -> None:
    model = nn.Sequential(nn.LazyLinear(64, bias=False))
    with pytest.raises(ValueError, match=f"0.weight has no shape yet: run the model once, on an input, before {use}"):
        getattr(layoutc, use)(model, "mxfp8")
    model(torch.ones(1, 64))
    assert getattr(layoutc, use)(model, "mxfp8") == ["0.weight"]


@pytest.mark.parametrize(("count", "shown"), [(4, "0.weight, 1.weight, 2.weight, 3.weight"), (5, "3.weight, ...")])
def test_four_names_are_shown_to_a_pattern_that_fits_none(count: int, shown: str) -> None:
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(count)])
    with pytest.raises(ValueError, match="no parameter of 2 or 3 dims has a name like") as caught:
        layoutc.quantize_(model, "mxfp8", param_filter=["*.w"])
    assert str(caught.value).endswith(shown)


def test_models_that_are_built_quantized() -> None:
    torch.manual_seed(0)
    with layoutc.quantized_init("mxfp8", param_filter=W):
        model = Mixture()
    expected = build()
    layoutc.quantize_(expected, "mxfp8", param_filter=W)
    assert list(classes(model)) == NAMES
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
    with torch.device("meta"), layoutc.quantized_init("mxfp8", param_filter=lambda name, _: "experts" in name):
        model = Mixture()
    assert list(classes(model)) == NAMES
    with pytest.raises(ValueError, match="a name like"), layoutc.quantized_init("mxfp8", param_filter=["*.gate"]):
        model = Mixture()
    assert classes(model) == {}


def test_mistakes_change_nothing() -> None:
    model = build()
    plain = copy.deepcopy(model.state_dict())

    def refused(message: str, kind: type[Exception] = ValueError, **filters: Any) -> None:
        for use in USES:
            with pytest.raises(kind, match=message):
                getattr(layoutc, use)(model, "mxfp8", **filters)
        assert classes(model) == {}
        assert all(same_bits(plain[name], one) for name, one in model.state_dict().items())

    refused(
        r"no parameter of 2 or 3 dims has a name like '\*.w4'; there are 6: embed.weight, ", param_filter=[*W, "*.w4"]
    )
    refused("has a name like 'norm.weight'", param_filter=["norm.weight"])
    refused(r"param_filter takes a list of patterns or a function: write \['\*.w1'\]", TypeError, param_filter="*.w1")
    without = r"param_filter=lambda name, _: name.endswith\('weight'\) and name != 'head.weight'"
    refused(
        f"head.weight: mxfp8 takes rows in multiples of 32 .*To leave it plain, pass .*{without}",
        param_filter=["*.w1", "head.weight"],
    )
    refused(r"norm.weight: .*such as .*isinstance\(module, nn.Linear\) and \.\.\.", filter_fn=lambda *_: True)
    model.experts.w1 = nn.Parameter(model.experts.w1.detach().double())
    plain = copy.deepcopy(model.state_dict())
    refused("experts.w1: mxfp8 quantizes float32, bfloat16 and float16, not torch.float64", param_filter=W)
    model.experts.w1 = model.experts.w3
    plain = copy.deepcopy(model.state_dict())
    without = "To leave it plain, pass .* and name != 'experts.w3'"
    refused(f"experts.w3 is tied to experts.w1, which param_filter does not choose.*{without}", param_filter=["*.w3"])
    assert layoutc.quantize_(model, "mxfp8", param_filter=["*.w[13]"]) == ["experts.w1", "experts.w3"]
    assert model.experts.w1 is model.experts.w3


@pytest.mark.parametrize("use", USES)
def test_experts_by_name_multiply_as_weights_do(use: str) -> None:
    """To the bit what weights that are quantized by hand give, in low precision and without."""
    model = build(dtype=torch.bfloat16)
    by_hand = copy.deepcopy(model)
    for name in ("w1", "w2", "w3"):
        held = module("mxfp8").quantize(getattr(by_hand.experts, name).detach())
        setattr(by_hand.experts, name, nn.Parameter(held))
    getattr(layoutc, use)(model, "mxfp8", param_filter=W)
    seen = []
    for how in ("dequantize", "reference"):
        for one in (model, by_hand):
            one.zero_grad()
            with product_modes.products(how):  # type: ignore[arg-type]
                x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
                out = one.experts(x, batch(0)[1])
                out.square().mean().backward()
            seen.append([out.detach(), x.grad, *(p.grad for p in one.experts.parameters())])
    assert all(map(same_bits, seen[0], seen[1]))
    assert all(map(same_bits, seen[2], seen[3]))
    assert not any(map(same_bits, seen[0], seen[2]))


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("transposed", [False, True])
def test_joined_experts(use: str, transposed: bool) -> None:
    """Biases stay; both ways to store a weight give the product of the values that it has."""
    model = build(Joined, transposed=transposed)
    getattr(layoutc, use)(model, "fp8_block", param_filter=["*_proj"])
    assert list(classes(model)) == ["experts.gate_up_proj", "experts.down_proj"]
    expected = build(Joined, transposed=transposed)
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            held = module("fp8_block").quantize(getattr(expected.experts, name).detach())
            getattr(expected.experts, name).copy_(held.dequantize())
    before = layoutc.implicit_dequantizes()
    found = [one(*batch(0)) for one in (model, expected)]
    assert layoutc.implicit_dequantizes() == before
    assert same_bits(*(one.detach() for one in found))
    for one in found:
        one.square().mean().backward()
    assert same_bits(model.mixed.weight.grad, expected.mixed.weight.grad)
    assert same_bits(model.experts.down_proj.grad, expected.experts.down_proj.grad)
    x = torch.randn(5, WIDTH)
    w = model.experts.gate_up_proj[1]
    product = x @ w if transposed else F.linear(x, w)  # expert by expert
    assert torch.equal(
        product, x @ (expected.experts.gate_up_proj[1] if transposed else expected.experts.gate_up_proj[1].t())
    )


def test_state_dicts_of_parameters_by_name() -> None:
    """Quantized ones stay so where plain values are assigned; those of weights that are cast are plain."""
    plain = build().state_dict()
    model = build()
    layoutc.quantize_(model, "mxfp8", param_filter=W)
    layoutc.cast_on_gather_(model, "mxfp8", param_filter=["mixed.weight"])
    state = model.state_dict()
    assert {name for name, one in state.items() if isinstance(one, QuantizedTensor)} == set(NAMES)
    assert type(state["mixed.weight"]) is torch.Tensor
    kinds = classes(model)
    model.load_state_dict(plain, assign=True)
    assert classes(model) == kinds
    other = build()
    layoutc.cast_on_gather_(other, "mxfp8", param_filter=W)
    assert all(same_bits(one, plain[name]) for name, one in other.state_dict().items())
    kinds = classes(other)
    other.load_state_dict(plain, assign=True)
    assert classes(other) == kinds


def test_two_recipes_in_one_module_train() -> None:
    model = build()
    layoutc.quantize_(model, "mxfp8", param_filter=["*.w1"])
    layoutc.quantize_(model, "fp8_block", param_filter=["*.w[23]"])
    assert set(classes(model).values()) == {"MXFP8Tensor", "FP8BlockTensor"}
    assert len(model.experts._load_state_dict_pre_hooks) == 1  # which serves all of them
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(*batch(0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True)


def test_set_products_takes_modules_of_experts() -> None:
    model = build()
    layoutc.quantize_(model, "mxfp8", param_filter=["mixed.weight", *W])
    chosen = product_modes.set_products_(model, "reference", filter_fn=lambda one, _: isinstance(one, Gated))
    assert chosen == NAMES
    own = {row.name: product_modes.named(row.own_mode) for row in layoutc.explain_products(model)}
    assert own == {"mixed.weight": None, **dict.fromkeys(NAMES, "reference")}


# ------------------------------------------------------------------------------------------------------------ coverage
def test_coverage_is_a_table() -> None:
    model = build()
    layoutc.quantize_(model, "mxfp8", param_filter=["*.w[12]"])
    layoutc.cast_on_gather_(model, "mxfp8", param_filter=["mixed.weight"])
    of = layoutc.coverage(model)
    experts = EXPERTS * INNER * WIDTH
    assert (of.quantized, of.elements) == (2 * experts + WIDTH * WIDTH, 3 * experts + WIDTH * (WIDTH + 36))
    assert of.share == of.quantized / of.elements
    assert len(of) == len(list(of)) == len(list(model.parameters()))
    assert str(of).splitlines() == [
        "36,864 of 55,552 elements of linear layers and experts (66.4%)",
        "  embed.weight  32x64     2,048   plain            of Embedding",
        "  norm.weight   64        64      plain            1 dim",
        "  norm.bias     64        64      plain            1 dim",
        "  mixed.weight  64x64     4,096   mxfp8 on gather",
        "  mixed.bias    64        64      plain            1 dim",
        "  experts.w1    2x128x64  16,384  mxfp8",
        "  experts.w2    2x64x128  16,384  mxfp8",
        "  experts.w3    2x128x64  16,384  plain            not picked",
        "  head.weight   36x64     2,304   plain            not picked, and mxfp8 takes rows in multiples of 32 and "
        "columns in multiples of 32",
    ]
    assert str(of.rows[3]) == "mixed.weight 64x64 4,096 mxfp8 on gather"


def test_coverage_of_a_model_that_nothing_was_chosen_of() -> None:
    model = build(Joined)
    model.experts.down_proj = nn.Parameter(model.experts.down_proj.detach().double())
    of = {row.name: row for row in layoutc.coverage(model, "fp8_block")}
    assert of["experts.gate_up_proj"].reason == "not picked"
    assert of["experts.down_proj"].reason == "float64 is not float32, bfloat16 or float16"
    assert (of["experts.down_proj_bias"].reason, of["experts.down_proj_bias"].is_weight) == ("a bias", False)
    assert of["head.weight"].reason == "not picked"  # blocks at the edge may be short
    assert {row.kind for row in of.values()} == {"plain"}
    assert layoutc.coverage(model).share == 0.0
    assert layoutc.coverage(nn.LayerNorm(4)).share == 0.0
    assert str(layoutc.coverage(nn.ReLU())) == "0 of 0 elements of linear layers and experts (0.0%)"


def test_coverage_counts_a_shared_weight_once() -> None:
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64, bias=False))
    model[0].weight = model[1].weight
    (row,) = layoutc.coverage(model)
    assert (row.name, row.is_weight, row.reason) == ("0.weight", True, "not picked")


@pytest.mark.parametrize("said", [None, True, False])
def test_coverage_says_what_experts_that_are_read_by_columns_cost(said: bool | None) -> None:
    """By what transformers' modules say of themselves, else by the shapes of the pair."""
    for transposed in (True, False):
        for recipe in ("mxfp8", "fp8_block"):
            model = build(Joined, transposed=transposed)
            if said is not None:
                model.experts.is_transposed = said
            layoutc.quantize_(model, recipe, param_filter=["*_proj"])
            reasons = {row.name: row.reason for row in layoutc.coverage(model) if row.kind == "quantized"}
            assert set(reasons) == {"experts.gate_up_proj", "experts.down_proj"}
            expected = ""
            if recipe == "mxfp8" and (transposed if said is None else said):
                expected = "read as x @ w: under FSDP2 each pass also gathers the planes of the other one, and "
                expected += "overlaps nothing"
            assert set(reasons.values()) == {expected}

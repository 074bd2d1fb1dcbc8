"""Weights that choose by themselves how they are multiplied: what follows the choice, and what keeps it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import product_modes
import pytest
import torch
import torch.nn.functional as F
from quantized_cases import same_bits, weight
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import layoutc
from layoutc.conformance.as_fsdp2 import called
from layoutc.runtime import product_mode
from layoutc.runtime.weight import flattening

TOKENS, WIDTH = 128, 256
USES = ("quantize_", "cast_on_gather_")


class Block(nn.Module):
    """Three weights read the same activation, and a fourth what becomes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, width) -> (tokens, width)."""
        made: Tensor = self.out(F.gelu(self.q(x) + self.k(x)) * self.v(x))
        return made


def build(recipe: str = "mxfp8", use: str = "quantize_", blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    getattr(layoutc, use)(model, recipe)
    return model


def of(model: nn.Module) -> list[Any]:
    """The choice of each weight."""
    return [
        product_modes.named(module.weight.own_products) for module in model.modules() if isinstance(module, nn.Linear)
    ]


def mix(model: nn.Module) -> list[str]:
    """The middle block's k, and the first block, apart from the rest."""
    product_modes.set_products_(model, "reference", filter_fn=lambda _, name: name.startswith("1."))
    return product_modes.set_products_(
        model, "dequantize", filter_fn=lambda _, name: name.startswith("0.") or name == "1.k"
    )


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The output and the gradients of the input and of all parameters."""
    x = weight(TOKENS, WIDTH, seed=1, dtype=dtype).requires_grad_()
    out = call(x)
    out.square().mean().backward()
    found = [out.detach(), x.grad, *(param.grad for param in model.parameters())]
    model.zero_grad()
    assert all(one is not None for one in found)
    return found  # type: ignore[return-value]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("recipe", "use"), [("fp8_current", "quantize_"), ("mxfp8", "cast_on_gather_"), ("nvfp4", "quantize_")]
)
def test_a_mix_is_each_layer_in_its_own_mode(recipe: str, use: str) -> None:
    """To the bit what the context, set anew around every layer, gives; whatever the context around all of it is."""
    by_hand, model = build(recipe, use), build(recipe, use)
    chosen = dict.fromkeys(("1.q", "1.v", "1.out"), "reference") | {
        f"0.{name}": "dequantize" for name in ["q", "k", "v", "out"]
    }
    chosen["1.k"] = "dequantize"
    assert mix(model) == [*(f"0.{name}.weight" for name in ("q", "k", "v", "out")), "1.k.weight"]
    for around in ("dequantize", "reference", "low_precision"):
        for name, module in by_hand.named_modules():
            if isinstance(module, nn.Linear):
                how = chosen.get(name, around)
                module.forward = in_mode(how, nn.Linear.forward.__get__(module))  # type: ignore[method-assign]
        torch.manual_seed(3)
        expected = gradients(by_hand, by_hand)
        torch.manual_seed(3)
        with product_modes.products(around):  # type: ignore[arg-type]
            assert all(map(same_bits, gradients(model, model), expected))


def in_mode(how: Any, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`forward` in a mode, which autograd functions of products remember for backward."""

    def called(x: Tensor) -> Tensor:
        with product_modes.products(how):
            return forward(x)

    return called


@pytest.mark.thorough
@pytest.mark.parametrize(("recipe", "use"), [("fp8_current", "cast_on_gather_"), ("mxfp8", "quantize_")])
def test_a_mix_compiled_or_recomputed_equals_eager(recipe: str, use: str) -> None:
    """One graph for all choices."""
    model = build(recipe, use)
    mix(model)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    calls: list[Callable[[Tensor], Tensor]] = [
        compiled,
        lambda x: checkpoint(model, x, use_reentrant=False),
        lambda x: checkpoint(compiled, x, use_reentrant=False),
    ]
    with layoutc.products("low_precision"):
        expected = gradients(model, model)
        for call in calls:
            assert all(map(same_bits, gradients(model, call), expected))


def test_a_choice_that_changes_is_traced_anew_and_wins_over_the_context() -> None:
    model = build(blocks=1)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, seen = weight(TOKENS, WIDTH), []
    with torch.no_grad():
        for around in ("dequantize", "reference"):
            with product_modes.products(around):  # type: ignore[arg-type]
                for own in (None, "reference", "dequantize"):
                    product_modes.set_products_(model, own)  # type: ignore[arg-type]
                    seen.append(compiled(x))
                    assert same_bits(seen[-1], model(x))
    dequantized, low = seen[0], seen[1]
    assert not same_bits(dequantized, low)
    assert all(map(same_bits, seen, (dequantized, low, dequantized, low, low, dequantized)))


def test_compiled_graphs_on_disk_know_the_choice() -> None:
    """A key for each choice, and for each mode of all where there is none: what a graph depends on."""
    for use in USES:
        held: Any = build(use=use, blocks=1)[0].q.weight
        keys = []
        for around in ("dequantize", "reference"):
            with product_modes.products(around):  # type: ignore[arg-type]
                for own in (None, "reference", "dequantize"):
                    held.own_products = None if own is None else product_modes.OWN[own]
                    keys.append(held._stable_hash_for_caching())
        assert (keys[1:3], len(set(keys))) == (keys[4:], 4)


@pytest.mark.parametrize("use", USES)
def test_what_keeps_a_choice(use: str) -> None:
    model = build(use=use, blocks=1)
    product_modes.set_products_(model, "reference", filter_fn=lambda _, name: name.endswith("q"))
    expected = ["reference", None, None, None]
    assert of(model) == expected
    held: Any = model[0].q.weight
    views = (
        held.detach(),
        held.data,
        held.t(),
        held.view(-1),
        held[:64],
        held.chunk(2)[1],
        held.clone(),
        held.to("cpu"),
    )
    made = (*views, torch.empty_like(held), called(held, "new_zeros", (WIDTH, WIDTH)), nn.Parameter(held))
    assert {product_modes.named(one.own_products) for one in made} == {"reference"}
    if use == "cast_on_gather_":
        assert held.quantize().own_products == product_modes.OWN["reference"]
    names, context = held.__tensor_flatten__()
    inner = {name: getattr(held, name) for name in names}
    assert (
        type(held).__tensor_unflatten__(inner, context, held.shape, held.stride()).own_products
        == product_modes.OWN["reference"]
    )
    assert of(copy.deepcopy(model)) == expected
    held.data = weight(WIDTH, WIDTH)
    assert of(model) == expected
    del held, views, made, inner  # torch swaps only tensors that nothing else holds
    assert of(model.to(torch.bfloat16)) == expected
    model.load_state_dict(model.state_dict(), assign=True)
    assert of(model) == expected
    model.load_state_dict({name: torch.ones_like(one) for name, one in model.state_dict().items()}, assign=True)
    assert of(model) == expected
    assert of(pickle.loads(pickle.dumps(model))) == [None] * 4  # it is in no file
    on_meta = model.to("meta")
    assert of(on_meta) == expected
    on_meta.to_empty(device="cpu")
    assert of(on_meta) == expected
    on_meta.load_state_dict(build(use=use, blocks=1).state_dict(), assign=True)
    assert of(on_meta) == expected


def test_a_state_dict_that_is_assigned_brings_no_choice() -> None:
    """Nor does the model that it is of lose its own."""
    one, other = build(blocks=1), build(blocks=1)
    product_modes.set_products_(one, "reference")
    product_modes.set_products_(other, "dequantize", filter_fn=lambda _, name: name.endswith("q"))
    other.load_state_dict(one.state_dict(), assign=True)
    assert of(other) == ["dequantize", None, None, None]
    assert of(one) == ["reference"] * 4


def test_a_weight_on_the_meta_device_takes_a_choice() -> None:
    with torch.device("meta"), layoutc.quantized_init("mxfp8"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    assert product_modes.set_products_(model, "reference") == ["0.weight"]
    model.to_empty(device="cpu")
    nn.init.normal_(model[0].weight)
    assert of(model) == ["reference"]


def test_matrix_products_and_groups_of_tokens_follow_the_choice() -> None:
    from layoutc.recipes import mxfp8

    held, experts = mxfp8.quantize(weight(WIDTH, WIDTH)), mxfp8.quantize(torch.randn(2, WIDTH, WIDTH))
    x, offs = weight(TOKENS, WIDTH, seed=1), torch.tensor([40, TOKENS], dtype=torch.int32)

    def made() -> list[Tensor]:
        right = experts.transpose(-2, -1)
        return [x @ held.t(), x @ held, F.grouped_mm(x, right, offs=offs), torch.bmm(x.view(2, -1, WIDTH), right)]

    dequantized = made()
    with product_modes.products("reference"):
        low = made()
        held.own_products = experts.own_products = product_modes.OWN["dequantize"]
        assert all(map(same_bits, made(), dequantized))
    held.own_products = experts.own_products = product_modes.OWN["reference"]
    assert all(map(same_bits, made(), low))
    assert not any(map(same_bits, low, dequantized))


def test_experts_of_different_choices_compile_in_one_graph() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (nn.Module() for _ in range(2))
            self.up.weight, self.down.weight = (
                nn.Parameter(torch.randn(2, WIDTH, WIDTH).bfloat16() / 16) for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            offs = torch.tensor([40, TOKENS], dtype=torch.int32)
            inner = F.relu(F.grouped_mm(x, self.up.weight.transpose(-2, -1), offs=offs))
            return F.grouped_mm(inner, self.down.weight.transpose(-2, -1), offs=offs)

    torch.manual_seed(0)
    model = Experts()
    layoutc.quantize_(model, "mxfp8", filter_fn=lambda module, _: hasattr(module, "weight"))
    dequantized = gradients(model, model, torch.bfloat16)
    assert product_modes.set_products_(model, "reference", filter_fn=lambda _, name: name == "down") == ["down.weight"]
    expected = gradients(model, model, torch.bfloat16)
    assert not same_bits(expected[0], dequantized[0])
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert all(map(same_bits, gradients(model, compiled, torch.bfloat16), expected))


def test_explain_products_lists_the_choice() -> None:
    model = build("fp8_current", blocks=1)
    product_modes.set_products_(model, "dequantize", filter_fn=lambda _, name: name.endswith("q"))
    product_modes.set_products_(model, "reference", filter_fn=lambda _, name: name.endswith("k"))
    rows = {row.name: row for row in layoutc.explain_products(model, tokens=24) if row.product == "grad_weight"}
    assert [(product_modes.named(row.own_mode), row.way) for row in rows.values()] == [
        ("dequantize", "dequantize"),
        ("reference", "reference"),
        (None, "dequantize"),
        (None, "dequantize"),
    ]
    assert str(rows["0.q.weight"]).endswith(
        'dequantize: products are set to "dequantize" (its own choice: layoutc.products("dequantize"), '
        'layoutc.dequantize("layer"))'
    )
    asked = layoutc.explain_products(model, tokens=24, mode="reference")
    assert [row.way for row in asked if row.product == "grad_weight"] == ["dequantize", *["reference"] * 3]


def test_mistakes_change_nothing() -> None:
    model = build(blocks=1)
    product_modes.set_products_(model, "reference")
    for mode in ("fp8", "", True):
        with pytest.raises(ValueError, match=r"products take low_precision or dequantize, not"):
            layoutc.set_products_(model, mode)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dequantize takes gather or layer, not 'rank'"):
        layoutc.set_products_(model, dequantize="rank")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"filter_fn chooses no module with a quantized weight. The model has 4: 0.q.weight, "
    ):
        product_modes.set_products_(model, "dequantize", filter_fn=lambda _, name: name == "head")
    with pytest.raises(
        ValueError, match="the model has no quantized weights: call quantize_ or cast_on_gather_ before"
    ):
        product_modes.set_products_(nn.Linear(4, 4), "reference")
    assert of(model) == ["reference"] * 4
    assert product_mode.current() == ("dequantize", "gather")


def test_a_tied_weight_has_one_choice() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    model[1].weight = model[0].weight
    layoutc.quantize_(model, "mxfp8")
    assert product_modes.set_products_(model, "reference", filter_fn=lambda _, name: name == "1") == ["1.weight"]
    assert of(model) == ["reference", "reference"]
    assert isinstance(flattening.flatten(model[0].weight)[1].own_products, product_mode.Settings)

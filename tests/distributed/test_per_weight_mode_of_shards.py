"""Weights that choose how they are multiplied, under fully_shard and tensor parallelism: to the bit as one process."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any
from unittest import mock

import product_modes
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exact_products import exact
from exact_products import product as whole_numbers
from harness import Ranks, mesh_of, on
from models import Model, adam, build, local, my_share, shard, width_for
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import layoutc
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.products import linear
from layoutc.runtime.sharding import cards
from layoutc.runtime.torch_private import store_of_all

STEPS = 3


def mix(model: nn.Module, step: int = 0) -> None:
    """The first layer and the head apart from the rest; another mix in later steps."""
    low = "layers.1" if step < 2 else "layers.0"
    chosen = product_modes.set_products_(model, "reference", filter_fn=lambda _, name: name.endswith(low))
    assert len(chosen) == 1
    product_modes.set_products_(model, "dequantize", filter_fn=lambda module, name: name.endswith("head"))
    others = layoutc.set_products_(model, None, filter_fn=lambda _, name: "layers" in name and not name.endswith(low))
    assert len(others) == 1


def made(use: str, recipe: str) -> Model:
    width = width_for(recipe, dist.get_world_size())
    if use == "quantize_":
        return build(recipe, width)
    torch.manual_seed(0)
    model = Model(width)
    layoutc.cast_on_gather_(model, recipe)
    return model


def optimizer_of(model: nn.Module, use: str) -> Any:
    return adam(model) if use == "quantize_" else torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train_step(model: nn.Module, optimizer: Any, step: int, width: int, share: float = 1.0) -> float:
    """One step on as many tokens as recipes take; the loss before it."""
    x, y = torch.randn(2, 64, width, generator=torch.Generator().manual_seed(step)).unbind()
    torch.manual_seed(step)
    loss = (model(x) - y).square().mean()
    (loss * share).backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "use", "keeps", "how"),
    [
        ("fp8_block", "quantize_", False, "after"),
        ("mxfp8", "cast_on_gather_", True, "after"),
        ("fp8_current", "quantize_", False, "before"),
        ("mxfp8", "quantize_", False, "compiled"),
        ("fp8_block", "cast_on_gather_", False, "compiled"),
        ("mxfp8", "quantize_", False, "recomputed"),
    ],
)
@on("two")
def test_a_mix_trains_as_one_process(recipe: str, use: str, keeps: bool, how: str) -> None:
    """The mix is set on the whole weights or on shards, and changes between steps; so does the mode of all."""
    width = width_for(recipe, dist.get_world_size())
    reference, model = made(use, recipe), made(use, recipe)
    torch._dynamo.reset()
    if how == "before":
        mix(model)
    for layer in model.layers:
        if how == "compiled":
            layer.compile(fullgraph=True, backend="aot_eager")
        if how == "recomputed":
            forward = layer.forward
            layer.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)  # type: ignore[method-assign]
    shard(model, reshard_after_forward=not keeps)
    optimizers = [optimizer_of(one, use) for one in (reference, model)]
    multiplied: list[str] = []
    multiply = linear._multiply

    def noted(name: Any, way: Any, left: Any, weight: Any, *args: Any) -> Tensor:
        multiplied.append(f"{weight.weight_name} {name}")
        return multiply(name, way, left, weight, *args)

    linear._multiply = noted  # type: ignore[assignment]
    try:
        for step in range(STEPS):
            for one in (reference, model):
                if how != "before" or step == 2 or one is reference:
                    mix(one, step)
            own = [product_modes.named(row.own_mode) for row in layoutc.explain_products(model)][::3]
            assert own == ([None, "reference", "dequantize"] if step < 2 else ["reference", None, "dequantize"])
            with product_modes.products("reference" if step == 1 else "dequantize"):
                multiplied.clear()
                expected = train_step(reference, optimizers[0], step, width)
                in_low = {0: ["layers.1"], 1: ["layers.0", "layers.1"], 2: ["layers.0"]}[step]
                wanted = [f"{name}.weight forward" for name in in_low]
                wanted += ["layers.1.weight grad_input"] if step < 2 else []  # the model's input needs no gradient
                assert multiplied == wanted, (step, multiplied, wanted)
                multiplied.clear()
                assert train_step(model, optimizers[1], step, width, my_share()) == expected, f"step {step}"
                assert how in ("compiled", "recomputed") or multiplied == wanted
    finally:
        linear._multiply = multiply


@pytest.mark.parametrize("use", ["quantize_", "cast_on_gather_"])
@on("two")
def test_what_keeps_a_choice(use: str) -> None:
    """Shards, gathered weights, copies, and shards that get memory after they were cut on the meta device."""
    width = width_for("mxfp8", dist.get_world_size())
    with torch.device("meta"):
        model = Model(width)
        getattr(layoutc, use)(model, "mxfp8")
    mix(model)
    shard(model)
    expected = [None, "reference", "dequantize"]

    def of(one: Model) -> list[Any]:
        found: list[Any] = [layer.weight for layer in (*one.layers, one.head)]
        return [product_modes.named(getattr(weight, "_local_tensor", weight).own_products) for weight in found]

    assert of(model) == expected
    model.to_empty(device="cpu")
    assert of(model) == expected
    for module in (*model.layers, model):
        module.unshard()  # type: ignore[operator]
    assert of(model) == expected
    layoutc.set_products_(model, "low_precision")  # of gathered weights: it is there after the next gather too
    assert of(model) == ["low_precision"] * 3
    for module in (*model.layers, model):
        module.reshard()  # type: ignore[operator]
    assert of(model) == ["low_precision"] * 3
    mix(model)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    assert of(model) == expected
    assert isinstance(model.head.weight, DTensor)
    if use == "quantize_":
        assert product_modes.named(model.head.weight.full_tensor().own_products) == "dequantize"


@on("two")
def test_ranks_that_choose_differently_are_named() -> None:
    model = shard(build("mxfp8", 64))
    layoutc.check_ranks(model)
    product_modes.set_products_(model, "reference" if dist.get_rank() else "low_precision")
    with pytest.raises(LayoutError, match=r"head.weight: products: .*low_precision.* on rank 0; .*reference"):
        layoutc.check_ranks(model)
    layoutc.set_products_(model, None)
    with product_modes.products("reference" if dist.get_rank() else "dequantize"):
        words = r'products: .*"dequantize"\), layoutc.dequantize\("layer"\) on rank 0; .*"reference"\) on rank 1'
        with pytest.raises(LayoutError, match=words):
            layoutc.check_ranks(model)
    layoutc.check_ranks(model)


def first_gather_differs(use: str, own: bool) -> str:
    """What the first gather says on this rank; and the next one, once ranks agree, gathers."""
    model, rank = made(use, "mxfp8"), dist.get_rank()
    shard(model)
    x = torch.randn(32, width_for("mxfp8", 2))
    mode: Any = "low_precision" if rank else "dequantize"
    if own:
        product_modes.set_products_(model, mode)
    with (
        mock.patch.object(cards, "_checked", set()),
        mock.patch.object(cards, "store_of_all", return_value=dist.PrefixStore(f"{use} {own}", store_of_all())),
        mock.patch.object(cards, "warn_if_elsewhere") as warn,
        nullcontext() if own else product_modes.products(mode),
        pytest.raises(LayoutError) as error,
    ):
        model(x)
    warn.assert_called_once_with("head.weight", torch.device("cpu"))  # of the first weight that is gathered
    layoutc.set_products_(model, None)
    model(x).sum().backward()
    return str(error.value)


@pytest.mark.parametrize(("use", "own"), [("quantize_", False), ("cast_on_gather_", True)])
def test_the_first_gather_names_ranks_in_other_modes(two: Ranks, use: str, own: bool) -> None:
    """On both ranks, before anything is gathered, with the line to write."""
    first = two.told(first_gather_differs, use, own)
    assert 'layoutc.dequantize("layer") on rank 0; layoutc.products("low_precision") on rank 1' in first
    assert 'with layoutc.products("dequantize"), layoutc.dequantize("layer"): ...' in first
    assert "layoutc.check_ranks(model)" in first


# ------------------------------------------------------------------------------------------------- tensor parallelism
@pytest.mark.parametrize(("sharded", "by_parts"), [(True, False), (True, True), (False, False)])
@on("four")
def test_tensor_parallel_weights_are_explained(sharded: bool, by_parts: bool) -> None:
    """What is said of a weight that tensor parallelism cuts is what its parts do, with FSDP2 over it or without."""
    mesh = mesh_of(2, 2, names=("fsdp", "tp"))
    model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False))
    layoutc.quantize_(model, "mxfp8")
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    if sharded:
        fully_shard(model, mesh=mesh["fsdp"])
    if by_parts:
        product_modes.set_products_(model, "reference")
    seen: list[tuple[str, tuple[int, ...]]] = []
    multiply, of_weight = linear._multiply, linear._grad_weight

    def noted(name: Any, way: Any, left: Any, weight: Any, *args: Any) -> Tensor:
        seen.append((name, tuple(weight.shape)))
        return multiply(name, way, left, weight, *args)

    linear._multiply = noted  # type: ignore[assignment]
    linear._grad_weight = lambda *args: (seen.append(("grad_weight", (256, 256))), of_weight(*args))[1]  # type: ignore[assignment]
    try:
        with product_modes.products("reference"):
            rows = layoutc.explain_products(model)
            model(torch.randn(128, 256, requires_grad=True)).sum().backward()
            after = layoutc.explain_products(model)
    finally:
        linear._multiply, linear._grad_weight = multiply, of_weight
    assert [(row.shape, row.product, row.way) for row in rows] == [
        (shape, product, "dequantize" if product == "grad_weight" and not by_parts else "reference")
        for shape in ((512, 256), (256, 512))
        for product in ("forward", "grad_input", "grad_weight")
    ]
    assert all(("is a DTensor" in row.reason) == (row.product == "grad_weight" and not by_parts) for row in rows)
    assert rows == after
    names = ["forward", "grad_input", *(["grad_weight"] if by_parts else [])]
    assert sorted(seen) == sorted(2 * [(name, (256, 256)) for name in names])


class Parts(nn.Module):
    """Rows of one weight and columns of the next on each rank, multiplied as local tensors."""

    def __init__(self, up: Tensor, down: Tensor, recipe: str, mesh: Any = None) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(*reversed(w.shape), bias=False) for w in (up, down))
        for layer, w, dim in ((self.up, up, 0), (self.down, down, 1)):
            whole = w if mesh is None else distribute_tensor(w, mesh, [Shard(dim)])
            layer.weight = nn.Parameter(whole)
        layoutc.quantize_(self, recipe)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """x by rows of the first weight, and y, columns of the same numbers, by columns of the second."""
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up.weight, self.down.weight))
        return F.linear(x, up), F.linear(y, down)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("recipe", "compiled"), [("fp8_current", False), ("mxfp8", False), ("mxfp8", True)])
@on("four")
def test_parts_of_weights_have_exact_gradients_in_low_precision(recipe: str, compiled: bool) -> None:
    """Weights over two dims of a mesh whose parts multiply as local tensors have all three products in low precision.
    No product rounds, so the gradients are whole numbers, wherever sums are cut."""
    mesh, tokens, width = mesh_of(2, 2, names=("fsdp", "tp")), 128, 512
    part, rank = width // 2, mesh["tp"].get_local_rank()
    mine = slice(rank * part, (rank + 1) * part)
    up, down = exact(recipe, width, width, 1), exact(recipe, width, width, 2)
    x, y = exact(recipe, tokens, width, 3), exact(recipe, tokens, width, 4)
    of_up, of_down = exact(recipe, tokens, width, 5), exact(recipe, tokens, width, 6)
    model = Parts(up, down, recipe, mesh["tp"])
    torch._dynamo.reset()
    if compiled:
        model.compile(fullgraph=True, backend="aot_eager")
    fully_shard(model, mesh=mesh["fsdp"])
    product_modes.set_products_(model, "reference")
    calls: list[str] = []
    of_weight = linear._grad_weight

    def noted(*args: Any) -> Tensor:
        calls.append("grad_weight")
        return of_weight(*args)

    linear._grad_weight = noted  # type: ignore[assignment]
    try:
        share = 2.0 if mesh["fsdp"].get_local_rank() == 0 else 0.0  # a mean over ranks, of which one brings it all
        out = model(x, y[:, mine].contiguous())
        torch.autograd.backward(out, [of_up[:, mine].contiguous() * share, of_down * share])
    finally:
        linear._grad_weight = of_weight
    assert len(calls) == 2
    for layer, g, a in ((model.up, of_up, x), (model.down, of_down, y)):
        found: Any = layer.weight.grad
        whole = found.redistribute(placements=[Replicate()] * 2).to_local()
        assert torch.equal(whole, torch.from_numpy(whole_numbers(g.t(), a)).float())
    assert local(model.up.weight).LAYOUT.name == recipe

"""Values that weights were quantized from: kept until masters are made, dropped with their bytes, and in no file."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

import layoutc
from layoutc import checkpoint
from layoutc.runtime.weight.tensor import QuantizedTensor

RECIPES = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
SIZE = 128


def values_of(seed: int = 0, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (SIZE, SIZE)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(values: Tensor) -> nn.Linear:
    module = nn.Linear(values.shape[1], values.shape[0], bias=False)
    module.weight = nn.Parameter(values.clone())
    return module


def quantized(recipe: str, values: Tensor, **options: Any) -> nn.Linear:
    module = linear(values)
    layoutc.quantize_(module, recipe, **options)
    return module


def weight_of(module: nn.Module) -> Any:
    assert isinstance(module.weight, QuantizedTensor)
    return module.weight


def kept(module: nn.Module) -> Tensor | None:
    initial = weight_of(module).store.writes.initial
    return None if initial is None else initial.values


def master_of(module: nn.Module) -> Tensor:
    optimizer = layoutc.MasterWeights(torch.optim.SGD, module.parameters(), lr=1e-3)
    return next(iter(optimizer.masters().values()))


def bytes_of(tensor: Any) -> dict[str, bytes]:
    return {n: p.contiguous().flatten().view(torch.uint8).numpy().tobytes() for n, p in tensor.planes().items()}


# ---------------------------------------------------------------------------------------------------------- the masters
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_masters_are_what_was_quantized(recipe: str, dtype: torch.dtype) -> None:
    """fp32 of the values, and they quantize to the weight's bytes; so a step that changes nothing keeps them."""
    values = values_of(dtype=dtype)
    module = quantized(recipe, values)
    before = bytes_of(weight_of(module))
    optimizer = layoutc.MasterWeights(torch.optim.SGD, module.parameters(), lr=1e-3)
    assert torch.equal(optimizer.masters()[module.weight], values.float())
    again = import_module(f"layoutc.recipes.{recipe}").quantize(optimizer.masters()[module.weight])
    assert bytes_of(again) == before
    module.weight.grad = torch.zeros_like(module.weight)
    optimizer.step()
    after = bytes_of(weight_of(module))
    history = ("amax",) if recipe == "fp8_delayed" else ()  # a step puts the current amax in front
    assert {n: b for n, b in after.items() if n not in history} == {n: b for n, b in before.items() if n not in history}


def test_values_are_freed_when_masters_are_made() -> None:
    """As is what was quantized, as soon as the weight is replaced."""
    module = linear(values_of(dtype=torch.bfloat16))
    original = weakref.ref(module.weight)
    layoutc.quantize_(module, "mxfp8")
    gc.collect()
    assert original() is None
    held = kept(module)
    assert held is not None
    assert held.dtype == torch.bfloat16
    seen = weakref.ref(held)
    del held
    master_of(module)
    assert seen() is None
    assert kept(module) is None


def test_weights_that_do_not_train_keep_nothing() -> None:
    """Frozen ones, those of keep_values=False, those quantized for inference, and tensors that quantize() makes."""
    frozen = linear(values_of())
    frozen.requires_grad_(False)
    layoutc.quantize_(frozen, "mxfp8")
    with torch.inference_mode():
        inference = quantized("mxfp8", values_of())
    with layoutc.quantized_init("mxfp8", keep_values=False):
        built = nn.Linear(64, 64)
    for module in (frozen, inference, built, quantized("mxfp8", values_of(), keep_values=False)):
        assert kept(module) is None
    with torch.no_grad():
        built.weight.copy_(torch.ones(64, 64))
        frozen.weight.copy_(values_of(1))
    assert kept(built) is None
    assert kept(frozen) is None
    made: Any = import_module("layoutc.recipes.mxfp8").quantize(values_of())
    assert made.store.writes.initial is None
    later = quantized("mxfp8", values_of())
    later.requires_grad_(False)
    layoutc.MasterWeights(torch.optim.SGD, later.parameters(), lr=1e-3)
    assert kept(later) is None


def test_quantized_init_keeps_what_initializers_made() -> None:
    """Of every weight that it quantizes, ties included."""
    torch.manual_seed(0)
    expected = nn.Linear(64, 64).weight.detach().clone()
    torch.manual_seed(0)
    with layoutc.quantized_init("nvfp4"):
        a, b = nn.Linear(64, 64), nn.Linear(64, 64)
        b.weight = a.weight
    assert a.weight is b.weight
    assert torch.equal(master_of(a), expected)


# ----------------------------------------------------------------------------------------------- what they live through
COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "to": lambda module: module.to("cpu"),
    "clone": lambda module: with_weight(module, module.weight.detach().clone()),
    "parameter": lambda module: with_weight(module, module.weight.detach()),
    "moved": lambda module: with_weight(module, torch.ops.aten._to_copy(module.weight.detach(), device="cpu")),
    "data": lambda module: with_data(module, module.weight.detach().clone()),
    "plain data": lambda module: with_data(module, values_of()),
    "swapped": lambda module: swapped(module),
}


def with_weight(module: nn.Module, weight: Tensor) -> nn.Module:
    module.weight = nn.Parameter(weight)
    return module


def with_data(module: Any, weight: Tensor) -> nn.Module:
    module.weight.data = weight
    return module  # type: ignore[no-any-return]


def swapped(module: Any) -> nn.Module:
    other = nn.Parameter(module.weight.detach().clone())
    torch.utils.swap_tensors(module.weight, other)
    return module  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", COPIES)
def test_copies_keep_values_of_their_own(how: str) -> None:
    """Whatever becomes of the parameter between quantize_ and MasterWeights."""
    original = quantized("nvfp4", values_of())
    module = COPIES[how](original)
    assert torch.equal(master_of(module), values_of())


def test_a_copy_does_not_lose_its_values_with_the_original() -> None:
    """Each has memory of its own."""
    original = quantized("mxfp8", values_of())
    other = copy.deepcopy(original)
    master_of(original)
    assert torch.equal(master_of(other), values_of())


WRITES: dict[str, Callable[[Any], Any]] = {
    "copy_": lambda w: w.copy_(values_of(1)),
    "of another dtype": lambda w: w.copy_(values_of(1).bfloat16()),
    "rows": lambda w: w[32:96].copy_(values_of(1)[32:96]),
    "columns": lambda w: w.narrow(1, 64, 64).copy_(values_of(1)[:, 64:]),
    "piece by piece": lambda w: [p.copy_(v) for p, v in zip(w.split(32), values_of(1).split(32), strict=True)],
    "fill_": lambda w: w.fill_(0.3),
    "zero_": lambda w: w.zero_(),
    "zeros in rows": lambda w: w[:32].zero_(),
    "normal_": lambda w: nn.init.normal_(w, generator=torch.Generator().manual_seed(3)),
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w, std=0.02, generator=torch.Generator().manual_seed(3)),
    "scaled": lambda w: w.normal_(generator=torch.Generator().manual_seed(3)).mul_(0.7).add_(0.01),
}


@pytest.mark.parametrize(
    ("how", "empty"),
    [
        *((how, False) for how in WRITES),
        *((how, True) for how in WRITES if how not in ("rows", "columns", "zeros in rows")),
    ],
)
def test_plain_values_that_are_written_become_masters(how: str, empty: bool) -> None:
    """As they would be in a plain weight, also into weights that have come from the meta device without values."""
    expected = values_of().clone()
    if empty:
        with torch.device("meta"), layoutc.quantized_init("mxfp8"):
            module = nn.Linear(SIZE, SIZE, bias=False)
        module.to_empty(device="cpu")
    else:
        module = quantized("mxfp8", values_of())
    with torch.no_grad():
        WRITES[how](expected)
        WRITES[how](module.weight)
    assert torch.equal(master_of(module), expected)
    again: Any = import_module("layoutc.recipes.mxfp8").quantize(expected)
    assert bytes_of(module.weight) == bytes_of(again)


INITIALIZERS: dict[str, Callable[[Tensor], Any]] = {
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w, std=0.02, generator=torch.Generator().manual_seed(3)),
    "truncated": lambda w: nn.init.trunc_normal_(w, generator=torch.Generator().manual_seed(3)),  # draws some again
    "tails": lambda w: nn.init.trunc_normal_(w, a=1.0, b=2.0, generator=torch.Generator().manual_seed(3)),
    "orthogonal_": lambda w: nn.init.orthogonal_(w, generator=torch.Generator().manual_seed(3)),
    "kaiming_uniform_": lambda w: nn.init.kaiming_uniform_(w, generator=torch.Generator().manual_seed(3)),
    "eye_": nn.init.eye_,
}


@pytest.mark.parametrize("how", INITIALIZERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_initialized_after_quantize_have_the_bytes_of_plain_ones(recipe: str, how: str) -> None:
    """An initializer of several steps works on values, not on codes; what it draws beside the weight is plain."""
    with torch.device("meta"), layoutc.quantized_init(recipe):
        module = nn.Linear(SIZE, SIZE, bias=False)
    module.to_empty(device="cpu")
    plain = linear(values_of())
    for one in (module, plain):
        INITIALIZERS[how](one.weight)
    layoutc.quantize_(plain, recipe)
    assert bytes_of(module.weight) == bytes_of(plain.weight)
    assert torch.equal(master_of(module), master_of(plain))


def test_a_part_of_a_weight_whose_rest_has_no_values() -> None:
    """The rest is what it dequantizes to."""
    module = quantized("mxfp8", values_of(), keep_values=False)
    module.weight.store.writes.trains = True  # type: ignore[union-attr]
    module = copy.deepcopy(module)
    expected = weight_of(module).dequantize(torch.float32)
    with torch.no_grad():
        module.weight[32:64].copy_(values_of(1)[32:64])
    expected[32:64] = values_of(1)[32:64]
    assert torch.equal(master_of(module), expected)


def test_a_transposed_stack_gives_its_values_transposed() -> None:
    model, values = nn.Module(), values_of(shape=(2, 64, 96))
    model.experts = nn.Parameter(values.clone())
    layoutc.quantize_(model, "mxfp8", param_filter=["experts"])
    turned: Any = model.experts.data.transpose(-2, -1)
    assert torch.equal(turned.initial_values(torch.float32), values.transpose(-2, -1))


def test_loading_plain_values_keeps_them(tmp_path: Path) -> None:
    """load_state_dict, checkpoint.load(convert=True) and load_safetensors."""
    plain = {"weight": values_of(1)}
    module = quantized("nvfp4", values_of())
    module.load_state_dict(plain)
    assert torch.equal(master_of(module), values_of(1))
    checkpoint.save({"model": plain}, tmp_path / "plain")
    module = quantized("nvfp4", values_of())
    checkpoint.load({"model": module.state_dict()}, tmp_path / "plain", convert=True)
    assert torch.equal(master_of(module), values_of(1))
    library = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    library.save_file({"weight": values_of(2).bfloat16()}, tmp_path / "model.safetensors")
    checkpoint.load_safetensors(module, tmp_path)
    assert torch.equal(master_of(module), values_of(2).bfloat16().float())


# ------------------------------------------------------------------------------------------------------- what ends them
DROPS: dict[str, Callable[[Any, Any], Any]] = {
    "copy_": lambda w, other: w.copy_(other),
    "rows": lambda w, other: w[:32].copy_(other[:32]),
    "data": lambda w, other: setattr(w, "data", other),
    "planes": lambda w, other: [p.copy_(other.planes()[n]) for n, p in w.planes().items()],
}


@pytest.mark.parametrize("how", DROPS)
def test_quantized_bytes_drop_values(how: str) -> None:
    """What is known of a weight belongs to the bytes that it was quantized to."""
    module, other = quantized("mxfp8", values_of()), import_module("layoutc.recipes.mxfp8").quantize(values_of(1))
    with torch.no_grad():
        DROPS[how](module.weight, other)
    expected = weight_of(module).dequantize(torch.float32)
    assert torch.equal(master_of(module), expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_state_dict_that_shares_the_memory_leaves_values(recipe: str) -> None:
    """As a load in place and set_state_dict leave it: the weight is copied into itself."""
    module = quantized(recipe, values_of())
    module.load_state_dict(module.state_dict())
    assert torch.equal(master_of(module), values_of())


def test_a_weight_that_was_replaced_still_keeps_plain_values() -> None:
    """By the bytes of a tensor that is no weight."""
    module, other = quantized("mxfp8", values_of()), import_module("layoutc.recipes.mxfp8").quantize(values_of(1))
    module.weight.data = other
    with torch.no_grad():
        module.weight.copy_(values_of(2))
    assert torch.equal(master_of(module), values_of(2))


def test_plain_values_after_the_optimizer_was_made_refresh_masters() -> None:
    """At the next step, or when masters are asked for; then they are gone."""
    module = quantized("mxfp8", values_of())
    optimizer = layoutc.MasterWeights(torch.optim.SGD, module.parameters(), lr=0.0)
    with torch.no_grad():
        module.weight.copy_(values_of(1))
    module.weight.grad = torch.zeros_like(module.weight)
    optimizer.step()
    assert kept(module) is None
    assert torch.equal(optimizer.masters()[module.weight], values_of(1))


# --------------------------------------------------------------------------------------------------------- nowhere else
def test_values_are_in_no_file_and_no_graph() -> None:
    """Pickles, files of torch.save, flattened tensors, planes and repr are as without them."""
    module, bare = quantized("nvfp4", values_of()), quantized("nvfp4", values_of(), keep_values=False)
    assert kept(module) is not None
    sizes = []
    for one in (module, bare):
        file = io.BytesIO()
        torch.save(one.state_dict(), file)
        sizes.append((len(pickle.dumps(one.weight.detach())), file.tell()))
    assert sizes[0] == sizes[1]
    assert repr(module.weight) == repr(bare.weight)
    assert weight_of(module).planes().keys() == weight_of(bare).planes().keys()
    assert weight_of(module).__tensor_flatten__() == weight_of(bare).__tensor_flatten__()
    restored = pickle.loads(pickle.dumps(module.weight))
    assert restored.store.writes.initial is None


@pytest.mark.parametrize("kind", ["default", "blocking"])
def test_stagers_copy_no_values(kind: str) -> None:
    """Host memory for a checkpoint is that of the planes, and the model keeps its values."""
    module = quantized("mxfp8", values_of())
    state = {"model": module.state_dict()}
    if kind == "default":
        stager = DefaultStager(StagingOptions(False, False, False, False))
        staged = stager.stage(state)
        stager.close()
    else:
        staged = BlockingAsyncStager().stage(state)
    copied = staged["model"]["weight"]
    assert bytes_of(copied) == bytes_of(module.weight)
    assert copied.store.writes.initial is None
    assert kept(module) is not None


def test_a_save_before_the_optimizer_is_made_holds_planes_alone(tmp_path: Path) -> None:
    """Of the size of one without values."""
    sizes = []
    for name, options in (("kept", {}), ("bare", {"keep_values": False})):
        module = quantized("mxfp8", values_of(), **options)
        dcp.save({"model": module.state_dict()}, checkpoint_id=tmp_path / name)
        sizes.append(sum(file.stat().st_size for file in (tmp_path / name).glob("*.distcp")))
    assert sizes[0] == sizes[1]


def test_compiled_blocks_train_as_eager_ones() -> None:
    """A graph sees planes; values are still there after it has run."""
    module = quantized("mxfp8", values_of())
    x = values_of(1)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), module(x))
    assert torch.equal(master_of(module), values_of())

"""Masters of sharded weights start from the values before quantization, whatever the cuts, and those are freed then."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks, mesh_of, on
from models import Model, local, my_share, shard, train_step
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import layoutc
from layoutc import checkpoint


class Experts(nn.Module):
    """Weights of three dims, which shard whole experts, or rows within each."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        """(n, k) -> (e, n, rows)."""
        return x @ self.weight.transpose(-2, -1)


def plain(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """The same values on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def module_of(values: Tensor) -> nn.Module:
    """A module whose `weight` has the values."""
    module: nn.Module = Experts(values.shape) if values.dim() > 2 else nn.Linear(*reversed(values.shape), bias=False)
    module.weight = nn.Parameter(values.clone())
    return module


def quantized(values: Tensor, recipe: str) -> nn.Module:
    """The module, quantized."""
    module = module_of(values)
    layoutc.quantize_(module, recipe, filter_fn=lambda *_: True)
    return module


def masters_are(model: nn.Module, expected: Tensor) -> None:
    """Masters made now equal the values, bit for bit, and the values are gone."""
    param: Any = model.weight
    kept = local(param).store.writes.initial
    seen = weakref.ref(kept.values) if kept is not None else lambda: None
    assert kept is not None or not local(param).numel()
    assert kept is None or kept.values.numel() == local(param).numel(), "a shard keeps its own rows"
    assert kept is None or kept.values.untyped_storage().nbytes() == kept.values.numel() * expected.element_size()
    del kept
    optimizer = layoutc.MasterWeights(torch.optim.SGD, model.parameters(), lr=1e-3)
    assert seen() is None, "freed as soon as masters are made"
    master: Any = optimizer.masters()[param]
    assert master.dtype == torch.float32
    assert master.placements == param.placements
    cut = [p for p in master.placements if hasattr(p, "dim")]
    assert cut
    assert torch.equal(master.full_tensor(), expected.float())


def keeps(recipe: str, shape: tuple[int, ...], dtype: torch.dtype, form: str) -> None:
    """Values of the shards after fully_shard."""
    values = plain(shape, dtype)
    model = quantized(values, recipe)
    whole = weakref.ref(model.weight.store.writes.initial.values)  # type: ignore[union-attr]
    options: dict[str, Any] = {}
    if form.startswith("dim "):
        options["shard_placement_fn"] = lambda _: Shard(int(form[4:]))
    elif form == "hybrid":
        options["mesh"] = mesh_of(2, dist.get_world_size() // 2, names=("copies", "slices"))
    elif form == "offloaded":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    fully_shard(model, **options)
    gc.collect()
    assert whole() is None, "the whole weight's values end with the whole weight"
    masters_are(model, values)


CASES = [
    ("nvfp4", (48, 64), torch.bfloat16, "rows"),  # cuts inside a block
    ("fp8_block", (17, 64), torch.float32, "rows"),  # uneven
    ("fp8_block", (128, 128), torch.float32, "rows"),  # a block that all ranks share
    ("fp8_delayed", (1, 64), torch.float32, "rows"),  # ranks without rows
    ("mxfp8", (64, 256), torch.float32, "dim 1"),
    ("mxfp8", (3, 256, 64), torch.bfloat16, "dim 1"),  # rows within each expert
    ("mxfp8", (3, 32, 64), torch.float32, "rows"),
    ("mxfp8", (64, 64), torch.bfloat16, "offloaded"),
]


@pytest.mark.parametrize(("recipe", "shape", "dtype", "form"), CASES)
def test_masters_of_shards_start_from_the_values(
    two: Ranks, recipe: str, shape: tuple[int, ...], dtype: torch.dtype, form: str
) -> None:
    """fully_shard over two ranks."""
    two.run(keeps, recipe, shape, dtype, form)


@pytest.mark.parametrize(
    ("recipe", "shape", "form"),
    [("nvfp4", (48, 64), "hybrid"), ("fp8_block", (9, 64), "rows"), ("fp8_delayed", (3, 64), "rows")],
)
def test_masters_on_four_ranks(four: Ranks, recipe: str, shape: tuple[int, ...], form: str) -> None:
    """HSDP, and ranks with few rows or none."""
    four.run(keeps, recipe, shape, torch.float32, form)


# --------------------------------------------------------------------------------------------------- written afterwards
def written(recipe: str, shape: tuple[int, ...], how: str, folder: str) -> None:
    """Values that are written into shards, which have none or others."""
    values = plain(shape)
    if how == "meta":
        with torch.device("meta"):
            model = module_of(torch.empty(shape))
        layoutc.quantize_(model, recipe, filter_fn=lambda *_: True)
        fully_shard(model)
        model.to_empty(device="cpu")
    else:
        model = quantized(torch.ones(shape), recipe)
        fully_shard(model)
    if how == "broadcast":  # and then loaded in place
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, {"weight": values} if dist.get_rank() == 0 else {}, options=options)
        set_model_state_dict(model, get_model_state_dict(model))
    param: Any = model.weight
    with torch.no_grad():
        if how == "convert":
            state = {"weight": param}
            checkpoint.load({"model": state}, folder, convert=True)
        elif how == "safetensors":
            checkpoint.load_safetensors(model, folder)
        elif how == "steps":  # an initializer of several steps
            param.fill_(0.75)
            param.mul_(0.9)
            param.add_(0.1)
            values = torch.full(shape, 0.75).mul_(0.9).add_(0.1)
        elif how != "broadcast":
            param.copy_(distribute_tensor(values, param.device_mesh, param.placements))
    masters_are(model, values)


@pytest.mark.parametrize(
    ("recipe", "shape", "how"),
    [
        ("nvfp4", (48, 64), "copy"),
        ("fp8_current", (17, 64), "meta"),
        ("fp8_block", (200, 64), "steps"),
        ("nvfp4", (48, 64), "convert"),
        ("fp8_block", (200, 64), "safetensors"),
        ("fp8_current", (17, 64), "broadcast"),
    ],
)
def test_values_written_into_shards_are_kept(
    two: Ranks, recipe: str, shape: tuple[int, ...], how: str, tmp_path: Path
) -> None:
    """Plain values into sharded weights, also into those that began on the meta device."""
    if how == "convert":
        checkpoint.save({"model": {"weight": plain(shape)}}, tmp_path / "plain")
    elif how == "safetensors":
        library = pytest.importorskip("safetensors.torch", reason="needs safetensors")
        library.save_file({"weight": plain(shape)}, tmp_path / "model.safetensors")
    two.run(written, recipe, shape, how, str(tmp_path / "plain" if how == "convert" else tmp_path))


@pytest.mark.parametrize(("recipe", "shape"), [("mxfp8", (96, 64)), ("fp8_current", (17, 64))])
@on("two")
def test_masters_follow_what_is_written(recipe: str, shape: tuple[int, ...]) -> None:
    """Plain values exactly; quantized ones as what they dequantize to. Plain values after the optimizer is made, and
    quantized bytes, which have none."""
    model = quantized(torch.ones(shape), recipe)
    fully_shard(model)
    param: Any = model.weight
    optimizer = layoutc.MasterWeights(torch.optim.SGD, model.parameters(), lr=1e-3)
    values, other = plain(shape), quantized(plain(shape).flip(0), recipe)
    with torch.no_grad():
        param.copy_(distribute_tensor(values, param.device_mesh, param.placements))
    assert torch.equal(optimizer.masters()[param].full_tensor(), values)  # type: ignore[attr-defined]
    assert local(param).store.writes.initial is None
    other_sharded = quantized(plain(shape).flip(0), recipe)
    layoutc.MasterWeights(torch.optim.SGD, other_sharded.parameters(), lr=1e-3)  # takes its values
    fully_shard(other_sharded)
    with torch.no_grad():
        local(param).copy_(local(other_sharded.weight))  # type: ignore[arg-type]
    dequantized = other.weight.dequantize(torch.float32)  # type: ignore[operator]
    assert torch.equal(optimizer.masters()[param].full_tensor(), dequantized)  # type: ignore[attr-defined]


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@on("two")
def test_a_weight_that_is_frozen_at_first_starts_from_its_values(recipe: str) -> None:
    """Though the optimizer had not been given it, and FSDP2 has gathered it. A weight that trains from the third step
    on, beside one that trains from the first."""
    model = nn.Sequential(*(quantized(plain((64, 64)) + layer, recipe) for layer in range(2)))
    model[0].requires_grad_(False)
    fully_shard(model)
    optimizer = layoutc.MasterWeights(torch.optim.SGD, model[1].parameters(), lr=1e-3)
    for step in range(4):
        if step == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": [model[0].weight]})
            master: Any = optimizer.masters()[model[0].weight]  # type: ignore[index]
            assert torch.equal(master.full_tensor(), plain((64, 64)))
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("recipe", ["mxfp8"])
@on("two")
def test_values_end_with_their_bytes(recipe: str) -> None:
    """Where bytes are sent, all ranks have the source's. Weights that collectives write in place."""
    other = quantized(plain((64, 64)) + dist.get_rank(), recipe)
    copies = [Replicate()]
    other.weight = nn.Parameter(distribute_tensor(other.weight, mesh_of(2), copies))
    (master,) = layoutc.MasterWeights(torch.optim.SGD, other.parameters(), lr=1e-3).masters().values()
    assert torch.equal(master.full_tensor(), plain((64, 64)))  # type: ignore[operator]
    other = quantized(plain((64, 64)), recipe)
    if dist.get_rank() == 0:
        other.weight.store.writes.initial = None  # type: ignore[union-attr]
    sent: Any = distribute_tensor(other.weight, mesh_of(2), copies)
    assert sent._local_tensor.store.writes.initial is None, "alike on all ranks"
    whole: Any = quantized(plain((128, 64)) + dist.get_rank(), recipe)
    whole.weight = nn.Parameter(distribute_tensor(whole.weight, mesh_of(2), [Shard(0)]))
    masters_are(whole, plain((128, 64)))


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current"])
@on("four")
def test_masters_of_tensor_parallel_shards(recipe: str) -> None:
    """2 by 2. DTensors that quantize_ makes shards of, sharded by FSDP2 as well."""
    mesh = mesh_of(2, 2, names=("slices", "parts"))
    values = plain((128, 128))
    for dim in (0, 1):
        model = module_of(values)
        model.weight = nn.Parameter(distribute_tensor(values, mesh["parts"], [Shard(dim)]))
        layoutc.quantize_(model, recipe)
        fully_shard(model, mesh=mesh["slices"])
        masters_are(model, values)


# ------------------------------------------------------------------------------------------------------------- training
def small_model(recipe: str, width: int, inner: int) -> Model:
    torch.manual_seed(0)
    model = Model(width, inner)
    layoutc.quantize_(model, recipe)
    return model


def small_adam(model: nn.Module) -> layoutc.MasterWeights:
    return layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("recipe", "sizes"), [("mxfp8", (64, 96)), ("nvfp4", (80, 48)), ("fp8_delayed", (66, 35))])
@on("four")
def test_small_learning_rates_train_as_one_process(recipe: str, sizes: tuple[int, int]) -> None:
    """Short shards are copied in the first forward, which must not look like a write. Losses, masters and the first
    step: made before the first forward, in which FSDP2 copies short shards again."""
    reference, sharded = small_model(recipe, *sizes), shard(small_model(recipe, *sizes))
    ours, theirs = small_adam(sharded), small_adam(reference)
    for step in range(3):
        expected = train_step(reference, theirs, step, sizes[0])
        assert train_step(sharded, ours, step, sizes[0], my_share()) == expected, step
    pairs = zip(ours.masters().values(), theirs.masters().values(), strict=True)
    for mine, whole in pairs:
        assert isinstance(mine, DTensor)
        assert torch.equal(mine.full_tensor(), whole)

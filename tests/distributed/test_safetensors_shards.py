"""safetensors in and out of sharded models: each rank reads its own slices, and the bytes are those of one process."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from models import (
    RECIPES,
    Model,
    assert_same_tensors,
    build,
    counted,
    raw,
    recipe_module,
    shard,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from layoutc.checkpoint import export_safetensors, load_safetensors, safetensors_files
from layoutc.checkpoint.gathering import gathered_whole
from layoutc.runtime import meshes
from layoutc.runtime.tensor import QuantizedTensor

INNER = 384  # rows of layers.0: three blocks of 128, so that two and four ranks cut inside of one
CASES = [(2, INNER), (3, INNER), (4, INNER), (4, 256)]


def among(world: int) -> DeviceMesh | None:
    """A mesh of the first ranks; None on the others."""
    mesh = DeviceMesh("cpu", list(range(world)))
    return mesh if dist.get_rank() < world else None


def values(width: int, inner: int) -> dict[str, Tensor]:
    """bf16 values of a plain model, with scales that differ by rows and columns."""
    generator = torch.Generator().manual_seed(7)
    found = {}
    for name, value in Model(width, inner, "meta").state_dict().items():
        x = torch.randn(value.shape, generator=generator)
        for dim in range(x.dim()):
            sizes = [-1 if other == dim else 1 for other in range(x.dim())]
            x *= torch.exp2(torch.randint(-4, 5, (x.shape[dim],), generator=generator)).view(sizes)
        found[name] = x.to(torch.bfloat16)
    return found


def write(folder: Path, tensors: dict[str, Tensor], files: int = 1) -> None:
    """A folder as Hugging Face has it, of one file or several."""
    folder.mkdir(parents=True)
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    where = {name: names[i % files] for i, name in enumerate(tensors)}
    for file in names:
        save_file({name: t for name, t in tensors.items() if where[name] == file}, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def planes_of(recipe: str, value: Tensor) -> dict[str, Tensor]:
    """The oracle: a whole weight quantized by the recipe's reference, which leaves amaxes out."""
    module = recipe_module(recipe)
    planes: dict[str, Tensor] = module.quantize_reference(value)
    if (facts := module.LAYOUT.planes(*value.shape).get("amax")) is not None:
        planes["amax"] = torch.zeros(facts.shape)
        planes["amax"][0] = value.abs().max()
    return planes


def whole(recipe: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a model holds of plain values: planes of weights; biases in fp32."""
    found = {f"{name}.values": value.float() for name, value in tensors.items() if value.dim() < 2}
    for name in (name for name, value in tensors.items() if value.dim() == 2):
        found |= {f"{name}.{plane}": held for plane, held in planes_of(recipe, tensors[name]).items()}
    return found


def dequantized(recipe: str, value: Tensor) -> Tensor:
    """bf16 values of a weight that has been quantized."""
    reference = import_module(f"layoutc.recipes.{recipe}.reference")
    found: Tensor = reference.dequantize_reference(planes_of(recipe, value), *value.shape).to(torch.bfloat16)
    return found


def fill(model: nn.Module) -> None:
    """Other values than those that are loaded."""
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.25)


def reads() -> Any:
    """counted() of slices: the bytes of each."""
    original = safetensors_files.read_slice

    def size(file: Any, stored: Any, index: Any) -> int:
        found = original(file, stored, index)
        return found.numel() * found.element_size()

    return counted("read_slice", size, safetensors_files)


def loads_and_exports(recipe: str, width: int, inner: int, where: str, mesh: DeviceMesh, **options: Any) -> None:
    """bf16 files in, quantized and plain files out, quantized files in."""
    tensors = values(width, inner)
    group = mesh._flatten().get_group() if mesh.ndim > 1 else mesh.get_group()
    source, quantized, plain = (Path(where) / name for name in ("source", "quantized", "plain"))
    if dist.get_rank() == 0:
        write(source, tensors, 2)
    dist.barrier(group)
    model = shard(build(recipe, width, inner), mesh=mesh, **options)
    fill(model)
    with reads() as sizes:
        loaded = load_safetensors(model, source, process_group=group)
    assert loaded == ((), ())
    expected = whole(recipe, tensors)
    assert_holds(model, expected)
    own = [p._local_tensor.numel() * 2 for p in model.parameters()]  # type: ignore[attr-defined]
    assert sorted(sizes) == sorted(own)  # nothing but the shard's rows, in bf16, one slice for each parameter

    names = export_safetensors(model, quantized, process_group=group)
    files = export_safetensors(
        model, plain, dtype=torch.bfloat16, max_shard_bytes=width * inner * 2, process_group=group
    )
    assert names == ["model.safetensors"]
    assert len(files) > 1
    assert sorted(path.name for path in Path(where).iterdir()) == ["plain", "quantized", "source"]
    found = load_file(quantized / "model.safetensors")
    assert_same_tensors({n.removesuffix(".values"): t for n, t in expected.items()}, found)
    index = json.loads((plain / "model.safetensors.index.json").read_text())
    total = 0
    for name, value in tensors.items():
        written = load_file(plain / index["weight_map"][name])[name]
        want = dequantized(recipe, value) if value.dim() == 2 else value
        assert torch.equal(raw(written), raw(want)), name
        total += written.nbytes
    assert index["metadata"]["total_size"] == total

    other = shard(build(recipe, width, inner), mesh=mesh, **options)
    fill(other)
    with reads() as sizes:
        load_safetensors(other, quantized, process_group=group)
    assert_holds(other, expected)
    assert own_bytes(other) == own_bytes(model)
    assert sum(sizes) == sum(map(len, own_bytes(other)))
    dist.barrier(group)


def assert_holds(model: nn.Module, expected: dict[str, Tensor]) -> None:
    """A model is these planes and values, gathered whole; each weight also as FSDP2 gathers it."""
    found = {}
    for name, param in model.named_parameters():
        full = gathered_whole(param.detach())
        planes = full.planes() if isinstance(full, QuantizedTensor) else {"values": full}
        found |= {f"{name}.{plane}": tensor for plane, tensor in planes.items()}
    assert found.keys() == expected.keys()
    assert_same_tensors(expected, found)


def own_bytes(model: nn.Module) -> list[bytes]:
    """What a rank's own rows have part in."""
    found = []
    for param in model.parameters():
        held = meshes.local_of(param).detach()
        quantized = isinstance(held, QuantizedTensor)
        found += (
            [bytes(raw(held._entries(n)).tolist()) for n in held._planes] if quantized else [bytes(raw(held).tolist())]
        )
    return found


def on_ranks(recipe: str, world: int, inner: int, where: str) -> None:
    """The first ranks of four; the others take no part."""
    if (mesh := among(world)) is not None:
        loads_and_exports(recipe, 128, inner, where, mesh)


@pytest.mark.parametrize(("world", "inner"), CASES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_shards_load_and_export_as_one_process_does(
    four: Ranks, world: int, inner: int, recipe: str, tmp_path: Path
) -> None:
    four.run(on_ranks, recipe, world, inner, str(tmp_path))


def offloaded(recipe: str, where: str) -> None:
    """CPU offload."""
    loads_and_exports(recipe, 128, INNER, where, init_device_mesh("cpu", (4,)), offload_policy=CPUOffloadPolicy(False))


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_block"])
def test_offloaded_shards_load(four: Ranks, recipe: str, tmp_path: Path) -> None:
    four.run(offloaded, recipe, str(tmp_path))


def replicated(recipe: str, where: str) -> None:
    """HSDP: two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    loads_and_exports(recipe, 128, INNER, where, mesh)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block"])
def test_replicas_load(four: Ranks, recipe: str, tmp_path: Path) -> None:
    four.run(replicated, recipe, str(tmp_path))

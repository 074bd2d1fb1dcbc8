"""safetensors in and out of sharded models: each rank reads its own slices, and the bytes are those of one process."""

from __future__ import annotations

import json
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks, mesh_of, on
from models import (
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import layoutc
from layoutc.checkpoint import export_safetensors, load_safetensors
from layoutc.checkpoint.common.whole_weights import gathered_whole
from layoutc.checkpoint.safetensors import files as safetensors_files
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.torch_private import local_tensor
from layoutc.runtime.weight.tensor import QuantizedTensor

INNER = 384  # rows of layers.0: three blocks of 128, so that two and four ranks cut inside of one


def among(world: int) -> DeviceMesh | None:
    """A mesh of the first ranks; None on the others."""
    mesh = mesh_of(world)
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
        held = local_tensor(param).detach()
        quantized = isinstance(held, QuantizedTensor)
        found += (
            [bytes(raw(held.entries(n)).tolist()) for n in held.store.planes]
            if quantized
            else [bytes(raw(held).tolist())]
        )
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("recipe", "world", "inner", "form"),
    [
        ("fp8_delayed", 4, 256, "shards"),
        ("nvfp4", 4, INNER, "offloaded"),
        ("fp8_block", 4, INNER, "replicas"),
        ("mxfp8", 2, INNER, "shards"),
        ("fp8_block", 3, INNER, "shards"),
        ("nvfp4", 4, INNER, "shards"),
        ("fp8_current", 3, INNER, "shards"),
    ],
)
@on("four")
def test_shards_load_and_export_as_one_process_does(
    recipe: str, world: int, inner: int, form: str, tmp_path: Path
) -> None:
    """The first ranks of four; the others take no part. Or two replicas of two shards (HSDP); or offloaded to CPUs."""
    where = str(tmp_path)
    options = {"offload_policy": CPUOffloadPolicy(False)} if form == "offloaded" else {}
    mesh = mesh_of(2, 2, names=("replicate", "shard")) if form == "replicas" else among(world)
    if mesh is not None:
        loads_and_exports(recipe, 128, inner, where, mesh, **options)


# -------------------------------------------------------------------------------------------- other ways to cut weights
class Experts(nn.Module):
    """Weights of five experts in one parameter, a buffer that files may leave out, and a head that is tied to it."""

    def __init__(self, experts: int, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, rows, 64))
        self.register_buffer("seen", torch.arange(4))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "experts", "rows", "dim"),
    [("fp8_delayed", 5, 128, 0), ("fp8_block", 3, 512, 1), ("nvfp4", 5, 128, 0), ("mxfp8", 3, 512, 1)],
)
@on("four")
def test_experts_load_also_where_a_rank_has_none(
    recipe: str, experts: int, rows: int, dim: int, tmp_path: Path
) -> None:
    """Cut on the dim of experts, so that one rank has none, or inside of each of them."""
    where = str(tmp_path)
    mesh = mesh_of(4)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(experts, rows, 64, generator=generator)
    x = (x * torch.exp2(torch.randint(-4, 5, (experts, rows, 1), generator=generator))).to(torch.bfloat16)
    if dist.get_rank() == 0:
        write(Path(where) / "source", {"experts.weight": x})
    dist.barrier()
    model = nn.Sequential(Experts(experts, rows))
    layoutc.quantize_(model, recipe, filter_fn=lambda module, _: isinstance(module, Experts))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda _: Shard(dim))
    with reads() as sizes:
        loaded = load_safetensors(model, Path(where) / "source", rename=lambda name: name.replace("0.", "experts."))
    assert loaded == (("0.seen",), ())
    assert sizes == [model[0].weight._local_tensor.numel() * 2]
    expected = recipe_module(recipe).quantize(x).planes()
    assert_same_tensors(expected, gathered_whole(model[0].weight.detach()).planes())  # type: ignore[attr-defined]

    export_safetensors(model, Path(where) / "quantized")
    found = load_file(Path(where) / "quantized" / "model.safetensors")
    assert_same_tensors({f"0.weight.{name}": plane for name, plane in expected.items()}, found)
    before = own_bytes(model)
    with torch.no_grad():
        model[0].weight._local_tensor.zero_() if dim == 0 else None
    load_safetensors(model, Path(where) / "quantized")
    assert own_bytes(model) == before
    plain = nn.Sequential(Experts(experts, rows)).to(torch.bfloat16)
    fully_shard(plain, mesh=mesh, shard_placement_fn=lambda _: Shard(dim))
    load_safetensors(plain, Path(where) / "quantized", convert=True)
    want = recipe_module(recipe).quantize(x).dequantize(torch.bfloat16)
    assert torch.equal(plain[0].weight.full_tensor(), want)  # type: ignore[operator]


class Pair(nn.Module):
    """Two layers, of which tensor parallelism cuts the first by rows, the second by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("recipe", "sharded"), [("fp8_block", True), ("nvfp4", True), ("fp8_delayed", False)])
@on("four")
def test_tensor_parallel_shards_load(recipe: str, sharded: bool, tmp_path: Path) -> None:
    """Tensor parallelism over two ranks, with FSDP2 over two more, whose cuts of `up` go through blocks of 128."""
    where = str(tmp_path)
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: (torch.randn(256, 256, generator=generator) * torch.logspace(-2, 2, 256)).to(torch.bfloat16)
        for name in ("up.weight", "down.weight")
    }
    if dist.get_rank() == 0:
        write(Path(where) / "source", tensors)
    dist.barrier()

    def built() -> Pair:
        model = Pair()
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        layoutc.quantize_(model, recipe)
        if sharded:
            fully_shard(model, mesh=mesh["dp"])
        return model

    model = built()
    with reads() as sizes:
        load_safetensors(model, Path(where) / "source")
    assert sizes == [local_tensor(param).numel() * 2 for param in model.parameters()]
    assert_holds(model, whole(recipe, tensors))
    export_safetensors(model, Path(where) / "quantized")
    found = load_file(Path(where) / "quantized" / "model.safetensors")
    assert_same_tensors(whole(recipe, tensors), found)
    other = built()
    load_safetensors(other, Path(where) / "quantized")
    assert_holds(other, whole(recipe, tensors))
    assert own_bytes(other) == own_bytes(model)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_block", "nvfp4"])
@on("four")
def test_weights_that_are_cast_on_gather_load(recipe: str, tmp_path: Path) -> None:
    """Weights that are cast on gather take plain values; what is gathered is the whole weight quantized."""
    where = str(tmp_path)
    tensors = values(128, INNER)
    if dist.get_rank() == 0:
        write(Path(where) / "source", tensors)
    dist.barrier()
    model = Model(128, INNER)
    layoutc.cast_on_gather_(model, recipe)
    shard(model)
    model(torch.randn(2, 128))
    load_safetensors(model, Path(where) / "source")
    for module in (*model.layers, model):
        module.unshard()  # type: ignore[operator]
    for name, param in model.named_parameters():
        if param.dim() == 2:
            planes = planes_of(recipe, tensors[name])
            held = param.data.planes()  # type: ignore[operator]
            assert_same_tensors(held, planes)
    export_safetensors(model, Path(where) / "plain", dtype=torch.bfloat16)
    found = load_file(Path(where) / "plain" / "model.safetensors")
    assert_same_tensors(tensors, found)


# ------------------------------------------------------------------------------------------------ what does not fit
def damaged(kind: str, folder: Path) -> None:
    """Makes a folder of safetensors unusable."""
    file, index = min(folder.glob("*.safetensors")), folder / "model.safetensors.index.json"
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-5])
    elif kind == "header":
        file.write_bytes(file.read_bytes()[:8] + b"?" + file.read_bytes()[9:])
    elif kind == "lost file":
        file.unlink()
    elif kind == "crc":
        raw_bytes = bytearray(file.read_bytes())
        raw_bytes[-1] ^= 1
        file.write_bytes(raw_bytes)
    elif kind == "outside":
        index.write_text(index.read_text().replace(file.name, f"../{file.name}"))


def refuses(kind: str, where: str) -> tuple[str, str]:
    """What is raised; nothing of the model has changed."""
    folder, rank, tensors = Path(where) / "files", dist.get_rank(), values(128, INNER)
    recipe, other = "nvfp4", "mxfp8"
    if kind in ("crc", "layout", "plain"):
        donor = shard(build(other if kind == "layout" else recipe, 128, INNER))
        export_safetensors(donor, folder, max_shard_bytes=30_000)
    elif rank == 0:
        if kind == "missing":
            del tensors["layers.1.weight"]
        elif kind == "unexpected":
            tensors["layers.9.weight"] = torch.zeros(2, 2)
        elif kind == "shape":
            tensors["head.weight"] = torch.zeros(128, 64)
        elif kind == "dtype":
            tensors["head.weight"] = tensors["head.weight"].to(torch.float8_e4m3fn)
        elif kind == "integers":
            tensors["layers.0.bias"] = tensors["layers.0.bias"].to(torch.int32)
        write(folder, tensors, 2)
    if rank == 0:
        damaged(kind, folder)
    dist.barrier()
    if kind == "plain":
        model: nn.Module = shard(Model(128, INNER))
    else:
        model = shard(build(recipe, 128, INNER))
    before = own_bytes(model)
    asked = folder if kind != "one rank" or rank != 2 else Path(where) / "elsewhere"
    with reads() as sizes, pytest.raises((LayoutError, FileNotFoundError)) as caught:
        load_safetensors(model, asked)
    assert own_bytes(model) == before
    assert not sizes
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("missing", "LayoutError", ["layers.1.weight is not in the files"]),
        ("unexpected", "LayoutError", ["layers.9.weight is in the files, but not in the model"]),
        ("shape", "LayoutError", ["head.weight: shape (128, 64) in the files, (128, 128) in the model"]),
        ("dtype", "LayoutError", ["head.weight: F8_E4M3 in the files", "dequantize the checkpoint first"]),
        ("integers", "LayoutError", ["layers.0.bias: I32 in the files", "float32"]),
        ("truncated", "DamagedError", ["model-00001-of-00002.safetensors is truncated"]),
        ("header", "DamagedError", ["the header is not JSON"]),
        ("lost file", "DamagedError", ["names model-00001-of-00002.safetensors, which is missing"]),
        ("outside", "DamagedError", ["'../model-00001-of-00002.safetensors', which is not a file of the same folder"]),
        ("crc", "DamagedError", ["are not those that were written (CRC-32 differs)"]),
        ("layout", "LayoutError", ["in the files", "recipe mxfp8 in the file, nvfp4 here", "convert=True"]),
        ("plain", "LayoutError", ["the files have it quantized in nvfp4, the model has it plain", "convert=True"]),
        ("one rank", "FileNotFoundError", ["rank 2: ", "elsewhere has neither model.safetensors nor"]),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks_alike(
    four: Ranks, kind: str, error: str, words: list[str], tmp_path: Path
) -> None:
    told = four.run(refuses, kind, str(tmp_path))
    assert all(said == told[0] for said in told)
    assert told[0][0] == error
    assert all(word in told[0][1] for word in words), told[0][1]


def refuses_to_export(kind: str, where: str) -> tuple[str, str, list[str]]:
    """An export that rank 0 can't write."""
    model, folder = shard(build("mxfp8", 128, INNER)), Path(where) / "files"
    if kind == "not empty" and dist.get_rank() == 0:
        folder.mkdir()
        (folder / "mine").touch()
    dist.barrier()
    patch = pytest.MonkeyPatch()
    if kind == "disk full" and dist.get_rank() == 0:

        def full(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr("layoutc.checkpoint.safetensors.writing.OpenFile.put", full)
    if kind == "gathering" and dist.get_rank() == 0:

        def no_memory(*_: Any) -> None:
            raise MemoryError("no memory")

        patch.setattr("layoutc.checkpoint.safetensors.export._made", no_memory)
    with pytest.raises((LayoutError, OSError)) as caught:
        export_safetensors(model, folder, max_shard_bytes=30_000)
    patch.undo()
    dist.barrier()
    return type(caught.value).__name__, str(caught.value), sorted(path.name for path in Path(where).iterdir())


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "error", "words", "left"),
    [
        ("not empty", "FileExistsError", "files exists and is not empty", ["files"]),
        ("disk full", "OSError", "No space left on device", []),
        ("gathering", "LayoutError", "MemoryError: no memory", []),
    ],
)
def test_an_export_that_fails_raises_on_all_ranks_and_leaves_nothing(
    four: Ranks, kind: str, error: str, words: str, left: list[str], tmp_path: Path
) -> None:
    told = four.run(refuses_to_export, kind, str(tmp_path))
    assert all(said == told[0] for said in told)
    assert told[0][0] == error
    assert words in told[0][1]
    assert told[0][2] == left


@pytest.mark.sample(1)
@pytest.mark.parametrize(("files", "recipe"), [("mxfp8", "nvfp4"), ("nvfp4", "fp8_block"), ("fp8_block", "mxfp8")])
@on("four")
def test_another_layout_is_converted_when_asked_for(files: str, recipe: str, tmp_path: Path) -> None:
    """A quantized export into shards of another layout: as quantizing what the files have, dequantized to fp32."""
    where = str(tmp_path)
    tensors = values(128, INNER)
    donor = shard(build(files, 128, INNER))
    if dist.get_rank() == 0:
        write(Path(where) / "source", tensors)
    dist.barrier()
    load_safetensors(donor, Path(where) / "source")
    export_safetensors(donor, Path(where) / "quantized")
    model = shard(build(recipe, 128, INNER))
    load_safetensors(model, Path(where) / "quantized", convert=True)
    there = recipe_module(files)
    fp32 = {n: there.quantize(x).dequantize(torch.float32) if x.dim() == 2 else x for n, x in tensors.items()}
    assert_holds(model, whole(recipe, fp32))


def disagrees(kind: str, where: str) -> tuple[str, str]:
    """The third rank reads, or exports, something of its own; what is raised, and nothing is written."""
    model, mine = shard(build("mxfp8", 128, INNER)), dist.get_rank() == 2
    before, folder = own_bytes(model), Path(where) / ("theirs" if mine else "files")
    if kind == "names":
        with pytest.raises(LayoutError) as caught:
            export_safetensors(model, Path(where) / "out", rename=lambda name: f"my.{name}" if mine else name)
    elif kind == "dtypes":
        with pytest.raises(LayoutError) as caught:
            export_safetensors(model, Path(where) / "out", dtype=torch.float32 if mine else torch.bfloat16)
    else:
        tensors = values(128, INNER)
        if kind == "other dtype" and mine:  # which would load as well
            tensors["head.weight"] = tensors["head.weight"].float()
        if kind == "other values" and mine:  # under the same headers
            tensors = {name: tensor + 1 for name, tensor in tensors.items()}
        if dist.get_rank() in (0, 2):
            write(folder, tensors, 2 if kind == "other files" and mine else 1)
        dist.barrier()
        with pytest.raises(LayoutError) as caught:
            load_safetensors(model, folder)
    assert own_bytes(model) == before
    dist.barrier()
    return str(caught.value), str(sorted(path.name for path in Path(where).iterdir()))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "words", "left"),
    [
        ("names", "rank 2 and rank 0 export different names, shapes or dtypes", "[]"),
        ("dtypes", "rank 2 and rank 0 export different names, shapes or dtypes", "[]"),
        ("other dtype", "rank 2 and rank 0 read different files in", "['files', 'theirs']"),
        ("other values", "rank 2 and rank 0 read different files in", "['files', 'theirs']"),
        ("other files", "rank 2 and rank 0 read different files in", "['files', 'theirs']"),
    ],
)
def test_ranks_that_read_or_export_different_things_all_raise(
    four: Ranks, kind: str, words: str, left: str, tmp_path: Path
) -> None:
    told = four.run(disagrees, kind, str(tmp_path))
    assert all(words in said for said, _ in told), told
    assert all(found == left for _, found in told), told


@on("four")
def test_a_weight_that_only_other_ranks_have_is_left_to_them(tmp_path: Path) -> None:
    """A plain weight that only the first two ranks have, beside one that all have."""
    where = str(tmp_path)
    rank, values = dist.get_rank(), torch.arange(96.0).view(8, 12)
    if rank == 0:
        save_file({"some": values, "all": values + 1}, f"{where}/model.safetensors")
    dist.barrier()
    model = nn.Module()
    for name, mesh in (("some", mesh_of(2)), ("all", mesh_of(4))):
        held = distribute_tensor(torch.zeros(8, 12), mesh, [Shard(0)], src_data_rank=None)
        model.register_parameter(name, nn.Parameter(held))
    load_safetensors(model, where)
    some, every = (local_tensor(param).detach() for param in model.parameters())
    assert torch.equal(every, (values + 1)[2 * rank : 2 * rank + 2])
    assert torch.equal(some, values[4 * rank : 4 * rank + 4]) if rank < 2 else some.numel() == 0


def narrows(where: str) -> tuple[str, list[str]]:
    """A plain weight in fp16 over all ranks, of which rank 2 has a value beyond it, and then one that is rounded."""
    rank = dist.get_rank()
    model = nn.Module()
    held = distribute_tensor(torch.zeros(8, 12, dtype=torch.float16), mesh_of(4), [Shard(0)], src_data_rank=None)
    model.register_parameter("some", nn.Parameter(held))
    values = torch.ones(8, 12)
    for number, value in (("0", 1e6), ("1", 1 + 2**-20)):
        values[5, 7] = value
        if rank == 0:
            write(Path(where) / number, {"some": values})
    dist.barrier()
    with pytest.raises(LayoutError) as caught:
        load_safetensors(model, Path(where) / "0")
    local = local_tensor(model.some)
    assert not local.any()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        load_safetensors(model, Path(where) / "1")
    assert bool((local == 1).all())
    return str(caught.value), [str(one.message) for one in said]


def test_values_beyond_a_dtype_on_one_rank_are_refused_on_all_and_rounding_is_said_by_the_first(
    four: Ranks, tmp_path: Path
) -> None:
    told = four.run(narrows, str(tmp_path))
    assert all("rank 2: some: 1 finite values would be infinite in float16" in refused for refused, _ in told), told
    assert [len(said) for _, said in told] == [1, 0, 0, 0], told
    assert "some (F32 to F16)" in told[0][1][0]

"""On a card: stagers with pinned, shared and cached memory copy quantized weights to the byte as training goes on."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.fsdp import fully_shard

import layoutc
from layoutc.runtime.weight.tensor import QuantizedTensor

RECIPES = ("fp8_delayed", "fp8_block", "mxfp8", "nvfp4", "int4_group32")
SAVES = 3
REUSABLE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)  # torch 2.11 uses a stager once

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A group of one rank for training, and one of gloo for checkpoints."""
    store = f"file://{tmp_path_factory.mktemp('group') / 'store'}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1)
    yield dist.new_group(backend="gloo")
    dist.destroy_process_group()


def model_of(recipe: str, seed: int) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda()
    layoutc.quantize_(model, recipe)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def snapshot(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of all planes, on the CPU, taken after everything on the card has ended."""
    torch.cuda.synchronize()
    found = {}
    for name, tensor in state.items():
        own = getattr(tensor, "_local_tensor", tensor)
        planes = own.planes() if isinstance(own, QuantizedTensor) else {"values": own.detach()}
        found |= {f"{name}.{plane}": value.cpu().clone() for plane, value in planes.items()}
    return found


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        ours, theirs = (x.contiguous().flatten().view(torch.uint8) for x in (value, b[name]))
        assert torch.equal(ours, theirs), name


def kinds_in(folder: Path) -> dict[str, type]:
    """The class of each tensor in a checkpoint's files."""
    found = {}
    for index, info in FileSystemReader(folder).read_metadata().storage_data.items():  # type: ignore[union-attr]
        content = (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        found[index.fqn] = type(torch.load(io.BytesIO(content), weights_only=True, map_location="cpu"))
    return found


def options_of(kind: str, folder: Path) -> dict[str, Any]:
    """What async_save is given; for all saves, where torch can use a stager again."""
    if kind.startswith("blocking"):
        return {"storage_writer": FileSystemWriter(folder, cache_staged_state_dict=kind == "blocking_cached")}
    if kind == "default":
        return {}
    parts = kind.split("_")
    options = StagingOptions(
        use_pinned_memory="pinned" in parts,
        use_shared_memory="shared" in parts,
        use_async_staging="async" in parts,
        use_non_blocking_copy="nonblocking" in parts,
    )
    return {"async_stager": DefaultStager(options)}


KINDS = ["default", "plain", "pinned", "shared", "pinned_shared", "pinned_nonblocking", "pinned_async_nonblocking"]


@pytest.mark.parametrize("kind", [*KINDS, "blocking", "blocking_cached"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_staged_saves_hold_the_bytes_of_their_moment(recipe: str, kind: str, group: Any, tmp_path: Path) -> None:
    """One stager for three saves, where torch allows it; the model trains on as soon as the copy is made.

    Compared with the planes as they stood on the card, byte for byte.
    """
    model = model_of(recipe, 0)
    optimizer = layoutc.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2)
    options = options_of(kind, tmp_path / "0") | {"process_group": group}
    expected = []
    for number in range(SAVES):
        if "async_stager" in options and not REUSABLE:
            options |= options_of(kind, tmp_path)
        state = model.state_dict()
        expected.append(snapshot(state))
        saving: Any = dcp.async_save(state, checkpoint_id=tmp_path / str(number), **options)
        if hasattr(saving, "staging_completion"):  # the copy itself goes on in the background
            saving.staging_completion.result()
        x = torch.randn(64, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(number))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        getattr(saving, "upload_completion", saving).result()
    assert any(not torch.equal(a, expected[0][name]) for name, a in expected[1].items()), "nothing was trained"
    if "async_stager" in options:
        options["async_stager"].close()
    other = model_of(recipe, 1)
    for number, wanted in enumerate(expected):
        loaded = other.state_dict()
        dcp.load(loaded, checkpoint_id=tmp_path / str(number), process_group=group)
        assert_same(snapshot(other.state_dict()), wanted)
        own = importlib.import_module(f"layoutc.recipes.{recipe}").Tensor
        for name, kept in kinds_in(tmp_path / str(number)).items():
            assert kept is (own if name.endswith("weight") else torch.Tensor), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_files_of_a_card_and_of_the_cpu_are_the_same(recipe: str, group: Any, tmp_path: Path) -> None:
    """Where a weight lies leaves no trace in its file."""
    one = importlib.import_module(f"layoutc.recipes.{recipe}")
    weight = one.quantize(torch.randn(512, 256, generator=torch.Generator().manual_seed(0)))
    content = []
    for device in ("cpu", "cuda"):
        folder = tmp_path / device
        dcp.save({"weight": weight.to(device)}, checkpoint_id=folder, process_group=group)
        content.append([path.read_bytes() for path in sorted(folder.glob("*.distcp"))])
    assert content[0] == content[1]

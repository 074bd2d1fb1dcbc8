"""layoutc.inspect lists what a folder holds: every entry, its layout, what it costs; and what is wrong with it."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_cases import Evil, columns, save, trained
from torch import nn
from torch.distributed.checkpoint import metadata as dcp
from weight_recipes import CUT_APART, WEIGHTS

import layoutc
import layoutc.checkpoint
from layoutc.checkpoint import reading
from layoutc.checkpoint.common.entries import EntryFacts
from layoutc.checkpoint.inspection import CheckpointFacts, inspect
from layoutc.runtime.errors import DamagedError, LayoutError
from layoutc.runtime.weight import stored_form


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model, state = trained()
    folder = save(state, tmp_path_factory.mktemp("saved"))
    return SimpleNamespace(model=model, state=state, folder=folder, facts=inspect(folder))


def quantized(recipe: str, rows: int = 128, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    layer = nn.Linear(128, rows, bias=False)
    layoutc.quantize_(layer, recipe)
    return layer.weight.detach()


def entry(facts: CheckpointFacts, name: str) -> EntryFacts:
    (found,) = (one for one in facts.entries if one.name == name)
    return found


def in_pieces(folder: Path, pieces: list[Any], change: Callable[[dcp.Metadata], None] = lambda _: None) -> Path:
    """A folder in which `weight` is stored as pieces, rows after rows, as ranks save them."""
    folder.mkdir()
    parts, at, metadata = [], 0, None
    for number, piece in enumerate(pieces):
        made = save({"weight": piece}, folder / f"{number}")
        metadata = reading.read_metadata(made)
        (info,) = metadata.storage_data.values()
        shutil.move(made / info.relative_path, folder / f"__{number}_0.distcp")
        info.relative_path = f"__{number}_0.distcp"
        parts.append((dcp.ChunkStorageMetadata(torch.Size((at, 0)), piece.shape), info))
        at += len(piece)
        shutil.rmtree(made)
    assert metadata is not None
    whole: Any = metadata.state_dict_metadata["weight"]
    whole.size, whole.chunks = torch.Size((at, *pieces[0].shape[1:])), [chunk for chunk, _ in parts]
    metadata.storage_data = {dcp.MetadataIndex("weight", chunk.offsets): info for chunk, info in parts}
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


# -------------------------------------------------------------------------------------------------- what a folder holds
@pytest.mark.sample(4)
@pytest.mark.parametrize("recipe", CUT_APART)
def test_a_weight_in_each_recipe(saved: Any, recipe: str) -> None:
    weight = saved.model.get_submodule(recipe).weight.detach()
    shape, elements = (128, columns(recipe)), 128 * columns(recipe)
    found, layout = entry(saved.facts, f"model.{recipe}.weight"), weight.LAYOUT
    assert (found.kind, found.shape, found.dtype, found.pieces, found.plain) == (recipe, shape, "float32", 1, 0)
    (one,) = found.layouts
    assert (one.recipe, one.layout_id, one.language) == (layout.name, layout.layout_id, layout.language)
    assert (one.spec_sha256, one.installed, one.difference, one.pieces) == (layout.spec_sha256, True, None, 1)
    assert found.planes == tuple(weight.store.planes)
    assert found.orientations == weight.store.declared
    held = sum(plane.nbytes for plane in weight.store.planes.values())
    assert held < found.stored_bytes < held + 4096
    assert found.bytes_per_element == found.stored_bytes / elements
    assert found.bf16_bytes == 2 * elements
    master = entry(saved.facts, f"optim.state.{recipe}.weight.master")
    assert (master.kind, master.layouts, master.bf16_bytes) == ("float32", (), 2 * elements)


def test_every_entry_is_there_in_order(saved: Any) -> None:
    metadata = reading.read_metadata(saved.folder)
    assert [one.name for one in saved.facts.entries] == list(metadata.state_dict_metadata)
    assert sum(one.stored_bytes for one in saved.facts.entries) == sum(i.length for i in metadata.storage_data.values())
    codes, step, none = (entry(saved.facts, f"extra.{name}") for name in ("codes", "steps.1", "none"))
    assert (codes.kind, codes.shape, codes.bf16_bytes) == ("float8_e4m3fn", (3,), 6)
    assert (step.kind, step.bf16_bytes) == ("int64", 32)
    nbytes = next(info.length for at, info in metadata.storage_data.items() if at.fqn == "extra.none")
    assert none == EntryFacts("extra.none", "value", None, None, (), 0, (), (), 1, nbytes, None, nbytes)
    assert step == EntryFacts(
        "extra.steps.1", "int64", (4,), "int64", (), 1, (), (), 1, step.stored_bytes, step.stored_bytes / 4, 32
    )


def test_totals(saved: Any) -> None:
    facts = saved.facts
    assert (facts.folder, facts.form, facts.thorough) == (str(saved.folder), "torch.distributed.checkpoint", False)
    assert facts.files == len(list(saved.folder.iterdir()))
    assert facts.bytes_on_disk == sum(file.stat().st_size for file in saved.folder.iterdir())
    assert {one.kind for one in facts.totals} == {*WEIGHTS, "float32", "float8_e4m3fn", "int64", "value"}
    assert [one.stored_bytes for one in facts.totals] == sorted((o.stored_bytes for o in facts.totals), reverse=True)
    assert sum(one.entries for one in facts.totals) == len(facts.entries)
    assert sum(one.bf16_bytes for one in facts.totals) == facts.bf16_bytes
    assert sum(one.stored_bytes for one in facts.totals) < facts.bytes_on_disk
    assert all(one.elements == 128 * columns(one.kind) for one in facts.totals if one.kind in WEIGHTS)


def test_thorough_is_the_same_where_all_pieces_are(saved: Any) -> None:
    assert inspect(saved.folder, thorough=True).entries == saved.facts.entries


def test_layoutcs_own_folders_and_paths_as_text(saved: Any, tmp_path: Path) -> None:
    layoutc.checkpoint.save(saved.state, tmp_path / "own", no_dist=True)
    facts = layoutc.inspect(str(tmp_path / "own"))
    assert facts.entries == layoutc.checkpoint.inspect(tmp_path / "own").entries == saved.facts.entries
    assert (tmp_path / "own" / "layoutc.json") in list((tmp_path / "own").iterdir())


def test_no_weights_are_read(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    inner = reading.read_at
    monkeypatch.setattr(reading, "read_at", lambda file, at, n: read.append(n) or inner(file, at, n))
    tensors = [one for one in inspect(saved.folder).entries if one.shape is not None]
    assert len(read) < 8 * len(tensors)
    assert sum(read) < 4000 * len(tensors)
    assert max(read) < 4000


# --------------------------------------------------------------------------------------------------------------- pieces
def test_pieces_of_one_layout(tmp_path: Path) -> None:
    pieces = [quantized("mxfp8", rows) for rows in (64, 32, 32)]
    for thorough in (False, True):
        folder = in_pieces(tmp_path / f"{thorough}", pieces)
        (found,) = inspect(folder, thorough).entries
        assert (found.kind, found.shape, found.pieces) == ("mxfp8", (128, 128), 3)
        assert [one.pieces for one in found.layouts] == [3 if thorough else 1]
        assert found.stored_bytes == sum(file.stat().st_size for file in folder.glob("*.distcp"))


def test_mixed_layouts_are_found_when_all_headers_are_read(tmp_path: Path) -> None:
    folder = in_pieces(tmp_path / "a", [quantized("nvfp4", 64), quantized("mxfp8", 32), torch.zeros(32, 128)])
    assert [one.kind for one in inspect(folder).entries] == ["nvfp4"]
    (found,) = inspect(folder, thorough=True).entries
    assert found.kind == "mixed"
    assert [(one.recipe, one.pieces) for one in found.layouts] == [("nvfp4", 1), ("mxfp8", 1)]
    assert (found.plain, found.pieces) == (1, 3)


def test_ranks_without_rows_share_a_piece(tmp_path: Path) -> None:
    def add_empty(metadata: dcp.Metadata) -> None:
        whole: Any = metadata.state_dict_metadata["weight"]
        whole.chunks.append(copy.deepcopy(whole.chunks[-1]))

    folder = in_pieces(tmp_path / "a", [torch.zeros(4, 8), torch.zeros(0, 8)], add_empty)
    (found,) = inspect(folder, thorough=True).entries
    assert (found.kind, found.shape, found.pieces, found.plain) == ("float32", (4, 8), 2, 2)


def test_a_tensor_without_elements(tmp_path: Path) -> None:
    (found,) = inspect(save({"none": torch.zeros(0, 5)}, tmp_path)).entries
    assert (found.kind, found.shape, found.bytes_per_element, found.bf16_bytes) == ("float32", (0, 5), None, 0)


# -------------------------------------------------------------------------------------------- layouts that are not here
def test_a_layout_that_no_recipe_has_says_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = stored_form.describe

    def other(layout: Any) -> dict[str, Any]:
        found = copy.deepcopy(told(layout))
        found["facts"]["blocks"]["rowwise"] = "1x64"
        return found | {"layout_id": "0123456789ab", "language": 7}

    weight = quantized("mxfp8")
    with monkeypatch.context() as patch:
        patch.setattr(stored_form, "describe", other)
        save({"weight": weight}, tmp_path)
    (found,) = inspect(tmp_path).entries
    (one,) = found.layouts
    assert (one.layout_id, one.language, one.installed) == ("0123456789ab", 7, False)
    assert one.difference == (
        f"the installed mxfp8 is layout {weight.LAYOUT.layout_id}: language 7 in the file, {weight.LAYOUT.language} "
        "here; block rowwise 1x64 in the file, 1x32 here"
    )


def test_a_recipe_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = stored_form.describe
    weight = quantized("mxfp8")
    with monkeypatch.context() as patch:
        patch.setattr(stored_form, "describe", lambda one: told(one) | {"layout_id": "x", "recipe": "os"})
        save({"weight": weight}, tmp_path)
    (one,) = inspect(tmp_path).entries[0].layouts
    assert (one.recipe, one.installed, one.difference) == ("os", False, "no recipe os is installed")


def test_transformed_items_are_said_to_be_unread(tmp_path: Path) -> None:
    def compress(metadata: dcp.Metadata) -> None:
        next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]

    (found,) = inspect(in_pieces(tmp_path / "a", [quantized("mxfp8")], compress)).entries
    assert (found.kind, found.layouts, found.dtype) == ("unread", (), "float32")


# ------------------------------------------------------------------------------------------------------ what is damaged
def test_metadata_and_items_have_to_agree(tmp_path: Path) -> None:
    folder = in_pieces(tmp_path / "a", [quantized("mxfp8")])
    shutil.copy(save({"weight": torch.zeros(5)}, tmp_path / "b") / "__0_0.distcp", folder)
    raw = pickle.loads((folder / ".metadata").read_bytes())
    (info,) = raw.storage_data.values()
    info.relative_path, info.length = "__0_0.distcp", (folder / "__0_0.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(raw))
    with pytest.raises(DamagedError, match=r"holds \(5,\) in float32, but .metadata says .* \(128, 128\) in float32"):
        inspect(folder)


def test_torn_and_damaged_folders(saved: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(saved.folder, tmp_path / "a")
    file = next(folder.glob("*.distcp"))
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(DamagedError, match="truncated"):
        inspect(folder)
    at = data.rindex(b"PK\1\2")
    file.write_bytes(data[:at] + b"X" + data[at + 1 :])
    with pytest.raises(DamagedError, match=r"not a whole torch\.save zip"):
        inspect(folder, thorough=True)
    file.unlink()
    with pytest.raises(DamagedError, match="is missing"):
        inspect(folder)
    (folder / ".metadata").unlink()
    with pytest.raises(LayoutError, match="is not a checkpoint"):
        inspect(folder)
    (folder / "__3_0.distcp").touch()
    with pytest.raises(LayoutError, match="did not finish"):
        inspect(folder)
    with pytest.raises(LayoutError, match="does not exist"):
        inspect(tmp_path / "nowhere")


def test_nothing_is_run(tmp_path: Path) -> None:
    marker, folder = tmp_path / "marker", tmp_path / "a"
    save({"value": Evil(marker), "tensor": torch.zeros(3)}, folder)
    facts = inspect(folder, thorough=True)
    assert {one.name: one.kind for one in facts.entries} == {"value": "value", "tensor": "float32"}
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    with pytest.raises(DamagedError, match="could run any code"):
        inspect(folder)
    assert not marker.exists()


def test_the_manifest_is_believed(tmp_path: Path) -> None:
    layoutc.checkpoint.save({"step": torch.arange(3)}, tmp_path / "own", no_dist=True)
    layoutc.checkpoint.save({"step": torch.arange(3)}, tmp_path / "other", no_dist=True)
    shutil.copy(tmp_path / "other" / ".metadata", tmp_path / "own" / ".metadata")
    with pytest.raises(DamagedError, match=r"is not what was saved"):
        inspect(tmp_path / "own")


# ---------------------------------------------------------------------------------------------------------- safetensors
def test_safetensors_of_every_recipe(saved: Any, tmp_path: Path) -> None:
    layoutc.checkpoint.export_safetensors(saved.model, tmp_path / "hf", max_shard_bytes=100_000)
    facts = inspect(tmp_path / "hf")
    assert facts.form == "safetensors"
    assert facts.files > 2
    assert {one.name for one in facts.entries} == set(saved.model.state_dict())
    for recipe in WEIGHTS:
        ours, theirs = entry(facts, f"{recipe}.weight"), entry(saved.facts, f"model.{recipe}.weight")
        shape = 128, columns(recipe)
        assert (ours.kind, ours.shape, ours.dtype, ours.layouts) == (recipe, shape, "float32", theirs.layouts)
        assert (ours.orientations, set(ours.planes)) == (theirs.orientations, set(theirs.planes))
        planes = saved.model.get_submodule(recipe).weight.detach().store.planes
        assert ours.stored_bytes == sum(plane.nbytes for plane in planes.values())
    assert entry(facts, f"{WEIGHTS[0]}.bias").kind == "float32"


def test_plain_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(4, dtype=torch.int64)}
    save_file(tensors | {"c": torch.zeros(8, dtype=torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    facts = inspect(tmp_path)
    kinds = {one.name: (one.kind, one.shape, one.stored_bytes, one.bf16_bytes) for one in facts.entries}
    assert kinds == {
        "a": ("bfloat16", (2, 3), 12, 12),
        "b": ("int64", (4,), 32, 32),
        "c": ("float8_e4m3fn", (8,), 8, 16),
    }
    assert facts.bf16_bytes == 60


def test_damaged_safetensors(tmp_path: Path) -> None:
    layer = nn.Sequential(nn.Linear(128, 128, bias=False))
    layoutc.quantize_(layer, "mxfp8")
    layoutc.checkpoint.export_safetensors(layer, tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    data = file.read_bytes()
    for old, new in ((b'\\"language\\": 1', b'\\"language\\": x'), (b'\\"language\\": 1', b'\\"longuage\\": 1'),
                     (b'\\"1x32\\"', b'[\\"132\\"'), (b'[\\"rowwise\\"', b'[[\\"rowwis\\"')):  # fmt: skip
        assert old in data
        file.write_bytes(data.replace(old, new, 1))
        with pytest.raises(DamagedError):
            inspect(tmp_path / "hf")
    file.write_bytes(data[:-1])
    with pytest.raises(DamagedError):
        inspect(tmp_path / "hf")
    file.rename(tmp_path / "hf" / "other.safetensors")
    with pytest.raises(LayoutError, match=r"neither model\.safetensors nor"):
        inspect(tmp_path / "hf")

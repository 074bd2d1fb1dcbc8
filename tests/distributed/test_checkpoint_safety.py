"""Damaged checkpoints: each refused in words on all ranks, nothing of the live model changed, no code run."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import Ranks
from models import adam, build, my_share, raw, shard, train_step
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor

from layoutc import checkpoint
from layoutc.checkpoint.assembly import Destination
from layoutc.runtime.errors import DamagedError, LayoutError
from layoutc.runtime.weight.tensor import QuantizedTensor

WIDTH = 96  # three blocks of mxfp8 on two ranks: a cut goes through one
RECIPE = "mxfp8"
QUANTIZED, PLAIN = "model.layers.0.weight", "optimizer.state.layers.0.weight.master"


def state_of(seed: int, steps: int = 0, width: int = WIDTH, recipe: str = RECIPE) -> dict[str, Any]:
    """Model and optimizer, sharded over all ranks."""
    model = shard(build(recipe, width, seed=seed))
    optimizer = adam(model)
    for step in range(max(steps, 1)):
        train_step(model, optimizer, step, width, my_share())
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def all_bytes(value: Any, path: str = "") -> dict[str, bytes]:
    """The bytes of every tensor in a nested state."""
    if isinstance(value, dict):
        return {k: b for key, inner in value.items() for k, b in all_bytes(inner, f"{path}.{key}").items()}
    local = value._local_tensor if isinstance(value, DTensor) else value
    if isinstance(local, QuantizedTensor):
        return {f"{path}.{n}": raw(local.entries(n)).numpy().tobytes() for n in local.planes()}
    return {path: raw(local).numpy().tobytes()} if isinstance(local, torch.Tensor) else {path: repr(local).encode()}


def saves(folder: str, seed: int, recipe: str = RECIPE, width: int = WIDTH) -> None:
    """A checkpoint of a model that has been trained."""
    checkpoint.save(state_of(seed, 2, width, recipe), folder)


def refuses(folder: str, missing: str = "", width: int = WIDTH) -> tuple[str, str]:
    """Kind and words of the refusal; fails where anything of the live state has changed."""
    state = state_of(5, width=width)
    if missing:
        state["model"].pop(missing)
    before = all_bytes(state)
    with pytest.raises(LayoutError) as caught:
        checkpoint.load(state, folder)
    assert all_bytes(state) == before, "a load that failed has changed the model"
    return type(caught.value).__name__, str(caught.value)


def loads(folder: str, seed: int) -> bool:
    """True where it loads, to the bytes that were saved."""
    state, saved = state_of(5), state_of(seed, 2)
    checkpoint.load(state, folder)
    return all_bytes(state) == all_bytes(saved)


@pytest.fixture(scope="module")
def sound(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to damage copies of, and another of the same shapes."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, seed in (("sound", 0), ("other", 1)):
        two.run(saves, str(folder / name), seed)
    two.run(saves, str(folder / "recipe"), 0, "fp8_block", WIDTH)
    two.run(saves, str(folder / "wide"), 0, RECIPE, 2 * WIDTH)
    return folder


def data_file(folder: Path, rank: int = 0) -> Path:
    return folder / f"__{rank}_0.distcp"


def metadata_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def place(folder: Path, name: str) -> tuple[Any, Any]:
    """Index and place of the first item of a tensor."""
    return next((i, info) for i, info in metadata_of(folder).storage_data.items() if i.fqn == name)


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def cover_up(folder: Path, metadata: bytes) -> None:
    """Writes .metadata, and a manifest that vouches for everything in the folder."""
    (folder / ".metadata").write_bytes(metadata)
    manifest = json.loads((folder / "layoutc.json").read_text())
    manifest["metadata"] = {"bytes": len(metadata), "crc32": zlib.crc32(metadata)}
    manifest["files"] = {file.name: file.stat().st_size for file in folder.glob("*.distcp")}
    (folder / "layoutc.json").write_text(json.dumps(manifest))


def replace_item(folder: Path, name: str, data: bytes) -> None:
    """Puts other bytes in the place of an item, covering up everything else."""
    metadata = metadata_of(folder)
    for index, info in metadata.storage_data.items():
        if index.fqn == name:
            path = folder / info.relative_path
            info.offset, info.length = path.stat().st_size, len(data)
            info.__dict__.pop("crc32", None)
            path.write_bytes(path.read_bytes() + data)
    cover_up(folder, pickle.dumps(metadata))


class Malicious:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def torch_saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def changed_item(folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The first item of a quantized tensor, with another state, saved anew."""
    _, info = place(folder, name)
    with (folder / info.relative_path).open("rb") as file:
        file.seek(info.offset)
        tensor = torch.load(io.BytesIO(file.read(info.length)), weights_only=True)
    function, (state,) = tensor.__reduce_ex__(2)[:2]
    change(state)

    class Other:
        def __reduce__(self) -> tuple[Any, ...]:
            return function, (state,)

    return torch_saved(Other())


def shift_offsets(folder: Path) -> None:
    metadata = metadata_of(folder)
    for info in metadata.storage_data.values():
        info.offset += 10**9
    cover_up(folder, pickle.dumps(metadata))


def leave_folder(folder: Path) -> None:
    metadata = metadata_of(folder)
    shutil.copy(data_file(folder), folder.parent / "outside.distcp")
    for info in metadata.storage_data.values():
        info.relative_path = "../outside.distcp"
    cover_up(folder, pickle.dumps(metadata))


def drop_piece(folder: Path) -> None:
    metadata = metadata_of(folder)
    metadata.state_dict_metadata[QUANTIZED].chunks.pop()
    cover_up(folder, pickle.dumps(metadata))


def swap(folder: Path) -> None:
    a, b = data_file(folder, 0).read_bytes(), data_file(folder, 1).read_bytes()
    data_file(folder, 0).write_bytes(b)
    data_file(folder, 1).write_bytes(a)


def swap_items(folder: Path) -> None:
    """Two items of the same shape change places, sizes and all."""
    metadata = metadata_of(folder)
    names = "model.layers.0.weight", "model.layers.1.weight"
    (_, a), (_, b) = ((i, next(v for k, v in metadata.storage_data.items() if k.fqn == i)) for i in names)
    assert (a.relative_path, a.length) == (b.relative_path, b.length)
    data = bytearray((folder / a.relative_path).read_bytes())
    one, two = (bytes(data[info.offset : info.offset + info.length]) for info in (a, b))
    data[a.offset : a.offset + a.length], data[b.offset : b.offset + b.length] = two, one
    (folder / a.relative_path).write_bytes(data)


def inside(folder: Path, name: str, part: float) -> tuple[Path, int]:
    """A file, and a position in an item of it."""
    _, info = place(folder, name)
    return folder / info.relative_path, info.offset + int(info.length * part)


def zero_sector(folder: Path) -> None:
    path, start = inside(folder, PLAIN, 0.3)
    data = bytearray(path.read_bytes())
    data[start : start + 512] = bytes(512)
    path.write_bytes(data)


def truncate(path: Path, size: int) -> None:
    os.truncate(path, size)


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def tuples_in_tuples(levels: int = 16) -> tuple[Any, ...]:
    """Two of each in the next; not so many that to save it would take for ever."""
    found: tuple[Any, ...] = ()
    for _ in range(levels):
        found = (found, found)
    return found


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "half of a file": (lambda f: truncate(data_file(f), data_file(f).stat().st_size // 2), "bytes, not the"),
    "a byte less": (lambda f: truncate(data_file(f, 1), data_file(f, 1).stat().st_size - 1), "bytes, not the"),
    "an empty file": (lambda f: truncate(data_file(f), 0), "has 0 bytes"),
    "a missing shard": (lambda f: data_file(f, 1).unlink(), "is missing"),
    "a byte more": (lambda f: data_file(f).write_bytes(data_file(f).read_bytes() + b"x"), "bytes, not the"),
    "a bit of a plane": (lambda f: flip(*inside(f, QUANTIZED, 0.6)), "layers.0.weight.*CRC-32"),
    "a bit of a master": (lambda f: flip(*inside(f, PLAIN, 0.5)), "layers.0.weight.master.*CRC-32"),
    "a bit of a pickle": (lambda f: flip(*inside(f, QUANTIZED, 0.05)), "layers.0.weight"),
    "a bit of a directory": (lambda f: flip(*inside(f, QUANTIZED, 0.97)), "layers.0.weight"),
    "a lost sector": (zero_sector, "layers.0.weight.master"),
    "a bit of .metadata": (lambda f: flip(f / ".metadata", 1000), r"\.metadata.*CRC-32"),
    "half of .metadata": (lambda f: truncate(f / ".metadata", 500), r"\.metadata"),
    "no .metadata": (lambda f: (f / ".metadata").unlink(), r"\.metadata"),
    "an empty .metadata": (lambda f: truncate(f / ".metadata", 0), r"\.metadata"),
    "a manifest that is no JSON": (
        lambda f: (f / "layoutc.json").write_text("{"),
        r"layoutc\.json is not a checkpoint's manifest",
    ),
    "a manifest of the future": (
        lambda f: (f / "layoutc.json").write_text('{"format": 9, "metadata": {}, "files": {}}'),
        "has format 9",
    ),
    "swapped files": (swap, "not the item|bytes, not the|not a complete"),
    "swapped items": (swap_items, "not the item that was saved"),
    "a file of another checkpoint": (
        lambda f: shutil.copy(f.parent / "other" / "__1_0.distcp", data_file(f, 1)),
        "not the item|bytes, not the|CRC-32",
    ),
    "places beyond the end": (shift_offsets, "ends after 0 of"),
    "places in another folder": (leave_folder, r"outside\.distcp|file name"),
    "a missing piece": (drop_piece, "layers.0.weight"),
    "another layout id": (
        lambda f: replace_item(f, QUANTIZED, changed_item(f, QUANTIZED, lambda s: s.update(layout_id="0123456789ab"))),
        "layers.0.weight.*0123456789ab.*no installed recipe has",
    ),
    "a plane of another size": (
        lambda f: replace_item(
            f,
            QUANTIZED,
            changed_item(f, QUANTIZED, lambda s: s.update(shape=(3, 7), matrix=(3, 7), halo=(0, 0))),
        ),
        "layers.0.weight",
    ),
    "another checksum": (
        lambda f: replace_item(f, QUANTIZED, changed_item(f, QUANTIZED, lambda s: s["crc32"].update(rowwise_data=1))),
        "layers.0.weight.*rowwise_data.*CRC-32",
    ),
    "a pipe in place of a file": (lambda f: to_pipe(f / ".metadata"), "is not a regular file"),
    "a pipe in place of a shard": (lambda f: to_pipe(data_file(f, 1)), "is missing"),
    "a halo of more rows than there are": (
        lambda f: replace_item(
            f,
            QUANTIZED,
            changed_item(f, QUANTIZED, lambda s: s.update(matrix=(s["shape"][0] + 2**24, WIDTH), halo=(0, 2**24))),
        ),
        "layers.0.weight.*has a halo of",
    ),
    "tuples in tuples as a key": (
        lambda f: replace_item(f, "optimizer.param_groups.0.lr", torch_saved({tuples_in_tuples(): 1})),
        "nests tuples too often",
    ),
    "a value in place of a tensor": (
        lambda f: replace_item(f, PLAIN, torch_saved({"a": 1})),
        "dict is stored in place of",
    ),
}


def a_copy(sound: Path, tmp_path: Path, name: str = "sound") -> Path:
    shutil.copytree(sound / "other", tmp_path / "other")
    return Path(shutil.copytree(sound / name, tmp_path / "checkpoint"))


def same_on_all(results: list[tuple[str, str]]) -> tuple[str, str]:
    assert all(result == results[0] for result in results), results
    return results[0]


@pytest.mark.sample(7)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_and_nothing_changes(two: Ranks, sound: Path, tmp_path: Path, damage: str) -> None:
    folder = a_copy(sound, tmp_path)
    how, words = DAMAGE[damage]
    how(folder)
    kind, text = same_on_all(two.run(refuses, str(folder)))
    import re

    assert re.search(words, text, re.DOTALL), text
    assert kind == "DamagedError" or damage in ("no .metadata", "a manifest of the future", "another layout id"), kind


@pytest.mark.parametrize("where", ["metadata", "tensor", "value"])
def test_a_malicious_pickle_is_not_run(two: Ranks, sound: Path, tmp_path: Path, where: str) -> None:
    """Even where whoever wrote it has covered up everything."""
    folder, mark = a_copy(sound, tmp_path), tmp_path / "mark"
    if where == "metadata":
        cover_up(folder, pickle.dumps(Malicious(mark)))
    else:
        name = QUANTIZED if where == "tensor" else "optimizer.param_groups.0.lr"
        replace_item(folder, name, torch_saved(Malicious(mark)))
    kind, text = same_on_all(two.run(refuses, str(folder)))
    assert kind == "DamagedError"
    assert "mkdir" in text
    assert not mark.exists()


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("recipe", (), "layers.0.weight has layout .* in the checkpoint and .* in the model: recipe fp8_block"),
        ("wide", (), "layers.0"),
        ("sound", ("layers.0.weight",), "has model.layers.0.weight, which the state dict lacks"),
    ],
    ids=["another recipe", "other shapes", "an entry too many"],
)
def test_what_does_not_fit_is_refused(
    two: Ranks, sound: Path, name: str, arguments: tuple[str, ...], words: str
) -> None:
    import re

    kind, text = same_on_all(two.run(refuses, str(sound / name), *arguments))
    assert kind == "LayoutError"
    assert re.search(words, text), text


def lacks_a_key(folder: str) -> str:
    """The state dict asks for more than there is."""
    state = state_of(5)
    state["model"]["more"] = torch.zeros(3)
    before = all_bytes(state)
    with pytest.raises(LayoutError) as caught:
        checkpoint.load(state, folder)
    assert all_bytes(state) == before
    return str(caught.value)


def test_a_missing_entry_is_named(two: Ranks, sound: Path) -> None:
    assert all("more" in text for text in two.run(lacks_a_key, str(sound / "sound")))


def is_found_or_harmless(folder: str, flips: list[tuple[str, int, int]]) -> list[int]:
    """Flips one bit after another; each is found, or what loads is what was saved. How many were each."""
    state, saved, found = state_of(5), all_bytes(state_of(0, 2)), [0, 0]
    before = all_bytes(state)
    for name, position, bit in flips:
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            flip(Path(folder, name), position, bit)
        torch.distributed.barrier()
        try:
            checkpoint.load(state, folder)
        except DamagedError:
            found[0] += 1
            assert all_bytes(state) == before
        else:
            found[1] += 1
            assert all_bytes(state) == saved
            state = state_of(5)
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            flip(Path(folder, name), position, bit)
    return found


def test_any_flipped_bit_is_found_or_harmless(two: Ranks, sound: Path, tmp_path: Path) -> None:
    """Positions all over the files, the same in each run."""
    folder, dice = a_copy(sound, tmp_path), random.Random(6)
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    flips = [
        (name, dice.randrange(size), dice.randrange(8))
        for name, size in sizes.items()
        for _ in range(5 if name.endswith(".distcp") else 3)
    ]
    found, harmless = two.run(is_found_or_harmless, str(folder), flips)[0]
    assert found >= 0.9 * (found + harmless), "only what no reader looks at may be harmless"


def test_a_folder_that_plain_torch_has_saved_is_checked_as_well(two: Ranks, tmp_path: Path) -> None:
    """Without a manifest; planes and zips have checksums all the same."""
    two.run(saves_plainly, str(tmp_path / "checkpoint"))
    path, position = inside(tmp_path / "checkpoint", PLAIN, 0.5)
    assert two.run(loads, str(tmp_path / "checkpoint"), 0) == [True, True]
    flip(path, position)
    kind, text = same_on_all(two.run(refuses, str(tmp_path / "checkpoint")))
    assert kind == "DamagedError"
    assert "CRC-32" in text


def fails_to_write(folder: str) -> str:
    """A device that fails on one rank, after everything has been checked."""
    write, rank = Destination.commit, torch.distributed.get_rank()

    def broken(self: Destination) -> None:
        if rank == 1 and self.name == PLAIN:
            raise RuntimeError("out of memory")
        write(self)

    with patch.object(Destination, "commit", broken), pytest.raises(LayoutError) as caught:
        checkpoint.load(state_of(5), folder)
    assert loads(folder, 0), "what went wrong once does no harm to the next load"
    return str(caught.value)


def test_a_device_that_fails_on_one_rank_is_told_to_all(two: Ranks, sound: Path) -> None:
    """No rank goes on to train with weights that others lack, nor waits for them."""
    texts = two.told(fails_to_write, str(sound / "sound"))
    assert f"{PLAIN} could not be written" in texts
    assert "out of memory" in texts


def saves_plainly(folder: str) -> None:
    dcp.save(state_of(0, 2), checkpoint_id=folder)


def is_refused_to_overwrite(folder: str) -> str:
    with pytest.raises(LayoutError) as caught:
        saves(folder, 1)
    return str(caught.value)


def replaces(folder: str, seed: int) -> None:
    checkpoint.save(state_of(seed, 2), folder, overwrite=True)


def test_a_folder_is_replaced_only_when_asked(two: Ranks, sound: Path, tmp_path: Path) -> None:
    folder = a_copy(sound, tmp_path)
    assert all("exists" in text for text in two.run(is_refused_to_overwrite, str(folder)))
    assert two.run(loads, str(folder), 0) == [True, True]
    two.run(replaces, str(folder), 1)
    assert two.run(loads, str(folder), 1) == [True, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "other"]

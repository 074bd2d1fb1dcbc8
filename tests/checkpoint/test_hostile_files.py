"""Files that are made to do harm: refused in words, soon, in little memory; nothing of the live state is changed."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from safetensors.torch import save_file

from layoutc import checkpoint
from layoutc.runtime.errors import LayoutError


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)  # processes that are forked have no others
    folder = tmp_path_factory.mktemp("sound") / "checkpoint"
    checkpoint.save(hostile.state(), folder)
    assert hostile.load(folder) == ""
    return folder


@pytest.mark.sample(len(hostile.HOSTILE))
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.thorough if name in hostile.LARGE else ()) for name in hostile.HOSTILE],
)
def test_a_hostile_checkpoint_is_refused(name: str, sound: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound, tmp_path / "checkpoint"))
    make, words = hostile.HOSTILE[name]
    make(folder)
    told = hostile.limited(lambda: hostile.load(folder))
    if words == hostile.MAY_LOAD and not told:
        return
    assert re.match(f"(DamagedError|LayoutError): .*(?:{words})", told, re.DOTALL), told
    assert len(told) < 5000


# ---------------------------------------------------------------------------------------------------------- safetensors
def weights() -> dict[str, torch.Tensor]:
    return {"weight": torch.ones(4, 4), "bias": torch.zeros(4)}


def load_safetensors(folder: Path) -> str:
    model = torch.nn.Linear(4, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        checkpoint.load_safetensors(model, folder)
    except LayoutError as error:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        return f"{type(error).__name__}: {error}"
    assert all(torch.equal(value, weights()[name]) for name, value in model.state_dict().items())
    return ""


def header(text: bytes, size: int | None = None) -> Callable[[Path], Any]:
    """A file that is this header, and nothing else; or sparse, and of a size."""

    def make(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(len(text).to_bytes(8, "little") + text)
        if size is not None:
            file.write_bytes((size - 8).to_bytes(8, "little") + text)
            os.truncate(file, size)

    return make


def index(text: str) -> Callable[[Path], Any]:
    def make(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(text)

    return make


def entry(**changes: Any) -> bytes:
    return json.dumps({"weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} | changes}).encode()


BRACKETS, DEEP = b'{"a": ' + b"[" * 10**6, b'{"a": ' + b"[                " * 10**5
TENSORS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a deep header": (header(DEEP), "header is nested too deeply"),
    "brackets": (header(BRACKETS), "header is little more than brackets"),
    "a header as large as the file": (header(b"{", 2**36), "should have a header of 68,719,476,728 bytes"),
    "NaN": (header(entry(shape=[float("nan")])), "header contains NaN"),
    "a name twice": (header(entry()[:-1] + b"," + entry()[1:]), "header has the key 'weight' twice"),
    "many dims": (header(entry(shape=[2**62] * 10_000)), "entry for weight lacks a valid dtype"),
    "large sizes": (header(entry(shape=[2**62] * 60, data_offsets=[0, 2**62])), "is truncated"),
    "negative offsets": (header(entry(data_offsets=[-8, 0])), "entry for weight lacks a valid dtype"),
    "a number that is true": (header(entry(shape=[True, 0])), "entry for weight lacks a valid dtype"),
    "a long number": (header(entry(shape=["x"]).replace(b'"x"', b"9" * 10**6)), "header is not JSON"),
    "a pipe": (lambda f: hostile.to_fifo(f / "model.safetensors"), "neither model"),
    "a deep index": (index(DEEP.decode()), "index is nested too deeply"),
    "an index of files above": (index('{"weight_map": {"weight": ".."}}'), "not a file of the same folder"),
    "an index of files elsewhere": (index('{"weight_map": {"weight": "/etc/passwd"}}'), "not a file of the same"),
    "an index of a pipe": (
        lambda f: (index('{"weight_map": {"weight": "p"}}')(f), os.mkfifo(f / "p")),
        "names p, which is missing",
    ),
    "nested metadata": (
        header(json.dumps({"__metadata__": {"layoutc": DEEP.decode()}}).encode()),
        "metadata of layoutc is nested too deeply",
    ),
    "metadata of a weight of no shape": (
        header(
            json.dumps(
                {
                    "__metadata__": {
                        "layoutc": json.dumps(
                            {
                                "weight": {
                                    "format": 1, "recipe": "nvfp4", "layout_id": "x", "spec_sha256": "x", "language": 1,
                                    "dtype": "float32", "shape": [], "orientations": [], "planes": {"a": "uint8"},
                                    "crc32": {"a": 1}, "facts": {"blocks": {}, "planes": {}},
                                }
                            }
                        )
                    },
                    "weight.a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]},
                }
            ).encode()
        ),
        "metadata of weight is not what",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_hostile_safetensors_are_refused(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    save_file(weights(), tmp_path / "model.safetensors")
    make, words = TENSORS[name]
    make(tmp_path)
    told = hostile.limited(lambda: load_safetensors(tmp_path))
    assert re.match(f"(DamagedError|LayoutError|FileNotFoundError escaped): .*(?:{words})", told, re.DOTALL), told
    assert len(told) < 5000


# ----------------------------------------------------------------------------------------------------------------- fuzz
def mutated(data: bytes, dice: random.Random) -> bytes:
    """Bits flipped, a part cut out, written twice, put elsewhere, or filled with one byte; the end cut off."""
    found, size = bytearray(data), len(data)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        at, length = dice.randrange(size), dice.choice((1, 2, 4, 8, 40))
        part = bytes(found[at : at + length])
        match dice.randrange(7):
            case 0 | 1:
                if at < len(found):
                    found[at] ^= 1 << dice.randrange(8)
            case 2:
                del found[at : at + length]
            case 3:
                found[at:at] = part * dice.choice((1, 1, 1000))
            case 4:
                other = dice.randrange(size)
                found[other : other + length] = part
            case 5:
                found[at : at + length] = bytes([dice.choice((0, 0xFF, 0x7F, 0x80))]) * length
            case 6:
                del found[at + length * 100 :]
    return bytes(found)


MUTATIONS = 60
PARTS = (".metadata", "layoutc.json", "__0_0.distcp", "weight", "plain", "step", "model.safetensors")


@pytest.mark.thorough
@pytest.mark.parametrize("part", PARTS)
def test_mutated_files_are_refused_or_load_as_they_were(part: str, sound: Path, tmp_path: Path) -> None:
    """MUTATIONS of each part, the same in each run; of items by someone who gets all checksums right but those of
    planes."""
    dice = random.Random(part)
    folder = Path(shutil.copytree(sound, tmp_path / "checkpoint"))
    save_file(weights(), folder / "model.safetensors")
    kept = {path: path.read_bytes() for path in folder.iterdir()}
    is_item = part in (hostile.OURS, hostile.PLAIN, hostile.VALUE)
    content = hostile.records(hostile.item(folder, part)) if is_item else {}
    programs = [name for name in content if name.endswith("/data.pkl")]

    def run() -> str:
        refused = 0
        for number in range(MUTATIONS):
            for path, data in kept.items():
                path.write_bytes(data)
            if is_item:
                hostile.with_program(folder, part, mutated(content[programs[0]], dice))
            else:
                (folder / part).write_bytes(mutated(kept[folder / part], dice))
                if part == ".metadata" and number % 4:
                    (folder / "layoutc.json").unlink()
            live, told = hostile.state(1), ""
            try:
                if part.endswith(".safetensors"):
                    checkpoint.load_safetensors(torch.nn.Linear(4, 4), folder)
                else:
                    checkpoint.load(live, folder)
            except LayoutError as error:
                told = str(error)
                refused += 1
            wanted = hostile.state(1 if told or part.endswith(".safetensors") else 0)
            if is_item and part != hostile.OURS and not told:  # no checksum says what else it was
                wanted[part] = live[part]
            assert len(told) < 5000, f"{number}: a message of {len(told)} characters"
            assert hostile.same(live, wanted), f"{number}: loaded something else, or changed the state: {told}"
        return f"{refused} of {MUTATIONS} were refused"

    told = hostile.limited(run)
    assert told.endswith(" were refused"), told
    assert int(told.split()[0]) > MUTATIONS // 3

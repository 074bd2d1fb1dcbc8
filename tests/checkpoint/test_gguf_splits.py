"""Models in several GGUF files, as the package gguf writes them: read from the first one's name, or refused."""

from __future__ import annotations

import filecmp
import shutil
import struct
from pathlib import Path

import gguf_files
import pytest
import torch

from layoutc import checkpoint
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.weight.tensor import QuantizedTensor

pytest.importorskip("gguf", reason="needs gguf: pip install 'layoutc[formats]'")


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """The first of three files."""
    (tmp_path / "in").mkdir()
    file = gguf_files.write(tmp_path / "in/tiny.gguf", split=5)
    assert file.name == "tiny-00001-of-00003.gguf"
    assert len(list(file.parent.iterdir())) == 3
    return file


def test_all_files_are_read_from_the_first_one_s_name(first: Path, tmp_path: Path) -> None:
    """A model keeps its bytes; an export is the one file that the package writes of the same model."""
    whole = gguf_files.write(tmp_path / "whole.gguf")
    model = gguf_files.skeleton()
    assert checkpoint.quantize_as_stored(model, first) == checkpoint.quantize_as_stored(gguf_files.skeleton(), whole)
    done = checkpoint.load_gguf(model, first)
    assert done == ((), (), ("model.embed_tokens.weight",))
    expected = gguf_files.expected(first)
    for name, param in model.named_parameters():
        ours = param.dequantize(torch.float32) if isinstance(param, QuantizedTensor) else param
        assert torch.equal(ours, expected[name]), name
    checkpoint.export_gguf(model, tmp_path / "out.gguf", source=first)
    assert filecmp.cmp(whole, tmp_path / "out.gguf", shallow=False)


def test_a_plain_folder_and_a_listing_have_all_files(first: Path, tmp_path: Path) -> None:
    whole = gguf_files.write(tmp_path / "whole.gguf")
    checkpoint.convert_gguf(first, tmp_path / "plain", dtype=torch.float32)
    checkpoint.convert_to_gguf(tmp_path / "plain", tmp_path / "again.gguf", source=first)
    assert filecmp.cmp(whole, tmp_path / "again.gguf", shallow=False)
    ours, theirs = checkpoint.inspect(first), checkpoint.inspect(whole)
    assert ours.entries == theirs.entries
    assert ours.files == 3
    assert ours.bytes_on_disk == sum(path.stat().st_size for path in first.parent.iterdir())


def refusal(file: Path) -> str:
    """What a load, a listing and an export say, which is the same; nothing is written."""
    model, told = gguf_files.skeleton(), set[str]()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for attempt in (
        lambda: checkpoint.load_gguf(model, file),
        lambda: checkpoint.inspect(file),
        lambda: checkpoint.export_gguf(model, file.parent.parent / "out.gguf", source=file),
    ):
        with pytest.raises((LayoutError, FileNotFoundError)) as caught:
            attempt()
        told.add(str(caught.value))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not (file.parent.parent / "out.gguf").exists()
    (text,) = told
    return text


def change(file: Path, key: str, code: str, value: int) -> None:
    """Another value of a key whose value is a number."""
    raw, name = bytearray(file.read_bytes()), key.encode()
    at = raw.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4
    raw[at : at + struct.calcsize(code)] = struct.pack(code, value)
    file.write_bytes(raw)


def test_what_is_missing_or_does_not_belong_together_is_refused(first: Path, tmp_path: Path) -> None:
    second, third = (first.with_name(f"tiny-0000{number}-of-00003.gguf") for number in (2, 3))
    assert "is file 2 of 3 files of a model: pass the first, as tiny-00001-of-00003.gguf" in refusal(second)
    kept = tmp_path / "kept"
    shutil.copytree(first.parent, kept)

    def restore() -> None:
        for path in kept.iterdir():
            shutil.copy(path, first.parent / path.name)

    third.unlink()
    assert f"{third} is missing: {first.name} says that the model has it" in refusal(first)
    restore()
    shutil.copy(second, third)
    assert "says that it is file 1 of 3, counted from 0, but by its name it is file 2 of 3" in refusal(first)
    restore()
    change(second, "split.count", "<H", 4)
    assert "says that it is file 1 of 4, counted from 0, but by its name it is file 1 of 3" in refusal(first)
    restore()
    change(second, "split.tensors.count", "<i", 99)
    assert "are not of one model: 'split.tensors.count' is 99 in one, and 12 in the other" in refusal(first)
    for path in (first, third):
        change(path, "split.tensors.count", "<i", 99)
    assert "says that its 3 files have 99 tensors, but they have 12" in refusal(first)
    restore()
    change(first, "split.no", "<H", 3)
    assert "split.no is 3 of 3 files, which can't be" in refusal(first)
    restore()
    third.write_bytes(third.read_bytes()[:-100])
    assert f"{third} is truncated" in refusal(first)
    restore()
    renamed = first.rename(first.with_name("other.gguf"))
    assert "whose others are found by its name: it should be other-00001-of-00003.gguf" in refusal(renamed)
    renamed.rename(first)
    second.write_bytes(second.read_bytes().replace(b"blk.0.attn_v.weight", b"blk.0.attn_q.weight"))
    assert f"{second} and {first} both have 'blk.0.attn_q.weight': they are parts of different models" in refusal(first)
    restore()
    checkpoint.load_gguf(gguf_files.skeleton(), first)

"""Items read uncopied: what torch.load gives, over the bytes that were read; what it refuses is refused."""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from numpy_models import recipe
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from weight_recipes import CUT_APART

from layoutc.checkpoint import items, loading, reading
from layoutc.runtime.errors import DamagedError
from layoutc.runtime.weight import stored_form
from layoutc.runtime.weight.tensor import QuantizedTensor

BASE = torch.arange(60.0).view(6, 10)
PLAIN: dict[str, Tensor] = {
    **{
        str(dtype): torch.arange(7).to(dtype)
        for dtype in (torch.bool, torch.int8, torch.int64, torch.float64, torch.bfloat16, torch.complex64)
    },
    **{
        str(dtype): torch.arange(7, dtype=torch.uint8).view(dtype)
        for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8)
    },
    "uint16": torch.arange(7).to(torch.uint16),
    "a scalar": torch.tensor(3.5),
    "nothing": torch.empty(0, 4),
    "transposed": BASE.t(),
    "a part": BASE[2:4, 1::3],
    "repeated": torch.ones(1, 3).expand(4, 3),
    "a parameter": nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
}


def stored(value: Any, folder: Path, before: int = 5) -> _StorageInfo:
    """An item that does not begin where its file does."""
    data = io.BytesIO()
    torch.save(value, data)
    (folder / "file").write_bytes(bytes(before) + data.getvalue() + b"after")
    return _StorageInfo("file", before, len(data.getvalue()))


def read_uncopied(folder: Path, info: _StorageInfo) -> Any:
    with patch.object(items, "_any", side_effect=AssertionError("was left to torch.load")):
        return items.read_item(folder, "name", info, True)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_tensors_are_what_torch_loads(name: str, tmp_path: Path) -> None:
    """Shape, strides, dtype and values, whatever part of their storage they are."""
    info = stored(PLAIN[name], tmp_path)
    found, expected = read_uncopied(tmp_path, info), items.read_item(tmp_path, "name", info, False)
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert torch.equal(found.contiguous().view(-1).view(torch.uint8), expected.contiguous().view(-1).view(torch.uint8))
    assert not found.requires_grad


def test_bytes_of_another_order_are_what_torch_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turned round, which only torch.load does."""
    with monkeypatch.context() as patched:
        patched.setattr("sys.byteorder", "big" if sys.byteorder == "little" else "little")
        info = stored(BASE, tmp_path)
    found, expected = (items.read_item(tmp_path, "name", info, uncopied) for uncopied in (True, False))
    assert not torch.equal(expected, BASE)
    assert torch.equal(found, expected)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "is_parameter"), [(name, at % 2 == 0) for at, name in enumerate(CUT_APART)])
def test_quantized_tensors_are_what_torch_loads(name: str, is_parameter: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = recipe(name).quantize(torch.randn(256, 256))
    info = stored(nn.Parameter(made, False) if is_parameter else made, tmp_path)
    found, expected = read_uncopied(tmp_path, info), items.read_item(tmp_path, "name", info, False)
    assert type(found) is type(expected)
    assert isinstance(found, QuantizedTensor)
    assert found.planes().keys() == made.planes().keys()
    for plane in made.planes():
        assert torch.equal(*(one.entries(plane).contiguous().view(torch.uint8) for one in (found, made)))


def test_bytes_are_read_once(tmp_path: Path) -> None:
    """The tensor stands in the bytes of the item."""
    info = stored(torch.arange(100), tmp_path)
    found = read_uncopied(tmp_path, info)
    assert found.untyped_storage().nbytes() == info.length


def pickled(pid: tuple[Any, ...], offset: int, shape: Any, strides: Any, hooks: Any = None) -> bytes:
    """The pickle of a tensor, as a stranger could write it."""

    class Storage:
        pass

    class Made:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (Storage(), offset, shape, strides, False, hooks or {})

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return pid if isinstance(value, Storage) else None

    file = io.BytesIO()
    Pickler(file, protocol=2).dump(Made())
    return file.getvalue()


@pytest.mark.parametrize(
    ("pid", "offset", "shape", "strides"),
    [
        (("storage", torch.FloatStorage, "0", "cpu", 4), 1, (4,), (1,)),  # beyond its end
        (("storage", torch.FloatStorage, "0", "cpu", 4), 0, (2, 4), (1, 1)),
        (("storage", torch.FloatStorage, "0", "cpu", 4), 0, (2,), (1 << 62,)),
        (("storage", torch.FloatStorage, "0", "cpu", 4), -1, (2,), (1,)),
        (("storage", torch.FloatStorage, "0", "cpu", 4), 3, (2,), (-1,)),
        (("storage", torch.FloatStorage, "0", "cpu", 400), 0, (400,), (1,)),  # a storage of more than there is
        (("storage", torch.FloatStorage, "1", "cpu", 4), 0, (4,), (1,)),  # of another record
        (("storage", torch.FloatStorage, "../data.pkl", "cpu", 4), 0, (4,), (1,)),
    ],
)
def test_tensors_beyond_their_storage_are_refused(
    pid: tuple[Any, ...], offset: int, shape: Any, strides: Any, tmp_path: Path
) -> None:
    """No byte of the item that is not its storage's, nor of any other memory."""
    torch.save(torch.arange(4.0), tmp_path / "plain")
    whole = _StorageInfo("plain", 0, (tmp_path / "plain").stat().st_size)
    assert torch.equal(read_uncopied(tmp_path, whole), torch.arange(4.0))
    with zipfile.ZipFile(tmp_path / "plain") as there:
        records = {name: there.read(name) for name in there.namelist()}
    name = next(name for name in records if name.endswith("data.pkl"))
    records[name] = pickled(pid, offset, shape, strides)
    with zipfile.ZipFile(tmp_path / "made", "w", zipfile.ZIP_STORED) as made:
        for record, data in records.items():
            made.writestr(zipfile.ZipInfo(record), data)
    info = _StorageInfo("made", 0, (tmp_path / "made").stat().st_size)
    with pytest.raises(DamagedError):
        items.read_item(tmp_path, "name", info, True)


def test_a_storage_that_is_not_there_is_not_the_whole_item(tmp_path: Path) -> None:
    """Even where it is said to be as long."""
    torch.save(torch.arange(4.0), tmp_path / "plain")
    with zipfile.ZipFile(tmp_path / "plain") as there:
        records = {name: there.read(name) for name in there.namelist()}
    name, length = next(name for name in records if name.endswith("data.pkl")), 1000
    for _ in range(2):  # the length is in the pickle, in as many bytes both times
        pid = ("storage", torch.ByteStorage, "1", "cpu", length)
        with zipfile.ZipFile(tmp_path / "made", "w", zipfile.ZIP_STORED) as made:
            for record, data in (records | {name: pickled(pid, 0, (4,), (1,))}).items():
                made.writestr(zipfile.ZipInfo(record), data)
        length = (tmp_path / "made").stat().st_size
    assert pid[-1] == length
    with pytest.raises(DamagedError):
        items.read_item(tmp_path, "name", _StorageInfo("made", 0, length), True)


@pytest.mark.parametrize("elements", [40, 1 << 30])
def test_a_tensor_can_not_be_given_other_memory(elements: int, tmp_path: Path) -> None:
    """BUILD would call Tensor.__setstate__, for other bytes of the item, or more than it has."""

    class Rebuilt:
        def __reduce__(self) -> Any:
            tensor = torch.arange(4.0)
            return (*tensor.__reduce_ex__(2)[:2], (tensor, 0, (elements,), (1,)))

    info = stored(Rebuilt(), tmp_path)
    with pytest.raises(DamagedError):
        items.read_item(tmp_path, "name", info, True)


def test_no_memory_is_asked_for_that_the_file_does_not_fill(tmp_path: Path) -> None:
    info = stored(torch.arange(4), tmp_path)
    info.length = 1 << 60
    with pytest.raises(DamagedError, match=r"ends after \d+ of 1152921504606846976 bytes"):
        items.read_item(tmp_path, "name", info, True)


def test_plain_values_keep_their_types(tmp_path: Path) -> None:
    """What is no tensor is torch.load's to make, also where a tensor was expected."""
    from collections import OrderedDict

    pairs = [(0.9, 0.95)] * 3  # one tuple, three times
    value = OrderedDict(a=1, b=[torch.ones(2), "c"], seed=1 << 127, pairs=pairs, raw=bytearray(b"ab"), both={1, (2, 3)})
    info = stored(value, tmp_path)
    for is_tensor in (False, True):
        found = items.read_item(tmp_path, "name", info, is_tensor)
        assert type(found) is OrderedDict
        assert found["a"] == 1
        assert torch.equal(found["b"][0], torch.ones(2))
        assert (found["seed"], found["pairs"]) == (1 << 127, pairs)
        assert (found["raw"], found["both"]) == (b"ab", {1, (2, 3)})
    assert reading.header_of(tmp_path, stored({"seed": 1 << 127}, tmp_path)) == {"value": "dict"}


def test_items_are_read_ahead_but_not_all() -> None:
    """In order; what is read and not yet taken stands in memory, so it is a few items."""
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        return number * number

    found = loading._ahead(work, range(500))
    for taken in range(500):
        assert next(found) == (taken, taken * taken)
        assert len(begun) <= taken + 1 + 2 * loading.READERS
    assert next(found, None) is None


def test_a_limit_of_one_load_ends_with_it() -> None:
    """What is restored later in the process is not counted with what was refused."""
    made = recipe("nvfp4").quantize(torch.ones(64, 64))
    data = pickle.dumps(made)
    with stored_form.at_most(0), pytest.raises(DamagedError, match="more tensors than bytes"):
        pickle.loads(data)
    assert torch.equal(pickle.loads(data).dequantize(), made.dequantize())

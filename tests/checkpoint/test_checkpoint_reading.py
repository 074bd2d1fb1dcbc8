"""Checkpoint folders are read without trusting them: what is sound is read, and what is not is refused."""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_cases import Evil, save, trained
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from weight_recipes import CUT_APART, WEIGHTS

from layoutc.checkpoint import reading
from layoutc.checkpoint.reading import Plain
from layoutc.checkpoint.untrusted import unpickling, zips
from layoutc.checkpoint.untrusted.metadata import metadata_of
from layoutc.runtime.errors import DamagedError, LayoutError
from layoutc.runtime.weight.stored_form import state_of

EXAMPLES = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model, state = trained()
    folder = save(state, tmp_path_factory.mktemp("saved"))
    raw = (folder / ".metadata").read_bytes()
    return SimpleNamespace(model=model, folder=folder, raw=raw, metadata=reading.read_metadata(folder))


def item(saved: Any, name: str) -> tuple[_StorageInfo, bytes]:
    (info,) = (info for index, info in saved.metadata.storage_data.items() if index.fqn == name)
    return info, (saved.folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]


# ------------------------------------------------------------------------------------------------ what is sound is read
def test_metadata_is_what_torch_reads(saved: Any) -> None:
    expected = pickle.loads(saved.raw)
    expected.storage_meta.checkpoint_id = saved.metadata.storage_meta.checkpoint_id
    assert saved.metadata == expected
    assert str(saved.metadata.storage_meta.checkpoint_id) == str(saved.folder)
    assert list(saved.metadata.state_dict_metadata) == list(expected.state_dict_metadata)
    assert any(name.startswith("optim.state") for name in expected.state_dict_metadata)
    reading.check_files(saved.folder, saved.metadata)


@pytest.mark.parametrize("recipe", CUT_APART)
def test_the_header_of_a_quantized_tensor_is_its_state(saved: Any, recipe: str) -> None:
    header = reading.header_of(saved.folder, item(saved, f"model.{recipe}.weight")[0])
    expected = state_of(saved.model.get_submodule(recipe).weight.detach())
    expected["planes"] = {name: Plain(plane.dtype, tuple(plane.shape)) for name, plane in expected["planes"].items()}
    assert header == expected | {"requires_grad": header["requires_grad"], "parameter": header["parameter"]}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"model.{WEIGHTS[0]}.bias", {"dtype": torch.float32, "shape": (128,)}),
        ("extra.codes", {"dtype": torch.float8_e4m3fn, "shape": (3,)}),
        ("extra.steps.1", {"dtype": torch.int64, "shape": (4,)}),
        ("extra.steps.0", {"value": "int"}),
        ("extra.none", {"value": "NoneType"}),
        ("optim.param_groups.0.betas", {"value": "tuple"}),
    ],
)
def test_the_header_of_anything_else(saved: Any, name: str, expected: dict[str, Any]) -> None:
    assert reading.header_of(saved.folder, item(saved, name)[0]) == expected


def test_headers_of_every_dtype(tmp_path: Path) -> None:
    seen = set()
    for dtype in {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}:
        try:
            torch.save(torch.zeros((2, 3), dtype=dtype), tmp_path / "item")
        except (RuntimeError, NotImplementedError, AttributeError, KeyError):
            continue  # those that torch can't make or save
        info = _StorageInfo("item", 0, (tmp_path / "item").stat().st_size)
        assert reading.header_of(tmp_path, info) == {"dtype": dtype, "shape": (2, 3)}
        seen.add(dtype)
    assert seen >= {torch.float8_e5m2, torch.float8_e8m0fnu, torch.bfloat16, torch.uint16, torch.bool, torch.complex64}


def test_items_are_whole_and_have_a_fingerprint(saved: Any) -> None:
    prints = set()
    for index, info in saved.metadata.storage_data.items():
        data = item(saved, index.fqn)[1]
        print_ = zips.check(memoryview(data), index.fqn).crc32
        with zipfile.ZipFile(io.BytesIO(data)) as found:
            last = max(one.header_offset for one in found.infolist())
            start = data.index(b"PK\1\2", last)
            end = data.index(b"PK\6\6", start)
        assert print_ == zlib.crc32(data[start:end]) == reading.directory_crc_of(saved.folder, info)
        prints.add(print_)
    assert len(prints) > len(WEIGHTS)


def test_a_header_is_read_without_the_data(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    info, _ = item(saved, f"optim.state.{WEIGHTS[0]}.weight.exp_avg")
    read: list[int] = []
    inner = reading.read_at
    monkeypatch.setattr(reading, "read_at", lambda file, at, n: read.append(n) or inner(file, at, n))
    reading.header_of(saved.folder, info)
    assert 0 < sum(read) < 2000 < 128 * 128 * 4 < info.length


# ------------------------------------------------------------------------------------------------------- nothing is run
def evil_metadata(saved: Any, marker: Path) -> dict[str, Any]:
    made: dict[str, Any] = {"everything": Evil(marker)}
    for place in ("planner_data", "storage_data", "storage_meta", "version", "state_dict_metadata"):
        whole = pickle.loads(saved.raw)
        setattr(whole, place, Evil(marker))
        made[place] = whole
    entry = pickle.loads(saved.raw)
    next(iter(entry.storage_data.values())).relative_path = Evil(marker)
    return made | {"a path": entry}


@pytest.mark.parametrize(
    "place",
    ["everything", "planner_data", "storage_data", "storage_meta", "version", "state_dict_metadata", "a path"],
)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_what_metadata_says_is_not_run(saved: Any, tmp_path: Path, place: str, protocol: int) -> None:
    marker = tmp_path / "marker"
    data = pickle.dumps(evil_metadata(saved, marker)[place], protocol)
    with pytest.raises(DamagedError, match=r"(posix|nt)\.system"):
        metadata_of(data, "x")
    assert not marker.exists()
    pickle.loads(data)
    assert marker.exists(), "plain pickle runs it"


@pytest.mark.parametrize("wrap", [lambda e: e, lambda e: {"a": [e]}, lambda e: (torch.zeros(2), e)])
def test_what_an_item_says_is_not_run(tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    marker, file = tmp_path / "marker", tmp_path / "item"
    torch.save(wrap(Evil(marker)), file)
    with pytest.raises(DamagedError, match=r"(posix|nt)\.system"):
        reading.header_of(tmp_path, _StorageInfo("item", 0, file.stat().st_size))
    zips.check(memoryview(file.read_bytes()), "x")
    assert not marker.exists()


@pytest.mark.parametrize(
    "name",
    ["builtins eval", "builtins getattr", "torch load", "torch hub", "torch._utils _rebuild_sparse_tensor", "os system",
     "layoutc.runtime.weight.stored_form class_of", "torch.serialization load"],
)  # fmt: skip
def test_no_other_name_is_found(name: str) -> None:
    data = b"\x80\x02c" + name.replace(" ", "\n").encode() + b"\n."
    for read in (lambda: metadata_of(data, "x"), lambda: reading._header(data, "x")):
        with pytest.raises(DamagedError, match=name.replace(" ", r"\.")):
            read()


def test_a_pickle_can_change_nothing_that_stays() -> None:
    """BUILD sets attributes of what is on the stack, and that may be a class or a function."""
    for name in ("torch.distributed.checkpoint.metadata\nMetadata", "torch.serialization\n_get_layout", "torch\nSize"):
        data = b"\x80\x02c" + name.encode() + b"\nN}X\x04\x00\x00\x00evilK\x01s\x86b."
        with pytest.raises(DamagedError):
            metadata_of(data, "x")
    assert not hasattr(dcp.Metadata, "evil")
    assert not hasattr(torch.serialization._get_layout, "evil")
    assert not hasattr(torch.Size, "evil")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x02K\x01r\xff\xff\xff\x7f.", "stores a value under an impossible number"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f.", "an opcode that such a file never has"),
        (b"\x80\x02\x8a\x20" + bytes(32) + b".", "an integer of 32 bytes"),
        (b"\x80\x02\x96\xff\xff\xff\xff\xff\xff\xff\x00.", "an opcode that such a file never has"),
        (b"\x80\x02X\xff\xff\xff\x7fabc.", "does not end with its last value"),
        (b"\x80\x02cos\nsystem", "does not end with its last value"),
        (b"\x80\x02N.N.", "does not end with its last value"),
        (b"\x80\x02(i__main__\nx\n.", "an opcode that such a file never has"),
        (b"\x80\x02.", "damaged"),
        (b"", "does not end with its last value"),
    ],
)
def test_pickles_that_ask_for_too_much(data: bytes, message: str) -> None:
    with pytest.raises(DamagedError, match=message):
        unpickling.read(data, {}, "x")


# ------------------------------------------------------------------------------------------------------ flips and cuts
def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8 % len(data)] ^= 1 << bit % 8
    return bytes(changed)


def told(metadata: dcp.Metadata) -> tuple[Any, ...]:
    """What no reader would notice that it is another: where it was saved, properties that torch ignores, where items
    lie, which their own bytes tell."""
    entries = {
        name: (tuple(entry.size), entry.chunks) if isinstance(entry, dcp.TensorStorageMetadata) else None
        for name, entry in metadata.state_dict_metadata.items()
    }
    return entries, set(metadata.storage_data)


@EXAMPLES
@given(data=st.data())
def test_flips_in_metadata(saved: Any, data: st.DataObject) -> None:
    raw = saved.raw
    for bit in data.draw(st.lists(st.integers(0, len(raw) * 8 - 1), min_size=1, max_size=3)):
        raw = flipped(raw, bit)
    try:
        found = metadata_of(raw, "x")
    except LayoutError:
        return
    assert told(found) == told(saved.metadata)


@EXAMPLES
@given(data=st.data())
def test_cuts_of_metadata(saved: Any, data: st.DataObject) -> None:
    with pytest.raises(DamagedError):
        metadata_of(saved.raw[: data.draw(st.integers(0, len(saved.raw) - 1))], "x")


@EXAMPLES
@given(data=st.data())
def test_flips_and_cuts_of_an_items_pickle(saved: Any, data: st.DataObject) -> None:
    """As someone writes them who gets the CRC-32 right."""
    with zipfile.ZipFile(io.BytesIO(item(saved, f"model.{WEIGHTS[0]}.weight")[1])) as found:
        raw = found.read("archive/data.pkl")
    for bit in data.draw(st.lists(st.integers(0, len(raw) * 8 - 1), min_size=1, max_size=3)):
        raw = flipped(raw, bit)
    raw = raw[: data.draw(st.just(len(raw)) | st.integers(0, len(raw)))]
    try:
        header = reading._header(raw, "x")
    except LayoutError:
        return
    assert header.keys() & {"layout_id", "dtype", "value"}


def test_every_bit_of_an_item_is_checked(saved: Any) -> None:
    """But for those that say who made the zip, which no reader looks at."""
    _, data = item(saved, "extra.steps.1")
    made_by = data.index(b"PK\6\6") + 12
    missed = set()
    for bit in range(len(data) * 8):
        try:
            zips.check(memoryview(flipped(data, bit)), "x")
        except DamagedError:
            continue
        missed.add(bit // 8)
    assert missed <= {made_by, made_by + 1}


def wide_zip(records: dict[str, bytes]) -> bytes:
    """As torch.save writes records whose sizes and places need 64 bits."""
    data, entries = b"", b""
    for name, content in records.items():
        numbers = struct.pack("<3Q", len(content), len(content), len(data))
        title, extra = name.encode(), b"\1\0\x18\0" + numbers[:8] + bytes(8) + numbers[16:] + b"FB\3\0ZZZ"
        same = struct.pack("<5H", 0, 0x808, 0, 0, 0)
        crc32 = struct.pack("<I", zlib.crc32(content))
        entries += b"PK\1\2\0\0" + same + crc32 + b"\xff" * 8
        entries += struct.pack("<5HI", len(title), 28, 0, 0, 0, 0) + b"\xff" * 4 + title + b"\1\0\x18\0" + numbers
        data += b"PK\3\4" + same + bytes(12) + struct.pack("<2H", len(title), len(extra)) + title + extra
        data += content + b"PK\7\x08" + crc32 + numbers[:16]
    count, start, size = len(records), len(data), len(entries)
    end = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0x31E, 45, 0, 0, count, count, size, start)
    end += struct.pack("<4sIQI", b"PK\6\7", 0, start + size, 1)
    return data + entries + end + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, size, start, 0)


def test_zips_of_more_than_4_gib_have_64_bit_fields(tmp_path: Path) -> None:
    tensor = io.BytesIO()
    torch.save(torch.arange(9), tensor)
    with zipfile.ZipFile(tensor) as found:
        data = wide_zip({name: found.read(name) for name in found.namelist()})
    (tmp_path / "item").write_bytes(b"before" + data)
    zips.check(memoryview(data), "x")
    info = _StorageInfo("item", 6, len(data))
    assert reading.header_of(tmp_path, info) == {"dtype": torch.int64, "shape": (9,)}
    assert reading.directory_crc_of(tmp_path, info) == zips.check(memoryview(data), "x").crc32
    made_by = data.rindex(b"PK\6\6") + 12
    for place in {*range(0, len(data), 3), *range(data.index(b"PK\1\2"), len(data))} - {made_by, made_by + 1}:
        with pytest.raises(DamagedError):
            zips.check(memoryview(flipped(data, place * 8 + place % 8)), "x")


@EXAMPLES
@given(data=st.data())
def test_flips_and_cuts_of_items(saved: Any, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([f"model.{recipe}.weight" for recipe in WEIGHTS]))
    raw = item(saved, name)[1]
    made_by = raw.rindex(b"PK\6\6") + 12
    bit = data.draw(st.integers(0, len(raw) * 8 - 1).filter(lambda bit: bit // 8 not in (made_by, made_by + 1)))
    cut = data.draw(st.integers(0, len(raw) - 1))
    for damaged in (flipped(raw, bit), raw[:cut], raw[cut + 1 :], raw + raw[: cut + 1]):
        with pytest.raises(DamagedError, match="where it is"):
            zips.check(memoryview(damaged), "where it is")


@pytest.mark.parametrize("how", ["compressed", "named twice", "foreign"])
def test_other_zips_are_refused(tmp_path: Path, how: str) -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED if how == "compressed" else zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", b"\x80\x02N." * 9)
        if how == "named twice":
            with pytest.warns(UserWarning, match="Duplicate"):
                file.writestr("archive/data.pkl", b"\x80\x02N.")
        if how == "foreign":
            file.comment = b"mine"
    with pytest.raises(DamagedError, match=r"not a whole torch\.save zip"):
        zips.check(memoryview(made.getvalue()), "x")


def test_data_that_is_no_zip_is_refused(tmp_path: Path) -> None:
    for data in (b"", b"PK", bytes(200), b"PK\5\6" + bytes(18), b"PK\5\6" * 40):
        (tmp_path / "item").write_bytes(data)
        for work in (
            lambda data=data: zips.check(memoryview(data), "x"),
            lambda data=data: reading.header_of(tmp_path, _StorageInfo("item", 0, len(data))),
            lambda: reading.header_of(tmp_path, _StorageInfo("item", 0, 10_000)),
        ):
            with pytest.raises(DamagedError, match="not a whole"):
                work()


# ------------------------------------------------------------------------------------ metadata that no save has written
def changed(saved: Any, change: Callable[[dcp.Metadata], Any]) -> bytes:
    metadata = pickle.loads(saved.raw)
    change(metadata)
    return pickle.dumps(metadata)


def tensor_entry(metadata: dcp.Metadata) -> dcp.TensorStorageMetadata:
    return metadata.state_dict_metadata[f"model.{WEIGHTS[0]}.weight"]


def info_of(metadata: dcp.Metadata) -> _StorageInfo:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == f"model.{WEIGHTS[0]}.weight")


def with_chunks(*chunks: tuple[tuple[int, int], tuple[int, int]]) -> Callable[[dcp.Metadata], None]:
    def change(metadata: dcp.Metadata) -> None:
        tensor_entry(metadata).chunks = [
            dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks
        ]

    return change


def at_path(path: object) -> Callable[[dcp.Metadata], None]:
    return lambda metadata: setattr(info_of(metadata), "relative_path", path)


BAD: dict[str, tuple[Callable[[dcp.Metadata], Any], str]] = {
    "a path up": (at_path("../__0_0.distcp"), "not a file of this folder"),
    "a path": (at_path("a/b"), "not a file of this folder"),
    "a path of Windows": (at_path("a\\b"), "not a file of this folder"),
    "an absolute path": (at_path("/etc/passwd"), "not a file of this folder"),
    "the folder above": (at_path(".."), "not a file of this folder"),
    "no path": (at_path(""), "not a file of this folder"),
    "a number as path": (at_path(3), "not a file of this folder"),
    "a negative offset": (lambda m: setattr(info_of(m), "offset", -1), "no valid offset and length"),
    "a length that is none": (lambda m: setattr(info_of(m), "length", 1.5), "no valid offset and length"),
    "a length that is true": (lambda m: setattr(info_of(m), "length", True), "no valid offset and length"),
    "shared bytes": (lambda m: setattr(info_of(m), "length", 10**9), "share bytes"),
    "a hole": (with_chunks(((0, 0), (64, 128))), "8,192 elements in all, but the tensor has 16,384"),
    "an overlap": (with_chunks(((0, 0), (64, 128)), ((32, 0), (64, 128))), "overlap, at"),
    "an overlap of columns": (with_chunks(((0, 0), (128, 64)), ((0, 32), (128, 64))), "overlap, at"),
    "rows outside": (with_chunks(((64, 0), (128, 128))), "outside of its"),
    "too few dims": (with_chunks(((0,), (128,))), "as many dims"),  # type: ignore[arg-type]
    "pieces nowhere": (with_chunks(((0, 0), (64, 128)), ((64, 0), (64, 128))), "is not stored"),
    "an entry nowhere": (lambda m: m.state_dict_metadata.update(x=dcp.BytesStorageMetadata()), "x is not stored"),
    "an item too many": (lambda m: m.state_dict_metadata.pop("extra.codes"), "extra.codes at .* belongs to no entry"),
    "a dtype that is none": (lambda m: setattr(tensor_entry(m).properties, "dtype", "float32"), "invalid properties"),
    "a size that is none": (lambda m: setattr(tensor_entry(m), "size", (128, 128)), "an invalid size or offset"),
    "chunks that are none": (lambda m: setattr(tensor_entry(m), "chunks", None), "no list of chunks"),
    "an unknown field": (lambda m: setattr(info_of(m), "color", 1), "has color"),
    "a missing field": (lambda m: delattr(info_of(m), "length"), "lacks length"),
    "a name that is none": (lambda m: m.state_dict_metadata.update({3: dcp.BytesStorageMetadata()}), "the name 3"),
    "another name": (lambda m: m.planner_data.update(x=("y",)), "x is not the name"),
    "other planner data": (lambda m: setattr(m, "planner_data", [1]), "its planner data"),
    "no items": (lambda m: setattr(m, "storage_data", None), "or the list of stored items"),
    "transforms": (lambda m: setattr(info_of(m), "transform_descriptors", [1]), "transforms"),
    "a version": (lambda m: setattr(m, "version", 1), "its version"),
    "modules": (lambda m: setattr(m.storage_meta, "modules", [1]), "the modules"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_metadata_that_no_save_has_written(saved: Any, name: str) -> None:
    change, message = BAD[name]
    with pytest.raises(DamagedError, match=rf"^here/.metadata is damaged: .*{message}"):
        metadata_of(changed(saved, change), "here/.metadata")


def test_pieces_of_every_form_cover_a_tensor(saved: Any) -> None:
    """Rows, columns, a grid; and pieces of ranks without rows."""

    def change(metadata: dcp.Metadata, cuts: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
        with_chunks(*cuts)(metadata)
        name, info = f"model.{WEIGHTS[0]}.weight", info_of(metadata)
        metadata.storage_data = {i: one for i, one in metadata.storage_data.items() if i.fqn != name}
        for number, (offsets, _) in enumerate(cuts):
            metadata.storage_data[dcp.MetadataIndex(name, offsets)] = _StorageInfo(f"{number}", 0, info.length)

    grid = [((r, c), (64, 32)) for r in (0, 64) for c in (0, 32, 64, 96)]
    for cuts in (
        [((0, 0), (100, 128)), ((100, 0), (28, 128)), ((128, 0), (0, 128))],
        [((0, 96), (128, 32)), ((0, 0), (128, 96))],
        grid,
    ):
        raw = changed(saved, lambda metadata, cuts=cuts: change(metadata, cuts))
        assert sum(math.prod(chunk.sizes) for chunk in tensor_entry(metadata_of(raw, "x")).chunks) == 128 * 128
    with pytest.raises(DamagedError, match="overlap"):
        metadata_of(changed(saved, lambda m: change(m, [*grid[:-1], ((32, 96), (64, 32))])), "x")


# -------------------------------------------------------------------------------------------------------------- folders
def test_folders_that_are_no_whole_checkpoint(saved: Any, tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="does not exist"):
        reading.read_metadata(tmp_path / "none")
    with pytest.raises(LayoutError, match="is not a checkpoint: it has no"):
        reading.read_metadata(tmp_path)
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(LayoutError, match="the save did not finish"):
        reading.read_metadata(tmp_path)
    (tmp_path / "__0.metadata").write_bytes(b"")
    with pytest.raises(LayoutError, match="use_collectives=False"):
        reading.read_metadata(tmp_path)
    (tmp_path / ".metadata").write_bytes(saved.raw)
    with pytest.raises(DamagedError, match=r"has 0 bytes, but its items end at .*: it is truncated"):
        reading.check_files(tmp_path, reading.read_metadata(tmp_path))
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(DamagedError, match="is missing"):
        reading.check_files(tmp_path, saved.metadata)
    with pytest.raises(DamagedError, match="can't be read"):
        reading.header_of(tmp_path, item(saved, "extra.codes")[0])


def test_a_transformed_item_is_not_looked_into(saved: Any) -> None:
    info, _ = item(saved, "extra.codes")
    assert reading.header_of(saved.folder, _StorageInfo(info.relative_path, 0, info.length, ["zstd"])) is None


def test_an_item_of_another_save_is_told_by_its_fingerprint(saved: Any) -> None:
    info, data = item(saved, "extra.codes")
    marked: Any = _StorageInfo(info.relative_path, info.offset, info.length)
    marked.crc32 = zips.check(memoryview(data), "x").crc32
    assert reading.header_of(saved.folder, marked)
    marked.crc32 ^= 1
    with pytest.raises(DamagedError, match="not the item that was saved"):
        reading.header_of(saved.folder, marked)


def test_states_that_no_tensor_has(tmp_path: Path, saved: Any) -> None:
    """Found before anything believes them."""
    state = state_of(saved.model.get_submodule(WEIGHTS[0]).weight.detach())

    class Stored:
        def __init__(self, state: Any) -> None:
            self.state = state

        def __reduce__(self) -> Any:
            import layoutc

            return layoutc.restore_tensor, (self.state,)

    def header(state: Any) -> Any:
        torch.save(Stored(state), tmp_path / "item")
        return reading.header_of(tmp_path, _StorageInfo("item", 0, (tmp_path / "item").stat().st_size))

    assert header(state)["layout_id"] == state["layout_id"]
    for name in state.keys() - {"format"}:
        for bad in ({key: value for key, value in state.items() if key != name}, state | {name: [3]}):
            with pytest.raises(DamagedError, match=f"damaged quantized tensor: {name} is not what layoutc writes"):
                header(bad)
    with pytest.raises(LayoutError, match="in format 9"):
        header(state | {"format": 9})
    with pytest.raises(DamagedError, match="different numbers of elements"):
        header(state | {"shape": (1, 1)})
    with pytest.raises(DamagedError, match="without a state"):
        header([state])


def test_what_a_persistent_id_becomes_nests_no_tuple() -> None:
    """A tuple of two numbers becomes a value, which a tuple of one holds: two tuples, neither inside of the other."""
    assert unpickling._tuples(b"\x80\x02(K\x01K\x02tQ\x85.") == 2
    assert unpickling._tuples(b"\x80\x02(K\x01K\x02t\x85.") == 3  # read within the other as well

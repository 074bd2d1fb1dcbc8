"""Checkpoints that someone has made to hang a load, or to have it ask for all memory; and a load under a limit."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import signal
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from layoutc import checkpoint
from layoutc.recipes import nvfp4
from layoutc.runtime.errors import LayoutError

MEMORY, SECONDS = 2**31, 60  # that a refusal may take, on a busy machine: far less than what the files ask for
MAY_LOAD = "loads"
METADATA = "torch.distributed.checkpoint.metadata"
OURS, PLAIN, VALUE = "weight", "plain", "step"


def state(seed: int = 0) -> dict[str, Any]:
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
    return {OURS: nvfp4.quantize(values), PLAIN: values.clone(), VALUE: seed}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Byte for byte."""
    planes = zip(a[OURS].planes().values(), b[OURS].planes().values(), strict=True)
    equal = [torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in planes]
    return all(equal) and torch.equal(a[PLAIN], b[PLAIN]) and a[VALUE] == b[VALUE]


def load(folder: Path) -> str:
    """How a load is refused; "" where it gives what was saved. Raises AssertionError for anything else."""
    live, before = state(1), state(1)
    try:
        checkpoint.load(live, folder)
    except LayoutError as error:
        assert same(live, before), "a load that was refused has changed the state"
        return f"{type(error).__name__}: {error}"
    assert same(live, state()), "what was loaded is not what was saved"
    return ""


def limited(work: Callable[[], str]) -> str:
    """What `work` gives, in a process that is ended when it takes too long, and has no more memory than it needs."""
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            signal.alarm(SECONDS)
            held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
            told = work()
        except BaseException as error:
            told = f"{type(error).__name__} escaped: {str(error)[:2000]}"
        os.write(write, told.encode()[:60_000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, f"the load was ended by signal {-code}"
    return told


# --------------------------------------------------------------------------------------------------------------- making
def metadata_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def put_metadata(folder: Path, metadata: Any) -> None:
    """Bytes, or what is pickled; nothing vouches for them."""
    data = metadata if isinstance(metadata, bytes) else pickle.dumps(metadata)
    (folder / ".metadata").write_bytes(data)
    (folder / "layoutc.json").unlink(missing_ok=True)


def info_of(metadata: Any, name: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def put_item(folder: Path, name: str, data: bytes) -> None:
    """Other bytes in the place of an item, in a file of their own."""
    metadata = metadata_of(folder)
    info = info_of(metadata, name)
    info.relative_path, info.offset, info.length = "__9_0.distcp", 0, len(data)
    info.__dict__.pop("crc32", None)
    (folder / "__9_0.distcp").write_bytes(data)
    put_metadata(folder, metadata)


def item(folder: Path, name: str) -> bytes:
    info = info_of(metadata_of(folder), name)
    return (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]


def records(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as found:
        return {name: found.read(name) for name in found.namelist()}


def zipped(content: dict[str, bytes], before: bytes = b"") -> bytes:
    file = io.BytesIO(before)
    file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file, "a" if before else "w", zipfile.ZIP_STORED) as made:
        for name, data in content.items():
            made.writestr(zipfile.ZipInfo(name), data)
    return file.getvalue()


def renamed(folder: Path, name: Any) -> None:
    metadata = metadata_of(folder)
    metadata.state_dict_metadata[name] = metadata.state_dict_metadata.pop(PLAIN)
    put_metadata(folder, metadata)


def of_another_save(folder: Path) -> None:
    """Whole items of the same lengths, at the same places."""
    checkpoint.save(state(5), folder.parent / "other")
    (folder / "__0_0.distcp").write_bytes((folder.parent / "other" / "__0_0.distcp").read_bytes())


def with_program(folder: Path, name: str, program: bytes) -> None:
    """An item whose pickle is another one."""
    content = records(item(folder, name))
    content[next(one for one in content if one.endswith("/data.pkl"))] = program
    put_item(folder, name, zipped(content))


class Restored:
    """Pickled as a quantized tensor of a state."""

    def __init__(self, given: dict[str, Any], times: int = 1) -> None:
        self.given, self.times = given, times

    def __reduce__(self) -> Any:
        import layoutc

        return layoutc.restore_tensor, (self.given,)


def with_state(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """The quantized tensor, with another state."""
    _, (given,) = state()[OURS].__reduce_ex__(2)[:2]
    change(given)
    file = io.BytesIO()
    torch.save(Restored(given), file)
    put_item(folder, OURS, file.getvalue())


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def put(number: int) -> bytes:
    return b"r" + struct.pack("<I", number)


def get(number: int) -> bytes:
    return b"j" + struct.pack("<I", number)


def doubled(levels: int, one: bytes, two: bytes) -> bytes:
    """one, then `two` values of it in one of them, so many times."""
    found = one + put(0)
    for level in range(levels):
        found += b"0" + two.replace(b"%", get(level)) + put(level + 1)
    return found


TUPLES = b")" + put(0) + b"".join(get(level) + b"\x86" + put(level + 1) for level in range(60))
LISTS = doubled(60, b"]", b"](%%e")


def with_version(folder: Path, value: bytes) -> None:
    """.metadata whose version is what a piece of a pickle makes."""
    metadata = metadata_of(folder)
    metadata.version = "VERSION"
    data = pickle.dumps(metadata, 2)
    assert data.count(text("VERSION")) == 1
    start = data.index(text("VERSION"))
    end = start + len(text("VERSION"))
    end += 2 if data[end : end + 1] == b"q" else 5  # its place in the memo
    put_metadata(folder, data[:start] + value + data[end:])


def many_chunks(folder: Path, count: int = 12_000) -> None:
    """Chunks that all meet along either dim, as far as can be."""
    metadata = metadata_of(folder)
    entry = metadata.state_dict_metadata[PLAIN]
    half = count // 6
    entry.size, entry.chunks = torch.Size((4 * half, 2 * half)), []

    def add(row: int, column: int, rows: int, columns: int) -> None:
        offsets = torch.Size((row, column))
        entry.chunks.append(dcp.ChunkStorageMetadata(offsets, torch.Size((rows, columns))))
        metadata.storage_data[dcp.MetadataIndex(PLAIN, offsets)] = kind("__0_0.distcp", 10**9 + len(entry.chunks), 1)

    kind = type(info_of(metadata, PLAIN))
    metadata.storage_data = {i: one for i, one in metadata.storage_data.items() if i.fqn != PLAIN}
    for n in range(half):  # tall ones side by side, each cut elsewhere; and wide ones one on another
        add(0, n, n + 1, 1)
        add(n + 1, n, 2 * half - n - 1, 1)
        add(2 * half + n, 0, 1, n + 1)
        add(2 * half + n, n + 1, 1, 2 * half - n - 1)
    add(0, half, 2 * half, half)
    add(3 * half, 0, half, 2 * half)
    put_metadata(folder, metadata)


def sparse(path: Path, size: int, head: bytes = b"") -> None:
    path.write_bytes(head)
    os.truncate(path, size)


def to_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def long_item(folder: Path) -> None:
    metadata = metadata_of(folder)
    sparse(folder / "__9_0.distcp", 2**40)
    info = info_of(metadata, PLAIN)
    info.relative_path, info.offset, info.length = "__9_0.distcp", 0, 2**40
    info.__dict__.pop("crc32", None)
    put_metadata(folder, metadata)


def manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    found = json.loads((folder / "layoutc.json").read_text())
    change(found)
    (folder / "layoutc.json").write_text(json.dumps(found))


def retyped(given: dict[str, Any]) -> None:
    """A plane of the same shape and bytes."""
    planes = given["planes"]
    planes["rowwise_scale"] = planes["rowwise_scale"].view(torch.int8)


def repeats(given: dict[str, Any]) -> None:
    """Planes that are one byte, over and over."""
    shape = (2**20, 2**15)
    given["shape"] = given["matrix"] = (shape[0], 2 * shape[1])
    given["planes"] = {
        name: torch.zeros(1, dtype=plane.dtype).expand(shape) if plane.dim() == 2 else plane
        for name, plane in given["planes"].items()
    }


def restores_often(folder: Path) -> None:
    """One tensor of 4 MiB, ten thousand times."""
    large = nvfp4.quantize(torch.zeros(2048, 4096))
    file = io.BytesIO()
    torch.save(large, file)
    content = records(file.getvalue())
    name = next(one for one in content if one.endswith("/data.pkl"))
    program = content[name]
    start = program.index(b"clayoutc\nrestore_tensor\n")
    end = program.rindex(b"\x85")  # its state, in a tuple
    head, made = program[:start], program[start:end]
    # The memo's numbers may only grow by as many as there are instructions.
    function, rest = named("layoutc", "restore_tensor"), b"N" * 9100
    again = (function + get(9000) + b"\x85R") * 10_000
    content[name] = head + b"](" + rest + made + put(9000) + b"\x85R" + again + b"e."
    put_item(folder, VALUE, zipped(content))


DEEP = b"[" * 1_000_000
TUPLED = "nests tuples too often"
STEP: dict[str, tuple[bytes, str]] = {  # programs in the place of a plain value
    "a tuple of tuples as a key": (b"\x80\x02}" + TUPLES + b"Ns.", TUPLED),
    "tuples a million deep as a key": (b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns.", TUPLED),
    "tuples beside empty ones as a key": (b"\x80\x02})" + b")\x86" * 1_000_000 + b"Ns.", TUPLED),
    **{
        f"a {name} of a size": (
            b"\x80\x02" + named(module, name) + b"\x8a\x05\0\0\0\0\x10\x85" + call + b".",
            f"it makes a {module}.{name} of a size that it states",
        )
        for module, name, call in (
            ("builtins", "bytearray", b"R"),
            ("torch", "Tensor", b"R"),
            ("torch", "FloatTensor", b"R"),
            ("torch.storage", "UntypedStorage", b"\x81"),
        )
    },
    "a value that is not there": (b"\x80\x02\x86.", "uses values that it has not made"),
    "a call of what is not there": (b"\x80\x02NR.", "uses values that it has not made"),
    "a number that stands for nothing": (b"\x80\x02h\x05.", "uses values that it has not made"),
}  # fmt: skip
VERSION: dict[str, tuple[bytes, str]] = {  # what makes the version in .metadata
    "nested lists": (LISTS, "its version is of type list"),
    "a tuple of tuples": (TUPLES, TUPLED),
    "a key of tuples": (b"}" + TUPLES + b"Ns", TUPLED),
    "paths in paths": (doubled(60, named("pathlib", "PurePosixPath") + text("abcd") + b"\x85R",
                               named("pathlib", "PurePosixPath") + b"%%\x86R"), "a path is not made of text"),
    "a layout of tuples": (named("torch.serialization", "_get_layout") + TUPLES + b"\x85R", TUPLED),
    "sizes of a long list": (b"](" + b"K\1" * 50_000 + b"e" + put(0) + b"0("
                             + (named("torch", "Size") + get(0) + b"\x85R") * 20_000 + b"t", "more than 64 dims"),
    "states of many fields": (b"}(" + b"".join(text(f"{n}") + b"N" for n in range(20_000)) + b"u" + put(0) + b"0("
                              + (named(METADATA, "StorageMeta") + b")\x81" + get(0) + b"b")
                              * 5_000 + b"t", "StorageMeta has an invalid state"),
    "a state whose fields are numbers": (named(METADATA, "StorageMeta") + b")\x81}K\1Nsb",
                                         "StorageMeta has an invalid state"),
    "a state that is no dict": (named(METADATA, "StorageMeta") + b")\x81](K\1eb", "StorageMeta has an invalid state"),
}  # fmt: skip

HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a halo": (lambda f: with_state(f, lambda s: s.update(matrix=(64 + 2**24, 64), halo=(0, 2**24))), "has a halo of"),
    "a negative halo": (lambda f: with_state(f, lambda s: s.update(halo=(-64, 64))), "halo is not what layoutc writes"),
    "a plane of another dtype": (
        lambda f: with_state(f, retyped),
        r"rowwise_scale of .* should be \(4, 4\), but the file has \(4, 4\) torch.int8",
    ),
    "planes of one byte": (lambda f: with_state(f, repeats), "more elements than|more bytes than|should be"),
    "a facts that is none": (lambda f: with_state(f, lambda s: s.update(facts=[1])), "facts is not what"),
    "a tensor again and again": (restores_often, "more tensors than bytes"),
    "80,000 records": (
        lambda f: put_item(f, VALUE, zipped(records(item(f, VALUE)) | {f"archive/{n}": b"" for n in range(80_000)})),
        MAY_LOAD,
    ),
    "a zip after other bytes": (
        lambda f: put_item(f, PLAIN, zipped(records(item(f, PLAIN)), b"PK\3\4 something else")),
        "its records overlap, have gaps",
    ),
    **{
        f"{name} that is a pipe": (lambda f, name=name: to_fifo(f / name), "not a regular file|is missing|has 0 bytes")
        for name in (".metadata", "layoutc.json", "__0_0.distcp")
    },
    **{
        name: (lambda f, made=made: with_program(f, VALUE, made), words) for name, (made, words) in STEP.items()
    },
    **{
        f"{name} in .metadata": (lambda f, made=made: with_version(f, made), words)
        for name, (made, words) in VERSION.items()
    },
    "an entry whose name is a number": (lambda f: renamed(f, 3), "an entry has the name 3"),
    "an entry with a long name": (lambda f: renamed(f, "a" * 2**17), "an entry has the name 'aa"),
    "many chunks": (many_chunks, "in a way that no save produces"),
    "a size of many dims": (
        lambda f: with_version(f, named("torch", "Size") + b"(" + b"K\2" * 70 + b"t\x85R"),
        "more than 64 dims",
    ),
    "a long .metadata": (lambda f: sparse(f / ".metadata", 2**40, b"\x80\x02"), "but such a file has at most"),
    "a file of another save": (of_another_save, "is not the item that was saved there"),
    "a long item": (long_item, "has more bytes than its elements can need"),
    "a deep manifest": (lambda f: (f / "layoutc.json").write_bytes(b'{"files": ' + DEEP), "brackets"),
    "a nested manifest": (
        lambda f: (f / "layoutc.json").write_bytes(b'{"files": ' + b'[                ' * 100_000),
        "nested too deeply",
    ),
    "a manifest of files elsewhere": (lambda f: manifest(f, lambda m: m["files"].update({"../x": 1})), "list files"),
    "a manifest without numbers": (
        lambda f: (f / "layoutc.json").write_text('{"format": 1, "files": {"a": NaN}}'),
        "contains NaN",
    ),
    "a manifest that says things twice": (
        lambda f: (f / "layoutc.json").write_text('{"format": 1, "format": 1}'),
        "has the key 'format' twice",
    ),
}  # fmt: skip
LARGE = {"80,000 records", "many chunks"}  # which take ten seconds each

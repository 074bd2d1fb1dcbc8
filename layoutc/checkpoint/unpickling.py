"""Unpickling without trust: names that are listed, opcodes that are listed, and nothing that outlives the reading.

A pickle is a program. Here it may only make plain values and what the caller's names stand for; these are made anew for
each reading, so that a program which changes them changes nothing else. No opcode can ask for more memory than there
are bytes in the file.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch

from layoutc.runtime.errors import DamagedError

Names = Mapping[tuple[str, str], Any]

# Bytes that follow an opcode. Not here, so refused: everything that no pickle of plain values or of objects with
# listed names has (persistent ids as text, registered extensions, INST, OBJ, NEWOBJ_EX, out-of-band buffers).
_FIXED = {
    **dict.fromkeys(b"().01]}NRQabestu", 0),
    **dict.fromkeys((0x81, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8F, 0x90, 0x91, 0x93, 0x94), 0),
    **dict.fromkeys(b"Khq\x80", 1),
    ord("M"): 2,
    **dict.fromkeys(b"Jjr", 4),
    **dict.fromkeys(b"G\x95", 8),
}
# Bytes of the length that comes before the value.
_SIZED = {ord("X"): 4, 0x8C: 1, 0x8D: 8, ord("B"): 4, ord("C"): 1, 0x8E: 8, 0x8A: 1, ord("U"): 1}
_PUT, _GLOBAL, _BUILD, _STOP = ord("r"), ord("c"), ord("b"), ord(".")
_NUMBER = 0x8A


def read(
    data: bytes,
    names: Names,
    where: str,
    dtypes: bool,
    persistent: Callable[[Any], Any] | None = None,
    builds: bool = True,
) -> Any:
    """The value of a pickle. names: what (module, name) stands for; dtypes: whether torch dtypes may be named as well;
    persistent: makes the value of a persistent id; builds: whether values may be given a state, by which a tensor, if
    names make one, would reach for other memory.

    Raises DamagedError that names what the pickle asks for and may not have.
    """
    _check_opcodes(data, where, builds)
    try:
        return _Reader(io.BytesIO(data), names, where, dtypes, persistent).load()
    except DamagedError:
        raise
    except Exception as error:  # a broken pickle can raise nearly anything
        raise DamagedError(f"{where} is damaged: {error or type(error).__name__}") from error


class _Reader(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, names: Names, where: str, dtypes: bool, persistent: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(file)
        self._names, self._where, self._dtypes, self._persistent = names, where, dtypes, persistent

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for; pickle calls this for every name."""
        if (module, name) in self._names:
            return self._names[module, name]
        if self._dtypes and module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        raise DamagedError(
            f"{self._where} names {module}.{name}, which nothing in such a file is made of; it is not read, since that "
            "could run anything"
        )

    def persistent_load(self, pid: Any) -> Any:
        """What a persistent id stands for."""
        if self._persistent is None:
            raise DamagedError(f"{self._where} has a persistent id, which nothing in such a file is made of")
        return self._persistent(pid)


def _check_opcodes(data: bytes, where: str, builds: bool) -> None:
    """Raises DamagedError for an opcode that is not listed, or that asks for memory which the file's size does not
    justify: the C reader makes a table as long as the greatest number in it."""
    at, size, fixed, sized, ops = 0, len(data), _FIXED, _SIZED, 0
    while at < size:
        code = data[at]
        at += 1
        ops += 1
        if (more := fixed.get(code)) is not None and (builds or code != _BUILD):
            if code == _PUT and int.from_bytes(data[at : at + 4], "little") > ops:
                raise DamagedError(f"{where} is damaged: byte {at} numbers a value that is not there")
            if code == _STOP:
                break
            at += more
        elif (width := sized.get(code)) is not None:
            length = int.from_bytes(data[at : at + width], "little")
            if code == _NUMBER and length > 8:
                raise DamagedError(f"{where} is damaged: byte {at} begins a number of {length} bytes")
            at += width + length
        elif code == _GLOBAL:
            at = data.find(b"\n", data.find(b"\n", at) + 1) + 1
            if not at:
                break
        else:
            raise DamagedError(f"{where} is damaged: byte {at - 1} is no instruction that such a file has ({code:#x})")
    if not size or at != size or data[-1] != _STOP:
        raise DamagedError(f"{where} is damaged: it does not end where its last value does")

"""Unpickles untrusted files: only listed names, only listed opcodes, and no lasting side effects.

A pickle is a program. Here it can only make plain values and the objects that the caller's names map to. These objects
are new for each read, so a program that modifies them changes nothing else. No opcode can use more memory or time than
the file's size justifies: hashing tuples that contain one another many times over would never end.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch

from layoutc.runtime.errors import DamagedError

Names = Mapping[tuple[str, str], Any]

# Number of bytes that follow an opcode. Unlisted opcodes are rejected: no pickle of plain values or of listed names
# has them (persistent ids as text, registered extensions, INST, OBJ, NEWOBJ_EX, out-of-band buffers).
_FIXED = {
    **dict.fromkeys(b"().01]}NRQabestu", 0),
    **dict.fromkeys((0x81, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8F, 0x90, 0x91, 0x93, 0x94), 0),
    **dict.fromkeys(b"Khq\x80", 1),
    ord("M"): 2,
    **dict.fromkeys(b"Jjr", 4),
    **dict.fromkeys(b"G\x95", 8),
}
# Width in bytes of the length field that precedes the value.
_SIZED = {ord("X"): 4, 0x8C: 1, 0x8D: 8, ord("B"): 4, ord("C"): 1, 0x8E: 8, 0x8A: 1, ord("U"): 1}
_PUT, _GLOBAL, _BUILD, _STOP, _MARK = ord("r"), ord("c"), ord("b"), ord("."), ord("(")
_NUMBER = 0x8A
# The effect of opcodes on the stack: how many values they push or pop.
_MEMO = {**dict.fromkeys(b"q", 1), **dict.fromkeys(b"r", 4)}
_PUSH, _POP, _FROM_MARK, _TUPLES, _GET = 1, 2, 3, 4, 5
_EFFECTS: dict[int, tuple[int, int]] = {
    **dict.fromkeys((*b"]}NKMJGXBCUc", 0x88, 0x89, 0x8F, 0x8C, 0x8D, 0x8E, 0x8A), (_PUSH, 1)),
    **dict.fromkeys(b"0ab", (_POP, 1)),  # POP, APPEND, BUILD
    ord("s"): (_POP, 2),
    **dict.fromkeys((ord("R"), 0x81, 0x93), (_POP, -2)),  # two values become one that is not a tuple
    ord("Q"): (_POP, -1),
    **dict.fromkeys((*b"1eu", 0x90), (_FROM_MARK, 0)),
    **dict.fromkeys((ord("t"), 0x91), (_TUPLES, -1)),
    ord(")"): (_TUPLES, 0),
    **{0x84 + count: (_TUPLES, count) for count in (1, 2, 3)},
    ord("h"): (_GET, 1),
    ord("j"): (_GET, 4),
}
_DEEP, _DEPTH = 64, 40  # maximum levels of nested tuples; low bits of a stack value, which count tuples


def read(
    data: bytes,
    names: Names,
    where: str,
    persistent: Callable[[Any], Any] | None = None,
    builds: bool = True,
    longest: int = 8,
) -> Any:
    """The value of a pickle.

    names: (module, name) -> the object to use for it; torch's dtypes are accepted too. persistent: maps a persistent id
    to its value. builds: whether BUILD may set an object's state, which could point a tensor that `names` makes at
    other memory. longest: maximum bytes of an integer.

    Raises DamagedError that says what the pickle requests and may not have.
    """
    check(data, where, builds, longest)
    try:
        return _Reader(io.BytesIO(data), names, where, persistent).load()
    except DamagedError:
        raise
    except Exception as error:  # a broken pickle can raise almost anything
        reason = error.args[0] if error.args and isinstance(error.args[0], str) else type(error).__name__
        raise DamagedError(f"{where} is damaged: {reason[:200]}") from error


def check(data: bytes, where: str, builds: bool = True, longest: int = 8) -> None:
    """Raises DamagedError if a pickle has an unlisted opcode, or takes more memory or time than its size justifies."""
    _check_opcodes(data, where, builds, longest)
    try:
        fits = _tuples(data) <= _DEEP * len(data)
    except (IndexError, KeyError):
        raise DamagedError(f"{where} is damaged: its pickle uses values that it has not made") from None
    if not fits:
        raise DamagedError(f"{where} is damaged: its pickle nests tuples too often")


def check_calls(data: bytes, where: str) -> None:
    """Raises DamagedError if a checked pickle makes a tensor, a storage or a bytearray of a size that it states.

    torch.load allows these calls, so that a few bytes take any memory; torch.save writes none. Runs the pickle with
    stand-ins for all that it names.
    """
    try:
        _Rehearsal(io.BytesIO(data)).load()
    except Exception as error:
        raise DamagedError(f"{where} is damaged: {str(error)[:200] or type(error).__name__}") from error


class _Anything:
    """Stands for an object of any class, in `check_calls`."""

    name = ""

    def __new__(cls, *args: Any, **_: Any) -> _Anything:
        is_sized = cls.name == "builtins.bytearray" and any(type(one) is int for one in args)
        if is_sized or (cls.name.startswith("torch.") and cls.name.endswith(("Tensor", "Storage"))):
            raise ValueError(f"it makes a {cls.name} of a size that it states")
        return object.__new__(cls)

    def _ignore(self, *_: Any) -> None: ...

    __init__ = __setstate__ = __setitem__ = append = extend = add = update = _ignore


class _Rehearsal(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """A class that only says what it is called. pickle calls this for every name."""
        return type("Named", (_Anything,), {"name": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        """What stands for a storage in the file."""
        return _Anything()


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, names: Names, where: str, persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(file)
        self._names, self._where, self._persistent = names, where, persistent

    def find_class(self, module: str, name: str) -> Any:
        """The object that a name maps to. pickle calls this for every name."""
        if (module, name) in self._names:
            return self._names[module, name]
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise DamagedError(
            f"{self._where} names {module[:80]}.{name[:80]}, which such a file never does; it is not read, since that "
            "could run any code"
        )

    def persistent_load(self, pid: Any) -> Any:
        """The object that a persistent id maps to."""
        if self._persistent is None:
            raise DamagedError(f"{self._where} has a persistent id, which such a file never does")
        return self._persistent(pid)


def _check_opcodes(data: bytes, where: str, builds: bool, longest: int) -> None:
    """Raises DamagedError for an unlisted opcode, or one that would use more memory than the file's size justifies.

    The C unpickler allocates a memo table as long as its largest index.
    """
    at, size, fixed, sized, ops = 0, len(data), _FIXED, _SIZED, 0
    while at < size:
        code = data[at]
        at += 1
        ops += 1
        if (more := fixed.get(code)) is not None and (builds or code != _BUILD):
            if code == _PUT and int.from_bytes(data[at : at + 4], "little") > ops:
                raise DamagedError(f"{where} is damaged: byte {at} stores a value under an impossible number")
            if code == _STOP:
                break
            at += more
        elif (width := sized.get(code)) is not None:
            length = int.from_bytes(data[at : at + width], "little")
            if code == _NUMBER and length > longest:
                raise DamagedError(f"{where} is damaged: byte {at} begins an integer of {length} bytes")
            at += width + length
        elif code == _GLOBAL:
            at = data.find(b"\n", data.find(b"\n", at) + 1) + 1
            if not at:
                break
        else:
            raise DamagedError(f"{where} is damaged: byte {at - 1} is an opcode that such a file never has ({code:#x})")
    if not size or at != size or data[-1] != _STOP:
        raise DamagedError(f"{where} is damaged: its pickle does not end with its last value")


def _tuples(data: bytes) -> int:
    """The number of tuples visited if every tuple that is made or fetched is hashed once, including nested tuples.

    More than _DEEP levels count as too many. Simulates the pickle, whose opcodes are all listed, without making any
    object. On the stack, a tuple is its levels << _DEPTH | the number of tuples in it, itself included; any other value
    is 0. Raises IndexError or KeyError if a value is missing.
    """
    at, total, level, fixed, sized, effects = 0, 0, 1 << _DEPTH, _FIXED, _SIZED, _EFFECTS
    stack: list[int] = []
    below: list[list[int]] = []  # stacks under marks
    memo: dict[int, int] = {}
    while True:
        code = data[at]
        at += 1
        kind, count = effects.get(code, (0, 0))
        if kind == _PUSH:
            stack.append(0)
        elif kind == _GET:
            stack.append(value := memo[int.from_bytes(data[at : at + count], "little")])
            total += value & level - 1
        elif code == 0x94:
            memo[len(memo)] = stack[-1]
        elif (width := _MEMO.get(code)) is not None:
            memo[int.from_bytes(data[at : at + width], "little")] = stack[-1]
        elif code == _MARK:
            below.append(stack)
            stack = []
        elif kind == _TUPLES:
            parts = stack if count < 0 else stack[len(stack) - count :]
            if len(parts) < count:
                raise IndexError
            if count < 0:
                stack = below.pop()
            elif count:
                del stack[-count:]
            deepest = max(parts, default=0) >> _DEPTH
            inside = sum(part & level - 1 for part in parts) + 1 if deepest else 1
            total += inside
            if deepest >= _DEEP or total > _DEEP * len(data):
                return _DEEP * len(data) + 1
            stack.append((deepest + 1) * level | inside)
        elif kind == _FROM_MARK:
            stack = below.pop()
        elif kind == _POP:
            if len(stack) < abs(count):
                raise IndexError
            del stack[len(stack) - abs(count) :]
            if count < 0:
                stack.append(0)
        elif code == _STOP:
            return total
        if (more := fixed.get(code)) is not None:
            at += more
        elif (width := sized.get(code)) is not None:
            at += width + int.from_bytes(data[at : at + width], "little")
        else:  # a module and a name, one line each
            at = data.index(b"\n", data.index(b"\n", at) + 1) + 1

"""A fault: one small edit of a module's text, and whether it changes what the module does."""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType


@dataclass(frozen=True)
class Fault:
    """One edit: bytes `start` to `end` of a module become `new`. `scope` is the function it is in; "" for none."""

    module: str
    kind: str
    line: int
    scope: str
    start: int
    end: int
    new: str

    @property
    def key(self) -> str:
        """A short name, the same while the module is."""
        return hashlib.sha256(repr((self.module, self.start, self.end, self.new)).encode()).hexdigest()[:7]

    def apply(self, source: str) -> str:
        """The module's text with the fault in it."""
        data = source.encode()
        return (data[: self.start] + self.new.encode() + data[self.end :]).decode()

    def diff(self, source: str) -> str:
        """What changed, with a line of context."""
        before, after = source.splitlines(), self.apply(source).splitlines()
        lines = list(difflib.unified_diff(before, after, lineterm="", n=1))[2:]
        return "\n".join(lines)


def is_fault(fault: Fault, source: str) -> bool:
    """True when the module compiles with it, and to other instructions."""
    try:
        return not _same_code(_compiled(source), _compiled(fault.apply(source)))
    except (SyntaxError, ValueError):
        return False


@lru_cache(maxsize=4)
def _compiled(source: str) -> CodeType:
    return compile(source, "module", "exec", dont_inherit=True)


def _same_code(a: CodeType, b: CodeType) -> bool:
    """The same instructions, wherever they stand in the text."""
    parts = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_exceptiontable", "co_flags")
    if any(getattr(a, part) != getattr(b, part) for part in parts) or len(a.co_consts) != len(b.co_consts):
        return False
    pairs = zip(a.co_consts, b.co_consts, strict=True)
    return all(
        _same_code(x, y)
        if isinstance(x, CodeType) and isinstance(y, CodeType)
        else (type(x), repr(x)) == (type(y), repr(y))
        for x, y in pairs
    )

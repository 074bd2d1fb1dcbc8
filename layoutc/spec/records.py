"""The notation of records: which bits of which values share words, `scale 0:4 bits 0:6 | scale 4:8 bits 4:6`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast, get_args

from layoutc.spec.notation import NotationError

Part = Literal["data", "scale", "super", "offset", "zero", "super_zero"]
PARTS: tuple[Part, ...] = get_args(Part)
_FIELD = re.compile(r"\s*(\w+)(?:\s+(\d{1,6}):(\d{1,6}))?(?:\s+bits\s+(\d{1,2}):(\d{1,2}))?\s*")


@dataclass(frozen=True)
class Field:
    """Some bits of some values of a plane in a record: entries start to stop, bits low to high; None: all."""

    part: Part
    entries: tuple[int, int] | None = None
    bits: tuple[int, int] | None = None

    def of(self, count: int, width: int) -> tuple[int, int, int, int]:
        """(first entry, end of entries, lowest bit, end of bits) in a record with `count` values of `width` bits."""
        return (*(self.entries or (0, count)), *(self.bits or (0, width)))


def parse_fields(text: str) -> tuple[Field, ...]:
    """Parses fields whose entries share words, the first one in the lowest bits. Raises NotationError."""
    fields, at = [], 0
    for piece in text.split("|"):
        match = _FIELD.fullmatch(piece)
        if match is None or match[1] not in PARTS:
            message = f"can't read `{piece.strip()}`" if match is None else f"there are no values called `{match[1]}`"
            raise NotationError(message, at, at + len(piece))
        entries = (int(match[2]), int(match[3])) if match[2] else None
        bits = (int(match[4]), int(match[5])) if match[4] else None
        if any(pair is not None and pair[0] >= pair[1] for pair in (entries, bits)):
            raise NotationError("the end of a range is above its start", at, at + len(piece))
        fields.append(Field(cast(Part, match[1]), entries, bits))
        at += len(piece) + 1
    return tuple(fields)

"""The small notations inside a spec: layout strings (`m k/16`), swizzle patterns (einops style), layouts of files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

Axis = Literal["m", "k"]


class NotationError(ValueError):
    """Raised for a string that can't be read; `start` and `end` are offsets into it."""

    def __init__(self, message: str, start: int, end: int) -> None:
        super().__init__(message)
        self.start, self.end = start, end


@dataclass(frozen=True)
class Term:
    """One dim of a buffer: an axis of the weight, stored once for every `divisor` steps along it."""

    axis: Axis
    divisor: int = 1


@dataclass(frozen=True)
class Swizzle:
    """Splits each dim of a 2-D buffer into the names of its group, then orders all names.

    The first name of a group has no size of its own: it takes what is left.
    """

    groups: tuple[tuple[str, ...], ...]
    order: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]

    @property
    def pattern(self) -> str:
        """The pattern as a spec writes it, without sizes: `(rt a b) (ct c) -> rt ct b a c`."""
        groups = (f"({' '.join(group)})" if len(group) > 1 else group[0] for group in self.groups)
        return f"{' '.join(groups)} -> {' '.join(self.order)}"

    def tile(self, dim: int) -> int:
        """The number that the size of a dim must be a multiple of."""
        sizes, product = dict(self.sizes), 1
        for name in self.groups[dim][1:]:
            product *= sizes[name]
        return product


def parse_layout(text: str) -> tuple[Term, ...]:
    """`m k/16` -> (Term m 1, Term k 16); `scalar` -> (). Raises NotationError."""
    if text.strip() == "scalar":
        return ()
    terms: list[Term] = []
    for word in re.finditer(r"\S+", text):
        match = re.fullmatch(r"([mk])(?:/([1-9][0-9]*))?", word[0])
        if not match:
            raise NotationError(f"`{word[0]}` is not an axis; write m, k, or m/N, k/N", *word.span())
        if any(term.axis == match[1] for term in terms):
            raise NotationError(f"axis {match[1]} is named twice", *word.span())
        terms.append(Term(cast(Axis, match[1]), int(match[2] or 1)))
    if not terms:
        raise NotationError("names no axis", 0, max(1, len(text)))
    return tuple(terms)


def parse_swizzle(pattern: str, sizes: dict[str, int]) -> Swizzle:
    """`(rt a b) (ct c) -> rt ct b a c` with the sizes of a, b, c. Raises NotationError.

    It is a bijection by construction: each name appears once on either side, and only the first of a group has no size.
    """
    groups, order = _arrow(pattern, "(free, contraction)")
    inner = [name for group in groups for name in group[1:]]
    for name in inner:
        if name not in sizes:
            raise NotationError(f"`{name}` has no size", *_find(pattern, name))
    for group in groups:
        if group[0] in sizes:
            raise NotationError(f"`{group[0]}` takes what is left, so it has no size", *_find(pattern, group[0]))
    extra = [name for name in sizes if name not in inner]
    if extra:
        raise NotationError(f"a size is given for `{extra[0]}`, which the pattern does not name", 0, len(pattern))
    return Swizzle(tuple(groups), tuple(order), tuple(sorted(sizes.items())))


def _arrow(pattern: str, groups_are: str) -> tuple[list[tuple[str, ...]], list[str]]:
    """The groups of names before the arrow, two of them, and all names in the order after it. Raises NotationError."""
    left, arrow, right = pattern.partition("->")
    if not arrow:
        raise NotationError("has no `->`", 0, max(1, len(pattern)))
    if re.search(r"[()]", re.sub(r"\([^()]*\)", "", left)):
        raise NotationError("has parentheses that do not match", 0, len(left.rstrip()))
    groups, seen = [], set()
    for token in re.finditer(r"\([^()]*\)|\S+", left):
        members = re.findall(r"[A-Za-z_]\w*", token[0])
        if "".join(members) != re.sub(r"[()\s]", "", token[0]) or not members:
            raise NotationError(f"`{token[0]}` is not a name or a group of names in parentheses", *token.span())
        for name in members:
            if name in seen:
                raise NotationError(f"`{name}` appears twice before the arrow", *token.span())
            seen.add(name)
        groups.append(tuple(members))
    if len(groups) != 2:
        raise NotationError(f"takes 2 dims, {groups_are}, but names {len(groups)}", 0, max(1, len(left.rstrip())))
    offset = len(left) + len(arrow)
    order = []
    for word in re.finditer(r"\S+", right):
        span = (offset + word.start(), offset + word.end())
        if word[0] not in seen:
            raise NotationError(f"`{word[0]}` does not appear before the arrow", *span)
        if word[0] in order:
            raise NotationError(f"`{word[0]}` appears twice after the arrow", *span)
        order.append(word[0])
    missing = [name for group in groups for name in group if name not in order]
    if missing:
        raise NotationError(f"`{missing[0]}` is missing after the arrow", offset, max(offset + 1, len(pattern)))
    return groups, order


@dataclass(frozen=True)
class FileLayout:
    """Splits the rows and the columns of a plane's values into names, then orders all names: the dims of a file's
    tensor.

    MATRICES among the rows has the number of a weight's matrices (1, and no dim, for a weight of two dims). Of the
    other names of a group, one has no size: it takes what is left.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    order: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]

    @property
    def pattern(self) -> str:
        """The pattern as a spec writes it, without sizes."""
        return Swizzle((self.rows, self.columns), self.order, ()).pattern


MATRICES = "e"
AS_STORED = FileLayout((MATRICES, "m"), ("k",), (MATRICES, "m", "k"), ())


def parse_file_layout(pattern: str, sizes: dict[str, int]) -> FileLayout:
    """`(e m) (g b) -> e m g b` with the size of b. A bijection by construction, as a swizzle is. Raises
    NotationError."""
    groups, order = _arrow(pattern, "(rows, columns)")
    names = [name for group in groups for name in group]
    if MATRICES in names and groups[0][0] != MATRICES:
        raise NotationError(f"`{MATRICES}` counts matrices, so it is the first name of the rows", *_find(pattern, "e"))
    if extra := [name for name in sizes if name not in names or name == MATRICES]:
        what = "is the number of matrices" if extra[0] == MATRICES else "is not in the pattern"
        raise NotationError(f"a size is given for `{extra[0]}`, which {what}", 0, len(pattern))
    for what, group in zip(("rows", "columns"), groups, strict=True):
        free = [name for name in group if name not in sizes and name != MATRICES]
        if len(free) != 1:
            message = f"of the {what} ({' '.join(group)}), " + ("no name" if not free else "more than one name")
            raise NotationError(f"{message} has no size", *_find(pattern, group[-1]))
    return FileLayout(groups[0], groups[1], tuple(order), tuple(sorted(sizes.items())))


def parse_form(text: str) -> tuple[float | None, float | None]:
    """`2688 / x` -> (2688.0, None), `x / 2688` -> (None, 2688.0): what a file has in place of x. Raises
    NotationError."""
    number = r"[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?"
    match = re.fullmatch(rf"\s*(?:({number})\s*/\s*x|x\s*/\s*({number}))\s*", text)
    if match is None:
        raise NotationError(f"`{text}` is neither a number / x nor x / a number", 0, max(1, len(text)))
    over, by = (float(one) if one else None for one in match.groups())
    if not 2.0**-126 <= (over or by or 0.0) < 2.0**127:
        raise NotationError(f"{match[1] or match[2]} is not a number of fp32 that can be divided by", 0, len(text))
    return over, by


def _find(pattern: str, name: str) -> tuple[int, int]:
    match = re.search(rf"\b{re.escape(name)}\b", pattern)
    return match.span() if match else (0, len(pattern))

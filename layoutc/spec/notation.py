"""The small notations inside a spec: layout strings (`m k/16`), swizzle patterns (einops style), layouts of files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from math import gcd, prod
from typing import Literal, cast

Axis = Literal["m", "k"]
LONGEST = 16  # the most entries that a swizzle lists


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
    """Splits each dim of a buffer into the names of its group, orders all names, and joins them to dims.

    One name of each group has no size of its own: it takes what is left.
    """

    groups: tuple[tuple[str, ...], ...]
    order: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]
    joined: tuple[int, ...] = ()  # how many names of `order` make up each dim of the result; (): the result is flat
    picks: tuple[tuple[str, tuple[int, ...]], ...] = ()  # entry i of a name's dim is its entry picks[i]

    @property
    def pattern(self) -> str:
        """The pattern as a spec writes it, without sizes: `(rt a b) (ct c) -> rt ct b a c`."""
        return f"{_written(self.groups)} -> {_written(self.dims) if self.joined else ' '.join(self.order)}"

    @property
    def stated(self) -> str:
        """The pattern with its sizes, as words: `(rt a) ct -> ct rt a with a = 4`."""
        orders = dict(self.picks)
        sizes = (f"{name} = {list(orders[name]) if name in orders else size}" for name, size in self.sizes)
        return f"{self.pattern} with {', '.join(sizes)}" if self.sizes else self.pattern

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        """The names that make up each dim of the result, outermost first."""
        names = iter(self.order)
        return tuple(tuple(islice(names, count)) for count in self.joined or (len(self.order),))

    def tile(self, dim: int) -> int:
        """The number that the size of a dim must be a multiple of."""
        sizes = dict(self.sizes)
        return prod(sizes[name] for name in self.groups[dim] if name in sizes)

    def multiples(self, run: int) -> tuple[int, ...]:
        """For each dim, what its size must be a multiple of, if the last dim of the result is whole runs of so many.

        Raises ValueError if no sizes give that, since every name of the last dim has one.
        """
        sizes, last = dict(self.sizes), self.dims[-1]
        missing = run // gcd(run, prod(sizes.get(name, 1) for name in last))
        taker = next((name for name in reversed(last) if name not in sizes), None)
        if missing > 1 and taker is None:
            raise ValueError(f"`{' '.join(last)}` holds {prod(sizes[name] for name in last)} values")
        tiles = [self.tile(dim) for dim in range(len(self.groups))]
        return tuple(tile * missing if taker in group else tile for tile, group in zip(tiles, self.groups, strict=True))


def _written(groups: tuple[tuple[str, ...], ...]) -> str:
    return " ".join(f"({' '.join(group)})" if len(group) > 1 else group[0] for group in groups)


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


def parse_swizzle(pattern: str, sizes: Mapping[str, int]) -> Swizzle:
    """A GEMM's: `(rt a b) (ct c) -> rt ct b a c` with the sizes of a, b, c. Raises NotationError.

    It is a bijection by construction: each name appears once on either side, and only the first of a group has no size.
    """
    groups, order = _arrow(pattern, "(free, contraction)")
    inner = [name for group in groups for name in group[1:]]
    for name in inner:
        if name not in sizes:
            raise NotationError(f"`{name}` has no size", *_find(pattern, name))
    for group in groups:
        if group[0] in sizes:
            raise NotationError(f"`{group[0]}` takes the rest of its dim, so it has no size", *_find(pattern, group[0]))
    extra = [name for name in sizes if name not in inner]
    if extra:
        raise NotationError(f"a size is given for `{extra[0]}`, which the pattern does not name", 0, len(pattern))
    return Swizzle(groups, order, tuple(sorted(sizes.items())))


def _arrow(pattern: str, groups_are: str) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """The groups of names before the arrow, two of them, and all names in the order after it. Raises NotationError."""
    left, arrow, right = _sides(pattern)
    groups = _groups(left, 0, "before")
    if len(groups) != 2:
        raise NotationError(f"takes 2 dims, {groups_are}, but names {len(groups)}", 0, max(1, len(left.rstrip())))
    offset = len(left) + len(arrow)
    order = [(word[0], (offset + word.start(), offset + word.end())) for word in re.finditer(r"\S+", right)]
    _same_names(pattern, groups, order, offset)
    return groups, tuple(name for name, _ in order)


@dataclass(frozen=True)
class FileLayout:
    """Splits the rows and the columns of a plane's values into names, then orders all names: the dims of a file's
    tensor, each of one name, or of as many as `joined` says.

    MATRICES among the rows has the number of a weight's matrices (1, and no dim, for a weight of two dims). Of the
    other names of a group, one has no size: it takes what is left.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    order: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]
    joined: tuple[int, ...] = ()

    @property
    def pattern(self) -> str:
        """The pattern as a spec writes it, without sizes."""
        return Swizzle((self.rows, self.columns), self.order, (), self.joined).pattern

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        """The names that make up each dim of the file's tensor, outermost first."""
        names = iter(self.order)
        return tuple(tuple(islice(names, count)) for count in self.joined or [1] * len(self.order))


MATRICES = "e"
AS_STORED = FileLayout((MATRICES, "m"), ("k",), (MATRICES, "m", "k"), ())


def parse_file_layout(pattern: str, sizes: dict[str, int]) -> FileLayout:
    """`(e m) (g b) -> e m g b`, or `m (g b) -> g (m b)`, with the size of b. A bijection by construction, as a swizzle
    is. Raises NotationError."""
    left, arrow, right = _sides(pattern)
    offset = len(left) + len(arrow)
    groups, dims = _groups(left, 0, "before"), _groups(right, offset, "after")
    if len(groups) != 2:
        raise NotationError(f"takes 2 dims, (rows, columns), but names {len(groups)}", 0, max(1, len(left.rstrip())))
    _same_names(pattern, groups, [(name, _find(pattern, name, offset)) for dim in dims for name in dim], offset)
    names = [name for group in groups for name in group]
    if any(MATRICES in dim and len(dim) > 1 for dim in dims):
        message = f"`{MATRICES}` is grouped with other names, but matrices need a dim of their own"
        raise NotationError(message, *_find(pattern, MATRICES, offset))
    if MATRICES in names and groups[0][0] != MATRICES:
        raise NotationError(f"`{MATRICES}` counts matrices, so it must be the first of the rows", *_find(pattern, "e"))
    if extra := [name for name in sizes if name not in names or name == MATRICES]:
        what = "is the number of matrices" if extra[0] == MATRICES else "is not in the pattern"
        raise NotationError(f"a size is given for `{extra[0]}`, which {what}", 0, len(pattern))
    for what, group in zip(("rows", "columns"), groups, strict=True):
        free = [name for name in group if name not in sizes and name != MATRICES]
        if len(free) != 1:
            which = "more than one name has no" if free else "every name has a"
            message = f"in the {what} ({' '.join(group)}), {which} size"
            raise NotationError(message, *_find(pattern, group[-1]))
    order, joined = tuple(name for dim in dims for name in dim), tuple(len(dim) for dim in dims)
    return FileLayout(*groups, order, tuple(sorted(sizes.items())), joined if max(joined) > 1 else ())


def parse_form(text: str) -> tuple[float | None, float | None]:
    """`2688 / x` -> (2688.0, None), `x / 2688` -> (None, 2688.0): what a file has in place of x. Raises
    NotationError."""
    number = r"[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?"
    match = re.fullmatch(rf"\s*(?:({number})\s*/\s*x|x\s*/\s*({number}))\s*", text)
    if match is None:
        raise NotationError(f"`{text}` is neither a number / x nor x / a number", 0, max(1, len(text)))
    over, by = (float(one) if one else None for one in match.groups())
    if not 2.0**-126 <= (over or by or 0.0) < 2.0**127:
        raise NotationError(f"{match[1] or match[2]} can't be a divisor in fp32", 0, len(text))
    return over, by


def parse_buffer_swizzle(pattern: str, sizes: Mapping[str, int | tuple[int, ...]], dims: int) -> Swizzle:
    """A buffer's: `k (g a b) -> k (g b a)` with the sizes of a and b, over `dims` dims. Raises NotationError.

    A size may be a list, which names the entries in the order in which they are stored. It is a bijection by
    construction: each name appears once on either side, one of each group has no size, and a list has each entry once.
    """
    left, arrow, right = _sides(pattern)
    offset = len(left) + len(arrow)
    groups, joined = _groups(left, 0, "before"), _groups(right, offset, "after")
    if len(groups) != dims:
        raise NotationError(f"the layout has {dims} dim{'s' * (dims != 1)}, but this names {len(groups)}", 0, len(left))
    order = [(name, _find(pattern, name, offset)) for group in joined for name in group]
    _same_names(pattern, groups, order, offset)
    for group in groups:
        free = [name for name in group if name not in sizes]
        if len(free) > 1:
            raise NotationError(f"`{free[1]}` has no size", *_find(pattern, free[1]))
        if not free:
            message = f"`{group[0]}` has a size, so no name takes the rest of its dim"
            raise NotationError(message, *_find(pattern, group[0]))
    picks = {name: size for name, size in sizes.items() if isinstance(size, tuple)}
    for name, pick in picks.items():
        if sorted(pick) != list(range(len(pick))) or not 1 <= len(pick) <= LONGEST:
            most = f"{len(pick) - 1}" if 1 < len(pick) <= LONGEST else f"n, at most {LONGEST - 1}"
            raise NotationError(f"`{name}` must list 0 to {most}, each once", *_find(pattern, name))
    numbers = {name: len(size) if isinstance(size, tuple) else size for name, size in sizes.items()}
    return Swizzle(
        groups,
        tuple(name for name, _ in order),
        tuple(sorted(numbers.items())),
        tuple(len(group) for group in joined),
        tuple(sorted(picks.items())),
    )


def _sides(pattern: str) -> tuple[str, str, str]:
    """What is before the arrow, the arrow, and what is after it. Raises NotationError, also for a parenthesis without
    a partner, or inside another pair."""
    opened: int | None = None
    for at, char in enumerate(f"{pattern}("):  # the last one ends what is open
        if char in "()" and (char == "(") == (opened is not None):
            wrong = at if opened is None else opened
            raise NotationError("an unmatched parenthesis", wrong, wrong + 1)
        opened = at if char == "(" else None if char == ")" else opened
    left, arrow, right = pattern.partition("->")
    if not arrow:
        raise NotationError("has no `->`", 0, max(1, len(pattern)))
    return left, arrow, right


def _groups(text: str, offset: int, side: str) -> tuple[tuple[str, ...], ...]:
    """The names of each dim on one side of a pattern, which begins at `offset` and is before or after the arrow."""
    groups, seen = [], set()
    for token in re.finditer(r"\([^()]*\)|\S+", text):
        span = (offset + token.start(), offset + token.end())
        members = re.findall(r"[A-Za-z_]\w*", token[0])
        if "".join(members) != re.sub(r"[()\s]", "", token[0]) or not members:
            raise NotationError(f"`{token[0]}` is not a name or a group of names in parentheses", *span)
        for name in members:
            if name in seen:
                raise NotationError(f"`{name}` appears twice {side} the arrow", *span)
            seen.add(name)
        groups.append(tuple(members))
    return tuple(groups)


def _same_names(
    pattern: str, groups: tuple[tuple[str, ...], ...], order: list[tuple[str, tuple[int, int]]], offset: int
) -> None:
    """Raises NotationError unless each name before the arrow stands once after it, and no other."""
    names = [name for group in groups for name in group]
    met = set()
    for name, span in order:
        if name not in names:
            raise NotationError(f"`{name}` does not appear before the arrow", *span)
        if name in met:
            raise NotationError(f"`{name}` appears twice after the arrow", *span)
        met.add(name)
    missing = [name for name in names if name not in met]
    if missing:
        raise NotationError(f"`{missing[0]}` is missing after the arrow", offset, max(offset + 1, len(pattern)))


def _find(pattern: str, name: str, start: int = 0) -> tuple[int, int]:
    match = re.compile(rf"\b{re.escape(name)}\b").search(pattern, start)
    return match.span() if match else (0, len(pattern))

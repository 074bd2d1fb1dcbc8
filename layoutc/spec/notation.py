"""The small notations in a spec: layout strings (`m k/16`), swizzle patterns (einops style), layouts of files."""

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
    """Raised for an unreadable string; `start` and `end` are offsets into it."""

    def __init__(self, message: str, start: int, end: int) -> None:
        super().__init__(message)
        self.start, self.end = start, end


@dataclass(frozen=True)
class Term:
    """One dim of a buffer: an axis of the weight, with one entry per `divisor` steps."""

    axis: Axis
    divisor: int = 1


@dataclass(frozen=True)
class Swizzle:
    """Splits each dim of a buffer into its group's names, reorders all names, and joins them into dims.

    In each group, one name has no stated size: it gets the rest of the dim.
    """

    groups: tuple[tuple[str, ...], ...]
    order: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]
    joined: tuple[int, ...] = ()  # how many names of `order` form each dim of the result; (): the result is flat
    picks: tuple[tuple[str, tuple[int, ...]], ...] = ()  # entry i of a name's dim comes from its entry picks[i]

    @property
    def pattern(self) -> str:
        """The pattern as a spec writes it, without sizes: `(rt a b) (ct c) -> rt ct b a c`."""
        return f"{_written(self.groups)} -> {_written(self.dims) if self.joined else ' '.join(self.order)}"

    @property
    def stated(self) -> str:
        """The pattern with its sizes, in words: `(rt a) ct -> ct rt a with a = 4`."""
        orders = dict(self.picks)
        sizes = (f"{name} = {list(orders[name]) if name in orders else size}" for name, size in self.sizes)
        return f"{self.pattern} with {', '.join(sizes)}" if self.sizes else self.pattern

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        """The names that form each dim of the result, outermost first."""
        names = iter(self.order)
        return tuple(tuple(islice(names, count)) for count in self.joined or (len(self.order),))

    def tile(self, dim: int) -> int:
        """The size of a dim must be a multiple of this."""
        sizes = dict(self.sizes)
        return prod(sizes[name] for name in self.groups[dim] if name in sizes)

    def multiples(self, run: int) -> tuple[int, ...]:
        """The multiple that each dim's size must be of, so that the result's last dim consists of whole runs of `run`.

        Raises ValueError if that is impossible, because every name of the last dim has a size.
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
    """Parses a GEMM's swizzle: `(rt a b) (ct c) -> rt ct b a c` with the sizes of a, b, c. Raises NotationError.

    It is a bijection by construction: each name appears once per side, and only a group's first name has no size.
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
    """The two groups of names before the arrow, and all names in the order after it. Raises NotationError."""
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
    """Splits the rows and columns of a plane's values into names, then reorders them into the dims of a file's tensor.
    Each dim has one name, or as many as `joined` says. counted: the names of each dim, if the file's dims only count
    the values of that order, and cut it elsewhere.

    MATRICES among the rows has the number of a weight's matrices as its size (for a 2-D weight, 1 and no dim). Among
    the other names of a group, one has no size: it gets the rest.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    order: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]
    joined: tuple[int, ...] = ()
    counted: tuple[tuple[str, ...], ...] = ()

    @property
    def pattern(self) -> str:
        """The pattern as a spec writes it, without sizes."""
        order = Swizzle((self.rows, self.columns), self.order, (), self.joined).pattern
        return f"{order} -> {_written(self.counted)}" if self.counted else order

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        """The names that form each dim of the file's tensor, outermost first."""
        names = iter(self.order)
        return tuple(tuple(islice(names, count)) for count in self.joined or [1] * len(self.order))


MATRICES = "e"
AS_STORED = FileLayout((MATRICES, "m"), ("k",), (MATRICES, "m", "k"), ())


def parse_file_layout(pattern: str, sizes: dict[str, int]) -> FileLayout:
    """Parses `(e m) (g b) -> e m g b`, or `m (g b) -> g (m b)`, with the size of b. Like a swizzle, it is a bijection
    by construction. A second arrow has the dims that count these values: `(r a) c -> (r c a) -> r (a c)`. Raises
    NotationError."""
    left, arrow, right = _sides(pattern)
    right, _, last = right.partition(arrow)
    offset, end = len(left) + len(arrow), len(pattern) - len(last)
    groups, dims = _groups(left, 0, "before"), _groups(right, offset, "after")
    if len(groups) != 2:
        raise NotationError(f"takes 2 dims, (rows, columns), but names {len(groups)}", 0, max(1, len(left.rstrip())))
    _same_names(pattern, groups, [(name, _find(pattern, name, offset)) for dim in dims for name in dim], offset)
    names = [name for group in groups for name in group]
    counted = _groups(last, end, "after")
    if counted:
        _same_names(pattern, groups, [(name, _find(pattern, name, end)) for dim in counted for name in dim], end)
        if len(dims) > 1 or MATRICES in names:
            raise NotationError("a second arrow counts the values of one dim of a matrix", offset, end)
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
    return FileLayout(*groups, order, tuple(sorted(sizes.items())), joined if max(joined) > 1 else (), counted)


def parse_form(text: str) -> tuple[float | None, float | None]:
    """`2688 / x` -> (2688.0, None), `x / 2688` -> (None, 2688.0): what a file stores in place of x. Raises
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
    """Parses a buffer's swizzle: `k (g a b) -> k (g b a)` with the sizes of a and b, over `dims` dims.

    A size may be a list of the entries in stored order. The swizzle is a bijection by construction: each name appears
    once per side, one name of each group has no size, and a list has each entry once. Raises NotationError.
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
    """The text before the arrow, the arrow, and the text after it. Raises NotationError, also for unbalanced or nested
    parentheses."""
    opened: int | None = None
    for at, char in enumerate(f"{pattern}("):  # the last one closes what is open
        if char in "()" and (char == "(") == (opened is not None):
            wrong = at if opened is None else opened
            raise NotationError("an unmatched parenthesis", wrong, wrong + 1)
        opened = at if char == "(" else None if char == ")" else opened
    left, arrow, right = pattern.partition("->")
    if not arrow:
        raise NotationError("has no `->`", 0, max(1, len(pattern)))
    return left, arrow, right


def _groups(text: str, offset: int, side: str) -> tuple[tuple[str, ...], ...]:
    """The names of each dim on one side of a pattern. offset: where that begins; side: before or after the arrow."""
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
    """Raises NotationError unless each name before the arrow appears once after it, and no other does."""
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

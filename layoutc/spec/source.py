"""Parses YAML text into plain data, with a span for every key and value. It knows YAML, but nothing about layouts.

YAML 1.1 reads `1:32` as 92 and `no` as false, keeps the last of two equal keys, and lets anchors reuse text. This
module rejects all of that, with its position, so that later stages see exactly what the author typed.

It uses the events of PyYAML's pure Python parser: nesting is limited before Python's stack overflows, and positions and
messages don't depend on whether libyaml is installed. A spec is small and takes a few milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    StreamEndEvent,
)

from layoutc.diagnostics.diagnostic import Diagnostic, Label, Span, quoted
from layoutc.spec.yaml11 import LONG_INTEGER, NULL, plain_value, syntax_advice

MAX_CHARACTERS = 64 * 1024
MAX_DEPTH = 16

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Source:
    """A spec's text, its data (dict, tuple, str, int, float, bool) and the span of each part.

    In `values`, a block collection has its key's span, since its full span would underline half the file. `bad` has the
    paths of values that were rejected here and must not be reported again.
    """

    path: str
    text: str
    data: dict[str, Any]
    keys: dict[Path, Span]
    values: dict[Path, Span]
    bad: frozenset[Path]

    def key(self, path: Path, text: str = "") -> Label:
        """A label on a key, or on the nearest enclosing one if it is absent."""
        while path and path not in self.keys:
            path = path[:-1]
        return Label(self.keys[path], text) if path else self.value((), text)

    def value(self, path: Path, text: str = "", within: tuple[int, int] | None = None) -> Label:
        """A label on a value or the characters `within` it, or on the nearest enclosing value if it is absent."""
        while path not in self.values:
            path = path[:-1]
        span = self.values[path]
        return Label(self._narrowed(span, path, within) if within else span, text)

    def find(
        self, code: str, message: str, at: Label | Path, *besides: Label | Path, why: str = "", help: str = ""
    ) -> Diagnostic:
        """A diagnostic in this file. A path stands for its value. Drops further labels on the first one's span."""
        primary, *secondary = (one if isinstance(one, Label) else self.value(one) for one in (at, *besides))
        others = tuple(label for label in secondary if label.span != primary.span)
        return Diagnostic(code, message, self.path, primary, others, why or None, help or None, source=self.text)

    def _narrowed(self, span: Span, path: Path, within: tuple[int, int]) -> Span:
        """The span of some characters of a scalar, if the file has them verbatim (no escapes, no folding)."""
        value: Any = self.data
        for part in path:
            value = value[part]
        line = self.text.split("\n")[span.line - 1]
        for quote in (0, 1):
            start = span.column - 1 + quote
            if span.line == span.end_line and line[start : start + len(value)] == value:
                return Span(span.line, start + 1 + within[0], span.line, start + 1 + within[1])
        return span


class _Stop(Exception):
    """Raised after a finding that makes the rest of the text unreadable."""


def read(text: str, path: str) -> tuple[Source | None, list[Diagnostic]]:
    """Text -> a Source and all problems. The Source is None if later stages can't run. Never raises."""
    reader = _Reader(text, path)
    try:
        return reader.read(), reader.findings
    except _Stop:
        return None, reader.findings


class _Reader:
    """One pass over the parser's events, collecting data, spans and findings."""

    def __init__(self, text: str, path: str) -> None:
        self.text, self.path = text.removeprefix("\ufeff"), path
        self.findings: list[Diagnostic] = []
        self.keys: dict[Path, Span] = {}
        self.values: dict[Path, Span] = {}
        self.bad: set[Path] = set()
        self.events: Iterator[Event] = iter(())

    def read(self) -> Source:
        self._characters()
        self.events = self._parsed()
        next(self.events)  # the stream's start
        start = next(self.events)
        if isinstance(start, StreamEndEvent):
            self._add("LC109", "this spec is empty", Label(Span(1, 1, 1, 2)), help=_BEGIN)
            raise _Stop
        first = next(self.events)
        data = self._node(first, (), None)
        if not isinstance(data, dict):
            label = Label(self._span(first), f"this is {'a list' if isinstance(data, tuple) else 'a single value'}")
            self._add("LC109", "a spec is a mapping of keys to values", label, help=_BEGIN)
            raise _Stop
        next(self.events)  # the document's end
        after = next(self.events)
        if isinstance(after, DocumentStartEvent):
            label = Label(self._span(after), "a second document starts here")
            self._add("LC106", "this file holds more than one document", label, help="write one spec in each file")
        return Source(self.path, self.text, data, self.keys, self.values, frozenset(self.bad))

    def _characters(self) -> None:
        """Rejects what no spec needs and excerpts can't show: huge files, tabs, control characters."""
        if len(self.text) > MAX_CHARACTERS:
            message = f"this file has {len(self.text)} characters; a spec has at most {MAX_CHARACTERS}"
            self._add("LC110", message, Label(Span(1, 1, 1, 2)), help="is this a spec?")
            raise _Stop
        for number, line in enumerate(self.text.split("\n"), 1):
            for column, char in enumerate(line.removesuffix("\r"), 1):
                if char.isprintable():
                    continue
                label = Label(Span(number, column, number, column + 1), f"U+{ord(char):04X}")
                found = "a character that is not text", "delete it"
                if char == "\t":
                    found = "a tab; YAML is indented with spaces", "replace each tab with spaces"
                self._add("LC107", found[0], label, help=found[1])
                raise _Stop

    def _parsed(self) -> Iterator[Event]:
        try:
            yield from yaml.parse(self.text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            self._refuse_syntax(error)
            raise _Stop from None
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            self._add("LC101", "this is not valid YAML", Label(Span(1, 1, 1, 2)), why=str(error).splitlines()[0])
            raise _Stop from None

    def _refuse_syntax(self, error: yaml.MarkedYAMLError) -> None:
        label, help, at_context = syntax_advice(error.problem or "can't be read")
        problem, context = self._mark(error.problem_mark), self._mark(error.context_mark)
        if problem and self.text.split("\n")[problem.line - 1][problem.column - 1 :].startswith(","):
            label, help, context = "the line above has ended", "delete the comma", None
            if self.text.split("\n")[problem.line - 1][: problem.column - 1].strip():
                label = "nothing can follow here"
        others: tuple[Label, ...] = ()
        if at_context and context:
            length = len(self.text.split("\n")[context.line - 1].rstrip())
            problem = Span(context.line, context.column, context.line, length + 1)
        elif context and context != problem:
            opened = "flow" in str(error.context) or "quoted" in str(error.context)
            others = (Label(context, "opened here" if opened else "begun here"),)
        self._add("LC101", "this is not valid YAML", Label(problem or Span(1, 1, 1, 2), label), *others, help=help)

    def _mark(self, mark: Any) -> Span | None:
        """A parser's mark as a span of one column; past the end of the text, it is the end of the last line."""
        if mark is None:
            return None
        lines = self.text.split("\n")
        line, column = int(mark.line), int(mark.column)
        if line >= len(lines) or not "".join(lines[line:]).strip():
            while len(lines) > 1 and not lines[-1].strip():
                lines.pop()
            line, column = len(lines) - 1, len(lines[-1].rstrip())
        return Span(line + 1, column + 1, line + 1, column + 2)

    def _span(self, event: Event) -> Span:
        start: Any = event.start_mark  # never None, since events come from a text
        end: Any = event.end_mark
        if (start.line, start.column) == (end.line, end.column):  # a block collection starts without a character
            return Span(start.line + 1, start.column + 1, start.line + 1, start.column + 2)
        return Span(start.line + 1, start.column + 1, end.line + 1, end.column + 1)

    def _add(self, code: str, message: str, primary: Label, *others: Label, why: str = "", help: str = "") -> None:
        item = Diagnostic(code, message, self.path, primary, others, why or None, help or None, source=self.text)
        self.findings.append(item)

    def _node(self, event: Event, path: Path, key: Span | None) -> Any:
        """The data of the node that starts with `event`. Records the spans of everything below `path`."""
        span = self._span(event)
        if len(path) > MAX_DEPTH:
            label = Label(_first(span), f"{len(path)} levels deep")
            self._add("LC110", f"nested deeper than {MAX_DEPTH} levels", label, help="a spec needs five")
            raise _Stop
        flat = isinstance(event, AliasEvent | ScalarEvent) or event.flow_style  # type: ignore[attr-defined]
        self.values[path] = span if flat else key or _first(span)
        if isinstance(event, AliasEvent):
            self._refuse_reference(path, span)
            return ""
        if event.anchor is not None:  # type: ignore[attr-defined]
            self._refuse_reference(path, span)
        if event.tag is not None:  # type: ignore[attr-defined]
            self.bad.add(path)
            label = Label(self._word(span), "layoutc decides types by the key")
            self._add("LC105", "YAML tags are not part of the spec language", label, help="delete the tag")
        if isinstance(event, ScalarEvent):
            return self._scalar(event, path, span)
        if isinstance(event, MappingStartEvent):
            return self._mapping(path, event, span)
        items: list[Any] = []
        item = next(self.events)
        while not isinstance(item, SequenceEndEvent):
            items.append(self._node(item, (*path, len(items)), None))
            item = next(self.events)
        self._close(path, event, item)
        return tuple(items)

    def _mapping(self, path: Path, start: MappingStartEvent, span: Span) -> dict[str, Any]:
        data: dict[str, Any] = {}
        event = next(self.events)
        while not isinstance(event, MappingEndEvent):
            where = self._span(event)
            if isinstance(event, ScalarEvent) and event.value == "<<" and not event.style:
                self._refuse_merge(path, where)
                event = next(self.events)
                continue
            name = self._key(event)
            inner: Path = (*path, name if name is not None else f"?{where.line}:{where.column}")
            if name is not None and name in data:
                label, first = Label(where, "second value"), Label(self.keys[inner], "first value")
                message = f"{quoted(name)} is given twice in the same mapping"
                why = "plain YAML keeps the last one silently; layoutc refuses to choose"
                self._add("LC102", message, label, first, why=why, help="delete one of the two")
                self._node(next(self.events), (*inner, "?"), where)
            else:
                self.keys[inner] = where
                value = self._node(next(self.events), inner, where)
                if name is not None:
                    data[name] = value
            event = next(self.events)
        self._close(path, start, event)
        if not path and self.keys and not start.flow_style:
            self.values[()] = next(iter(self.keys.values()))
        return data

    def _key(self, event: Event) -> str | None:
        """A key as text; None, with a finding, if it is not text."""
        span = self._span(event)
        if not isinstance(event, ScalarEvent):
            self._add("LC109", "a key must be a word", Label(_first(span)), help="write `key: value`")
            self._node(event, (f"?{span.line}:{span.column}",), span)
            return None
        if event.anchor is not None or event.tag is not None:
            self._refuse_reference(("?",), span)
            return None
        if event.style or re.fullmatch(r"[yYnN]", event.value):  # PyYAML also reads the key `n` as text
            return str(event.value)
        value, trap = plain_value(event.value)
        if trap:
            message = f"YAML reads {quoted(event.value)} as {trap[0]}"
            self._add("LC103", message, Label(span, trap[1]), help="quote it, or use another word")
        elif not isinstance(value, str) or not value:
            self._add("LC109", f"the key {quoted(event.value)} is not a word", Label(span), help="write `key: value`")
            return None
        return str(event.value)

    def _scalar(self, event: ScalarEvent, path: Path, span: Span) -> Any:
        if event.style:
            return event.value
        if NULL.fullmatch(event.value):
            if event.value == "null" and path[:1] == ("files",) and "config" in path[2:3]:  # JSON has null
                return None
            self.bad.add(path)
            name = quoted(path[-1]) if path and isinstance(path[-1], str) else "this item"
            here = self.keys.get(path, Span(span.line, span.column, span.line, span.column + max(1, len(event.value))))
            joined = re.fullmatch(r"(\w[\w-]*)[=:](\S+)", str(path[-1])) if path else None  # `{format=e4m3}`
            help = f"write `{joined[1]}: {joined[2]}`" if joined else "give it one, or delete the line"
            self._add("LC108", f"{name} has no value", Label(here), help=help)
            return ""
        if event.value.endswith(","):  # a flow mapping's comma in a block mapping
            self.bad.add(path)
            end = Label(Span(span.end_line, span.end_column - 1, span.end_line, span.end_column), "belongs to the text")
            self._add("LC101", "a value ends with a comma", end, help="delete the comma, or quote the text")
            return event.value
        if LONG_INTEGER.fullmatch(event.value):  # more digits than any size
            self.bad.add(path)
            self._add("LC205", f"{quoted(event.value, 24)} is out of range", Label(span), help="no size is that large")
            return 0
        value, trap = plain_value(event.value)
        if trap:
            self.bad.add(path)
            self._add("LC103", f"YAML reads {quoted(event.value)} as {trap[0]}", Label(span, trap[1]), help=trap[2])
        return value

    def _refuse_reference(self, path: Path, span: Span) -> None:
        self.bad.add(path)
        message = "anchors, aliases and merge keys are not part of the spec language"
        why = "an alias hides its value; readers have to look it up elsewhere"
        self._add("LC104", message, Label(self._word(span)), why=why, help="write the value out where it is used")

    def _refuse_merge(self, path: Path, span: Span) -> None:
        """Reports a merge key and its alias once, and doesn't report keys that it would have merged as missing."""
        self._refuse_reference(path, span)
        before = len(self.findings)
        self._node(next(self.events), (*path, "<<"), span)
        del self.findings[before:]

    def _word(self, span: Span) -> Span:
        """The first word of a span."""
        line = self.text.split("\n")[span.line - 1]
        match = re.match(r"[^\s,\]}]+", line[span.column - 1 :])
        return Span(span.line, span.column, span.line, span.column + (match.end() if match else 1))

    def _close(self, path: Path, start: Event, end: Event) -> None:
        """Extends a flow collection's span from its opening to its closing bracket."""
        if start.flow_style:  # type: ignore[attr-defined]
            first, last = self._span(start), self._span(end)
            self.values[path] = Span(first.line, first.column, last.end_line, last.end_column)


def _first(span: Span) -> Span:
    """The first column of a span."""
    return Span(span.line, span.column, span.line, span.column + 1)


_BEGIN = "begin with `layoutc: 1`; `layoutc schema` prints every key"

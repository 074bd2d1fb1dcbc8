"""From a spec file's text to a Spec, or to everything that is wrong with it."""

from __future__ import annotations

from pydantic import ValidationError

from layoutc.diagnostics.diagnostic import Diagnostic, Label, Span, has_errors, tidy
from layoutc.spec import source as yaml_source
from layoutc.spec.checks import pydantic_errors
from layoutc.spec.checks import whole as checks
from layoutc.spec.schema import Spec


def read_spec(text: str, path: str) -> tuple[Spec | None, list[Diagnostic]]:
    """YAML text to a Spec. Runs every stage that makes sense, returns every problem at once, never raises.

    The Spec is None when any of the problems is an error.
    """
    source, found = yaml_source.read(text, path)
    if source is None:
        return None, tidy(found)
    source, unknown = pydantic_errors.known_keys_only(source)
    bad = {span for place in source.bad for span in (source.keys.get(place), source.values.get(place)) if span}
    try:
        spec = Spec.model_validate(source.data)
        later = checks.check(spec, source)
    except ValidationError as error:
        spec, later = None, list(pydantic_errors.from_pydantic(error, source))
    found += [item for item in (*unknown, *later) if not _touches(item, bad)]
    found = tidy(found)
    return (None if has_errors(found) else spec), found


def read_spec_bytes(content: bytes, path: str) -> tuple[Spec | None, list[Diagnostic]]:
    """As read_spec, from a file's bytes."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        label = Label(Span(line, 1, line, 2), f"byte 0x{content[error.start]:02x}")
        help = "save the file as UTF-8"
        return None, [Diagnostic("LC107", "this file is not UTF-8 text", path, label, help=help)]
    return read_spec(text.replace("\r\n", "\n"), path)


def _touches(item: Diagnostic, bad: set[Span]) -> bool:
    """True when a finding is about a value that was refused already."""
    labels = (item.primary, *item.secondary)
    return any(label is not None and label.span in bad for label in labels)

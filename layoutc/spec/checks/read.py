"""Reads a spec file's text into a Spec, or reports everything that is wrong with it."""

from __future__ import annotations

from pydantic import ValidationError

from layoutc.diagnostics.diagnostic import Diagnostic, Label, Span, has_errors, tidy
from layoutc.spec import source as yaml_source
from layoutc.spec.checks import pydantic_errors
from layoutc.spec.checks import whole as checks
from layoutc.spec.schema import Spec


def read_spec(text: str, path: str) -> tuple[Spec | None, list[Diagnostic]]:
    """YAML text -> a Spec and the problems of all stages that could run. Never raises.

    The Spec is None if one of the problems is an error.
    """
    source, diagnostics = yaml_source.read(text, path)
    if source is None:
        return None, tidy(diagnostics)
    source, unknown = pydantic_errors.known_keys_only(source)
    bad = {span for where in source.bad for span in (source.keys.get(where), source.values.get(where)) if span}
    try:
        spec = Spec.model_validate(source.data)
        later = checks.check(spec, source)
    except ValidationError as error:
        spec, later = None, list(pydantic_errors.from_pydantic(error, source))
    diagnostics += [item for item in (*unknown, *later) if not _touches(item, bad)]
    diagnostics = tidy(diagnostics)
    return (None if has_errors(diagnostics) else spec), diagnostics


def read_spec_bytes(content: bytes, path: str) -> tuple[Spec | None, list[Diagnostic]]:
    """Like read_spec, for a file's bytes."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        label = Label(Span(line, 1, line, 2), f"byte 0x{content[error.start]:02x}")
        help = "save the file as UTF-8"
        return None, [Diagnostic("LC107", "this file is not UTF-8 text", path, label, help=help)]
    return read_spec(text.replace("\r\n", "\n"), path)


def _touches(item: Diagnostic, bad: set[Span]) -> bool:
    """True if a finding is about a value that was already rejected."""
    labels = (item.primary, *item.secondary)
    return any(label is not None and label.span in bad for label in labels)

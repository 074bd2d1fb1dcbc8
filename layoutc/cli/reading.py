"""Specs that commands are given, read into plans."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from layoutc.cli.shared import refusing, report
from layoutc.diagnostics.diagnostic import Diagnostic, has_errors

if TYPE_CHECKING:
    from layoutc.plan.plan import Plan


def plan_of(path: Path) -> Plan:
    """The plan of a spec. If it has errors, reports its findings and exits with code 1."""
    plan, diagnostics = read_plan(content_of(path), str(path))
    if plan is None:
        report(diagnostics)
        sys.exit(1)
    return plan


def read_plan(content: bytes, path: str) -> tuple[Plan | None, list[Diagnostic]]:
    """The plan of a spec's bytes, and all findings; no plan if one of them is an error."""
    from layoutc.build.operands import layouts_of
    from layoutc.build.pipeline import plan_for
    from layoutc.spec.checks.read import read_spec_bytes

    spec, diagnostics = read_spec_bytes(content, path)
    if spec is None:
        return None, diagnostics
    others, findings = layouts_of(spec, content, path)
    return (None if has_errors(findings) else plan_for(spec, others)), [*diagnostics, *findings]


def content_of(path: Path) -> bytes:
    """A file's bytes. Raises click.UsageError if it can't be read."""
    with refusing(OSError):
        return path.read_bytes()

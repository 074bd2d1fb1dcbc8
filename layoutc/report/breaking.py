"""Compares two sets of recipes by layout id: which recipes' bytes changed, and in which facts. Pure functions of plans.

This version of layoutc resolves both sides, so only specs are compared. If the old revision's generated code is
available, its layout id counts instead, since layoutc's rules and formats may have changed, too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Literal

from layoutc.diagnostics.diagnostic import Diagnostic
from layoutc.layout.layout import Layout, Quantization, Transform
from layoutc.layout.swizzles import renamed
from layoutc.plan.plan import Plan

Status = Literal["unchanged", "changed", "removed", "added", "renamed"]
SHOWN = 6  # differences that a message lists

# Facts that no stored byte and no operation depends on. The layout id leaves them out, too.
_LABELS = frozenset(
    {"name", "summary", "multiple_m", "multiple_k", "swizzle", "others", "files", "containers", "torch", "rule"}
)
_ABSENT = "none"


@dataclass(frozen=True)
class Difference:
    """A layout's fact, then and now."""

    fact: str
    before: str
    after: str


@dataclass(frozen=True)
class Change:
    """What happened to a recipe. `now`: its current name, if it was renamed."""

    name: str
    status: Status
    before: str | None
    after: str | None
    now: str | None = None
    differences: tuple[Difference, ...] = ()


def compare(
    before: Mapping[str, Plan], after: Mapping[str, Plan], recorded: Mapping[str, str] | None = None
) -> list[Change]:
    """What happened to each recipe, sorted by name. recorded: layout ids in the old revision's generated code."""
    ids = recorded or {}
    changes = [_same_name(name, before[name], after[name], ids.get(name)) for name in before.keys() & after.keys()]
    new = {name: after[name].layout_id for name in sorted(after.keys() - before.keys())}
    for name in sorted(before.keys() - after.keys()):
        old = ids.get(name, before[name].layout_id)
        now = next((other for other, layout_id in new.items() if layout_id == old), None)
        if now is None:
            changes.append(Change(name, "removed", old, None))
        else:
            del new[now]
            changes.append(Change(name, "renamed", old, old, now))
    changes += [Change(name, "added", None, layout_id) for name, layout_id in new.items()]
    return sorted(changes, key=lambda change: change.name)


def findings(changes: list[Change], revision: str, paths: Mapping[str, str]) -> list[Diagnostic]:
    """A finding for each recipe whose users must act. paths: each recipe's spec, then or now."""
    return [item for change in changes if (item := _finding(change, revision, paths))]


def _finding(change: Change, revision: str, paths: Mapping[str, str]) -> Diagnostic | None:
    path = paths[change.name]
    if change.status == "changed":
        listed = [f"{one.fact}: {one.before} -> {one.after}" for one in change.differences]
        more = [f"and {len(listed) - SHOWN} more"] if len(listed) > SHOWN else []
        return Diagnostic(
            "LC601",
            f"bytes of recipe `{change.name}` have changed since {revision}: {change.before} -> {change.after}",
            path,
            why="; ".join([*listed[:SHOWN], *more]) or None,
            help="checkpoints hold the old bytes: keep the old recipe, and give the new layout another name",
        )
    if change.status == "removed":
        message = f"recipe `{change.name}` of {revision} is gone, and so is its layout {change.before}"
        return Diagnostic("LC602", message, path, help="bring the spec back, for checkpoints that were written with it")
    if change.status == "renamed":
        message = f"recipe `{change.name}` of {revision} is now `{change.now}`; its bytes are the same"
        return Diagnostic("LC603", message, path, help=f"import `{change.now}` where `{change.name}` is imported")
    return None


def unreadable(path: str, revision: str, diagnostics: list[Diagnostic]) -> Diagnostic:
    """The finding about a spec of `revision` that has `diagnostics`."""
    first = diagnostics[0]
    why = f"{first.code}: {first.message}" + (f"; {len(diagnostics) - 1} more" if len(diagnostics) > 1 else "")
    message = f"the spec at {revision} is not one that this version of layoutc reads"
    return Diagnostic("LC604", message, path, why=why, help="compare with a revision that it reads")


def _same_name(name: str, old: Plan, new: Plan, recorded: str | None) -> Change:
    before = recorded or old.layout_id
    if before == new.layout_id:
        return Change(name, "unchanged", before, new.layout_id)
    changed = differences(old.layout, new.layout)
    if before != old.layout_id:
        changed = (Difference("layoutc's rules and formats", "as they were", "as they are"), *changed)
    return Change(name, "changed", before, new.layout_id, None, changed)


def recorded_id(code: str, spec: bytes) -> str | None:
    """The layout id in a generated layout.py; None if it was generated from another spec."""
    made_from = re.search(r'^    spec_sha256="([0-9a-f]{64})",$', code, re.MULTILINE)
    written = re.search(r"^# .*?Layout id ([0-9a-f]{12})[:.]", code, re.MULTILINE)
    same = made_from is not None and made_from.group(1) == hashlib.sha256(spec).hexdigest()
    return written.group(1) if written is not None and same else None


# --------------------------------------------------------------------------------------------------------------- facts
def differences(old: Layout, new: Layout) -> tuple[Difference, ...]:
    """The facts in which two layouts differ, in the newer layout's order."""
    before, after = facts(old), facts(new)
    changed = []
    gone: set[str] = set()
    for fact in dict.fromkeys((*after, *before)):
        then, now = before.get(fact), after.get(fact)
        if then == now:
            continue
        if then is None or now is None:  # only one side has the source, buffer or dim: reported once
            part = _missing_part(fact, after if then is None else before, before if then is None else after)
            if part not in gone:
                gone.add(part)
                whole = part != fact
                value = then or now or ""
                present = "present" if whole else value
                changed.append(Difference(part, *((_ABSENT, present) if then is None else (present, _ABSENT))))
            continue
        changed.append(Difference(fact, then, now))
    return tuple(changed)


def _missing_part(fact: str, has: Mapping[str, str], lacks: Mapping[str, str]) -> str:
    """The largest part around a fact that the other side lacks entirely."""
    words = fact.split(".")
    for length in range(1, len(words)):
        part = ".".join(words[:length])
        if not any(other == part or other.startswith(f"{part}.") for other in lacks):
            return part
    return fact


def facts(layout: Layout) -> dict[str, str]:
    """Everything that decides stored bytes or arithmetic, by dotted name: `columnwise_scale.dims.0.axis`."""
    named: dict[str, str] = {}
    for source in layout.sources:
        named |= _flat(source.name, source.quantization)
        named |= {f"{source.name}.{key}": text for key, text in _program(source.quantization)}
        for field in fields(source):
            if field.name not in (*_LABELS, "quantization"):
                named |= _flat(f"{source.name}.{field.name}", getattr(source, field.name))
    for buffer in layout.buffers:
        named |= _flat(buffer.name, [buffer.dims, buffer.low_first], ("dims", "low_first"))
        named[f"{buffer.name}.made_of"] = buffer.plane.name
        named |= {f"{buffer.name}.swizzle": renamed(buffer.swizzle).stated} if buffer.swizzle else {}
        named |= {f"{buffer.name}.words": str(buffer.words)} if buffer.words else {}
    for orientation, name in layout.source_of:
        named[f"{orientation}.source"] = name
    rest = (field.name for field in fields(layout) if field.name not in (*_LABELS, "sources", "source_of", "buffers"))
    for name in rest:
        named |= _flat(name, getattr(layout, name))
    return named


def _program(quantization: Quantization) -> Iterator[tuple[str, str]]:
    """The scale rule's operations, for which its name is only a label."""
    *steps, (_, decode) = quantization.definition.program(quantization.conditions)
    for number, (name, expression) in enumerate(steps):
        yield f"rule.{number}", f"{name} = {expression}"
    yield "rule.decode", decode


def _flat(name: str, value: object, keys: tuple[str, ...] = ()) -> dict[str, str]:
    """Flattens nested values to {dotted name: text}. Leaves out names and torch dtypes, which are only labels."""
    parts: list[tuple[str, object]]
    if isinstance(value, Transform):
        return {name: str(value)}
    if is_dataclass(value):
        parts = [(field.name, getattr(value, field.name)) for field in fields(value) if field.name not in _LABELS]
    elif isinstance(value, list | tuple):
        pairs = bool(value) and all(isinstance(v, tuple) and len(v) == 2 and isinstance(v[0], str) for v in value)
        parts = list(value) if pairs else list(zip(keys or map(str, range(len(value))), value, strict=True))
    else:
        return {name: _ABSENT if value is None else str(value)}
    return {key: text for part, inner in parts for key, text in _flat(f"{name}.{part}", inner).items()}

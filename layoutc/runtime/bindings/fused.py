"""Weights that engines join into one: which they are, by the names of their modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Fused = Sequence[Sequence[str]]


def joined(name: str, fused: Fused) -> str | None:
    """A name of a parameter or tensor, with the group that its module is joined with in place of the module's own name:
    `a.q_proj.weight` is `a.[q_proj, k_proj, v_proj].weight`. None for a module that is in no group."""
    parts = name.split(".")
    for at in reversed(range(len(parts))):
        for group in fused:
            if parts[at] in group:
                return ".".join([*parts[:at], f"[{', '.join(group)}]", *parts[at + 1 :]])
    return None


def groups_of(names: Iterable[str], fused: Fused) -> Mapping[str, list[str]]:
    """The names that are joined with others of these, by what `joined` calls them."""
    found = dict[str, list[str]]()
    for name in names:
        if (group := joined(name, fused)) is not None:
            found.setdefault(group, []).append(name)
    return {group: members for group, members in found.items() if len(members) > 1}

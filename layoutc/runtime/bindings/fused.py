"""Finds weights that engines fuse, by their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Fused = Sequence[Sequence[str]]


def joined(name: str, fused: Fused) -> str | None:
    """The name of a parameter or tensor with its module's name replaced by the joined group: `a.q_proj.weight` becomes
    `a.[q_proj, k_proj, v_proj].weight`. None for a module in no group."""
    parts = name.split(".")
    for at in reversed(range(len(parts))):
        for group in fused:
            if parts[at] in group:
                return ".".join([*parts[:at], f"[{', '.join(group)}]", *parts[at + 1 :]])
    return None


def groups_of(names: Iterable[str], fused: Fused) -> Mapping[str, list[str]]:
    """The names that are joined with other given names, by the group's name from `joined`."""
    found = dict[str, list[str]]()
    for name in names:
        if (group := joined(name, fused)) is not None:
            found.setdefault(group, []).append(name)
    return {group: members for group, members in found.items() if len(members) > 1}

"""What the templates print of the FSDP2 hooks: which planes a pass moves, and the bodies of the two hooks."""

from __future__ import annotations

from typing import Any

from layoutc.layout.layout import Plane
from layoutc.plan.plan import Gather, Plan

View = dict[str, Any]


def gather_view(gather: Gather) -> View:
    return {"name": gather.name, "planes": tuple(plane.name for plane in gather.planes), "serves": gather.serves}


def gather_lines(plan: Plan) -> list[str]:
    """What each pass moves, in words; one line where all passes move the same."""
    cost = f"{float(plan.forward.bytes_per_element):.6g} B/element"
    forward, backward = (_names(gather) for gather in (plan.forward, plan.backward))
    if not plan.passes_differ:
        return [f"Each pass gathers {forward}: {cost}."]
    both = f"{float(plan.both.bytes_per_element):.6g} B/element"
    return [
        f"Forward gathers {forward}: {cost}. Backward gathers {backward}: {float(plan.backward.bytes_per_element):.6g} "
        f"B/element. A weight that stays gathered after forward gets all of them at once: {both}."
    ]


def _names(gather: Gather) -> str:
    return " and ".join(plane.name for plane in gather.planes)


def hook_view(plan: Plan) -> View:
    """The bodies of the two hooks: straight lines where all passes gather the same, else a branch for each pass."""
    shared = [f'"{plane.name}": metadata.shared["{plane.name}"],' for plane in plan.shared]
    pre_doc = "Both passes send the same planes."
    if plan.shared:
        names = ", ".join(plane.name for plane in plan.shared)
        pre_doc += f" {names}, equal on all shards, {'goes' if len(plan.shared) == 1 else 'go'} along as metadata."
    if not plan.passes_differ:
        pre = [f"{plane.kind} = {_wire(plane)}" for plane in plan.forward.planes]
        post = ["gathered = {", *(f"    {_receive(p, i)}" for i, p in enumerate(plan.forward.planes))]
        kinds = [plane.kind for plane in plan.forward.planes]
        sent = f"({', '.join(kinds)}{',' if len(kinds) == 1 else ''})"
        return {
            "pre_body": pre,
            "post_body": [*post, *(f"    {s}" for s in shared), "}"],
            "sent": sent,
            "pre_doc": pre_doc,
        }
    pre = ["sent: list[Tensor] = []"]
    post = ["gathered: dict[str, Tensor] = {}" if not shared else "gathered = dict(metadata.shared)", "slot = 0"]
    for gather, other in ((plan.forward, "backward"), (plan.backward, "forward")):
        pre += [f'if gathering.which != "{other}":', "    sent += ["]
        pre += [f"        {_wire(plane)}," for plane in gather.planes] + ["    ]"]
        post += [f'if metadata.which != "{other}":']
        post += [f"    gathered[{_receive(p, i, 'slot')}" for i, p in enumerate(gather.planes)]
        post += [f"    slot += {len(gather.planes)}"]
    post = [line.replace('": ', '"] = ', 1).rstrip(",") if line.startswith("    gathered[") else line for line in post]
    forward, backward = _names(plan.forward), _names(plan.backward)
    sizes_text = "filled up to the same bytes" if plan.slots_differ else "of the same bytes"
    pre_doc = (
        f"Forward sends {forward}; backward {backward}, {sizes_text}, since FSDP2 wants the same sizes in each pass; "
        "a weight that stays gathered sends all of them once."
    )
    return {"pre_body": pre, "post_body": post[:-1], "sent": "tuple(sent)", "pre_doc": pre_doc}


def _wire(plane: Plane) -> str:
    return f'wire.wire(self, gathering, "{plane.name}")'


def _receive(plane: Plane, index: int, base: str = "") -> str:
    position = f"{base} + {index}" if base and index else base or str(index)
    return f'"{plane.name}": wire.arrived(metadata, "{plane.name}", received[{position}]),'

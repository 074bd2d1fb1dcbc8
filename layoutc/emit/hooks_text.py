"""The text of the FSDP2 hooks: which planes a pass gathers, and the bodies of the two hooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layoutc.layout.layout import Plane
from layoutc.plan.plan import Gather, Plan


@dataclass(frozen=True)
class GatherText:
    """What one pass gathers."""

    name: str
    planes: tuple[str, ...]
    serves: tuple[str, ...]


@dataclass(frozen=True)
class HooksText:
    """The bodies of the two hooks."""

    pre_body: list[str]
    post_body: list[str]
    sent: str
    pre_doc: str
    post_doc: str


def gather_text(gather: Gather) -> GatherText:
    """A pass, for the table in layout.py."""
    return GatherText(gather.name, tuple(plane.name for plane in gather.planes), gather.serves)


def gather_lines(plan: Plan) -> list[str]:
    """What each pass gathers, in words, as one paragraph."""
    cost = f"{float(plan.forward.bytes_per_element):.6g} B/element"
    forward, backward = (_listed(gather.planes) for gather in (plan.forward, plan.backward))
    if not plan.passes_differ:
        return [f"Each pass gathers {forward}: {cost}."]
    both = f"{float(plan.both.bytes_per_element):.6g} B/element"
    return [
        f"Forward gathers {forward}: {cost}. Backward gathers {backward}: {float(plan.backward.bytes_per_element):.6g} "
        f"B/element. A {plan.noun} that stays gathered after forward gets all of them at once: {both}."
    ]


def _listed(planes: Sequence[Plane]) -> str:
    """Names of planes as a list in a sentence."""
    *others, last = (plane.name for plane in planes)
    return f"{', '.join(others)} and {last}" if others else last


def hooks_text(plan: Plan) -> HooksText:
    """The bodies of the two hooks: without branches if all passes gather the same, else with one for each pass."""
    shared = [f'"{plane.name}": metadata.shared["{plane.name}"],' for plane in plan.shared]
    pre_doc = "Both passes send the same planes."
    if plan.shared:
        names = _listed(plan.shared)
        verb = "is" if len(plan.shared) == 1 else "are"
        pre_doc += f" {names}, which {verb} equal on all shards, {verb} sent as metadata."
    post_doc = _post_doc(plan)
    if not plan.passes_differ:
        pre = [f"{plane.kind} = {_wire(plane)}" for plane in plan.forward.planes]
        post = ["gathered = {", *(f"    {_receive(p, i)}" for i, p in enumerate(plan.forward.planes))]
        kinds = [plane.kind for plane in plan.forward.planes]
        sent = f"({', '.join(kinds)}{',' if len(kinds) == 1 else ''})"
        return HooksText(pre, [*post, *(f"    {s}" for s in shared), "}"], sent, pre_doc, post_doc)
    pre = ["planes: list[Tensor] = []"]
    post = ["gathered: dict[str, Tensor] = {}" if not shared else "gathered = dict(metadata.shared)", "slot = 0"]
    for gather, other in ((plan.forward, "backward"), (plan.backward, "forward")):
        names = ", ".join(f'"{plane.name}"' for plane in gather.planes)
        pre.append(f'if gathering.which != "{other}":')
        listed = f"({names}{',' * (len(gather.planes) == 1)})"
        pre.append(f"    planes += [wire.outgoing(self, gathering, name) for name in {listed}]")
        post += [f'if metadata.which != "{other}":']
        post += [f"    gathered[{_receive(p, i, 'slot')}" for i, p in enumerate(gather.planes)]
        post += [f"    slot += {len(gather.planes)}"]
    post = [line.replace('": ', '"] = ', 1).rstrip(",") if line.startswith("    gathered[") else line for line in post]
    forward, backward = _listed(plan.forward.planes), _listed(plan.backward.planes)
    sizes_text = "filled up to the same sizes where they differ" if plan.slots_differ else "of the same sizes"
    pre_doc = (
        f"Forward sends {forward}; backward sends {backward}, {sizes_text}, because FSDP2 expects equal sizes in all "
        f"passes. A {plan.noun} that stays gathered sends all of them once."
    )
    return HooksText(pre, post[:-1], "tuple(planes)", pre_doc, post_doc)


def _post_doc(plan: Plan) -> str:
    """What becomes of the outputs of a gather; of cut blocks only where a plane has entries of several rows."""
    gathered = (*plan.forward.planes, *plan.backward.planes)
    said = ["Planes are views of the gather's outputs, which FSDP2 frees."]
    if any(plane.per_m not in (None, 1) for plane in gathered):
        said.append("Scales of blocks that cuts split arrive more than once; they are copied.")
    said.append(f"A {plan.noun} that is dequantized on gather is a plain tensor, and gets values; its planes may have")
    return " ".join([*said, "travelled with those of others."])


def _wire(plane: Plane) -> str:
    return f'wire.outgoing(self, gathering, "{plane.name}")'


def _receive(plane: Plane, index: int, base: str = "") -> str:
    position = f"{base} + {index}" if base and index else base or str(index)
    return f'"{plane.name}": wire.arrived(metadata, "{plane.name}", received[{position}]),'

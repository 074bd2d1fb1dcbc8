"""Docstrings of the FSDP2 hooks: which planes a pass gathers, and what happens to them."""

from __future__ import annotations

from collections.abc import Sequence

from layoutc.layout.layout import Plane
from layoutc.plan.plan import Plan


def gather_lines(plan: Plan) -> list[str]:
    """A paragraph about what each pass gathers."""
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
    """Plane names as a list in a sentence."""
    *others, last = (plane.name for plane in planes)
    return f"{', '.join(others)} and {last}" if others else last


def hook_docs(plan: Plan) -> tuple[str, str]:
    """The docstrings of the two hooks."""
    forward, backward = _listed(plan.forward.planes), _listed(plan.backward.planes)
    pre_doc = f"Sends {forward} in both passes"
    if plan.passes_differ:
        sizes_text = "padded to the same size where they differ" if plan.slots_differ else "of the same sizes"
        pre_doc = f"Sends {forward} in forward, and {backward} in backward, {sizes_text}; all of them once if the "
        pre_doc += f"{plan.noun} stays gathered"
    if plan.shared:
        names = _listed(plan.shared)
        is_, goes = ("is", "goes") if len(plan.shared) == 1 else ("are", "go")
        pre_doc += f". {names}, which {is_} equal on all shards, {goes} as metadata"
    if plan.shard_rows > 1:
        pre_doc += f". Shards of multiples of {plan.shard_rows} rows are sent as they are: {plan.shard_reason}"
    gathered = (*plan.forward.planes, *plan.backward.planes)
    split = any(plane.per_m not in (None, 1) for plane in gathered)
    copied = ", or copies of scales where cuts split blocks" if split else ""
    return f"{pre_doc}.", f"The whole {plan.noun}. Its planes are views of the gathered bytes{copied}."

"""Reports of outcomes, as text and as data. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layoutc.conformance.runner import Outcome

WIDTH = 17


def heading(name: str, path: str, layout_id: str) -> str:
    """The heading of a recipe's checks."""
    return f"{name}  ({path}, layout {layout_id})"


def line(outcome: Outcome) -> str:
    """A check's line; for a failure, also the finding and its location."""
    word = outcome.status.upper() if outcome.status == "fail" else outcome.status
    what = outcome.message if outcome.status == "skip" else outcome.meaning
    text = f"  {word:4}  {outcome.check:{WIDTH}} {outcome.seconds:5.1f} s  {what}"
    return text if outcome.status != "fail" else f"{text}\n{explanation(outcome)}"


def explanation(outcome: Outcome) -> str:
    """A failed check's finding and its location."""
    parts = [f"        {part}" for part in outcome.message.splitlines()]
    details = dict(outcome.details)
    trace = details.pop("traceback", None)
    actual, expected = details.pop("actual", None), details.pop("expected", None)
    if details:
        named = {"index": "(i, j)"}
        parts.append("        " + ", ".join(f"{named.get(k, k)} {v}" for k, v in details.items()))
    if actual is not None:
        parts.append(f"        actual {actual}, expected {expected}")
    if trace:
        parts += [f"        | {part}" for part in str(trace).splitlines()]
    return "\n".join(parts)


def tally(outcomes: list[Outcome], seconds: float) -> str:
    """The line below a recipe's checks."""
    counts = {status: sum(o.status == status for o in outcomes) for status in ("pass", "fail", "skip")}
    words = [f"{counts['pass']} passed"]
    words += [f"{counts['fail']} failed"] if counts["fail"] else []
    words += [f"{counts['skip']} skipped"] if counts["skip"] else []
    return f"  {', '.join(words)} in {seconds:.1f} s"


def as_data(outcome: Outcome) -> dict[str, Any]:
    """An outcome for --json."""
    return {
        "check": outcome.check,
        "meaning": outcome.meaning,
        "status": outcome.status,
        "seconds": round(outcome.seconds, 3),
        "compared": outcome.compared,
        "message": outcome.message,
        "details": {k: v if isinstance(v, int | float | str) else _plain(v) for k, v in outcome.details.items()},
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | list) else str(value)

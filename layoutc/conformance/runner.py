"""Runs checks against subjects and returns their outcomes."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from layoutc.conformance.registry import TALLY, Check, Failure, Skipped, all_checks
from layoutc.conformance.subject import Subject

Status = Literal["pass", "fail", "skip"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one check."""

    check: str
    meaning: str
    status: Status
    seconds: float
    message: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    compared: int = 0  # bytes or facts, depending on the check


def one_thread() -> None:
    """Limits torch to one thread, which is faster than several for small tensors."""
    import torch

    torch.set_num_threads(1)


def run_check(subject: Subject, one: Check) -> Outcome:
    """Runs a check. An unexpected exception is a failure, with the end of its traceback; so is comparing nothing."""
    start = time.perf_counter()
    status: Status = "pass"
    message, details = "", dict[str, Any]()
    TALLY.clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if one.of_weights and (reason := subject.plan.not_weights):
                raise Skipped(f"the recipe is {reason}")
            one.run(subject)
        if not getattr(TALLY, one.compares):
            raise Failure(f"it compared no {one.compares}: no weight that it tries fits this spec", seed=subject.seed)
    except Skipped as skipped:
        status, message = "skip", str(skipped)
    except Failure as failure:
        status, message, details = "fail", failure.message, failure.details
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch.distributed.checkpoint raises one that is no Exception
        status = "fail"
        message = f"{type(error).__name__}: {error}"
        details = {"seed": subject.seed, "traceback": "".join(traceback.format_exception(error)[-4:]).rstrip()}
    seconds, compared = time.perf_counter() - start, int(getattr(TALLY, one.compares))
    return Outcome(one.name, one.meaning, status, seconds, message, details, compared)


def run_checks(subject: Subject, wanted: Callable[[Check], bool] = lambda _: True) -> Iterator[Outcome]:
    """Runs the wanted checks in order."""
    for one in all_checks():
        if wanted(one):
            yield run_check(subject, one)

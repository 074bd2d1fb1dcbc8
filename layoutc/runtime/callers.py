"""Who asks: torch's own code that means something else by an operator than other callers do.

An operator carries no word of that, so the stack is looked at: the frames above a handler, past those that only hand
operators on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from types import FrameType

from torch import nn

from layoutc.runtime.torch_private import ddp_sends_weights

_CONVERTS = nn.Module._apply.__code__  # of Module.to, half, bfloat16, float, and whoever calls it by itself
_FRAMES = 16  # between nn.Module._apply and a handler: what it was given, and DTensor
_NEAR = 8  # frames between a stager and a handler: __torch_dispatch__, and modes that are switched on
_PLUMBING = ("__torch_dispatch__", "__torch_function__", "decompose")
_KEEPERS = ("torch.nn.parameter", "torch._functorch")
_BETWEEN = ("layoutc.", "torch._ops", "torch._library", "torch.utils.", "contextlib")  # a call and its handler
_C10D = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger")


def keeps_the_weight() -> bool:
    """True where detach() makes what is a weight of a model as before: a parameter, or an input of a traced graph."""
    for frame in _above():
        name = _module(frame)
        if not name.startswith("torch.distributed.tensor"):
            return name.startswith(_KEEPERS)
    return False


def is_near(*modules: str) -> bool:
    """True where code of one of these modules, or below, has led here by a few calls."""
    return any(_module(frame).startswith(modules) for frame in islice(_frames(), 2, 2 + _NEAR))


def asking() -> str:
    """The module that called the function that calls this."""
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return name


def converts_a_module() -> bool:
    """True within nn.Module._apply."""
    return any(frame.f_code is _CONVERTS for frame in islice(_above(), _FRAMES))


def is_backward_of_a_model() -> bool:
    """Within a backward pass: true for what autograd computes, false for a hook, as of an optimizer that steps there.

    The engine calls both. Between it and an operator of its own is nothing, or the backward of an autograd.Function.
    """
    first = next(_above(), None)
    if first is None or _is_engine(first):  # another thread than the caller's has no frame at all
        return True
    for frame in _above():
        if _is_engine(frame):
            return False
        if _module(frame) == "torch.autograd.function" and frame.f_code.co_name == "apply":
            return True
    return False


def syncing_replicas() -> FrameType | None:
    """The frame of torch that broadcasts a module's parameters for DistributedDataParallel, and knows from whom."""
    first = next(_above(), None)
    return first if first is not None and first.f_code is ddp_sends_weights.__code__ else None


def caller() -> FrameType | None:
    """The frame that called the operator whose handler runs."""
    return next((frame for frame in _frames() if not _module(frame).startswith(_BETWEEN)), None)


def is_called_from(package: str) -> bool:
    """True where a module of the package called the operator whose handler runs."""
    frame = caller()
    return frame is not None and _module(frame).startswith(package)


def of_collective() -> str | None:
    """The module that called a function of torch.distributed, whose handler runs; None where none has led here."""
    within = False
    for frame in _frames():
        name = _module(frame)
        if within and name not in _C10D:
            return name
        within = within or name in _C10D
    return None


def find(module: str, function: str) -> FrameType | None:
    """The innermost frame of a function that has led here; None where it has not."""
    of_that_name = (frame for frame in _frames() if frame.f_code.co_name == function)
    return next((frame for frame in of_that_name if _module(frame) == module), None)


def _is_engine(frame: FrameType) -> bool:
    return _module(frame) == "torch.autograd.graph" and frame.f_code.co_name == "_engine_run_backward"


def _frames() -> Iterator[FrameType]:
    """The frames that have led here, the nearest first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _above() -> Iterator[FrameType]:
    """Those above the handler."""
    for frame in _frames():
        own = _module(frame).startswith(("layoutc.runtime", "torch._ops")) or frame.f_code.co_name in _PLUMBING
        if not own:
            yield frame


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name

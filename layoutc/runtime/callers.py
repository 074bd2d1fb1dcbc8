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
from torch.distributed.utils import _sync_params_and_buffers

_CONVERTS = nn.Module._apply.__code__  # of Module.to, half, bfloat16, float, and whoever calls it by itself
_FRAMES = 16  # between nn.Module._apply and a handler: what it was given, and DTensor
_PLUMBING = ("__torch_dispatch__", "__torch_function__", "decompose")
_KEEPERS = ("torch.nn.parameter", "torch._functorch")


def keeps_the_weight() -> bool:
    """True where detach() makes what is a weight of a model as before: a parameter, or an input of a traced graph."""
    for frame in _above():
        name = _module(frame)
        if not name.startswith("torch.distributed.tensor"):
            return name.startswith(_KEEPERS)
    return False


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
    return first if first is not None and first.f_code is _sync_params_and_buffers.__code__ else None


def _is_engine(frame: FrameType) -> bool:
    return _module(frame) == "torch.autograd.graph" and frame.f_code.co_name == "_engine_run_backward"


def _above() -> Iterator[FrameType]:
    """The frames above the handler, the nearest first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        own = _module(frame).startswith(("layoutc.runtime", "torch._ops")) or frame.f_code.co_name in _PLUMBING
        if not own:
            yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name

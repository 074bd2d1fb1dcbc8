"""Finds which code called an operator, for operators that torch's own code uses with another meaning than users do.

An operator's arguments don't tell who called it, so this reads the call stack: the frames above a handler, without
those that only pass operators on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import nn

from layoutc.runtime.torch_private import ddp_sends_weights

_CONVERTS = nn.Module._apply.__code__  # called by Module.to, half, bfloat16 and float, and by users
_FRAMES = 16  # the most between nn.Module._apply and a handler: its function argument, and DTensor
_NEAR = 8  # the most between a stager and a handler: __torch_dispatch__ and dispatch modes
_PLUMBING = ("__torch_dispatch__", "__torch_function__", "handle_torch_function", "decompose")
_KEEPERS = ("torch.nn.parameter", "torch._functorch")
# Modules between a call and its handler:
_BETWEEN = ("layoutc.", "torch.overrides", "torch._ops", "torch._library", "torch.utils.", "contextlib")
_OF_MODES = ("torch._compile", "torch._dynamo")  # around a user's __torch_dispatch__, which compilers skip
STAGERS = "torch.distributed._state_dict_utils"  # BlockingAsyncStager and others allocate their copies here
_CHECKPOINTS = "torch.distributed.checkpoint"
_C10D = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger")


def keeps_the_weight() -> bool:
    """True if the result of detach() is still a model's weight: a parameter, or an input of a traced graph."""
    return _first_outside(_above(), "torch.distributed.tensor").startswith(_KEEPERS)


def is_near(*modules: str) -> bool:
    """True if one of these modules, or a submodule, is a few calls up the stack."""
    return any(_module(frame).startswith(modules) for frame in islice(_frames(), 2, 2 + _NEAR))


def copies_state() -> bool:
    """True while torch's own code copies a tensor for a checkpoint or a state dict."""
    return is_near(STAGERS, _CHECKPOINTS)


def calling_module() -> str:
    """The module that called this function's caller."""
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return name


def converts_a_module() -> bool:
    """True within nn.Module._apply."""
    return any(frame.f_code is _CONVERTS for frame in islice(_above(), _FRAMES))


def is_backward_of_a_model() -> bool:
    """Within a backward pass: true for autograd's own operators, false for a hook's, as of an optimizer's step.

    The engine calls both, but its own operators, and backward of an autograd.Function, have no frame in between.
    """
    first = next(_above(), None)
    if first is None or _is_engine(first):  # the engine's own threads have no frames
        return True
    for frame in _above():
        if _is_engine(frame):
            return False
        if _module(frame) == "torch.autograd.function" and frame.f_code.co_name == "apply":
            return True
    return False


def steps() -> bool:
    """True within the step of an optimizer; false again in the model that the step's closure calls."""
    for frame in _frames():
        if _module(frame) == "torch.optim.optimizer":  # which wraps step, and calls its hooks
            return True
        if _is_engine(frame) or _module(frame) == "torch.nn.modules.module":
            return False
    return False


def syncing_replicas() -> FrameType | None:
    """The frame in which DistributedDataParallel broadcasts parameters, which has the source rank; else None."""
    first = next(_above(), None)
    return first if first is not None and first.f_code is ddp_sends_weights.__code__ else None


def caller() -> FrameType | None:
    """The frame that called the operator whose handler is running."""
    return next((frame for frame in _frames() if not _module(frame).startswith(_BETWEEN)), None)


def is_called_from(package: str) -> bool:
    """True if a module of the package called the operator whose handler is running."""
    return _first_outside(_frames(), *_BETWEEN).startswith(package)


def parallelizes() -> bool:
    """True within torch.distributed.tensor.parallel, while it cuts a module's weights into parts."""
    return any(_module(frame).startswith("torch.distributed.tensor.parallel") for frame in _frames())


def group_of_parts() -> dist.ProcessGroup | None:
    """The ranks for which a placement of DTensor cuts the tensor of the running handler; None if no placement does."""
    for frame in _frames():
        if _module(frame) == "torch.distributed.tensor.placement_types" and "mesh_dim" in (known := frame.f_locals):
            return known["mesh"].get_group(known["mesh_dim"])  # type: ignore[no-any-return]
    return None


def initializes() -> bool:
    """True if torch.nn.init called the operator whose handler is running, on a tensor or on a DTensor of it."""
    return _first_outside(_frames(), *_BETWEEN, "torch.distributed.tensor") == "torch.nn.init"


def makes_shards() -> bool:
    """True if torch.distributed (FSDP2, DTensor, DCP) called the running handler's operator, and did not pass it on."""
    between = (*_BETWEEN, *_OF_MODES, "torch.nn.functional", "torch.distributed.tensor._dispatch")
    return _first_outside(_above(), *between).startswith("torch.distributed.")


def merging() -> tuple[str, Any]:
    """The adapter layer's method, merge or unmerge, that called the operator whose handler is running, and the layer;
    "" and None if there is none. Adapter layers, such as PEFT's, have `merged_adapters`."""
    for frame in _frames():
        if (name := frame.f_code.co_name) in ("merge", "unmerge"):
            layer = frame.f_locals.get("self")
            if isinstance(layer, nn.Module) and hasattr(layer, "merged_adapters"):
                return name, layer
    return "", None


def redistributes() -> bool:
    """True within `DTensor.redistribute` of a parameter, which SimpleFSDP gathers with; false within `full_tensor`."""
    frame = find("torch.distributed.tensor._redistribute", "forward")
    if frame is None or find("torch.distributed.tensor._api", "full_tensor") is not None:
        return False
    given = frame.f_locals["input"]
    return isinstance(given, nn.Parameter) or given.requires_grad


def of_collective() -> str | None:
    """The module that called the torch.distributed function whose handler is running; None if there is none."""
    within = False
    for frame in _frames():
        name = _module(frame)
        asks_a_class = name == "torch.overrides" or frame.f_code.co_name == "torch_function"
        if within and name not in _C10D and not asks_a_class:  # whose `__torch_function__` torch calls in between
            return name
        within = within or name in _C10D
    return None


def called() -> str:
    """The function of layoutc that other code has called."""
    found = ""
    for frame in _frames():
        name = _module(frame)
        if not name.startswith(("layoutc.", "torch.utils.", "contextlib")):
            break
        found = frame.f_code.co_name if name.startswith("layoutc.") else found
    return found


def find(module: str, function: str) -> FrameType | None:
    """The innermost frame of a function on the stack; None if there is none."""
    of_that_name = (frame for frame in _frames() if frame.f_code.co_name == function)
    return next((frame for frame in of_that_name if _module(frame) == module), None)


def _is_engine(frame: FrameType) -> bool:
    return _module(frame) == "torch.autograd.graph" and frame.f_code.co_name == "_engine_run_backward"


def _frames() -> Iterator[FrameType]:
    """The frames of the stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _above() -> Iterator[FrameType]:
    """The frames above the handler."""
    for frame in _frames():
        own = _module(frame).startswith(("layoutc.runtime", "torch._ops")) or frame.f_code.co_name in _PLUMBING
        if not own:
            yield frame


def _first_outside(frames: Iterator[FrameType], *modules: str) -> str:
    """The module of the first frame outside the given modules and their submodules; "" if there is none."""
    return next((name for frame in frames if not (name := _module(frame)).startswith(modules)), "")


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name

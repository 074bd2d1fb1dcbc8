"""Launching a kernel again without Triton's own launcher, which takes longer than small weights take on the card.

`kernel[grid](...)` binds, specializes and writes a key of text at every call. Here a key of a few small values, which
tells apart all that Triton specializes on, finds what the first such launch compiled. Like Triton's, it is made of the
arguments alone; unlike there, globals that a kernel reads are not compared with those it was compiled with.

The first launch of each key, hooks, the interpreter, other cards than NVIDIA's and a Triton that specializes on more
than is known here take the ordinary way.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends import compiler as backends
from triton.compiler import CompiledKernel
from triton.runtime import driver, jit

_launches: dict[Hashable, tuple[Any, int, Any]] = {}  # the launcher, the function on the card, what it was packed with
_splits: dict[Any, int | None] = {}  # of each kernel: how many parameters stand before those that are tl.constexpr


class Constants(tuple[Any, ...]):
    """The constants of a kernel, in order, that many launches have in common: their hash is worked out once."""

    def __hash__(self) -> int:
        try:
            return self._hash  # type: ignore[no-any-return, has-type]
        except AttributeError:
            self._hash = super().__hash__()
            return self._hash


def run(
    kernel: Any,
    grid: tuple[int],
    args: tuple[Any, ...],
    num_warps: int,
    maxnreg: int | None = None,
    constants: Constants | None = None,
) -> None:
    """kernel[grid](*args, num_warps=num_warps, maxnreg=maxnreg, enable_fp_fusion=False), in less time.

    args: all of the kernel's, in the order of its parameters, or all but its constants, where these are given by
    themselves; tensors on the current device. Bytes depend on there
    being no fusion: a multiplication and an addition that become one are rounded once.
    """
    split = _split(kernel)
    found, given = (None, []) if split is None else key(args, split, constants)
    if found is None:
        kernel[grid](*args, *(constants or ()), num_warps=num_warps, maxnreg=maxnreg, enable_fp_fusion=False)
        return
    active = driver.active
    device = active.get_current_device()
    at = (
        kernel.fn,
        device,
        num_warps,
        maxnreg,
        knobs.runtime.debug,
        knobs.compilation.instrumentation_mode,
        *found,
    )
    launch = _launches.get(at)
    if launch is None:
        made = kernel[grid](*args, *(constants or ()), num_warps=num_warps, maxnreg=maxnreg, enable_fp_fusion=False)
        if isinstance(made, CompiledKernel):
            _launches[at] = made.run, made.function, made.packed_metadata
        return
    launcher, function, packed = launch
    launcher(grid[0], 1, 1, active.get_current_stream(device), function, packed, None, None, None, *given)


def _split(kernel: Any) -> int | None:
    """How many of a kernel's parameters are not constants; None where it is to be launched the ordinary way."""
    if type(kernel) is not jit.JITFunction or kernel.pre_run_hooks or not supported():
        return None
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # a profiler's
        return None
    try:
        return _splits[kernel.fn]
    except KeyError:
        constant = [parameter.is_constexpr for parameter in kernel.params]
        split = constant.index(True) if True in constant else len(constant)
        return _splits.setdefault(kernel.fn, split if all(constant[split:]) else None)


def key(args: tuple[Any, ...], split: int, constants: Constants | None = None) -> tuple[list[Any] | None, list[Any]]:
    """What Triton specializes a kernel on, of its arguments; and the arguments, with addresses in place of tensors.

    Arguments from `split` on are constants, where these are not given by themselves. No key where an argument is of a
    type that none is known for.
    """
    fixed: tuple[Any, ...] = args[split:] if constants is None else constants
    classes: list[Any] = [fixed]
    given: list[Any] = []
    for arg in args[:split]:
        kind = type(arg)
        if arg is None:
            classes.append(None)
        elif kind is int:
            # 1 becomes a constant; others go by the width that holds them, and by whether 16 divides them.
            width = 2 if -0x80000000 <= arg <= 0x7FFFFFFF else 4 if arg <= 0x7FFFFFFFFFFFFFFF else 6
            classes.append(1 if arg == 1 else width if arg & 15 else -width)
        elif isinstance(arg, Tensor):
            classes.append(arg.dtype)
            address = arg.data_ptr()
            classes.append(address & 15 == 0)
            given.append(address)
            continue
        elif kind is float or kind is bool:
            classes.append(kind)
        else:
            return None, given
        given.append(arg)
    given += fixed
    return classes, given


@cache
def supported() -> bool:
    """True where Triton has the parts that are used here, and specializes on nothing that keys don't tell apart."""
    parts = (
        (jit, "native_specialize_impl"),
        (CompiledKernel, "run"),
        (CompiledKernel, "launch_metadata"),
        (knobs.runtime, "launch_enter_hook"),
        (knobs.runtime, "launch_exit_hook"),
        (knobs.runtime, "debug"),
        (knobs.compilation, "instrumentation_mode"),
    )
    if torch.version.hip is not None or not all(hasattr(owner, name) for owner, name in parts):
        return False
    return tells_apart(backends.GPUTarget("cuda", 90, 32))


def tells_apart(target: Any) -> bool:
    """Whether numbers and addresses of one class are one to Triton too."""
    from triton.compiler.compiler import make_backend

    space = torch.empty(2048, dtype=torch.uint8)
    space = space[-space.data_ptr() % 1024 :]
    steps = [0, 1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256, 512]
    numbers = [sign * (base + step) for base in (0, 1 << 20, 1 << 31, 1 << 40) for step in steps for sign in (1, -1)]
    seen: dict[Hashable, Any] = {}
    try:
        backend = make_backend(target)
        for probe in (*(space[step:] for step in steps), *numbers):
            special = jit.native_specialize_impl(backend, probe, False, True, True)
            found, _ = key((probe,), 1)
            if found is None or seen.setdefault(tuple(found), special) != special:
                return False
    except Exception:
        return False
    return True

"""Launching a kernel again without Triton's launcher, which takes longer than a small weight takes on the card.

`kernel[grid](...)` binds its arguments, specializes, and builds a text key at every call. A launch plan's arguments are
fixed, so of all that Triton specializes on, only alignment to 16 bytes can change. Unlike Triton, plans do not check
whether the globals that a kernel reads have changed since it was compiled.

The ordinary launcher is used for the first launch of each kind, with hooks, in the interpreter, on cards that are not
NVIDIA's, and with a Triton that specializes on more of an address.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from triton import knobs
from triton.backends import compiler as backends
from triton.compiler import CompiledKernel
from triton.runtime import driver, jit


class Compiled(NamedTuple):
    """A compiled kernel and its launcher."""

    launch: Callable[..., Any]
    function: int
    between: tuple[Any, ...]  # what `launch` takes between the function and the kernel's arguments
    packs: bool  # whether it takes the arguments as one tuple
    owner: CompiledKernel  # unloads the function when it is freed, from Triton 3.8 on

    @classmethod
    def of(cls, kernel: CompiledKernel) -> Self:
        """Uses the function below Triton's launcher if all that the launcher passes on is known, else the launcher."""
        launcher, metadata = kernel.run, kernel.packed_metadata
        if (passed := _passed_on(launcher, metadata)) is not None:
            return cls(launcher.launch, kernel.function, *passed, kernel)
        return cls(launcher, kernel.function, (metadata, None, None, None), False, kernel)

    def __call__(self, card: int, grid: int, values: Sequence[Any]) -> None:
        """Launches on the current stream of `card`, the current device. values: of arguments; addresses of tensors."""
        stream = driver.active.get_current_stream(card)
        if self.packs:
            self.launch(grid, 1, 1, stream, self.function, *self.between, tuple(values))
        else:
            self.launch(grid, 1, 1, stream, self.function, *self.between, *values)


def _passed_on(launcher: Any, metadata: Any) -> tuple[tuple[Any, ...], bool] | None:
    """What Triton's launcher passes between the function and the arguments, and whether it packs these; None if it does
    more than pass on. Found by calling it, since releases differ."""
    if getattr(launcher, "global_scratch_size", 1) or getattr(launcher, "profile_scratch_size", 1):
        return None  # it allocates memory
    passed: list[tuple[Any, ...]] = []
    *first, one, other = (object() for _ in range(7))  # grid, stream and function; values
    try:
        asked = copy.copy(launcher)
        asked.launch = lambda *given: passed.append(given)
        asked(*first, metadata, None, None, None, one, other)
        (given,) = passed
    except Exception:
        return None
    if list(given[:5]) != first:
        return None
    if given[-2:] == (one, other):
        return given[5:-2], False
    return (given[5:-1], True) if given[-1] == (one, other) else None


def run(kernel: Any, grid: int, args: Sequence[Any], warps: int, registers: int | None = None) -> Compiled | None:
    """Launches a kernel by Triton's launcher, on the current card. Returns what launches it again for tensors with the
    same alignment; None if only Triton's launcher can.

    args: the kernel's arguments in order, constants among them. Fusion stays off because bytes depend on it: a fused
    multiply-add rounds once, not twice.
    """
    compiled = kernel[(grid,)](*args, num_warps=warps, maxnreg=registers, enable_fp_fusion=False)
    is_known = isinstance(compiled, CompiledKernel) and type(kernel) is jit.JITFunction and supported()
    return Compiled.of(compiled) if is_known else None


def state_of(kernel: Any) -> tuple[Any, ...] | None:
    """What a compiled kernel depends on besides its arguments; None if hooks, such as a profiler's, see each launch."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    if kernel.pre_run_hooks or getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        return None
    return runtime.debug, knobs.compilation.instrumentation_mode


@cache
def supported() -> bool:
    """True if Triton has the parts used here and specializes on alignment only."""
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
    """True if Triton specializes the same on all addresses that 16 divides, and on all others.

    Tries addresses around powers of two and multiples of 16. False if Triton lacks the function.
    """
    from triton.compiler.compiler import make_backend

    space = torch.empty(2048, dtype=torch.uint8, device="cpu")
    space = space[-space.data_ptr() % 1024 :]
    try:
        backend = make_backend(target)
        seen: dict[bool, set[Any]] = {True: set(), False: set()}
        for step in (0, 1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256, 512):
            seen[step % 16 == 0].add(jit.native_specialize_impl(backend, space[step:], False, True, True))
        return all(len(kinds) == 1 for kinds in seen.values())
    except Exception:
        return False

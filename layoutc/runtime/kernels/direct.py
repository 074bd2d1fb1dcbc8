"""Launching a kernel again without Triton's launcher, which takes more time than a small weight takes on the card.

`kernel[grid](...)` binds its arguments, specializes, and builds a text key at every call. Here a key of a few small
values, one for each case that Triton specializes on, looks up what the first launch with that key compiled. Like
Triton's key it depends on the arguments alone. Unlike Triton, this does not check that the globals that a kernel reads
are still those that it was compiled with.

The ordinary launcher is used for the first launch of each key, with hooks, in the interpreter, on cards that are not
NVIDIA's, and with a Triton that specializes on more than this module knows of.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from triton import knobs
from triton.backends import compiler as backends
from triton.compiler import CompiledKernel
from triton.runtime import driver, jit

from layoutc.runtime.torch_private import current_card

_launches: dict[Hashable, Compiled] = {}
_splits: dict[Any, int | None] = {}  # for each kernel: how many parameters come before those that are tl.constexpr


class Constants(tuple[Any, ...]):
    """A kernel's constants, in order, that many launches share. The hash is computed once."""

    def __hash__(self) -> int:
        try:
            return self._hash  # type: ignore[no-any-return, has-type]
        except AttributeError:
            self._hash = super().__hash__()
            return self._hash


class Compiled(NamedTuple):
    """A kernel on the card, and what launches it."""

    launch: Callable[..., Any]
    function: int
    between: tuple[Any, ...]  # what `launch` takes after the function, before the values of the kernel's arguments
    packs: bool  # whether it takes these as one tuple

    @classmethod
    def of(cls, kernel: CompiledKernel) -> Self:
        """By what Triton's launcher calls, if that passes on nothing but what is known here; else by the launcher."""
        launcher, metadata = kernel.run, kernel.packed_metadata
        if (passed := _passed_on(launcher, metadata)) is not None:
            return cls(launcher.launch, kernel.function, *passed)
        return cls(launcher, kernel.function, (metadata, None, None, None), False)

    def __call__(self, card: int, grid: int, values: Sequence[Any]) -> None:
        """Launches on the current stream of a card, which is the current one. values: of all arguments, with addresses
        in place of tensors."""
        stream = driver.active.get_current_stream(card)
        if self.packs:
            self.launch(grid, 1, 1, stream, self.function, *self.between, tuple(values))
        else:
            self.launch(grid, 1, 1, stream, self.function, *self.between, *values)


def _passed_on(launcher: Any, metadata: Any) -> tuple[tuple[Any, ...], bool] | None:
    """What a launcher of Triton's puts between a function and the arguments, and whether it packs these; None if it
    does more than to pass on what it is called with. It is asked, as each release does it in another way."""
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


class Arguments(NamedTuple):
    """Of a launch, in the order of `run`, after the kernel."""

    grid: tuple[int]
    args: tuple[Any, ...]
    warps: int
    registers: int | None
    constants: Constants


def run(
    kernel: Any,
    grid: tuple[int],
    args: tuple[Any, ...],
    num_warps: int,
    maxnreg: int | None = None,
    constants: Constants | None = None,
) -> Compiled | None:
    """kernel[grid](*args, num_warps=num_warps, maxnreg=maxnreg, enable_fp_fusion=False), in less time.

    Returns what launches the same for tensors that are aligned as these; None where Triton's own launcher must.

    args: the kernel's arguments in order, with its constants at the end unless `constants` has them. It runs on the
    card that tensors are on, whichever is the current one. Fusion stays off because bytes depend on it: a fused
    multiply-add rounds once, not twice.
    """
    card = card_of(args)
    if is_elsewhere(card):
        with torch.cuda.device(card):
            return run(kernel, grid, args, num_warps, maxnreg, constants)
    at, values = _key_of(kernel, card, args, num_warps, maxnreg, constants)
    if (launch := _launches.get(at)) is None:
        compiled = kernel[grid](*args, *(constants or ()), num_warps=num_warps, maxnreg=maxnreg, enable_fp_fusion=False)
        if at is not None and isinstance(compiled, CompiledKernel):
            launch = _launches[at] = Compiled.of(compiled)
        return launch
    launch(card, grid[0], values)
    return launch


def card_of(args: Sequence[Any]) -> int:
    """The number of the card that the tensors of a launch are on; -1 on a CPU."""
    return next((arg.get_device() for arg in args if isinstance(arg, Tensor)), -1)


def is_elsewhere(card: int) -> bool:
    """True for a card that is not the current one, on which CUDA launches."""
    return card >= 0 and current_card() != card


def state_of(kernel: Any) -> tuple[Any, ...] | None:
    """What a compiled kernel depends on beside its arguments; None if hooks, as of a profiler, see each launch."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    if kernel.pre_run_hooks or getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        return None
    return runtime.debug, knobs.compilation.instrumentation_mode


def _key_of(
    kernel: Any, card: int, args: tuple[Any, ...], num_warps: int, maxnreg: int | None, constants: Constants | None
) -> tuple[Hashable, list[Any]]:
    """The key of a launch on a card, None if Triton's own launcher must be used; and the values of all arguments."""
    state = None if (split := _split(kernel)) is None else state_of(kernel)
    if split is None or state is None:
        return None, []
    specialization, values = key(args, split, constants)
    if specialization is None:
        return None, values
    return (kernel.fn, card, num_warps, maxnreg, *state, *specialization), values


def _split(kernel: Any) -> int | None:
    """How many of a kernel's parameters are not constants; None if Triton's own launcher must be used."""
    if type(kernel) is not jit.JITFunction or not supported():
        return None
    try:
        return _splits[kernel.fn]
    except KeyError:
        constant = [parameter.is_constexpr for parameter in kernel.params]
        split = constant.index(True) if True in constant else len(constant)
        return _splits.setdefault(kernel.fn, split if all(constant[split:]) else None)


def key(args: tuple[Any, ...], split: int, constants: Constants | None = None) -> tuple[list[Any] | None, list[Any]]:
    """What Triton specializes a kernel on, as a key; and all argument values, with addresses in place of tensors.

    Arguments from `split` on are constants, unless `constants` has them. The key is None if an argument is of a type
    that this module has no rule for.
    """
    fixed: tuple[Any, ...] = args[split:] if constants is None else constants
    classes: list[Any] = [fixed]
    values: list[Any] = []
    for arg in args[:split]:
        kind = type(arg)
        if arg is None:
            classes.append(None)
        elif kind is int:
            # 1 becomes a constant. Other numbers differ by their width, and by whether 16 divides them.
            width = 2 if -0x80000000 <= arg <= 0x7FFFFFFF else 4 if arg <= 0x7FFFFFFFFFFFFFFF else 6
            classes.append(1 if arg == 1 else width if arg & 15 else -width)
        elif isinstance(arg, Tensor):
            classes.append(arg.dtype)
            address = arg.data_ptr()
            classes.append(address & 15 == 0)
            values.append(address)
            continue
        elif kind is float or kind is bool:
            classes.append(kind)
        else:
            return None, values
        values.append(arg)
    values += fixed
    return classes, values


@cache
def supported() -> bool:
    """True if Triton has the parts that are used here, and specializes on nothing but what keys tell apart."""
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
    """True if Triton specializes equally on all numbers, and on all addresses, that have the same key.

    Tries numbers and addresses around powers of two and multiples of 16. False if Triton can't be asked.
    """
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
            classes, _ = key((probe,), 1)
            if classes is None or seen.setdefault(tuple(classes), special) != special:
                return False
    except Exception:
        return False
    return True

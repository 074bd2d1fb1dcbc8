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
) -> None:
    """kernel[grid](*args, num_warps=num_warps, maxnreg=maxnreg, enable_fp_fusion=False), in less time.

    args: the kernel's arguments in order, with its constants at the end unless `constants` has them. It runs on the
    card that tensors are on, whichever is the current one. Fusion stays off because bytes depend on it: a fused
    multiply-add rounds once, not twice.
    """
    card = card_of(args)
    if is_elsewhere(card):
        with torch.cuda.device(card):
            return run(kernel, grid, args, num_warps, maxnreg, constants)
    at, values = _key_of(kernel, card, args, num_warps, maxnreg, constants)
    launch = _launches.get(at)
    if at is None or launch is None:
        compiled = kernel[grid](*args, *(constants or ()), num_warps=num_warps, maxnreg=maxnreg, enable_fp_fusion=False)
        if at is not None and isinstance(compiled, CompiledKernel):
            _launches[at] = Compiled.of(compiled)
        return
    launch(card, grid[0], values)


def card_of(args: Sequence[Any]) -> int:
    """The number of the card that the tensors of a launch are on; -1 on a CPU."""
    return next((arg.get_device() for arg in args if isinstance(arg, Tensor)), -1)


def is_elsewhere(card: int) -> bool:
    """True for a card that is not the current one, on which CUDA launches."""
    return card >= 0 and current_card() != card


class Bound:
    """A launch whose sizes, options and constants are bound: it is called with tensors alone.

    args, and the others: as for `run`, with example tensors. Calls take as many tensors, in the same order, on the same
    device, of the same dtypes or of others of the same size, which are read as if they had those. kept: the tensor
    among them that is bound as well.
    """

    __slots__ = ("_args", "_at", "_card", "_dtypes", "_launches", "_options", "_state", "_values")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int],
        args: tuple[Any, ...],
        num_warps: int,
        maxnreg: int | None,
        constants: Constants,
        kept: Tensor | None = None,
    ) -> None:
        self._at = tuple(index for index, arg in enumerate(args) if isinstance(arg, Tensor) and arg is not kept)
        self._dtypes = [args[index].dtype for index in self._at]
        self._args = [None if index in self._at else arg for index, arg in enumerate(args)]
        self._options, self._card = (kernel, grid, num_warps, maxnreg, constants), card_of(args)
        self._values = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in (*self._args, *constants)]
        self._launches: dict[int, Compiled] = {}  # by a bit for each tensor that is not aligned
        self._state: tuple[Any, ...] = ()

    def __call__(self, *tensors: Tensor) -> None:
        """Launches on the current stream of the tensors' card."""
        if is_elsewhere(self._card):
            with torch.cuda.device(self._card):
                return self(*tensors)
        kernel, grid, num_warps, maxnreg, constants = self._options
        values, every = self._values.copy(), 0
        for at, tensor in zip(self._at, tensors, strict=True):
            values[at] = address = tensor.data_ptr()
            every |= address
        odd = self._odd(values) if every & 15 else 0
        launch = self._launches.get(odd)
        if launch is not None and self._state == _state() and _split(kernel) is not None:
            launch(self._card, grid[0], values)
            return
        args = self._args.copy()
        for at, tensor, dtype in zip(self._at, tensors, self._dtypes, strict=True):
            args[at] = tensor if tensor.dtype == dtype else tensor.view(dtype)
        run(kernel, grid, tuple(args), num_warps, maxnreg, constants)
        if self._state != _state():
            self._launches.clear()
            self._state = _state()
        at_key, _ = _key_of(kernel, self._card, tuple(args), num_warps, maxnreg, constants)
        if (made := _launches.get(at_key)) is not None:
            self._launches[odd] = made

    def _odd(self, values: Sequence[int]) -> int:
        """A bit for each tensor that is not at a multiple of 16 bytes."""
        return sum(1 << bit for bit, at in enumerate(self._at) if values[at] & 15)


class LaunchPlan(tuple[Bound, ...]):
    """Launches, each with a table that it keeps: good while what the tables list stays in place, on the stream that
    they were copied on."""

    def __call__(self, *tensors: Tensor) -> None:
        """Launches all, with the tensors whose addresses are no part of a table."""
        for bound in self:
            bound(*tensors)


def _state() -> tuple[Any, ...]:
    """What a compiled kernel depends on beside its arguments."""
    return knobs.runtime.debug, knobs.compilation.instrumentation_mode


def _key_of(
    kernel: Any, card: int, args: tuple[Any, ...], num_warps: int, maxnreg: int | None, constants: Constants | None
) -> tuple[Hashable, list[Any]]:
    """The key of a launch on a card, None if Triton's own launcher must be used; and the values of all arguments."""
    split = _split(kernel)
    specialization, values = (None, []) if split is None else key(args, split, constants)
    if specialization is None:
        return None, values
    return (kernel.fn, card, num_warps, maxnreg, *_state(), *specialization), values


def _split(kernel: Any) -> int | None:
    """How many of a kernel's parameters are not constants; None if Triton's own launcher must be used."""
    if type(kernel) is not jit.JITFunction or kernel.pre_run_hooks or not supported():
        return None
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # a profiler has set them
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

"""Launching again without Triton's launcher: plans tell apart what Triton specializes on, and pass no hook by.

No card is needed: Triton itself says what it specializes on, and a driver that launches nothing takes its place.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton, which kernels are written in")

from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402
from triton.compiler.compiler import make_backend  # noqa: E402
from triton.runtime import driver, jit  # noqa: E402

from layoutc.runtime.kernels import direct, launch_plan, plans  # noqa: E402
from layoutc.runtime.kernels.launch_plan import LaunchPlan  # noqa: E402
from layoutc.runtime.triton import kernels  # noqa: E402

DTYPES = [torch.uint8, torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.float8_e4m3fn]
SPACE = torch.zeros(4096, dtype=torch.uint8)
SPACE = SPACE[-SPACE.data_ptr() % 1024 :]


def jitted(name: str) -> Any:
    """A kernel as Triton compiles it, whether or not the interpreter runs here."""
    return jit.JITFunction(getattr(kernels, name).fn)


@jit.JITFunction
def one_tile(tile, source, shared, planes, buffers, at):  # type: ignore[no-untyped-def]
    """In place of a recipe's: what it does is not looked at."""


@jit.JITFunction
def another_tile(tile, source, shared, planes, buffers, at):  # type: ignore[no-untyped-def]
    """Another recipe's."""
    tile + 1


def test_addresses_differ_by_their_alignment_alone() -> None:
    """Of what a plan is called with, Triton specializes on nothing else: dtypes stay."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    for dtype in DTYPES:
        views = {step: SPACE[step : step + 64].view(dtype) for step in (0, 4, 8, 16, 32, 48, 64, 256, 512, 1024)}
        special = {step: jit.native_specialize_impl(backend, one, False, True, True) for step, one in views.items()}
        assert all((special[step] == special[0]) is (step % 16 == 0) for step in special)


def test_a_triton_that_specializes_on_more_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    target, real = GPUTarget("cuda", 90, 32), jit.native_specialize_impl
    assert direct.tells_apart(target)

    def finer(backend: Any, arg: Any, *flags: bool) -> Any:
        kind, special = real(backend, arg, *flags)
        return kind, f"{special}S" if isinstance(arg, torch.Tensor) and arg.data_ptr() % 64 == 0 else special

    monkeypatch.setattr(jit, "native_specialize_impl", finer)
    assert not direct.tells_apart(target)

    def broken(*_: Any) -> Any:
        raise TypeError("other arguments by now")

    monkeypatch.setattr(jit, "native_specialize_impl", broken)
    assert not direct.tells_apart(target)


class NoDriver:
    """A driver of cards that are not there."""

    card = 0

    def get_current_device(self) -> int:
        return self.card

    def get_current_stream(self, device: int) -> int:
        return 7 + max(device, 0)

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)


class Compiled(CompiledKernel):
    """A compiled kernel that notes its launches."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        self.name, self.function, self.packed_metadata, self.src, self.module = (
            name,
            id(self),
            (1, 1, 0),
            None,
            object(),
        )
        self._run = lambda *given: calls.append((name, given))

    def __del__(self) -> None:
        """Unlike Triton's from 3.8 on, has no module to unload."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[Any], list[str]]]:
    """A kernel, what was launched, and the ordinary launches among them by what they specialized on."""
    calls: list[Any] = []
    ordinary: list[str] = []
    run = jit.JITFunction.run

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        ordinary.append(options["num_warps"])
        assert options["enable_fp_fusion"] is False
        return run(self, *args, **options)

    def compile_(self: Any, key: str, *_: Any) -> Any:
        made = self.device_caches[driver.active.get_current_device()][0][key] = Compiled(key, calls)
        return made

    monkeypatch.setattr(jit.JITFunction, "run", counted)
    monkeypatch.setattr(jit.JITFunction, "_do_compile", compile_)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", None)
    monkeypatch.setattr(knobs.runtime, "launch_exit_hook", None)
    direct.supported()  # before the driver is replaced
    before = driver._active
    driver.set_active(NoDriver())
    try:
        yield jitted("quantize_kernel"), calls, ordinary
    finally:
        driver._active = before


def arguments(offset: int = 0, m: int = 64, tile: int = 16, quantize: Any = one_tile) -> tuple[Any, ...]:
    sizes = {"m": m, "k": 128, "stride_m": 128, "stride_k": 1}
    tiles = {"TILE_M": tile, "TILE_K": 128, "EVEN": True, "CVT_LEVEL": True, "QUANTIZE": quantize}
    known = {**sizes, **tiles, "x": SPACE[offset : offset + 256]}
    given = jitted("quantize_kernel").params
    return tuple(known.get(p.name, True if p.is_constexpr else SPACE[:64].view(torch.float32)) for p in given)


def bound_to(kernel: Any, args: tuple[Any, ...], stays: Sequence[torch.Tensor] = (), warps: int = 8) -> LaunchPlan:
    return LaunchPlan.of(kernel, 4, args, warps, bound=stays)


def tensors_of(args: tuple[Any, ...]) -> list[torch.Tensor]:
    return [arg for arg in args if isinstance(arg, torch.Tensor)]


def test_a_second_launch_is_direct(launches: Any) -> None:
    """It launches what the first one compiled, with addresses in place of tensors, on the current stream."""
    kernel, calls, ordinary = launches
    args = arguments()
    bound = bound_to(kernel, args)
    for _ in range(3):
        bound(*tensors_of(args))
    assert len(ordinary) == 1
    assert [name for name, _ in calls] == [calls[0][0]] * 3
    first, second, third = (given for _, given in calls)
    assert second[:4] == first[:4] == (4, 1, 1, 7)
    assert second[4:6] == first[4:6]
    assert second[6:9] == (None, None, None)
    assert list(second[9:]) == [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
    assert third == second
    other = [SPACE[256 + 16 * index :][: tensor.numel()] for index, tensor in enumerate(tensors_of(args))]
    bound(*other)
    addresses = iter(tensor.data_ptr() for tensor in other)
    expected = [next(addresses) if isinstance(arg, torch.Tensor) else arg for arg in args]
    assert list(calls[3][1][9:]) == expected
    with pytest.raises(ValueError, match=f"for {len(other)} tensors was given {len(other) + 1}"):
        bound(*tensors_of(args), SPACE)


def test_a_plan_keeps_what_it_launches(launches: Any) -> None:
    """From Triton 3.8 on, a compiled kernel that nobody holds unloads the function that a plan would launch."""
    kernel, calls, _ = launches
    args = arguments()
    bound = bound_to(kernel, args)
    bound(*tensors_of(args))
    (made,) = (weakref.ref(one) for one in kernel.device_caches[driver.active.get_current_device()][0].values())
    kernel.device_caches.clear()
    gc.collect()
    assert made() is not None
    bound(*tensors_of(args))
    assert len(calls) == 2


def test_what_triton_compiles_anew_is_launched_anew(launches: Any) -> None:
    """Another size's class, another tile, another tile function, other options: as many kernels as Triton makes."""
    kernel, calls, ordinary = launches
    variants = [(arguments(), 8), (arguments(m=63), 8), (arguments(tile=32), 8), (arguments(), 4)]
    variants.append((arguments(quantize=another_tile), 8))
    plans_of = [bound_to(kernel, args, warps=warps) for args, warps in variants]
    for _ in range(3):
        for plan, (args, _) in zip(plans_of, variants, strict=True):
            plan(*tensors_of(args))
    assert len(ordinary) == len(variants)
    names = [name for name, _ in calls]
    assert len(set(names)) == len(variants)
    assert names == names[: len(variants)] * 3


def test_launches_are_on_the_card_of_their_tensors(launches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is the current one, which it is again after: each card has its own kernel, and its own stream."""
    kernel, calls, ordinary = launches
    args, entered = arguments(), []
    drivers: Any = driver.active

    @contextmanager
    def device(card: int) -> Iterator[None]:
        before, drivers.card = drivers.card, card
        entered.append(card)
        try:
            yield
        finally:
            drivers.card = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(launch_plan, "current_card", lambda: drivers.card)
    ran: dict[int, Any] = {}
    for card in (1, 0, 1, 0):
        if card not in ran:
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "get_device", lambda _, card=card: card)
                ran[card] = bound_to(kernel, args)
        ran[card](*tensors_of(args))
        assert drivers.card == 0
    assert entered == [1, 1]
    assert len(ordinary) == 2
    assert [given[3] for _, given in calls] == [8, 7, 8, 7]
    functions = [given[4] for _, given in calls]
    assert functions[:2] == functions[2:]
    assert functions[0] != functions[1]


def test_hooks_see_every_launch(launches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's own, and a profiler's, set as Triton lets them be: a chain with calls, or a function."""
    kernel, _, ordinary = launches
    args = arguments()
    plan = bound_to(kernel, args)
    plan(*tensors_of(args))
    seen: list[Any] = []
    kernel.add_pre_run_hook(lambda *_, **__: seen.append("own"))
    plan(*tensors_of(args))
    kernel.pre_run_hooks.clear()
    chain = knobs.HookChain()
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", chain)
    plan(*tensors_of(args))
    assert (len(ordinary), seen) == (2, ["own"])
    chain.add(lambda _: None)
    plan(*tensors_of(args))
    assert len(ordinary) == 3
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", None)
    monkeypatch.setattr(knobs.runtime, "launch_exit_hook", lambda _: None)
    plan(*tensors_of(args))
    assert len(ordinary) == 4
    monkeypatch.setattr(knobs.runtime, "launch_exit_hook", None)
    monkeypatch.setattr(knobs.runtime, "debug", True)
    plan(*tensors_of(args))
    assert len(ordinary) == 5


def test_the_ordinary_way_where_direct_launches_are_not_known(launches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, calls, ordinary = launches
    monkeypatch.setattr(direct, "supported", lambda: False)
    plan = bound_to(kernel, arguments())
    for _ in range(3):
        plan(*tensors_of(arguments()))
    assert len(ordinary) == len(calls) == 3


def test_arguments_alike_are_launched_by_one_plan(launches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other numbers, or tensors of other dtypes, have another."""
    kernel, _, ordinary = launches
    monkeypatch.setattr(plans, "cache", plans.Plans())
    for _ in range(2):
        for args in (arguments(), arguments(m=48), (SPACE, *arguments()[1:])):
            launch_plan.launched(kernel, 4, args, 8)
    assert len(plans.cache) == len(ordinary) == 3


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    """Triton's own, of a kernel that needs no memory, which calls what notes its arguments; and these."""
    nvidia = pytest.importorskip("triton.backends.nvidia.driver", reason="needs Triton's launcher for NVIDIA's cards")
    calls: list[Any] = []
    made = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
    made.num_ctas, made.launch_cooperative_grid, made.launch_pdl, made.gsan_enabled = 1, False, True, False
    made.arg_annotations, made.kernel_signature = "annotations", b"signature"
    made.global_scratch_size = made.profile_scratch_size = 0
    made.global_scratch_align = made.profile_scratch_align = 1
    made.launch = lambda *given: calls.append(given)
    monkeypatch.setattr(driver, "_active", NoDriver())
    return made, calls


def compiled_by(launcher: Any) -> direct.Compiled:
    made = Compiled("kernel", [])
    made._run = launcher
    return direct.Compiled.of(made)


def test_what_tritons_launcher_calls_is_called_with_the_same_arguments(launcher: Any) -> None:
    """Whatever this release passes on beside them."""
    made, calls = launcher
    compiled = compiled_by(made)
    assert compiled.launch is made.launch
    compiled(0, 4, [5, 6, 7])
    made(4, 1, 1, 7, compiled.function, (1, 1, 0), None, None, None, 5, 6, 7)
    assert calls[0] == calls[1]


@pytest.mark.parametrize("what", ["global_scratch_size", "profile_scratch_size", "more", "unknown"])
def test_a_launcher_that_does_more_is_called_itself(launcher: Any, what: str) -> None:
    """One that allocates memory, one that adds an argument, and one that can't be asked."""
    made, _ = launcher
    if what == "more":
        adding = made.__class__

        class More(adding):  # type: ignore[misc, valid-type]
            def __call__(self, *given: Any) -> None:
                super().__call__(*given, 8)

        made.__class__ = More
    elif what == "unknown":
        made.__class__ = type("Unknown", (), {"__call__": lambda self: None})
    else:
        setattr(made, what, 64)
    compiled = compiled_by(made)
    assert compiled.launch is made
    assert compiled.between == ((1, 1, 0), None, None, None)


def test_a_bound_launch_keeps_a_tensor(launches: Any) -> None:
    """Its address is the same in each launch, and it is as no argument of calls."""
    kernel, calls, ordinary = launches
    args = arguments()
    kept = tensors_of(args)[-1]
    bound = bound_to(kernel, args, [kept])
    for _ in range(3):
        bound(*tensors_of(args)[:-1])
    assert len(ordinary) == 1
    expected = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
    assert [list(one[9:]) for _, one in calls[1:]] == [expected] * 2


def test_a_bound_launch_at_another_alignment_compiles_anew(launches: Any) -> None:
    kernel, calls, ordinary = launches
    args = arguments()
    bound, tensors = bound_to(kernel, args), tensors_of(args)
    bound(*tensors)
    odd = SPACE[4 : 4 + tensors[0].nbytes].view(tensors[0].dtype)
    for _ in range(2):
        bound(odd, *tensors[1:])
    bound(*tensors)
    assert len(ordinary) == 2
    names = [name for name, _ in calls]
    assert names[0] == names[3] != names[1] == names[2]


def test_a_bound_launch_takes_other_dtypes_of_the_same_size(launches: Any) -> None:
    """They are read as those that it was bound with: nothing is compiled anew, at whichever alignment."""
    kernel, _, ordinary = launches
    args = arguments()
    bound, (first, *others) = bound_to(kernel, args), tensors_of(args)
    other = torch.int32 if first.itemsize == 4 else torch.int8
    bound(first, *others)
    bound(first.view(other), *others)
    assert len(ordinary) == 1
    bound(SPACE[4 : 4 + first.nbytes].view(other), *others)
    bound(SPACE[4 : 4 + first.nbytes].view(first.dtype), *others)
    assert len(ordinary) == 2


def test_plans_that_are_kept_are_bounded() -> None:
    """The newer half stays. What has no plan is asked once."""
    kept, made = plans.Plans(4), list[int]()
    for index in (0, 0, 1, 2, 3, 4, 3, 1):
        assert kept.of(index, lambda index=index: (made.append(index), index)[1]) == index  # type: ignore[misc]
        assert len(kept) <= 4
    assert made == [0, 1, 2, 3, 4, 1]
    assert (kept.at(None, lambda: 5), kept.at(None, lambda: 6)) == (5, 6)  # no place: not kept
    assert [kept.of("none", lambda: made.append(9)) for _ in range(2)] == [None, None]
    assert made[-2:] == [1, 9]

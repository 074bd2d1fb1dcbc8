"""Launching again without Triton's launcher: keys tell apart what Triton specializes on, and hooks are never passed by.

No card is needed: Triton's own binder says what it specializes on, and a driver that launches nothing takes its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
EDGES = [edge + step for edge in (0, 1 << 31, 1 << 32, 1 << 63) for step in (-16, -1, 0, 1, 16)]


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


KERNELS = [jitted(name) for name in ("quantize_kernel", "dequantize_kernel", "lay_out_kernel")]


def binder(kernel: Any) -> Any:
    """What Triton makes of a list of arguments, the specialization of each second."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    return jit.create_function_from_signature(kernel.signature, kernel.params, backend)


def tensors() -> st.SearchStrategy[torch.Tensor]:
    step = st.sampled_from([0, 4, 8, 16, 32, 48, 64, 256, 512])
    return st.tuples(st.sampled_from(DTYPES), step).map(lambda pair: SPACE[pair[1] : pair[1] + 64].view(pair[0]))


NUMBERS = st.one_of(
    st.sampled_from(EDGES), st.integers(-64, 64), st.integers(-(1 << 63), (1 << 64) - 1), st.integers(0, 512)
)
VALUES = st.one_of(st.none(), tensors(), NUMBERS, st.floats(), st.booleans())
CONSTANTS = st.one_of(st.none(), st.booleans(), st.integers(0, 4096))


def near(value: Any) -> st.SearchStrategy[Any]:
    """Values of the same type; tensors of the same dtype at other addresses."""
    if isinstance(value, torch.Tensor):
        return st.sampled_from([0, 4, 8, 16, 32, 64]).map(lambda step: SPACE[step : step + 64].view(value.dtype))
    return NUMBERS if type(value) is int else VALUES


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """A kernel and two lists of arguments, which differ in one or two of them, rarely in a constant."""
    kernel = KERNELS[draw(st.integers(0, len(KERNELS) - 1))]
    first = [draw(CONSTANTS if parameter.is_constexpr else VALUES) for parameter in kernel.params]
    second = list(first)
    for i in draw(st.lists(st.integers(0, len(first) - 1), min_size=1, max_size=2)):
        if not kernel.params[i].is_constexpr:
            second[i] = draw(near(first[i]))
        elif draw(st.integers(0, 9)) == 0:
            second[i] = draw(CONSTANTS)
    return kernel, tuple(first), tuple(second)


@settings(max_examples=200, deadline=None)
@given(pairs())
def test_equal_keys_mean_equal_specializations(case: tuple[Any, tuple[Any, ...], tuple[Any, ...]]) -> None:
    """Types of all arguments, constants and divisibility are those that Triton's binder finds."""
    kernel, *lists = case
    split = sum(not parameter.is_constexpr for parameter in kernel.params)
    assert not any(parameter.is_constexpr for parameter in kernel.params[:split])
    (first, _), (second, _) = (direct.key(args, split) for args in lists)
    assert first is not None
    hash(tuple(first))
    if first == second:
        bind = binder(kernel)
        specializations = [bind(*args)[1] for args in lists]
        assert specializations[0] == specializations[1]


def test_every_pair_of_a_pool_of_arguments() -> None:
    """All types, with addresses and numbers on both sides of everything that Triton looks at."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    views = [SPACE[step : step + 64].view(dtype) for step in (0, 4, 8, 16, 32, 48, 256) for dtype in DTYPES]
    pool = [None, True, False, 0.0, 1.0, float("nan"), *views, *EDGES, *(-edge for edge in EDGES[:12])]
    found: dict[Any, Any] = {}
    for value in pool:
        special = jit.native_specialize_impl(backend, value, False, True, True)
        key, _ = direct.key((value,), 1)
        assert key is not None
        assert found.setdefault(tuple(key), special) == special, value
    assert len(found) == len(set(found.values()))


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (32, 48, True),
        (3, 5, True),
        (0, 16, True),
        (1, 3, False),
        (16, 17, False),
        (1 << 31, 16, False),
        (-(1 << 31), 16, True),
        (True, 1, False),
        (1.0, 1, False),
        (1.0, 2.0, True),
        (None, 0, False),
        (SPACE, SPACE[16:], True),
        (SPACE, SPACE[8:], False),
        (SPACE, SPACE.view(torch.float32), False),
    ],
)
def test_keys_are_no_finer_than_they_must_be(one: Any, other: Any, equal: bool) -> None:
    """Sizes that change from call to call find one kernel."""
    assert (direct.key((one,), 1)[0] == direct.key((other,), 1)[0]) is equal


def test_arguments_that_have_no_key() -> None:
    assert direct.key(((1, 2),), 1)[0] is None


def test_a_triton_that_specializes_on_more_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    target, real = GPUTarget("cuda", 90, 32), jit.native_specialize_impl
    assert direct.tells_apart(target)

    def finer(backend: Any, arg: Any, *flags: bool) -> Any:
        kind, special = real(backend, arg, *flags)
        return kind, f"{special}S" if isinstance(arg, int) and arg % 32 == 0 else special

    monkeypatch.setattr(jit, "native_specialize_impl", finer)
    assert not direct.tells_apart(target)

    def finer_of_addresses(backend: Any, arg: Any, *flags: bool) -> Any:
        kind, special = real(backend, arg, *flags)
        return kind, f"{special}S" if isinstance(arg, torch.Tensor) and arg.data_ptr() % 64 == 0 else special

    monkeypatch.setattr(jit, "native_specialize_impl", finer_of_addresses)
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
    monkeypatch.setattr(direct, "_launches", {})
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


def test_a_second_launch_is_direct(launches: Any) -> None:
    """It launches what the first one compiled, with addresses in place of tensors, on the current stream."""
    kernel, calls, ordinary = launches
    for m in (64, 64, 32):
        direct.run(kernel, (4,), arguments(m=m), 8, None)
    assert len(ordinary) == 1
    assert [name for name, _ in calls] == [calls[0][0]] * 3
    first, second, third = (given for _, given in calls)
    assert second[:4] == first[:4] == (4, 1, 1, 7)
    assert second[4:6] == first[4:6]
    assert second[6:9] == (None, None, None)
    assert list(second[9:]) == [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments(m=64)]
    assert third[9:] != second[9:]


def test_constants_can_be_given_apart(launches: Any) -> None:
    """It is the same launch, and finds what the other way has compiled."""
    kernel, calls, ordinary = launches
    args = arguments()
    split = sum(not parameter.is_constexpr for parameter in kernel.params)
    constants = direct.Constants(args[split:])
    assert hash(constants) == hash(args[split:])
    direct.run(kernel, (4,), args[:split], 8, None, constants)
    direct.run(kernel, (4,), args[:split], 8, None, constants)
    direct.run(kernel, (4,), args, 8)
    assert len(ordinary) == 1
    assert calls[1] == calls[2]
    assert list(calls[1][1][9:]) == [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]


def test_what_triton_compiles_anew_is_launched_anew(launches: Any) -> None:
    """Another alignment, another size's class, another tile, other options: as many kernels as Triton makes."""
    kernel, calls, ordinary = launches
    variants = [
        (arguments(), 8, None),
        (arguments(offset=8), 8, None),
        (arguments(m=63), 8, None),
        (arguments(tile=32), 8, None),
        (arguments(), 4, None),
        (arguments(), 8, 168),
    ]
    for _ in range(3):
        for args, warps, registers in variants:
            direct.run(kernel, (4,), args, warps, registers)
    assert len(ordinary) == len(variants)
    names = [name for name, _ in calls]
    assert len(set(names)) == len(variants)
    assert names == names[: len(variants)] * 3


@pytest.mark.parametrize("bound", [False, True])
def test_launches_are_on_the_card_of_their_tensors(launches: Any, monkeypatch: pytest.MonkeyPatch, bound: bool) -> None:
    """Whichever is the current one, which it is again after: each card has its own kernel, and its own stream."""
    kernel, calls, ordinary = launches
    (args, constants), entered = bound_and_args(), []
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
    for module in (direct, launch_plan):
        monkeypatch.setattr(module, "current_card", lambda: drivers.card)
    ran: dict[int, Any] = {}
    for card in (1, 0, 1, 0):
        monkeypatch.setattr(direct, "card_of", lambda _, card=card: card)
        if card not in ran:
            ran[card] = bound_to(kernel, args, constants)
        if bound:
            ran[card](*tensors_of(args))
        else:
            direct.run(kernel, (4,), args, 8, None, constants)
        assert drivers.card == 0
    assert entered == [1, 1]
    assert len(ordinary) == 2
    assert [given[3] for _, given in calls] == [8, 7, 8, 7]
    functions = [given[4] for _, given in calls]
    assert functions[:2] == functions[2:]
    assert functions[0] != functions[1]


def test_a_kernel_with_another_tile_function_is_another(launches: Any) -> None:
    kernel, calls, _ = launches
    for _ in range(2):
        direct.run(kernel, (4,), arguments(), 8)
        direct.run(kernel, (4,), arguments(quantize=another_tile), 8)
    assert [given[4] for _, given in calls[:2]] == [given[4] for _, given in calls[2:]]
    assert calls[0][1][4] != calls[1][1][4]


def test_hooks_see_every_launch(launches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's own, and a profiler's, set as Triton lets them be: a chain with calls, or a function."""
    kernel, _, ordinary = launches
    direct.run(kernel, (4,), arguments(), 8)
    seen: list[Any] = []
    kernel.add_pre_run_hook(lambda *_, **__: seen.append("own"))
    direct.run(kernel, (4,), arguments(), 8)
    kernel.pre_run_hooks.clear()
    chain = knobs.HookChain()
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", chain)
    direct.run(kernel, (4,), arguments(), 8)
    assert (len(ordinary), seen) == (2, ["own"])
    chain.add(lambda _: None)
    direct.run(kernel, (4,), arguments(), 8)
    assert len(ordinary) == 3
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", None)
    monkeypatch.setattr(knobs.runtime, "launch_exit_hook", lambda _: None)
    direct.run(kernel, (4,), arguments(), 8)
    assert len(ordinary) == 4


def test_the_ordinary_way_where_direct_launches_are_not_known(launches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, calls, ordinary = launches
    monkeypatch.setattr(direct, "supported", lambda: False)
    for _ in range(3):
        direct.run(kernel, (4,), arguments(), 8)
    assert len(ordinary) == len(calls) == 3


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


def bound_and_args() -> tuple[tuple[Any, ...], direct.Constants]:
    args = arguments()
    split = sum(not parameter.is_constexpr for parameter in jitted("quantize_kernel").params)
    return args[:split], direct.Constants(args[split:])


def bound_to(
    kernel: Any, args: tuple[Any, ...], constants: direct.Constants, stays: Sequence[torch.Tensor] = ()
) -> LaunchPlan:
    return LaunchPlan.of(kernel, direct.Arguments((4,), args, 8, None, constants), stays)


def tensors_of(args: tuple[Any, ...]) -> list[torch.Tensor]:
    return [arg for arg in args if isinstance(arg, torch.Tensor)]


def test_a_bound_launch_gets_tensors_alone(launches: Any) -> None:
    """It launches what `run` launches with the same arguments; the first one compiles."""
    kernel, calls, ordinary = launches
    args, constants = bound_and_args()
    bound = bound_to(kernel, args, constants)
    direct.run(kernel, (4,), args, 8, None, constants)
    for _ in range(3):
        bound(*tensors_of(args))
    assert len(ordinary) == 1
    assert calls[1] == calls[2] == calls[3]
    other = [SPACE[256 + 16 * index :][: tensor.numel()] for index, tensor in enumerate(tensors_of(args))]
    bound(*other)
    addresses = iter(tensor.data_ptr() for tensor in other)
    expected = [next(addresses) if isinstance(arg, torch.Tensor) else arg for arg in args]
    assert list(calls[4][1][9:]) == [*expected, *constants]
    with pytest.raises(ValueError, match=f"for {len(other)} tensors was given {len(other) + 1}"):
        bound(*tensors_of(args), SPACE)


def test_a_bound_launch_keeps_a_tensor(launches: Any) -> None:
    """Its address is the same in each launch, and it is as no argument of calls."""
    kernel, calls, ordinary = launches
    args, constants = bound_and_args()
    kept = tensors_of(args)[-1]
    bound = bound_to(kernel, args, constants, [kept])
    for _ in range(3):
        bound(*tensors_of(args)[:-1])
    assert len(ordinary) == 1
    expected = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
    assert [list(one[9:]) for _, one in calls[1:]] == [[*expected, *constants]] * 2


def test_a_bound_launch_at_another_alignment_compiles_anew(launches: Any) -> None:
    kernel, calls, ordinary = launches
    args, constants = bound_and_args()
    bound, tensors = bound_to(kernel, args, constants), tensors_of(args)
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
    args, constants = bound_and_args()
    bound, (first, *others) = bound_to(kernel, args, constants), tensors_of(args)
    other = torch.int32 if first.itemsize == 4 else torch.int8
    bound(first, *others)
    bound(first.view(other), *others)
    assert len(ordinary) == 1
    bound(SPACE[4 : 4 + first.nbytes].view(other), *others)
    bound(SPACE[4 : 4 + first.nbytes].view(first.dtype), *others)
    assert len(ordinary) == 2


@pytest.mark.parametrize("what", ["hook", "debug"])
def test_a_bound_launch_passes_nothing_by(launches: Any, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Hooks that a profiler sets later, and options that are changed later."""
    kernel, _, ordinary = launches
    args, constants = bound_and_args()
    bound = bound_to(kernel, args, constants)
    bound(*tensors_of(args))
    bound(*tensors_of(args))
    assert len(ordinary) == 1
    if what == "hook":
        monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda *_: None)
    else:
        monkeypatch.setattr(knobs.runtime, "debug", True)
    bound(*tensors_of(args))
    assert len(ordinary) == 2


def test_plans_that_are_kept_are_bounded() -> None:
    """The newer half stays. What has no plan is asked once."""
    kept, made = plans.Plans(4), list[int]()
    for index in (0, 0, 1, 2, 3, 4, 3, 1):
        assert kept.of(index, lambda index=index: (made.append(index), index)[1]) == index  # type: ignore[misc]
        assert len(kept) <= 4
    assert made == [0, 1, 2, 3, 4, 1]
    assert kept.at(None, lambda: 5) is None
    assert [kept.of("none", lambda: made.append(9)) for _ in range(2)] == [None, None]
    assert made[-2:] == [1, 9]

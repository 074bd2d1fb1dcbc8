"""What torch.compile, make_fx and fake tensors see of a recipe: operators, whose bytes are those of eager calls."""

from __future__ import annotations

import gc
import importlib
import pickle
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import product_modes
import pytest
import torch
from numpy_models import SPECS, recipe
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from weight_recipes import ALL_PAIRS, KINDS

import layoutc
from layoutc.build.pipeline import compile_spec
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.weight import flattening, operators
from layoutc.spec.checks.read import read_spec

OPERATORS = torch.ops.layoutc


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def weight(name: str, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A weight of so many of the recipe's units."""
    layout = recipe(name).LAYOUT
    shape = rows * max(layout.multiple_m, 4), columns * max(layout.multiple_k, 4)
    return (torch.randn(shape, generator=torch.Generator().manual_seed(rows)) * 3).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.shape, a.dtype, a.device.type) != (b.shape, b.dtype, b.device.type):
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def around(name: str) -> Callable[[torch.Tensor], tuple[Any, torch.Tensor, torch.Tensor]]:
    """Arithmetic, quantize, dequantize, arithmetic; and the quantized tensor itself."""

    quantize = recipe(name).quantize

    def there_and_back(x: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
        q = quantize(x * 2)
        return q, q.dequantize(), q.dequantize(torch.float32).neg()

    return there_and_back


def check_compiled(name: str, backend: Any, dynamic: bool | None) -> None:
    function = around(name)
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    for x in (weight(name, 2, 3), weight(name, 3, 5, torch.bfloat16)):
        made, expected = compiled(x), function(x)
        assert type(made[0]) is type(expected[0])
        assert made[0].planes().keys() == expected[0].planes().keys()
        for plane, stored in expected[0].planes().items():
            assert same(made[0].planes()[plane], stored), plane
        assert same(made[1], expected[1])
        assert same(made[2], expected[2])
        assert all(same(made[0].buffers()[n], buffer) for n, buffer in expected[0].buffers().items())


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", KINDS)
def test_nothing_of_quantize_is_left_for_inductor_to_divide(name: str) -> None:
    """Its division on a card is not IEEE's. Levels that a weight stores in place of its amax are quotients."""
    quantize = recipe(name).quantize
    graph = make_fx(lambda x: list(quantize(x).planes().values()))(weight(name, 2, 2))
    assert not [node for node in graph.graph.nodes if "div" in str(node.target) or "reciprocal" in str(node.target)]


# Formulas of sizes, and fixed sizes, each compiled for anew. test_traced_by_make_fx traces all kinds with formulas.
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "dynamic"),
    [("fp8_block", True), ("int4_group32", True), ("mxfp8", True), ("mxfp6_e2m3", False), ("nvfp4", False)],
)
def test_compiled_calls_give_the_bytes_of_eager_calls_in_one_graph(name: str, dynamic: bool) -> None:
    """With sizes that change between calls."""
    counter = CompileCounterWithBackend("aot_eager")
    check_compiled(name, counter, dynamic)
    targets = {node.target for graph in counter.graphs for node in graph.graph.nodes}
    assert OPERATORS.quantize.default in targets


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "mxfp8", "nvfp4"] if ALL_PAIRS else ["nvfp4"])
def test_inductor_gives_the_bytes_of_eager_calls(name: str) -> None:
    check_compiled(name, "inductor", None)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", KINDS)
def test_traced_by_make_fx(name: str) -> None:
    """The graph holds operators in place of arithmetic, and run again it gives the same bytes, at other sizes too."""

    def everything(x: torch.Tensor) -> list[torch.Tensor]:
        q = recipe(name).quantize(x)
        return [*q.planes().values(), *q.buffers().values(), q.dequantize()]

    for mode in ("real", "symbolic"):
        graph = make_fx(everything, tracing_mode=mode)(weight(name, 2, 3))
        targets = {node.target for node in graph.graph.nodes}
        assert {OPERATORS.quantize.default, OPERATORS.dequantize.default} <= targets
        assert not {t for t in targets if "aten::" in str(t) and ("div" in str(t) or "mul" in str(t))}
        for x in [weight(name, 2, 3)] + ([weight(name, 3, 5)] if mode == "symbolic" else []):
            assert all(map(same, graph(x), everything(x)))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", KINDS)
def test_shapes_and_dtypes_without_values(name: str) -> None:
    """Fake tensors of a card, on a machine that may have none."""
    layout = recipe(name).LAYOUT
    if layout.history and not torch.cuda.is_available():
        pytest.skip("torch slices fake tensors of a card only where it is built for one")
    x = weight(name, 2, 3)
    m, k = x.shape
    with FakeTensorMode():
        q = recipe(name).quantize(torch.empty(m, k, device="cuda", dtype=torch.bfloat16))
        found = {plane: (tuple(t.shape), t.dtype, t.device.type) for plane, t in q.planes().items()}
        assert found == {plane: (*facts, "cuda") for plane, facts in layout.planes(m, k).items()}
        buffers = {buffer: (tuple(t.shape), t.dtype, t.device.type) for buffer, t in q.buffers().items()}
        assert buffers == {buffer: (*facts, "cuda") for buffer, facts in layout.buffers(m, k).items()}
        assert q.dequantize().shape == x.shape
        assert q.dequantize().device.type == "cuda"


def test_an_amax_that_is_not_given_is_among_the_buffers_without_values() -> None:
    x, nvfp4 = weight("nvfp4", 2, 3), recipe("nvfp4")
    with FakeTensorMode():
        given = torch.empty(x.shape, device="cuda")
        made = operators.quantize_buffers(nvfp4.Tensor, given, None, nvfp4.LAYOUT.orientations, False)
    expected = {buffer: (t.shape, t.dtype) for buffer, t in nvfp4.quantize_buffers(x).items()}
    assert {buffer: (t.shape, t.dtype) for buffer, t in made.items()} == expected


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", KINDS)
def test_operators_keep_their_contracts(name: str) -> None:
    """torch.library's own checks: schema, aliases, fake against real, autograd registration, tracing."""
    layout, cls = recipe(name).LAYOUT, recipe(name).Tensor
    x = weight(name, 2, 3)
    (m, k), every = x.shape, list(layout.orientations)
    amax = cls.shared_amax(x) if layout.shares_amax else None
    planes = recipe(name).quantize(x).planes()
    named = [planes[plane] for plane in planes if any(plane in layout.sources[o] for o in every)]
    check = torch.library.opcheck
    check(OPERATORS.quantize.default, (x, amax, cls.KEY, every))
    quick = ("test_schema", "test_faketensor")  # other arguments of an operator that is registered and traced
    check(OPERATORS.quantize.default, (x.t().contiguous().t(), amax, cls.KEY, every[:1]), test_utils=quick)
    check(OPERATORS.lay_out.default, (named, m, k, cls.KEY, every, False))
    if cls.LAYOUT.swizzled:
        check(OPERATORS.lay_out.default, (named, m, k, cls.KEY, every, True), test_utils=quick)
    for orientations, swizzled in [(every, False), (every[:1], False), (every[-1:], bool(layout.swizzled))]:
        for given in {id(one): one for one in (amax, None)}.values():
            for typed in (False, True):
                args = (x, given, cls.KEY, orientations, swizzled, typed)
                check(OPERATORS.quantize_buffers.default, args, test_utils=quick)
    if layout.shares_amax:
        check(OPERATORS.shared_amax.default, (x, cls.KEY))
    for orientation in every:
        held = [planes[plane] for plane in layout.sources[orientation]]
        check(OPERATORS.dequantize.default, (held, m, k, cls.KEY, orientation, torch.bfloat16))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_layer_and_its_gradients(backend: str) -> None:
    """The weight is dequantized by an operator in both passes, and every gradient is that of eager."""
    import layoutc

    def layer() -> torch.nn.Module:
        torch.manual_seed(0)
        made = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False), torch.nn.Linear(32, 64, bias=False))
        layoutc.quantize_(made, "nvfp4")
        return made

    x = torch.randn(8, 64)
    results = []
    for make in (lambda m: m, lambda m: torch.compile(m, backend=backend, fullgraph=True)):
        module, given = layer(), x.clone().requires_grad_()
        make(module)(given).square().sum().backward()
        results.append([given.grad, *(p.grad for p in module.parameters())])
    for eager, compiled in zip(*results, strict=True):
        assert eager is not None
        assert compiled is not None
        torch.testing.assert_close(compiled, eager)


def test_quantizing_into_a_tensor_inside_a_compiled_function() -> None:
    """Traced, it is functional, and then copied into the planes that were given."""
    nvfp4 = recipe("nvfp4")

    def write(x: torch.Tensor, target: Any) -> Any:
        target.copy_(x)
        return target.dequantize()

    target, expected = (nvfp4.quantize(torch.zeros(32, 64)) for _ in range(2))
    x = weight("nvfp4", 2, 4)
    assert same(torch.compile(write, backend="aot_eager", fullgraph=True)(x, target), write(x, expected))
    assert all(same(target.planes()[plane], stored) for plane, stored in expected.planes().items())


class Recorder(TorchDispatchMode):
    """What is called under it, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """And calls that nobody traces don't go through the dispatcher."""
    x = weight("nvfp4", 2, 3)
    with Recorder() as recorder:
        expected = recipe("nvfp4").quantize(x)
        expected.buffers()
    assert {"layoutc.quantize.default", "layoutc.shared_amax.default", "layoutc.lay_out.default"} <= set(recorder.names)
    assert not [name for name in recorder.names if "div" in name]
    for name in ("_quantize", "_quantize_buffers", "_dequantize", "_lay_out", "_shared_amax"):
        monkeypatch.setattr(operators, name, lambda *_: pytest.fail("an eager call went through the dispatcher"))
    made = recipe("nvfp4").quantize(x)
    made.buffers()
    made.dequantize()
    assert all(same(made.planes()[plane], stored) for plane, stored in expected.planes().items())


def build(folder: Path, text: str) -> None:
    spec, found = read_spec(text, "mxfp8.yaml")
    assert spec is not None, found
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in compile_spec(spec, "0" * 64).items():
        (folder / name).write_text(content, encoding="utf-8")


def load(name: str) -> ModuleType:
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]
    importlib.invalidate_caches()
    return importlib.import_module(name)


def test_two_builds_of_a_recipe_answer_for_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under two names; and again under one name, with another layout: a graph keeps to the layout that it was traced
    with, and the same layout, imported again, is found under its key."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    text = (SPECS / "mxfp8.yaml").read_text(encoding="utf-8")
    build(tmp_path / "built_one", text)
    build(tmp_path / "built_two", text)
    one, two = load("built_one"), load("built_two")
    assert len({one.Tensor.KEY, two.Tensor.KEY, recipe("mxfp8").Tensor.KEY}) == 3
    x = weight("mxfp8", 2, 3)
    first = make_fx(lambda x: list(one.quantize(x).planes().values()), tracing_mode="symbolic")(x)
    expected = first(x)
    changed = text.replace("round: up", "round: down")
    assert changed != text
    build(tmp_path / "built_one", changed)
    other = load("built_one")
    assert other.Tensor.KEY != one.Tensor.KEY
    second = make_fx(lambda x: list(other.quantize(x).planes().values()), tracing_mode="symbolic")(x)
    assert all(map(same, first(x), expected))
    assert not all(map(same, second(x), expected))
    build(tmp_path / "built_one", text)
    again = load("built_one")
    assert again.Tensor is not one.Tensor
    assert again.Tensor.KEY == one.Tensor.KEY
    assert all(map(same, first(x), expected))


def test_a_recipe_that_is_not_there() -> None:
    with pytest.raises(LayoutError, match="this process has no recipe nowhere 123: import its package"):
        OPERATORS.quantize(torch.zeros(32, 32), None, "nowhere 123", ["rowwise"])


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "count"), [("nvfp4", 2), ("fp8_delayed", 2), ("mxfp8", 1)])
def test_buffers_are_compiled_in_one_graph(name: str, count: int) -> None:
    """quantize_buffers is a function, whose dict dynamo lets out, while it breaks its graph at Tensor.buffers.

    Buffers that are the same plane leave the operator once: fp8_delayed has one scale for both orientations.
    """
    swizzled, orientations = bool(recipe(name).LAYOUT.swizzled), recipe(name).LAYOUT.orientations[-count:]
    quantize_buffers = recipe(name).quantize_buffers

    def function(x: torch.Tensor) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = quantize_buffers(x * 2, swizzled=swizzled, orientations=orientations)
        return made

    x = weight(name, 4, 4)
    made, expected = torch.compile(function, backend="aot_eager", fullgraph=True)(x), function(x)
    assert list(made) == list(expected)
    assert all(same(made[buffer], expected[buffer]) for buffer in expected)


@pytest.mark.parametrize("way", ["quantize_", "cast_on_gather_"])
def test_graphs_of_another_spec_or_runtime_are_cached_apart(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """What a weight is multiplied with changes no layout id, and how graphs are traced changes no spec."""
    layer = torch.nn.Linear(64, 64, bias=False)
    getattr(layoutc, way)(layer, "nvfp4")
    layout = layer.weight.LAYOUT  # type: ignore[attr-defined]
    hashes = {layer.weight._stable_hash_for_caching()}  # type: ignore[operator]
    with monkeypatch.context() as patch:
        patch.setattr(flattening, "GRAPHS", 0)
        hashes.add(layer.weight._stable_hash_for_caching())  # type: ignore[operator]
    shipped = layout.products
    object.__setattr__(layout, "products", shipped._replace(gradient=("nvfp4_1d", "0123456789ab")))
    try:
        hashes.add(layer.weight._stable_hash_for_caching())  # type: ignore[operator]
    finally:
        object.__setattr__(layout, "products", shipped)
    assert len(hashes) == 3


def test_compiled_graphs_call_what_operators_run() -> None:
    """Not the operators, which C++ and Python would call in turn; the values are those of eager calls."""
    from torch._inductor.utils import run_and_get_code

    layer = torch.nn.Linear(128, 128, bias=False)
    layoutc.quantize_(layer, "nvfp4")
    x = torch.randn(4, 128)
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(layer, fullgraph=True)
        out, (code,) = run_and_get_code(lambda: compiled(x).detach())
    assert torch.equal(out, layer(x))
    assert "torch.ops.layoutc.run_dequantize(" in code
    assert "torch.ops.layoutc.dequantize.default(" not in code


def test_flattening_follows_what_a_weight_holds() -> None:
    """What it was flattened to is kept until it holds other planes, which it does not keep alive."""
    layer = torch.nn.Linear(64, 64, bias=False)
    layoutc.quantize_(layer, "nvfp4")
    weight: Any = layer.weight
    names, context = weight.__tensor_flatten__()
    assert weight.__tensor_flatten__() == (names, context)
    assert weight.__tensor_flatten__()[1] is context
    assert [getattr(weight, name) for name in names] == list(weight.store.planes.values())
    with product_modes.products("reference"):
        assert weight.__tensor_flatten__()[1] != context
    assert weight.__tensor_flatten__()[1] == context
    old = weakref.ref(weight.store.planes["rowwise_data"])
    weight.data = recipe("nvfp4").quantize(torch.randn(128, 32))
    gc.collect()
    assert old() is None
    assert weight.__tensor_flatten__()[1].matrix == (128, 32)
    for name in ("plane_handle", "plane_columnwise_data"):  # of weights that are gathered anew; of other recipes
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(weight, name)
    weight.handle = "a user's own"
    assert weight.__tensor_flatten__()[0] == names


@pytest.mark.parametrize("name", KINDS)
def test_planes_and_a_shape_make_a_tensor(name: str) -> None:
    """Of matrices, too, without their number of rows."""
    layout = recipe(name).LAYOUT
    made = recipe(name).quantize(torch.randn(2, layout.multiple_m, 2 * layout.multiple_k))
    again = type(made)(dict(made.planes()), made.shape)
    assert again.store.matrix == made.store.matrix == layout.check_shape(made.shape)
    assert again.store.stack == made.store.stack
    assert torch.equal(again.dequantize(), made.dequantize())


@pytest.mark.parametrize("use", [layoutc.quantize_, layoutc.cast_on_gather_])
def test_compiled_code_reads_what_eager_code_reads_of_a_weight(use: Callable[..., Any]) -> None:
    """torch.compile takes no attribute for None in a tensor whose class has __getattr__ (torch 2.11 to 2.14)."""
    model = torch.nn.Linear(256, 256)
    use(model, "fp8_current")
    model.weight.scale_of_rank = None  # as trainers mark parameters

    def marked(x: torch.Tensor) -> torch.Tensor:
        return x + (1 if model.weight.scale_of_rank is None else 2)

    compiled = torch.compile(marked, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)) == marked(torch.zeros(1)) == 1


@pytest.mark.parametrize("name", KINDS)
def test_compiled_buffers(name: str) -> None:
    """The graph breaks at a method that returns a dict; what is left gives the same buffers, and of many weights."""

    def lay_out(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return recipe(name).quantize(x * 2).buffers()  # type: ignore[no-any-return]

    def lay_out_all(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return layoutc.buffers_of([recipe(name).quantize(x * 2)])[0]

    x = weight(name, 2, 3)
    torch.manual_seed(0)
    expected = lay_out(x)
    for function in (lay_out, lay_out_all):
        torch.manual_seed(0)
        made = torch.compile(function, backend="eager")(x)
        assert list(made) == list(expected)
        assert all(same(made[buffer], expected[buffer]) for buffer in expected)


def test_what_graphs_of_any_shape_return_has_the_sizes_of_its_call() -> None:
    """Stacks with an amax for each matrix: a size that the graph left open is no part of what it returns."""
    quantize = recipe("nvfp4_modelopt_experts").quantize
    compiled = torch.compile(lambda x: quantize(x * 2), backend="aot_eager", dynamic=True)
    for shape in ((2, 128, 256), (3, 512, 256), (2, 384, 512)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        made, expected = pickle.loads(pickle.dumps(compiled(x))), quantize(x * 2)
        assert same(made[1:].dequantize(), expected[1:].dequantize())

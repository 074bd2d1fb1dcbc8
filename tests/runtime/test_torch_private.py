"""What layoutc relies on of torch's private names: a test for each, which says what a release of torch has changed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.functional import ScalingType, SwizzleType
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from layoutc.runtime import torch_private as private
from layoutc.runtime.errors import LayoutError
from layoutc.runtime.torch_private.fsdp2 import Sharding


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A gloo group of this process."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Seen(TorchDispatchMode):
    """Notes operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Wrapper(torch.Tensor):
    """A wrapper subclass that says which operators reach it."""

    __torch_function__ = private.no_torch_function
    reached: list[str]

    @staticmethod
    def __new__(cls) -> Wrapper:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, (2, 2))
        made.reached = []
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args[0].reached.append((str(func), type(args[0])))
        return torch.zeros(2, 2)


def test_no_torch_function_hands_operators_on_with_the_class() -> None:
    tensor = Wrapper()
    torch.mul(tensor, 2)
    assert tensor.reached == [("aten.mul.Tensor", Wrapper)]


def test_without_torch_function_a_class_is_not_asked() -> None:
    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(func)

    one = torch.ones(2).as_subclass(Asked)
    with private.without_torch_function():
        assert (one.shape, float(torch.sum(one))) == ((2,), 2.0)
    with pytest.raises(AssertionError):
        torch.sum(one)


@pytest.mark.skipif(not private.scaled_mm_on_cpus, reason="needs a torch whose scaled_mm multiplies on CPUs")
def test_scaled_mm_is_the_operator_behind_the_function() -> None:
    """Operands, scales, kinds and orders of scales for each side; bias, dtype, contracted dims, fast accumulation."""
    codes, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.full((1,), 2.0)
    kind, order = [ScalingType.TensorWise.value], [SwizzleType.NO_SWIZZLE.value]
    made = private.scaled_mm(
        codes, codes.t(), [scale], kind, order, [scale], kind, order, None, torch.bfloat16, [], False
    )
    by_function = torch.nn.functional.scaled_mm(
        codes, codes.t(), scale, ScalingType.TensorWise, scale, ScalingType.TensorWise, output_dtype=torch.bfloat16
    )
    assert torch.equal(made, by_function)
    assert float(made[0, 0]) == 64
    of_tensors = private.scaled_mm_of_tensors(codes, codes.t(), scale, scale, None, None, torch.bfloat16, False)
    assert torch.equal(made, of_tensors)


def test_scaled_grouped_mm_checks_what_cards_check() -> None:
    """Operands, scales, offsets, bias, scale of the result, dtype, fast accumulation; the second as the function."""
    codes = torch.empty(32, 16, dtype=torch.float8_e4m3fn, device="meta")
    experts = torch.empty(2, 48, 16, dtype=torch.float8_e4m3fn, device="meta").transpose(1, 2)
    rows, columns, ends = (torch.empty(*size, device="meta") for size in ((32,), (2, 48), (2,)))
    options = (ends.int(), None, None, torch.bfloat16, True)
    made = private.scaled_grouped_mm(codes, experts, rows, columns, *options)
    assert (made.shape, made.dtype) == ((32, 48), torch.bfloat16)
    with pytest.raises(RuntimeError, match="scale_a"):
        private.scaled_grouped_mm(codes, experts, rows[:-1], columns, *options)
    names = [one.name for one in private.scaled_grouped_mm_v2._schema.arguments]  # type: ignore[attr-defined]
    assert names[2:8] == ["scale_a", "recipe_a", "swizzle_a", "scale_b", "recipe_b", "swizzle_b"]
    assert names[8:] == ["offs", "bias", "out_dtype", "contraction_dim", "use_fast_accum"]
    assert private.scaled_grouped_mm_v2_is_traced == (torch.__version__ >= "2.14")


def test_grouped_mm_is_the_function_that_classes_are_asked_about() -> None:
    seen: list[Any] = []

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    x, w = torch.ones(4, 16), torch.ones(2, 8, 16).as_subclass(Asked).transpose(1, 2)
    seen.clear()
    out = torch.nn.functional.grouped_mm(x, w, offs=torch.tensor([1, 4], dtype=torch.int32))
    assert seen == [private.grouped_mm]
    assert out.shape == (4, 8)


def test_fake_and_functional_tensors_are_what_tracing_hands_over() -> None:
    kinds: list[bool] = []

    @torch.library.custom_op("layoutc_tests::look", mutates_args=())
    def look(x: Tensor) -> Tensor:
        return x.clone()

    @look.register_fake
    def _(x: Tensor) -> Tensor:
        kinds.append(isinstance(x, (private.FakeTensor, private.FunctionalTensor)))
        return x.clone()

    torch.compile(look, backend="aot_eager")(torch.ones(3))
    assert kinds
    assert all(kinds)


def test_dispatch_modes_are_counted() -> None:
    assert private.dispatch_modes() == 0
    with Seen(), Seen():
        assert private.dispatch_modes() == 2


def test_profiling_is_true_while_a_profile_is_recorded() -> None:
    assert not private.profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert private.profiling()
    assert not private.profiling()


def test_in_backward_is_true_for_hooks_and_formulas_alone() -> None:
    found: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: found.append(private.in_backward()))
    assert not private.in_backward()
    x.sum().backward()
    assert found == [True]
    assert not private.in_backward()


def test_writes_that_keep_the_version_leave_saved_tensors_valid() -> None:
    x, factor = torch.ones(2, requires_grad=True), torch.ones(2)
    y = x * factor
    before = factor._version
    with private.keeping_version(factor):
        factor.fill_(3)
    assert factor._version == before
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3]


def test_versions_can_be_reset() -> None:
    x = torch.zeros(2)
    x.fill_(3)
    view = x.view(1, 2)
    assert x._version == view._version == 1
    private.reset_version(view)
    assert x._version == view._version == 0
    assert x.tolist() == [3, 3]


def test_process_groups_have_names(alone: None) -> None:
    group = dist.group.WORLD
    assert group is not None
    assert private.process_group(group.group_name) is group
    with pytest.raises(Exception, match="nobody"):
        private.process_group("nobody")


def test_collectives_on_one_tensor_have_these_names(alone: None) -> None:
    """Or by those that torch 2.11 has for them: all_gather_into_tensor and reduce_scatter_tensor."""
    for collective in (private.all_gather_single, private.reduce_scatter_single):
        collective(into := torch.zeros(2), torch.ones(2))
        assert into.tolist() == [1, 1]


def test_dtensor_runs_functional_collectives_by_these_names(alone: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    with Seen() as seen:
        shard = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        whole = shard.redistribute(placements=[Replicate()]).to_local()
    assert torch.equal(torch.as_tensor(whole), torch.ones(4, 4))
    for name in ("all_gather_into_tensor", "all_gather_into_tensor_coalesced", "wait_tensor", "all_to_all_single"):
        assert callable(getattr(private.c10d_functional, name).default), name
    assert "c10d.scatter_.default" in seen.names
    sent = private.c10d_functional.all_gather_into_tensor(torch.ones(2), 1, dist.group.WORLD.group_name)
    assert private.c10d_functional.wait_tensor(sent).tolist() == [1, 1]


def test_a_functional_collective_waits_when_it_is_used(alone: None) -> None:
    group = dist.group.WORLD
    assert group is not None
    sent = private.c10d_functional.all_gather_into_tensor(torch.ones(2), 1, group.group_name)
    assert (private.AsyncCollectiveTensor(sent) + 1).tolist() == [2, 2]


def test_shards_move_from_dim_to_dim_by_an_operator_of_dtensor(alone: None) -> None:
    moved = private.dtensor_ops.shard_dim_alltoall(torch.ones(2, 2), 0, 1, dist.group.WORLD.group_name)
    assert moved.tolist() == [[1, 1], [1, 1]]


def test_ddp_sends_weights_from_this_function(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`callers` finds its frame on the stack by its code."""
    frames: list[Any] = []

    def sends(*args: Any, **kwargs: Any) -> None:
        import sys

        frame: Any = sys._getframe()
        while frame is not None:
            frames.append(frame.f_code)
            frame = frame.f_back

    monkeypatch.setattr(dist, "_broadcast_coalesced", sends)
    DistributedDataParallel(nn.Linear(2, 2))
    assert private.ddp_sends_weights.__code__ in frames


def test_set_element_makes_what_a_path_names() -> None:
    state: dict[str, Any] = {"model": {"a": 1}}
    private.set_element(state, ("model", "b"), 2)
    private.set_element(state, ("optimizer", "groups", 0), 3)
    assert state == {"model": {"a": 1, "b": 2}, "optimizer": {"groups": [3]}}


def test_lists_of_tensors_are_copied_one_into_another() -> None:
    into = [torch.zeros(2), torch.zeros(3)]
    private.foreach_copy_(into, [torch.ones(2), torch.full((3,), 2.0)])
    assert [tensor.tolist() for tensor in into] == [[1, 1], [2, 2, 2]]


def test_trees_are_mapped_and_flattened() -> None:
    tree = {"a": [1, (2, 3)], "b": None}
    assert private.tree_leaves(tree) == [1, 2, 3, None]
    assert private.tree_map(lambda x: x and x + 1, copy.deepcopy(tree)) == {"a": [2, (3, 4)], "b": None}


def test_inductor_lowers_an_operator_as_it_is_told() -> None:
    """By its own lowerings, of a tensor that can be stored first; one that is lowered already is left as it is.

    To a product, as what surrounds it: Inductor then writes no C++, for which it would first compile its headers.
    """
    torch.library.define("layoutc_test::squared", "(Tensor x) -> Tensor")
    torch.library.register_fake("layoutc_test::squared", torch.empty_like)
    squared: Any = torch.ops.layoutc_test.squared.default  # nothing computes it otherwise

    def lower(lowerings: Any, x: Any) -> Any:
        x.realize()
        return lowerings[torch.ops.aten.mm.default](x, x)

    for _ in range(2):
        private.lower_in_inductor(squared, lower)
    x = torch.randn(5, 5)
    with torch._inductor.config.patch(force_disable_caches=True):
        assert torch.equal(torch.compile(lambda x: squared(x @ x), fullgraph=True)(x), (x @ x) @ (x @ x))


@pytest.mark.thorough
@pytest.mark.parametrize("reuses", [True, False])
def test_inductor_writes_into_what_an_operator_returned_unless_told_not_to(reuses: bool) -> None:
    """The operator gives memory of its own, in which Inductor has the next result once it was read."""
    kept: list[Tensor] = []
    users: list[int] = []
    with torch.library._scoped_library("layoutc_tests", "FRAGMENT") as library:  # type: ignore[attr-defined]
        name = f"held_{reuses}".lower()
        library.define(f"{name}(Tensor x) -> Tensor[]")

        def held(x: Tensor) -> list[Tensor]:
            kept[:] = [x * 2, x * 3]
            return list(kept)

        library.impl(name, held, "CompositeExplicitAutograd")
        torch.library.register_fake(f"layoutc_tests::{name}", lambda x: [x * 1, x * 1], lib=library)
        operator: Any = getattr(torch.ops.layoutc_tests, name).default

        def lower(_: Any, x: Any) -> Any:
            users.append(len(private.lowered_node().users))
            return private.called_in_inductor(operator, x, reuses=reuses)

        private.lower_in_inductor(operator, lower)
        x = torch.randn(2048, 2048)
        with torch._inductor.config.patch(force_disable_caches=True):
            found = torch.compile(lambda x: [one.abs() @ x for one in operator(x)], fullgraph=True)(x)
    assert users[0] >= 1
    assert all(map(torch.equal, found, ((x * 2).abs() @ x, (x * 3).abs() @ x)))
    assert all(map(torch.equal, kept, (x * 2, x * 3))) is not reuses


def test_inductor_writes_a_call_of_a_function_in_the_place_of_an_operator() -> None:
    """Which gets the operator's arguments, and gives what the operator would."""
    from torch._inductor.utils import run_and_get_code

    seen: list[tuple[Any, ...]] = []
    with torch.library._scoped_library("layoutc_tests", "DEF") as library:  # type: ignore[attr-defined]
        schema = "halves(Tensor[] xs, str text, int[] sizes, ScalarType dtype, bool flag=False) -> Tensor[]"
        library.define(schema)

        def halves(xs: list[Tensor], *others: Any, flag: bool) -> list[Tensor]:
            seen.append((*others, flag))
            return [x / 2 for x in xs]

        library.impl("halves", halves, "CompositeExplicitAutograd")
        torch.library.register_fake("layoutc_tests::halves", lambda xs, *_: [x * 1 for x in xs], lib=library)
        torch.ops.layoutc_tests.run_halves = halves
        private.call_in_inductor("torch.ops.layoutc_tests.halves.default", "torch.ops.layoutc_tests.run_halves")
        x = torch.randn(5, 5)
        with torch._inductor.config.patch(force_disable_caches=True):
            compiled = torch.compile(
                lambda x: torch.ops.layoutc_tests.halves([x @ x, x], "it's", [1, 2], torch.float32), fullgraph=True
            )
            found, codes = run_and_get_code(lambda: compiled(x))
    assert "torch.ops.layoutc_tests.run_halves(" in codes[0]
    assert "torch.ops.layoutc_tests.halves.default(" not in codes[0]
    assert torch.equal(found[0], x @ x / 2)
    assert torch.equal(found[1], x / 2)
    assert seen == [("it's", [1, 2], torch.float32, False)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_current_stream_has_a_number() -> None:
    with torch.cuda.stream(stream := torch.cuda.Stream()):
        assert private.raw_stream(torch.cuda.current_device()) == stream.cuda_stream
    assert private.raw_stream(0) == torch.cuda.current_stream(0).cuda_stream


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_current_stream_has_a_key_by_which_it_is_set() -> None:
    before, other = torch.cuda.current_stream(), torch.cuda.Stream()
    assert private.current_card() == torch.cuda.current_device()
    assert private.stream_key(other.device_index) == (before.stream_id, before.device_index, before.device_type)
    private.set_stream((other.stream_id, other.device_index, other.device_type))
    assert torch.cuda.current_stream() == other
    private.set_stream((before.stream_id, before.device_index, before.device_type))
    assert torch.cuda.current_stream() == before


def test_what_is_recorded_inside_is_computed_in_backward() -> None:
    """A copy of an input takes as many bytes as the input: here the copy is made in backward, not kept."""
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(w)
            return x * w.sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            (w,) = ctx.saved_tensors
            with private.computed_in_backward():
                flipped = w.flip(0)
            return grad * flipped, None

    graphs: list[str] = []
    note: Any = lambda graph, _: graphs.append(graph.code) or graph  # noqa: E731
    x, w = torch.randn(8, requires_grad=True), torch.randn(8)
    with private.computed_in_backward():  # nothing is recorded: nothing happens
        expected = w.flip(0)
    traced = aot_function(Scale.apply, note, note, min_cut_rematerialization_partition)
    traced(x, w).sum().backward()
    assert ["flip" in code for code in graphs] == [False, True]
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_transforms_are_seen_inside_of_them_alone() -> None:
    inside: list[object] = []

    def function(x: Tensor) -> Tensor:
        inside.append(private.transform())
        return x.sum()

    assert private.transform() is None
    torch.func.grad(function)(torch.ones(2))
    torch.func.vmap(function)(torch.ones(2, 2))
    assert private.transform() is None
    assert len(inside) == 2
    assert None not in inside


def test_each_name_has_a_test() -> None:
    """By its name, in the text of a test. Of the package's own: its modules, once imported, are attributes as well."""
    text = Path(__file__).read_text(encoding="utf-8")
    own = {
        name
        for name, value in vars(private).items()
        if name.isidentifier() and not name.startswith("_") and not isinstance(value, ModuleType)
        if name not in ("annotations", "Any", "Tensor", "DTensor", "attrgetter", "cache", "wraps")
        if name not in ("Callable", "AbstractContextManager", "Iterator", "Mapping", "contextmanager")
    }
    assert {name for name in own if f"private.{name}" not in text} == set()


def test_what_is_left_to_fsdp2_is_said_once_for_each_reason() -> None:
    with pytest.warns(
        RuntimeWarning, match=r"a\.weight: FSDP2's own steps gather this weight .* because it is on another card"
    ):
        private.say_left("a.weight", "it is on another card")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private.say_left("b.weight", "it is on another card")


def test_foreach_maximum_takes_the_larger_of_each() -> None:
    ones, others = [torch.tensor([1.0, 5.0]), torch.tensor([2.0])], [torch.tensor([3.0, 4.0]), torch.tensor([-2.0])]
    found = private.foreach_maximum(ones, others)
    assert [one.tolist() for one in found] == [[3.0, 5.0], [2.0]]


def test_names_that_torch_has_changed_are_said_once_for_each_text() -> None:
    assert private.changed({"a": True, "b": False, "c": False}) == "b, c"
    with pytest.warns(RuntimeWarning, match="has changed b, c of FSDP2, so gathers take FSDP2's own steps"):
        private.say_changed("b, c", "gathers")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private.say_changed("b, c", "gathers")


@pytest.mark.usefixtures("alone")
def test_ranks_count_the_collectives_of_a_group_and_share_a_store() -> None:
    group: Any = dist.group.WORLD
    before = private.collectives_so_far(group)
    dist.broadcast(torch.zeros(1), 0)
    assert private.collectives_so_far(group) == before + 1
    later = dist.new_group([0], timeout=timedelta(hours=2))
    assert isinstance(later, dist.ProcessGroup)
    assert private.timeout_of(later) == timedelta(hours=2)
    store = private.store_of_all()
    assert not store.check(["layoutc/a word"])
    store.set("layoutc/a word", "")
    assert store.check(["layoutc/a word"])


class Twice(torch.autograd.Function):
    """2 x, whose gradient says what forward was told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        """x, doubled."""
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Of x."""
        return grad * ctx.factor * ctx.saved_tensors[0], None


def test_a_function_is_applied_without_what_python_does_before() -> None:
    """As `apply` does, to leaves and to results, with and without gradients."""
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    found = []
    for apply in (Twice.apply, private.applied(Twice)):
        once, x.grad = apply(x, 5.0), None
        apply(once, 7.0).sum().backward()
        with torch.no_grad():
            assert not apply(x, 1.0).requires_grad
        found.append((once.detach(), type(once.grad_fn).__name__, x.grad))
    assert found[0][1] == found[1][1]
    assert all(torch.equal(found[0][at], found[1][at]) for at in (0, 2))


def test_tensors_of_transforms_are_told_apart_also_when_these_have_ended() -> None:
    kept: list[Tensor] = []

    def square(x: Tensor) -> Tensor:
        kept.append(x)
        assert private.is_wrapped(x)
        return (x**2).sum()

    torch.func.grad(square)(torch.ones(2))
    assert private.is_wrapped(kept[0])
    assert not private.is_wrapped(torch.ones(2))


def test_autocast_is_seen_of_cpus_and_of_cards() -> None:
    assert not private.any_autocast()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert private.any_autocast()
        with torch.autocast("cpu", enabled=False):
            assert not private.any_autocast()
    assert not private.any_autocast()
    torch.set_autocast_enabled("cuda", True)  # as on a card
    try:
        assert private.any_autocast()
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_left_by_compilers() -> None:
    """A compiled function calls what is decorated as eager code does."""
    seen = []

    @private.left_by_compilers
    def left(x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling() or type(x) is not Tensor)
        return x + 1

    assert torch.compile(lambda x: left(x) * 2, backend="eager")(torch.ones(2)).tolist() == [4, 4]
    assert seen == [False]


def test_with_load_hooks() -> None:
    """The hooks and their order are those of torch's own optimizers; a hook may edit its copy, or return another."""
    called: dict[str, list[Any]] = {"torch": [], "ours": []}

    class Ours(torch.optim.SGD):
        @private.with_load_hooks
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.param_groups[0]["lr"] = state_dict["param_groups"][0]["lr"]

    for kind, cls in (("torch", torch.optim.SGD), ("ours", Ours)):
        said, optimizer = called[kind], cls([nn.Parameter(torch.zeros(2))], lr=1.0)

        def edits(optimizer: Any, state: dict[str, Any], said: Any = said) -> None:
            said.append(("edits", optimizer.param_groups[0]["lr"]))
            state["param_groups"] = [{**state["param_groups"][0], "lr": 2.0}]

        def returns(optimizer: Any, state: dict[str, Any], said: Any = said) -> dict[str, Any]:
            said.append(("returns", state["param_groups"][0]["lr"]))
            return {**state, "param_groups": [{**state["param_groups"][0], "lr": 3.0}]}

        optimizer.register_load_state_dict_pre_hook(edits)
        optimizer.register_load_state_dict_pre_hook(returns)
        optimizer.register_load_state_dict_post_hook(lambda one, said=said: said.append(one.param_groups[0]["lr"]))
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        said.append(saved["param_groups"][0]["lr"])
    assert called["ours"] == called["torch"] == [("edits", 1.0), ("returns", 2.0), 3.0, 1.0]


def test_passed_over_by_compilers() -> None:
    """After a break of a graph, what is decorated is not compiled, nor what it calls; others are."""
    compiled: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(next(node.name for node in graph.graph.nodes if node.op == "call_function"))
        return graph.forward

    def called(x: Tensor) -> Tensor:
        return torch.sin(x)

    @private.passed_over_by_compilers
    def left(x: Tensor) -> Tensor:
        return torch.cos(called(x))

    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined, untyped-decorator]
    def broken(x: Tensor) -> Tensor:
        return called(left(x))

    assert torch.equal(
        torch.compile(lambda x: broken(x), backend=backend)(torch.ones(2)), torch.ones(2).sin().cos().sin()
    )
    assert compiled == ["sin"]


def test_dispatch_mode_stack() -> None:
    """The modes that are on."""
    with Seen() as one, Seen() as other:
        assert private.dispatch_mode_stack() == [one, other]
    assert private.dispatch_mode_stack() == []


def test_saving_hooks() -> None:
    """Within the context of hooks, also while one is called, with gradients off."""
    seen: list[bool] = []

    def pack(x: Tensor) -> Tensor:
        seen.append(private.saving_hooks(True) is not None and not torch.is_grad_enabled())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        torch.ones(2, requires_grad=True).sin()
    assert (seen, private.saving_hooks(True)) == ([True], None)


def test_jit_records() -> None:
    """While torch.jit.trace calls what it traces."""
    seen: list[bool] = []

    def traced(x: Tensor) -> Tensor:
        seen.append(private.jit_records())
        return x + 1

    torch.jit.trace(traced, torch.ones(2), check_trace=False)
    assert (seen, private.jit_records()) == ([True], False)


def test_what_tensors_and_operators_are() -> None:
    """How often one was written, whether two have the same memory, what an operator is called."""
    one = torch.zeros(4)
    before = private.version_of(one)
    view = one[1:].add_(1)
    assert private.version_of(one) == private.version_of(view) == before + 1
    assert private.storage_key(one) == private.storage_key(view) != private.storage_key(one.clone())
    assert private.schema_of(torch.ops.aten.add_.Tensor).name == "aten::add_"


@pytest.mark.usefixtures("alone")
def test_local_tensor() -> None:
    """Of a DTensor what this rank holds, with how it is cut; of any other tensor itself."""
    mesh = init_device_mesh("cpu", (1,))
    whole: Any = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
    assert private.local_tensor(whole) is whole._local_tensor
    assert private.spec_of(whole).placements == (Shard(0),)
    plain = torch.ones(2)
    assert private.local_tensor(plain) is plain


def test_traced() -> None:
    """True where calls are recorded, or tensors have no values; no mode and no fake tensor is left behind."""
    x = torch.ones(2)
    assert not private.traced(x)
    with Seen():
        assert private.traced(x)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    assert (private.is_fake(fake), private.traced(fake), private.is_fake(x)) == (True, True, False)


def test_a_torch_that_gathers_rows_of_dim_0_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, before anything is gathered; with the function, placements are told once."""
    param = SimpleNamespace(fsdp_placement=Shard(1))
    sharding: Any = SimpleNamespace(name="0.weight", dim=1, param=lambda: param)
    with monkeypatch.context() as lacking:
        lacking.delattr(_fsdp_collectives, "foreach_all_gather_copy_out")
        with pytest.raises(
            LayoutError, match=r"^0\.weight: torch .* has no foreach_all_gather_copy_out, .* shard dim 0$"
        ):
            Sharding.gather_as_rows(sharding)
    assert param.fsdp_placement == Shard(1)
    Sharding.gather_as_rows(sharding)
    told = param.fsdp_placement
    as_seen: Any = {}
    exec("def foreach_all_gather_copy_out(told):\n    return told.dim", as_seen)
    assert (told.dim, as_seen["foreach_all_gather_copy_out"](told)) == (1, 0)
    Sharding.gather_as_rows(sharding)
    assert param.fsdp_placement is told

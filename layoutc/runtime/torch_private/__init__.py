"""Private names of torch that layoutc needs: each appears in this folder once, with what is relied on.

tests/runtime/test_torch_private.py has a test for each; if a release of torch fails one, that says what has changed.
Those of FSDP2 are in `fsdp2`, `reductions` and `planned_groups`. Call stacks are read in `callers`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch._C._dynamo import eval_frame as _eval_frame
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor, _collective_utils  # noqa: F401  defines shard_dim_alltoall
from torch.distributed.utils import _sync_params_and_buffers
from torch.fx import traceback as _traceback
from torch.utils import _pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy as _CheckpointPolicy

from layoutc.runtime.torch_private import gloo_threads as gloo_threads  # which acts when Python ends

#: The dispatch modes that are on, the outermost first.
dispatch_mode_stack: Callable[[], list[Any]] = _get_current_dispatch_mode_stack

#: As a class's `__torch_function__`: operators reach `__torch_dispatch__` with the tensors as they are.
no_torch_function: Any = torch._C._disabled_torch_function_impl

#: Inside, functions get tensors of classes with a `__torch_function__` of their own as if they had none.
without_torch_function: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass

#: A decorator: torch.compile leaves the function to eager code, and what it calls. It imports the compiler at the first
#: call, as making any optimizer does, and not where it decorates.
left_by_compilers: Callable[[Any], Any] = torch._disable_dynamo  # type: ignore[attr-defined]

#: How many dispatch modes are on: tracers, counters, debuggers.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack

#: Whether autocast is on for CPUs or CUDA, in less time than to ask of one. Other kinds of devices may not be seen.
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled

#: Whether torch.profiler records.
profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled


def passed_over_by_compilers(function: Any) -> Any:
    """A decorator for what torch calls: where torch.compile runs it as it is, after a break of its graph, it is not
    compiled by itself, nor what it calls. Costs calls nothing."""
    skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))
    return function


#: Whether torch.jit.trace records calls.
jit_records: Callable[[], bool] = torch._C._is_tracing

#: The innermost transform of torch.func (grad, vmap, ...) that calls are made in; None outside of all.
transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack

#: Whether a tensor is one that a transform works with, which may be left when it has ended.
is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor

#: The product of two quantized matrices: `torch.nn.functional.scaled_mm`, with enums as numbers. Python reaches it in
#: less time by this name than by that of the operator.
scaled_mm: Callable[..., Tensor] = torch._scaled_mm_v2

#: The same for one scale of each matrix, from before there were others. Inductor calls it in half of the host's time.
scaled_mm_of_tensors: Callable[..., Tensor] = torch._scaled_mm

#: Whether scaled_mm multiplies on CPUs, as it does since torch 2.13 at the latest.
scaled_mm_on_cpus: bool = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")

#: The product of groups of rows by matrices of their own, both quantized: with one scale each, which all releases can
#: trace; and with several, which is `torch.nn.functional.scaled_grouped_mm` with enums as numbers.
scaled_grouped_mm: Callable[..., Tensor] = torch.ops.aten._scaled_grouped_mm.default
scaled_grouped_mm_v2: Callable[..., Tensor] = torch.ops.aten._scaled_grouped_mm_v2.default

#: Whether the second can be traced, as it can since torch 2.14.
scaled_grouped_mm_v2_is_traced: bool = torch._C._dispatch_has_kernel_for_dispatch_key(
    "aten::_scaled_grouped_mm_v2", "Meta"
)

#: The product of groups of rows in high precision: `torch.nn.functional.grouped_mm` calls it.
grouped_mm: Callable[..., Tensor] = torch._grouped_mm

#: Values and leaves of nested lists, tuples and dicts.
tree_map: Callable[..., Any] = _pytree.tree_map
tree_leaves: Callable[..., list[Any]] = _pytree.tree_leaves

#: Copies the second list's tensors into the first's, in few launches.
foreach_copy_: Callable[[list[Tensor], list[Tensor]], Any] = torch._foreach_copy_

#: The larger of each pair of two lists' entries, in few launches.
foreach_maximum: Any = torch._foreach_maximum

#: The operators that functional collectives, and so DTensor, run; group names are strings.
c10d_functional: Any = torch.ops._c10d_functional

#: DTensor's operators; `shard_dim_alltoall` moves a cut from one dim to another.
dtensor_ops: Any = torch.ops._dtensor

#: The result of a functional collective: it waits when it is first used.
AsyncCollectiveTensor: Any = functional.AsyncCollectiveTensor

#: The function by which DistributedDataParallel sends the first rank's weights when it is constructed.
ddp_sends_weights: Callable[..., Any] = _sync_params_and_buffers


#: How often a tensor was written into, as autograd counts it. Raises RuntimeError for one that inference mode made.
version_of: Callable[[Tensor], int] = attrgetter("_version")

#: What an operator is called, takes and writes.
schema_of: Callable[[Any], Any] = attrgetter("_schema")

#: How a DTensor is cut, over which mesh.
spec_of: Callable[[Any], Any] = attrgetter("_spec")


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, below autograd; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def storage_key(tensor: Tensor) -> int:
    """What tells a tensor's memory apart while that lives, also from other memory at the same address."""
    key: int = tensor.untyped_storage()._cdata
    return key


def changed(known: Mapping[str, bool]) -> str:
    """Those of FSDP2's names that this torch has not, or not as they are known; "" if it has all."""
    return ", ".join(name for name, found in known.items() if not found)


@cache
def say_changed(names: str, what: str) -> None:
    """Warns, once for each text, that FSDP2's own steps are taken for `what`, since torch has changed some names."""
    warnings.warn(
        f"torch {torch.__version__} has changed {names} of FSDP2, so {what} take FSDP2's own steps: the same bytes, in "
        "more time of the host; `layoutc doctor` says which releases layoutc knows",
        RuntimeWarning,
        stacklevel=2,
    )


_left: set[str] = set()  # why groups are


def say_left(name: str, reason: str) -> None:
    """Warns, once for each reason, that FSDP2's own steps gather a parameter and its group."""
    if reason in _left:
        return
    _left.add(reason)
    warnings.warn(
        f"{name}: FSDP2's own steps gather this weight and its group, because {reason}. The bytes are the same; the "
        "host takes longer. Further weights that take FSDP2's own path for the same reason are not listed.",
        RuntimeWarning,
        stacklevel=2,
    )


def process_group(name: str) -> dist.ProcessGroup:
    """The process group of a name (`group.group_name`). Raises RuntimeError if there is none."""
    group: Any = _resolve_process_group(name)  # type: ignore[arg-type]
    return group  # type: ignore[no-any-return]


def store_of_all() -> Any:
    """The key-value store by which all ranks of the default group found one another."""
    return dist.distributed_c10d._get_default_store()


def collectives_so_far(group: dist.ProcessGroup) -> int:
    """How many collectives a group has begun: before one, the same number on all ranks that will take part."""
    count: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return count


def traced(x: Tensor) -> bool:
    """True while calls are recorded: by torch.compile, torch.export, make_fx or another dispatch mode."""
    if torch.compiler.is_compiling():
        return True
    return is_fake(x) or dispatch_modes() > 0


def is_fake(x: Tensor) -> bool:
    """True for the tensors without values that torch traces with."""
    return isinstance(x, (FakeTensor, FunctionalTensor))


def raw_stream(device_index: int) -> int:
    """The current stream of a card, as a number, without a torch.cuda.Stream, which takes several times as long."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def stream_key(device_index: int) -> tuple[int, int, int]:
    """What tells the current stream of a card apart: its number, the card, and the kind of device."""
    key: tuple[int, int, int] = torch._C._cuda_getCurrentStream(device_index)
    return key


def set_stream(key: tuple[int, int, int]) -> None:
    """Makes the stream of a key the current one of its card, and the card the current one."""
    torch._C._cuda_setStream(stream_id=key[0], device_index=key[1], device_type=key[2])


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply`, without what it does in Python before: defaults, transforms of torch.func, tensors that these
    have left. That takes a third of an empty function's time until torch 2.13. For calls outside of all that, and of
    traces."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def current_card() -> int:
    """The current card, in a process that has used one, without asking for that first."""
    return torch._C._cuda_getDevice()


def in_backward() -> bool:
    """True while autograd runs a backward pass, its hooks included."""
    return torch._C._current_graph_task_id() != -1


def keeping_version(*tensors: Tensor) -> AbstractContextManager[None]:
    """Inside, writes don't raise the tensors' versions, so autograd does not consider saved tensors modified."""
    context: AbstractContextManager[None] = torch.autograd._unsafe_preserve_version_counter(tensors)  # type: ignore[attr-defined]
    return context


def reset_version(tensor: Tensor) -> None:
    """Makes the tensor one that nobody has written into, as autograd counts it."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (0,))


def set_element(state: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Puts a value into a nested state dict, at a path as torch.distributed.checkpoint gives it."""
    from torch.distributed.checkpoint._traverse import set_element  # a slow import that only loads need

    set_element(state, path, value)


def lower_in_inductor(operator: Any, lower: Callable[..., Any]) -> None:
    """Has Inductor compute an operator by `lower`(its lowerings, *arguments), where tensors are of Inductor's own kind.

    Inductor is imported by whoever compiles with it; that takes a second, so it is not imported for this alone.
    """
    from torch._inductor import lowering

    if operator not in lowering.lowerings:
        lowering.register_lowering(operator, type_promotion_kind=None)(lambda *args: lower(lowering.lowerings, *args))


def lowered_node() -> Any:
    """The node of the traced graph that Inductor lowers, in a function that `lower_in_inductor` was given."""
    from torch._inductor.virtualized import V

    return V.graph.current_node


def called_in_inductor(operator: Any, *args: Any, reuses: bool = True) -> list[Any]:
    """What an operator that returns several tensors is to Inductor, in such a function: a call of it.

    reuses: whether other results may be written into its memory once nobody reads it any more.
    """
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    made: list[Any] = fallback_handler(operator, add_to_fallback_set=False)(*args)  # type: ignore[no-untyped-call]
    if not reuses:
        V.graph.never_reuse_buffers.update(one.get_name() for one in made)
    return made


def call_in_inductor(operator: str, function: str) -> None:
    """Has graphs that Inductor writes in Python from now on call a function in the place of an operator.

    An operator that Python computes is called through C++ and back, which takes longer than most of ours. operator:
    such as "torch.ops.aten.add.Tensor". function: an expression for what is called with the same arguments. Only to
    be called once Inductor is imported.
    """
    from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen

    def write(node: Any, writeline: Callable[[str], None]) -> None:
        args = ", ".join([*node.codegen_args(), *node.codegen_kwargs()])
        writeline(f"{node.get_name()} = {function}({args})")

    CUSTOM_EXTERN_KERNEL_CODEGEN.setdefault(operator, CustomCodegen(python=write))


@contextmanager
def computed_in_backward() -> Iterator[None]:
    """Nodes that AOTAutograd records inside are computed in backward, even where saving their results takes no more
    memory than saving what they are computed from. Elsewhere it does nothing."""
    if not _traceback.has_preserved_node_meta():
        yield
        return
    meta = _traceback.current_meta
    before = meta.get("recompute")
    meta["recompute"] = _CheckpointPolicy.MUST_RECOMPUTE
    try:
        yield
    finally:
        if before is None:
            del meta["recompute"]
        else:
            meta["recompute"] = before

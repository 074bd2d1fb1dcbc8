"""Private names of torch that layoutc needs: each appears in this folder once, with what layoutc relies on.

tests/runtime/test_torch_private.py tests each of them; a failure with a new torch shows what has changed. FSDP2's names
are in `fsdp2`, `reductions` and `planned_groups`. `callers` reads call stacks.
"""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, wraps
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

from layoutc.runtime.torch_private import gloo_threads as gloo_threads  # registers an exit handler

#: The active dispatch modes, outermost first.
dispatch_mode_stack: Callable[[], list[Any]] = _get_current_dispatch_mode_stack

#: As a class's `__torch_function__`: operators reach `__torch_dispatch__` with unchanged tensors.
no_torch_function: Any = torch._C._disabled_torch_function_impl

#: A context in which torch ignores the `__torch_function__` of tensor subclasses.
without_torch_function: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass

#: A decorator: torch.compile runs the function, and what it calls, eagerly. It imports the compiler at the first call,
#: as constructing any optimizer does, not when it decorates.
left_by_compilers: Callable[[Any], Any] = torch._disable_dynamo  # type: ignore[attr-defined]

#: The number of active dispatch modes: tracers, counters, debuggers.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack

#: Whether autocast is on for CPUs or CUDA; faster than asking for one device type. May miss other device types.
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled

#: The hooks of `torch.autograd.graph.saved_tensors_hooks` that are on; None without any, with True as the argument.
saving_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks

#: Whether torch.profiler is recording.
profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled


def passed_over_by_compilers(function: Any) -> Any:
    """A decorator for functions that torch calls: when a graph break makes torch.compile run the function eagerly,
    neither it nor what it calls is compiled separately. It adds no overhead to calls."""
    skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))
    return function


def with_load_hooks(load: Callable[[Any, dict[str, Any]], None]) -> Callable[[Any, dict[str, Any]], None]:
    """A decorator: an optimizer's `load_state_dict` calls the hooks that users have registered, as torch's own does."""

    @wraps(load)
    def loads(self: Any, state_dict: dict[str, Any]) -> None:
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            given = hook(self, state_dict)
            state_dict = state_dict if given is None else given
        load(self, state_dict)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    return loads


#: Whether torch.jit.trace is recording.
jit_records: Callable[[], bool] = torch._C._is_tracing

#: The innermost active transform of torch.func (grad, vmap, ...); None without one.
transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack

#: Whether a transform wraps a tensor; wrapped tensors may outlive the transform.
is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor

#: The product of two quantized matrices: `torch.nn.functional.scaled_mm`, with enums as numbers. Calls by this name
#: have less Python overhead than by the operator's.
scaled_mm: Callable[..., Tensor] = torch._scaled_mm_v2

#: The older function, for one scale per matrix. Inductor's calls of it take half the host time.
scaled_mm_of_tensors: Callable[..., Tensor] = torch._scaled_mm

#: Whether scaled_mm supports CPUs, as in torch 2.13 and later.
scaled_mm_on_cpus: bool = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")

#: The product of quantized groups of rows, each by its own quantized matrix. The first has one scale per operand,
#: and all releases can trace it; the second, several: `torch.nn.functional.scaled_grouped_mm`, with enums as numbers.
scaled_grouped_mm: Callable[..., Tensor] = torch.ops.aten._scaled_grouped_mm.default
scaled_grouped_mm_v2: Callable[..., Tensor] = torch.ops.aten._scaled_grouped_mm_v2.default

#: Whether the second can be traced, as in torch 2.14 and later.
scaled_grouped_mm_v2_is_traced: bool = torch._C._dispatch_has_kernel_for_dispatch_key(
    "aten::_scaled_grouped_mm_v2", "Meta"
)

#: The product of groups of rows in high precision, which `torch.nn.functional.grouped_mm` calls.
grouped_mm: Callable[..., Tensor] = torch._grouped_mm

#: Map over nested lists, tuples and dicts, and list their leaves.
tree_map: Callable[..., Any] = _pytree.tree_map
tree_leaves: Callable[..., list[Any]] = _pytree.tree_leaves

#: Copies the second list's tensors into the first list's, in few launches.
foreach_copy_: Callable[[list[Tensor], list[Tensor]], Any] = torch._foreach_copy_

#: The elementwise maximum of each pair of tensors of two lists, in few launches.
foreach_maximum: Any = torch._foreach_maximum

#: The operators that functional collectives run, and thereby DTensor; group names are strings.
c10d_functional: Any = torch.ops._c10d_functional

#: Collectives that join the ranks' parts, and that add up and split; torch 2.11 has them under older names.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

#: DTensor's operators; `shard_dim_alltoall` moves sharding from one dim to another.
dtensor_ops: Any = torch.ops._dtensor

#: The result of a functional collective, which waits at its first use.
AsyncCollectiveTensor: Any = functional.AsyncCollectiveTensor

#: The function with which DistributedDataParallel broadcasts the first rank's weights in its constructor.
ddp_sends_weights: Callable[..., Any] = _sync_params_and_buffers


#: A tensor's version counter, which writes increment. Raises RuntimeError for inference tensors.
version_of: Callable[[Tensor], int] = attrgetter("_version")

#: An operator's schema: its name, its arguments and what it writes.
schema_of: Callable[[Any], Any] = attrgetter("_schema")

#: A DTensor's spec: its placements and mesh.
spec_of: Callable[[Any], Any] = attrgetter("_spec")


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, below autograd; other tensors are returned unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def storage_key(tensor: Tensor) -> int:
    """A unique key of a tensor's storage while that lives, even among storages at the same address."""
    key: int = tensor.untyped_storage()._cdata
    return key


def changed(known: Mapping[str, bool]) -> str:
    """The names of FSDP2 that this torch lacks or has changed; "" if none."""
    return ", ".join(name for name, found in known.items() if not found)


@cache
def say_changed(names: str, what: str) -> None:
    """Warns, once per text, that FSDP2's own steps handle `what`, since torch has changed some names."""
    warnings.warn(
        f"torch {torch.__version__} has changed {names} of FSDP2, so {what} take FSDP2's own steps: the same bytes, in "
        "more time of the host; `layoutc doctor` says which releases layoutc knows",
        RuntimeWarning,
        stacklevel=2,
    )


_left: set[str] = set()  # reasons of `say_left` so far


def say_left(name: str, reason: str) -> None:
    """Warns, once per reason, that FSDP2's own steps gather a parameter and its group."""
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
    """The process group with a name (`group.group_name`). Raises RuntimeError if there is none."""
    group: Any = _resolve_process_group(name)  # type: ignore[arg-type]
    return group  # type: ignore[no-any-return]


def store_of_all() -> Any:
    """The key-value store with which the default group was set up."""
    return dist.distributed_c10d._get_default_store()


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta:
    """How long a group's collectives wait: the longest of its backends' timeouts."""
    backends: Any = [group._get_backend(device) for device in group._device_types]
    given = [getattr(getattr(one, "options", None), "_timeout", None) for one in backends]
    return max([one or dist.distributed_c10d.default_pg_timeout for one in given])


def collectives_so_far(group: dist.ProcessGroup) -> int:
    """How many collectives a group has started. Before a collective, all its ranks have the same number."""
    count: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return count


def traced(x: Tensor) -> bool:
    """True while torch.compile, torch.export, make_fx or another dispatch mode records calls."""
    if torch.compiler.is_compiling():
        return True
    return is_fake(x) or dispatch_modes() > 0


def is_fake(x: Tensor) -> bool:
    """True for the tensors without values that torch uses for tracing."""
    return isinstance(x, (FakeTensor, FunctionalTensor))


def raw_stream(device_index: int) -> int:
    """The current stream of a card, as a number; several times as fast as making a torch.cuda.Stream."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def stream_key(device_index: int) -> tuple[int, int, int]:
    """The key of a card's current stream: its number, the card, and the device type."""
    key: tuple[int, int, int] = torch._C._cuda_getCurrentStream(device_index)
    return key


def set_stream(key: tuple[int, int, int]) -> None:
    """Makes the stream of a key its card's current stream, and the card the current device."""
    torch._C._cuda_setStream(stream_id=key[0], device_index=key[1], device_type=key[2])


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its Python preamble for default arguments, torch.func transforms and tensors that these
    wrap. Up to torch 2.13, the preamble takes a third of an empty function's time. Only for calls that need none of it,
    and outside traces."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def current_card() -> int:
    """The current card, in a process that has already used CUDA: it does not check that."""
    return torch._C._cuda_getDevice()


def in_backward() -> bool:
    """True while autograd runs a backward pass, its hooks included."""
    return torch._C._current_graph_task_id() != -1


def keeping_version(*tensors: Tensor) -> AbstractContextManager[None]:
    """A context in which writes don't increment the tensors' versions: to autograd, saved tensors are unmodified."""
    context: AbstractContextManager[None] = torch.autograd._unsafe_preserve_version_counter(tensors)  # type: ignore[attr-defined]
    return context


def reset_version(tensor: Tensor) -> None:
    """Sets the tensor's version to 0, as if nobody had written into it."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (0,))


def set_element(state: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Puts a value into a nested state dict, at a path of torch.distributed.checkpoint."""
    from torch.distributed.checkpoint._traverse import set_element  # a slow import, needed only to load

    set_element(state, path, value)


def lower_in_inductor(operator: Any, lower: Callable[..., Any]) -> None:
    """Makes Inductor compute an operator by `lower`(its lowerings, *arguments), which gets Inductor's own tensors.

    Call it only where Inductor is imported already: the import takes a second.
    """
    from torch._inductor import lowering

    if operator not in lowering.lowerings:
        lowering.register_lowering(operator, type_promotion_kind=None)(lambda *args: lower(lowering.lowerings, *args))


def lowered_node() -> Any:
    """The graph node that Inductor is lowering, for functions passed to `lower_in_inductor`."""
    from torch._inductor.virtualized import V

    return V.graph.current_node


def called_in_inductor(operator: Any, *args: Any, reuses: bool = True) -> list[Any]:
    """Makes Inductor call an operator that returns several tensors, for functions passed to `lower_in_inductor`.

    reuses: whether Inductor may reuse the results' memory after their last use.
    """
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    made: list[Any] = fallback_handler(operator, add_to_fallback_set=False)(*args)  # type: ignore[no-untyped-call]
    if not reuses:
        V.graph.never_reuse_buffers.update(one.get_name() for one in made)
    return made


def call_in_inductor(operator: str, function: str) -> None:
    """Makes Inductor's Python code, from now on, call a function in place of an operator.

    A call of an operator implemented in Python goes through C++ and back, which takes longer than most of ours.
    operator: such as "torch.ops.aten.add.Tensor". function: an expression for the function, which is called with the
    same arguments. Call this only after Inductor is imported.
    """
    from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen

    def write(node: Any, writeline: Callable[[str], None]) -> None:
        args = ", ".join([*node.codegen_args(), *node.codegen_kwargs()])
        writeline(f"{node.get_name()} = {function}({args})")

    CUSTOM_EXTERN_KERNEL_CODEGEN.setdefault(operator, CustomCodegen(python=write))


@contextmanager
def computed_in_backward() -> Iterator[None]:
    """A context whose nodes AOTAutograd computes in backward, even if saving their results would take no more memory
    than saving their inputs. It has no effect outside AOTAutograd."""
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

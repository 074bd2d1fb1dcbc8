"""What holds memory: all storages that live, and those of planes that FSDP2 has gathered."""

from __future__ import annotations

import gc
from typing import Any

from torch import Tensor, nn

from layoutc.runtime.cast.tensor import CastOnGather
from layoutc.runtime.fsdp2 import hooks
from layoutc.runtime.sharding import registry
from layoutc.runtime.torch_private import gloo_threads, local_tensor
from layoutc.runtime.weight.tensor import QuantizedTensor


def look_at_what_comes() -> None:
    """Puts aside what earlier checks have left, compiled graphs among it: each look would go through all of it."""
    gc.collect()
    gc.freeze()


def live_bytes(expected: int | None = None) -> int:
    """Bytes of all storages that some tensor in this process holds; wrappers have none of their own.

    expected: where there are more, the least once gloo's threads have nothing to do, since they let go of what a
    collective filled after it is done. Objects that gc.freeze() has put aside are left out.
    """
    found = _bytes_now()
    for _ in range(3):
        if expected is not None and found > expected:
            gloo_threads.let_go()
            found = min(found, _bytes_now())
    return found


def _bytes_now() -> int:
    gc.collect()
    sizes: dict[int, int] = {}
    for found in gc.get_objects():
        if type(found) in (Tensor, nn.Parameter):
            storage = found.untyped_storage()
            if storage.nbytes():
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor that a gather of a parameter of `model` has filled, by name: FSDP2's outputs, planes of gathered
    weights, those that were joined, and the values of weights that are dequantized on gather.

    Left out is what a rank holds at all times: planes that cover all rows, and, in a group of one rank, its shard, or
    what was cast of it beside FSDP2's output, which stays until it is cast again.
    """
    found: dict[str, Tensor] = {}
    modules = set(model.modules())
    for param, _ in registry.parameters():
        if param._module_info.module not in modules or not hasattr(param, "_unsharded_param"):
            continue
        name = param._param_fqn or "a weight"
        tensors = {f"output {number}": output for number, output in enumerate(param.all_gather_outputs)}
        weight: Any = local_tensor(param._unsharded_param)
        shard = local_tensor(param.sharded_param)
        if hasattr(shard, "QUANTIZED"):
            known = registry.find(shard)
            assert known is not None, name
            tensors |= {f"joined {plane}": tensor for plane, tensor in hooks.gathered_of(known.param()).joined.items()}
            if not isinstance(weight, QuantizedTensor):
                tensors["values"] = weight
        if isinstance(weight, QuantizedTensor):
            tensors |= {plane: t for plane, t in weight.store.planes.items() if plane not in weight.LAYOUT.shared}
            own = getattr(shard.store, "planes", shard.store).values() if hasattr(shard, "store") else ()
            held = {plane.untyped_storage().data_ptr() for plane in own if plane.numel()}
            if isinstance(shard, CastOnGather) and param.mesh_info.shard_mesh_size == 1:
                outputs = {output.untyped_storage().data_ptr() for output in param.all_gather_outputs}
                held |= {t.untyped_storage().data_ptr() for t in tensors.values()} - outputs
            tensors = {n: t for n, t in tensors.items() if t.untyped_storage().data_ptr() not in held or not t.numel()}
        found |= {f"{name}: {kind}": tensor for kind, tensor in tensors.items()}
    return found


def assert_freed(model: nn.Module, when: str) -> int:
    """Fails where some gathered tensor still has memory; returns how many were looked at."""
    tensors = gathered(model)
    kept = {name: size for name, tensor in tensors.items() if (size := tensor.untyped_storage().nbytes())}
    assert not kept, f"after {when} these still hold bytes: {kept}"
    return len(tensors)

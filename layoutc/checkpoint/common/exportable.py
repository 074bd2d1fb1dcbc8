"""The model tensors that an export writes: deduplicated and checked, with their quantized classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from layoutc.runtime.cast.tensor import CastOnGather
from layoutc.runtime.errors import LayoutError, check_model
from layoutc.runtime.torch_private import local_tensor, storage_key
from layoutc.runtime.weight.tensor import QuantizedTensor


def state_of(source: nn.Module | Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors by name. If several names share memory, only the first is kept. Raises LayoutError for PEFT's names: no
    reader knows them, and PEFT layers compute more than their base."""
    check_model(source, "an export", or_state=True)
    state = source.state_dict(keep_vars=True) if isinstance(source, nn.Module) else source
    if wrapped := next((name for name in state if ".base_layer." in name), None):
        raise LayoutError(
            f"{wrapped} is the base of a layer with adapters. Merge them, and pass the state of the base, "
            "layoutc.integrations.peft.merged_state(model)"
        )
    tensors = {}
    seen = set()
    for name, value in state.items():
        if isinstance(value, Tensor) and (key := _identity(value.detach())) not in seen:
            seen.add(key)
            tensors[name] = value.detach()
    return tensors


def _identity(value: Tensor) -> Any:
    """A key that is equal for tensors with the same values in the same memory. All ranks agree, even on empty ones."""
    local = local_tensor(value)
    if isinstance(local, QuantizedTensor):
        return id(local.store.planes), tuple(value.shape)
    plain = local.plain if isinstance(local, CastOnGather) else local
    storage = id(plain) if plain.is_meta else storage_key(plain)
    return storage, plain.storage_offset(), tuple(value.shape), plain.stride()


def check_exportable(name: str, value: Tensor) -> None:
    """Raises LayoutError if a tensor is not a whole weight with values, or this rank is not in its mesh."""
    local = local_tensor(value)
    if local.is_meta:
        raise LayoutError(f"{name} is on the meta device and has no values to export: load the model first")
    if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
        raise LayoutError(f"{name} is sharded over ranks that don't include this one; pass their process_group")
    if not isinstance(local, QuantizedTensor):
        return
    local.check_readable()
    if local.transposed or (value is local and (local.store.halo.rows or local.peers == ())):
        raise LayoutError(f"{name}: {local.label()} is a view or a part of a weight; export the weight itself")
    if local.shape[-1:] != local.store.matrix[1:]:
        raise LayoutError(
            f"{name}: {local.label()} is a view with another shape than the weight; export the weight itself"
        )

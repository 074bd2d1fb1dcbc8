"""Which memory a wrapper says it has, to code that asks whether two tensors share theirs."""

from __future__ import annotations

import torch
from torch import Tensor

from layoutc.runtime import callers
from layoutc.runtime.errors import UnsupportedOperator
from layoutc.runtime.sharding.registry import Shard

# Torch's tracing takes a storage for one tensor's identity: the wrapper's must not be a plane's, which it sees as well.
_TRACING = ("torch._dynamo", "torch._functorch", "torch._subclasses", "torch._inductor", "torch.fx")
# These take an address for memory of numel() elements that they may copy; of 0 they know that there is none.
_STAGERS = ("torch.distributed._state_dict_utils", "torch.distributed.checkpoint._state_dict_stager")
_KERNELS = ("triton.",)  # reads, at an address, as many elements of the dtype as the tensor has


def untyped_storage(tensor: Shard) -> torch.UntypedStorage:
    """The storage in which the first plane of codes stands, or the values of a weight that is cast on gather: its
    address and its bytes; none on meta, or while FSDP2 has freed it.

    Views of a weight are found to share it, as are its other shapes. Weights that were quantized apart never are, not
    even where they were given one amax.

    It is not what numel() and element_size() of a quantized weight speak of: those, and `nbytes`, are of a dense copy.
    The bytes held are the sum over `planes()`. Raises as data_ptr.
    """
    plain = _held(tensor, callers.asking(), _TRACING)
    return torch.Tensor.untyped_storage(tensor) if plain is None else plain.untyped_storage()  # type: ignore[arg-type]


def data_ptr(tensor: Shard) -> int:
    """Where the first plane of codes begins, or the values of a weight that is cast on gather; of a view, where its own
    rows do. 0 on meta, and while FSDP2 has freed it.

    Equal for aliases, and for no two weights. An identity: what stands at the address of a quantized weight is codes,
    not numel() elements of its dtype. Raises UnsupportedOperator to a Triton kernel, which would take it for those.
    """
    plain = _held(tensor, callers.asking(), (*_TRACING, *_STAGERS))
    if plain is None or plain.is_meta or not plain.untyped_storage().nbytes():
        return 0
    return plain.data_ptr()


def _held(tensor: Shard, caller: str, untold: tuple[str, ...]) -> Tensor | None:
    """The plain tensor that says where a wrapper lies; None for callers that must not know, and while it is traced."""
    if caller.startswith(untold):
        return None
    found: Tensor | None = getattr(tensor, "_plain", None)
    if found is None:
        if caller.startswith(_KERNELS):
            raise UnsupportedOperator(
                f"a Triton kernel can't read {tensor._label()} as a tensor of its dtype: it holds codes; pass the "
                "kernel .dequantize(), or the tensors that .buffers() gives"
            )
        if not isinstance(getattr(tensor._planes, "base", tensor._planes), dict):
            return None
        shared = tensor.LAYOUT.shared
        found = next((plane for name, plane in tensor._planes.items() if name not in shared), None)
    return found if type(found) is Tensor else None

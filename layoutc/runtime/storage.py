"""Which memory a wrapper says it has, to code that asks whether two tensors share theirs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from layoutc.runtime.tensor import QuantizedTensor

# Torch's tracing takes a storage for one tensor's identity: the wrapper's must not be a plane's, which it sees as well.
_TRACING = ("torch._dynamo", "torch._functorch", "torch._subclasses", "torch._inductor", "torch.fx")


def untyped_storage(tensor: QuantizedTensor) -> torch.UntypedStorage:
    """The storage in which the first plane of codes stands: its address and its bytes; none on meta, or while FSDP2 has
    freed it.

    Views of a weight are found to share it, as are its other shapes. Weights that were quantized apart never are, not
    even where they were given one amax.

    It is not what numel() and element_size() speak of: those, and `nbytes`, are of a dense copy. The bytes held are the
    sum over `planes()`. `data_ptr()` of the tensor is 0, as of every wrapper, by which torch knows that there is no
    memory of that size to read.
    """
    caller = sys._getframe(1).f_globals.get("__name__", "")
    whole = getattr(tensor._planes, "base", tensor._planes)
    if isinstance(whole, dict) and not caller.startswith(_TRACING):
        codes = next((plane for name, plane in tensor._planes.items() if name not in tensor.LAYOUT.shared), None)
        if type(codes) is torch.Tensor:
            return codes.untyped_storage()
    return torch.Tensor.untyped_storage(tensor)

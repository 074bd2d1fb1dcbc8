"""The memory that a wrapper reports to code that asks whether two tensors share memory."""

from __future__ import annotations

import torch
from torch import Tensor

from layoutc.runtime import callers
from layoutc.runtime.errors import UnsupportedOperator
from layoutc.runtime.sharding.registry import Shard

# Tracing identifies tensors by their storage, and sees the planes as well: the wrapper's must not be one of theirs.
_TRACING = ("torch._dynamo", "torch._functorch", "torch._subclasses", "torch._inductor", "torch.fx")
# Stagers would copy numel() elements from an address; an address of 0 tells them that there is no such memory.
_STAGERS = ("torch.distributed._state_dict_utils", "torch.distributed.checkpoint._state_dict_stager")
_KERNELS = ("triton.",)  # a kernel would read numel() elements of the outer dtype at the address
_WRITERS = ("safetensors.",)  # so would a writer of files: codes, and whatever lies behind them


def untyped_storage(tensor: Shard) -> torch.UntypedStorage:
    """The storage of the first plane of codes, or of the values of a weight that is cast on gather. It is empty on meta
    and while FSDP2 has freed it.

    Views of a weight share it, whatever their shapes. Weights that were quantized separately never do, even if they
    were given the same amax tensor.

    Its size is not numel() * element_size(): those, and `nbytes`, describe a dense copy. A weight's bytes are the sum
    over `planes()`. Raises as data_ptr does.
    """
    plain = _addressed(tensor, callers.asking(), _TRACING)
    return torch.Tensor.untyped_storage(tensor) if plain is None else plain.untyped_storage()  # type: ignore[arg-type]


def data_ptr(tensor: Shard) -> int:
    """The address of the first plane of codes, or of the values of a weight that is cast on gather; for a view, of its
    own first row. 0 on meta and while FSDP2 has freed it.

    Aliases have the same address, and no two weights do. Use it as an identity only: a quantized weight has codes
    there, not numel() elements of its dtype. Raises UnsupportedOperator when a Triton kernel asks, or safetensors,
    which would read them as such.
    """
    caller = callers.asking()
    if caller.startswith(_WRITERS) and getattr(tensor, "_plain", None) is None:
        raise UnsupportedOperator(
            f"safetensors can't write {tensor._label()} as a tensor of its dtype: it holds codes; "
            "layoutc.checkpoint.export_safetensors(model, folder) writes its planes, or with dtype=torch.bfloat16 "
            "plain values; layoutc.integrations.transformers makes save_pretrained do so"
        )
    plain = _addressed(tensor, caller, (*_TRACING, *_STAGERS))
    if plain is None or plain.is_meta or not plain.untyped_storage().nbytes():
        return 0
    return plain.data_ptr()


def _addressed(tensor: Shard, caller: str, untold: tuple[str, ...]) -> Tensor | None:
    """The plain tensor whose memory a wrapper reports; None for callers in `untold`, and while it is traced."""
    if caller.startswith(untold):
        return None
    plain: Tensor | None = getattr(tensor, "_plain", None)
    if plain is None:
        if caller.startswith(_KERNELS):
            raise UnsupportedOperator(
                f"a Triton kernel can't read {tensor._label()} as a tensor of its dtype: it holds codes; pass the "
                "kernel .dequantize(), or the tensors that .buffers() gives"
            )
        if not isinstance(getattr(tensor._planes, "base", tensor._planes), dict):
            return None
        shared = tensor.LAYOUT.shared
        plain = next((plane for name, plane in tensor._planes.items() if name not in shared), None)
    return plain if type(plain) is Tensor else None

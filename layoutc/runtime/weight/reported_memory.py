"""The memory that a wrapper reports, to code that looks for shared memory and to array libraries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layoutc.runtime import callers
from layoutc.runtime.errors import UnsupportedOperator
from layoutc.runtime.sharding.registry import Shard
from layoutc.runtime.storage.planes import ScatteredPlanes

# Tracing identifies tensors by their storage, and also sees the planes, whose storage the wrapper must not report.
_TRACING = ("torch._dynamo", "torch._functorch", "torch._subclasses", "torch._inductor", "torch.fx")
# Stagers would copy numel() elements from an address; 0 means no memory.
_STAGERS = ("torch.distributed._state_dict_utils", "torch.distributed.checkpoint._state_dict_stager")
_KERNELS = ("triton.",)  # a kernel would read numel() elements of the outer dtype at the address
_WRITERS = ("safetensors.",)  # file writers would too: codes, and the bytes after them
_CODES = "holds codes, and no values in memory: .dequantize() is a copy of them"


class ReportedMemory:
    """Methods for which torch would report the wrapper's own address, which holds no values of its dtype."""

    def untyped_storage(self: Any) -> torch.UntypedStorage:
        """The storage of the first plane of codes, or of the values of a weight that is cast on gather. It is empty on
        meta and while FSDP2 has freed it.

        Views of a weight share it, whatever their shapes; weights quantized separately never do, even of one amax.

        Its size is not numel() * element_size(): those, and `nbytes`, describe a dense copy. A weight's bytes are the
        sum over `planes()`. Raises as data_ptr does.
        """
        plain = _addressed(self, callers.calling_module(), _TRACING)
        return torch.Tensor.untyped_storage(self) if plain is None else plain.untyped_storage()

    def data_ptr(self: Any) -> int:
        """The address of the first plane of codes, or of the values of a weight that is cast on gather; for a view, of
        its own first row. 0 on meta and while FSDP2 has freed it.

        Aliases have the same address, and no two weights do. Use it as an identity only: a quantized weight has codes
        there, not elements. Raises UnsupportedOperator for Triton kernels and safetensors.
        """
        caller = callers.calling_module()
        if caller.startswith(_WRITERS) and getattr(self, "_plain", None) is None:
            raise UnsupportedOperator(
                f"safetensors can't write {self.label()} as a tensor of its dtype: it holds codes; "
                "layoutc.checkpoint.export_safetensors(model, folder) writes its planes, or with dtype=torch.bfloat16 "
                "plain values; layoutc.integrations.transformers makes save_pretrained do so"
            )
        plain = _addressed(self, caller, (*_TRACING, *_STAGERS))
        if plain is None or plain.is_meta or not plain.untyped_storage().nbytes():
            return 0
        return plain.data_ptr()

    def contiguous(self: Any, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
        """As of a plain tensor: itself if it is contiguous, like whole rows; else a copy, as for some columns.

        The wrapper's strides, by which torch decides, are contiguous for some columns too.
        """
        planes = getattr(self.store, "planes", self.store)
        in_pieces = isinstance(planes, dict) and not all(map(Tensor.is_contiguous, planes.values()))
        if in_pieces or isinstance(planes, ScatteredPlanes):
            return self.clone()
        return torch.Tensor.contiguous(self, memory_format=memory_format)

    def numpy(self: Any, *, force: bool = False) -> Any:
        """The values as a numpy array, as torch.Tensor.numpy. For codes, a copy, and only with force=True.

        Raises RuntimeError where autograd would lose track, BufferError for codes without `force`.
        """
        values = None if force else self._memory()
        if values is None and not force:
            raise BufferError(f"{self.label()} {_CODES}, or .numpy(force=True)")
        return _values(self).numpy(force=force) if values is None else _untracked(self, values).numpy()

    def __array__(self: Any, dtype: Any = None, copy: bool | None = None) -> Any:
        """The array that numpy asks for: a copy, except of values that are cast on gather.

        Raises ValueError for codes with copy=False.
        """
        values = self._memory()
        if values is None and copy is False:
            raise ValueError(f"{self.label()} {_CODES}")
        array = _untracked(self, _values(self) if values is None else values).numpy()
        array = array if dtype is None else array.astype(dtype, copy=False)
        return array.copy() if copy and values is not None else array

    def tolist(self: Any) -> Any:
        """The values as nested lists of Python numbers."""
        return _values(self).tolist()

    def __dlpack__(self: Any, **options: Any) -> Any:
        """A DLPack capsule of values that are cast on gather. Raises BufferError for codes."""
        if (values := self._memory()) is None:
            raise BufferError(f"{self.label()} {_CODES}")
        return _untracked(self, values).__dlpack__(**options)

    @property
    def __cuda_array_interface__(self: Any) -> Any:
        """That of values that are cast on gather. Raises AttributeError for codes, so hasattr is False."""
        if (values := self._memory()) is None:
            raise AttributeError(f"{self.label()} {_CODES}")
        return _untracked(self, values).__cuda_array_interface__

    def _memory(self: Any) -> Tensor | None:
        """The memory of the values; None for codes."""
        return None if getattr(self, "_plain", None) is None else self.plain


def _values(tensor: Any) -> Tensor:
    memory: Tensor | None = tensor._memory()
    values: Tensor = tensor.detach().dequantize() if memory is None else memory
    return values


def _untracked(tensor: Any, values: Tensor) -> Tensor:
    if tensor.requires_grad:
        raise RuntimeError(f"{tensor.label()} requires grad: call .detach() first")
    return values


def _addressed(tensor: Shard, caller: str, untold: tuple[str, ...]) -> Tensor | None:
    """The plain tensor whose memory a wrapper reports; None for callers in `untold`, and while it is traced."""
    if caller.startswith(untold):
        return None
    plain: Tensor | None = getattr(tensor, "_plain", None)
    if plain is None:
        if caller.startswith(_KERNELS):
            raise UnsupportedOperator(
                f"a Triton kernel can't read {tensor.label()} as a tensor of its dtype: it holds codes; pass the "
                "kernel .dequantize(), or the tensors that .buffers() gives"
            )
        if not isinstance(tensor.store.base, dict):
            return None
        shared = tensor.LAYOUT.shared
        plain = next((plane for name, plane in tensor.store.planes.items() if name not in shared), None)
    return plain if type(plain) is Tensor else None

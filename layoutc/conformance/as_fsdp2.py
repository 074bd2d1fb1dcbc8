"""New tensors as FSDP2 asks for them: torch.distributed gets the class, and all other callers plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor


def _method(tensor: Tensor, name: str, *args: Any, **kwargs: Any) -> Tensor:
    made: Tensor = getattr(tensor, name)(*args, **kwargs)
    return made


#: (tensor, "new_zeros" or another method's name, its arguments) -> what FSDP2 gets from that call.
called: Callable[..., Any] = FunctionType(
    _method.__code__, {"__name__": "torch.distributed.fsdp", "__builtins__": __builtins__}
)

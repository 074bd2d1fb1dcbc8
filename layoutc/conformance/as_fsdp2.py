"""Makes new tensors as FSDP2 does: torch.distributed gets the class, all other callers get plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor


def _method(tensor: Tensor, name: str, *args: Any, **kwargs: Any) -> Tensor:
    made: Tensor = getattr(tensor, name)(*args, **kwargs)
    return made


#: (tensor, name of a method such as "new_zeros", its arguments) -> what FSDP2 gets from that call.
called: Callable[..., Any] = FunctionType(
    _method.__code__, {"__name__": "torch.distributed.fsdp", "__builtins__": __builtins__}
)

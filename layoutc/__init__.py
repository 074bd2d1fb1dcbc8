"""layoutc: from one layout spec to a quantized weight that shards, gathers and trains under PyTorch FSDP2.

The compiler needs no torch and importing this package imports none; what needs it is imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from layoutc.checkpoint.inspection import inspect
    from layoutc.runtime.agreement import check_ranks
    from layoutc.runtime.group_buffers import buffers_of
    from layoutc.runtime.init import cast_on_gather_, quantize_, quantized_init
    from layoutc.runtime.optim import MasterWeights
    from layoutc.runtime.precompute import precompute_amaxes
    from layoutc.runtime.strict import implicit_dequantizes, strict

_RUNTIME = {
    "MasterWeights": "layoutc.runtime.optim",
    "buffers_of": "layoutc.runtime.group_buffers",
    "cast_on_gather_": "layoutc.runtime.init",
    "check_ranks": "layoutc.runtime.agreement",
    "implicit_dequantizes": "layoutc.runtime.strict",
    "inspect": "layoutc.checkpoint.inspection",
    "precompute_amaxes": "layoutc.runtime.precompute",
    "quantize_": "layoutc.runtime.init",
    "quantized_init": "layoutc.runtime.init",
    "restore_tensor": "layoutc.runtime.stored",
    "strict": "layoutc.runtime.strict",
}

__all__ = [
    "MasterWeights",
    "__version__",
    "buffers_of",
    "cast_on_gather_",
    "check_ranks",
    "implicit_dequantizes",
    "inspect",
    "precompute_amaxes",
    "quantize_",
    "quantized_init",
    "strict",
]


def __getattr__(name: str) -> Any:
    if name not in _RUNTIME:
        raise AttributeError(f"module 'layoutc' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_RUNTIME[name]), name)

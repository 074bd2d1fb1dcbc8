"""layoutc compiles a layout spec into a quantized weight that shards, gathers and trains under PyTorch FSDP2.

The compiler does not need torch, and `import layoutc` does not import it. The runtime is imported at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from layoutc.checkpoint.inspection import inspect
    from layoutc.runtime.cast.precompute import precompute_amaxes
    from layoutc.runtime.fsdp2.exchange import exchange_gradients, explain_gradients
    from layoutc.runtime.fsdp2.tokens import exchange_tokens
    from layoutc.runtime.optim.by_rule import AdamW
    from layoutc.runtime.product_mode import dequantize, products
    from layoutc.runtime.products.choice import products_without_kernel
    from layoutc.runtime.products.explain import explain_products
    from layoutc.runtime.products.per_weight_mode import set_products_
    from layoutc.runtime.quantize.weights import buffers_of
    from layoutc.runtime.strict import implicit_dequantizes, strict
    from layoutc.runtime.train.check_ranks import check_ranks
    from layoutc.runtime.train.convert import cast_on_gather_, quantize_, quantized_init
    from layoutc.runtime.train.coverage import coverage
    from layoutc.runtime.train.master_weights import MasterWeights
    from layoutc.runtime.train.merging import merge_, unmerge_

_RUNTIME = {
    "AdamW": "layoutc.runtime.optim.by_rule",
    "MasterWeights": "layoutc.runtime.optim.by_rule",
    "buffers_of": "layoutc.runtime.quantize.weights",
    "cast_on_gather_": "layoutc.runtime.train.convert",
    "check_ranks": "layoutc.runtime.train.check_ranks",
    "coverage": "layoutc.runtime.train.coverage",
    "dequantize": "layoutc.runtime.product_mode",
    "exchange_gradients": "layoutc.runtime.fsdp2.exchange",
    "exchange_tokens": "layoutc.runtime.fsdp2.tokens",
    "explain_gradients": "layoutc.runtime.fsdp2.exchange",
    "explain_products": "layoutc.runtime.products.explain",
    "implicit_dequantizes": "layoutc.runtime.strict",
    "inspect": "layoutc.checkpoint.inspection",
    "merge_": "layoutc.runtime.train.merging",
    "precompute_amaxes": "layoutc.runtime.cast.precompute",
    "products": "layoutc.runtime.product_mode",
    "products_without_kernel": "layoutc.runtime.products.choice",
    "quantize_": "layoutc.runtime.train.convert",
    "quantized_init": "layoutc.runtime.train.convert",
    "restore_tensor": "layoutc.runtime.weight.stored_form",
    "set_products_": "layoutc.runtime.products.per_weight_mode",
    "strict": "layoutc.runtime.strict",
    "unmerge_": "layoutc.runtime.train.merging",
}

__all__ = [
    "AdamW",
    "MasterWeights",
    "__version__",
    "buffers_of",
    "cast_on_gather_",
    "check_ranks",
    "coverage",
    "dequantize",
    "exchange_gradients",
    "exchange_tokens",
    "explain_gradients",
    "explain_products",
    "implicit_dequantizes",
    "inspect",
    "merge_",
    "precompute_amaxes",
    "products",
    "products_without_kernel",
    "quantize_",
    "quantized_init",
    "set_products_",
    "strict",
    "unmerge_",
]


def __getattr__(name: str) -> Any:
    if name not in _RUNTIME:
        raise AttributeError(f"module 'layoutc' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_RUNTIME[name]), name)

"""torchtitan's export to Hugging Face's names, of quantized models: plain values, fused QKV cut apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from layoutc.integrations.packages import needs
from layoutc.integrations.plain_values import plain
from layoutc.runtime.weight.tensor import QuantizedTensor

with needs("torchtitan", "torchtitan"):
    from torchtitan.models.common.attention import FusedQKVLinear


def keep_fused(model: nn.Module) -> None:
    """State dicts of the model have one weight of fused QKV where it is quantized: cuts between heads may be inside of
    blocks."""
    for module in model.modules():
        if isinstance(module, FusedQKVLinear) and isinstance(module.wqkv.weight.data, QuantizedTensor):
            for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
                hooks.clear()


def exporting(adapter: type) -> type:
    """A model's state-dict adapter, whose `to_hf` gives plain values.

    A quantized weight of fused QKV is one weight in state dicts. torchtitan's adapters don't know its name, and leave
    out what they don't know. So its values are cut here. Collective: each rank gets all values.
    """

    class Exporting(adapter):
        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            """As torchtitan's own of a plain model."""
            values = plain(state_dict)
            for prefix, config, _, _ in self.model_config.traverse(FusedQKVLinear.Config):
                heads = config.n_heads // config.n_kv_heads
                module = SimpleNamespace(head_dim=config.head_dim, heads_per_kv=heads, r_dim=heads + 2)
                FusedQKVLinear._split_qkv_on_save(module, values, f"{prefix}.", {})
            made: dict[str, Any] = super().to_hf(values)
            return made

    return Exporting


def refuse_import(checkpoint: Any, use: str) -> None:
    """Raises ValueError for a config that loads Hugging Face's files into quantized weights.

    torchtitan would fill the plain values that `to_hf` gives, and drop q, k and v: the model has one fused weight.
    """
    if use == "quantized" and checkpoint.initial_load_in_hf:
        raise ValueError(
            "--checkpoint.initial-load-in-hf loads plain values, and with --layoutc.use quantized weights are codes: "
            "load them with --layoutc.use cast_on_gather"
        )

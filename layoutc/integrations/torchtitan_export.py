"""torchtitan: exports plain values under Hugging Face's names, with fused QKV split, and sends tokens between
expert-parallel ranks as a recipe's codes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

import layoutc
from layoutc.integrations.packages import needs
from layoutc.integrations.plain_values import plain
from layoutc.runtime.weight.tensor import QuantizedTensor

with needs("torchtitan", "torchtitan"):
    from torchtitan.config.override import derive
    from torchtitan.models.common.attention import FusedQKVLinear
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher


def keep_fused(model: nn.Module) -> None:
    """Keeps quantized fused QKV one weight in the model's state dicts: cuts between heads may split blocks."""
    for module in model.modules():
        if isinstance(module, FusedQKVLinear) and isinstance(module.wqkv.weight.data, QuantizedTensor):
            for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
                hooks.clear()


def exporting(adapter: type) -> type:
    """Makes a subclass of a model's state-dict adapter whose `to_hf` returns plain values.

    A quantized fused QKV is one weight in state dicts. torchtitan's adapters drop names that they don't know, and its
    name is one of these, so its values are split here. Collective: each rank gets all values.
    """

    class Exporting(adapter):
        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            """Returns what torchtitan's adapter returns for a plain model."""
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

    torchtitan would load into the plain values from `to_hf`, and drop q, k and v, since the model has one fused weight.
    """
    if use == "quantized" and checkpoint.initial_load_in_hf:
        raise ValueError(
            "--checkpoint.initial-load-in-hf loads plain values, and with --layoutc.use quantized weights are codes: "
            "load them with --layoutc.use cast_on_gather"
        )


class Dispatcher(AllToAllTokenDispatcher):
    """torchtitan's all-to-all dispatcher, with layoutc.exchange_tokens for both exchanges."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        """recipe: for tokens sent to experts. gradients: for gradients sent to experts. "": they are sent unchanged."""

        recipe: str = ""
        gradients: str = ""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._recipe, self._gradients = config.recipe or None, config.gradients or None

    def _dispatch_token_exchange(self, x: Tensor, pg: Any, takes: list[int], sends: list[int]) -> Tensor:
        return layoutc.exchange_tokens(x, takes, sends, pg, recipe=self._recipe)

    def _combine_token_exchange(self, x: Tensor, pg: Any, takes: list[int], sends: list[int]) -> Tensor:
        return layoutc.exchange_tokens(x, takes, sends, pg, gradients=self._gradients)


def send_as_codes(model: Any, recipe: str, gradients: str) -> None:
    """Makes the dispatchers of a model's config send codes. Raises ValueError for a model without dispatchers, or with
    ones that don't use torch's all-to-all."""
    experts = [layer.moe.routed_experts for layer in model.layers if getattr(layer, "moe", None) is not None]
    others = {type(one.token_dispatcher) for one in experts} - {AllToAllTokenDispatcher.Config}
    if not experts or others:
        why = f"dispatches them by {', '.join(one.__qualname__ for one in others)}" if others else "has no experts"
        raise ValueError(
            f"layoutc.tokens: torchtitan's AllToAllTokenDispatcher alone sends {recipe or gradients}, and this model "
            f'{why}: choose a config of experts whose comm_backend is "standard"'
        )
    for one in experts:
        one.token_dispatcher = derive(one.token_dispatcher, Dispatcher.Config, recipe=recipe, gradients=gradients)

"""torchtitan: export to Hugging Face's names, of plain values, fused QKV cut apart; and tokens that travel between
expert-parallel ranks as codes of a recipe."""

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


class Dispatcher(AllToAllTokenDispatcher):
    """torchtitan's dispatcher by all-to-all, with both of its exchanges by layoutc.exchange_tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        """recipe: of tokens on their way to experts. gradients: of gradients on theirs. "": as they are."""

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
    """Makes the dispatchers of a model's config send codes. Raises ValueError for a model without any, and for one that
    dispatches by other means than torch's all-to-all."""
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

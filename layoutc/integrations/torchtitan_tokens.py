"""torchtitan: tokens that travel between expert-parallel ranks as codes of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

import layoutc
from layoutc.integrations.packages import needs

with needs("torchtitan", "torchtitan"):
    from torchtitan.config.override import derive
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher


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
